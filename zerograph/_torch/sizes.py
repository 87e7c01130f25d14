"""Symbolic sizes: torch's ``ShapeEnv`` and the sympy expressions that ``torch.SymInt`` holds."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_unbacked_symbols
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

from zerograph.base.source import is_users

# Prefix of the names of our sources; the rest names the symbol.
_OURS = "zerograph:"


class SizeEnv(ShapeEnv):
    """A shape environment whose symbols have names of our own, and whose conditions can be followed.

    Attributes:
        on_guard: is called with each new condition that a trace relies on.
        on_question: is called with each condition that Python code asks about, torch's own apart, and the answer.
        closed: after the capture: conditions are evaluated with hints and no longer recorded.
        sizes: the symbols that belong to it.
    """

    on_guard: Callable[[Any], None] | None = None
    on_question: Callable[[Any, bool], None] | None = None
    closed = False
    sizes: Any = None

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a condition with hints. The base class records it as a guard.

        Raises:
            AssertionError: after the capture, a pass relies on the equality of two sizes that may differ.
        """
        if not self.closed:
            before = len(self.guards)
            result = super().evaluate_expr(orig_expr, *args, **kwargs)
            if self.on_guard is not None:
                for guard in self.guards[before:]:
                    self.on_guard(guard.expr)
            if self.on_question is not None and _is_asked_by_program():
                self.on_question(orig_expr, bool(result))
            return result
        with self.suppress_guards():
            result = super().evaluate_expr(orig_expr, *args, **kwargs)
        equal = isinstance(orig_expr, sympy.Eq if result else sympy.Ne)
        if equal and self._maybe_evaluate_static(orig_expr) is None:
            raise AssertionError(f"a pass relies on {orig_expr}, which holds for hints only")
        return result

    def _generate_unique_id(self, source_name: str) -> Any:
        if source_name.startswith(_OURS):
            return source_name.removeprefix(_OURS)
        return super()._generate_unique_id(source_name)


_TORCH = str(Path(torch.__file__).parent) + os.sep
_EVALUATING = _TORCH + os.path.join("fx", "experimental") + os.sep
# Modules and functions that compute as a user's code could.
_MODULES = _TORCH + "nn" + os.sep


def _is_asked_by_program() -> bool:
    """Return whether ``bool(condition)`` in the user's code or in ``torch.nn`` led here, not a shape function."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_EVALUATING):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "__bool__" or frame.f_back is None:
        return False
    asking = frame.f_back.f_code.co_filename
    return asking.startswith(_MODULES) or is_users(asking)


def new_size(environment: SizeEnv, name: str, hint: int, *, minimum: int) -> torch.SymInt:
    """Add a symbol.

    Args:
        name: begins with ``s``, as all names of sizes do.
        minimum: what a trace assumes: 2, as ``torch.compile`` does of sizes; 1; or 0 for any number.
    """
    # Imported here because it loads torch._dynamo, which takes half a second and static steps do not need.
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(_OURS + name.removeprefix("s"))
    symbol = environment.create_symbol(
        hint, source, DimDynamic.DYNAMIC, positive=minimum > 0 or None, do_not_specialize_zero_one=minimum < 2
    )
    if minimum == 1:
        environment.constrain_symbol_range(symbol, 1, int_oo)
    return environment.create_symintnode(symbol, hint=hint, source=source)  # type: ignore[return-value]


@contextlib.contextmanager
def raw_sizes() -> Iterator[None]:
    """Allow symbolic sizes among the arguments of nodes. Torch warns of them; our last pass replaces them by nodes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Raw Sym", UserWarning)
        yield


def substitute(size: torch.SymInt, old: torch.SymInt, new: torch.SymInt) -> torch.SymInt:
    """Return the size with a symbol replaced by another one."""
    expression = size.node.expr.xreplace({old.node.expr: new.node.expr})
    environment: ShapeEnv = size.node.shape_env
    return environment.create_symintnode(expression, hint=None)  # type: ignore[return-value]


def separate_env(symbols: Iterable[torch.SymInt]) -> SizeEnv:
    """Return a new environment with these symbols, for code that is compiled by itself.

    A positive symbol is at least 1 there. Nothing else is assumed of it: :func:`conditions` returns the rest.
    """
    environment = SizeEnv(duck_shape=False)
    for symbol in symbols:
        new_size(environment, str(symbol), size_hint(symbol), minimum=1 if is_positive(symbol) else 0)
    return environment


