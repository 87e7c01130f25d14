"""Join the job that a launcher's environment variables describe; an error names the variable and its value."""

from __future__ import annotations

import contextlib
import os
import socket

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from zerograph.errors import CommunicationError


def number_of(name: str, default: int | None = None, least: int = 0, most: int | None = None) -> int:
    """Return an environment variable as a whole number.

    Args:
        name: the variable.
        default: returned if it is not set; None: it must be set.
        least, most: the range of allowed numbers.

    Raises:
        CommunicationError: it is not set and has no default, or is not a number in the range.
    """
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    with contextlib.suppress(ValueError):
        number = int(text or "")
        if number >= least and (most is None or number <= most):
            return number
    allowed = f"a whole number from {least} " + ("on" if most is None else f"to {most}")
    shown = "is not set" if text is None else f"is {text!r:.60}"
    raise CommunicationError(f"the environment variable {name} {shown}: it must be {allowed}, as torchrun sets it")


def local_rank() -> int:
    """Return this process's number on its machine; 0 if LOCAL_RANK is not set.

    Raises:
        CommunicationError: it is not a number.
    """
    # Some launchers set -1 if there is one process.
    return number_of("LOCAL_RANK", 0, least=-1)


def init_from_environment(backend: str) -> None:
    """Initialise the default process group with the rank and addresses that a launcher set.

    Raises:
        CommunicationError: a variable is not set, or not a number in its range.
    """
    _check_launch()
    # Ranks may outnumber GPUs: a job may train on the CPU.
    if local_rank() < torch.cuda.device_count():
        torch.cuda.set_device(local_rank())
    _listen_on_loopback()
    # If torchrun has restarted the job on one machine, its store (with the default rendezvous, static) still has the
    # keys of the ranks before, and a rank may connect to the address of a dead one: each attempt has keys of its own.
    # With several machines the counts of restarts may differ, but the store is a new one.
    attempt = number_of("TORCHELASTIC_RESTART_COUNT", 0)
    if not attempt or number_of("LOCAL_WORLD_SIZE", 0) != number_of("WORLD_SIZE", least=1):
        dist.init_process_group(backend, init_method="env://")
        return
    store, rank, size = next(rendezvous("env://"))
    own_keys = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=own_keys, rank=rank, world_size=size)


def _check_launch() -> None:
    """Check the variables that give this process's place in a job.

    Raises:
        CommunicationError: a variable is not set, or not a number in its range.
    """
    missing = [key for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if key not in os.environ]
    if missing:
        raise CommunicationError(
            f"the environment names a distributed job, but {', '.join(missing)} is not set\n"
            "Start with torchrun, or unset RANK and WORLD_SIZE to run as one process."
        )
    number_of("RANK", most=number_of("WORLD_SIZE", least=1) - 1)
    number_of("MASTER_PORT", most=2**16 - 1)
    number_of("LOCAL_WORLD_SIZE", 1, least=1)
    number_of("TORCHELASTIC_RESTART_COUNT", 0)
    local_rank()


def _listen_on_loopback() -> None:
    """Let gloo listen on the loopback interface only, if the job's address is this machine's own.

    By default gloo listens on the address of the host's name, whatever the launcher was told. (The store of the
    rendezvous is torchrun's, and listens on all addresses.)
    """
    address = os.environ["MASTER_ADDR"]
    if address == "localhost" or address == "::1" or address.startswith("127."):
        loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
        if loopback is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
