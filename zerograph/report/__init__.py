"""A step on one page: its graph after every pass, its memory, and its time line where a machine is given.

``data``      what is shown, as numbers and texts
``sequence``  the nodes in the order in which they run, loops laid out
``layout``    where nodes stand
``page``      the HTML file
``assets``    what the page is made of; ``assets/NOTICE`` says where the library that draws graphs is from
"""

from __future__ import annotations

import os
from pathlib import Path

from zerograph.errors import ConfigError
from zerograph.inspection.step import Inspection
from zerograph.planner import machine as machines
from zerograph.planner.machine import Machine
from zerograph.report.data import collect
from zerograph.report.page import page


def write(
    step: Inspection,
    path: str | os.PathLike[str],
    *,
    title: str,
    machine: str | os.PathLike[str] | Machine | None = None,
) -> None:
    """Write a step's report. Needs no process group, and nothing but the file changes.

    Args:
        path: the HTML file; what was there is overwritten.
        title: names the step on the page.
        machine: as :func:`zerograph.planner.machine.machine` takes it; None for a page without times.

    Raises:
        ConfigError: there is no such machine, or the file cannot be written; both are found out first. Then there is
            no file that was not there before.
    """
    described = None if machine is None else machines.machine(machine)
    file = Path(path)
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"the report cannot be written to {file}: give a file's name in a folder that exists")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"the report cannot be written to {file}: permission denied\nGive another path.")
    made = page(collect(step, title, described))
    try:
        file.write_text(made, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {file}: {error.strerror}\nGive another path.") from error
