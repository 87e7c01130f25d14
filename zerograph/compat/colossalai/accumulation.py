"""What goes by whole updates where several calls of the engine make one: loaders and schedules."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


class WholeUpdates:
    """A loader without the last batches, which make no update any more. All else is the loader's own.

    Args:
        loader: has a length.
        calls: so many batches make one update.
    """

    def __init__(self, loader: Iterable[Any], calls: int) -> None:
        self._loader, self._calls = loader, calls

    def __len__(self) -> int:
        length = len(self._loader)  # type: ignore[arg-type]
        return length - length % self._calls

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._loader), len(self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class EachUpdate:
    """A scheduler whose ``step()``, called with each call of the engine, counts once per update.

    Args:
        scheduler: the one that is stepped; all else is its own.
        calls: so many calls make one update.
    """

    def __init__(self, scheduler: LRScheduler, calls: int) -> None:
        self._scheduler, self._calls, self._count = scheduler, calls, 0

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler, on each call that makes an update."""
        self._count = (self._count + 1) % self._calls
        if not self._count:
            self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)
