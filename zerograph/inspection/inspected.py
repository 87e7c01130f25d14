"""Views of the step that a graph compiled last, as methods of the graph."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torch import fx, nn

from zerograph import inspection
from zerograph.compiler.compiled import PreparedStep
from zerograph.ir.sbp import NdSbp, Sbp
from zerograph.state.stateful import Stateful

if TYPE_CHECKING:
    from zerograph.planner.machine import Machine


class Inspected(Stateful, inspection.Views):
    """The read-only part of :class:`zerograph.ZeroGraph`."""

    def _inspected(self) -> PreparedStep:
        return self._compiled().prepared

    def __repr__(self) -> str:
        """Show the step on one screen: traced graph, placements, collectives, memory, warnings."""
        return "\n".join(
            [*self._heading(), *([] if self._latest is None else [inspection.Inspection(self._latest.prepared).page()])]
        )

    def describe(self) -> str:
        """Show the step compiled last in full: every input, output, parameter, collective, warning and pass.

        Raises:
            ConfigError: nothing is compiled yet.
        """
        return "\n".join([*self._heading(), inspection.Inspection(self._inspected()).describe()])

    def _heading(self) -> list[str]:
        zero = "to be chosen" if self.config.zero.stage == "auto" else self.config.policy.name
        modules = ", ".join(f"{name}: {type(m).__name__}" for name, m in vars(self).items() if isinstance(m, nn.Module))
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers) or "none"
        # A stage means nothing without updates.
        kind = f"ZeRO {zero}, {self.steps_done} steps done" if self._optimizers else "forward graph"
        lines = [
            f"{type(self).__name__}({kind})",
            f"  modules: {modules or 'none'}",
            f"  optimizers: {optimizers}",
        ]
        if self.config.scaler is not None:
            lines.append(f"  loss scale: {self.config.scaler.get_scale():g}")
        if self._latest is None:
            return [*lines, "  not compiled yet: call it, or compile(*inputs)"]
        job = self._latest.executor.job
        size = job.size if job.mesh.dims == 1 else job.grid
        return [*lines, f"  rank {job.rank} of {size}, backend {self._latest.backend}"]

    def graph(self, name: str | None = None) -> fx.GraphModule:
        """Return the graph after a pass, or after the last one, of the step compiled last.

        With accumulation the graph of one micro-batch is ``graph().micro_batches.body``.

        Raises:
            ConfigError: nothing is compiled yet, or there is no such pass.
        """
        return inspection.Inspection(self._inspected()).graph_after(name)

    def report(
        self,
        path: str | os.PathLike[str],
        machine: str | os.PathLike[str] | Machine | None = None,
        beside: inspection.Views | None = None,
    ) -> None:
        """Write one HTML page of the step compiled last, for a browser; it needs no network.

        It shows the graph by module after every pass, memory over the step, and compute and collectives over time, all
        of this rank: among several ranks, call it on one.

        Args:
            path: the file; an existing file is overwritten.
            machine: predict times for this machine: ``"h100"``, ``"a100"``, ..., a YAML file, or a
                :class:`zerograph.planner.machine.Machine`; None for a page without times. The graph is the one that was
                compiled here: with a backend of another kind the machine would run a slightly different one, which
                ``zerograph inspect --machine`` shows.
            beside: another step to show beside this one: a compiled graph, or the result of ``prepare()``. Both open
                the same modules and share their scales.

        Raises:
            ConfigError: nothing is compiled yet, there is no such machine, or the file cannot be written.
        """
        from zerograph.inspection import report

        other = None if beside is None else inspection.Inspection(beside._inspected())
        own = inspection.Inspection(self._inspected())
        report.write(own, path, title=type(self).__name__, machine=machine, beside=other)

    def placements(self) -> dict[str, Sbp | NdSbp]:
        """Return the SBP between steps of every parameter, optimizer state and buffer, by qualified name.

        A tensor that ZeRO shards is S(0), as its bucket is. :meth:`owners` returns the ranks of whole parameters.
        """
        return inspection.placements(self._members(), self._compiled().context.mesh.dims)

    def owners(self) -> dict[str, int]:
        """Return the rank that stores and updates each parameter that is dealt out whole, by qualified name.

        Whole parameters are dealt out in the mode ``"non_distributed"``, and to optimizers that need them whole. On a
        mesh of several dimensions the rank is the index along the dimension that ZeRO splits along.
        """
        self._compiled()
        return inspection.owners(self._members())
