"""Contenders by name, as a command line asks for them."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Protocol, TypeVar

import typer


class Named(Protocol):
    """An entry of a table of contenders."""

    @property
    def name(self) -> str: ...


One = TypeVar("One", bound=Named)


def matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names that match, in their order.

    Raises:
        typer.BadParameter: a pattern matches none.
    """
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise typer.BadParameter(f"nothing matches {pattern!r}; there are {', '.join(names)}")
    return [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def choose(patterns: Sequence[str], table: Sequence[One]) -> list[One]:
    """The contenders whose names :func:`matching` returns, in the table's order."""
    names = matching(patterns, [one.name for one in table])
    return [one for one in table if one.name in names]
