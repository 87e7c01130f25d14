"""The collectives of a step, and how many there are of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from zerograph.ir.buckets import Bucket
from zerograph.ir.metadata import Boxing, Phase, meta
from zerograph.ir.step_graph import collective_runs


@dataclass(frozen=True)
class Collective:
    """One collective of the emitted graph.

    Attributes:
        kind: all-reduce, reduce-scatter, all-gather or all-to-all.
        bytes: what each rank sends, in bytes (ring algorithms; see :func:`zerograph.ir.sbp.wire_bytes`).
        tensor_bytes: size of what the ranks that take part hold together: on a mesh of one dimension the whole tensor.
        tensors: the parameters in the bucket that it moves, or what else it moves.
        phase: forward, backward or update.
        mesh_dim: the dimension of the mesh along which it runs.
        what: ``bucket0``, ``gradient of bucket0``, or what else it moves.
        node: the node of the emitted graph that starts it.
    """

    kind: str
    bytes: int
    tensor_bytes: int
    tensors: tuple[str, ...]
    phase: Phase
    mesh_dim: int = 0
    what: str = ""
    node: str = ""

    def __str__(self) -> str:
        return f"{self.phase:<8} {self.kind:<14} {self.bytes:>13,} bytes  {self.of}"

    @property
    def of(self) -> str:
        """What it moves, on a line."""
        return self.what if self.tensors == (self.what,) else f"{self.what}: {short(self.tensors)}"


def collectives(graph: fx.Graph, buckets: Sequence[Bucket]) -> list[tuple[Collective, int]]:
    """The collectives of the emitted graph in order, each with how often it runs in a step."""
    contents = {bucket.name: tuple(slot.name for slot in bucket.slots) for bucket in buckets}
    return [(_collective(node, contents), times) for node, times in collective_runs(graph)]


def _collective(node: fx.Node, contents: dict[str, tuple[str, ...]]) -> Collective:
    found: Boxing = meta(node)["boxing"]
    what = str(found.tensor)
    tensors = contents.get(found.tensor.name, (what,))
    return Collective(found.kind, round(found.sent), found.bytes, tensors, found.phase, found.dim, what, node.name)


def short(tensors: Sequence[str]) -> str:
    """``first ... last (12)``."""
    return tensors[0] if len(tensors) == 1 else f"{tensors[0]} ... {tensors[-1]} ({len(tensors)})"
