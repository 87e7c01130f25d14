"""Passes that recompute values in backward instead of keeping them from forward."""
