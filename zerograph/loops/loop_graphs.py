"""The graphs of a plain loop: steps, parts of steps, forward passes and previews."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, Protocol

from torch import Tensor

from zerograph.compiler.compiled import CompiledStep
from zerograph.ir.sbp import NdSbp, Split
from zerograph.loops.deferred import Meta
from zerograph.loops.graphs import Forward, Preview, Recorded, Step
from zerograph.loops.program import Program
from zerograph.passes.context import GradientUse
from zerograph.runtime.job.exchange import gather_whole
from zerograph.runtime.job.process_group import agree, digest


class Owner(Protocol):
    """The loop that graphs belong to."""

    graphs_done: int


class OfLoop(Recorded):
    """A graph of a loop: all graphs of a loop draw one sequence of random numbers, and take parts of any size."""

    loop: Owner
    rows: int = 0

    def _seed_of_step(self) -> int:
        seed = self._seed if self.config.seed is None else self.config.seed
        return digest((seed, self.loop.graphs_done))

    def _attributes(self) -> dict[str, Any]:
        return {name: value for name, value in super()._attributes().items() if name not in ("loop", "rows")}

    def _part(self, value: Tensor, sbp: NdSbp, meta: Meta) -> Tensor:
        dim = meta.batch_dim
        if dim is None:
            return gather_whole(self._join(), value, sbp)
        if Split(dim) in sbp or self.parts() == 1:
            return value
        job = self._join()
        whole = gather_whole(job, value, sbp)
        sizes = [one[0] for one in agree(job, "returning a result", 0, dict, None, (self.rows,))]
        start, count = sum(sizes[: job.rank]), sum(sizes)
        factor = whole.shape[dim] // count if count else 1
        return whole.narrow(dim, start * factor, self.rows * factor)

    def run_loop(self, program: Program) -> list[Tensor]:
        """Run a program; return this rank's part of each output."""
        parts = (tensor for tensor, kind in zip(program.tensors, program.kinds, strict=True) if kind == "part")
        self.rows = len(next(parts, ()))
        return self.run(program, [program.tensors])[0]


class LoopStep(OfLoop, Step):
    """The steps of some of a loop's optimizers, or parts of them.

    Attributes:
        accumulated: names of the parameters whose accumulated gradients the graph uses.
    """

    accumulated: tuple[str, ...] = ()

    def use_gradients(self, use: GradientUse) -> LoopStep:
        """Set how the graph uses gradients; return it."""
        self._compiler.gradients = use
        return self

    def gradients(self) -> Sequence[str]:
        """Return the names of the parameters that got a gradient in the last run."""
        return self._compiled().captured.gradients

    def run_loop(self, program: Program) -> list[Tensor]:
        """Run a program; return this rank's part of each output."""
        self._compiler.accumulated = self.accumulated
        return super().run_loop(program)

    def _finish_step(self, step: CompiledStep, values: Sequence[Tensor], skipped: Set[str]) -> None:
        if self._compiler.gradients in ("update", "accumulated"):
            super()._finish_step(step, values, skipped)
        else:
            self._passes_done += 1

    def _doing(self) -> str:
        use = self._compiler.gradients
        doing = {"accumulate": "backward() before ", "edit": "changing gradients before "}.get(use, "")
        return f"{doing}step {self.steps_done + 1}"


class LoopForward(OfLoop, Forward):
    """Forward passes of a loop without an update."""


class LoopPreview(OfLoop, Preview):
    """Values that a step of the loop will compute."""
