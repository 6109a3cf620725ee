"""What has to hold, and what it costs, on an accelerator: the stages of `benchmarks.gpu_check`."""
