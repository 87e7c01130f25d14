"""Bars on standard error for what takes long; nothing where that is no terminal, and nothing is left of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from zerograph.progress import Progress, listening


@contextlib.contextmanager
def progress_bars() -> Iterator[None]:
    """Show how far what happens within has come: one bar for passes, one for candidates, ..."""
    columns = TextColumn("{task.fields[of]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    # What goes to standard output is to stay there.
    described = TextColumn("{task.description}")
    with Bars(*columns, described, console=console, transient=True, redirect_stdout=False) as shown:
        tasks: dict[str, TaskID] = {}

        def update(one: Progress) -> None:
            if one.of not in tasks:
                tasks[one.of] = shown.add_task(one.doing, total=one.total, of=one.of)
            shown.update(tasks[one.of], completed=one.done, total=one.total, description=one.doing)

        with listening(update):
            yield
