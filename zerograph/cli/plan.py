"""``zerograph plan``: what training takes on each rank, before there is a job."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from zerograph.cli.failing import DIFFERS, reported
from zerograph.cli.progress import progress_bars
from zerograph.cli.script import load, tracing
from zerograph.config import in_bytes
from zerograph.planner import bars, lanes, pictures, plots, show
from zerograph.planner.closed_form import Precision, model_states
from zerograph.planner.front import plan as plan_step
from zerograph.planner.plan import Plan
from zerograph.planner.search import STAGES
from zerograph.progress import tell


def plan(
    step: Annotated[
        str | None,
        typer.Argument(metavar="SCRIPT:STEP", help="a function that returns (ZeroGraph, inputs)"),
    ] = None,
    params: Annotated[float | None, typer.Option(help="no script: so many parameters, in closed form")] = None,
    precision: Annotated[str, typer.Option(help="mixed, or fp32: as the script says")] = "mixed",
    world_size: Annotated[str, typer.Option(help="numbers of ranks: 64, or 1,4,16; of nodes by ranks: 8x8")] = "8",
    stage: Annotated[
        str, typer.Option(help="off, 1, 2 or 3, or several: off,1,2,3; auto: the fastest that fits")
    ] = "auto",
    device: Annotated[str, typer.Option(help="h100, h200, a100, cpu, or a YAML file of zerograph calibrate")] = "h100",
    fit: Annotated[str | None, typer.Option(help="the memory of a rank, 80GiB, instead of the device's")] = None,
    nvme_path: Annotated[
        Path | None, typer.Option(help="with --stage auto: state and parameters may rest in files of this directory")
    ] = None,
    compress: Annotated[bool, typer.Option("--compress", help="reduce gradients in 16 bits")] = False,
    plot: Annotated[Path | None, typer.Option(help="draw curves over the ranks into this PNG or SVG")] = None,
    memory: Annotated[Path | None, typer.Option(help="draw memory by kind into this PNG or SVG")] = None,
    timeline: Annotated[Path | None, typer.Option(help="draw what runs when into this PNG or SVG")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="numbers for machines, on one line for each plan")] = False,
) -> None:
    """What a training step takes on each rank: memory, wire, time.

    Of a script's step, compiled for that many ranks:  zerograph plan train.py:example --world-size 64 --fit 80GiB

    As pictures, stage by stage:  zerograph plan train.py:example --stage off,1,2,3 --memory memory.png

    Of a number of parameters, in closed form:  zerograph plan --params 7.5e9 --world-size 1,4,16,64

    Ends with 1 if something does not fit, with 2 if it cannot be planned.
    """
    console, errors = Console(), Console(stderr=True)
    try:
        meshes = [_mesh(one) for one in world_size.split(",")]
        limit = None if fit is None else in_bytes(fit)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if fit is not None and limit is None:
        raise typer.BadParameter(f"--fit {fit!r}: give bytes, or a size like 80GiB")
    if precision not in ("mixed", "fp32"):
        raise typer.BadParameter(f"--precision {precision}: choose mixed or fp32")
    if (step is None) == (params is None):
        raise typer.BadParameter("give a script's step, or --params, and not both")
    asked_for = ((plots.draw, plot), (bars.draw, memory), (lanes.draw, timeline))
    drawings = [(draw, path) for draw, path in asked_for if path is not None]
    if params is not None and drawings:
        raise typer.BadParameter("pictures are of a script's step: --params has no memory over time and no timeline")
    if nvme_path is not None and stage != "auto":
        raise typer.BadParameter("--nvme-path is for --stage auto")
    if params is not None:
        with reported():
            fits = _closed_form(console, params, [_size(mesh) for mesh in meshes], precision, limit, as_json)
        raise typer.Exit(0 if fits else DIFFERS)
    assert step is not None
    ways = list(itertools.product(meshes, stage.split(",")))
    plans: list[Plan] = []
    options: dict[str, Any] = {"amp_dtype": torch.bfloat16} if precision == "mixed" else {}
    if nvme_path is not None:
        options["nvme_path"] = nvme_path
    if compress:
        options["reduce_dtype"] = torch.bfloat16
    with reported():
        for _, path in drawings:
            pictures.check(path)
    with reported(), progress_bars():
        subject, batch = load(step, meta=True)
        for mesh, chosen in ways:
            if len(ways) > 1:
                tell("plans", len(plans), len(ways), f"stage {chosen} on {'x'.join(map(str, mesh))} ranks")
            with tracing(subject):
                plans.append(plan_step(subject, batch, mesh=mesh, stage=chosen, device=device, fit=limit, **options))
    for one in plans:
        if as_json:
            typer.echo(json.dumps(one.as_dict()))
        else:
            console.print(show.page(one))
    for draw, path in drawings:
        with reported():
            draw(plans, path)
        errors.print(f"drawn: {path}", soft_wrap=True)
    raise typer.Exit(0 if all(one.fits for one in plans) else DIFFERS)


def _closed_form(
    console: Console, params: float, sizes: Sequence[int], precision: str, limit: int | None, as_json: bool
) -> bool:
    """Whether some stage fits for every number of ranks."""
    kind: Precision = "fp32" if precision == "fp32" else "mixed"
    totals = {size: [model_states(params, size, stage, kind).total for stage in range(4)] for size in sizes}
    if as_json:
        rows = [{"world_size": size, "bytes": dict(zip(STAGES, of, strict=True))} for size, of in totals.items()]
        typer.echo(json.dumps(rows))
    else:
        console.print(f"model states of {params:,.0f} parameters, {kind} precision, on each rank (ZeRO, Table 1)")
        console.print(show.closed_form(params, sizes, kind, limit))
    return limit is None or all(min(of) <= limit for of in totals.values())


def _mesh(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\s*[1-9]\d*(x[1-9]\d*)*\s*", text):
        raise ValueError(f"--world-size {text!r}: give a number of ranks, 64, or nodes by ranks, 8x8")
    return tuple(map(int, text.split("x")))


def _size(mesh: Sequence[int]) -> int:
    size = 1
    for one in mesh:
        size *= one
    return size
