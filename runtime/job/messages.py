"""Small messages between the ranks of a group over gloo, from one to one."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist

# A tag under which nobody sends.
_NO_TAG = 2**30


def compared(group: dist.ProcessGroup, number: int, flag: bool) -> tuple[bool, bool]:
    """Return whether all ranks of the group came with the same number, and whether any of them came with the flag.

    In each of log2(ranks) rounds a rank sends what it knows to the one twice as far away: the least number, the
    largest one as the least complement, and the flag as a number. A round costs one small message each way.
    """
    known = [number, ~number, -int(flag)]
    rank, ranks = group.rank(), group.size()
    distance = 1
    while distance < ranks:
        outgoing = torch.tensor(known, dtype=torch.int64, device="cpu")
        # Simulated ranks send nothing: they know what this one does.
        incoming = outgoing.clone()
        sending = group.send([outgoing], (rank + distance) % ranks, distance)
        group.recv([incoming], (rank - distance) % ranks, distance).wait()
        sending.wait()
        known = [min(pair) for pair in zip(known, incoming.tolist(), strict=True)]
        distance *= 2
    return known[0] == ~known[1], known[2] != 0


def hang_up(group: dist.ProcessGroup | None) -> None:
    """Close the connections of a group over gloo, which does so when it has waited for a message in vain.

    Others, NCCL's, are left to their own timeout.
    """
    if group is not None and group.size() > 1 and group.name() == "gloo":
        nothing = torch.empty(1, device="cpu")
        with contextlib.suppress(RuntimeError):
            group.recv([nothing], (group.rank() + 1) % group.size(), _NO_TAG).wait(timedelta(milliseconds=1))
