"""batch_first: put the batch first where a view flattens it with other dimensions, so that it stays split.

``nn.Transformer``, ``nn.MultiheadAttention`` and recurrent networks compute on ``(time, batch, channels)``, and a
matrix product flattens that to ``(time batch) channels``: a slice of the batch is no slice of those rows. Rows of a
product, a pointwise operator or a sum may stand in any order, so this pass flattens ``(batch time)`` instead, and
restores the order for readers that depend on it. The rules tell which do not: a dimension that may be split may be
permuted, if all operands that are split together are permuted together.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload, size_key
from zerograph.ir.dims import Size
from zerograph.ir.metadata import meta, origin
from zerograph.ir.rewrite import emit
from zerograph.ir.sbp import Signature, Split
from zerograph.ir.sizes import hints
from zerograph.ir.step_graph import placeholders
from zerograph.passes import rules
from zerograph.passes.context import Context

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def batch_first(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Flatten the batch before the dimensions that it is flattened with, not after them."""
    if context.ranks > 1:
        walk = _Walk(context.ranks)
        for node in placeholders(module.graph, "input"):
            sbps = context.batch.inputs[int(meta(node)["role"].name)]
            split = next((sbp.dim for sbp in sbps if isinstance(sbp, Split)), None)
            if split is not None:
                walk.batch[node] = split
        for node in list(module.graph.nodes):
            walk.visit(node)
    return module


@dataclass(frozen=True)
class _Order:
    """Dimension ``dim`` runs over ``(batch, front, inner)``; in the program it runs over ``(front, batch, inner)``."""

    dim: int
    front: Size
    batch: Size
    inner: Size

    @property
    def key(self) -> tuple[Any, ...]:
        """The factors in a form that can be compared without a guard."""
        return tuple(map(size_key, (self.front, self.batch, self.inner)))


