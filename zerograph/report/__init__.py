"""A step on one page: its graph after every pass, its memory, and its time line where a machine is given.

``data``      what is shown, as numbers and texts
``sequence``  the nodes in the order in which they run, loops laid out
``layout``    where nodes stand
``page``      the HTML file
``assets``    what the page is made of; ``assets/NOTICE`` says where the library that draws graphs is from
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from zerograph.compiler import CompiledStep, Prepared
from zerograph.errors import ConfigError
from zerograph.report.data import Timed, collect
from zerograph.report.page import page


def write(
    step: CompiledStep | Prepared,
    path: str | os.PathLike[str],
    *,
    title: str,
    timed: Iterable[Timed] | None = None,
    seconds: float = 0.0,
) -> Path:
    """Write a step's report. Needs no process group, and nothing but the file changes.

    Args:
        path: the HTML file; what was there is overwritten.
        title: names the step on the page.
        timed: when the nodes of the step's last graph run; without, the page has no time line.
        seconds: that the step takes.

    Raises:
        ConfigError: the file cannot be written; that is found out before anything is computed.
    """
    file = Path(path)
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"the report cannot be written to {file}: give a file's name in a folder that exists")
    try:
        file.open("a").close()
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {file}: {error.strerror}") from error
    file.write_text(page(collect(step, title, timed, seconds)), encoding="utf-8")
    return file
