"""Passes that give every tensor an SBP and insert boxing nodes."""
