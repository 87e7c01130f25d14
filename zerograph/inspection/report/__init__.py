"""A step on one HTML page: its graph after every pass, its memory, and its predicted timeline on a machine.

``facts``    the head of the page
``data``     the contents of the page, as numbers and texts
``records``  the nodes after every pass
``order``    the nodes in the order in which they run, and memory over it
``layout``   positions of nodes in the picture
``page``     the HTML file
``assets``   scripts, styles and templates; ``assets/NOTICE`` names the source of the library that draws graphs
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
    """Write a step's report; it needs no process group.

    Args:
        path: the HTML file; an existing file is overwritten.
        title: name of the step on the page.
        machine: predict times for this machine, see :func:`zerograph.planner.machine.machine`; None for no times.
        beside: another step to show on the same page.

    Raises:
        ConfigError: there is no such machine, or the file cannot be written. Both are checked first; then no file is
            created.
    """
    described = None if machine is None else machines.machine(machine)
    file = Path(path)
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"the report cannot be written to {file}: give the name of a file in an existing folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"the report cannot be written to {file}: permission denied\nGive another path.")
    if beside is None:
        text = pages.page(collect(step, title, described))
    else:
        titled = zip((step, beside), _titles(title, step, beside), strict=True)
        text = pages.beside(title, [collect(each, name, described) for each, name in titled])
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {file}: {error.strerror}\nGive another path.") from error


def _titles(title: str, *steps: Inspection) -> list[str]:
    """Return distinct titles for steps of one name: by stage, by ranks, or by number."""
    policies = [step.context.policy.name.replace("off", "no ZeRO") for step in steps]
    meshes = [" x ".join(map(str, step.context.mesh.shape)) for step in steps]
    ranks = [f"{mesh} {'rank' if mesh == '1' else 'ranks'}" for mesh in meshes]
    for names in (policies, ranks):
        if len(set(names)) == len(steps):
            return [f"{title}, {name}" for name in names]
    return [f"{title}, {number}" for number in range(1, len(steps) + 1)]
