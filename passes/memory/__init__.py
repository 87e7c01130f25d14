"""Passes for memory: offload, in-place writes, gather buffers, a memory budget."""
