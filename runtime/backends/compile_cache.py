"""Share compilation between the ranks of one machine: each begins with other pieces and loads the rest from disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from filelock import FileLock, Timeout

from zerograph._torch import cache_folder

T = TypeVar("T")

# Seconds to wait for another rank's lock. After that a rank compiles the piece itself.
_LOCK_TIMEOUT = 120.0


def share(tasks: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Run every task; those that another process on this machine is running come last.

    A task must store what it compiles in a cache on disk, so that the second process loads it.

    Args:
        tasks: by a key that identifies what is compiled.

    Returns:
        The result of each task, by key.
    """
    folder = Path(cache_folder()) / "zerograph"
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, T] = {}
    for limit in (0.0, _LOCK_TIMEOUT):
        for key in _rotate([key for key in tasks if key not in results]):
            try:
                with FileLock(folder / f"{key}.lock").acquire(timeout=limit):
                    results[key] = tasks[key]()
            except Timeout:
                if limit:
                    results[key] = tasks[key]()
    return results


def _rotate(keys: list[str]) -> list[str]:
    """Rotate the keys by this rank's share, so that ranks begin with different ones."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    start = len(keys) * rank // ranks
    return keys[start:] + keys[:start]
