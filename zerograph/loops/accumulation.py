"""Accumulated gradients of a loop: a graph for each ``backward()`` that adds to them, and one that updates by them.

A step of one ``backward()`` is one graph. Several calls of ``backward()`` that do the same, as in gradient
accumulation, run one graph each, the *body*: forward, backward, and an addition to the sums that the ranks keep, split
as the ZeRO stage splits gradients. The update is a graph of its own. Neither depends on the number of calls. The same
graphs run where the loop reads or changes gradients, or reads a result of a ``backward()``, before the step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph.errors import CaptureError
from zerograph.loops.batchwise import here
from zerograph.loops.deferred import Result
from zerograph.loops.loop_graphs import LoopStep
from zerograph.loops.loop_tape import LoopTape
from zerograph.loops.pauses import Pauses
from zerograph.loops.program import Texts, program_of
from zerograph.loops.tape import RealTensor
from zerograph.loops.words import words
from zerograph.passes.context import GradientUse
from zerograph.runtime.state import Store, accumulated_gradients, load_accumulated, store_of, stores_of


class Owner(Protocol):
    """The loop whose gradients are accumulated."""

    graphs_done: int

    def step_graph(self, numbers: tuple[int, ...], use: GradientUse) -> LoopStep:
        """Return the graph of these optimizers that uses gradients in this way."""

    def parameters_by_name(self) -> Mapping[str, nn.Parameter]:
        """Return the prepared parameters by their name in the graphs."""

    def parameters_trained_by(self, number: int) -> list[nn.Parameter]:
        """Return the parameters of an optimizer."""


@dataclass(frozen=True)
class _Body:
    """A ``backward()`` on a tape, or several through the same calls, with all calls that it needs.

    Attributes:
        events: the numbers of the calls of ``backward()``.
        calls: the numbers of all calls, in order.
        key: equal for bodies that do the same.
        optimizers: the optimizers whose gradients it adds to.
    """

    events: tuple[int, ...]
    calls: tuple[int, ...]
    key: Hashable
    optimizers: tuple[int, ...]


@dataclass(eq=False)
class Accumulation:
    """The accumulated gradients of a loop.

    Attributes:
        owner: the loop.
        texts: of functions and constants.
        pauses: runs bodies, and the rest of those that have begun.
        touched: names of the parameters that have an accumulated gradient, by optimizer.
        zeroed: names of the parameters whose gradients ``zero_grad(set_to_none=False)`` has set to zero, by optimizer.
    """

    owner: Owner
    texts: Texts
    pauses: Pauses
    touched: dict[int, set[str]] = field(default_factory=dict)
    zeroed: dict[int, set[str]] = field(default_factory=dict)
    # Names of the parameters whose gradients a step has used as one graph since they were cleared, by its optimizers.
    _given: dict[int, Sequence[str]] = field(default_factory=dict)
    # Names of the parameters to which bodies of these keys, together or alone, have given a gradient.
    _gives: dict[tuple[Hashable, ...], set[str]] = field(default_factory=dict)
    # The keys of the bodies of the last step that was one graph.
    _latest: tuple[Hashable, ...] = ()
    # Results that any body of a key had to return, as (place among its calls, leaf).
    _returned: dict[Hashable, set[tuple[int, int]]] = field(default_factory=dict)
    # Keys of bodies that ran by themselves, and of those that ran as part of a whole step.
    _alone: set[Hashable] = field(default_factory=set)
    _whole: set[Hashable] = field(default_factory=set)
    # The gradients of the store that was read last.
    _gathered: tuple[Store, list[Tensor]] | None = None

    def suits(self, tape: LoopTape, optimizers: Iterable[int]) -> bool:
        """Return whether bodies and an update are to run, rather than one graph of the whole step."""
        optimizers = set(optimizers)
        if any(self.touched.get(number) for number in optimizers):
            return True
        events = [event for event in tape.events.values() if event.concerns(optimizers)]
        if any(event.cleared & optimizers for event in events):
            return True
        bodies = self._bodies(tape, optimizers)
        keys = self._latest = tuple(body.key for body in bodies)
        zeroed = set().union(*(self.zeroed.get(number, ()) for number in optimizers))
        if zeroed - set().union(*(self._gives.get(group, ()) for group in [keys, *((key,) for key in keys)])):
            return True
        edits = [n for n, event in tape.events.items() if event.loss is None and event.concerns(optimizers)]
        writes = [n for body in bodies for n in body.calls if tape.calls[n].outcome.writes]
        if writes != sorted(writes) or any(edit < bodies[-1].events[-1] for edit in edits):
            return False
        if self._has_hooks_on_sums(optimizers):
            return False
        if len(set(keys)) < len(keys):
            return True
        if self._alone.issuperset(keys) and not self._whole.issuperset(keys):
            return True
        self._whole.update(keys)
        return False

    def run(self, tape: LoopTape, optimizers: Iterable[int], wanted: Sequence[Result]) -> None:
        """Run every ``backward()`` on the tape that changes gradients of these optimizers, and edits among them.

        Edits after the last ``backward()`` are left to the update.

        Args:
            tape: the recorded calls.
            optimizers: the numbers of the optimizers.
            wanted: the results that must have values.

        Raises:
            CaptureError: gradients are edited between two calls of ``backward()`` through the same calls, or hooks
                would see the gradient of one ``backward()`` instead of the sum.
        """
        optimizers = set(optimizers)
        bodies = self._bodies(tape, optimizers)
        edits = [n for n in self.edits(tape, optimizers) if bodies and n < bodies[-1].events[-1]]
        if (problem := self._problem(bodies, edits, optimizers)) is not None:
            raise CaptureError(problem)
        for body in bodies:
            self._note_returned(tape, body, wanted)
        for body in bodies:
            self.edit(tape, optimizers, [n for n in edits if n < body.events[0] and n not in tape.done])
            self._run_body(tape, body)

    def can_run(self, tape: LoopTape, optimizers: Iterable[int]) -> bool:
        """Return whether :meth:`run` can run every ``backward()`` on the tape."""
        bodies = self._bodies(tape, set(optimizers))
        return self._problem(bodies, self.edits(tape, optimizers), set(optimizers)) is None

    def _problem(self, bodies: Sequence[_Body], edits: Iterable[int], optimizers: Set[int]) -> str | None:
        """Return why bodies cannot run by themselves, or None."""
        if (len(bodies) > 1 or (bodies and any(self.touched.values()))) and self._has_hooks_on_sums(optimizers):
            return (
                "a value or a gradient was read between calls of backward(), or gradients add up over steps, and a "
                f"parameter has a hook of register_post_accumulate_grad_hook(){here()}\n"
                f"The hook would not see the sum of the gradients: read after {words().step}, or call backward() once."
            )
        if any(body.events[0] < edit < body.events[-1] for body in bodies for edit in edits):
            return (
                f"gradients are changed between two calls of backward() through the same results{here()}\n"
                f"Call {words().model.removeprefix('a ')} again for the second loss, or clip after the last backward()."
            )
        return None

    def edits(self, tape: LoopTape, optimizers: Iterable[int]) -> list[int]:
        """Return the numbers of the edits of these optimizers' gradients that are still to be run."""
        return [
            number
            for number, event in tape.events.items()
            if event.loss is None and number not in tape.done and event.concerns(optimizers)
        ]

    def edit(self, tape: LoopTape, optimizers: Iterable[int], edits: Sequence[int]) -> None:
        """Run edits of accumulated gradients before the update."""
        if not edits:
            return
        self._gathered = None
        numbers = tuple(sorted(set().union(*(tape.events[number].concerns(optimizers) for number in edits))))
        tape.take_values()
        outputs = sorted(tensor.result for tensor in tape.alive() if tensor.result.call in edits)
        calls = sorted(tape.with_ancestors(edits))
        program = program_of(tape, [], outputs, self.texts, calls, any_size=True)
        values = self.graph(numbers, "edit").run_loop(program)
        self._note_added(tape, edits, optimizers)
        tape.mark_done(calls, dict(zip(outputs, values, strict=True)))

    def graph(self, optimizers: tuple[int, ...], use: GradientUse) -> LoopStep:
        """Return the graph that updates by accumulated gradients, or edits them."""
        graph = self.owner.step_graph(optimizers, use)
        names = set().union(*(self.touched.get(number, ()) for number in optimizers))
        graph.accumulated = tuple(name for name in self.owner.parameters_by_name() if name in names)
        return graph

    def note_whole(self, numbers: Iterable[int], names: Sequence[str]) -> None:
        """Note the parameters that a step of these optimizers, as one graph, has computed gradients of."""
        if self._latest not in self._gives:
            self._gives[self._latest] = set(names)
        for number in numbers:
            self._given[number] = names
            self.zeroed.pop(number, None)

    def has_gradients(self) -> bool:
        """Return whether a parameter has a gradient without ``backward()``."""
        return any(self.touched.values()) or any(self.zeroed.values())

    def clear(self, number: int, *, set_to_none: bool = True) -> None:
        """Clear the gradients of an optimizer."""
        names, given = self.zeroed.pop(number, set()), self._given.pop(number, ())
        if not set_to_none:
            self.zeroed[number] = names | self.touched.get(number, set()) | self._trained_by(number, given)
        self.drop(number)

    def drop(self, number: int) -> None:
        """Free the accumulated gradients of an optimizer."""
        self._gathered = None
        if self.touched.pop(number, None) is not None:
            for store in stores_of(self.owner.parameters_trained_by(number)):
                store.accumulated = None

    def gradient(self, name: str, parameter: nn.Parameter) -> Tensor | None:
        """Return a copy of a parameter's accumulated gradient, whole; None if it has none. A collective."""
        store = store_of(parameter)
        if any(name in names for names in self.zeroed.values()):
            return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if store is None or not any(name in names for names in self.touched.values()):
            return None
        if self._gathered is None or self._gathered[0] is not store:
            self._gathered = None
            self._gathered = store, accumulated_gradients(store)
        index = next(index for index, other in enumerate(store.parameters) if other is parameter)
        return self._gathered[1][index].clone()

    def write(self, number: int, name: str, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Replace the accumulated gradient of a parameter of optimizer ``number``.

        Args:
            gradient: equal on all ranks, of the parameter's shape. None: the update leaves the parameter out.
        """
        store, names = store_of(parameter), self.touched.setdefault(number, set())
        assert store is not None
        whole = torch.zeros(parameter.shape, dtype=parameter.dtype) if gradient is None else gradient.detach()
        load_accumulated(store, [whole if other is parameter else None for other in store.parameters])
        if self._gathered is not None and self._gathered[0] is store:
            index = next(index for index, other in enumerate(store.parameters) if other is parameter)
            self._gathered[1][index].copy_(whole)
        (names.discard if gradient is None else names.add)(name)
        self.zeroed.get(number, set()).discard(name)
        if not names:
            self.drop(number)

    def _has_hooks_on_sums(self, optimizers: Iterable[int]) -> bool:
        """Return whether a parameter has a hook that runs after its gradient was added to the sum."""
        parameters = [one for number in optimizers for one in self.owner.parameters_trained_by(number)]
        return _torch.has_gradient_hooks(parameters) and any(
            on_sums for _, on_sums in _torch.gradient_hooks(parameters)
        )

    def _bodies(self, tape: LoopTape, optimizers: Set[int]) -> list[_Body]:
        """Return the bodies of the calls of ``backward()`` that are still to be run, in order."""
        # Groups of calls of backward(), each with the calls that gradients go through.
        groups: list[tuple[list[int], set[int]]] = []
        for number, event in tape.events.items():
            if event.loss is None or number in tape.done or not event.concerns(optimizers):
                continue
            calls = tape.with_gradient(event.loss) - tape.done
            first = next((index for index, (_, others) in enumerate(groups) if others & calls), len(groups))
            # Those in between join too: the order stays.
            events = [event for before, _ in groups[first:] for event in before]
            calls = calls.union(*(others for _, others in groups[first:]))
            groups[first:] = [([*events, number], calls)]
        done = set(tape.done)
        bodies = []
        for events, _ in groups:
            effects = {number for number in tape.effects() if number < events[-1]}
            calls = tape.with_ancestors({*events, *(effects - done)}) - done
            concerned = set().union(*(tape.events[number].concerns(optimizers) for number in events))
            ordered = tuple(sorted(calls))
            bodies.append(_Body(tuple(events), ordered, self._key(tape, ordered), tuple(sorted(concerned))))
            done |= calls
        return bodies

    def _key(self, tape: LoopTape, calls: Sequence[int]) -> Hashable:
        place = {call: index for index, call in enumerate(calls)}
        numbers: dict[Any, int] = {}

        def placed(argument: Any) -> Any:
            if isinstance(argument, Result) and argument.call in place:
                return place[argument.call], argument.leaf
            if isinstance(argument, (Result, RealTensor)):
                return numbers.setdefault(argument, len(numbers))
            return argument

        recorded = (tape.calls[number] for number in calls)
        return tuple(self.texts.key(call, [placed(argument) for argument in call.arguments]) for call in recorded)

    def _note_returned(self, tape: LoopTape, body: _Body, wanted: Sequence[Result]) -> None:
        """Note the results that a body must return: those wanted, and those that later calls take."""
        place = {call: index for index, call in enumerate(body.calls)}
        needed = tape.with_ancestors({result.call for result in wanted} | (tape.events.keys() - tape.done))
        taken = {
            argument
            for number in needed - place.keys()
            for argument in tape.calls[number].arguments
            if isinstance(argument, Result)
        }
        results = {result for result in taken | set(wanted) if result.call in place}
        self._returned.setdefault(body.key, set()).update((place[result.call], result.leaf) for result in results)

    def _run_body(self, tape: LoopTape, body: _Body) -> None:
        tape.take_values()
        self._gathered = None
        outputs = [Result(body.calls[place], leaf) for place, leaf in sorted(self._returned[body.key])]
        graph = self.owner.step_graph(body.optimizers, "accumulate")
        with tape.modes():
            values = self.pauses.run(graph, tape, tape.with_gradient_ancestors(body.calls), outputs)
        self.owner.graphs_done += 1
        self._alone.add(body.key)
        self._gives[body.key,] = set(graph.gradients())
        for number in body.optimizers:
            names = self._trained_by(number, graph.gradients()) | self.zeroed.pop(number, set())
            self.touched.setdefault(number, set()).update(names)
        self._note_added(tape, body.events, body.optimizers)
        tape.mark_done(body.calls, dict(zip(outputs, values, strict=True)))

    def _note_added(self, tape: LoopTape, events: Iterable[int], optimizers: Iterable[int]) -> None:
        for number in events:
            tape.events[number].added |= tape.events[number].concerns(optimizers)

    def _trained_by(self, number: int, names: Iterable[str]) -> set[str]:
        """Return those of the parameters that an optimizer trains."""
        named = self.owner.parameters_by_name()
        mine = {id(parameter) for parameter in self.owner.parameters_trained_by(number)}
        return {name for name in names if id(named[name]) in mine}
