"""Blocks in which a variable or attributes have other values, or Python's garbage collection pauses."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from unittest.mock import patch

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
def replaced(entries: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace attributes inside the block: owner, name and other value of each."""
    with ExitStack() as stack:
        for owner, name, value in entries:
            stack.enter_context(patch.object(owner, name, value))
        yield


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the garbage collection inside the block, which makes many objects that stay.

    The collector would visit them, and all that the process has imported, several times: a third of the time that it
    takes to read a step from a file.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
