"""A lock that lets one thread at a time use the graphs of a process."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field

import torch.distributed as dist

from zerograph.errors import InputError


@dataclass
class _GraphLock:
    """The lock, and the thread that holds it.

    Attributes:
        lock: the lock.
        thread: name of the thread.
        calls: its calls, outermost first.
        collective: number of these calls that may exchange data with other ranks.
        refused: the message of a call that was refused since the last step; other ranks have not seen it yet.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    thread: str = ""
    calls: list[str] = field(default_factory=list)
    collective: int = 0
    refused: str | None = None


# Tracing replaces functions of torch, and graphs share parameters and the job: so one lock serves all graphs.
_held = _GraphLock()


@dataclass(eq=False)
class one_thread(contextlib.ContextDecorator):  # noqa: N801
    """Hold the lock inside the context. Another thread waits; the same thread may enter again.

    No generator, which takes longer to enter and leave.

    In a job of several ranks a collective call does not wait for another one: the threads could run in another order on
    another rank, and exchange data with the wrong call.

    Args:
        call: name of the call in messages.
        collective: the call may exchange data with other ranks.

    Raises:
        InputError: another thread is inside, the job has several ranks, and both calls are collective.
    """

    call: str
    collective: bool = True

    def __enter__(self) -> None:
        if not _held.lock.acquire(blocking=False):
            # The other thread may empty the list meanwhile.
            others = _held.calls[:1]
            if self.collective and others and _held.collective and _several_ranks():
                _held.refused = (
                    f"two threads use graphs at the same time, among several ranks: {self.call} in thread "
                    f"{threading.current_thread().name} during {others[0]} in thread "
                    f"{_held.thread}\n"
                    "Which of them comes first may differ between ranks. Use graphs from one thread, or let the "
                    "threads call them in the same order on every rank."
                )
                raise InputError(_held.refused)
            _held.lock.acquire()
        _held.thread = threading.current_thread().name
        _held.calls.append(self.call)
        _held.collective += self.collective

    def __exit__(self, *_: object) -> None:
        _held.collective -= self.collective
        _held.calls.pop()
        _held.lock.release()


def check_refused() -> None:
    """Raise if a call of another thread was refused since the last check, so that the ranks that wait for it fail too.

    Raises:
        InputError: with the message of the last refusal.
    """
    message, _held.refused = _held.refused, None
    if message is not None:
        raise InputError(message)


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
