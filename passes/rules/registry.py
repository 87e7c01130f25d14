"""The table of rules: from an operator to its signatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload, schema_arguments
from zerograph.errors import CaptureError
from zerograph.ir.metadata import origin
from zerograph.ir.region import local, region_of
from zerograph.ir.sbp import Signature, broadcast
from zerograph.passes.rules.factors import Linear, Shape, misfit, signatures

aten = torch.ops.aten

# A rule whose notation depends on shapes or arguments works it out from the node.
Notation = str | Callable[["Operands"], str]
# ``"all"``: linear in all inputs together, however many.
Linearity = Linear | Literal["all"] | Callable[["Operands"], Linear]


@dataclass(frozen=True)
class Operands:
    """What a rule may look at: the node's tensors and arguments, by the operator's own argument names.

    ``zero`` says of each tensor argument of the schema whether the graph makes it of zeros.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    arguments: dict[str, Any]
    zero: tuple[bool, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


@dataclass(frozen=True)
class Rule:
    """Notation with one operand for each tensor argument of the operator's schema, in order; see ``factors``.

    ``linear`` counts the same operands.
    """

    notation: Notation
    linear: Linearity = ()


_RULES: dict[OpOverload, Rule] = {}
# Those that users registered: their rules are checked against shapes, and may be replaced.
_USERS: set[OpOverload] = set()


def rule(operator: Any, notation: Notation, *, linear: Linearity = ()) -> None:
    """Give an operator (one overload, or a packet of them) its rule."""
    overloads = [operator] if isinstance(operator, OpOverload) else [getattr(operator, n) for n in operator.overloads()]
    for overload in overloads:
        if overload in _RULES:
            raise ValueError(f"{overload} has a rule already")
        _RULES[overload] = Rule(notation, linear)


def users_rule(operator: OpOverload, notation: Notation, linear: Linearity) -> None:
    """As :func:`rule`, of an operator that is not ours; a later rule replaces an earlier one."""
    if operator in _RULES and operator not in _USERS:
        raise ValueError(f"{operator} has a rule already")
    _RULES[operator] = Rule(notation, linear)
    _USERS.add(operator)


def together(first: int, second: int) -> Callable[[Operands], Linear]:
    """Linear in two operands together, and in either one alone while the other is zero."""

    def linear(operands: Operands) -> Linear:
        alone = [one for one, other in ((first, second), (second, first)) if operands.zero[other]]
        return ((first, second), *alone)

    return linear


def letters(rank: int) -> list[str]:
    """One factor name for each dimension of an operand."""
    return [f"d{i}" for i in range(rank)]


def leading(count: Callable[[Operands], int]) -> Callable[[Operands], str]:
    """Operators whose operands all have the same first ``count`` dimensions, each index of them for itself."""

    def notation(operands: Operands) -> str:
        free, lines = count(operands), []
        for number, value in enumerate((*operands.inputs, *operands.outputs)):
            rest = [f"v{number}x{i}!" for i in range(value.dim() - free)]
            lines.append(" ".join([*letters(min(free, value.dim())), *rest]))
        inputs = len(operands.inputs)
        return ", ".join(lines[:inputs]) + " -> " + ", ".join(lines[inputs:])

    return notation


def added(operands: Operands, names: str) -> str:
    """The first operand where it is added to a result that may be a sum of parts: zeros need not be a sum for that."""
    return names if operands.zero[0] else f"+ {names}"


def known() -> tuple[OpOverload, ...]:
    """The operators that have a rule of their own, and one of ours."""
    return tuple(operator for operator in _RULES if operator not in _USERS)


def find(target: Any) -> Rule | None:
    """The operator's own rule, else that of its family, else None."""
    if target in _RULES:
        return _RULES[target]
    if isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags:
        return Rule(pointwise)
    return None


def pointwise(operands: Operands) -> str:
    """The family of all pointwise operators: every dimension is a factor, aligned at the right."""
    return ", ".join(["..."] * len(operands.inputs)) + " -> " + ", ".join(["..."] * len(operands.outputs))


def whole(operands: Operands) -> str:
    """A notation for anything: no factor may be split: only whole tensors."""
    inputs = [" ".join(f"i{k}x{d}!" for d in range(v.dim())) for k, v in enumerate(operands.inputs)]
    outputs = [" ".join(f"o{k}x{d}!" for d in range(v.dim())) for k, v in enumerate(operands.outputs)]
    return ", ".join(inputs) + " -> " + ", ".join(outputs)


def of_node(
    node: fx.Node, ranks: int, inputs: tuple[Tensor, ...] | None = None, outputs: tuple[Tensor, ...] | None = None
) -> tuple[Signature, ...] | None:
    """The signatures of a node over ``ranks`` ranks, or None where its operator has no rule.

    Args:
        inputs, outputs: what stands for the node's tensors; default: its own.
    """
    if node.target is local:
        region = region_of(node)
        return (Signature(region.inputs, tuple(one.sbp for one in region.outputs)),)
    found = find(node.target)
    if found is None:
        return None
    inputs = values(tensor_arguments(node)) if inputs is None else inputs
    outputs = output_values(node) if outputs is None else outputs
    where = _where(node)
    operands = Operands(inputs, outputs, arguments(node), tuple(map(_is_zero, _tensor_values(node))))
    if isinstance(found.notation, str):
        notation = _without_absent(found.notation, [bool(at) for at in where], node.meta["val"])
    else:
        notation = found.notation(operands)
    if node.target in _USERS:
        _check_fits(node, notation, _shapes(inputs), _shapes(outputs))
    if found.linear == "all":
        linear: Linear = (tuple(range(len(inputs))),)
    else:
        linear = _renumbered(found.linear(operands) if callable(found.linear) else found.linear, where)
    return signatures(notation, _shapes(inputs), _shapes(outputs), linear, ranks)


def _check_fits(node: fx.Node, notation: str, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> None:
    problem = misfit(notation, inputs, outputs)
    if problem:
        where = origin(node)
        shapes = f"{', '.join(map(str, inputs)) or 'none'} -> {', '.join(map(str, outputs))}"
        raise CaptureError(
            f"the rule {notation!r} of {node.target} does not fit the shapes {shapes}: {problem}\n"
            f"  {where.source}   {where.code}\n"
            "Correct what was given to zg.register_rule; a rule that depends on shapes is a function of the operands."
        )


def _tensor_values(node: fx.Node) -> list[Any]:
    """What the node gives for each tensor argument of the schema."""
    assert isinstance(node.target, OpOverload)
    given = arguments(node)
    return [given[one.name] for one in schema_arguments(node.target) if "Tensor" in str(one.type)]


def _where(node: fx.Node) -> list[tuple[int, ...]]:
    """For each tensor argument of the schema, where its tensors stand among the node's: several for a list."""
    found: list[tuple[int, ...]] = []
    for value in _tensor_values(node):
        tensors = [one for one in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(one, fx.Node)]
        start = sum(map(len, found))
        found.append(tuple(range(start, start + len(tensors))))
    return found


def _is_zero(value: Any) -> bool:
    while isinstance(value, fx.Node) and isinstance(value.target, OpOverload) and value.target.is_view:
        value = value.all_input_nodes[0]
    if isinstance(value, fx.Node):
        fill = _FILL.get(value.target)
        value = None if fill is None else fill(value)
    return isinstance(value, (int, float)) and value == 0


# What constant tensors are full of.
_FILL: dict[Any, Callable[[fx.Node], Any]] = {
    aten.zeros.default: lambda node: 0,
    aten.full.default: lambda node: node.args[1],
    aten.scalar_tensor.default: lambda node: node.args[0],
}


def _without_absent(notation: str, present: Sequence[bool], value: Any) -> str:
    left, right = notation.split("->")
    operands = [part for part, there in zip(left.split(","), present, strict=True) if there]
    results = right.split(",")
    if isinstance(value, (list, tuple)):
        results = [part for part, one in zip(results, value, strict=True) if isinstance(one, Tensor)]
    return ",".join(operands) + "->" + ",".join(results)


def _renumbered(linear: Linear, where: Sequence[tuple[int, ...]]) -> Linear:
    groups = [(group,) if isinstance(group, int) else group for group in linear]
    return tuple(tuple(at for i in group for at in where[i]) for group in groups if all(where[i] for i in group))


def all_broadcast(node: fx.Node) -> Signature:
    """The signature that is always right: whole inputs, whole outputs."""
    return Signature((broadcast,) * len(tensor_arguments(node)), (broadcast,) * len(output_values(node)))


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """The node's tensor inputs in the order of the operator's arguments, repeats included."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return [argument for argument in found if isinstance(argument.meta.get("val"), Tensor)]


def values(nodes: Sequence[fx.Node]) -> tuple[Tensor, ...]:
    return tuple(node.meta["val"] for node in nodes)


def output_values(node: fx.Node) -> tuple[Tensor, ...]:
    """The tensors that the node yields; one that an operator was told not to compute is no output."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return (value,)
    return tuple(v for v in value if isinstance(v, Tensor)) if isinstance(value, (list, tuple)) else ()


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments by name, defaults filled in."""
    assert isinstance(node.target, OpOverload)
    named: dict[str, Any] = {}
    for index, argument in enumerate(schema_arguments(node.target)):
        if index < len(node.args):
            named[argument.name] = node.args[index]
        else:
            named[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return named


def _shapes(tensors: Sequence[Tensor]) -> tuple[Shape, ...]:
    return tuple(tuple(int(size) for size in tensor.shape) for tensor in tensors)
