"""Backends: compile the emitted graph to a callable."""
