"""``zerograph export``: write a checkpoint's model as one safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerograph.cli.failing import reported
from zerograph.cli.progress import progress_bars


def export(
    checkpoint: Annotated[str, typer.Argument(help="path or URL of a checkpoint, or of a folder of checkpoints")],
    out: Annotated[Path, typer.Argument(help="a file *.safetensors, or a folder")],
    module: Annotated[str | None, typer.Option(help="the graph's attribute, if it has several modules")] = None,
) -> None:
    """Write a checkpoint's model into one safetensors file, which the plain model loads.

    OUT is that file if its name ends in .safetensors, else a folder for model.safetensors, which is created if needed.
    For a Hugging Face model the folder gets config.json too, so that from_pretrained(OUT) works. Tied weights are
    written once.

    Example: zerograph export runs/gpt model.safetensors
    """
    with reported(), progress_bars("loading torch"):
        from zerograph.state.checkpoint import export as exporting

        typer.echo(exporting.export(checkpoint, out, module))
