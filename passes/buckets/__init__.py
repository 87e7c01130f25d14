"""Passes that lay parameters in buckets and update each bucket at once."""
