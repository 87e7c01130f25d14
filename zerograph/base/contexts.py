"""Blocks in which a context variable has another value, or Python's garbage collection pauses."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def given(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give the variable this value inside the block."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the garbage collection inside the block, which makes many objects that stay.

    The collector would visit them, and all that the process has imported, several times: a third of the time that it
    takes to read a step from a file.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
