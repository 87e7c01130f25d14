"""Utilities for every layer; nothing here depends on graphs."""
