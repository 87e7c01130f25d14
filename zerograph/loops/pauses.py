"""Values that a loop reads before backward: the step runs up to them, and goes on at the step.

When a loop reads a value for the first time, nobody knows what the step will be: a forward computes the value. The step
then shows which calls followed. When the same calls are recorded and the same value is read again, the graph of that
step starts, pauses when the value is computed, and keeps what the rest needs. If the expected calls follow, the rest
runs. If not, because the loop skips the step for instance, what was kept is freed, and what was recorded runs as usual.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from zerograph import _torch
from zerograph.errors import RankMismatchError
from zerograph.loops.deferred import Deferred, Result
from zerograph.loops.graphs import Recorded
from zerograph.loops.loop_graphs import LoopPreview, LoopStep, Paused
from zerograph.loops.loop_tape import LoopTape
from zerograph.loops.program import Program, Texts, program_of
from zerograph.runtime.job.differences import first_difference
from zerograph.runtime.job.process_group import agree, differing, digest

_READING = "the value that is read before the step"


@dataclass(eq=False)
class _Read:
    """The first value that was read before a ``backward()``.

    Attributes:
        tape: the recorded calls.
        calls: the numbers of the calls that were recorded then, without those that no result is left of.
        program: these calls.
        text: equal for equal calls, if the same value was read.
        early: the results that were read before ``backward()``, as far as these calls compute them.
    """

    tape: LoopTape
    calls: tuple[int, ...]
    program: Program
    text: str
    early: set[Result]

    def places(self) -> list[tuple[int, int]]:
        """Return the results in ``early`` as (place among the calls, leaf), in order."""
        return sorted((self.calls.index(result.call), result.leaf) for result in self.early)


@dataclass(frozen=True, eq=False)
class _Plan:
    """The step that follows on a read.

    Attributes:
        graph: runs the step.
        program: the step, without tensors.
        later: 0-d tensors that calls after the read took last time.
    """

    graph: LoopStep
    program: Program
    later: tuple[Tensor, ...]


@dataclass(eq=False)
class _Running:
    """A step that has paused.

    Attributes:
        read: the value that was read.
        plan: the expected step.
        program: the expected step, with the tensors that it runs on.
        later: those of the tensors that get their values when the rest runs.
        paused: runs the rest; None when it was abandoned.
        early: the values of the results that were read, and their versions.
        alive: the results that ``backward()`` may still be called on.
    """

    read: _Read
    plan: _Plan
    program: Program
    later: tuple[Tensor, ...]
    paused: Paused | None
    early: dict[Result, tuple[Tensor, int]]
    alive: list[weakref.ref[Deferred]] = field(default_factory=list)

    def abandon(self) -> None:
        """Free what the rest of the step would need."""
        self.paused = None
        self.alive.clear()


class Pauses:
    """The steps of a loop that pause where it reads values.

    Args:
        texts: of functions and constants.
        forward: a graph of the loop, for its ranks.
        preview: computes values from other values; None for a loop without optimizers.

    Attributes:
        missed: the last value was read as before, and again without a paused step.
    """

    missed = False

    def __init__(self, texts: Texts, forward: Recorded, preview: LoopPreview | None) -> None:
        self._texts, self._forward, self._preview = texts, forward, preview
        self._plans: dict[str, _Plan] = {}
        self._reads: list[_Read] = []
        self._running: _Running | None = None
        self._seen: set[str] = set()

    def abandon(self, *, forget: bool = False) -> None:
        """Free what a paused step keeps: its calls run as usual if they are needed.

        Args:
            forget: no call so far will be part of a step.
        """
        if self._running is not None:
            self._running.abandon()
        if forget:
            self._running = None
            self._reads.clear()

    def is_running(self, tape: LoopTape) -> bool:
        """Return whether a step on the calls of this tape has paused."""
        return self._running is not None and self._running.read.tape is tape

    def read(self, tape: LoopTape, result: Result) -> dict[Result, Tensor] | None:
        """Return the value of a result before ``backward()``, and others, without a forward of its own. A collective.

        Returns:
            None if it is not known what follows: the caller computes the value.
        """
        self.missed = False
        for read in self._reads:
            calls, taken = _depends(read, result)
            if read.tape is tape and taken:
                if self._running is None or self._running.read is not read:
                    read.early |= taken
                    return None
                return self._from_values(self._running, result, calls, taken)
        return self._start(tape, result)

    def run(self, graph: LoopStep, tape: LoopTape, calls: Iterable[int], outputs: Sequence[Result]) -> list[Tensor]:
        """Run calls on a tape; if they are those that a paused step has begun, run the rest.

        Args:
            graph: runs them.
            tape: the recorded calls.
            calls: their numbers.
            outputs: the results to return.
        """
        calls = sorted(calls)
        read = next((one for one in self._reads if one.tape is tape and not set(one.calls).isdisjoint(calls)), None)
        running, self._running = self._running, None
        whole = sorted({*calls, *(read.calls if read is not None else ())})
        if read is None or tuple(whole[: len(read.calls)]) != read.calls:
            if running is not None:
                running.abandon()
            return graph.run_loop(self._program(tape, calls, outputs))
        self._reads = [one for one in self._reads if one.tape is not tape or set(one.calls).isdisjoint(calls)]
        if running is not None and running.read is read:
            returned = self._finish(running, graph, whole, outputs)
            if returned is not None:
                if running.early.keys() < read.early:
                    self._plan(read, graph, self._early_program(read, whole, outputs)[1])
                return returned
        elif running is not None:
            running.abandon()
        wanted, program = self._early_program(read, whole, outputs)
        self._plan(read, graph, program)
        values = dict(zip(wanted, graph.run_loop(program), strict=True))
        return [values[output] for output in outputs]

    def _start(self, tape: LoopTape, result: Result) -> dict[Result, Tensor] | None:
        """Start the step that followed on this read last time, and return the values that it has computed."""
        self.abandon()
        tape.take_values()
        unread = {tensor.result.call for tensor in tape.alive() if tensor.value is None}
        calls = tuple(sorted(tape.with_ancestors({result.call} | unread | tape.effects()) - tape.done))
        if result.call not in calls or not tape.events.keys().isdisjoint(calls):
            return None
        program = self._program(tape, calls, [])
        text = f"{program.text} {calls.index(result.call)} {result.leaf}"
        read, plan = _Read(tape, calls, program, text, {result}), self._plans.get(text)
        self._reads.append(read)
        self.missed = text in self._seen
        self._seen.add(text)
        if plan is not None:
            read.early |= {Result(calls[one.call], one.leaf) for one in plan.program.outputs[: plan.program.early]}
        if not self._all_expect(read, plan) or plan is None:
            return None
        later = tuple(tensor.clone() for tensor in plan.later)
        expected = replace(plan.program, tensors=(*program.tensors, *later))
        metas = [tape.meta(Result(calls[one.call], one.leaf)) for one in expected.outputs[: expected.early]]
        with tape.modes():
            paused = plan.graph.start(replace(expected, metas=tuple(metas)))
        if paused is None:
            return None
        results = [Result(calls[one.call], one.leaf) for one in expected.outputs[: expected.early]]
        values = dict(zip(results, paused.values, strict=True))
        early = {one: (value, _torch.version(value)) for one, value in values.items()}
        running = self._running = _Running(read, plan, expected, later, paused, early)
        running.alive += [weakref.ref(one, self._on_death(running)) for one in tape.alive() if one.requires_grad]
        return values

    def _all_expect(self, read: _Read, plan: _Plan | None) -> bool:
        """Return whether all ranks read the same value and expect the same step."""
        job = self._forward._join()
        facts = {_READING: read.text}
        number = digest((read.text, None if plan is None else plan.program.text))
        different = differing(job, "reading a value before the step", number, lambda: facts)
        if different is not None and not all(_READING in of_rank for of_rank in different):
            raise RankMismatchError(
                f"{first_difference(different, 'reading a value before the step')} All ranks must read it, or none."
            )
        return different is None

    def _on_death(self, running: _Running) -> Callable[[object], None]:
        """Return a callback that abandons a paused step when no result is left that it could go on with."""
        reference = weakref.ref(running)

        def on_death(_: object) -> None:
            running = reference()
            if running is None or running.paused is None or any(one() is not None for one in running.alive):
                return
            # Later calls may have made others of them: ``loss = loss * 2``.
            tape = running.read.tape
            running.alive = [weakref.ref(one, on_death) for one in tape.alive() if one.requires_grad]
            if not running.alive and not any(e.loss for number, e in tape.events.items() if number not in tape.done):
                running.abandon()

        return on_death

    def _from_values(
        self, running: _Running, result: Result, calls: Sequence[int], taken: set[Result]
    ) -> dict[Result, Tensor] | None:
        """Return a value that depends only on those which the paused step has returned; None if there is none.

        Args:
            running: the paused step.
            result: the result to compute.
            calls: the numbers of the calls after the first read that it depends on.
            taken: the results of earlier calls that these take.
        """
        tape, known = running.read.tape, running.early
        if not taken <= known.keys():
            # The next step computes them before its pause.
            running.read.early |= taken
            return None
        if not calls:
            return {result: known[result][0]}
        if any(tape.calls[n].module or tape.calls[n].outcome.draws for n in calls) or self._preview is None:
            return None
        with tape.taking({one: known[one][0] for one in taken}, calls):
            program = self._program(tape, calls, [result])
        return {result: self._preview.run_loop(program)[0]}

    def _finish(
        self, running: _Running, graph: LoopStep, whole: Sequence[int], outputs: Sequence[Result]
    ) -> list[Tensor] | None:
        """Run the rest of a paused step; None if on some rank it is not the rest that is needed. A collective."""
        tape, expected, values = running.read.tape, running.program, {}
        actual: Program | None = None
        if graph is running.plan.graph and len(whole) == len(expected.calls):
            results = [Result(whole[one.call], one.leaf) for one in expected.outputs]
            actual = _with_early(self._program(tape, whole, results), expected.early)
        same = actual is not None and self._is_expected(running, actual) and set(outputs) <= set(results)
        count = len(running.read.program.tensors)
        numbers = [tensor.tolist() for tensor in actual.tensors[count:]] if same and actual is not None else []
        doing = f"going on with {graph._doing()}"
        job = graph._join()
        everybody = agree(job, doing, 0, dict, None, (int(same), digest(numbers) % 2**62))
        if not all(flag for flag, _ in everybody) or len({number for _, number in everybody}) > 1:
            running.abandon()
            return None
        assert actual is not None
        assert running.paused is not None
        for tensor, value in zip(running.later, actual.tensors[count:], strict=True):
            tensor.copy_(value)
        paused, running.paused = running.paused, None
        running.abandon()
        values = dict(zip(results, graph.finish(paused, actual), strict=True))
        return [values[output] for output in outputs]

    def _is_expected(self, running: _Running, actual: Program) -> bool:
        """Return whether the recorded calls are those of the paused step, which no change has made wrong."""
        if running.paused is None or actual.text != running.program.text or not running.paused.is_valid():
            return False
        if any(_torch.version(value) != version for value, version in running.early.values()):
            return False
        before = running.read.program.tensors
        return all(first is second for first, second in zip(before, actual.tensors, strict=False))

    def _plan(self, read: _Read, graph: LoopStep, program: Program) -> None:
        """Note the step that follows on a read, if all that it takes is known at the read, apart from numbers."""
        later = program.tensors[len(read.program.tensors) :]
        if not any(tensor.dim() for tensor in later):
            copies = tuple(tensor.detach().clone() for tensor in later)
            self._plans[read.text] = _Plan(graph, replace(program, tensors=(), metas=()), copies)

    def _early_program(
        self, read: _Read, whole: Sequence[int], outputs: Sequence[Result]
    ) -> tuple[list[Result], Program]:
        """Return all results of a step that can pause, those first that are read early, and the step."""
        early = [Result(read.calls[call], leaf) for call, leaf in read.places()]
        wanted = [*early, *(output for output in outputs if output not in read.early)]
        return wanted, _with_early(self._program(read.tape, whole, wanted), len(early))

    def _program(self, tape: LoopTape, calls: Sequence[int], outputs: Sequence[Result]) -> Program:
        return program_of(tape, [], outputs, self._texts, calls, any_size=True)


def _with_early(program: Program, count: int) -> Program:
    """Return a program of which the first ``count`` outputs are computed before backward."""
    return replace(program, early=count, text=f"{program.text}, {count} values early")


def _depends(read: _Read, result: Result) -> tuple[list[int], set[Result]]:
    """Return the calls after a read that a result depends on, and the results of earlier calls that these take."""
    if result.call in read.calls:
        return [], {result}
    tape, needed = read.tape, {result.call}
    taken: set[Result] = set()
    for number in range(result.call, -1, -1):
        if number in needed:
            sources = {one for one in tape.calls[number].arguments if isinstance(one, Result)}
            taken |= {one for one in sources if one.call in read.calls}
            needed |= {one.call for one in sources - taken}
    return sorted(needed), taken
