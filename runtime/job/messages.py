"""Small messages from rank to rank: over gloo, or through the memory of a host that all ranks share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
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
    """Comparison of a number and a flag between all ranks of a job, before they do something together.

    A note holds the least number, the least complement of a number, and the negative flag. There are log2(ranks) rounds
    of one note each way, and the distance between sender and receiver doubles with each. With mailboxes, the ranks of
    each host compare first, then the ranks of equal position on all hosts.

    No rank ends a comparison before all have begun it. Two places per mailbox therefore suffice for the notes.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Compare over ``group``, all ranks over gloo."""
        self._group = group
        self._mailboxes: Mapping[int, Mailbox] = {}
        self._here: Sequence[int] = [group.rank()]
        self._across: Sequence[int] = range(group.size())
        self._number = 0

    def use(self, mailboxes: Mapping[int, Mailbox], here: Sequence[int], across: Sequence[int]) -> None:
        """Compare through mailboxes on this host from now on. Every rank must call it.

        Args:
            mailboxes: of the other ranks of this host.
            here: the ranks of this host, equally many on each.
            across: the ranks that have this one's place in ``here`` on their hosts.
        """
        self._mailboxes, self._here, self._across = mailboxes, here, across

    def compare(self, number: int, flag: bool) -> tuple[bool, bool]:
        """Return whether all ranks came with the same number, and whether any of them came with the flag.

        Raises:
            RuntimeError: another rank has ended, failed or hung up, or does not answer in time.
        """
        self._number += 1
        try:
            known = self._spread([number, ~number, -int(flag)], self._here, self._through_mailboxes)
            known = self._spread(known, self._across, self._over_group)
        except Exception:
            # A rank that comes later must not take this one for waiting.
            self.hang_up()
            raise
        return known[0] == ~known[1], known[2] != 0

    def _spread(
        self, known: list[int], ranks: Sequence[int], exchange: Callable[[list[int], int, int, int], list[int]]
    ) -> list[int]:
        place, distance = ranks.index(self._group.rank()), 1
        while distance < len(ranks):
            receiver, sender = ranks[(place + distance) % len(ranks)], ranks[(place - distance) % len(ranks)]
            known = [min(pair) for pair in zip(known, exchange(known, receiver, sender, distance), strict=True)]
            distance *= 2
        return known

    def _through_mailboxes(self, known: list[int], receiver: int, sender: int, distance: int) -> list[int]:
        self._mailboxes[receiver].send_note(self._number, known)
        return self._mailboxes[sender].receive_note(self._number)

    def _over_group(self, known: list[int], receiver: int, sender: int, distance: int) -> list[int]:
        outgoing = torch.tensor(known, dtype=torch.int64, device="cpu")
        # Simulated ranks send nothing: they know what this one does.
        incoming = outgoing.clone()
        sending = self._group.send([outgoing], receiver, distance)
        self._group.recv([incoming], sender, distance).wait()
        sending.wait()
        received: list[int] = incoming.tolist()
        return received

    def hang_up(self) -> None:
        """End the comparison through mailboxes that waits, here and on the other ranks, and all that come later."""
        for mailbox in self._mailboxes.values():
            mailbox.hang_up()


def hang_up(group: dist.ProcessGroup | None) -> None:
    """Close the connections of a group over gloo, which does so when it has waited for a message in vain.

    Others, NCCL's, are left to their own timeout.
    """
    if group is not None and group.size() > 1 and group.name() == "gloo":
        nothing = torch.empty(1, device="cpu")
        with contextlib.suppress(RuntimeError):
            group.recv([nothing], (group.rank() + 1) % group.size(), _NO_TAG).wait(timedelta(milliseconds=1))
