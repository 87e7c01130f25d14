"""Views of the step that a graph compiled last, as methods of the graph."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import fx, nn

from zerograph import inspection
from zerograph.compiler.compiled import CompiledStep
from zerograph.compiler.members import Members
from zerograph.config import Config
from zerograph.ir.sbp import NdSbp, Sbp

if TYPE_CHECKING:
    from zerograph.planner.machine import Machine


class Inspected(inspection.Views):
    """The read-only part of :class:`zerograph.ZeroGraph`."""

    config: Config
    steps_done: int
    _optimizers: list[torch.optim.Optimizer]
    _latest: CompiledStep | None

    def _compiled(self) -> CompiledStep:
        raise NotImplementedError

    def _members(self) -> Members:
        raise NotImplementedError

    def _inspected(self) -> CompiledStep:
        return self._compiled()

    def __repr__(self) -> str:
        """The step on a screen: what was traced, what is placed where, what is sent, what is held, warnings."""
        return "\n".join(
            [*self._heading(), *([] if self._latest is None else [inspection.Inspection(self._latest).page()])]
        )

    def describe(self) -> str:
        """The step compiled last in full: every input, output, parameter, collective, warning and pass, a line each.

        Raises:
            ConfigError: nothing compiled yet.
        """
        return "\n".join([*self._heading(), inspection.Inspection(self._compiled()).describe()])

    def _heading(self) -> list[str]:
        zero = "to be chosen" if self.config.stage == "auto" else self.config.policy.name
        modules = ", ".join(f"{name}: {type(m).__name__}" for name, m in vars(self).items() if isinstance(m, nn.Module))
        optimizers = ", ".join(type(one).__name__ for one in self._optimizers) or "none"
        # Without updates there is nothing that a stage would say.
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
        return inspection.Inspection(self._compiled()).graph_after(name)

    def to_tensorboard(self, folder: str | os.PathLike[str]) -> None:
        """Write memory, traffic and the graph into ``folder`` for TensorBoard, at the number of steps done so far.

        For one rank to call, with a folder of its own: TensorBoard goes on reading only the last file of each.

        Raises:
            ConfigError: nothing compiled yet, or tensorboard is not installed.
        """
        inspection.Inspection(self._compiled()).to_tensorboard(folder, self.steps_done)

    def report(
        self,
        path: str | os.PathLike[str],
        machine: str | os.PathLike[str] | Machine | None = None,
        beside: inspection.Views | None = None,
    ) -> None:
        """Write one HTML page of the step compiled last, which needs no network: to be opened in a browser.

        The graph by module after every pass, memory over the step, and compute and collectives over time. It is this
        rank's: on several ranks let one of them call it.

        Args:
            path: the file; what was there is overwritten.
            machine: to predict times for: ``"h100"``, ``"a100"``, ..., a YAML file, or a
                :class:`zerograph.planner.machine.Machine`; None for a page without times.
            beside: another step to show side by side with this one: a graph that is compiled, or what ``prepare()``
                returned. Both follow what a reader opens in one of them, and share their scales.

        Raises:
            ConfigError: nothing is compiled yet, there is no such machine, or the file cannot be written.
        """
        from zerograph.inspection import report

        other = None if beside is None else inspection.Inspection(beside._inspected())
        own = inspection.Inspection(self._compiled())
        report.write(own, path, title=type(self).__name__, machine=machine, beside=other)

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
