"""What can be seen of the step that a graph compiled last: asked of the graph itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torch import fx

from zerograph import inspection, report
from zerograph.compiled import CompiledStep
from zerograph.members import Members
from zerograph.memory import Memory
from zerograph.passes.pipeline import PassRecord
from zerograph.planner.machine import Machine
from zerograph.sbp import NdSbp, Sbp

if TYPE_CHECKING:
    import networkx


class Inspected:
    """The part of :class:`zerograph.ZeroGraph` that looks at its step, and changes nothing."""

    steps_done: int

    def _compiled(self) -> CompiledStep:
        raise NotImplementedError

    def _members(self) -> Members:
        raise NotImplementedError

    def graph(self, name: str | None = None) -> fx.GraphModule:
        """The graph after the pass of that name, or the last one, of the step compiled last.

        That of one micro-batch, where there are several, is ``graph().micro_batches.body``.

        Raises:
            ConfigError: no such pass, or nothing compiled yet.
        """
        return self._compiled().graph_after(name)

    @property
    def passes(self) -> tuple[PassRecord, ...]:
        """Name, summary, graph, number of nodes and seconds of each pass of the step compiled last."""
        return self._compiled().passes

    def collectives(self) -> list[inspection.Collective]:
        """The collectives of the step compiled last: kind, bytes, tensors, phase; each as often as it runs."""
        return self._compiled().collectives()

    def text(self, pass_name: str | None = None, module: str | None = None) -> str:
        """The graph after a pass, or what is run, one node a line: module path and name, operator, dtype, SBP, global
        shape and this rank's, source line. See :mod:`zerograph.inspection.text`.

        Args:
            module: the qualified name of a module: only what belongs to it.

        Raises:
            ConfigError: nothing compiled yet, no such pass, or nothing belongs to such a module.
        """
        return self._compiled().text(pass_name, module)

    def diff(self, before: str, after: str, module: str | None = None) -> inspection.Diff:
        """What happened to the graph from behind one pass to behind another: ``print(step.diff("place", "box"))``.

        A unified diff of :meth:`text`, in which lines that only moved say so; coloured in a terminal.

        Raises:
            ConfigError: nothing compiled yet, no such pass, or nothing belongs to such a module.
        """
        return self._compiled().diff(before, after, module)

    def explain(self, name: str) -> inspection.Life:
        """The life of one tensor through the step: where it is stored, gathered, used and freed, its gradient made and
        reduced, and where it is updated, with source lines.

        Args:
            name: the qualified name of a parameter, of an entry of its optimizer state (``model.fc.weight.exp_avg``) or
                of a buffer; ``"input0"``; a node of :meth:`text`; or a module, for what it yields.

        Raises:
            ConfigError: nothing compiled yet, or no such tensor; the message has names that are close.
        """
        return self._compiled().explain(name)

    def to_networkx(self, pass_name: str | None = None) -> networkx.MultiDiGraph[str]:
        """The graph after a pass, or what is run; its attributes are those of
        :class:`zerograph.inspection.nodes.NodeFacts`, and all of them numbers and text.

        Raises:
            ConfigError: nothing compiled yet, or no such pass.
        """
        return self._compiled().to_networkx(pass_name)

    def to_graphviz(
        self, module: str | None = None, pass_name: str | None = None, svg: str | os.PathLike[str] | None = None
    ) -> str:
        """A module's part of the graph, or all of it, in Graphviz's language DOT; ``svg`` is a file to draw it into.

        Raises:
            ConfigError: nothing compiled yet; no such pass or module; to draw, Graphviz's program ``dot`` is missing.
        """
        return self._compiled().to_graphviz(module, pass_name, svg)

    def to_tensorboard(self, folder: str | os.PathLike[str]) -> None:
        """Write memory, traffic and the graph into ``folder`` for TensorBoard, at the number of steps done so far.

        For one rank to call, with a folder of its own: TensorBoard goes on reading only the last file of each.

        Raises:
            ConfigError: nothing compiled yet, or tensorboard is not installed.
        """
        self._compiled().to_tensorboard(folder, self.steps_done)

    @property
    def memory(self) -> Memory:
        """The most bytes that the step compiled last holds on this rank, what they are, and where in the step.

        Foretold from the graph, and exact within some percent where its nodes run one by one (backend ``"eager"``).
        """
        return self._compiled().memory

    def report(self, path: str | os.PathLike[str], machine: str | os.PathLike[str] | Machine | None = None) -> None:
        """Write one HTML page of the step compiled last, which needs no network: to be opened in a browser.

        The graph by module after every pass, memory over the step, and what computes and is on the wire when. It is
        this rank's: on several, let one of them call it.

        Args:
            path: the file; what was there is overwritten.
            machine: what the time is foretold for: ``"h100"``, ``"a100"``, ..., a YAML file, or a
                :class:`zerograph.planner.machine.Machine`; None for a page without times.

        Raises:
            ConfigError: nothing is compiled yet, there is no such machine, or the file cannot be written.
        """
        report.write(self._compiled(), path, title=type(self).__name__, machine=machine)

    def placements(self) -> dict[str, Sbp | NdSbp]:
        """SBP between steps of every parameter, optimizer state and buffer, by qualified name.

        What ZeRO shards is S(0), as its bucket is. Where whole parameters are dealt out, :meth:`owners` says to whom.
        """
        return inspection.placements(self._members(), self._compiled().context.mesh.dims)

    def owners(self) -> dict[str, int]:
        """The rank that keeps and updates each parameter that is dealt out whole, by qualified name; empty if none is.

        Whole parameters are dealt out in the mode ``"non_distributed"``, and to optimizers that need them whole. On a
        mesh of several dimensions the number is the rank's place along that which ZeRO splits along.
        """
        self._compiled()
        return inspection.owners(self._members())
