"""Blocks inside which calls of prepared modules are those of the plain modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_plain: ContextVar[bool] = ContextVar("plain", default=False)


@contextlib.contextmanager
def plain_calls() -> Iterator[None]:
    """Return a block inside which prepared modules are called as plain ones."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def are_calls_plain() -> bool:
    """Return whether calls of prepared modules are those of the plain modules."""
    return _plain.get()
