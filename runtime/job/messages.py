"""Small messages from rank to rank: over gloo, or through the memory of a host that all ranks share."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

# A tag under which nobody sends.
_NO_TAG = 2**30


class Mailbox(Protocol):
    """Another rank to which notes can be written; see ``runtime.wire.peer.Peer``."""

    def send_note(self, number: int, values: Sequence[int]) -> None: ...

    def receive_note(self, number: int) -> list[int]: ...

    def hang_up(self) -> None: ...


class Notes:
    """What the ranks of a job compare before they do something together.

    Attributes:
        group: all ranks, over gloo.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._mailboxes: Mapping[int, Mailbox] = {}
        self._number = 0

    def use(self, mailboxes: Mapping[int, Mailbox]) -> None:
        """Compare through these mailboxes of all other ranks from now on. Every rank must call it."""
        self._mailboxes = mailboxes

    def compare(self, number: int, flag: bool) -> tuple[bool, bool]:
        """Return what :func:`compared` does.

        Raises:
            RuntimeError: another rank has ended, failed or hung up, or does not answer in time.
        """
        if not self._mailboxes:
            return compared(self.group, number, flag)
        self._number += 1
        try:
            return self._compared(number, flag)
        except Exception:
            # A rank that comes later shall not take this one for waiting.
            self.hang_up()
            raise

    def _compared(self, number: int, flag: bool) -> tuple[bool, bool]:
        """Compare as :func:`compared` does.

        Nobody ends a comparison before all have begun it, so a note is read before the next but one takes its place.
        """
        known = [number, ~number, -int(flag)]
        rank, ranks = self.group.rank(), self.group.size()
        distance = 1
        while distance < ranks:
            self._mailboxes[(rank + distance) % ranks].send_note(self._number, known)
            incoming = self._mailboxes[(rank - distance) % ranks].receive_note(self._number)
            known = [min(pair) for pair in zip(known, incoming, strict=True)]
            distance *= 2
        return known[0] == ~known[1], known[2] != 0

    def hang_up(self) -> None:
        """End the comparison that waits, here and on the other ranks, and all that come later."""
        for mailbox in self._mailboxes.values():
            mailbox.hang_up()


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
