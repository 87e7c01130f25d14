"""The table of rules: from an operator to its signatures."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload, functional_overload, schema_arguments
from zerograph.errors import CaptureError
from zerograph.ir.metadata import origin
from zerograph.ir.region import local, region_of
from zerograph.ir.sbp import Signature, Split, broadcast
from zerograph.ir.sizes import hints, sizes_of
from zerograph.passes.rules.factors import Linear, Shape, mismatch, signatures

aten = torch.ops.aten

# A notation, or a function that returns it from shapes and arguments.
Notation = str | Callable[["Operands"], str]
# ``"all"``: linear in all inputs together, however many.
Linearity = Linear | Literal["all"] | Callable[["Operands"], Linear]


@dataclass(frozen=True)
class Operands:
    """Tensors and arguments of a node, for rules that depend on them. ``operands["dim"]`` is an argument by name.

    Attributes:
        inputs, outputs: the tensors.
        arguments: arguments by the operator's own names, defaults included.
        zero: for each tensor argument of the schema, whether the graph fills it with zeros.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    arguments: dict[str, Any]
    zero: tuple[bool, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


@dataclass(frozen=True)
class Rule:
    """A rule of an operator.

    Attributes:
        notation: one operand for each tensor argument of the operator's schema, in order; see ``factors``.
        linear: indices of those operands in which the operator is linear.
        batch: number of dimensions of the first operand for which dimension 0 of all operands is a batch, which may be
            empty; the kernel fails for any other empty dimension. 0 for none. None if it computes on empty tensors.
    """

    notation: Notation
    linear: Linearity = ()
    batch: int | None = None


_RULES: dict[OpOverload, Rule] = {}
# Operators with rules of users, which are checked against shapes, and may be replaced.
_USERS: set[OpOverload] = set()


def rule(operator: Any, notation: Notation, *, linear: Linearity = (), batch: int | None = None) -> None:
    """Give an operator its rule.

    Args:
        operator: one overload, or a packet of them.
        notation, linear, batch: see :class:`Rule`.

    Raises:
        ValueError: the operator has a rule already.
    """
    overloads = [operator] if isinstance(operator, OpOverload) else [getattr(operator, n) for n in operator.overloads()]
    for overload in overloads:
        if overload in _RULES:
            raise ValueError(f"{overload} has a rule already")
        _RULES[overload] = Rule(notation, linear, batch)


def register_user_rule(operator: OpOverload, notation: Notation, linear: Linearity) -> None:
    """Give a user's operator its rule, or replace it.

    Raises:
        ValueError: the operator has a built-in rule.
    """
    if operator in _RULES and operator not in _USERS:
        raise ValueError(f"{operator} has a rule already")
    _RULES[operator] = Rule(notation, linear)
    _USERS.add(operator)


def restore_user_rule(operator: OpOverload, previous: Rule | None) -> None:
    """Give a user's operator back the rule that it had before, or none."""
    if previous is None:
        del _RULES[operator]
        _USERS.discard(operator)
    else:
        _RULES[operator] = previous


def together(first: int, second: int) -> Callable[[Operands], Linear]:
    """Return a linearity: in two operands together, and in either one alone while the other is zero."""

    def linear(operands: Operands) -> Linear:
        alone = [index for index, other in ((first, second), (second, first)) if operands.zero[other]]
        return ((first, second), *alone)

    return linear


def product_added(operands: Operands) -> Linear:
    """Return the linearity of a sum and a product: in the summand together with either factor."""
    return together(0, 1)(operands) + together(0, 2)(operands)


def dim_names(rank: int) -> list[str]:
    """Return one factor name for each dimension of an operand."""
    return [f"d{i}" for i in range(rank)]


def with_dim(rank: int, dim: int, name: str) -> str:
    """Return the factors of an operand that has another name for one dimension, or lacks it if the name is empty."""
    return " ".join(name if i == dim else f"d{i}" for i in range(rank))


def joined(operands: Operands, texts: Sequence[str]) -> str:
    """Return the notation of these texts of operands: first those of all inputs, then those of all outputs."""
    inputs = len(operands.inputs)
    return ", ".join(texts[:inputs]) + " -> " + ", ".join(texts[inputs:])


def leading(count: Callable[[Operands], int]) -> Callable[[Operands], str]:
    """Return a notation in which the first ``count`` dimensions are the same in all operands, and can be split."""

    def notation(operands: Operands) -> str:
        shared, operand_texts = count(operands), []
        for number, value in enumerate((*operands.inputs, *operands.outputs)):
            own = [f"v{number}x{i}!" for i in range(value.dim() - shared)]
            operand_texts.append(" ".join([*dim_names(min(shared, value.dim())), *own]))
        return joined(operands, operand_texts)

    return notation


def mixing(touched: Callable[[Operands], Collection[int]]) -> Callable[[Operands], str]:
    """Return the notation of operators that mix elements along the ``touched`` dimensions and keep all others."""

    def notation(operands: Operands) -> str:
        rank = operands.inputs[0].dim()
        mixed = {dim % rank for dim in touched(operands)} if rank else set()
        lines = [
            " ".join(f"v{number}x{i}!" if i in mixed else name for i, name in enumerate(dim_names(rank)))
            for number in range(len(operands.inputs) + len(operands.outputs))
        ]
        return joined(operands, lines)

    return notation


def added(operands: Operands, names: str) -> str:
    """Mark the first operand as added to the result, unless it is zero: zeros can stay whole beside a partial sum."""
    return names if operands.zero[0] else f"+ {names}"


def operators_with_rules() -> tuple[OpOverload, ...]:
    """Return the operators that have a built-in rule of their own."""
    return tuple(operator for operator in _RULES if operator not in _USERS)


def user_rules() -> list[tuple[OpOverload, Rule]]:
    """Return the operators with rules of users, by name, and these rules."""
    return [(operator, _RULES[operator]) for operator in sorted(_USERS, key=str)]


def rule_of(target: Any) -> Rule | None:
    """Return the operator's own rule; else that of its out-of-place form, or of its family; else None."""
    if target in _RULES:
        return _RULES[target]
    if isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags:
        return _RULES.get(functional_overload(target) or target, Rule(pointwise))
    return None


def pointwise(operands: Operands) -> str:
    """Return the notation of all pointwise operators: every dimension is a factor, aligned at the right."""
    return joined(operands, ["..."] * (len(operands.inputs) + len(operands.outputs)))


def whole(operands: Operands) -> str:
    """Return a notation without a factor that can be split, for any operands."""
    values = enumerate((*operands.inputs, *operands.outputs))
    return joined(operands, [" ".join(f"v{number}x{i}!" for i in range(value.dim())) for number, value in values])


def signatures_of(
    node: fx.Node,
    ranks: int,
    inputs: tuple[Tensor, ...] | None = None,
    outputs: tuple[Tensor, ...] | None = None,
    mesh_dim: int | None = None,
) -> tuple[Signature, ...] | None:
    """Return the signatures of a node over ``ranks`` ranks, or None if its operator has no rule.

    Args:
        node: a node of an operator.
        ranks: number of ranks along the mesh dimension.
        inputs, outputs: tensors to use instead of the node's own, for their shapes.
        mesh_dim: the mesh dimension; None for any that splits the rows of the batch.

    Raises:
        CaptureError: a registered rule does not fit the shapes.
    """
    if node.target is local:
        region = region_of(node)
        return (Signature(region.inputs, tuple(output.sbp for output in region.outputs)),)
    node_rule = rule_of(node.target)
    if node_rule is None:
        return None
    inputs = tuple(argument.meta["val"] for argument in tensor_arguments(node)) if inputs is None else inputs
    outputs = output_values(node) if outputs is None else outputs
    named = arguments(node)
    values = [named[name] for name in _tensor_names(node.target)]
    indices = _tensor_indices(values)
    operands = Operands(inputs, outputs, named, tuple(map(_is_zero, values)))
    if isinstance(node_rule.notation, str):
        notation = _without_absent(node_rule.notation, [bool(at) for at in indices], node.meta["val"])
    elif all(isinstance(size, int) and size == 1 for tensor in (*inputs, *outputs) for size in tensor.shape):
        # An operator along a dimension takes a number for a vector of length 1.
        notation = whole(operands)
    else:
        notation = node_rule.notation(operands)
    if node.target in _USERS:
        _check_fits(node, notation, _shapes(inputs), _shapes(outputs))
    if node_rule.linear == "all":
        linear: Linear = (tuple(range(len(inputs))),)
    else:
        linear = _renumbered(node_rule.linear(operands) if callable(node_rule.linear) else node_rule.linear, indices)
    linear = tuple(group for group in linear if _keeps_fractions(group, inputs, outputs))
    legal = signatures(notation, _shapes(inputs), _shapes(outputs), linear, ranks)
    tensors = (*inputs, *outputs)
    if all(isinstance(size, int) for tensor in tensors for size in tensor.shape):
        return legal
    return tuple(one for one in legal if _divides(one, tensors, ranks, mesh_dim, node_rule.batch))


def _divides(
    signature: Signature, tensors: Sequence[Tensor], ranks: int, mesh_dim: int | None, batch: int | None
) -> bool:
    """Return whether ranks can split each dimension of symbolic size that the signature splits.

    Args:
        batch: see :class:`Rule`: a dimension of rows may be empty on some ranks.
    """
    for sbp, tensor in zip((*signature.inputs, *signature.outputs), tensors, strict=True):
        if isinstance(sbp, Split):
            size = tensor.shape[sbp.dim]
            if isinstance(size, int):
                continue
            if not sizes_of(size).divides(size, ranks, mesh_dim):
                return False
            may_be_empty = batch is None or (sbp.dim == 0 and tensors[0].dim() == batch)
            if not may_be_empty and sizes_of(size).is_rows(size):
                return False
    return True


def _check_fits(node: fx.Node, notation: str, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> None:
    problem = mismatch(notation, inputs, outputs)
    if problem:
        shapes = f"{', '.join(map(str, inputs)) or 'none'} -> {', '.join(map(str, outputs))}"
        raise CaptureError(
            f"the rule {notation!r} of {node.target} does not fit the shapes {shapes}: {problem}\n"
            f"{origin(node).line}\n"
            "Correct the rule in zg.register_rule. A rule that depends on shapes is a function of the operands."
        )


@functools.cache
def _tensor_names(operator: OpOverload) -> tuple[str, ...]:
    """Return the names of the tensor arguments of the schema."""
    return tuple(argument.name for argument in schema_arguments(operator) if "Tensor" in str(argument.type))


def _tensor_indices(values: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return, for each of these tensor arguments of a node, the indices of its tensors among the node's tensors."""
    indices: list[tuple[int, ...]] = []
    for value in values:
        tensors = [
            item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, fx.Node)
        ]
        start = sum(map(len, indices))
        indices.append(tuple(range(start, start + len(tensors))))
    return indices


def _is_zero(value: Any) -> bool:
    """Return whether an argument is a tensor, or a view of one, that is filled with zeros."""
    while isinstance(value, fx.Node) and isinstance(value.target, OpOverload) and value.target.is_view:
        value = value.all_input_nodes[0]
    if isinstance(value, fx.Node):
        fill = _FILL.get(value.target)
        value = None if fill is None else fill(value)
    return isinstance(value, (int, float)) and value == 0


# The fill value of constant tensors.
_FILL: dict[Any, Callable[[fx.Node], Any]] = {
    aten.zeros.default: lambda node: 0,
    aten.full.default: lambda node: node.args[1],
    aten.scalar_tensor.default: lambda node: node.args[0],
}


def _without_absent(notation: str, present: Sequence[bool], value: Any) -> str:
    left, right = notation.split("->")
    operands = [part for part, is_present in zip(left.split(","), present, strict=True) if is_present]
    results = right.split(",")
    # Another number of results is found where rules are compared with shapes.
    if isinstance(value, (list, tuple)) and len(value) == len(results):
        results = [part for part, result in zip(results, value, strict=True) if isinstance(result, Tensor)]
    return ",".join(operands) + "->" + ",".join(results)


def _renumbered(linear: Linear, indices: Sequence[tuple[int, ...]]) -> Linear:
    groups = [(group,) if isinstance(group, int) else group for group in linear]
    return tuple(
        tuple(index for i in group for index in indices[i]) for group in groups if all(indices[i] for i in group)
    )


def _keeps_fractions(group: int | tuple[int, ...], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Return whether no result is a cast of fractions to integers, or of numbers to bool: such parts do not add up."""
    indices = (group,) if isinstance(group, int) else group
    # A node of a number is no input.
    sources = [inputs[index].dtype.to_real() for index in indices if index < len(inputs)]
    return all(torch.can_cast(source, output.dtype) for source in sources for output in outputs)


def all_broadcast(node: fx.Node) -> Signature:
    """Return the signature that holds for every operator: whole inputs, whole outputs."""
    return Signature((broadcast,) * len(tensor_arguments(node)), (broadcast,) * len(output_values(node)))


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the node's tensor inputs in the order of the operator's arguments, repeats included."""
    nodes: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), nodes.append)
    return [argument for argument in nodes if isinstance(argument.meta.get("val"), Tensor)]


def output_values(node: fx.Node) -> tuple[Tensor, ...]:
    """Return the tensors that the node yields, without results that the operator was told not to compute."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return (value,)
    return tuple(v for v in value if isinstance(v, Tensor)) if isinstance(value, (list, tuple)) else ()


def output_of(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the node that computes a tensor, and the tensor's number among those that it yields."""
    if node.target is not operator.getitem:
        return node, 0
    source, index = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(index, int)
    # Results that the operator was told not to compute are None, and have no SBP.
    return source, sum(isinstance(value, Tensor) for value in source.meta["val"][:index])


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of a node by name, defaults included."""
    assert isinstance(node.target, OpOverload)
    named: dict[str, Any] = {}
    for index, argument in enumerate(schema_arguments(node.target)):
        if index < len(node.args):
            named[argument.name] = node.args[index]
        else:
            named[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return named


def _shapes(tensors: Sequence[Tensor]) -> tuple[Shape, ...]:
    return tuple(hints(tensor.shape) for tensor in tensors)
