"""The placement problem along one mesh dimension, with the choices made so far."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import FakeTensor
from zerograph.ir.mesh import Mesh, local_shape
from zerograph.ir.metadata import meta
from zerograph.ir.sbp import PartialSum, Sbp, Signature, Split, broadcast
from zerograph.ir.step_graph import nbytes, output_nodes
from zerograph.passes import rules
from zerograph.passes.accumulation.time_boxing import batch_only_nodes
from zerograph.passes.context import Context
from zerograph.passes.placement.boxing import boxing
from zerograph.passes.placement.cost import PACKET, boxing_cost, signature_cost

# A tensor of the graph: the node that yields it, and its index among the node's tensors.
TensorId = tuple[fx.Node, int]

# Along time, collecting a split tensor means computing on the whole batch, which saves nothing. The penalty keeps this
# for what cannot be placed otherwise; it is squared for tensors that follow from the batch alone.
_WHOLE_BATCH = 1e6 * PACKET

# Where a sequence stays split, a boxing is cheaper before an operator than after it: others may read its result too.
_LATER = 1.01


@dataclass
class PlacementProblem:
    """Choose an SBP for every tensor along one mesh dimension. Earlier mesh dimensions are placed already.

    Attributes:
        graph: the step graph, of global tensors.
        dim: the mesh dimension.
        zero_dims: the mesh dimensions along which ZeRO splits.
        batch_is_split: whether the batch is split along this dimension.
        is_sequence: the sequence is split along this dimension.
        ranks: number of ranks along this dimension.
        divisor: what must divide the size of a dimension that is split.
        values: the tensors that each node yields, in the shape that the ranks along this dimension hold together.
        is_time: the dimension is time, along which outputs and gradients are collected and summed without sending.
        batch_only: along time, the nodes that can be computed from the whole batch before the first micro-batch.
        placed: the solved problems of the earlier mesh dimensions.
        mesh: the mesh.
        along_slices: the solved problem along all slices of ``config.virtual_ranks``.
        wanted: SBP in which some outputs are returned.
        unreduced: those of them that are partial stay so.
        outside: the operators are those of no step, whose other outputs keep the SBP in which they are computed.
        output_sbps: SBP of graph outputs if no parameter were split along this dimension. Empty unless the user splits
            parameters along it.
        sbp: SBP along this dimension of every tensor that a node yields.
        signature: signature chosen for every operator.
    """

    graph: fx.Graph
    dim: int
    zero_dims: tuple[int, ...]
    batch_is_split: bool
    ranks: int
    divisor: int
    values: dict[fx.Node, tuple[Tensor, ...]]
    placed: Sequence[PlacementProblem]
    mesh: Mesh
    is_sequence: bool = False
    is_time: bool = False
    batch_only: frozenset[fx.Node] = frozenset()
    along_slices: PlacementProblem | None = None
    wanted: Mapping[TensorId, Sbp] = field(default_factory=dict)
    unreduced: bool = False
    outside: bool = False
    output_sbps: Mapping[TensorId, Sbp] = field(default_factory=dict)
    sbp: dict[fx.Node, tuple[Sbp, ...]] = field(default_factory=dict)
    signature: dict[fx.Node, Signature] = field(default_factory=dict)
    _inputs: dict[fx.Node, list[TensorId]] = field(default_factory=dict)
    _readers: dict[TensorId, list[fx.Node]] = field(default_factory=dict)
    _nbytes: dict[TensorId, int] = field(default_factory=dict)

    def choose(self, node: fx.Node, signature: Signature) -> None:
        """Run the node under this signature."""
        self.signature[node] = signature
        self.sbp[node] = signature.outputs

    def tensors_of(self, node: fx.Node) -> list[TensorId]:
        """Return every tensor that the node yields."""
        return [(node, index) for index in range(len(self.values[node]))]

    def sbp_of(self, tensor: TensorId) -> Sbp:
        """Return the SBP of a tensor along this dimension."""
        return self.sbp[tensor[0]][tensor[1]]

    def output_sbp(self, tensor: TensorId, have: Sbp) -> Sbp:
        """Return the SBP in which the user receives an output: never partial, and split only if the batch is.

        Args:
            tensor: the output.
            have: the SBP in which it is computed.
        """
        if self.is_time:
            return have
        if tensor in self.wanted or self.outside:
            return have if self.unreduced and isinstance(have, PartialSum) else self.wanted.get(tensor, have)
        have = self.output_sbps.get(tensor, have)
        return have if isinstance(have, Split) and self.batch_is_split else broadcast

    def nbytes(self, tensor: TensorId) -> int:
        """Return the bytes of the tensor that the ranks along this dimension hold together."""
        if tensor not in self._nbytes:
            self._nbytes[tensor] = nbytes(self.values[tensor[0]][tensor[1]])
        return self._nbytes[tensor]

    def inputs(self, node: fx.Node) -> list[TensorId]:
        """Return the tensors that the node reads, in the order of its arguments."""
        if node not in self._inputs:
            self._inputs[node] = list(map(rules.output_of, rules.tensor_arguments(node)))
        return self._inputs[node]

    def signatures(self, node: fx.Node) -> tuple[Signature, ...] | None:
        """Return the signatures that the operator's rule allows along this dimension; None without a rule."""
        return rules.signatures_of(node, self.divisor, self.operands(node), self.values[node], self.dim)

    def operands(self, node: fx.Node) -> tuple[Tensor, ...]:
        """Return the parts of tensors that the earlier mesh dimensions leave for an operator to read."""
        parts = []
        for number, (source, index) in enumerate(self.inputs(node)):
            need = [problem.signature[node].inputs[number] for problem in self.placed]
            is_as_computed = need == [problem.sbp[source][index] for problem in self.placed]
            value = self.values[source][index]
            parts.append(value if is_as_computed else _local_part(rules.output_values(source)[index], need, self.mesh))
        return tuple(parts)

    def readers(self, tensor: TensorId) -> list[fx.Node]:
        """Return the nodes that read a tensor, also through ``getitem``."""
        if tensor not in self._readers:
            readers: dict[fx.Node, None] = {}
            for user in tensor[0].users:
                if user.target is not operator.getitem:
                    readers[user] = None
                elif rules.output_of(user) == tensor:
                    readers.update(user.users)
            self._readers[tensor] = list(readers)
        return self._readers[tensor]

    def needs(self, tensor: TensorId, have: Sbp, exclude: fx.Node | None = None) -> Iterator[Sbp]:
        """Yield the SBPs in which readers need the tensor if it is computed as ``have``.

        Args:
            tensor: the tensor.
            have: the SBP in which it is computed.
            exclude: a reader to leave out.
        """
        for reader in self.readers(tensor):
            if reader is exclude:
                continue
            if reader.target is boxing:
                if meta(reader).get("by_user"):
                    yield meta(reader)["target_sbp"][self.dim]
                    continue
                # Along ZeRO's dimensions the stage decides how a partial gradient is reduced, and placement must not
                # depend on the stage. Along any other dimension the reduction is one more all-reduce.
                summed = isinstance(have, PartialSum) and self.dim not in self.zero_dims and not self.is_time
                if isinstance(have, Split) or summed:
                    yield broadcast
            elif reader.op == "output":
                yield self.output_sbp(tensor, have)
            elif reader in self.signature:
                yield from self.needed_by(reader, self.signature[reader], tensor)

    def needed_by(self, reader: fx.Node, signature: Signature, tensor: TensorId) -> list[Sbp]:
        """Return the SBPs in which ``reader`` needs the tensor under ``signature``, one for each occurrence."""
        return [sbp for source, sbp in zip(self.inputs(reader), signature.inputs, strict=True) if source == tensor]

    def cost(self, tensor: TensorId, have: Sbp, needs: Iterable[Sbp]) -> float:
        """Return the cost of boxing a tensor from ``have`` to each of ``needs``."""
        if not self.is_time:
            return boxing_cost(have, needs, self.nbytes(tensor), self.ranks)
        needs = frozenset(needs)
        total = boxing_cost(have, needs, self.nbytes(tensor), self.ranks)
        if have != broadcast and any(need != have and Split in (type(have), type(need)) for need in needs):
            total += _WHOLE_BATCH * (_WHOLE_BATCH if tensor[0] in self.batch_only else 1)
        return total

    def tensor_cost(self, tensor: TensorId) -> float:
        """Return the cost of all boxing of one tensor."""
        have = self.sbp_of(tensor)
        return self.cost(tensor, have, self.needs(tensor, have))

    def entry_cost(self, node: fx.Node, signature: Signature, *, penalize_splits: bool) -> float:
        """Return the cost of running ``node`` under ``signature``, with its inputs as they are placed now.

        Args:
            node: an operator.
            signature: one of its signatures.
            penalize_splits: add the cost of gathering outputs that are split although no input is.
        """
        inputs = self.inputs(node)
        haves = [self.sbp_of(tensor) for tensor in inputs]
        total = signature_cost(signature)
        for tensor, have, need in zip(inputs, haves, signature.inputs, strict=True):
            total += self.cost(tensor, have, (need,))
        for index, dims in enumerate(meta(node).get("sequence_dims", ()) if self.is_sequence else ()):
            if self.dim in dims:
                later = self.cost((node, index), signature.outputs[index], (Split(dims[self.dim]),))
                total += _LATER * later
        if penalize_splits and not any(isinstance(have, Split) for have in haves):
            for index, sbp in enumerate(signature.outputs):
                if isinstance(sbp, Split):
                    total += self.cost((node, index), sbp, (broadcast,))
        return total

    def leaves_loop(self, tensor: TensorId, need: Sbp) -> bool:
        """Return whether, along time, the tensor has the SBP ``need`` only after the last micro-batch."""
        return self.sbp_of(tensor) not in (broadcast, need)

    def total_cost(self) -> float:
        """Return the cost of all boxing in the graph."""
        return sum(self.tensor_cost(tensor) for node in self.values for tensor in self.tensors_of(node))


