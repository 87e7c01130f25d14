"""Edits of the pipeline: a user inserts, replaces or disables passes for one graph."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal

from torch import fx

from zerograph.errors import ConfigError

Rewrite = Callable[[fx.GraphModule, Any], fx.GraphModule]
Action = Literal["before", "after", "replace", "disable"]


@dataclass(frozen=True)
class PassEdit:
    """One change of the pipeline, for ``config.passes``.

    A pass is a function ``(fx.GraphModule, Context) -> fx.GraphModule``; the first line of its docstring says what it
    does. All ranks must give the same edits.

    Attributes:
        action: the kind of edit.
        name: the pass of the pipeline that the edit refers to.
        run: the new pass; None to disable one.
    """

    action: Action
    name: str
    run: Rewrite | None = None

    @classmethod
    def before(cls, name: str, run: Rewrite) -> PassEdit:
        """Insert a pass right before the pass ``name``."""
        return cls("before", name, _checked(run))

    @classmethod
    def after(cls, name: str, run: Rewrite) -> PassEdit:
        """Insert a pass right after the pass ``name``."""
        return cls("after", name, _checked(run))

    @classmethod
    def replace(cls, name: str, run: Rewrite) -> PassEdit:
        """Run a pass instead of the pass ``name``."""
        return cls("replace", name, _checked(run))

    @classmethod
    def disable(cls, name: str) -> PassEdit:
        """Leave out the pass ``name``."""
        return cls("disable", name)

    def __str__(self) -> str:
        """Return the edit as text, equal on all ranks if the code of the pass is."""
        if self.run is None:
            return f"{self.action} {self.name}"
        return f"{self.action} {self.name}: {self.run.__name__} ({_digest(self.run)})"

    __repr__ = __str__


def _checked(run: Rewrite) -> Rewrite:
    if not callable(run) or not isinstance(getattr(run, "__name__", None), str):
        raise ConfigError(f"{run!r:.80} is no pass: give a function that takes a graph module and a Context")
    return run


def _digest(run: Rewrite) -> str:
    """Return a digest of the function's code, its defaults and the values in its closure."""
    code = getattr(run, "__code__", None)
    if code is None:
        return type(run).__qualname__
    cells = [cell.cell_contents for cell in getattr(run, "__closure__", None) or ()]
    values = (*(getattr(run, "__defaults__", None) or ()), *cells)
    text = repr((_described(code), [_described(value) for value in values]))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _described(value: object) -> object:
    """Return a description of a constant in a function's code without addresses, which differ between processes."""
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, tuple(map(_described, value.co_consts))
    if isinstance(value, (tuple, list, frozenset, set)):
        described = [_described(entry) for entry in value]
        return sorted(map(repr, described)) if isinstance(value, (set, frozenset)) else described
    if isinstance(value, (int, float, complex, str, bytes, bool, type(None), type(...))):
        return value
    return getattr(value, "__qualname__", type(value).__qualname__)
