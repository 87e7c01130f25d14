"""``zerograph compare``: find the first step in which two runs differ, from their logs of fingerprints."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from zerograph.cli.failing import DIFFERS, reported
from zerograph.errors import ConfigError


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="a log: a JSON object in each line")],
    second: Annotated[Path, typer.Argument(metavar="B", help="the log of another run")],
) -> None:
    """Name the first line of two logs that differs, and what differs in it; exit code 1 if there is one.

    A run writes a line in each step: print(json.dumps({"loss": loss.item(), **step.fingerprint()}), file=log).

    Example: zerograph compare one_rank.jsonl eight_ranks.jsonl
    """
    with reported():
        difference = _first_difference(first, second)
    if difference is not None:
        typer.echo(difference)
        raise typer.Exit(DIFFERS)
    typer.echo("no difference", err=True)


def _first_difference(first: Path, second: Path) -> str | None:
    for number, (one, other) in enumerate(itertools.zip_longest(_lines(first), _lines(second)), start=1):
        if one is None or other is None:
            return f"equal up to line {number - 1}, where {first if one is None else second} ends"
        names = [name for name in {**one, **other} if one.get(name, _ABSENT) != other.get(name, _ABSENT)]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            return f"line {number}: {names[0]}{more}\n  {one.get(names[0], _ABSENT)}\n  {other.get(names[0], _ABSENT)}"
    return None


_ABSENT = "(absent)"


def _lines(log: Path) -> Iterator[dict[str, Any]]:
    try:
        with log.open() as file:
            for line in file:
                # A loss that is NaN in both runs is no difference: NaN is text here.
                entry = json.loads(line, parse_constant=str)
                if not isinstance(entry, dict):
                    raise ConfigError(f"{log} has a line that is no JSON object: {line:.60}")
                yield entry
    except (OSError, ValueError) as error:
        raise ConfigError(f"{log} is no log of fingerprints: {error}") from error
