"""A step on one page: its graph after every pass, its memory, and its time line where a machine is given.

``facts``     the head of the page
``data``      the contents of the page, as numbers and texts
``sequence``  the nodes in the order in which they run, loops laid out
``layout``    where nodes stand
``page``      the HTML file
``assets``    what the page is made of; ``assets/NOTICE`` says where the library that draws graphs is from
"""

from __future__ import annotations

import os
from pathlib import Path

from zerograph.errors import ConfigError
from zerograph.inspection.report import page as pages
from zerograph.inspection.report.data import collect
from zerograph.inspection.step import Inspection
from zerograph.planner import machine as machines
from zerograph.planner.machine import Machine


def write(
    step: Inspection,
    path: str | os.PathLike[str],
    *,
    title: str,
    machine: str | os.PathLike[str] | Machine | None = None,
    beside: Inspection | None = None,
) -> None:
    """Write a step's report. Needs no process group, and nothing but the file changes.

    Args:
        path: the HTML file; what was there is overwritten.
        title: names the step on the page.
        machine: as :func:`zerograph.planner.machine.machine` takes it; None for a page without times.
        beside: another step to show on the same page; None for the page of one step.

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
    if beside is None:
        text = pages.page(collect(step, title, described))
    else:
        named = zip((step, beside), _titles(title, step, beside), strict=True)
        text = pages.beside(title, [collect(each, name, described) for each, name in named])
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {file}: {error.strerror}\nGive another path.") from error


def _titles(title: str, *steps: Inspection) -> list[str]:
    """Tell steps of one name apart: by their stages, by their ranks, or by number."""
    policies = [step.context.policy.name.replace("off", "no ZeRO") for step in steps]
    meshes = [" x ".join(map(str, step.context.mesh.shape)) for step in steps]
    ranks = [f"{mesh} {'rank' if mesh == '1' else 'ranks'}" for mesh in meshes]
    for names in (policies, ranks):
        if len(set(names)) == len(steps):
            return [f"{title}, {name}" for name in names]
    return [f"{title}, {number}" for number in range(1, len(steps) + 1)]
