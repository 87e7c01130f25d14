"""Rules that users register for operators of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zerograph import _torch
from zerograph.errors import ConfigError, ZeroGraphError
from zerograph.passes.rules.check_rule import check_rule
from zerograph.passes.rules.factors import Linear, miscounted
from zerograph.passes.rules.registry import (
    Linearity,
    Notation,
    Operands,
    register_user_rule,
    restore_user_rule,
    rule_of,
)

Rule = Callable[[Operands], str]


def register_rule(
    operator: Any, notation: str | None = None, *, linear: Linearity = (), check: Sequence[Any] | None = None
) -> Callable[[Rule], Rule]:
    """Register how a custom operator may be split, so that its inputs need not be gathered.

    ``register_rule(scaled, "m k, k n -> m n", linear=(0, 1))`` names the index space of an operator. Without
    ``notation`` it decorates a function that returns the notation for the :class:`Operands`, shapes and arguments. The
    notation is that of :mod:`zerograph.passes.rules.factors`: one operand for each tensor argument, one factor per
    dimension, ``m!`` for a factor that cannot be split. A factor may be split wherever it stands; where an output lacks
    it, the parts are summed.

    Args:
        operator: the result of ``torch.library.custom_op``, ``torch.ops.mine.op``, or ``"mine::op"``.
        notation: the notation; None to decorate a function.
        linear: numbers of the inputs in which the operator is linear, the others held fixed. Such an input may be a
            partial sum, and the outputs then are partial sums. A tuple of numbers: linear in those together. ``"all"``:
            linear in all inputs together.
        check: example arguments, for which :func:`zerograph.check_rule` compares the rule with the operator at once.

    Raises:
        ConfigError: ``operator`` is no operator, has a built-in rule or writes to its arguments; the notation fits
            no shapes; or the check finds that the rule is wrong, which is not registered then.
    """
    overloads = _torch.overloads(operator)
    if not overloads:
        raise ConfigError(
            f"register_rule() takes an operator, not {operator!r:.60}\nGive what torch.library.custom_op returned, "
            "torch.ops.<namespace>.<name>, or its name as text."
        )
    for overload in overloads:
        if _torch.is_mutable(overload):
            raise ConfigError(
                f"{overload} writes to its arguments: give the rule to the operator that returns its result"
            )
    if notation is not None:
        if not isinstance(notation, str):
            raise ConfigError(
                f"the rule {notation!r:.60}: give a text such as 'm k, k n -> m n', or decorate a function"
            )
        for overload in overloads:
            _check(overload, notation, linear)
        _register(overloads, notation, linear, check)

    def decorate(function: Rule) -> Rule:
        if notation is not None:
            raise ConfigError("register_rule() with a notation is no decorator: give one or the other")
        if not callable(function):
            raise ConfigError(f"register_rule() decorates a function of the operands, not {function!r:.60}")
        _register(overloads, function, linear, check)
        return function

    return decorate


def _register(
    operators: Sequence[_torch.OpOverload], notation: Notation, linear: Linearity, examples: Sequence[Any] | None
) -> None:
    """Register the rule, and check it with these arguments; a wrong one is forgotten."""
    previous = {operator: rule_of(operator) for operator in operators}
    for operator in operators:
        try:
            register_user_rule(operator, notation, linear)
        except ValueError:
            raise ConfigError(f"{operator} has a rule already: {rule_of(operator)}") from None
    if examples is None:
        return
    try:
        check_rule(operators[0], *examples)
    except ZeroGraphError:
        for operator, before in previous.items():
            restore_user_rule(operator, before)
        raise


def _check(operator: _torch.OpOverload, notation: str, linear: Linearity) -> None:
    """Check what does not depend on shapes."""
    types = [str(argument.type) for argument in _torch.schema_arguments(operator)]
    tensors = [kind for kind in types if "Tensor" in kind]
    if any("List" in kind for kind in tensors):
        raise ConfigError(f"{operator} takes a list of tensors: decorate a function, which sees how many there are")
    if problem := miscounted(notation, len(tensors), len(_torch.returns(operator))):
        raise ConfigError(f"the rule {notation!r} of {operator} is wrong: {problem}")
    numbers: Linear = linear if isinstance(linear, tuple) else ()
    for group in numbers:
        for number in (group,) if isinstance(group, int) else group:
            if not 0 <= number < len(tensors):
                raise ConfigError(f"linear={linear!r} of {operator}: its tensors are numbered 0 to {len(tensors) - 1}")
