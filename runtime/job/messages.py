"""Compare notes between ranks: over gloo, or through mailboxes in the memory of a host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

# Number of sizes that each rank may add to a note, and of ranks up to which each has places of its own in it.
MAX_SIZES, MAX_RANKS = 8, 32
_LARGE = 2**62
# A tag that no message has.
_NO_TAG = 2**30


class Mailbox(Protocol):
    """A rank that notes can be exchanged with; implemented by ``runtime.wire.peer.Peer``."""

    def send_note(self, number: int, values: Sequence[int]) -> None:
        """Send a note."""

    def receive_note(self, number: int, count: int) -> list[int]:
        """Wait for the note of this number and return its first ``count`` values."""
        ...

    def hang_up(self) -> None:
        """End all waits for notes on both sides."""


class Notes:
    """Compare a number and a flag between all ranks of a job, before they do something together.

    A note holds the minimum of the number, of its complement, and of the negative flag. The numbers are equal on all
    ranks if the first is the complement of the second. There are log2(ranks) rounds of one note each way; the distance
    between sender and receiver doubles with each. With mailboxes, the ranks of each host compare first, then the ranks
    of equal position on all hosts.

    No rank ends a comparison before all have begun it. Two slots per mailbox therefore suffice for the notes.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Compare over a process group of all ranks, until :meth:`use` is called."""
        self._group = group
        self._mailboxes: Mapping[int, Mailbox] = {}
        self._host_ranks: Sequence[int] = [group.rank()]
        self._across: Sequence[int] = range(group.size())
        self._number = 0

    def use(self, mailboxes: Mapping[int, Mailbox], host_ranks: Sequence[int], across: Sequence[int]) -> None:
        """Compare through mailboxes on this host from now on. Every rank must call it.

        Args:
            mailboxes: of the other ranks of this host.
            host_ranks: the ranks of this host; every host has as many.
            across: the ranks with this rank's position in ``host_ranks`` on their hosts.
        """
        self._mailboxes, self._host_ranks, self._across = mailboxes, host_ranks, across

    def compare(self, number: int, flag: bool, sizes: Sequence[int] = ()) -> tuple[bool, bool, list[list[int]] | None]:
        """Compare a number and a flag, and gather sizes, from 0 up and equally many on each rank.

        Returns:
            Whether all ranks came with the same number; whether any of them came with the flag; and the sizes of each
            rank, or None where a note has no room for them: then the caller gathers them.

        Raises:
            RuntimeError: another rank has ended, failed or hung up, or does not answer in time.
        """
        self._number += 1
        try:
            # Every note is equally long, so that ranks that do different things understand each other.
            note = [number, ~number, -int(flag), *self._written(sizes)]
            note = self._reduce(note, self._host_ranks, self._through_mailboxes)
            note = self._reduce(note, self._across, self._over_group)
        except Exception:
            # A rank that comes later must not wait for this one.
            self.hang_up()
            raise
        return note[0] == ~note[1], note[2] != 0, self._read(note[3:], sizes)

    def _written(self, sizes: Sequence[int]) -> list[int]:
        """Return this rank's sizes so that the least of what all ranks write tells the sizes of all.

        Up to ``MAX_RANKS`` ranks each has places of its own, which the others fill with a large number. More ranks
        share places for the least and the greatest sizes.
        """
        own = [*sizes, *[_LARGE] * (MAX_SIZES - len(sizes))] if len(sizes) <= MAX_SIZES else [_LARGE] * MAX_SIZES
        ranks, rank = self._group.size(), self._group.rank()
        if ranks > MAX_RANKS:
            return [*own, *(-size for size in own)]
        others = [_LARGE] * MAX_SIZES
        return [size for at in range(ranks) for size in (own if at == rank else others)]

    def _read(self, known: Sequence[int], sizes: Sequence[int]) -> list[list[int]] | None:
        count, ranks = len(sizes), self._group.size()
        if count > MAX_SIZES:
            return None
        if ranks <= MAX_RANKS:
            gathered = [list(known[at : at + count]) for at in range(0, ranks * MAX_SIZES, MAX_SIZES)]
            # Simulated ranks have written nothing: they come with the sizes of this one.
            return [list(sizes) if _LARGE in written else written for written in gathered]
        equal = [-size for size in known[MAX_SIZES : MAX_SIZES + count]] == list(known[:count])
        return [list(sizes)] * ranks if equal else None

    def _reduce(
        self, note: list[int], ranks: Sequence[int], exchange: Callable[[list[int], int, int, int], list[int]]
    ) -> list[int]:
        """Return the elementwise minimum of the notes of these ranks."""
        place, distance = ranks.index(self._group.rank()), 1
        while distance < len(ranks):
            receiver, sender = ranks[(place + distance) % len(ranks)], ranks[(place - distance) % len(ranks)]
            received = exchange(note, receiver, sender, distance)
            note = [min(pair) for pair in zip(note, received, strict=True)]
            distance *= 2
        return note

    def _through_mailboxes(self, note: list[int], receiver: int, sender: int, distance: int) -> list[int]:
        self._mailboxes[receiver].send_note(self._number, note)
        return self._mailboxes[sender].receive_note(self._number, len(note))

    def _over_group(self, note: list[int], receiver: int, sender: int, distance: int) -> list[int]:
        outgoing = torch.tensor(note, dtype=torch.int64, device="cpu")
        # A simulated rank sends nothing: its note counts as equal to this one's.
        incoming = outgoing.clone()
        sending = self._group.send([outgoing], receiver, distance)
        self._group.recv([incoming], sender, distance).wait()
        sending.wait()
        received: list[int] = incoming.tolist()
        return received

    def hang_up(self) -> None:
        """End comparisons through mailboxes, the waiting one and later ones, on this and the other ranks."""
        for mailbox in self._mailboxes.values():
            mailbox.hang_up()


def hang_up(group: dist.ProcessGroup | None) -> None:
    """Close the connections of a group over gloo, by a receive that times out. Other groups have their own timeout."""
    if group is not None and group.size() > 1 and group.name() == "gloo":
        nothing = torch.empty(1, device="cpu")
        with contextlib.suppress(RuntimeError):
            group.recv([nothing], (group.rank() + 1) % group.size(), _NO_TAG).wait(timedelta(milliseconds=1))
