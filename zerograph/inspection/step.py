"""Inspection: what can be asked of a step, whether it is compiled or only prepared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import fx

from zerograph.errors import ConfigError
from zerograph.inspection import tensorboard
from zerograph.inspection.collectives import Collective, collectives
from zerograph.inspection.description import description
from zerograph.inspection.diff import Diff, compare
from zerograph.inspection.explain import explain
from zerograph.inspection.exports import to_graphviz, to_networkx
from zerograph.inspection.life import Life
from zerograph.inspection.names import close_to
from zerograph.inspection.page import page
from zerograph.inspection.summary import Summary, summary
from zerograph.inspection.text import Line, lines, show_text
from zerograph.memory import Memory, profile
from zerograph.passes.context import Context
from zerograph.passes.pipeline import PassRecord, stages
from zerograph.step_graph import Captured

if TYPE_CHECKING:
    import networkx


class Inspection:
    """A step to be looked at: what it was traced to, and the graph after every pass.

    Attributes:
        captured: what ``build()`` was traced to.
        passes: the graph after every pass.
        context: what the passes were told.
        aliases: further names of tied parameters, each with the first.
        warnings: what was said while it was compiled.
    """

    captured: Captured
    passes: tuple[PassRecord, ...]
    context: Context
    aliases: Mapping[str, str]
    warnings: tuple[str, ...]

    @property
    def emitted(self) -> fx.Graph:
        """What a rank runs, with everything that zerograph knows of it in ``node.meta``."""
        return self.passes[-1].graph.graph

    def graph_after(self, name: str | None = None) -> fx.GraphModule:
        """The graph after the pass of that name, or the last one; only that one is made again.

        Raises:
            ConfigError: no such pass.
        """
        found = self._pass(name)
        return next(record for record in self.passes if record.name == found).graph

    @property
    def memory(self) -> Memory:
        """The most bytes that a step holds on this rank, what they are, and where in the step; foretold."""
        return profile(self.emitted).memory()

    def collectives(self) -> list[Collective]:
        """The collectives of the emitted graph in order; one that runs for each micro-batch as often."""
        return [one for one, times in collectives(self.emitted, self.context.buckets) for _ in range(times)]

    @property
    def summary(self) -> Summary:
        """What :meth:`page` says, as data."""
        return summary(self)

    def page(self) -> str:
        """The step on a screen, however deep the model: what was traced, buckets, collectives, memory, warnings."""
        return page(self.summary)

    def describe(self) -> str:
        """The step in full: every input, output, parameter, collective and pass."""
        return description(self)

    def text(self, pass_name: str | None = None, module: str | None = None) -> str:
        """The graph after a pass, or what is run, one node a line; see :mod:`zerograph.inspection.text`.

        Args:
            module: the qualified name of a module: only what belongs to it.

        Raises:
            ConfigError: no such pass, or nothing belongs to such a module.
        """
        (found,) = self._lines_after(self._pass(pass_name))
        return show_text(found, module)

    def diff(self, before: str, after: str, module: str | None = None) -> Diff:
        """What happened to the graph from behind one pass to behind another, as a unified diff of its text.

        What only stands at another place is marked as moved. ``str()`` is coloured in a terminal.

        Args:
            before, after: names of passes; ``"capture"`` is what was traced.
            module: the qualified name of a module: only what belongs to it.

        Raises:
            ConfigError: no such pass, or nothing belongs to such a module.
        """
        old, new = self.texts(before, after, module=module)
        return compare(old, new, (before, after))

    def texts(self, *names: str, module: str | None = None) -> list[list[str]]:
        """The lines of :meth:`text` behind each of several passes, for one walk through all of them.

        Raises:
            ConfigError: no such pass, or nothing belongs to such a module.
        """
        found = self._lines_after(*map(self._pass, names))
        return [show_text(one, module).splitlines() for one in found]

    def explain(self, name: str) -> Life:
        """The life of one tensor through the step: where it is stored, gathered, used, freed, reduced, updated.

        Args:
            name: the qualified name of a parameter, of an entry of its optimizer state (``fc.weight.exp_avg``) or of a
                buffer; ``input0``; a node's name, with its module (``fc:addmm_2``) or without; or the qualified name of
                a module, for what it yields.

        Raises:
            ConfigError: the step has no such tensor; the message has names that are close.
        """
        return explain(self, name)

    def to_networkx(self, pass_name: str | None = None) -> networkx.MultiDiGraph[str]:
        """The graph after a pass, or what is run; attributes are listed at :func:`zerograph.inspection.exports`.

        Raises:
            ConfigError: no such pass.
        """
        return to_networkx(self.graph_after(pass_name).graph, self.context)

    def to_graphviz(
        self, module: str | None = None, pass_name: str | None = None, svg: str | os.PathLike[str] | None = None
    ) -> str:
        """A drawing of a module's part of the graph, or of all of it, in Graphviz's language DOT.

        Args:
            module: the qualified name of a module.
            pass_name: the pass behind which to look; default: what is run.
            svg: a file to draw it into, with the program ``dot`` of Graphviz.

        Raises:
            ConfigError: no such pass or module; there is no ``dot`` on this machine, or it failed.
        """
        return to_graphviz(self.graph_after(pass_name).graph, self.context, module, svg)

    def to_tensorboard(self, folder: str | os.PathLike[str], step: int = 0) -> Path:
        """Write memory, traffic and the emitted graph where TensorBoard finds them; returns the folder.

        Args:
            step: the number on TensorBoard's axis.

        Raises:
            ConfigError: tensorboard is not installed.
        """
        return tensorboard.write(self, folder, step)

    def _pass(self, name: str | None) -> str:
        """The name of a pass that there is; of the last one where none is given."""
        known = [record.name for record in self.passes]
        if name is None:
            return known[-1]
        if name not in known:
            raise ConfigError(f"there is no pass {name!r}{close_to(name, known)}\nThere are {', '.join(known)}")
        return name

    def _lines_after(self, *names: str) -> list[list[Line]]:
        """The lines behind each of the passes, in one walk through the pipeline."""
        last = self.passes[-1].name
        found = {last: lines(self.emitted, self.context)} if last in names else {}
        missing = set(names) - set(found)
        for name, module in stages(self.captured.graph, self.context) if missing else ():
            if name in missing:
                found[name] = lines(module.graph, self.context)
                missing.discard(name)
            if not missing:
                break
        return [found[name] for name in names]
