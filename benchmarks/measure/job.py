"""Seconds of what all ranks of a job do together."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist


def seconds(run: Callable[[], object]) -> float:
    """Return the seconds until ``run`` has returned on every rank, counted from when all have begun."""
    dist.barrier()
    began = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - began
