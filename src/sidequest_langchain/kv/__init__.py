"""The state: segments of a KV cache in a tree, and attention over them. Knows torch only."""
