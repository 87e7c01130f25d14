"""Collectives and transports."""
