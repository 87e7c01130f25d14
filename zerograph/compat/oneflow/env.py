"""``flow.env``: the rank of this process, and the number of ranks and machines."""

from __future__ import annotations

from zerograph.runtime.job.environment import local_rank
from zerograph.runtime.job.launchers import number_of
from zerograph.runtime.job.process_group import rank, world_size


def get_rank() -> int:
    """Return this process's rank, from 0; join the job if necessary."""
    return rank()


def get_world_size() -> int:
    """Return the number of ranks of the job."""
    return world_size()


def get_local_rank() -> int:
    """Return this process's rank on its machine, from 0."""
    return local_rank()


def get_node_size() -> int:
    """Return the number of machines of the job, according to the launcher."""
    return world_size() // number_of("LOCAL_WORLD_SIZE", world_size(), least=1)
