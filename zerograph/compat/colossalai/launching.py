"""Join a job as ColossalAI's scripts do, and store the configuration that they pass."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from zerograph.compat.colossalai import configuration
from zerograph.compat.settings import Settings
from zerograph.errors import CommunicationError, ConfigError, ZeroGraphWarning
from zerograph.runtime.job.environment import local_rank
from zerograph.runtime.job.launchers import number_of
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
        config: a dict, or the path of a Python file; ``initialize()`` uses it.
        rank: the rank of this process, from 0.
        world_size: number of processes.
        host: address of rank 0.
        port: port of rank 0.
        backend: ``"nccl"`` or ``"gloo"``; None: ``"nccl"`` on machines with GPUs.
        local_rank: the number of this machine's GPU; None: the rank modulo the number of GPUs.
        seed: the argument of ``torch.manual_seed()``, from which the graph's random numbers follow.
        verbose: rank 0 prints a line.

    Raises:
        ConfigError: the configuration has an unknown key or value.
        CommunicationError: the ranks cannot connect.
    """
    global _latest
    with warnings.catch_warnings():
        if rank:
            # Rank 0 says it; this process has no rank yet, perhaps not in the environment either.
            warnings.simplefilter("ignore", ZeroGraphWarning)
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
    """Call :func:`launch` with the ranks and the address that ``torchrun`` puts into the environment.

    Raises:
        ConfigError: the configuration has an unknown key or value.
        CommunicationError: ``torchrun`` did not start this process, or the ranks cannot connect.
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
    """Return the settings of ``config``, or those of the last :func:`launch` if it is None.

    Raises:
        ConfigError: both are missing.
    """
    if config is not None:
        return configuration.read(config)
    if _latest is None:
        raise ConfigError("no configuration: call colossalai.launch(config, ...) before, or give initialize(config=)")
    return _latest
