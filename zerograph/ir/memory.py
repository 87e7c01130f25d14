"""Predict the memory of a step from its emitted graph: bytes at every node, and their kinds at the peak.

A value's memory is its own, or that of what it is a view of or was written into; it is held until the last node that
reads it or one of its views, as the code that ``torch.fx`` generates lets go of every name behind its last use. State
at rest and the batch are held throughout. What an asynchronous collective reads is held until it is waited for. On an
accelerator only its own memory counts.

The forecast is that of the graph run node by node. Inductor keeps less: what it fuses is never in memory.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from zerograph.base.sizes import show_bytes as show_bytes
from zerograph.ir.alias import WAIT, shared_arguments
from zerograph.ir.loop import loop_of
from zerograph.ir.metadata import Origin, boxing_of, meta, origin, role
from zerograph.ir.offload_operators import FETCH, TRANSFER
from zerograph.ir.sbp import PartialSum
from zerograph.ir.step_graph import nbytes

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

MemoryKind = Literal[
    "parameters", "optimizer state", "buffers", "inputs", "gathered", "gradients", "activations", "update", "temporary"
]
_AT_REST: dict[str, MemoryKind] = {
    "bucket": "parameters",
    "gather_buffer": "gathered",
    "parameter": "parameters",
    "state": "optimizer state",
    "hyperparameter": "optimizer state",
    "buffer": "buffers",
    "input": "inputs",
    "seed": "inputs",
    "scaler": "optimizer state",
    # Of a loop's body, where all of these belong to the graph around it.
    "value": "activations",
    "result": "gradients",
    "micro_batch": "inputs",
}


@dataclass(frozen=True)
class Memory:
    """The most bytes that a step holds on this rank, and when.

    Attributes:
        peak: bytes, state at rest and the batch included.
        at_rest: bytes of parameters, optimizer state and buffers, which are there between steps too, and of rooms that
            buckets are gathered into. What rests in files is not: of that, the kinds have what is in memory at the
            peak.
        kinds: bytes at the peak: of ``"parameters"``, ``"optimizer state"`` and ``"buffers"`` at rest, of
            ``"inputs"``, the batch; of ``"gathered"`` parameters, ``"gradients"``, ``"activations"``, of what the
            ``"update"`` computes on its way, and ``"temporary"`` within an operator.
        node: the node of ``graph()`` at which it is reached.
        where: phase, module and source line of that node.
    """

    peak: int
    at_rest: int
    kinds: Mapping[MemoryKind, int]
    node: str
    where: Origin

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {show_bytes(count)}" for name, count in self.kinds.items())
        place = " ".join(filter(None, (self.where.phase, self.where.module, self.where.source)))
        return f"{show_bytes(self.peak)} at {self.node} ({place}): {kinds}"


@dataclass(eq=False)
class Storage:
    """Memory that one node takes and several may share.

    Attributes:
        born, dies: the first and last position at which it is alive.
        read: the last at which a node reads it; behind that only a collective in flight holds it.
        given: the graph did not take it: it is an input.
    """

    bytes: int
    kind: MemoryKind
    born: int
    dies: int
    read: int
    given: bool = False


@dataclass(frozen=True, eq=False)
class Profile:
    """Memory of a graph over its nodes.

    Attributes:
        nodes: in order.
        bytes: held while each runs.
        storages: what is held, and when.
        temporary: bytes that each node needs while it runs and gives back.
        of: storages of the value of each node.
        bodies: by the position of a loop, the profile of its body.
    """

    nodes: Sequence[fx.Node]
    bytes: Sequence[int]
    storages: Sequence[Storage]
    temporary: Sequence[int]
    of: Mapping[fx.Node, Sequence[Storage | None]] = field(repr=False)
    bodies: Mapping[int, Profile] = field(default_factory=dict, repr=False)

    @property
    def peak(self) -> int:
        return max(self.bytes)

    def memory(self) -> Memory:
        """The profile at its peak."""
        at = self.bytes.index(self.peak)
        kinds: Counter[MemoryKind] = Counter()
        for one in self.storages:
            if one.born <= at <= one.dies:
                kinds[one.kind] += one.bytes
        node = self.nodes[at]
        if at in self.bodies:
            own, node = self.bodies[at].own()
            kinds.update(own)
        else:
            kinds["temporary"] += self.temporary[at]
        resting = [one for node in self.nodes if node.op in ("placeholder", "get_attr") for one in self.of[node]]
        at_rest = sum(one.bytes for one in resting if one is not None and one.kind != "inputs")
        shown = {kind: count for kind, count in kinds.most_common() if count}
        return Memory(self.peak, at_rest, shown, node.name, origin(node))

    def own(self) -> tuple[Counter[MemoryKind], fx.Node]:
        """What the graph holds at most beside what it is given, by kind, and where."""
        at = self.bytes.index(self.peak)
        kinds: Counter[MemoryKind] = Counter({"temporary": self.temporary[at]})
        for one in self.storages:
            if one.born <= at <= one.dies and not one.given:
                kinds[one.kind] += one.bytes
        return kinds, self.nodes[at]


def profile(graph: fx.Graph, *, host: bool = False) -> Profile:
    """Bytes held at every node of a graph in this rank's shapes. One walk, linear in nodes.

    Args:
        host: of a model on an accelerator those in the CPU's memory, instead of its own.
    """
    nodes = list(graph.nodes)
    on_cpu = not host and not any(one.device.type != "cpu" for node in nodes for one in _tensors(node))
    walk = _Walk(on_cpu, host)
    for position, node in enumerate(nodes):
        walk.visit(position, node)
    walk.end(len(nodes) - 1)
    changes = [0] * (len(nodes) + 1)
    for one in walk.storages:
        changes[one.born] += one.bytes
        changes[one.dies + 1] -= one.bytes
    held: Iterable[int] = itertools.accumulate(changes[:-1])
    temporary = [walk.temporary.get(position, 0) for position in range(len(nodes))]
    total = [one + more for one, more in zip(held, temporary, strict=True)]
    return Profile(nodes, total, walk.storages, temporary, walk.of, walk.bodies)


def computed_bytes(graph: fx.Graph) -> int:
    """The most that a graph holds beside its inputs."""
    return sum(profile(graph).own()[0].values())


@dataclass
class _Walk:
    """One walk over the nodes in order: which memory each value lies in, and who read it last.

    ``on_cpu``: nothing lies on an accelerator. Where something does, the CPU's memory does not count, or, with
    ``host``, nothing else.
    """

    on_cpu: bool = True
    host: bool = False
    storages: list[Storage] = field(default_factory=list)
    of: dict[fx.Node, Sequence[Storage | None]] = field(default_factory=dict)
    temporary: dict[int, int] = field(default_factory=dict)
    bodies: dict[int, Profile] = field(default_factory=dict)
    _forever: list[Storage] = field(default_factory=list)
    _shards: dict[str, Storage | None] = field(default_factory=dict)
    _leaving: Sequence[Storage | None] = ()

    def visit(self, position: int, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        for given in inputs:
            _hold(self.of[given], position)
        if node.target is TRANSFER:
            # What is on its way is let go of when it is there: while the next one goes, at the latest.
            _hold(self._leaving, position)
            self._leaving = self.of[inputs[0]]
        if node.target is WAIT and not _reads_a_copy(inputs[0]):
            for given in inputs[0].all_input_nodes:
                for one in self.of[given]:
                    if one is not None:
                        one.dies = max(one.dies, position)
        if node.op in ("placeholder", "get_attr"):
            found = role(node)
            kind: MemoryKind = "buffers" if found is None else _AT_REST[found.kind]
            self.of[node] = made = [self._new(0, kind, value) for value in _values(node)]
            if found is not None and found.kind == "bucket":
                self._shards[found.name] = made[0]
            elif found is not None and found.kind == "gather_buffer":
                assert found.bucket is not None
                shard, room = self._shards[found.bucket], made[0]
                assert shard is not None
                assert room is not None
                # The shard lies in it: what counts here is the other ranks' pieces.
                room.bytes -= shard.bytes
            for one in filter(None, made):
                # The number of the micro-batch the loop makes itself.
                one.given = found is None or found.kind != "micro_batch"
                self._forever.append(one)
        elif node.op == "output":
            self._forever += [one for given in inputs for one in self.of[given] if one is not None]
            self.of[node] = ()
        else:
            self.of[node] = self._computed(position, node)
            needed = temporary_bytes(node)
            if (loop := loop_of(node)) is not None:
                self.bodies[position] = inner = profile(loop.body.graph, host=self.host)
                needed = sum(inner.own()[0].values())
            elif self.host:
                # Of the operator's own device: those of an update on the CPU are too small to matter.
                needed = 0
            if needed:
                self.temporary[position] = needed
        if node.target is aten.copy_.default:
            self._note_gradient(node)

    def end(self, last: int) -> None:
        """What the caller holds, or is given, outlives the graph."""
        for one in self._forever:
            one.dies = one.read = last

    def _computed(self, position: int, node: fx.Node) -> list[Storage | None]:
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            if not isinstance(source.meta["val"], Tensor):
                assert isinstance(index, int)
                return [self.of[source][index]]
        if (loop := loop_of(node)) is not None:
            kinds: list[MemoryKind] = ["activations" if one.gradient is None else "gradients" for one in loop.results]
            return [self._new(position, kind, value) for kind, value in zip(kinds, node.meta["val"], strict=True)]
        kind = self._kind(node)
        sources = shared_arguments(node)
        made: list[Storage | None] = []
        for index, value in enumerate(_values(node)):
            source = sources[min(index, len(sources) - 1)] if sources else None
            shared = None if source is None else self.of[source][0]
            made.append(self._new(position, kind, value) if shared is None else shared)
        # A view of nobody's is none; what was shared lives at least until here.
        _hold(made, position)
        return made

    def _new(self, position: int, kind: MemoryKind, value: Any) -> Storage | None:
        if not isinstance(value, Tensor):
            return None
        counts = self.on_cpu or (value.device.type == "cpu") == self.host
        self.storages.append(Storage(_allocated(value) if counts else 0, kind, position, position, position))
        return self.storages[-1]

    def _kind(self, node: fx.Node) -> MemoryKind:
        if node.target is FETCH and (fetched := role(node.all_input_nodes[0])) is not None:
            return _AT_REST[fetched.kind]
        boxing = boxing_of(node)
        phase = origin(node).phase
        if "gradient" in node.meta or (boxing is not None and boxing.tensor.kind == "gradient"):
            return "gradients"
        if phase == "backward" and any(isinstance(one, PartialSum) for one in meta(node).get("sbp", ())):
            return "gradients"
        first = next((one for given in node.all_input_nodes[:1] for one in self.of[given][:1]), None)
        # From a bucket, or from its shard in the compute dtype.
        from_bucket = first is not None and first.kind in ("parameters", "gathered")
        if from_bucket and (boxing is not None or node.target in _COPIES):
            return "gathered"
        return "update" if phase == "update" else "activations"

    def _note_gradient(self, node: fx.Node) -> None:
        """What is copied into a bucket of gradients is one."""
        target, value = (self.of[given] for given in node.args[:2])  # type: ignore[index]
        into, made = target[0], value[0]
        if into is not None and made is not None and into.kind == "gradients" and made.kind == "activations":
            made.kind = "gradients"


def _hold(storages: Iterable[Storage | None], position: int) -> None:
    for one in storages:
        if one is not None:
            one.dies = max(one.dies, position)
            one.read = max(one.read, position)


def _values(node: fx.Node) -> Sequence[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _tensors(node: fx.Node) -> Iterable[Tensor]:
    return (value for value in _values(node) if isinstance(value, Tensor))


def _allocated(value: Tensor) -> int:
    # torch's CUDA allocator deals out blocks of 512 bytes.
    return nbytes(value) if value.device.type == "cpu" else -(-nbytes(value) // 512) * 512


def _reads_a_copy(start: fx.Node) -> bool:
    """Whether the collective lets go of its input at once: it works on a copy, which is its result or in it."""
    copying = "zerograph.gather_pieces.default", "zerograph.sum_ranks.default"
    return start.target is c10d.all_reduce.default or str(start.target) in copying


_COPIES = {aten._to_copy.default, aten.clone.default, TRANSFER}


def temporary_bytes(node: fx.Node) -> int:
    """Bytes that the node takes while it runs, beside its results."""
    return int(meta(node).get("temporary", 0)) + workspace_bytes(node)


# ---- workspaces ----
#
# A workspace is memory that a kernel allocates besides its results and frees again. It counts where it is as large as
# the operands: for convolutions on the CPU. oneDNN works on blocks of channels and copies its operands to them; without
# it (fp64) torch writes out the columns that each weight is multiplied with. Measured as the resident size of a process
# with torch 2.13, these formulas are within 10 % for kernels of 1x1 to 7x7, grouped, depthwise, of one to three
# dimensions, in fp32 and bf16. Transposed convolutions, and the gradient of the input of strided ones, take up to twice
# as much. Workspaces of other operators are small; those of accelerators are not known.


def workspace_bytes(node: fx.Node) -> int:
    """Return the bytes that the node's kernel allocates while it runs, besides its results."""
    if node.target is aten.convolution.default:
        x, weight, out = *_first_values(node, 2), node.meta["val"]
        return _convolution_forward(x, weight, out) if _blocked(x) else _columns(x, weight, out)
    if node.target is aten.convolution_backward.default:
        out, x, weight = _first_values(node, 3)
        return max(nbytes(x) + nbytes(out), nbytes(weight)) if _blocked(x) else _columns(x, weight, out)
    return 0


def _convolution_forward(x: Tensor, weight: Tensor, out: Tensor) -> int:
    """The operands are copied before, the result behind."""
    return max(nbytes(x) + nbytes(weight), nbytes(out))


def _columns(x: Tensor, weight: Tensor, out: Tensor) -> int:
    """Of each place of the result what the kernel covers there; one that covers a single place reads it directly."""
    if x.device.type != "cpu" or x.dtype != torch.float64:
        return 0
    covered = math.prod(weight.shape[2:])
    return 0 if covered == 1 else x.shape[0] * x.shape[1] * covered * math.prod(out.shape[2:]) * x.itemsize


def _blocked(x: Tensor) -> bool:
    """Whether oneDNN computes it, from a layout that is not its own: channels that lie last stay where they are."""
    if x.device.type != "cpu" or x.dtype == torch.float64 or not torch.backends.mkldnn.is_available():
        return False
    return x.is_contiguous() or x.dim() != 4 or not x.is_contiguous(memory_format=torch.channels_last)


def _first_values(node: fx.Node, count: int) -> list[Tensor]:
    given = node.args[:count]
    return [one.meta["val"] for one in given if isinstance(one, fx.Node)]
