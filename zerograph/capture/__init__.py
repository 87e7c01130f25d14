"""Tracing: from ``build()`` to one functional graph."""