def in_env(environment: ShapeEnv, size: Any) -> Any:
    """Return a size over the symbols of equal names in another environment."""
    return size if isinstance(size, int) else environment.create_symintnode(size.node.expr, hint=None)


def is_symbol(size: Any) -> bool:
    """Return whether a value is a symbolic size that is one symbol."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_symbol)


def is_positive(symbol: torch.SymInt) -> bool:
    """Return whether traces assume that a symbol is not 0."""
    return bool(symbol.node.expr.is_positive)


def conditions(environment: SizeEnv) -> list[str]:
    """Return what code that was compiled in an environment relies on, as Python over the names of its symbols."""
    return [condition_text(guard.expr) for guard in environment.guards]


def is_multiple(size: torch.SymInt, symbol: torch.SymInt) -> bool:
    """Return whether the size is a symbol times a factor in which the symbol does not occur."""
    return not (size.node.expr / symbol.node.expr).has(symbol.node.expr)


def coefficient(size: torch.SymInt) -> int:
    """Return the integer that a size is the product of with something symbolic."""
    return int(size.node.expr.as_coeff_Mul()[0]) if size.node.expr.as_coeff_Mul()[0].is_Integer else 1


def evaluate_size(size: Any, values: Mapping[Any, int]) -> int:
    """Return a size for values of the symbols that :func:`size_key` returns."""
    return int(_expression(size).xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()}))


def condition_holds(condition: Any, values: Mapping[str, int]) -> bool:
    """Return whether a condition holds for values of all its symbols, by name.

    A size that a guard has fixed is a number already, and a condition of before may still have its symbol.
    """
    expression = _expression(condition)
    return bool(expression.xreplace({symbol: sympy.Integer(values[symbol.name]) for symbol in expression.free_symbols}))


def differs_from_one(size: Any) -> Any:
    """Return the condition that a size is not 1."""
    return sympy.Ne(_expression(size), 1)


def is_equality(condition: Any) -> bool:
    """Return whether a condition says that two sizes are equal."""
    return isinstance(_expression(condition), sympy.Eq)


def negated(condition: Any) -> Any:
    """Return the condition that holds where this one does not."""
    return sympy.Not(_expression(condition))


def evaluate_number(number: Any, values: Mapping[str, int]) -> int | float | bool:
    """Return a symbolic number for values of its symbols by name, as a number of Python."""
    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(number)]
    expression = _expression(number)
    result: int | float | bool = kind(expression.subs({one: values[str(one)] for one in expression.free_symbols}))
    return result


def condition_text(condition: Any) -> str:
    """Return a condition on sizes as Python."""
    text: str = PythonPrinter().doprint(condition)
    return text


def symbols_of(size: Any) -> list[str]:
    """Return the names of the symbols in a size or expression, sorted."""
    return sorted(map(str, _expression(size).free_symbols))


def depends_on_values(size: Any) -> bool:
    """Return whether a size follows from the values of a tensor."""
    return bool(free_unbacked_symbols(size))


def size_hint(size: Any) -> int:
    """Return the value that a symbolic size is traced with, and any other size itself."""
    return size if isinstance(size, int) else int(size.node.hint)


def size_key(size: Any) -> Any:
    """Return a size in a form that can be hashed, and compared without a guard."""
    return size if isinstance(size, int) else size.node.expr


def constant_value(number: Any) -> int | float | None:
    """Return the value of a symbolic number in which no symbol is left, such as ``0 * s0``; None for any other."""
    expression = _expression(number)
    if expression.free_symbols:
        return None
    return int(expression) if isinstance(number, torch.SymInt) else float(expression)


def emit_size(graph: fx.Graph, size: Any, nodes: dict[Any, fx.Node]) -> fx.Node:
    """Add the nodes that compute a symbolic number at the graph's insertion point; return the last one.

    Args:
        nodes: node of each symbol, by :func:`size_key`; and of numbers that were computed before.
    """
    proxies = {key: fx.Proxy(node) for key, node in nodes.items() if key.is_symbol}
    proxy = sympy_interp(_Arithmetic, proxies, _expression(size))
    node: fx.Node = proxy.node
    return node


class _Arithmetic(PythonReferenceAnalysis):
    """Python's operators, which proxies record, for what the base class computes with functions of torch."""

    int_truediv = staticmethod(operator.truediv)
    truediv = staticmethod(operator.truediv)


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else sympy.sympify(size)
