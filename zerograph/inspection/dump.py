"""``ZEROGRAPH_DUMP=dir``: the graph after every pass, for every rank, as text files.

``dir/rank0/step1/07-place.txt`` is the graph of the first step that rank 0 compiled, behind its seventh pass. Each
folder also has ``step.txt``, the step in full. A folder appears under its name when all of it is written; one that was
there before, of an earlier run, goes. Where a pass fails, the folder has the graphs up to it, and ``error.txt``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torch import fx

from zerograph.errors import ConfigError
from zerograph.inspection.text import lines, show_text
from zerograph.passes.context import Context
from zerograph.passes.pipeline import edited, stages

VARIABLE = "ZEROGRAPH_DUMP"
# Steps of one process, whichever graph they are of.
_numbers = itertools.count(1)


def wanted() -> bool:
    """Return True if the environment asks for dumps."""
    return bool(os.environ.get(VARIABLE))


@contextlib.contextmanager
def failures(captured: fx.GraphModule, context: Context, rank: int) -> Iterator[None]:
    """Dump the graphs up to a pass that fails inside, if the environment asks for it."""
    try:
        yield
    except Exception as error:
        if wanted():
            folder = dump(captured, context, rank, f"{type(error).__name__}: {error}", failed=True)
            error.add_note(f"The graphs up to there are in {folder}.")
        raise


def dump(captured: fx.GraphModule, context: Context, rank: int, about: str, *, failed: bool = False) -> Path:
    """Write the graph after every pass; returns the folder.

    Args:
        about: goes into ``step.txt``, or ``error.txt`` where a pass ``failed``.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = Path(os.environ[VARIABLE]) / f"rank{rank}" / f"step{next(_numbers)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as made:
            new = Path(made) / folder.name
            new.mkdir()
            (new / ("error.txt" if failed else "step.txt")).write_text(about + "\n")
            _write_all(new, captured, context, failed=failed)
            if folder.exists():
                # Both renames are within one folder: at worst, for a moment, there is none.
                folder.rename(Path(made) / "before")
            new.rename(folder)
    except OSError as error:
        raise ConfigError(
            f"{VARIABLE}={os.environ[VARIABLE]}: {folder} cannot be written: {error}\n"
            f"Name a folder that can be written, or unset {VARIABLE}."
        ) from error
    return folder


def _write_all(folder: Path, captured: fx.GraphModule, context: Context, *, failed: bool) -> None:
    found = stages(captured, context)
    number = 0
    while True:
        try:
            name, module = next(found)
        except StopIteration:
            return
        except Exception:
            # The pass that failed fails again; what it said is in error.txt.
            if failed:
                return
            raise
        _write(folder, number, name, module.graph, context)
        number += 1


def _write(folder: Path, number: int, name: str, graph: fx.Graph, context: Context) -> None:
    says = {one.name: one.summary for one in edited(context.pass_edits)}
    head = [
        f"# {name}: {says.get(name, 'what build() and its backward() were traced to.')}",
        f"# mesh {context.mesh.shape}, this rank at {context.mesh.position}, {context.policy.name}",
    ]
    text = "\n".join([*head, show_text(lines(graph, context)), ""])
    (folder / f"{number:02d}-{name}.txt").write_text(text)
