"""batch_first: rows of a flattened dimension lie batch first, so that the batch stays split through the flattening.

``nn.Transformer``, ``nn.MultiheadAttention`` and recurrent networks compute on ``(time, batch, channels)``, and a
matrix product flattens that to ``(time batch) channels``: a slice of the batch is no slice of those rows. Rows of a
product, a pointwise operator or a sum may stand in any order, so ``(batch time)`` is flattened instead, and the rows
are put back where a reader cares. The rules say who does not: what may be split may be permuted, where all operands
that are split together are permuted together.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload
from zerograph.ir.metadata import meta, origin
from zerograph.ir.rewrite import emit
from zerograph.ir.sbp import Signature, Split
from zerograph.ir.step_graph import placeholders
from zerograph.passes import rules
from zerograph.passes.context import Context

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def batch_first(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """No view flattens the batch behind another dimension."""
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
    """Dimension ``dim`` runs over ``(batch, front, rest)`` where the program means ``(front, batch, rest)``."""

    dim: int
    front: int
    batch: int
    rest: int


@dataclass
class _Walk:
    """One walk over the nodes: which dimension of each is the batch's, and which tensors are out of order."""

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
            # What an operator was told not to compute is no output of its signature.
            number = sum(isinstance(value, Tensor) for value in source.meta["val"][:index])
            for known in (self.batch, self.order):
                if isinstance(known.get(source), list):
                    known[node] = known[source][number]
        elif node.target in _VIEWS:
            self._view(node)
        elif _orderly(node):
            self._compute(node)
        else:
            self._restore_inputs(node)

    def _view(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        shape, target = _shape(source), _shape(node)
        order = self.order.get(source)
        dim = order.dim if order else self.batch.get(source)
        if dim is None:
            return
        if self.order:
            # What was put in order has other strides than the program's tensor.
            node.target = aten.reshape.default
        kept = _same_dimension(shape, target, dim)
        if kept is not None:
            self.batch[node] = kept
            if order:
                self.order[node] = replace(order, dim=kept)
            return
        if order:
            with node.graph.inserting_before(node):
                sizes = (order.batch, order.front, order.rest)
                node.target, node.args = aten.reshape.default, (_apart(node, source, dim, sizes), list(target))
            self.batch[node] = _begins(target, math.prod(shape[:dim]) * order.front, self.ranks)
            return
        merged = _merged(shape, target, dim)
        if merged is None:
            self.batch[node] = _begins(target, math.prod(shape[:dim]), self.ranks)
            return
        start, into = merged
        front, rest = math.prod(shape[start:dim]), target[into] // math.prod(shape[start : dim + 1])
        dims = [d for d in range(len(shape)) if d != dim]
        dims.insert(start, dim)
        with node.graph.inserting_before(node):
            moved = emit(node.graph, aten.permute.default, (source, dims), origin(node))
        node.target, node.args = aten.reshape.default, (moved, list(target))
        self.batch[node], self.order[node] = into, _Order(into, front, shape[dim], rest)

    def _compute(self, node: fx.Node) -> None:
        given = rules.tensor_arguments(node)
        orders = {(o.front, o.batch, o.rest) for one in given if (o := self.order.get(one))}
        if not any(self.batch.get(one) is not None for one in given):
            return
        if len(orders) > 1:
            self._restore_inputs(node)
            given = rules.tensor_arguments(node)
            orders = set()
        signature = self._signature(node, given)
        if signature is None:
            if orders:
                self._restore_inputs(node)
                signature = self._signature(node, rules.tensor_arguments(node))
            orders = set()
        if signature is None:
            return
        found = [sbp.dim if isinstance(sbp, Split) else None for sbp in signature.outputs]
        if orders:
            sizes = next(iter(orders))
            for one, sbp in zip(given, signature.inputs, strict=True):
                if isinstance(sbp, Split) and one not in self.order:
                    self._put_in_order(node, one, _Order(sbp.dim, *sizes))
            made = [None if dim is None else _Order(dim, *sizes) for dim in found]
            _record(self.order, node, made)
        _record(self.batch, node, found)

    def _signature(self, node: fx.Node, given: Sequence[fx.Node]) -> Signature | None:
        """That in which every input of the batch is split along it."""
        wanted = [self.batch.get(one) for one in given]
        for signature in rules.of_node(node, self.ranks) or ():
            split = [sbp.dim if isinstance(sbp, Split) else None for sbp in signature.inputs]
            if any(dim is not None for dim in split) and all(
                dim is None or dim == at for dim, at in zip(wanted, split, strict=True)
            ):
                return signature
        return None

    def _put_in_order(self, node: fx.Node, given: fx.Node, order: _Order) -> None:
        with node.graph.inserting_before(node):
            sizes = (order.front, order.batch, order.rest)
            node.replace_input_with(given, _turned(node, given, order.dim, sizes))

    def _restore_inputs(self, node: fx.Node) -> None:
        for given in dict.fromkeys(node.all_input_nodes):
            order = self.order.get(given)
            if isinstance(order, _Order):
                if given not in self.restored:
                    with node.graph.inserting_before(node):
                        self.restored[given] = _turned(node, given, order.dim, (order.batch, order.front, order.rest))
                node.replace_input_with(given, self.restored[given])


def _record(known: dict[fx.Node, Any], node: fx.Node, values: list[Any]) -> None:
    if not isinstance(node.meta["val"], Tensor):
        known[node] = values
    elif values[0] is not None:
        known[node] = values[0]


def _orderly(node: fx.Node) -> bool:
    """Whether the operator's rule says all about it: writes to state and random numbers depend on more."""
    target = node.target
    if not isinstance(target, OpOverload) or target is aten.copy_.default:
        return False
    random = torch.Tag.nondeterministic_seeded in target.tags
    return not random or rules.arguments(node).get("dropout_p") == 0


def _turned(reader: fx.Node, given: fx.Node, dim: int, sizes: tuple[int, int, int]) -> fx.Node:
    """``given`` with the first two of ``sizes``, which dimension ``dim`` runs over, exchanged."""
    apart = _apart(reader, given, dim, sizes)
    return emit(given.graph, aten.reshape.default, (apart, list(_shape(given))), origin(reader))


def _apart(reader: fx.Node, given: fx.Node, dim: int, sizes: tuple[int, int, int]) -> fx.Node:
    """The same, with a dimension for each of the sizes."""
    shape, where = list(_shape(given)), origin(reader)
    apart = emit(given.graph, aten.reshape.default, (given, [*shape[:dim], *sizes, *shape[dim + 1 :]]), where)
    dims = list(range(len(shape) + 2))
    dims[dim], dims[dim + 1] = dim + 1, dim
    return emit(given.graph, aten.permute.default, (apart, dims), where)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(int(size) for size in node.meta["val"].shape)


def _same_dimension(source: Sequence[int], target: Sequence[int], dim: int) -> int | None:
    """Where in the view's result the dimension lies, if it is still one."""
    return next(
        (
            at
            for at, size in enumerate(target)
            if size == source[dim] and math.prod(target[:at]) == math.prod(source[:dim])
        ),
        None,
    )


def _begins(target: Sequence[int], before: int, ranks: int) -> int | None:
    """The dimension of a view's result that runs over the batch first, ``before`` indices of which lie in front."""
    starts = ((at, size) for at, size in enumerate(target) if math.prod(target[:at]) == before and size > 1)
    return next((at for at, size in starts if size % ranks == 0), None)


def _merged(source: Sequence[int], target: Sequence[int], dim: int) -> tuple[int, int] | None:
    """The first dimension of those that are flattened together with ``dim`` behind others, and into which."""
    for into, size in enumerate(target):
        before = math.prod(target[:into])
        for start in range(dim):
            for end in range(dim, len(source)):
                whole = math.prod(source[start : end + 1])
                if math.prod(source[:start]) == before and whole == size and math.prod(source[start:dim]) > 1:
                    return start, into
    return None
