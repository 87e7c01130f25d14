"""Expressions over symbolic sizes as nested lists, and back. Only the classes of a closed table are rebuilt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions

_CLASSES: dict[str, Any] = {
    **{cls.__name__: cls for cls in (sympy.Add, sympy.Mul, sympy.Pow)},
    **{cls.__name__: cls for cls in (sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)},
    **{cls.__name__: cls for cls in (sympy.And, sympy.Or, sympy.Not)},
    **{
        name: getattr(functions, name)
        for name in (
            *(
                "FloorDiv",
                "CleanDiv",
                "CeilDiv",
                "Mod",
                "PythonMod",
                "ModularIndexing",
                "Max",
                "Min",
                "Where",
                "ToFloat",
            ),
            *("TruncToInt", "CeilToInt", "FloorToInt", "FloatTrueDiv", "IntTrueDiv", "PowByNatural", "FloatPow"),
        )
        if hasattr(functions, name)
    },
}
# As torch names the results of ``tensor.item()``.
_UNKNOWN = re.compile(r"zuf\d+")
_KINDS = {"int": torch.SymInt, "float": torch.SymFloat, "bool": torch.SymBool}


def describe_number(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> list[Any] | None:
    """Return a symbolic number as a nested list; None for one that has another kind of expression."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(number, cls))
    description = _describe(number.node.expr)
    return None if description is None else [kind, description]


def _describe(expression: Any) -> Any:
    if expression.is_Symbol:
        return ["Symbol", str(expression)]
    if expression.is_Integer:
        return int(expression)
    if expression.is_Rational:
        return ["Rational", int(expression.p), int(expression.q)]
    if expression.is_Float:
        return ["Float", float(expression).hex()]
    if expression in (sympy.true, sympy.false):
        return bool(expression)
    name = type(expression).__name__
    if _CLASSES.get(name) is not expression.func:
        return None
    arguments = [_describe(argument) for argument in expression.args]
    return None if None in arguments else [name, *arguments]


def rebuild_number(description: Any, symbols: Mapping[str, torch.SymInt | torch.SymFloat], environment: Any) -> Any:
    """Return the symbolic number of a description.

    Args:
        symbols: the symbols by name.
        environment: the shape environment that they belong to.

    Raises:
        ValueError: the description is not one of :func:`describe_number`.
    """
    kind, described = description
    expression = _rebuild(described, symbols)
    if kind == "int":
        return environment.create_symintnode(expression, hint=None)
    if kind == "float":
        return environment.create_symfloatnode(expression, hint=None)
    if kind == "bool":
        return environment.create_symboolnode(expression)
    raise ValueError(kind)


def unknown_numbers(description: Any) -> set[str]:
    """Return the names of the floats in a description whose values torch does not know while it traces."""
    if not isinstance(description, list):
        return set()
    if description[:1] == ["Symbol"] and len(description) == 2 and _UNKNOWN.fullmatch(str(description[1])):
        return {description[1]}
    return set().union(*map(unknown_numbers, description))


def _rebuild(description: Any, symbols: Mapping[str, torch.SymInt | torch.SymFloat]) -> Any:
    if isinstance(description, bool):
        return sympy.true if description else sympy.false
    if isinstance(description, int):
        return sympy.Integer(description)
    if not isinstance(description, list) or not description or not isinstance(description[0], str):
        raise ValueError(f"{description!r:.80} is no expression")
    name, *arguments = description
    if name == "Symbol":
        if arguments[0] not in symbols:
            raise ValueError(f"there is no symbol {arguments[0]!r:.80}")
        return symbols[arguments[0]].node.expr
    if name == "Rational":
        return sympy.Rational(*map(int, arguments))
    if name == "Float":
        return sympy.Float(float.fromhex(arguments[0]))
    if name not in _CLASSES:
        raise ValueError(f"{name!r:.80} is no function of sizes")
    # Unevaluated sums and products would differ from those that torch builds.
    return _CLASSES[name](*(_rebuild(argument, symbols) for argument in arguments))
