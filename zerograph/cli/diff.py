"""zerograph diff: two stages of one script's step, or two dumps."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerograph.cli.failing import DIFFERS, as_json, reported
from zerograph.cli.options import INPUTS, PRECISION, SCRIPT, precision_checked
from zerograph.cli.progress import progress_bars
from zerograph.errors import ConfigError

if TYPE_CHECKING:
    from zerograph.inspection.diff import Diff

_PASS = "after this pass; default: of a script the last, of dumps all"


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help=f"a dump: a folder or a file; or {SCRIPT}")],
    after: Annotated[str | None, typer.Argument(metavar="[B]", help="another dump, where A is one")] = None,
    stages: Annotated[str | None, typer.Option(help="of a script: two ZeRO stages, as 2,3; 0 is none")] = None,
    pass_name: Annotated[str | None, typer.Option("--pass", help=_PASS)] = None,
    module: Annotated[str | None, typer.Option(help="of a script: only this module's part")] = None,
    world_size: Annotated[int, typer.Option(help="of a script: how many ranks")] = 2,
    rank: Annotated[int, typer.Option(help="of a script: the rank to look at")] = 0,
    inputs: Annotated[str | None, typer.Option(help=INPUTS)] = None,
    precision: Annotated[str | None, typer.Option(help=f"of a script: {PRECISION}", callback=precision_checked)] = None,
    json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """Show what differs between two ZeRO stages of a step, or two dumps of ZEROGRAPH_DUMP. Exit code 1 if any does.

    Examples: zerograph diff train.py:example --stages 2,3, or zerograph diff old/rank0/step1 new/rank0/step1 --pass box
    """
    with reported(), progress_bars("loading torch"):
        if after is None:
            found = [_of_stages(before, stages, pass_name, module, world_size, rank, inputs, precision)]
        elif stages is not None or module is not None or precision is not None:
            raise ConfigError("two dumps are compared as they are: --stages, --module and --precision are for a script")
        else:
            found = _of_dumps(Path(before), Path(after), pass_name)
    differing = [one for one in found if one]
    if json:
        as_json(
            [{**asdict(one), "changes": [asdict(each) for each in one.changes if each.kind != " "]} for one in found]
        )
    else:
        for one in differing:
            typer.echo(one)
        if not differing:
            typer.echo("no difference", err=True)
    if differing:
        raise typer.Exit(DIFFERS)


def _of_stages(
    script: str,
    stages: str | None,
    pass_name: str | None,
    module: str | None,
    world_size: int,
    rank: int,
    inputs: str | None,
    precision: str | None,
) -> Diff:
    from zerograph.cli.script import load, mesh_of, prepare, set_precision
    from zerograph.inspection.diff import compare

    if stages is None:
        raise ConfigError("give two dumps, or a script and --stages 2,3")
    numbers = stages.split(",")
    if len(numbers) != 2 or not all(one.strip().isdigit() for one in numbers):
        raise ConfigError(f"--stages {stages}: two stages are 2,3, for instance")
    step, given = load(script, inputs)
    set_precision(step, precision)
    texts = []
    for number in map(int, numbers):
        found = prepare(step, given, mesh_of(world_size, rank), stage=number)
        texts.append(found.text(pass_name, module).splitlines())
    one, other = (f"{script} stage {number.strip()}" for number in numbers)
    return compare(texts[0], texts[1], (one, other))


def _of_dumps(before: Path, after: Path, pass_name: str | None) -> list[Diff]:
    for path in (before, after):
        if not path.exists():
            raise ConfigError(f"there is no dump {path}")
    if before.is_file() and after.is_file():
        return [_of_files(before, after)]
    if before.is_file() != after.is_file():
        raise ConfigError(f"one of {before} and {after} is a file, the other a folder")
    one, other = _passes(before), _passes(after)
    names = list(dict.fromkeys([*one, *other]))
    if pass_name is not None:
        if pass_name not in names:
            raise ConfigError(f"neither {before} nor {after} has a pass {pass_name!r}: they have {', '.join(names)}")
        names = [pass_name]
    return [_of_files(one.get(name), other.get(name)) for name in names]


def _passes(folder: Path) -> dict[str, Path]:
    """Return the file of each pass in a dump by the pass's name: an additional pass shifts no others."""
    found = {path.stem.partition("-")[2]: path for path in sorted(folder.glob("[0-9][0-9]-*.txt"))}
    if not found:
        raise ConfigError(
            f"{folder} is no dump of a step: it has no files like 07-place.txt\n"
            "A dump is a folder like DIR/rank0/step1 of ZEROGRAPH_DUMP=DIR."
        )
    return found


def _of_files(before: Path | None, after: Path | None) -> Diff:
    from zerograph.inspection.diff import compare

    return compare(_read(before), _read(after), (str(before or "/dev/null"), str(after or "/dev/null")))


def _read(path: Path | None) -> list[str]:
    lines = [] if path is None else path.read_text().splitlines()
    # What the file says of itself is no part of the graph.
    return [line for line in lines if not line.startswith("# ")]
