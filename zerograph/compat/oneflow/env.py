"""``flow.env``: the rank of this process, and the number of ranks and machines."""

from __future__ import annotations

from zerograph.runtime.job.environment import local_rank as get_local_rank
from zerograph.runtime.job.launchers import number_of
from zerograph.runtime.job.process_group import rank as get_rank, world_size as get_world_size

__all__ = ["get_local_rank", "get_node_size", "get_rank", "get_world_size"]


def get_node_size() -> int:
    """Return the number of machines of the job, according to the launcher."""
    return get_world_size() // number_of("LOCAL_WORLD_SIZE", get_world_size(), least=1)
