"""Progress of a command on standard error: bars on a terminal, and elsewhere now and then a line."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from zerograph.base.progress import Progress, listening

if TYPE_CHECKING:
    from rich.console import Console

# Seconds until the first line where there is no terminal, between lines that say something else, and between any.
FIRST, OTHER, SAME = 1.0, 5.0, 20.0


@contextlib.contextmanager
def progress_bars(doing: str) -> Iterator[None]:
    """Show how far the block has come: one bar for passes, one for candidates, ...

    Args:
        doing: what the block begins with, until something else is told.
    """
    from rich.console import Console

    console = Console(stderr=True)
    with _bars(console, doing) if console.is_terminal else _lines(doing):
        yield


@contextlib.contextmanager
def _bars(console: Console, doing: str) -> Iterator[None]:
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    described = TextColumn("{task.description}")
    # What goes to standard output is to stay there.
    quiet: dict[str, Any] = {"console": console, "transient": True, "redirect_stdout": False}
    columns = TextColumn("{task.fields[of]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    begins = Bars(SpinnerColumn(), described, TimeElapsedColumn(), **quiet)
    shown = Bars(*columns, described, **quiet)
    first = begins.add_task(doing, total=None)
    tasks: dict[str, TaskID] = {}

    def update(one: Progress) -> None:
        if not one.total and not tasks:
            begins.update(first, description=one.doing or doing)
            return
        if not tasks:
            begins.stop()
            shown.start()
        if one.of not in tasks:
            tasks[one.of] = shown.add_task(one.doing, total=one.total or None, of=one.of)
        shown.update(tasks[one.of], completed=one.done, total=one.total or None, description=one.doing)

    begins.start()
    try:
        with listening(update):
            yield
    finally:
        begins.stop()
        shown.stop()


@contextlib.contextmanager
def _lines(doing: str) -> Iterator[None]:
    """Write a line after a second, then each time that something else is done, but not often."""
    began = time.monotonic()
    now: dict[str, Progress] = {}
    ended = threading.Event()

    def said() -> str:
        return "; ".join(_line(one) for one in now.values() if one.doing and one.done <= one.total) or doing

    def write() -> None:
        last, at = "", began
        if ended.wait(FIRST):
            return
        while True:
            moment, text = time.monotonic(), said()
            if not last or moment - at >= (SAME if text == last else OTHER):
                print(f"zerograph: {text} ({moment - began:.0f} s)", file=sys.stderr, flush=True)
                last, at = text, moment
            if ended.wait(0.5):
                return

    def update(one: Progress) -> None:
        # A copy in one step: the other thread reads it meanwhile.
        nonlocal now
        now = {**now, one.of: one}

    thread = threading.Thread(target=write, name="zerograph-progress", daemon=True)
    thread.start()
    try:
        with listening(update):
            yield
    finally:
        ended.set()
        thread.join()


def _line(one: Progress) -> str:
    if not one.total:
        return one.doing
    return f"{one.of} {one.done} of {one.total}{': ' if one.doing else ''}{one.doing}"
