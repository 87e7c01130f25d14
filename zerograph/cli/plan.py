"""``zerograph plan``: predict memory and time of training on each rank, without a job."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerograph.base.progress import tell
from zerograph.base.sizes import in_bytes
from zerograph.cli.failing import DIFFERS, reported
from zerograph.cli.options import PRECISION, Inputs, Settings, precision_checked
from zerograph.cli.progress import progress_bars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from zerograph.planner.plan_data import Plan

_PRECISION = f"{PRECISION}; with --params: mixed, the default, or fp32"
_OF_CLOSED_FORM = ("params", "world_size", "precision", "fit", "as_json")
_FIT = "memory of a rank's device, such as 80GB, instead of that of --device"
_HEADROOM = (
    "part of it that stays free for context, NCCL and fragmentation, such as 4GiB  [default: 8 %, >= 2 GiB; CPU: 0]"
)

_THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def _count(text: str) -> float:
    """Return the number of a text such as ``7.5e9``, ``8B`` or ``350m``."""
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmbt]?)\s*", str(text).lower())
    if matched is None:
        raise typer.BadParameter(f"{text!r} is no number of parameters: give 7.5e9 or 8B")
    return float(matched[1]) * _THOUSANDS[matched[2]]


Draw = Callable[[Sequence["Plan"]], "Figure"]


def plan(
    context: typer.Context,
    step: Annotated[
        str | None,
        typer.Argument(metavar="SCRIPT:STEP", help="a function that returns (ZeroGraph, inputs), or a ZeroGraph"),
    ] = None,
    params: Annotated[
        float | None,
        typer.Option(help="plan from a parameter count only, such as 8B (ZeRO, Table 1); no script", parser=_count),
    ] = None,
    inputs: Inputs = None,
    precision: Annotated[str | None, typer.Option(help=_PRECISION, callback=precision_checked)] = None,
    settings: Settings = None,
    world_size: Annotated[str, typer.Option(help="numbers of ranks: 64, or 1,4,16; nodes by ranks: 8x8")] = "8",
    stage: Annotated[
        str | None,
        typer.Option(help="off, 1, 2 or 3, or several: off,1,2,3; auto: the fastest that fits; else the script's"),
    ] = None,
    device: Annotated[str, typer.Option(help="h100, h200, a100, cpu, or a YAML file of zerograph calibrate")] = "h100",
    fit: Annotated[str | None, typer.Option(help=_FIT)] = None,
    headroom: Annotated[str | None, typer.Option(help=_HEADROOM, show_default=False)] = None,
    nvme_path: Annotated[
        Path | None, typer.Option(help="with --stage auto: a directory to which state and parameters may be offloaded")
    ] = None,
    context_parallel: Annotated[
        int | None,
        typer.Option(help="ranks that split each sequence; the step's inputs are then those of so many ranks"),
    ] = None,
    length: Annotated[
        str | None, typer.Option(help="positions of the sequences, instead of the inputs' own: 8192, or 4096,8192")
    ] = None,
    longest: Annotated[bool, typer.Option("--longest", help="plan the longest sequences that fit")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="draw curves over numbers of ranks, or over --length, into this PNG or SVG")
    ] = None,
    memory: Annotated[Path | None, typer.Option(help="draw memory by kind into this PNG or SVG")] = None,
    timeline: Annotated[Path | None, typer.Option(help="draw the step over time into this PNG or SVG")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, one line per plan")] = False,
    # Names of before --set.
    activation_checkpointing: Annotated[str | None, typer.Option(hidden=True)] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, hidden=True)] = None,
    offload: Annotated[bool, typer.Option("--offload", hidden=True)] = False,
    compress: Annotated[bool, typer.Option("--compress", hidden=True)] = False,
) -> None:
    """Predict memory, traffic, time and tokens per second of a training step on each rank.

    A script's step, compiled for that many ranks:  zerograph plan train.py:example --world-size 64 --device h100

    As pictures, stage by stage:  zerograph plan train.py:example --stage off,1,2,3 --memory memory.png

    The longest sequences that 8 ranks can train on, each split over 4:  zerograph plan train.py:example --longest
    --context-parallel 4 --fit 80GiB

    From a parameter count only:  zerograph plan --params 7.5e9 --world-size 1,4,16,64

    Exit code 1 if something does not fit, 2 if it cannot be planned.
    """
    try:
        meshes = [_mesh(part) for part in world_size.split(",")]
        lengths = ["longest"] if longest else _lengths(length)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    limit = _bytes("--fit", fit)
    free = 0 if headroom == "0" else _bytes("--headroom", headroom)
    if (step is None) == (params is None):
        raise typer.BadParameter("give either a script's step or --params")
    if longest and length is not None:
        raise typer.BadParameter("give --length or --longest, not both")
    if nvme_path is not None and stage is None:
        stage = "auto"
    if nvme_path is not None and stage != "auto":
        raise typer.BadParameter("--nvme-path is for --stage auto")
    if params is not None:
        others = [one for one in context.command.params if one.name not in _OF_CLOSED_FORM]
        others = [one for one in others if str(context.get_parameter_source(str(one.name))).endswith("COMMANDLINE")]
        if others:
            named = ", ".join(one.opts[0] for one in others)
            raise typer.BadParameter(f"--params is all that the closed form knows: give a script's step for {named}")
        if precision not in (None, "mixed", "fp32"):
            raise typer.BadParameter(f"--precision {precision}: with --params choose mixed or fp32")
        with reported():
            fits = _closed_form(params, [math.prod(mesh) for mesh in meshes], precision or "mixed", limit, as_json)
        raise typer.Exit(0 if fits else DIFFERS)
    assert step is not None
    with reported(), progress_bars("loading torch"):
        from zerograph.planner import pictures, plan_data

        kinds: tuple[tuple[Draw, Path | None], ...] = (
            (pictures.scaling_figure, plot),
            (pictures.memory_figure, memory),
            (pictures.timeline_figure, timeline),
        )
        drawings = [(draw, path) for draw, path in kinds if path is not None]
        for _, path in drawings:
            pictures.check(path)
        values = {
            "context_parallel": context_parallel,
            "activation_checkpointing": activation_checkpointing,
            "gradient_accumulation_steps": micro_batches,
            "offload.optimizer": "cpu" if offload else None,
            "reduce_dtype": "torch.bfloat16" if compress else None,
        }
        given = [*(f"{name}={value}" for name, value in values.items() if value is not None), *(settings or ())]
        options = {"device": device, "fit": limit, "headroom": free, "nvme_path": nvme_path}
        choices = list(itertools.product(meshes, [None] if stage is None else stage.split(","), lengths))
        plans = _plans(step, inputs, precision, given, choices, options)
        for number, (draw, path) in enumerate(drawings):
            tell("pictures", number, len(drawings), path.name)
            pictures.save(draw(plans), path)
    if as_json:
        for each in plans:
            typer.echo(json.dumps(each.as_dict()))
    else:
        from rich.console import Console

        console = Console()
        for each in plans:
            console.print(plan_data.page(each))
    for _, path in drawings:
        typer.echo(f"drawn: {path}", err=True)
    raise typer.Exit(0 if all(each.fits for each in plans) else DIFFERS)


def _plans(
    script: str,
    inputs: str | None,
    precision: str | None,
    settings: Sequence[str],
    choices: Sequence[tuple[tuple[int, ...], str | None, Any]],
    options: dict[str, Any],
) -> list[Plan]:
    """Plan a script's step for each choice of a mesh, a stage and a length of sequences."""
    from zerograph.cli.script import load, tracing
    from zerograph.planner.front.plan import plan as plan_step

    subject, batch = load(script, inputs, precision, settings, meta=True)
    plans: list[Plan] = []
    for mesh, stage, length in choices:
        if len(choices) > 1:
            tell(
                "plans",
                len(plans),
                len(choices),
                f"stage {stage or 'of the script'} on {'x'.join(map(str, mesh))} ranks",
            )
        with tracing(subject):
            plans.append(plan_step(subject, batch, mesh=mesh, stage=stage, length=length, **options))
    return plans