@dataclass
class _Walk:
    """One walk over the nodes.

    Attributes:
        ranks: number of ranks.
        batch: the batch dimension of each tensor that has one; a list for a node with several results.
        order: the order of tensors whose rows are permuted, likewise.
        restored: permuted tensors with the program's order.
    """

    ranks: int
    batch: dict[fx.Node, Any] = field(default_factory=dict)
    order: dict[fx.Node, Any] = field(default_factory=dict)
    restored: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def visit(self, node: fx.Node) -> None:
        if node.op == "output":
            self._restore_inputs(node)
        elif node.op != "call_function":
            return
        elif node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            # Results that the operator was told not to compute are None, and no outputs of its signature.
            number = sum(isinstance(value, Tensor) for value in source.meta["val"][:index])
            for table in (self.batch, self.order):
                if isinstance(table.get(source), list):
                    table[node] = table[source][number]
        elif node.target in _VIEWS:
            self._view(node)
        elif _is_described(node):
            self._compute(node)
        else:
            self._restore_inputs(node)

    def _view(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        shape, target = hints(source.meta["val"].shape), hints(node.meta["val"].shape)
        order = self.order.get(source)
        dim = order.dim if order else self.batch.get(source)
        if dim is None:
            return
        if self.order:
            # A permuted tensor has other strides than the program's tensor.
            node.target = aten.reshape.default
        same = _same_dimension(shape, target, dim)
        if same is not None:
            self.batch[node] = same
            if order:
                self.order[node] = replace(order, dim=same)
            return
        if order:
            with node.graph.inserting_before(node):
                sizes = (order.batch, order.front, order.inner)
                node.target, node.args = aten.reshape.default, (_factored(node, source, dim, sizes), _shape(node))
            self.batch[node] = _batch_dim(target, math.prod(hints((*shape[:dim], order.front))), self.ranks)
            return
        merged = _merged(shape, target, dim)
        if merged is None:
            self.batch[node] = _batch_dim(target, math.prod(shape[:dim]), self.ranks)
            return
        start, end, into = merged
        symbolic = _shape(source)
        front, inner = math.prod(symbolic[start:dim]), math.prod(symbolic[dim + 1 : end])
        dims = [d for d in range(len(shape)) if d != dim]
        dims.insert(start, dim)
        with node.graph.inserting_before(node):
            moved = emit(node.graph, aten.permute.default, (source, dims), origin(node))
        node.target, node.args = aten.reshape.default, (moved, _shape(node))
        self.batch[node], self.order[node] = into, _Order(into, front, symbolic[dim], inner)

    def _compute(self, node: fx.Node) -> None:
        inputs = rules.tensor_arguments(node)
        orders = {o.key: o for tensor in inputs if (o := self.order.get(tensor))}
        if not any(self.batch.get(tensor) is not None for tensor in inputs):
            return
        if len(orders) > 1:
            self._restore_inputs(node)
            inputs = rules.tensor_arguments(node)
            orders = {}
        signature = self._signature(node, inputs)
        if signature is None:
            if orders:
                self._restore_inputs(node)
                signature = self._signature(node, rules.tensor_arguments(node))
            orders = {}
        if signature is None:
            return
        batch_dims = [sbp.dim if isinstance(sbp, Split) else None for sbp in signature.outputs]
        if orders:
            (order,) = orders.values()
            for tensor, sbp in zip(inputs, signature.inputs, strict=True):
                if isinstance(sbp, Split) and tensor not in self.order:
                    self._permute_input(node, tensor, replace(order, dim=sbp.dim))
            permuted = [None if dim is None else replace(order, dim=dim) for dim in batch_dims]
            _store(self.order, node, permuted)
        _store(self.batch, node, batch_dims)

    def _signature(self, node: fx.Node, inputs: Sequence[fx.Node]) -> Signature | None:
        """Return the first signature in which every input with a batch dimension is split along it."""
        wanted = [self.batch.get(tensor) for tensor in inputs]
        for signature in rules.signatures_of(node, self.ranks) or ():
            split = [sbp.dim if isinstance(sbp, Split) else None for sbp in signature.inputs]
            if any(dim is not None for dim in split) and all(
                dim is None or dim == split_dim for dim, split_dim in zip(wanted, split, strict=True)
            ):
                return signature
        return None

    def _permute_input(self, node: fx.Node, source: fx.Node, order: _Order) -> None:
        with node.graph.inserting_before(node):
            sizes = (order.front, order.batch, order.inner)
            node.replace_input_with(source, _exchanged(node, source, order.dim, sizes))

    def _restore_inputs(self, node: fx.Node) -> None:
        for source in dict.fromkeys(node.all_input_nodes):
            order = self.order.get(source)
            if isinstance(order, _Order):
                if source not in self.restored:
                    with node.graph.inserting_before(node):
                        self.restored[source] = _exchanged(
                            node, source, order.dim, (order.batch, order.front, order.inner)
                        )
                node.replace_input_with(source, self.restored[source])


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


def _exchanged(reader: fx.Node, source: fx.Node, dim: int, sizes: tuple[Size, Size, Size]) -> fx.Node:
    """Emit ``source`` with the first two of ``sizes``, the factors of dimension ``dim``, exchanged."""
    factors = _factored(reader, source, dim, sizes)
    return emit(source.graph, aten.reshape.default, (factors, _shape(source)), origin(reader))


def _factored(reader: fx.Node, source: fx.Node, dim: int, sizes: tuple[Size, Size, Size]) -> fx.Node:
    """Emit the same, with one dimension per factor."""
    shape, node_origin = _shape(source), origin(reader)
    factors = emit(source.graph, aten.reshape.default, (source, [*shape[:dim], *sizes, *shape[dim + 1 :]]), node_origin)
    dims = list(range(len(shape) + 2))
    dims[dim], dims[dim + 1] = dim + 1, dim
    return emit(source.graph, aten.permute.default, (factors, dims), node_origin)


def _shape(node: fx.Node) -> list[Size]:
    return list(node.meta["val"].shape)


def _same_dimension(source: Sequence[int], target: Sequence[int], dim: int) -> int | None:
    """Return the index of the dimension in the view's result, or None if it is flattened or split."""
    return next(
        (
            index
            for index, size in enumerate(target)
            if size == source[dim] and math.prod(target[:index]) == math.prod(source[:dim])
        ),
        None,
    )


def _batch_dim(target: Sequence[int], before: int, ranks: int) -> int | None:
    """Return the dimension of a view's result whose slowest index is the batch, after ``before`` outer indices."""
    starts = ((index, size) for index, size in enumerate(target) if math.prod(target[:index]) == before and size > 1)
    return next((index for index, size in starts if size % ranks == 0), None)


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