def placement_problem(
    graph: fx.Graph, context: Context, placed: Sequence[PlacementProblem], dim: int | None = None
) -> PlacementProblem:
    """Return the problem along the next mesh dimension.

    Args:
        graph: the step graph, of global tensors.
        context: mesh and batch layout.
        placed: the solved problems of the earlier mesh dimensions.
        dim: the mesh dimension, if it is not the one after these.
    """
    values = {}
    for node in graph.nodes:
        tensors = rules.output_values(node)
        if not tensors or node.target is operator.getitem:
            continue
        prefixes = [tuple(problem.sbp[node][index] for problem in placed) for index in range(len(tensors))]
        values[node] = tuple(
            _local_part(value, sbp, context.mesh) for value, sbp in zip(tensors, prefixes, strict=True)
        )
    dim = len(placed) if dim is None else dim
    splits = {sbp[dim] for sbp in context.batch.inputs if isinstance(sbp[dim], Split)}
    # Outside of graphs a tensor may be split along any dimension.
    batch_is_split, is_sequence = bool(splits), context.batch.outputs is None and bool(splits - {Split(0)})
    is_time = dim == context.time_dim
    batch_only = batch_only_nodes(graph) if is_time else frozenset()
    ranks = context.mesh.shape[dim]
    zero_dims = context.policy.dims
    sizes = ranks, context.mesh.divisor(dim)
    return PlacementProblem(
        *(graph, dim, zero_dims, batch_is_split, *sizes, values, tuple(placed), context.mesh),
        *(is_sequence, is_time, batch_only),
        wanted={} if is_time else _wanted(graph, context, dim),
        unreduced=context.gradients == "unreduced",
        outside=context.batch.outputs is not None,
    )


def _wanted(graph: fx.Graph, context: Context, dim: int) -> dict[TensorId, Sbp]:
    """Return the SBP along ``dim`` of the outputs that have one, whatever computes them; gradients do."""
    outputs = output_nodes(graph)
    if context.batch.outputs is not None:
        pairs = list(zip(outputs, context.batch.outputs, strict=True))
    else:
        of_gradients = {bucket.name: bucket.gradient_sbp for bucket in context.buckets}
        roles = meta(graph.output_node())["roles"]
        pairs = [(node, of_gradients.get(role.bucket or "")) for node, role in zip(outputs, roles, strict=True)]
    return {rules.output_of(node): sbp[dim] for node, sbp in pairs if sbp is not None}


def _local_part(value: Any, sbp: Sequence[Sbp], mesh: Mesh) -> Tensor:
    """Return a fake tensor of the part of ``value`` that is left by the mesh dimensions of ``sbp``."""
    shape = local_shape(value.shape, sbp, mesh)
    if shape == tuple(value.shape):
        return value  # type: ignore[no-any-return]
    assert isinstance(value, FakeTensor)
    with value.fake_mode:
        return torch.empty(shape, dtype=value.dtype, device=value.device)
