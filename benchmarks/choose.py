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


def choose(patterns: Sequence[str], table: Sequence[One]) -> list[One]:
    """The contenders whose names match, in the table's order.

    Raises:
        typer.BadParameter: a pattern matches none.
    """
    names = [one.name for one in table]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise typer.BadParameter(f"no contender matches {pattern!r}; there are {', '.join(names)}")
    return [one for one in table if any(fnmatch.fnmatch(one.name, pattern) for pattern in patterns)]
