"""The collectives of a step."""

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
        kind: all-reduce, reduce-scatter, all-gather, all-to-all or shift.
        bytes: bytes that each rank sends (ring algorithms; see :func:`zerograph.ir.sbp.wire_bytes`).
        tensor_bytes: size in bytes of the tensor across the participating ranks: on a mesh of one dimension the whole
            tensor.
        tensors: names of the parameters in its bucket, or of another tensor.
        phase: forward, backward or update.
        mesh_dim: dimension of the mesh along which it runs.
        what: ``bucket0``, ``gradient of bucket0``, or another tensor.
        node: name of the node of the emitted graph that starts it.
        format: the wire format; empty for exact values.
    """

    kind: str
    bytes: int
    tensor_bytes: int
    tensors: tuple[str, ...]
    phase: Phase
    mesh_dim: int = 0
    what: str = ""
    node: str = ""
    format: str = ""

    def __str__(self) -> str:
        coded = f", {self.format}" if self.format else ""
        return f"{self.phase:<8} {self.kind:<14} {self.bytes:>13,} bytes  {self.of}{coded}"

    @property
    def of(self) -> str:
        """The tensor that it moves, with its parameters, on one line."""
        return self.what if self.tensors == (self.what,) else f"{self.what}: {short(self.tensors)}"


def collectives(graph: fx.Graph, buckets: Sequence[Bucket]) -> list[tuple[Collective, int]]:
    """Return the collectives of the emitted graph in order, each with its number of runs per step."""
    contents = {bucket.name: tuple(slot.name for slot in bucket.slots) for bucket in buckets}
    return [(_collective(node, contents), times) for node, times in collective_runs(graph)]


def _collective(node: fx.Node, contents: dict[str, tuple[str, ...]]) -> Collective:
    boxing: Boxing = meta(node)["boxing"]
    what = str(boxing.tensor)
    tensors = contents.get(boxing.tensor.name, (what,))
    sent = round(boxing.sent)
    return Collective(
        boxing.kind, sent, boxing.bytes, tensors, boxing.phase, boxing.dim, what, node.name, boxing.format
    )


def short(tensors: Sequence[str]) -> str:
    """Shorten a list of names to ``first ... last (12)``."""
    return tensors[0] if len(tensors) == 1 else f"{tensors[0]} ... {tensors[-1]} ({len(tensors)})"
