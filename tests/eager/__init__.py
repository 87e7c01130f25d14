"""Global tensors outside of graphs."""
