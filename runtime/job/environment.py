"""Join the job that a launcher's environment variables describe; an error names the variable and its value."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
import uuid
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from zerograph import _torch
from zerograph.errors import CommunicationError
from zerograph.runtime.job.launchers import Launch, number_of

# The key at which processes other than rank 0 ask to join its attempt.
_ASKED = "zerograph asked"
# The key that counts the ranks of a single machine as they come.
_ARRIVED = "zerograph arrived"


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
        CommunicationError: a variable is not a number in its range, or the rendezvous failed.
    """
    # torch reads them there, and so do other libraries.
    os.environ.update(launch.variables)
    # Ranks may outnumber GPUs: a job may train on the CPU.
    gpu = local_rank() if local_rank() in range(torch.cuda.device_count()) else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    if number_of("RANK") == 0 and number_of("WORLD_SIZE") > 1:
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        print(launch.describe(device), file=sys.stderr, flush=True)
    listen_on_loopback()
    try:
        store, rank, size = next(rendezvous("env://"))
        if keys := _own_keys(store, rank, size):
            store = dist.PrefixStore(keys, store)  # type: ignore[attr-defined]
        if number_of("LOCAL_WORLD_SIZE", 0) == size:
            _wait_for_all(store, size)
        lazy = _torch.lazy_nccl(backend, device=gpu)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, **lazy)
    except (RuntimeError, ValueError) as error:
        address = f"{launch.variables['MASTER_ADDR']}:{launch.variables['MASTER_PORT']}"
        raise CommunicationError(did_not_meet(number_of("RANK"), number_of("WORLD_SIZE"), address, error)) from error


def did_not_meet(rank: int, size: int, address: str, error: Exception) -> str:
    """Return the message of a rendezvous that failed."""
    return f"rank {rank} of {size} did not meet the others at {address}: {str(error).strip().splitlines()[0]}"


def _own_keys(store: Any, rank: int, size: int) -> str:
    """Return a prefix for the keys of these processes; empty if no others have used the store.

    The store of torchrun outlives a restart and still has the keys of the processes before: a rank would connect to the
    address of a dead one.
    """
    attempt = number_of("TORCHELASTIC_RESTART_COUNT", 0)
    if number_of("LOCAL_WORLD_SIZE", 0) == size:
        return f"attempt {attempt}" if attempt else ""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    # Each machine's agent counts its own restarts, so the counts may differ.
    return _welcome(store, size) if rank == 0 else _ask_for_welcome(store, rank)


def _wait_for_all(store: Any, size: int) -> None:
    """Wait for the ranks of this machine in Python, where Ctrl-C ends it.

    Gloo's own wait, in C++, goes on for the ranks that Ctrl-C has ended.
    """
    limit = time.monotonic() + default_pg_timeout.total_seconds()
    store.add(_ARRIVED, 1)
    while (arrived := store.add(_ARRIVED, 0)) < size:
        if time.monotonic() > limit:
            raise RuntimeError(f"{arrived} of {size} ranks have come")
        time.sleep(0.02)


def _welcome(store: Any, size: int) -> str:
    """Give every other rank that asks the name of this rank's attempt, until one process of each rank has taken it.

    Processes that have ended may have asked too. They take no name.
    """
    attempt, answered, missing = uuid.uuid4().hex, set[str](), set(range(1, size))
    limit = time.monotonic() + default_pg_timeout.total_seconds()
    # The keys exist from now on: to read a missing one would block.
    store.append(_ASKED, "")
    store.append(attempt, "")
    while missing:
        for process in {*store.get(_ASKED).decode().split()} - answered:
            store.set(process, attempt)
            answered.add(process)
        missing -= {int(taken) for taken in store.get(attempt).decode().split()}
        if missing and time.monotonic() > limit:
            raise RuntimeError(f"no sign of {len(missing)} ranks, of rank {min(missing)} first")
        time.sleep(0.02 if missing else 0.0)
    return attempt


def _ask_for_welcome(store: Any, rank: int) -> str:
    """Return the name of the attempt of the process that is rank 0 now."""
    process = uuid.uuid4().hex
    store.append(_ASKED, f"{process} ")
    attempt: str = store.get(process).decode()
    store.append(attempt, f"{rank} ")
    return attempt


def listen_on_loopback() -> None:
    """Let gloo listen on the loopback interface only, if the job's address is this machine's own.

    By default gloo listens on the address of the host's name, whatever the launcher was told. (The store of the
    rendezvous is torchrun's, and listens on all addresses.)
    """
    address = os.environ["MASTER_ADDR"]
    if address == "localhost" or address == "::1" or address.startswith("127."):
        loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
        if loopback is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def versions() -> dict[str, str]:
    """Return the versions that change numbers, or the order of the user's batches, if ranks differ in them."""
    return {
        "the version of zerograph": sys.modules["zerograph"].__version__,
        "the version of torch": torch.__version__,
        "the version of Python": platform.python_version().rpartition(".")[0],
    }
