"""Joining a job as ColossalAI's scripts do, and the configuration that they give along."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from zerograph.compat.colossalai import configuration
from zerograph.compat.notices import as_rank
from zerograph.compat.settings import Settings
from zerograph.errors import CommunicationError, ConfigError
from zerograph.runtime.job.environment import local_rank, number_of
from zerograph.runtime.job.process_group import connect

Configuration = Mapping[str, Any] | str | os.PathLike[str]

_latest: Settings | None = None


def launch(
    config: Configuration,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """Read the configuration, join the job and set the seed of all ranks.

    Args:
        config: a dict, or the path of a Python file; ``initialize()`` goes by it.
        rank: the rank of this process, from 0.
        world_size: number of processes.
        host: address of rank 0.
        port: port of rank 0.
        backend: ``"nccl"`` or ``"gloo"``; None: what fits this machine.
        local_rank: the number of this machine's GPU; None: the rank's, modulo how many it has.
        seed: of ``torch.manual_seed()``, and so of the graph's random numbers.
        verbose: rank 0 says that the job has begun.

    Raises:
        ConfigError: the configuration names a key or value that does not exist.
        CommunicationError: the ranks do not meet.
    """
    global _latest
    with as_rank(rank):
        settings = configuration.read(config)
    bracketed = f"[{host}]" if ":" in host else host
    connect(rank, world_size, f"tcp://{bracketed}:{port}", backend, local_rank)
    torch.manual_seed(seed)
    _latest = settings
    if verbose and rank == 0:
        print(f"zerograph: {world_size} rank(s), as ColossalAI would launch them", flush=True)


def launch_from_torch(
    config: Configuration, backend: str | None = None, seed: int = 1024, verbose: bool = True
) -> None:
    """Call :func:`launch` with the numbers that ``torchrun`` puts into the environment.

    Raises:
        ConfigError: the configuration names a key or value that does not exist.
        CommunicationError: not started by ``torchrun``, or the ranks do not meet.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        raise CommunicationError(
            f"launch_from_torch() found no {', '.join(missing)} in the environment\n"
            "Start with torchrun --nproc-per-node N script.py, or call launch() with the numbers."
        )
    world_size = number_of("WORLD_SIZE", least=1)
    rank, port = number_of("RANK", most=world_size - 1), number_of("MASTER_PORT", most=2**16 - 1)
    launch(config, rank, world_size, os.environ["MASTER_ADDR"], port, backend, local_rank(), seed, verbose)


def settings_of(config: Configuration | None) -> Settings:
    """Return the settings of ``config``; for None those of the last :func:`launch`.

    Raises:
        ConfigError: there is neither.
    """
    if config is not None:
        return configuration.read(config)
    if _latest is None:
        raise ConfigError("no configuration: call colossalai.launch(config, ...) before, or give initialize(config=)")
    return _latest
