"""Exit codes of commands: 0; 1 if something does not fit or differs; 2 for wrong usage or failure."""

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
    """Print errors of zerograph on standard error, without a traceback, and end the command.

    An insufficient memory budget is an answer, with exit code 1. Any other error is a bug: its traceback
    is printed; the exit code is 2, not Python's 1.
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
    """Print a value as JSON; values without a JSON type are text."""
    typer.echo(json.dumps(value, indent=2, default=str))
