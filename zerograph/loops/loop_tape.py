"""The tape of a plain loop: calls of several models, ``backward()`` and clipping, and results of earlier steps."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.errors import CaptureError, InputError
from zerograph.loops.batchwise import here
from zerograph.loops.deferred import Deferred, Meta, Result, outside_inference_mode, values_of
from zerograph.loops.events import Edits, Event, backward_call
from zerograph.loops.program import autocast_of
from zerograph.loops.tape import Call, Kind, Named, RealTensor, Tape, check_scalar_loss
from zerograph.loops.words import words

# Smaller inputs are copied when they are recorded, so that the loop may write to them before the step.
_COPIED_BYTES = 2**20
# The metadata of a rank without rows is that of this many.
_PRETENDED_ROWS = 2


class Owner(Protocol):
    """The loop that a tape belongs to."""

    tape: LoopTape
    edits: Edits

    def read(self, tape: LoopTape, deferred: Deferred) -> Tensor:
        """Compute the value of a result."""

    def modules_of(self, module: nn.Module) -> list[nn.Module]:
        """Return the submodules of a prepared module."""

    def parameters_of(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of a prepared module."""

    def trained_by(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the numbers of the optimizers that train some of the parameters."""

    def note_untrained(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note those of the parameters of a loss that no prepared optimizer trains."""

    def parameters_by_name(self) -> Mapping[str, nn.Parameter]:
        """Return the prepared parameters by their name in the graphs."""

    def updates(self) -> Mapping[int, int]:
        """Return the number of updates of each optimizer so far."""


@dataclass(eq=False)
class LoopTape(Tape):
    """The calls between two steps of a loop.

    Attributes:
        owner: the loop.
        events: ``backward()`` and edits of gradients among the calls, by number.
        updates: the number of updates of each optimizer when the tape was closed.
        done: the numbers of the calls that ran before the step.
        compared: numbers that ranks must agree on.
    """

    owner: Owner = None  # type: ignore[assignment]
    events: dict[int, Event] = field(default_factory=dict)
    updates: Mapping[int, int] = field(default_factory=dict)
    _modes: dict[nn.Module, tuple[bool, ...]] = field(default_factory=dict)
    _inputs: dict[tuple[int, int], int] = field(default_factory=dict)
    _originals: list[Tensor] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)
    _values: dict[int, Kind] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    compared: list[float] = field(default_factory=list)
    # Values that calls which are done have returned.
    _returned: dict[Result, Tensor] = field(default_factory=dict)

    takes_backward = True
    takes_autocast = True

    @outside_inference_mode
    def call(self, function: Any, args: Any, kwargs: Any, *, module: bool = False, parts: bool = False) -> Any:
        """Record a call as :meth:`Tape.call` does, on the loop's present tape if this one is closed."""
        if module and isinstance(function, nn.Module):
            self._modes.setdefault(function, self._mode_of(function))
        if self.closed:
            return self.owner.tape.call(function, args, kwargs, module=module, parts=parts)
        name = getattr(function, "__name__", "")
        # A 0-d result has no views, so that nothing else sees the change.
        if name in _IN_PLACE and isinstance(args[0], Deferred) and not args[0].dim():
            return self._rebound(args[0], super().call(getattr(Tensor, _IN_PLACE[name]), args, kwargs))
        try:
            return super().call(function, args, kwargs, module=module, parts=parts)
        except CaptureError:
            values = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Deferred)]
            if module or any(leaf.requires_grad and torch.is_grad_enabled() for leaf in values):
                raise
            # Values for the user to look at: this rank's rows.
            args, kwargs = values_of((args, dict(kwargs)))
            return function(*args, **kwargs)

    def _rebound(self, old: Deferred, new: Any) -> Any:
        """Let every name of ``old`` mean the new result; return it."""
        if not isinstance(new, Deferred) or new.requires_grad != old.requires_grad or new.dtype != old.dtype:
            return new
        if isinstance(old.tape, LoopTape) and old.tape is self:
            self.calls[old.result.call].results.pop(old.result.leaf, None)
        old.result, old.meta, old.tape, old.value, old.freed = new.result, new.meta, self, None, False
        self.calls[new.result.call].results[new.result.leaf] = weakref.ref(old)
        return old

    def takes_mode(self, function: Any) -> bool:
        """Return whether a module is in the same mode as in its other calls on the tape."""
        return function not in self._modes or self._modes[function] == self._mode_of(function)

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Put the modules into the modes in which they were called, training or evaluation."""
        now = {module: self._mode_of(module) for module in self._modes}
        changed = [module for module, mode in self._modes.items() if mode != now[module]]
        for module in changed:
            self._set_mode(module, self._modes[module])
        try:
            yield
        finally:
            for module in changed:
                self._set_mode(module, now[module])

    def _mode_of(self, module: nn.Module) -> tuple[bool, ...]:
        return tuple([one.training for one in self.owner.modules_of(module)])

    def _set_mode(self, module: nn.Module, mode: Sequence[bool]) -> None:
        for one, training in zip(self.owner.modules_of(module), mode, strict=True):
            one.training = training

    def is_over(self, deferred: Deferred) -> bool:
        """Return whether operators on the tensor compute with its value: it is a number of the whole batch."""
        if not self.finished or deferred.value is None:
            return False
        return deferred.meta.batch_dim is None and not self._carries_gradient(deferred)

    @outside_inference_mode
    def value(self, deferred: Deferred) -> Tensor:
        """Return the value of a deferred tensor, computing it if necessary."""
        if deferred.value is not None:
            return deferred.value
        value = self.owner.read(self, deferred)
        # A result may have become an ordinary tensor.
        if isinstance(deferred, Deferred):
            deferred.value = value
        return value

    def finish(self, values: Mapping[Result, Tensor]) -> None:
        """Give results their values. Numbers of the whole batch become ordinary tensors."""
        alive = [tensor for tensor in self.alive() if self._stays(tensor)]
        for tensor in alive:
            tensor.value = values.get(tensor.result, tensor.value)
            self.calls[tensor.result.call].results.pop(tensor.result.leaf)
        super().finish(values)

    def free(self) -> None:
        """Mark the results that a ``backward()`` on this tape went through."""
        calls = set().union(*(self.with_gradient(event.loss) for event in self.events.values() if event.loss))
        for call in calls:
            for reference in self.calls[call].results.values():
                if (deferred := reference()) is not None:
                    deferred.freed = True

    def backward(self, loss: Deferred, *args: Any, **kwargs: Any) -> None:
        """Record ``loss.backward()``. With a gradient it is that of the sum of their product.

        Raises:
            InputError: the loss is not a scalar that depends on trained parameters, or was used before.
            CaptureError: an argument is not supported.
        """
        if (gradient := kwargs.pop("gradient", None)) is not None and not loss.freed:
            loss = (loss * gradient.detach()).sum()
        if self.closed:
            loss = self._reopened(loss)
        tape = loss.tape
        assert isinstance(tape, LoopTape)
        tape._check_loss(loss, args, kwargs)
        parameters = tape._parameters(tape.with_gradient(loss.result))
        touches = self.owner.trained_by(parameters)
        if not touches:
            raise InputError(f"loss.backward(): no prepared optimizer trains what the loss depends on{here()}")
        tape._record(backward_call(loss.result, bool(kwargs.get("retain_graph"))), Event(touches, loss.result))
        tape.losses.append(loss.result)
        self.owner.note_untrained(parameters)

    def edit(
        self,
        function: Callable[..., Any],
        parameters: Sequence[nn.Parameter],
        trained: set[int],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Record a call of ``function(parameters, *args, **kwargs)`` that edits gradients of these optimizers.

        Returns:
            The 0-d result, deferred.
        """
        names = [name for parameter in parameters if (name := self.names(parameter)) is not None]
        numbers = [self._argument(argument, False) if isinstance(argument, Tensor) else argument for argument in args]
        call = self.owner.edits.call(function, names, numbers, kwargs, parameters[0])
        number = self._record(call, Event(trained))
        result = Deferred(call.outcome.leaves[0], self, Result(number, 0))
        call.results[0] = weakref.ref(result)
        return result

    def clear(self, optimizer: int) -> None:
        """Discard the gradients of an optimizer that were recorded so far."""
        for event in self.events.values():
            event.cleared.add(optimizer)
        self.losses = [event.loss for event in self.events.values() if event.loss and event.touches - event.cleared]

    def program_calls(self, wanted: Iterable[Result], optimizers: Iterable[int]) -> list[int]:
        """Return the calls of a program, in order: those of ``wanted``, gradients of optimizers, and side effects."""
        used = {number for number, event in self.events.items() if event.concerns(optimizers)} - self.done
        needed = self.with_ancestors({result.call for result in wanted} | used)
        return sorted(self.with_ancestors(needed | self.effects()))

    def effects(self) -> set[int]:
        """Return the calls that write to buffers or draw random numbers, and are still to be run."""
        calls = ((n, call) for n, call in enumerate(self.calls) if n not in self.done)
        return {n for n, call in calls if (call.outcome.writes and not call.again) or call.outcome.draws}

    def mark_done(self, calls: Iterable[int], values: Mapping[Result, Tensor]) -> None:
        """Note that calls ran before the step, and the values that they returned."""
        for number in calls:
            self.done.add(number)
            self.calls[number] = replace(self.calls[number], again=True)
        self._returned |= values
        for tensor in self.alive():
            tensor.value = values.get(tensor.result, tensor.value)

    def take_values(self) -> None:
        """Let calls take values of calls that are done, except where ``backward()`` is to go through these."""
        if not self.done:
            return
        losses = [e.loss for n, e in self.events.items() if e.loss and n not in self.done]
        backward = set().union(*map(self.with_gradient, losses))
        for number, call in enumerate(self.calls):
            if number in self.done or not any(source in self.done for source in call.sources()):
                continue
            if number not in backward | self.events.keys() and self._combines_numbers(call):
                self.mark_done([number], self._computed(call, number))
                continue
            arguments = tuple(
                self._as_input(argument)
                if isinstance(argument, Result)
                and argument in self._returned
                and not (number in backward and self.meta(argument).requires_grad)
                else argument
                for argument in call.arguments
            )
            self.calls[number] = replace(call, arguments=arguments)

    @contextlib.contextmanager
    def taking(self, values: Mapping[Result, Tensor], calls: Iterable[int]) -> Iterator[None]:
        """Let calls take these values of results inside the block."""
        recorded, self.calls = self.calls, list(self.calls)
        self._returned |= values
        inputs = {result: self._as_input(result) for result in values}
        for number in calls:
            call = self.calls[number]
            arguments = tuple(inputs.get(a, a) if isinstance(a, Result) else a for a in call.arguments)
            self.calls[number] = replace(call, arguments=arguments)
        try:
            yield
        finally:
            self.calls = recorded

    def _computed(self, call: Call, number: int) -> dict[Result, Tensor]:
        """Compute a call on numbers; note those from outside the step."""
        inputs = {a: self.tensors[a.number] for a in call.arguments if isinstance(a, RealTensor)}
        self.compared += map(float, inputs.values())
        known: dict[Any, Tensor] = {**self._returned, **inputs}
        values = [known[a] if isinstance(a, (Result, RealTensor)) else a for a in call.arguments]
        args, kwargs = pytree.tree_unflatten(values, call.tree)
        device = next(iter(known.values())).device.type
        with torch.no_grad(), autocast_of(call, device):
            leaves = pytree.tree_leaves(call.function(*args, **kwargs))
        return {Result(number, n): leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}

    def _combines_numbers(self, call: Call) -> bool:
        """Return whether a call only computes with numbers that are known, as a sum of losses does."""
        metas = [leaf for leaf in call.outcome.leaves if isinstance(leaf, Meta)]
        for argument in call.arguments:
            if isinstance(argument, Result):
                metas.append(self.meta(argument))
            elif isinstance(argument, RealTensor) and self.tensors[argument.number].dim():
                return False
        known = all(argument in self._returned for argument in call.arguments if isinstance(argument, Result))
        plain = not call.module and not any(isinstance(argument, Named) for argument in call.arguments)
        return known and plain and not any(meta.shape for meta in metas)

    def _as_input(self, result: Result) -> RealTensor:
        """Add the value of a result to the real tensors."""
        self._add(self._returned[result], "whole" if self.meta(result).batch_dim is None else "part")
        return RealTensor(len(self.tensors) - 1)

    def with_gradient_ancestors(self, calls: Iterable[int]) -> list[int]:
        """Return calls, and those before that ``backward()`` goes through again, in order.

        Raises:
            CaptureError: the latter draw random numbers.
        """
        ancestors = self.with_ancestors(calls)
        if any(self.calls[number].outcome.draws for number in ancestors & self.done):
            raise CaptureError(
                f"backward() goes through a result that draws random numbers and was computed before{here()}\n"
                "A value or a gradient was read between two calls of backward() on it: read it after the second."
            )
        return sorted(ancestors)

    def has_effects(self) -> bool:
        """Return whether a call writes to buffers, as batch norm in training does."""
        return any(call.outcome.writes and not call.again for call in self.calls)

    def with_ancestors(self, calls: Iterable[int]) -> set[int]:
        """Return these calls and their ancestors. An edit depends on every ``backward()`` and edit before it."""
        calls = set(calls)
        edits = [number for number in calls if number in self.events and self.events[number].loss is None]
        if edits:
            touched = self.events[max(edits)]
            earlier = {n for n, event in self.events.items() if n < max(edits) and event.concerns(touched.touches)}
            calls |= earlier - self.done
        return super().with_ancestors(calls)

    def with_gradient(self, result: Result) -> set[int]:
        """Return the calls that ``backward()`` from a result goes through."""
        numbers = {result.call}
        for number in range(result.call, -1, -1):
            if number in numbers:
                numbers |= {
                    argument.call
                    for argument in self.calls[number].arguments
                    if isinstance(argument, Result) and self.meta(argument).requires_grad
                }
        return numbers

    def check_inputs(self) -> None:
        """Raise an InputError if the loop has written to an input of a recorded call.

        Raises:
            InputError: with advice.
        """
        for tensor, version in zip(self.tensors, self._versions, strict=True):
            if _torch.version(tensor) != version:
                raise InputError(
                    f"a tensor of shape {tuple(tensor.shape)} that a recorded call takes was changed in place before "
                    f"{words().step}\nThe call is computed in the step: make a new tensor, or pass a copy (clone())."
                )

    def _check_loss(self, loss: Deferred, args: Any, kwargs: Mapping[str, Any]) -> None:
        options = {key: value for key, value in kwargs.items() if key != "retain_graph" and value not in (None, False)}
        if any(argument is not None for argument in args) or options:
            raise CaptureError(
                f"loss.backward() with {', '.join(options) or 'a gradient'} cannot be recorded{here()}\n"
                "Multiply the loss instead; for gradients of gradients write the step as a zg.ZeroGraph."
            )
        check_scalar_loss(loss, f"loss.backward() on a tensor of shape {tuple(loss.shape)}", here)
        if loss.freed or loss.result in self.losses:
            raise InputError(
                f"loss.backward() was called twice on one loss{here()}\nMultiply it by 2 if you intend it."
            )

    def _reopened(self, loss: Deferred) -> Deferred:
        """Return a result of an earlier step on the present tape."""
        tape = self.owner.tape
        if loss.freed:
            self._check_loss(loss, (), {})
        return tape._carried(loss)

    def _record(self, call: Call, event: Event) -> int:
        number = len(self.calls)
        self.calls.append(call)
        self.events[number] = event
        return number

    def _parameters(self, calls: Iterable[int]) -> list[nn.Parameter]:
        """Return the parameters that calls compute with."""
        found: list[nn.Parameter] = []
        by_name = self.owner.parameters_by_name()
        for number in calls:
            call = self.calls[number]
            if isinstance(call.function, nn.Module):
                found += self.owner.parameters_of(call.function)
            for argument in call.arguments:
                if isinstance(argument, Named):
                    found.append(by_name[argument.name])
        return found

    def _stays(self, tensor: Deferred) -> bool:
        """Return whether a result stays deferred after the step: it is of this rank's rows, or carries a gradient."""
        return tensor.meta.batch_dim is not None or (tensor.requires_grad and not tensor.freed)

    def _carries_gradient(self, deferred: Deferred) -> bool:
        return deferred.requires_grad and torch.is_grad_enabled() and not deferred.freed

    def _taken_over(self, leaf: Any) -> Any:
        if not isinstance(leaf, Deferred) or leaf.tape is self:
            return leaf
        tape = leaf.tape
        if not isinstance(tape, LoopTape) or tape.owner is not self.owner:
            raise CaptureError(
                f"results of models that were prepared in different calls of zg.prepare() are combined{here()}\n"
                "Prepare them in one call."
            )
        if tape._carries_gradient(leaf):
            return self._carried(leaf)
        value = tape.value(leaf)
        self._values[id(value)] = "whole" if leaf.meta.batch_dim is None else "part"
        return value

    def _carried(self, leaf: Deferred) -> Deferred:
        """Record the calls again that computed a result of an earlier step, so that backward() can reach them.

        Raises:
            CaptureError: they would compute something else now.
        """
        old = leaf.tape
        assert isinstance(old, LoopTape)
        calls = sorted(old.with_ancestors({leaf.result.call}))
        now = self.owner.updates()
        changed = {n for n in self.owner.trained_by(old._parameters(calls)) if old.updates.get(n, 0) != now.get(n, 0)}
        draws = any(old.calls[number].outcome.draws for number in calls)
        if changed or draws:
            raise CaptureError(
                f"a result that an earlier {words().step} has computed is used again for {words().backward}{here()}\n"
                + ("Its model draws random numbers" if draws else "Its model was updated since")
                + f": call the model again after {words().step}, or pass detach()."
            )
        place: dict[int, int] = {}
        for number in calls:
            call = old.calls[number]
            arguments = tuple(self._moved(argument, old, place) for argument in call.arguments)
            place[number] = len(self.calls)
            if call.function in old._modes:
                self._modes.setdefault(call.function, old._modes[call.function])
            self.calls.append(replace(call, arguments=arguments, results={}, again=True))
        result = replace(leaf.result, call=place[leaf.result.call])
        leaf.result, leaf.tape = result, self
        self.calls[result.call].results[result.leaf] = weakref.ref(leaf)
        return leaf

    def _moved(self, argument: Any, old: LoopTape, place: Mapping[int, int]) -> Any:
        if isinstance(argument, Result):
            return replace(argument, call=place[argument.call])
        if not isinstance(argument, RealTensor):
            return argument
        tensor, kind = old.tensors[argument.number], old.kinds[argument.number]
        self._add(tensor, kind)
        return RealTensor(len(self.tensors) - 1)

    def _add(self, tensor: Tensor, kind: Kind | None) -> None:
        self.tensors.append(tensor)
        self.kinds.append(kind)
        self._versions.append(_torch.version(tensor))

    def _argument(self, value: Any, parts: bool) -> Any:
        plain = isinstance(value, Tensor) and not isinstance(value, (Deferred, nn.Parameter))
        # Tensors of inference_mode() have no version: they are copied.
        plain = plain and not value.is_inference()
        key = (id(value), _torch.version(value)) if plain else (0, 0)
        if plain and key in self._inputs:
            return RealTensor(self._inputs[key])
        argument = super()._argument(value, parts)
        if isinstance(argument, RealTensor) and len(self._versions) < len(self.tensors):
            self._numbers.pop(id(value), None)
            self._originals.append(value)
            self._inputs[key] = argument.number
            if value.numel() * value.element_size() <= _COPIED_BYTES or value.is_inference():
                self.tensors[argument.number] = value.detach().clone()
            self._versions.append(_torch.version(self.tensors[argument.number]))
            if id(value) in self._values:
                self.kinds[argument.number] = self._values[id(value)]
        return argument

    def _sizes(self, arguments: Sequence[Any]) -> set[int]:
        return {size or _PRETENDED_ROWS for size in super()._sizes(arguments)}

    def _operand(self, argument: Any, sizes: set[int]) -> Any:
        operand = super()._operand(argument, sizes)
        if isinstance(argument, RealTensor) and operand.meta.shape and not operand.meta.shape[0]:
            shape = (_PRETENDED_ROWS, *operand.meta.shape[1:])
            operand = replace(operand, meta=replace(operand.meta, shape=shape, whole=shape), likely="part")
        return operand


_IN_PLACE = {"add_": "add", "sub_": "sub", "mul_": "mul", "div_": "div"}
_IN_PLACE |= {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div", "__idiv__": "div"}
