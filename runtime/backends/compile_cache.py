"""Ranks of one machine compile different things at the same time, and load from disk what another one compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from filelock import FileLock, Timeout

from zerograph._torch import cache_folder

Made = TypeVar("Made")

# A rank that holds a lock for longer is stuck; then everybody compiles for himself, which is slow but right.
_PATIENCE = 120.0


def share(tasks: Mapping[str, Callable[[], Made]]) -> dict[str, Made]:
    """The result of every task, by key; tasks that another process on this machine is at are done last.

    What a task compiles must go to a cache on disk, by which the second process is quick. A key says what is compiled.
    """
    folder = Path(cache_folder()) / "zerograph"
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, Made] = {}
    left = _rotated(list(tasks))
    while left:
        busy = []
        for key in left:
            try:
                with _lock(folder, key).acquire(timeout=0):
                    made[key] = tasks[key]()
            except Timeout:
                busy.append(key)
        if len(busy) == len(left):
            made[busy[0]] = _waited(folder, busy[0], tasks[busy[0]])
            busy = busy[1:]
        left = busy
    return made


def _rotated(keys: list[str]) -> list[str]:
    """Each rank begins somewhere else."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    start = len(keys) * rank // ranks
    return keys[start:] + keys[:start]


def _lock(folder: Path, key: str) -> FileLock:
    return FileLock(folder / f"{key}.lock")


def _waited(folder: Path, key: str, task: Callable[[], Made]) -> Made:
    try:
        with _lock(folder, key).acquire(timeout=_PATIENCE):
            return task()
    except Timeout:
        return task()
