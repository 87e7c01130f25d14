"""Exchanges of tensors in which each rank of a host reads the memory of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from zerograph.runtime.peer_memory.peer import INLINE, Peer


@dataclass(frozen=True, eq=False)
class HostGroup:
    """Some ranks of this host, in the order of a process group.

    Attributes:
        rank: this rank's place in the group.
        peers: the other ranks by place; None at this rank's own.
        inline: bytes of the largest tensor that is sent in a mailbox.
    """

    rank: int
    peers: tuple[Peer | None, ...]
    inline: int = INLINE

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.peers)

    def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], adds: bool = False) -> Exchange:
        """Start to exchange tensors; see :class:`Exchange`."""
        return Exchange(self, outgoing, incoming, adds)

    def check_going_on(self) -> None:
        """Raise if another rank will do nothing more in this step.

        Raises:
            RuntimeError: it has ended or failed.
        """
        for _, peer in self.others():
            peer.check_going_on()

    def free_places(self) -> None:
        """Wait until another tensor can be announced to each peer.

        Raises:
            RuntimeError: a peer has ended or failed, or does not answer in time.
        """
        peers = [peer for _, peer in self.others()]
        # All ranks come here at the same exchange and wait for the others to read, so all read first.
        for peer in peers:
            peer.read(peer.place_taken_by())
        for peer in peers:
            peer.wait_read(peer.place_taken_by())

    def others(self) -> Iterator[tuple[int, Peer]]:
        """Yield the other places and peers, beginning before this rank, so that not all read the same rank first."""
        for step in range(1, len(self.peers)):
            place = (self.rank - step) % len(self.peers)
            peer = self.peers[place]
            assert peer is not None
            yield place, peer


class Exchange(dist.Work):
    """An exchange in which each rank reads the others' memory.

    Args:
        outgoing, incoming: by place in the group, what is sent there and what is filled.
        adds: add what is received to ``incoming``.
    """

    def __init__(
        self, host_group: HostGroup, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], adds: bool
    ) -> None:
        super().__init__()
        host_group.free_places()
        self._announcements = []
        for place, peer in host_group.others():
            # Both ranks announce once per exchange, so under the same number.
            number = peer.announce(outgoing[place])
            peer.expect(number, incoming[place], adds)
            self._announcements.append((peer, number))

    def wait(self, timeout: object = None) -> bool:
        """Read, then return when the others have read this rank's memory, which may then change.

        ``timeout`` is ignored: the peers' own limit holds.
        """
        for peer, number in self._announcements:
            peer.read(number)
        # All reads come first: with three ranks each would else wait for the next.
        for peer, number in self._announcements:
            peer.wait_unused(number)
        return True
