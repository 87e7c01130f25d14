"""Predict the memory of a step from its emitted graph: bytes at every node, and their kinds at the peak.

A value has a storage of its own, or shares that of the tensor it is a view of or is written to. A storage is freed
after the last node that reads it, as the code of ``torch.fx`` drops every name after its last use. Stored state and the
batch are never freed. The input of an asynchronous collective is freed after the wait. On an accelerator only its own
memory counts.

Values that the backend's compiler fuses into their readers (``mark_fused``) are never in memory. What such a value is
computed from is read where the value is.
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
from zerograph.ir.sbp import PartialSum
from zerograph.ir.sizes import graph_sizes, largest
from zerograph.ir.step_graph import nbytes, tensors_of
from zerograph.ops import blocks
from zerograph.ops.experts import EXPERT_WEIGHT_GRADIENT, FIRST
from zerograph.ops.flex_attention import flex_attention, scores_of
from zerograph.ops.offload import FETCH, TRANSFER

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

MemoryKind = Literal[
    "parameters", "optimizer state", "buffers", "inputs", "gathered", "gradients", "activations", "update", "temporary"
]
_INPUT_KINDS: dict[str, MemoryKind] = {
    "bucket": "parameters",
    "gather_buffer": "gathered",
    "parameter": "parameters",
    "state": "optimizer state",
    "accumulated": "gradients",
    "residual": "optimizer state",
    "received": "gathered",
    "gradient": "gradients",
    "hyperparameter": "optimizer state",
    "buffer": "buffers",
    "input": "inputs",
    "seed": "inputs",
    "size": "inputs",
    "scaler": "optimizer state",
    # Inputs of a loop's body, which belong to the graph around it.
    "value": "activations",
    "result": "gradients",
    "micro_batch": "inputs",
}


@dataclass(frozen=True)
class Memory:
    """The predicted peak memory of a step on this rank.

    Attributes:
        peak: bytes at the peak, with stored state and the batch.
        at_rest: bytes between steps: parameters, optimizer state, buffers and gather buffers. Files do not count; what
            a step reads from them counts in ``kinds``.
        kinds: bytes at the peak by kind: stored ``"parameters"``, ``"optimizer state"`` and ``"buffers"``; the batch,
            ``"inputs"``; ``"gathered"`` parameters, ``"gradients"`` and ``"activations"``; intermediate values of the
            ``"update"``; and ``"temporary"`` memory inside an operator.
        node: the node of ``graph()`` at the peak.
        where: phase, module and source line of that node.
        sizes: the sizes that the numbers hold for, by symbol of a dynamic dimension: the declared maximum, else the
            largest size that was seen when the step was compiled. Empty for a step without dynamic dimensions.
        declared: the symbols whose maximum is declared.
    """

    peak: int
    at_rest: int
    kinds: Mapping[MemoryKind, int]
    node: str
    where: Origin
    sizes: Mapping[str, int] = field(default_factory=dict)
    declared: tuple[str, ...] = ()

    @property
    def validity(self) -> str:
        """Show the sizes that the numbers hold for; empty for a step without dynamic dimensions."""
        return ", ".join(
            f"{name} <= {size:,} ({'declared' if name in self.declared else 'seen'})"
            for name, size in self.sizes.items()
        )

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {show_bytes(count)}" for name, count in self.kinds.items())
        place = " ".join(filter(None, (self.where.phase, self.where.module, self.where.source)))
        validity = f", for {self.validity}" if self.sizes else ""
        return f"{show_bytes(self.peak)} at {self.node} ({place}): {kinds}{validity}"


@dataclass(eq=False)
class Storage:
    """Memory that one node allocates and several may share.

    Attributes:
        bytes: size in bytes.
        kind: kind of its values.
        born: position of the node that allocates it.
        dies: last position at which it is alive.
        read: last position at which a node reads it; after that only a collective in flight keeps it alive.
        is_input: it is an input of the graph.
        sources: of a fused value, which has no memory: the storages that it is computed from.
    """

    bytes: int
    kind: MemoryKind
    born: int
    dies: int
    read: int
    is_input: bool = False
    sources: Sequence[Storage] = ()


@dataclass(frozen=True, eq=False)
class Profile:
    """Memory of a graph over its nodes.

    Attributes:
        nodes: the nodes in order.
        bytes: bytes in memory while each node runs.
        storages: all storages.
        temporary: bytes that each node allocates and frees while it runs.
        of: the storages of each node's results; None for results without one.
        bodies: profile of a loop's body, by the position of the loop.
    """

    nodes: Sequence[fx.Node]
    bytes: Sequence[int]
    storages: Sequence[Storage]
    temporary: Sequence[int]
    of: Mapping[fx.Node, Sequence[Storage | None]] = field(repr=False)
    bodies: Mapping[int, Profile] = field(default_factory=dict, repr=False)

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return max(self.bytes)

    def memory(self) -> Memory:
        """Return the memory at the peak."""
        at = self.bytes.index(self.peak)
        kinds: Counter[MemoryKind] = Counter()
        for storage in self.storages:
            if storage.born <= at <= storage.dies:
                kinds[storage.kind] += storage.bytes
        node = self.nodes[at]
        if at in self.bodies:
            own, node = self.bodies[at].own()
            # The rest are partial sums of results.
            kinds.update(own + Counter({"gradients": self.temporary[at] - own.total()}))
        else:
            kinds["temporary"] += self.temporary[at]
        stored = [storage for node in self.nodes if node.op in ("placeholder", "get_attr") for storage in self.of[node]]
        at_rest = sum(storage.bytes for storage in stored if storage is not None and storage.kind != "inputs")
        shown = {kind: count for kind, count in kinds.most_common() if count}
        symbols = graph_sizes(self.nodes[0].graph)
        sizes = {} if symbols is None else symbols.largest_sizes()
        declared = tuple(name for name in sizes if symbols is not None and symbols.is_declared(name))
        return Memory(self.peak, at_rest, shown, node.name, origin(node), sizes, declared)

    def own(self) -> tuple[Counter[MemoryKind], fx.Node]:
        """Return the bytes at the peak without the graph's inputs, by kind, and the node at the peak."""
        at = self.bytes.index(self.peak)
        kinds: Counter[MemoryKind] = Counter({"temporary": self.temporary[at]})
        for storage in self.storages:
            if storage.born <= at <= storage.dies and not storage.is_input:
                kinds[storage.kind] += storage.bytes
        return kinds, self.nodes[at]


