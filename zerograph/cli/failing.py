"""How commands end: 0; 1 where what was asked does not fit or differs; 2 where they were used wrongly."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import typer

from zerograph.errors import ZeroGraphError

DIFFERS = 1
WRONG_USE = 2


@contextlib.contextmanager
def reported(code: int = WRONG_USE) -> Iterator[None]:
    """Errors of zerograph are told on standard error, without a traceback, and end the command."""
    try:
        yield
    except ZeroGraphError as error:
        typer.echo(f"{error}", err=True)
        for note in getattr(error, "__notes__", ()):
            typer.echo(note, err=True)
        raise typer.Exit(code) from None


def as_json(value: Any) -> None:
    """Print what a machine reads; what JSON has no word for as text."""
    typer.echo(json.dumps(value, indent=2, default=str))
