"""``zerograph calibrate``: measure this machine for the planner."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from zerograph.cli.failing import FAILED, reported
from zerograph.cli.progress import progress_bars


def calibrate(
    out: Annotated[Path, typer.Argument(help="the YAML file to write")],
    ranks: Annotated[int, typer.Option(min=1, help="number of ranks to start on this machine, without a launcher")] = 2,
    name: Annotated[str | None, typer.Option(help="name of the machine; default: the name of the file")] = None,
) -> None:
    """Measure how fast this machine computes and its ranks exchange bytes, for `zerograph plan --device`.

    On one machine:  zerograph calibrate mine.yaml --ranks 2

    On several:  torchrun --nnodes 2 --nproc-per-node 8 ... -m zerograph calibrate ours.yaml

    Over gloo between hosts of several ranks each, exchanges inside of a host and between hosts are measured apart.
    """
    if "RANK" not in os.environ and ranks > 1:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "zerograph"]
        # As torchrun sets it, without its warning: each rank has its share of the cores.
        threads = str(max(1, (os.cpu_count() or 1) // ranks))
        environment = {"OMP_NUM_THREADS": threads, **os.environ}
        arguments = ["calibrate", str(out), "--name", name or out.stem]
        failed = subprocess.run([sys.executable, *command, *arguments], env=environment).returncode
        raise typer.Exit(FAILED if failed else 0)
    bars = progress_bars("loading torch") if os.environ.get("RANK", "0") == "0" else contextlib.nullcontext()
    with reported(), bars:
        from zerograph.planner.front.calibrate import calibrate as measure
        from zerograph.planner.machine import write
        from zerograph.runtime.job.process_group import rank

        machine = measure(name or out.stem)
    if rank() == 0:
        write(out, machine)
        typer.echo(f"{out}: {machine.source}")
