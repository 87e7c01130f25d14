"""``ZEROGRAPH_DUMP=dir`` writes the graph after every pass, for every rank, as text files; ``ZEROGRAPH_LOGS`` logs.

``dir/rank0/step1/07-place.txt`` is the graph of the first step that rank 0 compiled, after its seventh pass. Each
folder also has ``step.txt``, the step in full. A folder is complete when it appears under its name; it replaces the
folder of an earlier run. If a pass fails, the folder has the graphs up to that pass, and ``error.txt``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torch import fx

from zerograph.compiler.compiled import PreparedStep
from zerograph.errors import ConfigError
from zerograph.inspection import logs
from zerograph.inspection.step import Inspection
from zerograph.inspection.text import lines, show_text
from zerograph.passes.context import Context
from zerograph.passes.pipeline import edited, stages

VARIABLE = "ZEROGRAPH_DUMP"
# Numbers the steps that this process compiles.
_numbers = itertools.count(1)


class EnvironmentObserver:
    """Follow a compilation for ``ZEROGRAPH_LOGS`` and ``ZEROGRAPH_DUMP``.

    Args:
        name: the graph in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def started(self) -> None:
        """Set up the loggers.

        Raises:
            ConfigError: ``ZEROGRAPH_LOGS`` names a log that does not exist.
        """
        logs.configure()

    @contextlib.contextmanager
    def passes(self, captured: fx.GraphModule, context: Context, rank: int) -> Iterator[None]:
        """Dump the graphs up to a pass that fails inside, and name the graph if it has passes of the user."""
        try:
            yield
        except Exception as error:
            if context.pass_edits:
                error.add_note(f"Raised while the step of {self._name} was prepared with config.passes.")
            if os.environ.get(VARIABLE):
                folder = _dump(captured, context, rank, f"{type(error).__name__}: {error}", failed=True)
                error.add_note(f"The graphs before the failed pass are in {folder}.")
            raise

    def prepared(self, step: PreparedStep, rank: int) -> None:
        """Dump the graph after every pass."""
        if os.environ.get(VARIABLE):
            _dump(step.captured.graph, step.context, rank, Inspection(step).describe(), failed=False)


def _dump(captured: fx.GraphModule, context: Context, rank: int, text: str, *, failed: bool) -> Path:
    """Write the graph after every pass; return the folder.

    Args:
        text: the content of ``step.txt``, or of ``error.txt`` if a pass ``failed``.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = Path(os.environ[VARIABLE]) / f"rank{rank}" / f"step{next(_numbers)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            new = Path(temporary) / folder.name
            new.mkdir()
            (new / ("error.txt" if failed else "step.txt")).write_text(text + "\n")
            _write_all(new, captured, context, failed=failed)
            if folder.exists():
                # Both renames are within one folder: at worst, neither exists for a moment.
                folder.rename(Path(temporary) / "before")
            new.rename(folder)
    except OSError as error:
        raise ConfigError(
            f"{VARIABLE}={os.environ[VARIABLE]}: {folder} cannot be written: {error}\n"
            f"Name a folder that can be written, or unset {VARIABLE}."
        ) from error
    return folder


def _write_all(folder: Path, captured: fx.GraphModule, context: Context, *, failed: bool) -> None:
    graphs = stages(captured, context)
    for number in itertools.count():
        try:
            name, module = next(graphs)
        except StopIteration:
            return
        except Exception:
            # The pass that failed fails again; its message is in error.txt.
            if failed:
                return
            raise
        _write(folder, number, name, module.graph, context)


def _write(folder: Path, number: int, name: str, graph: fx.Graph, context: Context) -> None:
    summaries = {each.name: each.summary for each in edited(context.pass_edits)}
    head = [
        f"# {name}: {summaries.get(name, 'the traced build() and its backward().')}",
        f"# mesh {context.mesh.shape}, this rank at {context.mesh.position}, {context.policy.name}",
    ]
    text = "\n".join([*head, show_text(lines(graph, context)), ""])
    (folder / f"{number:02d}-{name}.txt").write_text(text)
