"""How far what takes long has come: reported to listeners, of which there are none unless a command shows progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Of so many like parts so many are done.

    Attributes:
        of: what they are: ``"passes"``, ``"candidates"``.
        doing: the part that comes next; nothing after the last.
        total: 0 where there are no parts to count.
    """

    of: str
    done: int
    total: int
    doing: str = ""


Listener = Callable[[Progress], None]

# Of this thread: steps that other threads compile are none of the listener's business.
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def tell(of: str, done: int, total: int, doing: str = "") -> None:
    """Say how far it is, to the listener if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(Progress(of, done, total, doing))


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Be told what happens within."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)
