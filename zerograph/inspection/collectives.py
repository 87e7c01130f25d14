"""The collectives of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from zerograph.ir.hosts import traffic
from zerograph.ir.metadata import Boxing, Phase, meta
from zerograph.ir.step_graph import collective_runs
from zerograph.passes.context import Context


@dataclass(frozen=True)
class Collective:
    """One collective of the emitted graph.

    Attributes:
        kind: all-reduce, reduce-scatter, all-gather, all-to-all or shift.
        bytes: bytes that each rank sends (ring algorithms; see :func:`zerograph.ir.sbp.wire_bytes`).
        between: those of them that go to other hosts; 0 if the hosts of the ranks are unknown.
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
    between: int = 0

    def __str__(self) -> str:
        coded = f", {self.format}" if self.format else ""
        hosts = f", {self.between:,} between hosts" if self.between else ""
        return f"{self.phase:<8} {self.kind:<14} {self.bytes:>13,} bytes  {self.of}{coded}{hosts}"

    @property
    def of(self) -> str:
        """The tensor that it moves, with its parameters, on one line."""
        return self.what if self.tensors == (self.what,) else f"{self.what}: {short(self.tensors)}"


def collectives(graph: fx.Graph, context: Context) -> list[tuple[Collective, int]]:
    """Return the collectives of the emitted graph in order, each with its number of runs per step."""
    contents = {bucket.name: tuple(slot.name for slot in bucket.slots) for bucket in context.buckets}
    return [(_collective(node, contents, context), times) for node, times in collective_runs(graph)]


def _collective(node: fx.Node, contents: dict[str, tuple[str, ...]], context: Context) -> Collective:
    boxing: Boxing = meta(node)["boxing"]
    what = str(boxing.tensor)
    tensors = contents.get(boxing.tensor.name, (what,))
    sent = traffic(boxing, context.mesh, context.backend.hosts)
    return Collective(
        kind=boxing.kind,
        bytes=round(sent.inside + sent.between),
        tensor_bytes=boxing.bytes,
        tensors=tensors,
        phase=boxing.phase,
        mesh_dim=boxing.dim,
        what=what,
        node=node.name,
        format=boxing.format,
        between=round(sent.between),
    )


def short(tensors: Sequence[str]) -> str:
    """Shorten a list of names to ``first ... last (12)``."""
    return tensors[0] if len(tensors) == 1 else f"{tensors[0]} ... {tensors[-1]} ({len(tensors)})"
