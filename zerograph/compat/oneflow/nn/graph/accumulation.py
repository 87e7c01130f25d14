"""OneFlow's gradient accumulation: the mean of the micro-batches' gradients, also for a loss that is a sum.

A graph computes with the whole batch. If the loss is a mean over the batch, its gradient is the mean of the k
micro-batches' gradients. If it is a sum over the batch, OneFlow's gradient is 1/k of the gradient of the sum, so
``backward()`` starts from 1/k. To tell the two apart, each tensor of the trace gets a power of the number of rows: 1
for a sum over the batch and for that number itself, 0 for a mean. The rules tell which operators sum over the batch:
those whose signature splits inputs along it and has a partial result. They also tell which are linear, so that their
results grow as their inputs.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph._torch import OpOverload, pytree
from zerograph.errors import CaptureError
from zerograph.ir.rewrite import ancestors
from zerograph.ir.sbp import Split, partial_sum
from zerograph.ir.sizes import SYMBOLIC, hints
from zerograph.passes import rules
from zerograph.passes.rules.batch_dims import signature_along

aten = torch.ops.aten


@contextlib.contextmanager
def of_micro_batches(count: int, inputs: Any) -> Iterator[None]:
    """Make ``backward()`` of a loss that grows with the batch give the mean of the micro-batches' gradients.

    Args:
        count: number of micro-batches.
        inputs: arguments of ``build()``.
    """
    tensors = (leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim())
    nodes = [node for tensor in tensors if (node := _torch.node_of(tensor)) is not None]

    def run(original: Callable[..., None], roots: Any, *args: Any, **kwargs: Any) -> None:
        if _torch.backward_sequence_number() is None:
            single = isinstance(roots, Tensor)
            divided = [_divided(root, nodes, count) for root in ([roots] if single else roots)]
            roots = divided[0] if single else divided
        original(roots, *args, **kwargs)

    with _torch.replaced_backward(run) if count > 1 and nodes else contextlib.nullcontext():
        yield


def _divided(root: Tensor, inputs: Sequence[fx.Node], count: int) -> Tensor:
    node = _torch.node_of(root)
    growth = _CONSTANT if node is None else _growth_of(node, inputs)
    if growth.mixed is not None:
        # The trace has not restored origins yet.
        mixed, summed = (one.meta["custom"]["origin"] for one in (growth.mixed, growth.summed or growth.mixed))
        raise CaptureError(
            f"build() adds a sum over the batch to a value that is no sum\n{mixed.line}\n"
            f"The sum is computed at {summed.source}. With set_gradient_accumulation_steps() OneFlow's gradient is the "
            "mean of the micro-batches' gradients: 1/k of that of a sum, but all of that of a mean. Call backward() "
            "for each term, or divide the sum by the batch size."
        )
    return root / count if growth.power == 1 else root


@dataclass(frozen=True)
class _Growth:
    """How a tensor depends on the batch.

    Attributes:
        dim: the dimension that runs over the batch; None if there is none.
        step: the distance of two rows along it: 1, or more if rows are flattened with what follows them.
        power: the power of the number of rows with which its elements grow.
        summed: the sum over the batch, if there is one.
        mixed: the operator that adds a sum over the batch to another value, if there is one.
    """

    dim: int | None = None
    step: int = 1
    power: int = 0
    summed: fx.Node | None = None
    mixed: fx.Node | None = None


_CONSTANT = _Growth()
# Operators whose result grows as their operands, although they are linear in none, or in a number too.
_AS_OPERANDS = {aten.abs, aten.add, aten.clamp, aten.clamp_min, aten.maximum, aten.relu, aten.rsub, aten.sub}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


def _growth_of(tensor: fx.Node, inputs: Sequence[fx.Node]) -> _Growth:
    """Return how a tensor of the running trace grows with the rows of the inputs."""
    growths = {(node, 0): _Growth(dim=0) for node in inputs}
    rows = {hints(node.meta["val"].shape)[0] for node in inputs} - {0, 1}
    nodes = ancestors([tensor]) | {tensor}
    for node in tensor.graph.nodes:
        if node in nodes and node not in inputs and node.target is not operator.getitem:
            growths |= {(node, number): growth for number, growth in enumerate(_growths(node, growths, rows))}
    return growths[rules.output_of(tensor)]


def _growths(node: fx.Node, growths: Mapping[tuple[fx.Node, int], _Growth], rows: Collection[int]) -> list[_Growth]:
    """Return the growth of each result of a node."""
    outputs = rules.output_values(node)
    if node.op != "call_function":
        return [replace(_CONSTANT, power=int(node.op == "get_attr" and _counts(_constant(node), rows)))]
    if not outputs:
        # A number.
        return []
    tensors = rules.tensor_arguments(node)
    operands = [growths[rules.output_of(tensor)] for tensor in tensors]
    signatures = rules.signatures_of(node, 1) or ()
    along = signature_along(node, [operand.dim for operand in operands], 1, partly=True)
    if not operands:
        # A constant with one element for each row.
        shape = hints(outputs[0].shape)
        split = ((one, one.outputs[0]) for one in signatures)
        along = next((one for one, sbp in split if isinstance(sbp, Split) and _counts(shape[sbp.dim], rows)), None)
    sums = along is not None and partial_sum in along.outputs
    linear = [one for one in signatures if not any(isinstance(sbp, Split) for sbp in one.inputs)]
    groups = [{number for number, sbp in enumerate(one.inputs) if sbp == partial_sum} for one in linear]
    # An operand that is added to zeros is linear alone.
    groups = [group for group in groups if group and not any(other and other < group for other in groups)]
    mixes = all(operand.dim is None for operand in operands) and any(
        1 in (powers := {operands[number].power for number in group}) and len(powers) > 1 for group in groups
    )
    contracts = any(partial_sum in one.outputs for one in signatures if one not in linear)
    if len(groups) > 1 and contracts and not sums:
        # A product with weights.
        groups = []
    power = _power(node, operands, groups, rows) + sums
    summed = node if sums else next((operand.summed for operand in operands if operand.summed is not None), None)
    mixed = next((operand.mixed for operand in operands if operand.mixed is not None), node if mixes else None)
    row = next((operand for operand in operands if operand.dim is not None), _CONSTANT)
    grown = replace(row, power=power, summed=summed, mixed=mixed)
    if along is not None:
        dims = [sbp.dim if isinstance(sbp, Split) else None for sbp in along.outputs]
    else:
        # It mixes rows, as a concatenation does: the result has rows too.
        dims = [None if row.dim is None or not output.dim() else min(row.dim, output.dim() - 1) for output in outputs]
    if node.target in _VIEWS and row.dim is not None:
        return [_viewed(grown, hints(tensors[0].meta["val"].shape), hints(outputs[0].shape))]
    return [replace(grown, dim=dim) for dim in dims]


def _viewed(growth: _Growth, shape: Sequence[int], target: Sequence[int]) -> _Growth:
    """Return the growth of a tensor of this shape after a view, which may flatten its rows with other dimensions."""
    assert growth.dim is not None
    distance = growth.step * math.prod(shape[growth.dim + 1 :])
    inner = [math.prod(target[dim + 1 :]) for dim in range(len(target))]
    dims = (dim for dim, size in enumerate(target) if inner[dim] <= distance < inner[dim] * size)
    dim = next(dims, None)
    return replace(growth, dim=dim, step=1 if dim is None else distance // inner[dim])


def _power(node: fx.Node, operands: Sequence[_Growth], groups: Sequence[set[int]], rows: Collection[int]) -> int:
    """Return the power of the number of rows, without that of the node's own sum over the batch.

    Args:
        groups: numbers of the operands in which the operator is linear; together, if there are several in a group.
    """
    target = node.target
    packet = (_torch.functional_overload(target) or target).overloadpacket if isinstance(target, OpOverload) else None
    powers = [operand.power for operand in operands]
    number: Any = next((value for value in map(_number, node.args) if value is not None), 0)
    if packet is aten.full:
        return int(_counts(number, rows))
    if packet in _AS_OPERANDS:
        return max(powers, key=abs)
    if packet is aten.reciprocal:
        return -powers[0]
    if packet is aten.div and len(powers) == 2:
        return powers[0] - powers[1]
    if packet is aten.div and _terms(node.args[0]) in (number, number + 1):
        # A mean, or a variance.
        return powers[0] - (operands[0].summed is node.args[0])
    if packet is aten.div:
        # Only rows and sums are divided by the number of rows: a mean over 16 rows may be divided by another 16.
        return powers[0] - (_counts(number, rows) and (operands[0].dim is not None or powers[0] > 0))
    if any(len(group) > 1 for group in groups):
        return max((powers[operand] for group in groups for operand in group), key=abs)
    times = packet is aten.mul and isinstance(number, float) and number != 0 and _counts(1 / number, rows)
    return sum(powers[operand] for group in groups for operand in group) - times


def _terms(node: Any) -> int:
    """Return the number of elements that a sum adds up for each of its results; 0 for another operator."""
    if getattr(node.target, "overloadpacket", None) is not aten.sum:
        return 0
    before, after = (math.prod(hints(one.meta["val"].shape)) for one in (node.args[0], node))
    return before // max(after, 1)


def _constant(node: fx.Node) -> float:
    """Return the value of a constant without dimensions; 0 for another one."""
    constant = _torch.constant_of(node)
    with _torch.plain_tensors(), _torch.no_modes():
        return 0 if constant.dim() else constant.item()


def _number(argument: Any) -> int | float | None:
    """Return the value that a number among the arguments of a node is traced with; None for anything else."""
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
    value = value.node.hint if isinstance(value, SYMBOLIC) else value
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _counts(number: float, rows: Collection[int]) -> bool:
    """Return whether a number is a multiple of the number of rows."""
    near = 1 < number < 2**62 and abs(number - round(number)) < 1e-6 * number
    return near and any(round(number) % size == 0 for size in rows)