def profile(graph: fx.Graph, *, host: bool = False) -> Profile:
    """Return the memory profile of a graph in this rank's shapes, in time linear in nodes.

    Args:
        graph: the emitted graph.
        host: count the CPU's memory of a model on an accelerator, instead of the accelerator's.
    """
    nodes = list(graph.nodes)
    on_cpu = not host and not any(tensor.device.type != "cpu" for node in nodes for tensor in tensors_of(node))
    walk = _Walk(on_cpu, host)
    for position, node in enumerate(nodes):
        walk.visit(position, node)
    walk.end(len(nodes) - 1)
    changes = [0] * (len(nodes) + 1)
    for storage in walk.storages:
        changes[storage.born] += storage.bytes
        changes[storage.dies + 1] -= storage.bytes
    allocated: Iterable[int] = itertools.accumulate(changes[:-1])
    temporary = [walk.temporary.get(position, 0) for position in range(len(nodes))]
    total = [storages + within for storages, within in zip(allocated, temporary, strict=True)]
    return Profile(nodes, total, walk.storages, temporary, walk.of, walk.bodies)


def computed_bytes(graph: fx.Graph) -> int:
    """Return the peak of a graph in bytes without its inputs."""
    return sum(profile(graph).own()[0].values())


@dataclass
class _Walk:
    """A walk over the nodes in order that assigns storages to values.

    Attributes:
        on_cpu: no value is on an accelerator. Otherwise the CPU's memory does not count, or, with ``host``, only it.
        host: count the CPU's memory.
        storages: all storages so far.
        of: the storages of each node's results.
        temporary: bytes that a node allocates and frees while it runs, by position.
        bodies: profile of a loop's body, by position.
    """

    on_cpu: bool = True
    host: bool = False
    storages: list[Storage] = field(default_factory=list)
    of: dict[fx.Node, Sequence[Storage | None]] = field(default_factory=dict)
    temporary: dict[int, int] = field(default_factory=dict)
    bodies: dict[int, Profile] = field(default_factory=dict)
    _permanent: list[Storage] = field(default_factory=list)
    _shards: dict[str, Storage | None] = field(default_factory=dict)
    _in_transfer: Sequence[Storage | None] = ()

    def visit(self, position: int, node: fx.Node) -> None:
        """Assign storages to the node's results, and extend the lives of those that it reads."""
        inputs = node.all_input_nodes
        for source in inputs:
            _extend(self.of[source], position)
        if node.target is TRANSFER:
            # The source of a transfer is freed during the next transfer at the latest.
            _extend(self._in_transfer, position)
            self._in_transfer = self.of[inputs[0]]
        if node.target is WAIT and not _reads_a_copy(inputs[0]):
            for source in inputs[0].all_input_nodes:
                for storage in filter(None, self.of[source]):
                    storage.dies = max(storage.dies, position)
        if node.op in ("placeholder", "get_attr"):
            self._add_input(node)
        elif node.op == "output":
            self._permanent += [storage for source in inputs for storage in self.of[source] if storage is not None]
            self.of[node] = ()
        else:
            self.of[node] = self._computed(position, node)
            temporary = temporary_bytes(node)
            if (loop := loop_of(node)) is not None:
                self.bodies[position] = body = profile(loop.body.graph, host=self.host)
                temporary = sum(body.own()[0].values()) + sum(
                    math.prod(result.partial) * result.dtype.itemsize
                    for result in loop.results
                    if result.partial is not None
                )
            elif self.host:
                # Temporary memory is on the accelerator; that of an update on the CPU is negligible.
                temporary = 0
            if temporary:
                self.temporary[position] = temporary
        if node.target is aten.copy_.default:
            self._note_gradient(node)

    def _add_input(self, node: fx.Node) -> None:
        """Assign storages to a placeholder or constant."""
        node_role = role(node)
        kind: MemoryKind = "buffers" if node_role is None else _INPUT_KINDS[node_role.kind]
        self.of[node] = storages = [self._new(0, kind, value) for value in _values(node)]
        if node_role is not None and node_role.kind == "bucket":
            self._shards[node_role.name] = storages[0]
        elif node_role is not None and node_role.kind == "gather_buffer":
            assert node_role.bucket is not None
            shard, buffer = self._shards[node_role.bucket], storages[0]
            assert shard is not None
            assert buffer is not None
            # The shard is a slice of the buffer: count only the slices of the other ranks.
            buffer.bytes -= shard.bytes
        for storage in filter(None, storages):
            # The loop itself creates the number of the micro-batch.
            storage.is_input = node_role is None or node_role.kind != "micro_batch"
            self._permanent.append(storage)

    def end(self, last: int) -> None:
        """Keep inputs and outputs alive to the last position."""
        for storage in self._permanent:
            storage.dies = storage.read = last

    def _computed(self, position: int, node: fx.Node) -> list[Storage | None]:
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            if not isinstance(source.meta["val"], Tensor):
                assert isinstance(index, int)
                return [self.of[source][index]]
        if (loop := loop_of(node)) is not None:
            kinds: list[MemoryKind] = [
                "activations" if result.gradient is None else "gradients" for result in loop.results
            ]
            return [self._new(position, kind, value) for kind, value in zip(kinds, node.meta["val"], strict=True)]
        kind = self._kind(node)
        if meta(node).get("fused"):
            read = [storage for source in node.all_input_nodes for storage in self.of[source] if storage is not None]
            self.storages.append(Storage(0, kind, position, position, position, sources=read))
            return [self.storages[-1]]
        sources = shared_arguments(node)
        storages: list[Storage | None] = []
        for index, value in enumerate(_values(node)):
            source = sources[min(index, len(sources) - 1)] if sources else None
            shared = None if source is None else self.of[source][0]
            storages.append(self._new(position, kind, value) if shared is None else shared)
        # A shared storage lives at least until this node.
        _extend(storages, position)
        return storages

    def _new(self, position: int, kind: MemoryKind, value: Any) -> Storage | None:
        if not isinstance(value, Tensor):
            return None
        counts = self.on_cpu or (value.device.type == "cpu") == self.host
        self.storages.append(Storage(_allocated(value) if counts else 0, kind, position, position, position))
        return self.storages[-1]

    def _kind(self, node: fx.Node) -> MemoryKind:
        if node.target is FETCH and (fetched := role(node.all_input_nodes[0])) is not None:
            return _INPUT_KINDS[fetched.kind]
        boxing = boxing_of(node)
        phase = origin(node).phase
        if "gradient" in node.meta or (boxing is not None and boxing.tensor.kind == "gradient"):
            return "gradients"
        if phase == "backward" and any(isinstance(dim_sbp, PartialSum) for dim_sbp in meta(node).get("sbp", ())):
            return "gradients"
        first = next((storage for source in node.all_input_nodes[:1] for storage in self.of[source][:1]), None)
        # The source is a bucket, or its shard in the compute dtype.
        from_bucket = first is not None and first.kind in ("parameters", "gathered")
        if from_bucket and (boxing is not None or node.target in _COPIES):
            return "gathered"
        if node.target in _CODES and first is not None and first.kind == "gradients":
            return "gradients"
        return "update" if phase == "update" else "activations"

    def _note_gradient(self, node: fx.Node) -> None:
        """Change the kind of a value that is copied into a bucket of gradients to gradients."""
        target, value = (self.of[argument][0] for argument in node.args[:2])  # type: ignore[index]
        if target is not None and value is not None and target.kind == "gradients" and value.kind == "activations":
            value.kind = "gradients"


