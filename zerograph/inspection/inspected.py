"""Views of the step that a graph compiled last, as one attribute of the graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from zerograph.base.source import warn_user
from zerograph.compiler.compiled import PreparedStep
from zerograph.compiler.members import Members
from zerograph.errors import UnknownOptionError
from zerograph.inspection import placements
from zerograph.inspection.step import Inspection
from zerograph.ir.sbp import NdSbp, Sbp
from zerograph.state.stateful import Stateful

if TYPE_CHECKING:
    from zerograph.planner.machine import Machine

# Attributes of a graph before 0.1, and what they are in ``inspect``.
_FORMER = {
    "graph": "graph_after",
    **dict.fromkeys(("collectives", "describe", "diff", "explain", "memory", "owners", "passes", "placements"), ""),
    **dict.fromkeys(("report", "text", "to_networkx"), ""),
}


class Compiled(Inspection):
    """The step that a graph compiled last and its views, as ``ZeroGraph.inspect`` returns it."""

    def __init__(self, step: PreparedStep, title: str, heading: Sequence[str], members: Callable[[], Members]) -> None:
        super().__init__(step)
        self._title, self._heading, self._members = title, heading, members

    def describe(self) -> str:
        """Show the step in full: every input, output, parameter, collective, warning and pass."""
        return "\n".join([*self._heading, super().describe()])

    def report(
        self,
        path: str | os.PathLike[str],
        machine: str | os.PathLike[str] | Machine | None = None,
        beside: Inspection | None = None,
    ) -> None:
        """Write one HTML page of the step, for a browser; it needs no network.

        It shows the graph by module after every pass, memory over the step, and compute and collectives over time, all
        of this rank: among several ranks, call it on one.

        Args:
            path: the file; an existing file is overwritten.
            machine: predict times for this machine: ``"h100"``, ``"a100"``, ..., a YAML file, or a
                :class:`zerograph.planner.machine.Machine`; None for a page without times. The graph is the one that was
                compiled here: with a backend of another kind the machine would run a slightly different one, which
                ``zerograph inspect --machine`` shows.
            beside: another step to show beside this one: ``inspect`` of a graph, or the result of ``prepare()``. Both
                open the same modules and share their scales.

        Raises:
            ConfigError: there is no such machine, or the file cannot be written.
        """
        from zerograph.inspection import report

        # A graph was given before 0.1.
        other: Inspection | None = getattr(beside, "inspect", beside)
        report.write(self, path, title=self._title, machine=machine, beside=other)

    def placements(self) -> dict[str, Sbp | NdSbp]:
        """Return the SBP between steps of every parameter, optimizer state and buffer, by qualified name.

        A tensor that ZeRO shards is S(0), as its bucket is. :meth:`owners` returns the ranks of whole parameters.
        """
        return placements.placements(self._members(), self.context.mesh.dims)

    def owners(self) -> dict[str, int]:
        """Return the rank that stores and updates each parameter that is dealt out whole, by qualified name.

        Whole parameters are dealt out with ``config.zero.shard_by = "parameters"``, and to optimizers that need them
        whole. On a mesh of several dimensions the rank is the index along the dimension that ZeRO splits along.
        """
        return placements.owners(self._members())


class Inspected(Stateful):
    """The read-only part of :class:`zerograph.ZeroGraph`."""

    @property
    def inspect(self) -> Compiled:
        """Views of the step compiled last: text, diffs, the life of a tensor, memory, traffic, a page, exports.

        Raises:
            ConfigError: nothing is compiled yet.
        """
        return Compiled(self._compiled().prepared, type(self).__name__, self._heading(), self._members)

    if not TYPE_CHECKING:  # with it mypy would accept unknown names

        def __getattr__(self, name: str) -> Any:
            if name not in _FORMER:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            if self._latest is None:
                raise UnknownOptionError(f"step.{name}: nothing is compiled yet: call the graph, or compile(*inputs)")
            new = _FORMER[name] or name
            warn_user(f"step.{name} is step.inspect.{new} now; the old name goes in 0.3")
            return getattr(self.inspect, new)

    def __repr__(self) -> str:
        """Show the step on one screen: traced graph, placements, collectives, memory, warnings."""
        page = [] if self._latest is None else [Inspection(self._latest.prepared).page()]
        return "\n".join([*self._heading(), *page])

    def _heading(self) -> list[str]:
        zero = "to be chosen" if self.config.zero.stage == "auto" else self.config.policy.name
        modules = ", ".join(f"{name}: {type(m).__name__}" for name, m in vars(self).items() if isinstance(m, nn.Module))
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers) or "none"
        # A stage means nothing without updates.
        kind = f"ZeRO {zero}, {self.steps_done} steps done" if self._optimizers else "forward graph"
        lines = [f"{type(self).__name__}({kind})", f"  modules: {modules or 'none'}", f"  optimizers: {optimizers}"]
        if self.config.scaler is not None:
            lines.append(f"  loss scale: {self.config.scaler.get_scale():g}")
        if self._latest is None:
            return [*lines, "  not compiled yet: call it, or compile(*inputs)"]
        job = self._latest.executor.job
        size = job.size if job.mesh.dims == 1 else job.grid
        return [*lines, f"  rank {job.rank} of {size}, backend {self._latest.backend}"]
