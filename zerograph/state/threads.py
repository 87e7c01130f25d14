"""Let one thread at a time use the graphs of a process, among several ranks only where the order is certain."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.distributed as dist

from zerograph.errors import InputError


@dataclass
class _Turn:
    """The thread whose turn it is.

    Attributes:
        calls: what it has called, outermost first.
        collective: whether any of these calls exchanges with other ranks.
        refused: the message of a call that was refused since the last step, of which other ranks know nothing yet.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    thread: str = ""
    calls: list[str] = field(default_factory=list)
    collective: int = 0
    refused: str | None = None


# Tracing replaces functions of torch, and graphs share parameters and the job: one turn for all graphs of a process.
_turn = _Turn()


@contextlib.contextmanager
def one_thread(call: str, *, collective: bool = True) -> Iterator[None]:
    """Let one thread of the process in at a time; another one waits, and the same one may enter again.

    Among several ranks waiting could not be right for two calls that both exchange with other ranks: on each rank
    another thread might come first, and their exchanges would meet.

    Args:
        call: what is called, for messages.
        collective: it may exchange with other ranks.

    Raises:
        InputError: another thread is inside, among several ranks, and both calls are collective.
    """
    if not _turn.lock.acquire(blocking=False):
        # A list that another thread may empty meanwhile.
        others = _turn.calls[:1]
        if collective and others and _turn.collective and _several_ranks():
            _turn.refused = (
                f"two threads use graphs at the same time, among several ranks: {call} in thread "
                f"{threading.current_thread().name} during {others[0]} in thread "
                f"{_turn.thread}\n"
                "Which of them comes first may differ between ranks. Use graphs from one thread, or let the threads "
                "call them in the same order on every rank."
            )
            raise InputError(_turn.refused)
        _turn.lock.acquire()
    try:
        _turn.thread = threading.current_thread().name
        _turn.calls.append(call)
        _turn.collective += collective
        yield
    finally:
        _turn.collective -= collective
        _turn.calls.pop()
        _turn.lock.release()


def check_refused() -> None:
    """Raise if a call of another thread was refused: the ranks that wait for that call learn of it by the next one.

    Raises:
        InputError: once for each refusal or several of them.
    """
    message, _turn.refused = _turn.refused, None
    if message is not None:
        raise InputError(message)


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