def _extend(storages: Iterable[Storage | None], position: int) -> None:
    """Extend the lives of storages that are read at a position."""
    for storage in filter(None, storages):
        storage.dies = max(storage.dies, position)
        if storage.read < position:
            storage.read = position
            _extend(storage.sources, position)


def _values(node: fx.Node) -> Sequence[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _allocated(value: Tensor) -> int:
    # The CUDA allocator of torch rounds up to 512 bytes.
    return nbytes(value) if value.device.type == "cpu" else -(-nbytes(value) // 512) * 512


def _reads_a_copy(start: fx.Node) -> bool:
    """Return True if the collective works on a copy of its input, which is then not needed until the wait."""
    copying = "zerograph.gather_pieces.default", "zerograph.sum_ranks.default"
    return start.target is c10d.all_reduce.default or str(start.target) in copying


_CODES = {
    blocks.encode,
    blocks.decode,
    blocks.sum_decoded,
    blocks.coding_error,
    blocks.encode_sum,
    blocks.difference,
}
_COPIES = {aten._to_copy.default, aten.clone.default, TRANSFER, *_CODES}


def temporary_bytes(node: fx.Node) -> int:
    """Return the bytes that the node allocates and frees while it runs."""
    return int(meta(node).get("temporary", 0)) + workspace_bytes(node) + _cast_bytes(node)


def _cast_bytes(node: fx.Node) -> int:
    """Return the accelerator's memory of the values that a transfer casts before it copies them to the CPU."""
    if node.target is not TRANSFER:
        return 0
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return nbytes(value) if source.device.type != "cpu" and source.dtype != value.dtype else 0


# ---- workspaces ----
#
# A workspace is memory that a kernel allocates besides its results and frees again. Only those as large as the operands
# count: convolutions on the CPU. oneDNN works on blocks of channels and copies its operands to them. Without oneDNN
# (fp64) torch writes the columns that each weight is multiplied with. Measured as the resident size of a process
# with torch 2.13, these formulas are within 10 % for kernels of 1x1 to 7x7, grouped, depthwise, of one to three
# dimensions, in fp32 and bf16. Transposed convolutions, and the gradient of the input of strided ones, take up to twice
# as much. FlexAttention has its scores in memory several times, measured in fp32: 3.1 times in forward, in backward 4.1
# to 4.7 times. Workspaces of other operators are small; those of accelerators are not known.


def workspace_bytes(node: fx.Node) -> int:
    """Return the bytes that the node's kernel allocates while it runs, besides its results."""
    if node.target is aten.convolution.default:
        x, weight, out = *_first_values(node, 2), node.meta["val"]
        return _convolution_forward(x, weight, out) if _blocked(x) else _columns(x, weight, out)
    if node.target is aten.convolution_backward.default:
        out, x, weight = _first_values(node, 3)
        return max(nbytes(x) + nbytes(out), nbytes(weight)) if _blocked(x) else _columns(x, weight, out)
    if node.target in FIRST:
        return _rows_of_pairs(node, *_first_values(node, 3))
    if (scores := scores_of(node)) is not None:
        return (3 if node.target is flex_attention else 5) * math.prod(scores[0]) * scores[2].itemsize
    return 0


def _rows_of_pairs(node: fx.Node, x: Tensor, other: Tensor, ids: Tensor) -> int:
    """Return the size of rows read and computed for each pair of a token and an expert, and of their numbers."""
    pairs = math.prod(largest(ids.shape))
    # Two numbers of each pair give the order of experts; its place among the results takes three more to compute.
    order, places = 2 * 8 * pairs, 3 * 8 * pairs
    if node.target is EXPERT_WEIGHT_GRADIENT:
        return pairs * (x.shape[-1] + other.shape[-1]) * x.itemsize + order
    groups, _, width_in, width_out = other.shape
    read, computed = (pairs * width * x.itemsize for width in (width_in, width_out))
    return computed + order + max(read, groups * computed + places) - nbytes(node.meta["val"])


def _convolution_forward(x: Tensor, weight: Tensor, out: Tensor) -> int:
    """Return the larger of two copies: the operands before the kernel, the result after it."""
    return max(nbytes(x) + nbytes(weight), nbytes(out))


def _columns(x: Tensor, weight: Tensor, out: Tensor) -> int:
    """Return the size of all patches that the kernel is applied to; a 1x1 kernel needs no copy of them."""
    if x.device.type != "cpu" or x.dtype != torch.float64:
        return 0
    covered = math.prod(weight.shape[2:])
    return 0 if covered == 1 else math.prod(largest((*x.shape[:2], *out.shape[2:]))) * covered * x.itemsize


def _blocked(x: Tensor) -> bool:
    """Return True if oneDNN computes it and copies its operands: tensors in channels-last layout are not copied."""
    if x.device.type != "cpu" or x.dtype == torch.float64 or not torch.backends.mkldnn.is_available():
        return False
    return x.is_contiguous() or x.dim() != 4 or not x.is_contiguous(memory_format=torch.channels_last)


def _first_values(node: fx.Node, count: int) -> list[Tensor]:
    return [argument.meta["val"] for argument in node.args[:count] if isinstance(argument, fx.Node)]
