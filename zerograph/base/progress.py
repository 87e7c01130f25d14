"""Report the progress of long operations to a listener, which exists only if a command shows progress."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass

from zerograph.base.contexts import given


@dataclass(frozen=True)
class Progress:
    """The progress of an operation that consists of equal parts.

    Attributes:
        of: the kind of parts: ``"passes"``, ``"candidates"``.
        done: number of parts that are done.
        total: number of all parts; 0 if there is no number.
        doing: the next part; empty after the last.
    """

    of: str
    done: int
    total: int
    doing: str = ""


Listener = Callable[[Progress], None]

# One for each thread: a listener does not hear of steps that other threads compile.
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def tell(of: str, done: int, total: int, doing: str = "") -> None:
    """Report progress to the listener, if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(Progress(of, done, total, doing))


def listening(listener: Listener) -> AbstractContextManager[None]:
    """Call the listener for progress that is reported inside the context."""
    return given(_listener, listener)
