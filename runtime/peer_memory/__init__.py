"""A transport between ranks of one host, which read each other's memory: one copy where a socket takes two.

It is a plug-in: ``runtime.wire.direct`` calls :func:`host` and :func:`connect` if this folder is there, and nothing
else in the package imports it. Without the folder, ranks of a host exchange over sockets.

``cross_memory``  read and write the memory of another process
``peer``          exchange tensors and notes with another rank
``exchange``      exchanges of tensors among all ranks of a group
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zerograph.errors import ConfigError
from zerograph.runtime.job.process_group import Job
from zerograph.runtime.peer_memory import cross_memory
from zerograph.runtime.peer_memory.exchange import HostGroup
from zerograph.runtime.peer_memory.peer import Peer

_VARIABLE = "ZEROGRAPH_WIRE"
_log = logging.getLogger("zerograph.collectives")


def host() -> str:
    """Return a text that is equal for processes that may read each other's memory; empty where that is impossible.

    A mailbox needs its words to be seen in the order in which they were written: x86-64 guarantees that.

    Raises:
        ConfigError: ``ZEROGRAPH_WIRE`` has another value than ``"sockets"``.
    """
    value = os.environ.get(_VARIABLE, "")
    if value not in ("", "sockets"):
        raise ConfigError(
            f"{_VARIABLE} is {value!r:.60}: there is only 'sockets'\n"
            "Without the variable, ranks of one host read each other's memory."
        )
    usable = platform.system() == "Linux" and platform.machine() == "x86_64" and hasattr(os, "pidfd_open")
    if not usable or value:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return ""


@dataclass(frozen=True, eq=False)
class Connections:
    """The other ranks of this host.

    Attributes:
        rank: this rank.
        peers: by rank.
        reached: for each rank of the job the ranks whose memory it can read and write; equal on all ranks.
    """

    rank: int
    peers: Mapping[int, Peer]
    reached: Sequence[set[int]]

    def joins(self, ranks: Sequence[int]) -> bool:
        """Return whether each of the ranks can read and write the memory of the others."""
        return all(self.reached[rank] >= set(ranks) - {rank} for rank in ranks)

    def group(self, ranks: Sequence[int]) -> HostGroup:
        """Return these ranks as a group, which exchanges tensors."""
        return HostGroup(ranks.index(self.rank), tuple(self.peers.get(rank) for rank in ranks))


def connect(job: Job, host_ranks: Sequence[int]) -> Connections:
    """Find out which ranks can read and write each other's memory. Every rank of the job must call it.

    Args:
        host_ranks: the ranks whose :func:`host` is this rank's.
    """
    others = [rank for rank in host_ranks if rank != job.rank]
    peers = {rank: Peer(rank, job.timeout, functools.partial(job.liveness.failed, rank)) for rank in others}
    reached = _reach(job, peers)
    job.liveness.ended |= {rank: peers[rank].has_ended for rank in reached[job.rank]}
    return Connections(job.rank, peers, reached)


def _reach(job: Job, peers: Mapping[int, Peer]) -> list[set[int]]:
    """Return for each rank the ranks whose memory it can read and write. Every rank must call it.

    Args:
        peers: the other ranks of this host.
    """
    # A number that another process is unlikely to hold at this address.
    nonce = torch.tensor([int.from_bytes(os.urandom(7))], device="cpu")
    # One word for each other rank to write: permission to read does not imply permission to write.
    probes = torch.zeros(job.size, dtype=torch.int64, device="cpu")
    inboxes = {rank: ctypes.addressof(peer.inbox) for rank, peer in peers.items()}
    addresses = job.channel.share((os.getpid(), nonce.data_ptr(), int(nonce), probes.data_ptr(), inboxes))
    reasons = {rank: _refusal(peer, job.rank, *addresses[rank]) for rank, peer in peers.items()}
    if refused := next(((rank, reason) for rank, reason in reasons.items() if reason is not None), None):
        _log.info("rank %d exchanges tensors over sockets, not through memory: rank %d: %s", job.rank, *refused)
    # Other ranks use ``nonce`` and ``probes`` until all have come here.
    return job.channel.share({rank for rank, reason in reasons.items() if reason is None})


def _refusal(
    peer: Peer, rank: int, pid: int, address: int, nonce: int, probes: int, inboxes: Mapping[int, int]
) -> str | None:
    """Return why this process cannot read and write the peer's memory, or None. Containers and kernels may forbid it.

    Args:
        peer: the other rank.
        rank: this rank.
        pid: the other process.
        address: where that process holds ``nonce``. If another number is there, nothing is written.
        nonce: the number at ``address``.
        probes: where that process holds an int64 for each rank to write.
        inboxes: by rank the address of that rank's mailbox in the other process.
    """
    word = torch.zeros(1, dtype=torch.int64, device="cpu")
    try:
        peer.reach(pid, inboxes[rank])
        peer.copy(address, word)
        if int(word) != nonce:
            return f"process {pid} here is another process"
        probe = probes + rank * word.itemsize
        cross_memory.write(pid, [(probe, word.data_ptr(), word.nbytes)])
        peer.copy(probe, word.zero_())
    except (OSError, RuntimeError) as error:
        return str(error)
    return None if int(word) == nonce else f"what was written to process {pid} is not there"
