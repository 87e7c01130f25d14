"""``zerograph diff``: compare two stages of a script's step, or two dumps."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerograph.cli.failing import DIFFERS, as_json, reported
from zerograph.cli.options import SCRIPT, Inputs, Precision, Settings
from zerograph.cli.progress import progress_bars
from zerograph.errors import ConfigError

if TYPE_CHECKING:
    from zerograph.inspection.diff import Diff

_PASS = "the graph after this pass; default: the last of a script, all of dumps"


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help=f"a dump: a folder or a file; or {SCRIPT}")],
    after: Annotated[str | None, typer.Argument(metavar="[B]", help="another dump, if A is a dump")] = None,
    stages: Annotated[str | None, typer.Option(help="with a script: two ZeRO stages, such as 2,3; 0 is none")] = None,
    pass_name: Annotated[str | None, typer.Option("--pass", help=_PASS)] = None,
    module: Annotated[str | None, typer.Option(help="with a script: only this module's nodes")] = None,
    world_size: Annotated[int, typer.Option(help="with a script: number of ranks")] = 2,
    rank: Annotated[int, typer.Option(help="with a script: the rank")] = 0,
    inputs: Inputs = None,
    precision: Precision = None,
    settings: Settings = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show the difference of two ZeRO stages of a step, or of two dumps of ZEROGRAPH_DUMP; exit code 1 if there is one.

    Examples: zerograph diff train.py:example --stages 2,3, or zerograph diff old/rank0/step1 new/rank0/step1 --pass box
    """
    with reported(), progress_bars("loading torch"):
        if after is None:
            numbers = _two(stages)
            from zerograph.cli.script import load, mesh_of, prepare
            from zerograph.inspection.diff import compare

            step, batch = load(before, inputs, precision, settings)
            prepared = (prepare(step, batch, mesh_of(world_size, rank), stage=number) for number in numbers)
            old, new = (one.text(pass_name, module).splitlines() for one in prepared)
            diffs = [compare(old, new, (f"{before} stage {numbers[0]}", f"{before} stage {numbers[1]}"))]
        elif stages is not None or module is not None or precision is not None or settings:
            raise ConfigError("--stages, --module, --precision and --set are for a script, not for two dumps")
        else:
            diffs = _of_dumps(Path(before), Path(after), pass_name)
    differing = [each for each in diffs if each]
    if json:
        as_json(
            [
                {**asdict(each), "changes": [asdict(change) for change in each.changes if change.kind != " "]}
                for each in diffs
            ]
        )
    else:
        for each in differing:
            typer.echo(each)
        if not differing:
            typer.echo("no difference", err=True)
    if differing:
        raise typer.Exit(DIFFERS)


def _two(stages: str | None) -> list[int]:
    if stages is None:
        raise ConfigError("give two dumps, or a script and --stages 2,3")
    numbers = stages.split(",")
    if len(numbers) != 2 or not all(number.strip().isdigit() for number in numbers):
        raise ConfigError(f"--stages {stages}: give two stages, such as 2,3")
    return list(map(int, numbers))


def _of_dumps(before: Path, after: Path, pass_name: str | None) -> list[Diff]:
    for path in (before, after):
        if not path.exists():
            raise ConfigError(f"there is no dump {path}")
    if before.is_file() and after.is_file():
        return [_of_files(before, after)]
    if before.is_file() != after.is_file():
        raise ConfigError(f"one of {before} and {after} is a file, the other a folder")
    old, new = _passes(before), _passes(after)
    names = list(dict.fromkeys([*old, *new]))
    if pass_name is not None:
        if pass_name not in names:
            raise ConfigError(f"neither {before} nor {after} has a pass {pass_name!r}: they have {', '.join(names)}")
        names = [pass_name]
    return [_of_files(old.get(name), new.get(name)) for name in names]


def _passes(folder: Path) -> dict[str, Path]:
    """Return the file of each pass in a dump by the pass's name: an additional pass shifts no others."""
    files = {path.stem.partition("-")[2]: path for path in sorted(folder.glob("[0-9][0-9]-*.txt"))}
    if not files:
        raise ConfigError(
            f"{folder} is not a dump of a step: it has no files like 07-place.txt\n"
            "A dump is a folder like DIR/rank0/step1 of ZEROGRAPH_DUMP=DIR."
        )
    return files


def _of_files(before: Path | None, after: Path | None) -> Diff:
    from zerograph.inspection.diff import compare

    return compare(_read(before), _read(after), (str(before or "/dev/null"), str(after or "/dev/null")))


def _read(path: Path | None) -> list[str]:
    lines = [] if path is None else path.read_text().splitlines()
    # The head of the file is no part of the graph.
    return [line for line in lines if not line.startswith("# ")]
