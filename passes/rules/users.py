"""Rules that users register for operators of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerograph import _torch
from zerograph.errors import ConfigError
from zerograph.passes.rules.factors import Linear
from zerograph.passes.rules.registry import Linearity, Notation, Operands, find, users_rule

Rule = Callable[[Operands], str]


def register_rule(operator: Any, notation: str | None = None, *, linear: Linearity = ()) -> Callable[[Rule], Rule]:
    """Say how a custom operator may be split, so that its inputs need not be gathered.

    ``register_rule(scaled, "m k, k n -> m n", linear=(0, 1))`` names the index space of an operator; without
    ``notation`` it decorates a function that makes the notation from the :class:`Operands`, shapes and arguments.
    The notation is that of :mod:`zerograph.passes.rules.factors`: one factor per dimension, ``m!`` for one that
    cannot be split, one operand for each tensor argument. The operator is held to it: a factor may be split
    wherever it stands, and where an output lacks it, the parts are summed.

    Args:
        operator: what ``torch.library.custom_op`` returned, ``torch.ops.mine.op``, or ``"mine::op"``.
        linear: numbers of the inputs in which the operator is linear, the others held fixed: such an input may be a
            partial sum, and the outputs then are. A tuple of numbers: linear in those together. ``"all"``: in all.

    Raises:
        ConfigError: not an operator, one that has a rule of ours or writes to its arguments, or a notation that
            cannot be right whatever the shapes.
    """
    found = _torch.overloads(operator)
    if not found:
        raise ConfigError(
            f"register_rule() takes an operator, not {operator!r:.60}\nGive what torch.library.custom_op returned, "
            "torch.ops.<namespace>.<name>, or its name as text."
        )
    for one in found:
        if _torch.is_mutable(one):
            raise ConfigError(f"{one} writes to its arguments: give the rule to the operator that returns its result")
    if notation is not None:
        if not isinstance(notation, str):
            raise ConfigError(
                f"the rule {notation!r:.60}: give a text such as 'm k, k n -> m n', or decorate a function"
            )
        for one in found:
            _check(one, notation, linear)
            _register(one, notation, linear)

    def decorate(function: Rule) -> Rule:
        if notation is not None:
            raise ConfigError("register_rule() with a notation is no decorator: give one or the other")
        if not callable(function):
            raise ConfigError(f"register_rule() decorates a function of the operands, not {function!r:.60}")
        for one in found:
            _register(one, function, linear)
        return function

    return decorate


def _register(operator: _torch.OpOverload, notation: Notation, linear: Linearity) -> None:
    try:
        users_rule(operator, notation, linear)
    except ValueError:
        raise ConfigError(f"{operator} has a rule already: {find(operator)}") from None


def _check(operator: _torch.OpOverload, notation: str, linear: Linearity) -> None:
    """What can be told without shapes."""
    types = [str(one.type) for one in _torch.schema_arguments(operator)]
    tensors = [kind for kind in types if "Tensor" in kind]
    if any("List" in kind for kind in tensors):
        raise ConfigError(f"{operator} takes a list of tensors: decorate a function, which sees how many there are")
    left, arrow, right = notation.partition("->")
    if not arrow or "->" in right:
        raise ConfigError(f"the rule {notation!r} of {operator}: one arrow '->' stands between inputs and outputs")
    for text, wanted, kind in ((left, len(tensors), "inputs"), (right, len(_torch.returns(operator)), "outputs")):
        named = len(text.split(",")) if wanted or text.strip() else 0
        if named != wanted:
            raise ConfigError(f"the rule {notation!r} names {named} {kind}; {operator} has {wanted}")
    numbers: Linear = linear if isinstance(linear, tuple) else ()
    for group in numbers:
        for number in (group,) if isinstance(group, int) else group:
            if not 0 <= number < len(tensors):
                raise ConfigError(f"linear={linear!r} of {operator}: its tensors are numbered 0 to {len(tensors) - 1}")
