"""Passes that merge, move and overlap collectives."""
