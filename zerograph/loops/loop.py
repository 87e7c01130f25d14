"""The driver of a plain loop: it records calls of prepared models, and runs one graph for each ``optimizer.step()``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph.base import source
from zerograph.compiler.members import Members
from zerograph.config import Config
from zerograph.errors import ConfigError, InputError, ZeroGraphWarning
from zerograph.loops import hyperparameters
from zerograph.loops.accumulation import Accumulation
from zerograph.loops.clearing import Clearing
from zerograph.loops.deferred import Deferred, Meta, Result, outside_inference_mode
from zerograph.loops.events import Edits
from zerograph.loops.gradients import Reader
from zerograph.loops.graphs import Recorded
from zerograph.loops.loaders import SplitLoader
from zerograph.loops.loop_graphs import LoopForward, LoopPreview, LoopStep
from zerograph.loops.loop_tape import LoopTape
from zerograph.loops.metadata import Outcomes
from zerograph.loops.outputs import agreed_outputs
from zerograph.loops.pauses import Pauses
from zerograph.loops.program import Program, Texts, program_of
from zerograph.loops.tape import Numbers, autocast_now
from zerograph.loops.words import Words
from zerograph.passes.context import GradientUse
from zerograph.runtime.job.process_group import agree, digest
from zerograph.runtime.parameters import parameters_of, store_gradient, stored_gradient


class Loop:
    """Modules and optimizers that one training loop uses.

    Attributes:
        modules: the prepared modules, by their name in the graphs.
        optimizers: the prepared optimizers.
        config: the options of all graphs.
        tape: the calls since the last step.
        graphs_done: number of graphs that were run so far, but for forward passes that no update follows.
        busy: state dicts are those of the plain modules now.
        parts: returns the number of parts of the batch of one call over the ranks.
        edits: makes the calls that edit gradients.
    """

    words = Words()

    def __init__(
        self, modules: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer], config: Config
    ) -> None:
        self.modules, self.optimizers, self.config = dict(modules), list(optimizers), config
        self.graphs_done = 0
        # The number of forward passes without an update since then, by the number of graphs.
        self._extra: dict[int, int] = {}
        self.busy = False
        self._steps: dict[tuple[tuple[int, ...], GradientUse], LoopStep] = {}
        self._forward: LoopForward = self._new(LoopForward(self.modules, config, self.words))
        self.parts: Callable[[], int] = self._forward.parts
        self.edits = Edits()
        self._preview: LoopPreview | None = None
        if optimizers:
            self._preview = self._new(LoopPreview(self.step_graph((0,), "update"), whole=False))
        self._texts = Texts({id(module): name for name, module in modules.items()})
        self._pauses = Pauses(self._texts, self._forward, self._preview)
        self._accumulation = Accumulation(self, self._texts, self._pauses)
        self._outcomes = Outcomes(
            self._now, self._forward.parts, lambda: autocast_now() or config.amp_dtype, self._warn
        )
        self._numbers = Numbers()
        self._warned: set[str] = set()
        self._trainer: dict[int, int] | None = None
        # Optimizers whose update waits: the loop may update another one with the same losses.
        self._waiting: dict[int, list[hyperparameters.Group]] = {}
        self._clearing = Clearing()
        # Names and sums of the gradients that the loop has written since the last step.
        self._written: list[tuple[str, float]] = []
        self._updates = dict.fromkeys(range(len(self.optimizers)), 0)
        self._reader = Reader(self)
        self._members: Members | None = None
        self._modules: dict[nn.Module, list[nn.Module]] = {}
        self._parameters: dict[nn.Module, list[nn.Parameter]] = {}
        self.tape = self._new_tape()

    @outside_inference_mode
    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a call of a prepared module or function on this rank's part of the batch."""
        self._settle()
        members = self._forward._members()
        if members is not self._members:
            # A module may have other submodules, parameters or modes.
            self._members, self._modules, self._parameters = members, {}, {}
        if not self.tape.losses and next(self.tape.alive(), None) is None:
            if self.tape.has_effects():
                self._run_forward(self.tape)
            self.tape = self._new_tape()
        tape = self.tape
        if not tape.takes_mode(function):
            if tape.losses:
                # Such as an evaluation between two calls of backward().
                self._write_buffers()
                tape = self._new_tape()
            else:
                self._run_forward(tape)
                tape = self.tape
        result = tape.call(function, args, kwargs, module=True, parts=True)
        writes = not torch.is_grad_enabled() and tape.calls[-1].outcome.writes
        if writes and not tape.losses and not any(one.requires_grad for one in tape.alive()):
            # No step follows that would write to buffers, and the loop may look at them, as update_bn() does.
            self._run_forward(tape)
        return result

    def loader(self, loader: Iterable[Any]) -> SplitLoader:
        """Return a loader of this rank's rows."""
        return SplitLoader(loader, self.config)

    def unscale(self, optimizer: torch.optim.Optimizer, inverse: Tensor) -> Tensor:
        """Unscale the gradients of an optimizer; return 1.0 if one of them is not finite, else 0.0."""
        found = self.edit(_unscale, parameters_of(optimizer), (inverse,), {})
        value: Tensor = found.tape.value(found)
        return value.float()

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Make the update of an optimizer: one graph of all calls since the last step.

        The update waits if another optimizer trains some of the same losses: its ``step()`` may come next, and is part
        of the same graph then.

        Raises:
            InputError: ``backward()`` was not called since the last step, or its gradients were neither kept nor
                cleared.
            ZeroGraphError: on every rank, before any state changes.
        """
        if closure is not None:
            raise ConfigError("optimizer.step(closure) evaluates the loss several times, which no graph does")
        number = self._number(optimizer)
        tape = self.tape
        events = [event for event in tape.events.values() if event.concerns([number])]
        self._clearing.check(number, self._here())
        if any(stored_gradient(one) is not None for one in parameters_of(optimizer)):
            raise InputError(
                f"optimizer.step() would not see a gradient computed without the prepared model{self._here()}\n"
                "Compute losses from what the model returns when it is called itself, not from its submodules, methods "
                "or parameters; put a penalty on parameters into the model's forward."
            )
        if not any(event.loss for event in events) and not self._accumulation.touched.get(number):
            raise InputError(
                f"optimizer.step() without loss.backward() before{self._here()}\n"
                "No loss since the last step or zero_grad() depends on its parameters."
            )
        if self._clearing.adds_up(number) and self._accumulation.can_run(tape, range(len(self.optimizers))):
            # The sums stay after the update, with all edits.
            self._accumulate()
        others = set().union(*(event.touches - event.cleared for event in events)) - {number}
        self._waiting[number] = hyperparameters.copied(optimizer)
        if others <= self._waiting.keys():
            self._settle()
        _torch.mark_step_called(optimizer)

    def zero_grad(self, numbers: Iterable[int], *, set_to_none: bool = True) -> None:
        """Clear the gradients of optimizers. They are None, or else zeros, by which the next step updates too."""
        self._settle()
        numbers = list(numbers)
        edited = self._accumulation.edits(self.tape, numbers) and any(map(self._accumulation.touched.get, numbers))
        if edited or not set_to_none:
            # Norms that clipping returned, for instance, get their values. Zeros replace gradients that exist.
            self._accumulate()
        self._written.clear()
        for number in numbers:
            self._clearing.clear(number)
            for parameter in self.parameters_trained_by(number):
                store_gradient(parameter, None)
            self.tape.clear(number)
            self._accumulation.clear(number, set_to_none=set_to_none)
            self._reader.forget()

    def edit(self, function: Callable[..., Any], parameters: Sequence[nn.Parameter], args: Any, kwargs: Any) -> Any:
        """Record an edit of gradients, such as clipping; return its result, a 0-d tensor.

        Raises:
            InputError: there are no gradients.
        """
        self._settle()
        trained = self.trained_by(parameters)
        if not any(event.loss and event.concerns(trained) for event in self.tape.events.values()) and not any(
            self._accumulation.touched.get(number) for number in trained
        ):
            raise InputError(
                f"{function.__name__}() without loss.backward() before{self._here()}\n"
                "Clip between backward() and optimizer.step()."
            )
        return self.tape.edit(function, parameters, trained, args, kwargs)

    def read(self, tape: LoopTape, deferred: Deferred) -> Tensor:
        """Compute the value of a result before its step. A collective.

        A result of a ``backward()`` gets it from the graph that adds the gradients up. Before ``backward()`` the step
        starts, and pauses when it has the value; where it is not known what the step will be, an extra forward runs.
        """
        if tape is self.tape:
            self._settle()
        if (value := _value_of(deferred)) is not None:
            return value
        tape = deferred.tape  # type: ignore[assignment]
        if tape.finished:
            raise InputError(
                f"a result has no value any more{self._here()}\nIts calls were not part of the last step, or its "
                "gradients were cleared: read it before."
            )
        tape.check_inputs()
        ancestors = tape.with_ancestors({deferred.result.call}) - tape.done
        if tape is self.tape and ancestors & tape.with_ancestors(tape.events.keys() - tape.done):
            self._accumulate(deferred)
            if (value := _value_of(deferred)) is not None:
                return value
        takes_gradient = (
            isinstance(leaf, Meta) and leaf.requires_grad for call in tape.calls for leaf in call.outcome.leaves
        )
        # Without an optimizer no step is to come.
        if not tape.losses and (self._preview is None or not any(takes_gradient)):
            self._run_forward(tape)
            value = _value_of(deferred)
            assert value is not None
            return value
        assert self._preview is not None
        if tape is self.tape:
            if self._pauses.is_running(tape) and tape.events.keys() - tape.done:
                self._accumulate()
            values = self._pauses.read(tape, deferred.result)
            if values is not None:
                for tensor in tape.alive():
                    tensor.value = values.get(tensor.result, tensor.value)
                return values[deferred.result]
        tape.take_values()
        program = self._program(tape, [deferred.result], [])
        if self._pauses.missed and any(call.module for call in program.calls):
            self._warn(
                "a value was read before optimizer.step() has computed it, and other calls follow than last time: this "
                "takes an extra forward; after loss.backward() it costs nothing"
            )
        with tape.modes():
            (value,) = self._preview.run_loop(program)
        return value

    def modules_of(self, module: nn.Module) -> list[nn.Module]:
        """Return the submodules of a prepared module."""
        if module not in self._modules:
            self._modules[module] = list(module.modules())
        return self._modules[module]

    def parameters_of(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of a prepared module."""
        if module not in self._parameters:
            self._parameters[module] = list(module.parameters())
        return self._parameters[module]

    def trained_by(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the numbers of the optimizers that train some of the parameters."""
        if self._trainer is None or len(self._trainer) != sum(
            len(group["params"]) for optimizer in self.optimizers for group in optimizer.param_groups
        ):
            self._trainer = {
                id(parameter): number
                for number, optimizer in enumerate(self.optimizers)
                for group in optimizer.param_groups
                for parameter in group["params"]
            }
        # Parameters without data would answer each question about them in Python.
        with _torch.without_torch_function():
            return {self._trainer[id(one)] for one in tensors if id(one) in self._trainer and one.requires_grad}

    def note_untrained(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note those of the parameters of a loss that no prepared optimizer trains."""
        trained = self._trainer or {}
        with _torch.without_torch_function():
            self._reader.refuse([one for one in parameters if one.requires_grad and id(one) not in trained])

    def parameters_by_name(self) -> Mapping[str, nn.Parameter]:
        """Return the prepared parameters by their name in the graphs."""
        return (self._members or self._forward._members()).parameters

    def updates(self) -> Mapping[int, int]:
        """Return the number of updates of each optimizer so far."""
        return dict(self._updates)

    def parameters_trained_by(self, number: int) -> list[nn.Parameter]:
        """Return the parameters of an optimizer."""
        return parameters_of(self.optimizers[number])

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of the whole batch that the step will use, before clipping that follows. A collective."""
        self._settle()
        self._accumulate()
        name = self._name(parameter)
        return None if name is None else self._accumulation.gradient(name, parameter)

    def check_writable(self, what: str) -> None:
        """Gradients may be changed before the step."""

    def set_gradient(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Replace a gradient before the step. A collective if a ``backward()`` is still to be run."""
        self._settle()
        self._accumulate()
        name = self._name(parameter)
        for number in self.trained_by([parameter]):
            assert name is not None
            self._written.append((name, 0.0 if gradient is None else float(gradient.double().sum())))
            self._accumulation.write(number, name, parameter, gradient)

    def waits_for_step(self) -> bool:
        """Return whether there is a loss, or a gradient, that no update has used yet."""
        return bool(self.tape.losses) or self._accumulation.has_gradients()

    def zero_grad_of(self, parameters: Iterable[nn.Parameter], *, set_to_none: bool) -> None:
        """Clear the gradients of a module's parameters: not all of an optimizer's, perhaps."""
        parameters = list(parameters)
        mine = {id(parameter) for parameter in parameters}
        self._reader.clear(parameters)
        trained = self.trained_by(parameters)
        whole = {n for n in trained if mine.issuperset(map(id, self.parameters_trained_by(n)))}
        self.zero_grad(whole, set_to_none=set_to_none)
        for parameter in parameters if trained - whole else ():
            if self.trained_by([parameter]) <= whole:
                continue
            if not self.waits_for_step():
                self.discarded(parameter)
            elif (gradient := self.gradient(parameter)) is not None:
                self.set_gradient(parameter, None if set_to_none else gradient.zero_())

    def discarded(self, parameter: nn.Parameter) -> None:
        """Note that the loop has set ``parameter.grad`` to None after the step, as zero_grad() does."""
        for number in self.trained_by([parameter]):
            if self._clearing.discard(number, parameter, self.parameters_trained_by(number)):
                self.zero_grad([number])

    def zeroed_by(self, owner: object) -> bool:
        """Let the ``zero_grad()`` of a submodule, or of another optimizer, set each gradient by itself."""
        return False

    def warn_of_reading_late(self) -> None:
        """Warn once that a gradient was read after the step has used it."""
        if self._clearing.used:
            self._warn(
                "parameter.grad is None after optimizer.step(): gradients exist inside the step only\n"
                "Read it between loss.backward() and optimizer.step()."
            )

    def graph(self, *optimizers: torch.optim.Optimizer) -> Recorded:
        """Return the graph that updates these optimizers together, or without any the one of forward passes."""
        self._settle()
        self._pauses.abandon()
        self._write_buffers()
        return self.step_graph(tuple(sorted(map(self._number, optimizers))), "update") if optimizers else self._forward

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Answer for the gradients of these parameters."""
        self._reader.watch(parameters)

    def _settle(self) -> None:
        """Run the update that waits."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        numbers = tuple(sorted(waiting))
        with hyperparameters.replaced({self.optimizers[number]: groups for number, groups in waiting.items()}):
            self._run_step(numbers)

    def _run_step(self, numbers: tuple[int, ...]) -> None:
        tape, graph = self.tape, self.step_graph(numbers, "update")
        tape.closed, tape.updates = True, self.updates()
        # Until the step has ended, its gradients may be lost.
        lost = set().union(numbers, *(event.touches - event.cleared for event in tape.events.values()))
        try:
            problem: Exception | None = None
            try:
                tape.check_inputs()
            except InputError as error:
                problem = error
            (outputs,) = agreed_outputs(graph, [tape])
            if problem is not None:
                program = self._program(tape, outputs, numbers)
                graph.run(program, [program.tensors], problem)
            if self._accumulation.suits(tape, numbers):
                self._accumulation.run(tape, numbers, outputs)
                values = self._update(tape, numbers, outputs)
                outputs = [result for result in outputs if result.call not in tape.done]
                graph.steps_done += 1
            else:
                with tape.modes():
                    values = self._pauses.run(graph, tape, tape.program_calls(outputs, numbers), outputs)
                self._accumulation.note_whole(numbers, graph.gradients())
            self.graphs_done += 1
            for number in numbers:
                self._updates[number] += 1
            tape.free()
            lost = set().union(*(event.touches - event.cleared - event.added for event in tape.events.values()))
            self._clearing.note(lost & set(numbers), lost - set(numbers))
            tape.finish(dict(zip(outputs, values, strict=True)))
        except BaseException:
            self._clearing.note((), lost)
            raise
        finally:
            for number in lost:
                self._accumulation.drop(number)
            self._reader.forget()
            tape.finished = True
            self.tape = self._new_tape()

    def _update(self, tape: LoopTape, numbers: tuple[int, ...], outputs: Sequence[Result]) -> list[Tensor]:
        """Update by accumulated gradients; return the values of those outputs that no body has returned."""
        tape.take_values()
        program = self._program(tape, [result for result in outputs if result.call not in tape.done], numbers)
        graph = self._accumulation.graph(numbers, "accumulated")
        written, self._written = self._written, []
        if written or tape.compared:
            facts = {f"the sum of {name}.grad as the loop has written it": str(total) for name, total in written}
            facts["numbers that are combined with losses"] = str(tape.compared)
            agree(graph._join(), graph._doing(), digest((written, tape.compared)), lambda: facts)
        return graph.run_loop(program)

    def _accumulate(self, wanted: Deferred | None = None) -> None:
        """Run every ``backward()`` and edit of gradients so far, and give results their values."""
        tape, everything = self.tape, range(len(self.optimizers))
        if any(event.concerns(everything) for number, event in tape.events.items() if number not in tape.done):
            tape.check_inputs()
            (outputs,) = agreed_outputs(self._forward, [tape])
            self._accumulation.run(tape, everything, outputs if wanted is None else [*outputs, wanted.result])
            self._accumulation.edit(tape, everything, self._accumulation.edits(tape, everything))
            self._reader.forget()

    def _run_forward(self, tape: LoopTape) -> None:
        """Run the calls on a tape without an update, and give their results values."""
        self._pauses.abandon()
        tape.closed, tape.updates = True, self.updates()
        try:
            (outputs,) = agreed_outputs(self._forward, [tape])
            program = self._program(tape, outputs, [])
            self._forward.extra = self._extra.get(self.graphs_done, 0)
            try:
                with tape.modes():
                    values = self._forward.run_loop(program)
            finally:
                self._forward.extra = None
            self._extra = {self.graphs_done: self._extra.get(self.graphs_done, 0) + 1}
            tape.finish(dict(zip(outputs, values, strict=True)))
        finally:
            tape.finished = True
            if tape is self.tape:
                self.tape = self._new_tape()

    def _write_buffers(self) -> None:
        """Let the calls since the last step write to buffers now, as batch norm does; the step does not repeat it."""
        tape = self.tape
        if not tape.has_effects():
            return
        self._pauses.abandon()
        tape.check_inputs()
        with tape.modes():
            # With the random numbers of the step, which is still to come.
            self._forward.run_loop(self._program(tape, [], []))
        tape.calls = [replace(call, again=True) if call.outcome.writes else call for call in tape.calls]

    def _program(self, tape: LoopTape, outputs: Sequence[Result], optimizers: Iterable[int]) -> Program:
        calls = tape.program_calls(outputs, optimizers)
        return program_of(tape, [], outputs, self._texts, calls, any_size=True)

    def step_graph(self, numbers: tuple[int, ...], use: GradientUse) -> LoopStep:
        """Return the graph of some optimizers that uses gradients in this way."""
        key = numbers, use
        if key not in self._steps:
            optimizers = [self.optimizers[number] for number in numbers]
            self._steps[key] = self._new(LoopStep(self.modules, optimizers, self.words)).use_gradients(use)
            self._steps[key].config = self.config
        return self._steps[key]

    def _new(self, graph: Any) -> Any:
        graph.loop = self
        return graph

    def _number(self, optimizer: torch.optim.Optimizer) -> int:
        return next(n for n, other in enumerate(self.optimizers) if other is optimizer)

    def _new_tape(self) -> LoopTape:
        self._pauses.abandon(forget=True)
        return LoopTape(self._outcomes, self._name, lambda *_: [], self._numbers, words=self.words, owner=self)

    def _now(self) -> Members:
        return self._members or self._forward._members()

    def _name(self, parameter: nn.Parameter) -> str | None:
        return (self._members or self._forward._members()).names().get(id(parameter))

    def _here(self) -> str:
        line, code = source.running_line()
        return f"\n  {line}   {code}"

    def _warn(self, message: str) -> None:
        if message not in self._warned and self._forward._join().rank == 0:
            self._warned.add(message)
            warnings.warn(message, ZeroGraphWarning, stacklevel=source.levels_to_user())


def _value_of(result: Tensor) -> Tensor | None:
    """Return the value of a result, which a step may have turned into an ordinary tensor, or None."""
    return result.value if isinstance(result, Deferred) else result


def _unscale(parameters: Sequence[nn.Parameter], inverse: Tensor) -> Tensor:
    """Multiply gradients by the inverse of the loss scale; return 1.0 if one of them is not finite, else 0.0."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    largest = nn.utils.get_total_norm(gradients, float("inf"))
    for gradient in gradients:
        gradient.mul_(inverse.to(gradient.dtype))
    return torch.isfinite(largest).logical_not().to(torch.promote_types(largest.dtype, torch.float32))
