"""Passes that lower global tensors to local shapes and collectives."""
