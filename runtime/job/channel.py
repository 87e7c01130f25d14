"""How the ranks of a job talk outside of its graphs: over gloo, or through mailboxes in the memory of a host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zerograph import _torch

# Number of sizes that each rank may add to a note, and of ranks up to which each has places of its own in it.
MAX_SIZES, MAX_RANKS = 8, 32
_LARGE = 2**62
# A tag that no message has.
_NO_TAG = 2**30

T = TypeVar("T")
# Sends a note to a receiver and returns that of a sender; the last argument is the distance between them.
Carrier = Callable[[list[int], int, int, int], list[int]]


class Mailbox(Protocol):
    """A rank that notes can be exchanged with; implemented by ``runtime.peer_memory.peer.Peer``."""

    def send_note(self, number: int, values: Sequence[int]) -> None:
        """Send a note."""

    def receive_note(self, number: int, count: int) -> list[int]:
        """Wait for the note of this number and return its first ``count`` values."""
        ...

    def hang_up(self) -> None:
        """End all waits for notes on both sides."""


class Channel:
    """All ranks of a job, for what they tell each other outside of its graphs.

    Values, small tensors and comparisons travel over a process group. Comparisons, of which each step has one, go
    through mailboxes instead where ranks of a host have them.

    A comparison is of a number and a flag. Its *note* holds the minimum of the number, of its complement, and of the
    negative flag. The numbers are equal on all ranks if the first is the complement of the second. There are
    log2(ranks) rounds of one note each way; the distance between sender and receiver doubles with each. With mailboxes,
    the ranks of each host compare first, then the ranks of equal position on all hosts. No rank ends a comparison
    before all have begun it. Two slots per mailbox therefore suffice for the notes.

    Attributes:
        group: the process group of all ranks on the CPU.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._mailboxes: Mapping[int, Mailbox] = {}
        # The ranks that exchange notes through mailboxes, then those that do so over the group.
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

    def share(self, value: T) -> list[T]:
        """Return every rank's value, in order of the ranks. No rank returns before all have called."""
        values: list[Any] = [value] * self.group.size()
        if len(values) > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's CPU tensor, equally large on all: ``[ranks, *shape]``."""
        gathered = tensor.new_empty(self.group.size() * tensor.numel())
        _torch.all_gather(gathered, tensor.reshape(-1), self.group)
        return gathered.view(self.group.size(), *tensor.shape)

    def broadcast(self, value: T, rank: int) -> T:
        """Return one rank's value on every rank."""
        values: list[Any] = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=rank)
        received: T = values[0]
        return received

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
        ranks, rank = self.group.size(), self.group.rank()
        if ranks > MAX_RANKS:
            return [*own, *(-size for size in own)]
        others = [_LARGE] * MAX_SIZES
        return [size for at in range(ranks) for size in (own if at == rank else others)]

    def _read(self, known: Sequence[int], sizes: Sequence[int]) -> list[list[int]] | None:
        count, ranks = len(sizes), self.group.size()
        if count > MAX_SIZES:
            return None
        if ranks <= MAX_RANKS:
            gathered = [list(known[at : at + count]) for at in range(0, ranks * MAX_SIZES, MAX_SIZES)]
            # Simulated ranks have written nothing: they come with the sizes of this one.
            return [list(sizes) if _LARGE in written else written for written in gathered]
        equal = [-size for size in known[MAX_SIZES : MAX_SIZES + count]] == list(known[:count])
        return [list(sizes)] * ranks if equal else None

    def _reduce(self, note: list[int], ranks: Sequence[int], exchange: Carrier) -> list[int]:
        """Return the elementwise minimum of the notes of these ranks."""
        place, distance = ranks.index(self.group.rank()), 1
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
        sending = self.group.send([outgoing], receiver, distance)
        self.group.recv([incoming], sender, distance).wait()
        sending.wait()
        received: list[int] = incoming.tolist()
        return received

    def hang_up(self) -> None:
        """End comparisons through mailboxes, the waiting one and later ones, on this and the other ranks."""
        for mailbox in self._mailboxes.values():
            mailbox.hang_up()


def hang_up(group: dist.ProcessGroup | None) -> None:
    """Close the connections of a group over gloo, by receives that time out. Other groups have their own timeout.

    A receive from a rank that has hung up fails at once, which closes no other connection.
    """
    if group is not None and group.name() == "gloo":
        nothing = torch.empty(1, device="cpu")
        for distance in range(1, group.size()):
            with contextlib.suppress(RuntimeError):
                group.recv([nothing], (group.rank() + distance) % group.size(), _NO_TAG).wait(timedelta(milliseconds=1))
