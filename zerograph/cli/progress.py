"""Progress of a command on standard error: bars on a terminal, occasional lines elsewhere."""

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

# Without a terminal: seconds until the first line, between different lines, and between equal lines.
FIRST, OTHER, SAME = 1.0, 5.0, 20.0


@contextlib.contextmanager
def progress_bars(doing: str) -> Iterator[None]:
    """Show the progress of the block: one bar for passes, one for candidates, ...

    Args:
        doing: text until the first report of progress.
    """
    from rich.console import Console

    console = Console(stderr=True)
    with _bars(console, doing) if console.is_terminal else _lines(doing):
        yield


@contextlib.contextmanager
def _bars(console: Console, doing: str) -> Iterator[None]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress as Bars,
        SpinnerColumn,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
    )

    described = TextColumn("{task.description}")
    # Standard output is not redirected.
    quiet: dict[str, Any] = {"console": console, "transient": True, "redirect_stdout": False}
    columns = TextColumn("{task.fields[of]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    begins = Bars(SpinnerColumn(), described, TimeElapsedColumn(), **quiet)
    shown = Bars(*columns, described, **quiet)
    first = begins.add_task(doing, total=None)
    tasks: dict[str, TaskID] = {}

    def update(progress: Progress) -> None:
        if not progress.total and not tasks:
            begins.update(first, description=progress.doing or doing)
            return
        if not tasks:
            begins.stop()
            shown.start()
        if progress.of not in tasks:
            tasks[progress.of] = shown.add_task(progress.doing, total=progress.total or None, of=progress.of)
        shown.update(
            tasks[progress.of], completed=progress.done, total=progress.total or None, description=progress.doing
        )

    begins.start()
    try:
        with listening(update):
            yield
    finally:
        begins.stop()
        shown.stop()


@contextlib.contextmanager
def _lines(doing: str) -> Iterator[None]:
    """Write a line after a second, then for each change, but not often."""
    began = time.monotonic()
    current: dict[str, Progress] = {}
    ended = threading.Event()

    def line() -> str:
        running = (each for each in current.values() if each.doing and each.done <= each.total)
        # Once something was reported, the first text is over.
        return "; ".join(map(_line, running)) or ("working" if current else doing)

    def write() -> None:
        last, written = "", began
        if ended.wait(FIRST):
            return
        while True:
            moment, text = time.monotonic(), line()
            if not last or moment - written >= (SAME if text == last else OTHER):
                print(f"zerograph: {text} ({moment - began:.0f} s)", file=sys.stderr, flush=True)
                last, written = text, moment
            if ended.wait(0.5):
                return

    def update(progress: Progress) -> None:
        # Replaced, not changed: the other thread reads it.
        nonlocal current
        current = {**current, progress.of: progress}

    thread = threading.Thread(target=write, name="zerograph-progress", daemon=True)
    thread.start()
    try:
        with listening(update):
            yield
    finally:
        ended.set()
        thread.join()


def _line(progress: Progress) -> str:
    if not progress.total:
        return progress.doing
    count = f"{progress.of} {progress.done} of {progress.total}"
    return f"{count}: {progress.doing}" if progress.doing else count
