"""The tape of calls on deferred tensors, which becomes ``build()`` of a step.

A *call* is one of the model, of the criterion or of an operator. Its arguments are constants, real tensors (inputs of
the step), parameters, and results of earlier calls.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerograph._torch import pytree
from zerograph.base import source
from zerograph.errors import CaptureError, InputError
from zerograph.ir.annotate import is_replicated
from zerograph.loops.deferred import Deferred, Meta, Result, name_of
from zerograph.loops.words import Words, speak, words

# How a real tensor enters the step: as this rank's part of the batch, or equal on all ranks.
Kind = Literal["part", "whole"]


@dataclass(frozen=True)
class RealTensor:
    """Real tensor number ``number`` of the tape."""

    number: int


@dataclass(frozen=True)
class Named:
    """A parameter, by its name in the graph."""

    name: str


@dataclass(frozen=True)
class Outcome:
    """The metadata of a call's results.

    Attributes:
        tree: how the leaves are nested.
        leaves: :class:`Meta` for each tensor, other values unchanged.
        draws: whether the call draws random numbers.
        kinds: how each real tensor among the arguments enters the step, in order.
        writes: whether the call writes to buffers of modules.
        shared: calls have this very object only if they have the same function, constants and nesting.
    """

    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]
    draws: bool
    kinds: tuple[Kind | None, ...]
    writes: bool = False
    shared: bool = False


@dataclass(frozen=True)
class Operand:
    """A tensor argument of a call, as :class:`Outcomes` needs it.

    Attributes:
        meta: its metadata. For a real tensor, ``whole`` is its own shape.
        real: whether it is a real tensor, and not the result of a call.
        kind: how a real tensor enters the step; None if that is not known yet.
        likely: the more likely kind.
        number: whether it replaces a plain number that changes.
    """

    meta: Meta
    real: bool = False
    kind: Kind | None = None
    likely: Kind = "whole"
    number: bool = False


@dataclass(eq=False)
class Call:
    """A recorded call of ``function`` with flat ``arguments``, which ``tree`` nests.

    ``again`` marks a call that an earlier step has run: it does not write to buffers a second time. ``autocast`` is the
    dtype of ``torch.autocast`` around it.
    """

    function: Callable[..., Any]
    module: bool
    arguments: tuple[Any, ...]
    tree: pytree.TreeSpec
    with_gradients: bool
    outcome: Outcome
    line: tuple[str, str]
    again: bool = False
    autocast: torch.dtype | None = None
    results: dict[int, weakref.ref[Deferred]] = field(default_factory=dict)

    def sources(self) -> Iterator[int]:
        """Iterate over the numbers of the calls whose results this call takes."""
        return (argument.call for argument in self.arguments if isinstance(argument, Result))


def autocast_now() -> torch.dtype | None:
    """Return the dtype of ``torch.autocast`` around the running code, or None."""
    device = next((device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)), None)
    return None if device is None else torch.get_autocast_dtype(device)


# Functions that compute with a number as they do with a 0-d tensor.
ARITHMETIC = ("add", "sub", "mul", "div", "multiply", "divide", "true_divide", "subtract", "__rsub__", "rsub")


class Numbers:
    """Numbers in the arithmetic of recorded calls. A number becomes a 0-d tensor the first time it changes.

    From then on it is an input of the step: one more compilation, then none.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[Hashable, str], float] = {}
        self._changing: set[tuple[Hashable, str]] = set()

    def lifted(self, place: Hashable, function: Callable[..., Any], args: Any) -> Any:
        """Return the arguments of a call, with a 0-d tensor for a number that changes.

        Args:
            place: equal for calls by the same code: the user's line, and the number of calls on it before.
            function: the function that is called.
            args: its arguments.
        """
        name = getattr(function, "__name__", "")
        if name not in ARITHMETIC or len(args) != 2:
            return args
        tensor, number = args
        # A narrower dtype would round the number; fp32 and fp64 compute with it as with a constant.
        wide = isinstance(tensor, Deferred) and tensor.dtype in (torch.float32, torch.float64)
        if not wide or not isinstance(number, (int, float)) or isinstance(number, bool):
            return args
        key = place, name
        if self._seen.setdefault(key, number) != number:
            self._changing.add(key)
        if key not in self._changing:
            return args
        return tensor, torch.tensor(number, dtype=tensor.dtype, device=tensor.device)


# Returns the outcome of a call, from its function, arguments (Operand for tensors) and their nesting; see metadata.py.
FindOutcome = Callable[[Callable[..., Any], Sequence[Any], pytree.TreeSpec, bool, bool], Outcome]


