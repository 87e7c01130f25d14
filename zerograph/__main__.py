"""The command line: ``python -m zerograph``, or ``zerograph``. Each command is a module of ``zerograph.cli``."""

from __future__ import annotations

from typing import Annotated

import typer

import zerograph
from zerograph.cli import calibrate, compare, compile, diff, env, export, inspect, launch, plan

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zerograph {zerograph.__version__}")
        raise typer.Exit


@app.callback()
def _zerograph(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and end")
    ] = False,
) -> None:
    """Zerograph: a training step as one placed graph, with the Zero Redundancy Optimizer.

    Exit codes: 0; 1 if something does not fit or differs; 2 if a command is used wrongly or fails.
    """


# Other names of options work, and would make the table of --help too wide for a terminal.
_PRESENT = {"sequence-parallel": "context-parallel", "recompute": "activation-checkpointing"}

app.command(context_settings={"token_normalize_func": lambda name: _PRESENT.get(name, name)})(plan.plan)
app.command()(inspect.inspect)
app.command()(diff.diff)
app.command()(compare.compare)
app.command()(compile.compile)
app.command()(calibrate.calibrate)
app.command()(export.export)
app.command()(env.env)
# Options after the script are the script's.
app.command(context_settings={"allow_interspersed_args": False})(launch.launch)


if __name__ == "__main__":
    app(prog_name="zerograph")
