"""``flow.env``: which process this is."""

from __future__ import annotations

from zerograph.runtime.job.environment import local_rank, number_of
from zerograph.runtime.job.process_group import rank, world_size


def get_rank() -> int:
    """This process's rank, from 0; joins the job if need be."""
    return rank()


def get_world_size() -> int:
    """How many ranks the job has."""
    return world_size()


def get_local_rank() -> int:
    """This process's number on its machine, from 0."""
    return local_rank()


def get_node_size() -> int:
    """How many machines the job runs on, as the launcher says."""
    return world_size() // number_of("LOCAL_WORLD_SIZE", world_size(), least=1)
