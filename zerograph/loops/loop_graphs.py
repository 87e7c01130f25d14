"""The graphs of a plain loop: steps, parts of steps, forward passes and previews."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from zerograph import _torch
from zerograph.compiler.batch import Batch
from zerograph.compiler.compiled import CompiledStep
from zerograph.ir.sbp import NdSbp, Split
from zerograph.loops.deferred import Meta
from zerograph.loops.graphs import Forward, Preview, Recorded, Step, local_parts
from zerograph.loops.program import Program
from zerograph.passes.context import GradientUse
from zerograph.runtime.job.exchange import gather_whole
from zerograph.runtime.job.process_group import agree, digest
from zerograph.state.stateful import interruptible
from zerograph.state.threads import one_thread


class Owner(Protocol):
    """The loop that graphs belong to."""

    graphs_done: int


class OfLoop(Recorded):
    """A graph of a loop: all graphs of a loop draw one sequence of random numbers, and take parts of any size.

    Forward passes that no update follows draw numbers of their own, so that an evaluation or a logged value does not
    change those of the training.

    Attributes:
        loop: the loop.
        rows: the number of this rank's rows.
        extra: the number of forward passes without an update since the last graph; None: an update follows.
    """

    loop: Owner
    rows: int = 0
    extra: int | None = None

    def _seed_of_step(self) -> int:
        seed = self._seed if self.config.seed is None else self.config.seed
        return digest((seed, self.loop.graphs_done, *(() if self.extra is None else ("forward", self.extra))))

    def _attributes(self) -> dict[str, Any]:
        own = ("loop", "rows", "extra")
        return {name: value for name, value in super()._attributes().items() if name not in own}

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
        self._note_rows(program)
        return self.run(program, [program.tensors])[0]

    def _note_rows(self, program: Program) -> None:
        parts = (tensor for tensor, kind in zip(program.tensors, program.kinds, strict=True) if kind == "part")
        self.rows = len(next(parts, ()))


@dataclass(eq=False)
class Paused:
    """A step that has paused.

    Attributes:
        step: the compiled step.
        batch: its inputs.
        inputs: the arguments of the run.
        rows: the number of this rank's rows.
        values: this rank's part of each output that is computed before the pause.
        finish: runs the rest, given the values of hyperparameters.
        versions: the versions of the parameters.
    """

    step: CompiledStep
    batch: Batch
    inputs: tuple[Any, ...]
    rows: int
    values: list[Tensor]
    finish: Callable[[Mapping[str, float]], list[Tensor]]
    versions: tuple[int, ...]

    def is_valid(self) -> bool:
        """Return whether the parameters and optimizer state are those that the step has begun with."""
        return self.versions == versions_of(self.step)


def versions_of(step: CompiledStep) -> tuple[int, ...]:
    """Return the versions of the parameters that a step uses."""
    return tuple(_torch.version(store.flat) for store in step.stores.values() if isinstance(store.flat, Tensor))


class LoopStep(OfLoop, Step):
    """The steps of some of a loop's optimizers, or parts of them.

    Attributes:
        accumulated: names of the parameters whose accumulated gradients the graph uses.
    """

    accumulated: tuple[str, ...] = ()

    def use_gradients(self, use: GradientUse) -> LoopStep:
        """Set how the graph uses gradients; return it."""
        self._request = replace(self._request, gradients=use)
        return self

    def gradients(self) -> Sequence[str]:
        """Return the names of the parameters that got a gradient in the last run."""
        return self._compiled().captured.gradients

    def run_loop(self, program: Program) -> list[Tensor]:
        """Run a program; return this rank's part of each output."""
        self._request = replace(self._request, accumulated=self.accumulated)
        return super().run_loop(program)

    @interruptible("a step")
    def start(self, program: Program) -> Paused | None:
        """Run a program up to the values that are read before ``backward()``.

        Returns:
            What finishes it; None if the step cannot pause. It is the same on all ranks.
        """
        self._request = replace(self._request, accumulated=self.accumulated)
        self._note_rows(program)
        return self._with_inputs(lambda *inputs: self._start(program, inputs), program, [program.tensors])

    def _start(self, program: Program, tensors: tuple[Tensor, ...]) -> Paused | None:
        with one_thread("a call of the graph"):
            step, batch = self._ready(tensors, {})
            executor = step.executor
            if executor.pausing is None:
                return None
            self._check_replicas()
            inputs = self._run_inputs(step, executor, batch)
            raw, finish = executor.start(*inputs)
            placed = zip(raw, step.outputs, program.metas, strict=False)
            values = [self._part(value.detach(), sbp, meta) for value, (sbp, _), meta in placed]
            return Paused(step, batch, inputs, self.rows, values, finish, versions_of(step))

    @interruptible("a step")
    def finish(self, paused: Paused, program: Program) -> list[Tensor]:
        """Run the rest of a program; return this rank's part of each output."""
        self.rows, self._latest = paused.rows, paused.step
        with one_thread("a call of the graph"):
            values = paused.finish(paused.step.number_values())
            outputs = local_parts(self._finish(paused.step, paused.batch, paused.inputs, values))
        placed = zip(outputs, paused.step.outputs, program.metas, strict=True)
        return [self._part(value, sbp, meta) for value, (sbp, _), meta in placed]

    def _finish_step(self, step: CompiledStep, values: Sequence[Tensor], skipped: Set[str]) -> None:
        if self._request.gradients in ("update", "accumulated"):
            super()._finish_step(step, values, skipped)
        else:
            self._passes_done += 1

    def _doing(self) -> str:
        use = self._request.gradients
        doing = {"accumulate": "backward() before ", "edit": "changing gradients before "}.get(use, "")
        return f"{doing}step {self.steps_done + 1}"


class LoopForward(OfLoop, Forward):
    """Forward passes of a loop without an update."""


class LoopPreview(OfLoop, Preview):
    """Values that a step of the loop will compute."""
