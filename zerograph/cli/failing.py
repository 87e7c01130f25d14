"""How commands end: 0; 1 where what was asked for does not fit or differs; 2 where they were used wrongly or failed."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator
from typing import Any

import typer

from zerograph.errors import MemoryBudgetError, ZeroGraphError

DIFFERS = 1
FAILED = 2


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Errors of zerograph are told on standard error, without a traceback, and end the command.

    A memory budget that does not suffice is an answer: what was asked for does not fit. Any other error is a bug, whose
    traceback is wanted, and no answer: Python by itself would end with 1.
    """
    try:
        yield
    except ZeroGraphError as error:
        typer.echo(f"{error}", err=True)
        for note in getattr(error, "__notes__", ()):
            typer.echo(note, err=True)
        raise typer.Exit(DIFFERS if isinstance(error, MemoryBudgetError) else FAILED) from None
    except Exception:
        traceback.print_exc()
        raise typer.Exit(FAILED) from None


def as_json(value: Any) -> None:
    """Print what a machine reads; what JSON has no word for as text."""
    typer.echo(json.dumps(value, indent=2, default=str))
