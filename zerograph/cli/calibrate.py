"""``zerograph calibrate``: this machine as numbers, for the planner."""

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
    ranks: Annotated[int, typer.Option(min=1, help="how many to start on this machine, where no launcher has")] = 2,
    name: Annotated[str | None, typer.Option(help="what to call the machine; default: the file's name")] = None,
) -> None:
    """Measure how fast this machine computes and its ranks exchange bytes, for `zerograph plan --device`.

    On one machine:  zerograph calibrate mine.yaml --ranks 2

    On several:  torchrun --nnodes 2 --nproc-per-node 8 ... -m zerograph calibrate ours.yaml
    """
    if "RANK" not in os.environ and ranks > 1:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "zerograph"]
        # What torchrun would set for itself, without its warning: each rank has its share of the cores.
        threads = str(max(1, (os.cpu_count() or 1) // ranks))
        environment = {"OMP_NUM_THREADS": threads, **os.environ}
        arguments = ["calibrate", str(out), "--name", name or out.stem]
        ended = subprocess.run([sys.executable, *command, *arguments], env=environment).returncode
        raise typer.Exit(FAILED if ended else 0)
    bars = progress_bars("loading torch") if os.environ.get("RANK", "0") == "0" else contextlib.nullcontext()
    with reported(), bars:
        from zerograph.planner.front.calibrate import calibrate as measure
        from zerograph.planner.machine import write
        from zerograph.runtime.job.process_group import rank

        found = measure(name or out.stem)
    if rank() == 0:
        write(out, found)
        typer.echo(f"{out}: {found.source}")
