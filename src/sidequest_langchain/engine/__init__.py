"""One Hugging Face model run over the tree of segments, by one thread."""
