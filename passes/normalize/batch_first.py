"""batch_first: put split dimensions first where a view flattens them with others, so that they stay split.

Ranks split the batch, the sequence, or both. A matrix product flattens ``(batch, time, channels)`` to
``(batch time) channels``: a slice of the sequence is no slice of those rows, nor is one of the batch where the time
comes first, as in ``nn.Transformer``, ``nn.MultiheadAttention`` and recurrent networks. Rows of a product, a pointwise
operator or a sum may stand in any order. So this pass puts the rows of each rank together, and restores the order for
readers that depend on it. For two ranks along the sequence the order is ``(s:2 batch time/2)``: on each rank, whose
part of ``s`` has size 1, that is the order of the program, and nothing is copied. The rules tell which readers do not
depend on it: a dimension that may be split may be permuted, if all operands that are split together are permuted
together.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload, size_key
from zerograph.ir.dims import Size
from zerograph.ir.metadata import meta, origin
from zerograph.ir.rewrite import emit, operand
from zerograph.ir.sbp import Signature, Split
from zerograph.ir.sizes import hints
from zerograph.ir.step_graph import placeholders
from zerograph.ops.attention import ACCELERATED, BACKWARD, FORWARD
from zerograph.ops.flex_attention import flex_attention, flex_attention_backward
from zerograph.passes import rules
from zerograph.passes.context import Context
from zerograph.passes.rules.batch_dims import signature_along

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_ATTENTION_BACKWARD = (BACKWARD, flex_attention_backward, *ACCELERATED.values())
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
_ATTENTION = (FORWARD, flex_attention, *ACCELERATED, *_ATTENTION_BACKWARD)

# For each index that ranks split, the dimension of a tensor that runs over it, or None.
_Dims = tuple[int | None, ...]


def batch_first(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Flatten what ranks split before the dimensions that it is flattened with, not after them."""
    context = context.along_slices()
    if context.ranks > 1:
        inputs = {
            node: [sbp.dim if isinstance(sbp, Split) else None for sbp in context.batch.inputs[int(role.name)]]
            for node in placeholders(module.graph, "input")
            if (role := meta(node)["role"]) is not None
        }
        walk = _Walk(_indices(list(inputs.values()), context.mesh.shape))
        for node, dims in inputs.items():
            walk.dims[node] = tuple(dims[index.mesh_dims[0]] for index in walk.indices)
        for node in list(module.graph.nodes) if walk.indices else ():
            walk.visit(node)
        walk.record_sequences()
    return module


@dataclass(frozen=True)
class _Index:
    """An index that ranks split: the batch, or the sequence.

    Attributes:
        mesh_dims: the mesh dimensions along which all inputs are split alike.
        shape: number of ranks along each.
        is_sequence: an input is split along another dimension than 0.
    """

    mesh_dims: tuple[int, ...]
    shape: tuple[int, ...]
    is_sequence: bool

    @property
    def ranks(self) -> int:
        """Number of parts."""
        return math.prod(self.shape)


def _indices(inputs: Sequence[Sequence[int | None]], mesh_shape: Sequence[int]) -> tuple[_Index, ...]:
    """Return the indices that ranks split, from the dimension that each mesh dimension splits of each input."""
    alike: dict[tuple[int | None, ...], list[int]] = {}
    for mesh_dim, ranks in enumerate(mesh_shape):
        dims = tuple(dims[mesh_dim] for dims in inputs)
        if ranks > 1 and any(dim is not None for dim in dims):
            alike.setdefault(dims, []).append(mesh_dim)
    return tuple(
        _Index(tuple(mesh_dims), tuple(mesh_shape[dim] for dim in mesh_dims), any(dims))
        for dims, mesh_dims in alike.items()
    )


@dataclass(frozen=True)
class _Order:
    """The rows of dimension ``dim`` run over ``factors``; those of the program run over them in another order.

    Attributes:
        dim: the dimension.
        factors: sizes, in the program's order, slowest first.
        places: indices of the factors in the order that the rows have.
        starts: for each index that ranks split, the number of its slowest factor; None if the dimension has none.
    """

    dim: int
    factors: tuple[Size, ...]
    places: tuple[int, ...]
    starts: _Dims

    @property
    def key(self) -> tuple[Any, ...]:
        """The rows' order in a form that can be compared without a guard."""
        return tuple(map(size_key, self.factors)), self.places

    @property
    def dims(self) -> _Dims:
        """The dimension for each index that ranks split."""
        return tuple(None if start is None else self.dim for start in self.starts)


