"""The functions that a graph in a file may call, by name. Nothing else is looked up or imported."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zerograph import _torch
from zerograph._torch import OpOverload
from zerograph.errors import ArtifactError
from zerograph.ops import flex_attention

# Operators of torch, and those of zerograph. Operators of other libraries are code of the user.
_NAMESPACES = ("aten", "prims", "_c10d_functional", "zerograph")
# It opens a file, which no step does.
_REFUSED = ("aten.from_file.default", "aten.from_file.out")

# What computes sizes, and takes results apart.
_OPERATOR = (
    *("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow", "abs", "and_", "or_", "not_"),
    *("lshift", "rshift", "eq", "ne", "lt", "le", "gt", "ge"),
)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATOR},
    **{f"math.{name}": getattr(math, name) for name in ("floor", "ceil", "trunc", "sqrt")},
    **{
        f"torch.{name}": getattr(torch, name)
        for name in ("sym_max", "sym_min", "sym_int", "sym_float", "sym_not", "sym_ite", "sym_sum")
    },
}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_0-9][A-Za-z0-9_]*)*")


def name_of(function: Any) -> str:
    """Return the name under which :func:`function_of` finds a function.

    Raises:
        ArtifactError: a file cannot refer to it.
    """
    name = str(function) if isinstance(function, OpOverload) else _NAMES.get(function, "")
    if name and function_or_none(name) is function:
        return name
    shown = name or getattr(function, "__qualname__", repr(function))
    raise ArtifactError(
        f"the step calls {shown}, which a file cannot refer to: only operators of torch and of zerograph are looked up "
        "by name\nRun this step without exporting it."
    )


def function_of(name: Any) -> Callable[..., Any]:
    """Return the function of a name.

    Raises:
        ArtifactError: it is not in the list.
    """
    function = function_or_none(name) if isinstance(name, str) else None
    if function is None:
        raise ArtifactError(f"the file calls {name!r:.80}, which is none of the functions that a graph may call")
    return function


def function_or_none(name: str) -> Callable[..., Any] | None:
    """Return the function of a name; None if it is not in the list."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, _, rest = name.partition(".")
    parts = rest.split(".")
    if namespace not in _NAMESPACES or name in _REFUSED or len(parts) != 2 or not all(map(_NAME.fullmatch, parts)):
        return None
    overload = getattr(getattr(getattr(torch.ops, namespace), parts[0], None), parts[1], None)
    # Operators without a kernel, such as aten.save, are functions of TorchScript.
    return overload if isinstance(overload, OpOverload) and _torch.has_kernel(overload) else None


def bound(function: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names in the operator's schema.

    Raises:
        ArtifactError: the schema does not take them.
    """
    names = _parameters(function)
    by_name = dict(zip(names, args, strict=False)) | dict(kwargs)
    if len(args) > len(names) or len(by_name) != len(args) + len(kwargs) or not by_name.keys() <= names.keys():
        raise ArtifactError(f"the file calls {function} with arguments that it does not take")
    return by_name


@functools.cache
def _parameters(function: OpOverload) -> dict[str, None]:
    return dict.fromkeys(argument.name for argument in _torch.schema_arguments(function))


def check_modification(text: Any) -> None:
    """Check that a function of FlexAttention calls only operators that a file may refer to.

    Raises:
        ArtifactError: it does anything else.
    """
    try:
        refused = [name for one in flex_attention.operators_in(text) if function_or_none(name := str(one)) is not one]
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"the file has a function that does not only call operators: {error}") from None
    if refused:
        raise ArtifactError(f"the file has a function that calls {refused[0]}, which a file cannot refer to")
