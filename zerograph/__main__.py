"""The command line: ``python -m zerograph``, or ``zerograph``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerograph.checkpoint import export as exporting
from zerograph.errors import ZeroGraphError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _zerograph() -> None:
    """Zerograph: a training step as one placed graph, with the Zero Redundancy Optimizer."""


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="a checkpoint, or a folder of them with a file 'latest'")],
    out: Annotated[Path, typer.Argument(help="a file *.safetensors, or a folder")],
    module: Annotated[str | None, typer.Option(help="the graph's attribute, where it has several modules")] = None,
) -> None:
    """Write a checkpoint's model into one safetensors file, which the plain model loads.

    OUT is that file, if its name ends in .safetensors; else a folder, made if need be, for model.safetensors. Of a
    model of transformers the folder gets config.json as well: from_pretrained(OUT) loads it. Tied weights are written
    once.
    """
    try:
        typer.echo(exporting.export(checkpoint, out, module))
    except ZeroGraphError as error:
        typer.echo(f"{error}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