def _closed_form(params: float, sizes: Sequence[int], precision: str, limit: int | None, as_json: bool) -> bool:
    """Print model states by number of ranks; return True if some stage fits for each of them."""
    from zerograph.planner.closed_form import Precision, closed_form_table, model_states

    kind: Precision = "fp32" if precision == "fp32" else "mixed"
    totals = {size: [model_states(params, size, stage, kind).total for stage in range(4)] for size in sizes}
    if as_json:
        stages = ("off", "1", "2", "3")
        rows = [{"world_size": size, "bytes": dict(zip(stages, of, strict=True))} for size, of in totals.items()]
        typer.echo(json.dumps(rows))
    else:
        from rich.console import Console

        console = Console()
        console.print(f"model states of {params:,.0f} parameters, {kind} precision, on each rank (ZeRO, Table 1)")
        console.print(closed_form_table(params, sizes, kind, limit))
    return limit is None or all(min(of) <= limit for of in totals.values())


def _bytes(option: str, text: str | None) -> int | None:
    size = None if text is None else in_bytes(text)
    if text is not None and size is None:
        raise typer.BadParameter(f"{option} {text!r}: give bytes, or a size like 80GB or 40GiB")
    if text is not None and size is not None and size < 2**20 and text.strip().isdigit():
        raise typer.BadParameter(f"{option} {text!r} is {text} bytes: give a unit, {text}GB")
    return size


def _mesh(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\s*[1-9]\d*(x[1-9]\d*)*\s*", text):
        raise ValueError(f"--world-size {text!r}: give a number of ranks, 64, or nodes by ranks, 8x8")
    return tuple(map(int, text.split("x")))


def _lengths(text: str | None) -> list[Any]:
    """Return the lengths of a list in text; ``[None]`` stands for the inputs' own."""
    if text is None:
        return [None]
    if not re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", text):
        raise ValueError(f"--length {text!r}: give numbers of positions, 8192, or 4096,8192")
    return [int(part) for part in text.split(",")]
