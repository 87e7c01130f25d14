"""The table of rules: from an operator to its signatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload, schema_arguments
from zerograph.passes.rules.factors import Linear, Shape, Signature, signatures
from zerograph.region import local, region_of
from zerograph.sbp import broadcast

# A rule whose notation depends on shapes or arguments works it out from the node.
Notation = str | Callable[["Operands"], str]
# ``"all"``: linear in all inputs together, however many.
Linearity = Linear | Literal["all"] | Callable[["Operands"], Linear]


@dataclass(frozen=True)
class Operands:
    """What a rule may look at: the node's tensors and arguments, by the operator's own argument names."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    arguments: dict[str, Any]

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


def rule(operator: Any, notation: Notation, *, linear: Linearity = ()) -> None:
    """Give an operator (one overload, or a packet of them) its rule."""
    overloads = [operator] if isinstance(operator, OpOverload) else [getattr(operator, n) for n in operator.overloads()]
    for overload in overloads:
        if overload in _RULES:
            raise ValueError(f"{overload} has a rule already")
        _RULES[overload] = Rule(notation, linear)


def letters(rank: int) -> list[str]:
    """One factor name for each dimension of an operand."""
    return [f"d{i}" for i in range(rank)]


def known() -> tuple[OpOverload, ...]:
    """The operators that have a rule of their own."""
    return tuple(_RULES)


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
    present = _present(node)
    operands = Operands(inputs, outputs, arguments(node))
    if isinstance(found.notation, str):
        notation = _without_absent(found.notation, present, node.meta["val"])
    else:
        notation = found.notation(operands)
    if found.linear == "all":
        linear: Linear = (tuple(range(len(inputs))),)
    else:
        linear = _renumbered(found.linear(operands) if callable(found.linear) else found.linear, present)
    return signatures(notation, _shapes(inputs), _shapes(outputs), linear, ranks)


def _present(node: fx.Node) -> list[bool]:
    """For each tensor argument of the schema, whether the node gives it a tensor."""
    assert isinstance(node.target, OpOverload)
    given = arguments(node)
    declared = [one.name for one in schema_arguments(node.target) if "Tensor" in str(one.type)]
    return [isinstance(given[name], fx.Node) for name in declared]


def _without_absent(notation: str, present: Sequence[bool], value: Any) -> str:
    left, right = notation.split("->")
    operands = [part for part, there in zip(left.split(","), present, strict=True) if there]
    results = right.split(",")
    if isinstance(value, (list, tuple)):
        results = [part for part, one in zip(results, value, strict=True) if isinstance(one, Tensor)]
    return ",".join(operands) + "->" + ",".join(results)


def _renumbered(linear: Linear, present: Sequence[bool]) -> Linear:
    number = {old: new for new, old in enumerate(i for i, there in enumerate(present) if there)}
    groups = [(group,) if isinstance(group, int) else group for group in linear]
    return tuple(tuple(number[i] for i in group) for group in groups if all(i in number for i in group))


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
