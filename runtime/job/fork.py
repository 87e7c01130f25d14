"""Detect processes forked from a rank: they inherit its connections to other ranks, but none of its threads."""

from __future__ import annotations

import os

import torch.distributed as dist

from zerograph.errors import CommunicationError

# In a forked process, the default process group of its parent.
_inherited: dist.ProcessGroup | None = None


def _remember_fork() -> None:
    global _inherited
    if dist.is_available() and dist.is_initialized():
        _inherited = dist.group.WORLD


if hasattr(os, "register_at_fork"):  # Windows has no forks.
    os.register_at_fork(after_in_child=_remember_fork)


def is_child() -> bool:
    """Return whether this process was forked and its process group is its parent's."""
    return _inherited is not None and dist.is_initialized() and dist.group.WORLD is _inherited


def refuse() -> None:
    """Raise in a forked process, whose messages to other ranks would be taken for its parent's.

    Raises:
        CommunicationError: this process was forked from a rank of a job with several.
    """
    if is_child() and dist.get_world_size() > 1:
        raise CommunicationError(
            f"this process was forked from rank {dist.get_rank()} of {dist.get_world_size()}, and has its connections "
            "to the other ranks but not its threads: only that rank itself can call a graph\n"
            "Call the graph there. In workers of a DataLoader prepare data only; or start processes with the method "
            "'spawn'."
        )
