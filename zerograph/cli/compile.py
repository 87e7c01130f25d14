"""``zerograph compile``: compile a script's step for a job, without the job, and write it to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerograph.cli.failing import reported
from zerograph.cli.options import SCRIPT, Inputs, Precision, Settings
from zerograph.cli.progress import progress_bars


def compile(
    script: Annotated[str, typer.Argument(metavar="SCRIPT:STEP", help=SCRIPT)],
    out: Annotated[Path, typer.Option("--out", "-o", help="the file")],
    world_size: Annotated[int, typer.Option(help="number of ranks of the job")] = 2,
    mesh: Annotated[str | None, typer.Option(help="a grid of ranks instead, such as 2x4")] = None,
    stage: Annotated[int | None, typer.Option(help="a ZeRO stage instead of the script's; 0 is none")] = None,
    precision: Precision = None,
    device: Annotated[str, typer.Option(help="device type of the job: cpu or cuda")] = "cpu",
    transport: Annotated[
        str | None,
        typer.Option(
            help="torch: torch's collectives, as over NCCL; gloo: between hosts of one rank; hosts: of several; host: "
            "ranks of one host that share memory (default: torch on accelerators and on one rank, else host)"
        ),
    ] = None,
    inputs: Inputs = None,
    settings: Settings = None,
) -> None:
    """Compile a script's step for a job of many ranks, and write it to one file for all of them.

    The job calls step.load_compiled(FILE) before its first step, and starts without tracing build(). It must have the
    same code, options and versions; whatever differs is named. Over another transport passes run again.

    Example: zerograph compile train.py:example --world-size 64 --stage 3 -o step.zg
    """
    with reported(), progress_bars("loading torch"):
        from zerograph.cli.script import load, mesh_of, prepare, tracing

        step, batch = load(script, inputs, precision, settings)
        ranks = mesh_of(world_size, 0, mesh)
        if transport is None:
            transport = "torch" if device != "cpu" or ranks.size == 1 else "host"
        if step.config.backend == "auto":
            # By the device of the job: parameters may be on the meta device here.
            step.config.backend = "eager" if device == "cpu" else "inductor"
        prepared = prepare(step, batch, ranks, device=device, stage=stage, transport=transport)
        with tracing(step):
            step.export_compiled(out, prepared)
    typer.echo(out)