@dataclass
class _Walk:
    """One walk over the nodes.

    Attributes:
        indices: the indices that ranks split.
        dims: the split dimensions of each tensor that has one; a list for a node with several results.
        order: the order of tensors whose rows are permuted, likewise.
        restored: permuted tensors with the program's order.
    """

    indices: tuple[_Index, ...]
    dims: dict[fx.Node, Any] = field(default_factory=dict)
    order: dict[fx.Node, Any] = field(default_factory=dict)
    restored: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def visit(self, node: fx.Node) -> None:
        if node.op == "output":
            self._restore_inputs(node)
        elif node.op != "call_function":
            return
        elif node.target is operator.getitem:
            source, number = rules.output_of(node)
            for table in (self.dims, self.order):
                if isinstance(table.get(source), list):
                    table[node] = table[source][number]
        elif node.target in _VIEWS:
            self._view(node)
        elif _is_described(node):
            self._compute(node)
        else:
            self._restore_inputs(node)

    def record_sequences(self) -> None:
        """Record where ``place`` should keep a sequence split."""
        sequences = [(number, index.mesh_dims) for number, index in enumerate(self.indices) if index.is_sequence]
        for node, dims in self.dims.items() if sequences else ():
            outputs = dims if isinstance(dims, list) else [dims]
            meta(node)["sequence_dims"] = tuple(
                {
                    mesh_dim: each[number]
                    for number, mesh_dims in sequences
                    for mesh_dim in mesh_dims
                    if each is not None and each[number] is not None
                }
                for each in outputs
            )

    def _view(self, node: fx.Node) -> None:
        source = operand(node)
        dims, order = self.dims.get(source), self.order.get(source)
        if dims is None:
            return
        shape, target = hints(source.meta["val"].shape), hints(node.meta["val"].shape)
        if self.order:
            # A permuted tensor has other strides than the program's tensor.
            node.target = aten.reshape.default
        if order:
            same = _same_dimension(shape, target, order.dim)
            if same is not None:
                self.order[node] = order = replace(order, dim=same)
                others = self._dims_after(shape, target, dims)
                self.dims[node] = tuple(a if b is None else b for a, b in zip(others, order.dims, strict=True))
                return
            with node.graph.inserting_before(node):
                node.args = (_in_program_order(node, source, order), _shape(node))
            node.target = aten.reshape.default
            factors = hints((*shape[: order.dim], *order.factors, *shape[order.dim + 1 :]))
            shift = len(order.factors) - 1
            starts = [
                order.dim + start if start is not None else dim + shift * (dim > order.dim) if dim is not None else None
                for start, dim in zip(order.starts, dims, strict=True)
            ]
            self.dims[node] = self._dims_after(factors, target, starts)
            return
        merged = next((m for dim in dims if dim is not None and (m := _merged(shape, target, dim))), None)
        result = self._dims_after(shape, target, dims)
        if merged is not None:
            start, end, into = merged
            order = self._order(_shape(source)[start:end], [d - start if d is not None else None for d in dims], into)
            result = tuple(
                into if dim is not None and start <= dim < end else other
                for dim, other in zip(dims, result, strict=True)
            )
            if order is not None:
                with node.graph.inserting_before(node):
                    rows = _permuted(node, source, (start, end), order.factors, order.places)
                node.target, node.args = aten.reshape.default, (rows, _shape(node))
                self.order[node] = order
        self.dims[node] = result

    def _order(self, sizes: Sequence[Size], dims: Sequence[int | None], into: int) -> _Order | None:
        """Return the order of rows over dimensions of these sizes; None if it is that of the program.

        Args:
            sizes: the flattened dimensions.
            dims: the dimension among them of each index that ranks split.
            into: the dimension of the result.
        """
        factors: list[Size] = []
        # For each factor that ranks split, its mesh dimension. A part of rows is as large as its rank says.
        first: dict[int, int] = {}
        starts: list[int | None] = [None] * len(dims)
        for number, size in enumerate(sizes):
            split = [(mesh_dim, ranks) for i in _at(dims, number) for mesh_dim, ranks in self._parts(i)]
            for index in _at(dims, number):
                starts[index] = len(factors)
            if not isinstance(size, int):
                if split:
                    first[len(factors)] = min(mesh_dim for mesh_dim, _ in split)
                factors.append(size)
                continue
            for mesh_dim, ranks in sorted(split):
                first[len(factors)] = mesh_dim
                factors.append(ranks)
            factors.append(size // math.prod(ranks for _, ranks in split))
        places = sorted(range(len(factors)), key=lambda place: (first.get(place, math.inf), place))
        if places == list(range(len(factors))):
            return None
        return _Order(into, tuple(factors), tuple(places), tuple(starts))

    def _parts(self, index: int) -> Iterator[tuple[int, int]]:
        return zip(self.indices[index].mesh_dims, self.indices[index].shape, strict=True)

    def _dims_after(self, shape: Sequence[int], target: Sequence[int], dims: Sequence[int | None]) -> _Dims:
        """Return the split dimensions of a view's result, from those of its source."""
        return tuple(
            None if dim is None else _dim_after(shape, target, dim, index.ranks)
            for dim, index in zip(dims, self.indices, strict=True)
        )

    def _compute(self, node: fx.Node) -> None:
        inputs = rules.tensor_arguments(node)
        if not any(self.dims.get(tensor) is not None for tensor in inputs):
            return
        orders = {o.key: o for tensor in inputs if (o := self.order.get(tensor))}
        if len(orders) > 1:
            self._restore_inputs(node)
            inputs, orders = rules.tensor_arguments(node), {}
        signatures = self._signatures(node, inputs)
        if orders:
            (order,) = orders.values()
            if not _all_alike(signatures, [start is not None for start in order.starts]):
                self._restore_inputs(node)
                inputs, orders = rules.tensor_arguments(node), {}
                signatures = self._signatures(node, inputs)
        if node.target in _ATTENTION and self.dims.get(rules.arguments(node)["query"]) is not None:
            self._attend(node)
            return
        convolved = [self._positions_of_convolution(node, number) for number in range(len(self.indices))]
        if not any(signatures) and not any(dim is not None for dim in convolved):
            return
        if orders:
            signature = next(s for s, start in zip(signatures, order.starts, strict=True) if start is not None)
            assert signature is not None
            for tensor, sbp in zip(inputs, signature.inputs, strict=True):
                if isinstance(sbp, Split) and tensor not in self.order:
                    self._permute_input(node, tensor, replace(order, dim=sbp.dim))
            permuted = [replace(order, dim=s.dim) if isinstance(s, Split) else None for s in signature.outputs]
            _store(self.order, node, permuted)
        outputs = len(rules.output_values(node))
        dims = [tuple(_split_output(signature, number) for signature in signatures) for number in range(outputs)]
        dims[0] = tuple(a if b is None else b for a, b in zip(dims[0], convolved, strict=True))
        _store(self.dims, node, [each if any(dim is not None for dim in each) else None for each in dims])

    def _positions_of_convolution(self, node: fx.Node, number: int) -> int | None:
        """Return the dimension of the first result of a convolution that has the positions of a split sequence.

        The convolution computes them whole, but what reads them keeps them split.
        """
        index, dims = self.indices[number], self.dims.get(node.all_input_nodes[0])
        dim = dims[number] if node.target in _CONVOLUTIONS and index.is_sequence and dims is not None else None
        if dim is None or dim < 2 or not rules.arguments(node).get("output_mask", (True,))[0]:
            return None
        size = rules.output_values(node)[0].shape[dim]
        return dim if isinstance(size, int) and size % index.ranks == 0 else None

    def _attend(self, node: fx.Node) -> None:
        """Keep results of attention split as its queries are, and gradients as their tensors, in every form of it."""
        arguments = rules.arguments(node)
        sources = [arguments["query"]] * 2
        if node.target in _ATTENTION_BACKWARD:
            sources = [arguments[name] for name in ("query", "key", "value")]
        dims = [self.dims.get(source) for source in sources]
        _store(self.dims, node, [*dims, *[None] * (len(rules.output_values(node)) - len(dims))])

    def _signatures(self, node: fx.Node, inputs: Sequence[fx.Node]) -> list[Signature | None]:
        """Return, for each index, the signature that splits the inputs along it.

        Along a sequence some may be whole if there is none: attention to gathered keys.
        """
        each = [self.dims.get(tensor) or (None,) * len(self.indices) for tensor in inputs]
        return [
            signature_along(node, dims, index.ranks, partly=index.is_sequence)
            for index, dims in zip(self.indices, zip(*each, strict=True), strict=True)
        ]

    def _permute_input(self, node: fx.Node, source: fx.Node, order: _Order) -> None:
        """Let the node read a tensor in the program's order in this order."""
        with node.graph.inserting_before(node):
            rows = _permuted(node, source, (order.dim, order.dim + 1), order.factors, order.places)
            node.replace_input_with(source, _reshaped(node, rows, _shape(source)))

    def _restore_inputs(self, node: fx.Node) -> None:
        for source in dict.fromkeys(node.all_input_nodes):
            order = self.order.get(source)
            if isinstance(order, _Order):
                if source not in self.restored:
                    with node.graph.inserting_before(node):
                        rows = _in_program_order(node, source, order)
                        self.restored[source] = _reshaped(node, rows, _shape(source))
                    self.dims[self.restored[source]] = tuple(
                        None if dim is None or (start is not None and not _is_slowest(order, start)) else dim
                        for dim, start in zip(self.dims[source], order.starts, strict=True)
                    )
                node.replace_input_with(source, self.restored[source])


def _at(dims: Sequence[int | None], number: int) -> list[int]:
    return [index for index, dim in enumerate(dims) if dim == number]


def _all_alike(signatures: Sequence[Signature | None], chosen: Sequence[bool]) -> bool:
    """Return whether there are chosen signatures, and they are equal."""
    each = list(itertools.compress(signatures, chosen))
    return None not in each and len({(s.inputs, s.outputs) for s in each if s is not None}) == 1


def _split_output(signature: Signature | None, number: int) -> int | None:
    sbp = None if signature is None else signature.outputs[number]
    return sbp.dim if isinstance(sbp, Split) else None


def _is_slowest(order: _Order, start: int) -> bool:
    """Return whether a factor is the slowest one in the program's order."""
    return math.prod(hints(order.factors[:start])) == 1


def _store(table: dict[fx.Node, Any], node: fx.Node, values: list[Any]) -> None:
    if not isinstance(node.meta["val"], Tensor):
        table[node] = values
    elif values[0] is not None:
        table[node] = values[0]


def _is_described(node: fx.Node) -> bool:
    """Return whether the rule describes the operator fully. Writes to state and random numbers depend on more."""
    target = node.target
    if not isinstance(target, OpOverload) or target is aten.copy_.default:
        return False
    random = torch.Tag.nondeterministic_seeded in target.tags
    return not random or rules.arguments(node).get("dropout_p") == 0


def _in_program_order(reader: fx.Node, source: fx.Node, order: _Order) -> fx.Node:
    """Emit ``source`` with one dimension per factor in place of the permuted one, in the program's order."""
    factors = [order.factors[place] for place in order.places]
    places = sorted(range(len(factors)), key=order.places.__getitem__)
    return _permuted(reader, source, (order.dim, order.dim + 1), factors, places)


def _permuted(
    reader: fx.Node, source: fx.Node, dims: tuple[int, int], factors: Sequence[Size], places: Sequence[int]
) -> fx.Node:
    """Emit ``source`` with dimensions of the sizes ``factors`` in place of some, then in the order ``places``.

    Args:
        reader: the node that reads it.
        source: the tensor.
        dims: the first dimension to replace, and the one after the last.
        factors: sizes of the new dimensions.
        places: the numbers of the new dimensions, in their new order.
    """
    start, end = dims
    shape = _shape(source)
    rows = _reshaped(reader, source, [*shape[:start], *factors, *shape[end:]])
    order = list(range(rows.meta["val"].dim()))
    order[start : start + len(places)] = [start + place for place in places]
    return emit(source.graph, aten.permute.default, (rows, order), origin(reader))


def _reshaped(reader: fx.Node, source: fx.Node, shape: list[Size]) -> fx.Node:
    return emit(source.graph, aten.reshape.default, (source, shape), origin(reader))


def _shape(node: fx.Node) -> list[Size]:
    return list(node.meta["val"].shape)


def _dim_after(shape: Sequence[int], target: Sequence[int], dim: int, ranks: int) -> int | None:
    """Return the dimension of a view's result that a split dimension of its source becomes, or None.

    Where the view flattens or splits it, that is the dimension whose slowest index it is, if ranks divide that one.
    """
    same, before = _same_dimension(shape, target, dim), math.prod(shape[:dim])
    if same is not None:
        return same
    starts = (index for index, size in enumerate(target) if math.prod(target[:index]) == before and size > 1)
    return next((index for index in starts if target[index] % ranks == 0), None)


def _same_dimension(source: Sequence[int], target: Sequence[int], dim: int) -> int | None:
    """Return the index of the dimension in the view's result, or None if it is flattened or split."""
    before = math.prod(source[:dim])
    indices = (index for index, size in enumerate(target) if size == source[dim])
    return next((index for index in indices if math.prod(target[:index]) == before), None)


def _merged(source: Sequence[int], target: Sequence[int], dim: int) -> tuple[int, int, int] | None:
    """Return which dimensions a view flattens together with ``dim``, if any precede it.

    Returns:
        The first of these dimensions, the one after the last, and the dimension of the result; None if none precede
        ``dim``.
    """
    for into, size in enumerate(target):
        before = math.prod(target[:into])
        for start in range(dim):
            for end in range(dim, len(source)):
                whole = math.prod(source[start : end + 1])
                if math.prod(source[:start]) == before and whole == size and math.prod(source[start:dim]) > 1:
                    return start, end + 1, into
    return None
