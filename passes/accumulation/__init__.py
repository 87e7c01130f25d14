"""Passes for micro-batches: time as a mesh dimension, then as a loop."""
