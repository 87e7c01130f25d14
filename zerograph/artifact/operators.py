"""The functions that a graph in a file may call, by name. Nothing else is looked up or imported."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from zerograph._torch import OpOverload
from zerograph.errors import ArtifactError

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
    return overload if isinstance(overload, OpOverload) else None


def check_modification(text: str) -> str:
    """Return the text of a function of FlexAttention, which runs as Python, if it calls operators only.

    It is one function, whose statements assign the result of one call each.

    Raises:
        ArtifactError: it does anything else.
    """
    if not _parses(text, "exec", lambda tree: len(tree.body) == 1 and _is_modification(tree.body[0])):
        raise ArtifactError(f"the file has a function that does not only call operators: {text!r:.80}")
    return text


def _is_modification(function: ast.stmt) -> bool:
    if not isinstance(function, ast.FunctionDef) or function.name != "mod":
        return False
    arguments = function.args
    annotations = [function.returns, *(one.annotation for one in arguments.args)]
    evaluated = [*function.decorator_list, *arguments.defaults, *arguments.kw_defaults, *filter(None, annotations)]
    *statements, result = function.body
    return (
        not evaluated
        and all(map(_is_call, statements))
        and isinstance(result, ast.Return)
        and (result.value is None or _is_plain(result.value))
    )


def _is_call(statement: ast.stmt) -> bool:
    """Return whether a statement assigns the result of an operator, called with plain values, to a name."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return False
    call = statement.value
    name = ast.unparse(call.func)
    is_operator = name == "getitem" or (
        name.startswith("ops.") and function_or_none(name.removeprefix("ops.")) is not None
    )
    values = (*call.args, *(one.value for one in call.keywords))
    targets = statement.targets
    return is_operator and all(map(_is_plain, values)) and len(targets) == 1 and isinstance(targets[0], ast.Name)


def _is_plain(value: ast.expr) -> bool:
    """Return whether an expression is made of numbers, names of local values, dtypes and lists of these."""
    if isinstance(value, (ast.List, ast.Tuple)):
        return all(map(_is_plain, value.elts))
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.op, ast.USub) and _is_plain(value.operand)
    if isinstance(value, ast.Attribute):
        is_torchs = isinstance(value.value, ast.Name) and value.value.id == "torch"
        return is_torchs and isinstance(getattr(torch, value.attr, None), torch.dtype)
    return isinstance(value, ast.Constant) or (isinstance(value, ast.Name) and value.id not in ("ops", "torch"))


_ARITHMETIC = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, ast.BinOp),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod),
    *(ast.Pow, ast.Name, ast.Load),
)
_ROUNDING = ("math.floor", "math.ceil", "math.trunc")


def check_condition(text: str) -> str:
    """Return the text of a condition on sizes, which is evaluated as Python, if it is arithmetic only.

    Raises:
        ArtifactError: it is anything else.
    """
    if not _parses(text, "eval", lambda tree: all(map(_is_arithmetic, ast.walk(tree)))):
        raise ArtifactError(f"the file has a condition on sizes that is not arithmetic: {text!r:.80}")
    return text


def _parses(text: str, mode: str, allows: Callable[[Any], bool]) -> bool:
    """Return whether a text is Python, a module ("exec") or an expression ("eval"), that is allowed."""
    try:
        return allows(ast.parse(text, mode=mode))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("min", "max", *_ROUNDING) and not node.keywords
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in _ROUNDING
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float, bool)
    return isinstance(node, _ARITHMETIC)
