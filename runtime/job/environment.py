"""Join the job that a launcher's environment variables describe; an error names the variable and its value."""

from __future__ import annotations

import os
import socket
import sys

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from zerograph.runtime.job.launchers import Launch, number_of


def local_rank() -> int:
    """Return this process's number on its machine; 0 if LOCAL_RANK is not set.

    Raises:
        CommunicationError: it is not a number.
    """
    # Some launchers set -1 if there is one process.
    return number_of("LOCAL_RANK", 0, least=-1)


def init_from_environment(backend: str, launch: Launch) -> None:
    """Initialise the default process group with the rank and addresses that a launcher set.

    Raises:
        CommunicationError: a variable is not a number in its range.
    """
    # torch reads them there, and so do other libraries.
    os.environ.update(launch.variables)
    # Ranks may outnumber GPUs: a job may train on the CPU.
    if local_rank() < torch.cuda.device_count():
        torch.cuda.set_device(local_rank())
    if number_of("RANK") == 0 and number_of("WORLD_SIZE") > 1:
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        print(launch.describe(device), file=sys.stderr, flush=True)
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