@dataclass(eq=False)
class Tape:
    """The calls of one forward, in order.

    Attributes:
        outcome_of: finds the metadata of a call's results.
        names: returns a parameter's name in the graph.
        reader: computes values before the step.
        numbers: numbers of earlier tapes.
        calls: the recorded calls.
        tensors: the real tensors among their arguments.
        kinds: how each real tensor enters the step; None if that is not known yet.
        losses: the arguments of ``backward()``.
        words: the names of the loop's calls.
        closed: no more calls are recorded, because the step or the accumulation's next call has begun.
        finished: the step has run, and every remaining deferred tensor has its value.
    """

    outcome_of: FindOutcome
    names: Callable[[nn.Parameter], str | None]
    reader: Callable[[Tape, Sequence[Result]], list[Tensor]]
    numbers: Numbers
    calls: list[Call] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    kinds: list[Kind | None] = field(default_factory=list)
    losses: list[Result] = field(default_factory=list)
    words: Words = field(default_factory=Words)
    closed: bool = False
    finished: bool = False
    _numbers: dict[int, int] = field(default_factory=dict)

    def call(self, function: Any, args: Any, kwargs: Any, *, module: bool = False, parts: bool = False) -> Any:
        """Record a call, and return its results as deferred tensors.

        Args:
            function: the function that is called.
            args: its positional arguments.
            kwargs: its keyword arguments.
            module: the function is the model or the criterion, which may write to buffers.
            parts: real tensors among the arguments are this rank's part of the batch.

        Raises:
            CaptureError: the step cannot repeat it.
        """
        speak(self.words)
        if self.closed:
            raise self._over(function)
        at = source.running_line()
        if (autocast := autocast_now()) is not None and not self.takes_autocast:
            raise CaptureError(
                f"torch.autocast is entered around {words().model}\n  {at[0]}   {at[1]}\n{words().precision}"
            )
        place = at[0], sum(1 for _ in itertools.takewhile(lambda call: call.line == at, reversed(self.calls)))
        plain, args = args, self.numbers.lifted(place, function, args)
        leaves, tree = pytree.tree_flatten((args, dict(kwargs)))
        if any(isinstance(leaf, Deferred) and leaf.tape is not self for leaf in leaves):
            leaves = [self._taken_over(leaf) for leaf in leaves]
        arguments, number = tuple(self._argument(leaf, parts) for leaf in leaves), len(self.calls)
        sizes = self._sizes(arguments)
        operands = [self._operand(argument, sizes) for argument in arguments]
        if args is not plain:
            operands[1] = replace(operands[1], number=True)
        with_gradients = torch.is_grad_enabled()
        outcome = self.outcome_of(function, operands, tree, with_gradients, module)
        for tensor, kind in zip((a for a in arguments if isinstance(a, RealTensor)), outcome.kinds, strict=True):
            self.kinds[tensor.number] = kind
        call = Call(function, module, arguments, tree, with_gradients, outcome, at, autocast=autocast)
        self.calls.append(call)
        results = [
            Deferred(leaf, self, Result(number, n)) if isinstance(leaf, Meta) else leaf
            for n, leaf in enumerate(outcome.leaves)
        ]
        call.results = {n: weakref.ref(leaf) for n, leaf in enumerate(results) if isinstance(leaf, Deferred)}
        return pytree.tree_unflatten(results, outcome.tree)

    def value(self, deferred: Deferred) -> Tensor:
        """Return the value of a deferred tensor, computing it if necessary."""
        if deferred.value is None:
            (deferred.value,) = self.reader(self, [deferred.result])
        return deferred.value

    takes_backward = False
    takes_autocast = False

    def is_over(self, deferred: Deferred) -> bool:
        """Return whether operators on the tensor compute with its value, because the step is over."""
        return self.finished and deferred.value is not None

    def backward(self, loss: Deferred, *args: Any, **kwargs: Any) -> None:
        """Record ``loss.backward()``."""
        raise NotImplementedError

    def finish(self, values: Mapping[Result, Tensor]) -> None:
        """Turn deferred tensors into ordinary ones, with these values or those that were read before."""
        alive = list(self.alive())
        for call in self.calls:
            # A tensor with weak references cannot be swapped.
            call.results.clear()
        self.closed = self.finished = True
        for deferred in alive:
            deferred.value = values.get(deferred.result, deferred.value)
            if deferred.value is not None and not weakref.getweakrefs(deferred):
                # A collective that has just ended may still refer to the value: swap an alias of it.
                torch.utils.swap_tensors(deferred, deferred.value.detach())

    def alive(self) -> Iterator[Deferred]:
        """Iterate over the deferred tensors that are still referenced."""
        for call in self.calls:
            for reference in call.results.values():
                if (deferred := reference()) is not None:
                    yield deferred

    def needed(self, wanted: Iterable[Result]) -> list[int]:
        """Return the calls that compute ``wanted``, and other calls with side effects, in order.

        Side effects are writes of modules to their buffers, and random draws, which change the numbers of later draws.
        A forward without a referenced result or a loss has no side effects.
        """
        needed = self.with_ancestors({result.call for result in wanted})
        live = needed | {deferred.result.call for deferred in self.alive()} | {loss.call for loss in self.losses}
        connected = set().union(*(part for part in self._connected() if part & live))
        effects = {n for n in connected if self.calls[n].module or self.calls[n].outcome.draws}
        return sorted(self.with_ancestors(needed | effects))

    def has(self, result: Result) -> bool:
        """Return whether the tape has this result: another rank may have recorded something else."""
        leaves = self.calls[result.call].outcome.leaves if 0 <= result.call < len(self.calls) else ()
        return result.leaf < len(leaves) and isinstance(leaves[result.leaf], Meta)

    def meta(self, result: Result) -> Meta:
        """Return the metadata of a result on the tape."""
        meta: Meta = self.calls[result.call].outcome.leaves[result.leaf]
        return meta

    def with_ancestors(self, calls: Iterable[int]) -> set[int]:
        """Return these calls and their ancestors."""
        numbers = set(calls)
        for number in range(len(self.calls) - 1, -1, -1):
            if number in numbers:
                numbers |= set(self.calls[number].sources())
        return numbers

    def _connected(self) -> list[set[int]]:
        parts: list[set[int]] = []
        for number, call in enumerate(self.calls):
            mine = {number, *call.sources()}
            parts = [part for part in parts if not part & mine] + [mine.union(*(p for p in parts if p & mine))]
        return parts

    def _argument(self, value: Any, parts: bool) -> Any:
        if isinstance(value, Deferred):
            return value.result
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, DTensor):
            raise InputError(
                f"a global tensor was given to {words().model}, which takes this rank's part of the batch as plain "
                "tensors\n"
                "Pass zg.to_local(x), or write the step as a zg.ZeroGraph, which takes global tensors."
            )
        if isinstance(value, nn.Parameter) and (name := self.names(value)) is not None:
            return Named(name)
        if value.requires_grad:
            line, code = source.running_line()
            raise InputError(
                f"a tensor of shape {tuple(value.shape)} that requires a gradient meets a result of "
                f"{words().model}\n  {line}   {code}"
                "\nIt was computed outside the step, so backward cannot reach it. Compute it in the model or the "
                "criterion, or pass its detach(). A penalty on parameters belongs into the criterion, and one on "
                "gradients, such as WGAN-GP's, into the build() of a zg.ZeroGraph."
            )
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            # The tape refers to it, so that no other tensor gets its id.
            self.tensors.append(value)
            self.kinds.append("whole" if value.dim() == 0 or is_replicated(value) else "part" if parts else None)
        return RealTensor(number)

    def _sizes(self, arguments: Sequence[Any]) -> set[int]:
        """Return the sizes of the batch dimension, in this call or in the tape's real tensors."""
        metas = [self.meta(argument) for argument in arguments if isinstance(argument, Result)]
        sizes = {meta.shape[meta.batch_dim] for meta in metas if meta.batch_dim is not None}
        return sizes | {len(tensor) for tensor, kind in zip(self.tensors, self.kinds, strict=True) if kind == "part"}

    def _operand(self, argument: Any, sizes: set[int]) -> Any:
        if isinstance(argument, Result):
            return Operand(self.meta(argument))
        if isinstance(argument, RealTensor):
            tensor = self.tensors[argument.number]
            shape = tuple(tensor.shape)
            likely: Kind = "part" if shape and shape[0] in sizes else "whole"
            return Operand(Meta(shape, shape, tensor.dtype, tensor.device), True, self.kinds[argument.number], likely)
        return argument

    def _taken_over(self, leaf: Any) -> Any:
        """Return the value of another tape's result, which this tape takes as a real tensor."""
        if not isinstance(leaf, Deferred) or leaf.tape is self:
            return leaf
        if leaf.requires_grad:
            line, code = source.running_line()
            if not isinstance(leaf.tape, Tape) or leaf.tape.numbers is not self.numbers:
                raise CaptureError(
                    f"results of two engines are combined, or given from one to the other\n  {line}   {code}\n"
                    "Each makes its own steps. Create one for a module that contains both models; pass "
                    "detach() of values that are only looked at."
                )
            raise CaptureError(
                f"results of two calls of {words().model} that belong to different parts of an update are combined\n"
                f"  {line}   {code}\n"
                "With gradient accumulation each call has its own loss and its own backward(); pass detach() of values "
                "that are only looked at."
            )
        return leaf.tape.value(leaf)

    def _over(self, function: Any) -> CaptureError:
        line, code = source.running_line()
        return CaptureError(
            f"{name_of(function)} on results of a call of {words().model} that {words().step} has closed\n"
            f"  {line}   {code}\n"
            "With gradient accumulation they have values after the update; read them, as with .item(), before."
        )


def check_scalar_loss(loss: Deferred, called: str, where: Callable[[], str] = str) -> None:
    """Check that ``backward()`` can start at a loss.

    Args:
        loss: the loss.
        called: the beginning of the message: the call, and what it was given.
        where: returns the user's line, as the message shows it; called only for the message.

    Raises:
        InputError: the loss is not a scalar, or depends on no trained parameter.
    """
    if loss.numel() != 1 or not loss.requires_grad:
        raise InputError(
            f"{called}{', which needs no gradient' if loss.numel() == 1 else ''}{where()}\n"
            "It takes a scalar that depends on trained parameters: take the mean or sum, and do not detach it."
        )
