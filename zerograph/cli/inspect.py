"""``zerograph inspect``: compile a script's step without running it, and show it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from zerograph.base.progress import tell
from zerograph.cli.failing import as_json, reported
from zerograph.cli.options import SCRIPT, Inputs, Precision, Settings
from zerograph.cli.progress import progress_bars
from zerograph.errors import ConfigError


def inspect(
    script: Annotated[str, typer.Argument(metavar="SCRIPT:STEP", help=SCRIPT)],
    world_size: Annotated[int, typer.Option(help="number of ranks")] = 2,
    rank: Annotated[int, typer.Option(help="the rank")] = 0,
    mesh: Annotated[str | None, typer.Option(help="a grid of ranks instead, such as 2x4")] = None,
    stage: Annotated[int | None, typer.Option(help="a ZeRO stage instead of the script's; 0 is none")] = None,
    precision: Precision = None,
    device: Annotated[
        str | None,
        typer.Option(help="device type to compile for; meta tensors are treated as being there  [default: cpu]"),
    ] = None,
    inputs: Inputs = None,
    settings: Settings = None,
    full: Annotated[bool, typer.Option("--full", help="every parameter, collective and pass")] = False,
    text: Annotated[bool, typer.Option("--text", help="the graph, one node per line")] = False,
    pass_name: Annotated[str | None, typer.Option("--pass", help="the graph after this pass (with --text)")] = None,
    module: Annotated[str | None, typer.Option(help="only this module's nodes (with --text)")] = None,
    explain: Annotated[str | None, typer.Option(metavar="TENSOR", help="the lifetime of one tensor")] = None,
    report: Annotated[Path | None, typer.Option(help="write one HTML page of the step")] = None,
    beside_stage: Annotated[int | None, typer.Option(help="with --report: this ZeRO stage on the same page")] = None,
    machine: Annotated[
        str | None, typer.Option(help="compile for h100, ... or a YAML file, and predict times on it (with --report)")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Compile a script's step as one rank of many would, without running it, and show it.

    It needs no process group, no accelerator, and no memory for weights of a model on the meta device.

    Examples: zerograph inspect train.py:example --world-size 8, then --explain model.head.weight, or --text --pass box,
    or --report step.html --machine h100, or --report stages.html --stage 2 --beside-stage 3
    """
    with reported(), progress_bars("loading torch"):
        if beside_stage is not None and report is None:
            raise ConfigError("--beside-stage adds a second step to a report: give --report PAGE.html too")
        from zerograph.cli.script import load, mesh_of, prepare, shown_precision
        from zerograph.inspection.report import write
        from zerograph.planner.machine import machine as machine_of
        from zerograph.planner.plan import device_of, options_for

        step, batch = load(script, inputs, precision, settings)
        if machine is not None:
            # As ``zerograph plan`` does: one step has one predicted time.
            described = machine_of(machine)
            step.config.backend = options_for(described, step, {})["backend"]
            device = device or device_of(described)
        device = device or "cpu"
        prepared = prepare(step, batch, mesh_of(world_size, rank, mesh), device=device, stage=stage)
        shown: Any = None
        if explain is not None:
            life = prepared.explain(explain)
            shown = asdict(life) if json else life
        elif text or pass_name is not None or (module is not None and report is None):
            lines = prepared.text(pass_name, module)
            shown = lines.splitlines() if json else lines
        elif json:
            options = step.config.shown(changed=True)
            shown = {"script": script, "options": options, "precision": shown_precision(step)}
            shown |= prepared.summary.as_dict()
        elif report is None:
            options = step.config.shown(changed=True)
            where = f"as rank {rank} of {mesh or world_size}, in {shown_precision(step)}"
            head = f"{type(step).__name__} of {script}, {where}: {options}"
            shown = f"{head}\n{prepared.describe() if full else prepared.page()}"
        if report is not None:
            # After all reads of the step's configuration: preparing another stage changes it.
            other = None
            if beside_stage is not None:
                other = prepare(step, batch, mesh_of(world_size, rank, mesh), device=device, stage=beside_stage)
            tell("report", 0, 0, f"writing {report}")
            write(prepared, report, title=type(step).__name__, machine=machine, beside=other)
    if report is not None:
        typer.echo(report, err=json)
    if shown is not None:
        as_json(shown) if json else typer.echo(shown)
