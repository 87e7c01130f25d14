"""What is done to deferred tensors, call by call: the tape that becomes ``build()`` of a step.

A *call* is the model's, the criterion's or any operator's. Its arguments are constants, real tensors that enter the
step as inputs, parameters, and what earlier calls made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerograph._torch import pytree
from zerograph.base import source
from zerograph.compat.colossalai.deferred import Deferred, Made, Meta, name_of
from zerograph.errors import CaptureError, InputError

# How a real tensor enters the step: as this rank's part of the batch, or as the same on all ranks.
Kind = Literal["part", "whole"]


@dataclass(frozen=True)
class Given:
    """Real tensor number ``number`` of the tape."""

    number: int


@dataclass(frozen=True)
class Named:
    """A parameter, by its name in the graph."""

    name: str


@dataclass(frozen=True)
class Outcome:
    """What a call returns.

    Attributes:
        tree: how its leaves are nested.
        leaves: :class:`Meta` of each tensor, anything else as it is.
        draws: it draws random numbers.
        kinds: how each real tensor among its arguments enters, in order.
    """

    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]
    draws: bool
    kinds: tuple[Kind | None, ...]


@dataclass(frozen=True)
class Operand:
    """One tensor that a call is made with, as :class:`Knowledge` needs to know it.

    Attributes:
        meta: of a real tensor, ``whole`` is its own shape, and means nothing yet.
        real: it is one; else a call made it.
        kind: of a real tensor how it enters the step; None where that is to be found out.
        likely: how it then probably does.
        number: it stands for a plain number that changes.
    """

    meta: Meta
    real: bool = False
    kind: Kind | None = None
    likely: Kind = "whole"
    number: bool = False


@dataclass(eq=False)
class Call:
    """One call: ``function`` with ``arguments``, flat, of which some are references, nested as ``tree`` says."""

    function: Callable[..., Any]
    module: bool
    arguments: tuple[Any, ...]
    tree: pytree.TreeSpec
    with_gradients: bool
    outcome: Outcome
    line: tuple[str, str]
    made: dict[int, weakref.ref[Deferred]] = field(default_factory=dict)

    def sources(self) -> Iterator[int]:
        """Iterate over the numbers of the calls whose results this call takes."""
        return (one.call for one in self.arguments if isinstance(one, Made))


_ARITHMETIC = ("add", "sub", "mul", "div", "multiply", "divide", "true_divide", "subtract", "__rsub__", "rsub")


class Numbers:
    """Floats in the arithmetic of recorded calls, by where they stand: the first time one differs, it becomes a tensor.

    From then on it is an input: one more compile, then none.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], float] = {}
        self._changing: set[tuple[int, str]] = set()

    def lifted(self, place: int, function: Callable[..., Any], args: Any) -> Any:
        """Return the arguments of call number ``place`` of a tape, with a 0-d tensor for a float that changes."""
        name = getattr(function, "__name__", "")
        if name not in _ARITHMETIC or len(args) != 2:
            return args
        tensor, number = args
        # Narrower ones would round the number; the others count on with it as they would with a constant.
        wide = isinstance(tensor, Deferred) and tensor.dtype in (torch.float32, torch.float64)
        if not wide or not isinstance(number, float):
            return args
        key = place, name
        if self._seen.setdefault(key, number) != number:
            self._changing.add(key)
        if key not in self._changing:
            return args
        return tensor, torch.tensor(number, dtype=tensor.dtype, device=tensor.device)


# Says what a call returns: its function, arguments with Operand for tensors, their nesting; see metadata.py.
Known = Callable[[Callable[..., Any], Sequence[Any], pytree.TreeSpec, bool, bool], Outcome]


@dataclass(eq=False)
class Tape:
    """The calls of one forward, in order.

    Attributes:
        closed: nothing more is recorded: the step, or the accumulation's next call, has begun.
        finished: the step is made: every deferred tensor that is left has its value.
        losses: those that ``engine.backward()`` was called with.
    """

    known: Known
    names: Callable[[nn.Parameter], str | None]
    reader: Callable[[Tape, Sequence[Made]], list[Tensor]]
    numbers: Numbers
    calls: list[Call] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    kinds: list[Kind | None] = field(default_factory=list)
    losses: list[Made] = field(default_factory=list)
    closed: bool = False
    finished: bool = False
    _numbers: dict[int, int] = field(default_factory=dict)

    def call(self, function: Any, args: Any, kwargs: Any, *, module: bool = False, parts: bool = False) -> Any:
        """Record a call; what it returns has deferred tensors.

        Args:
            function: the function that is called.
            args: its positional arguments.
            kwargs: its keyword arguments.
            module: it is the model's or the criterion's, which may write to buffers.
            parts: real tensors among the arguments are this rank's part of the batch.

        Raises:
            CaptureError: the step cannot repeat it.
        """
        if self.closed:
            raise self._over(function)
        if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
            line, code = source.running_line()
            raise CaptureError(
                f"torch.autocast is entered around the engine\n  {line}   {code}\n"
                "The step computes as its configuration says: zero means fp16, bf16 = True bf16, fp16 = False fp32."
            )
        plain, args = args, self.numbers.lifted(len(self.calls), function, args)
        given, tree = pytree.tree_flatten((args, dict(kwargs)))
        if any(isinstance(one, Deferred) and one.tape is not self for one in given):
            given = [self._taken_over(one) for one in given]
        arguments, before = tuple(self._argument(one, parts) for one in given), len(self.calls)
        sizes = self._sizes(arguments)
        operands = [self._operand(one, sizes) for one in arguments]
        if args is not plain:
            operands[1] = replace(operands[1], number=True)
        with_gradients = torch.is_grad_enabled()
        outcome = self.known(function, operands, tree, with_gradients, module)
        for one, kind in zip((a for a in arguments if isinstance(a, Given)), outcome.kinds, strict=True):
            self.kinds[one.number] = kind
        call = Call(function, module, arguments, tree, with_gradients, outcome, source.running_line())
        self.calls.append(call)
        leaves = [
            Deferred(leaf, self, Made(before, number)) if isinstance(leaf, Meta) else leaf
            for number, leaf in enumerate(outcome.leaves)
        ]
        call.made = {n: weakref.ref(leaf) for n, leaf in enumerate(leaves) if isinstance(leaf, Deferred)}
        return pytree.tree_unflatten(leaves, outcome.tree)

    def value(self, one: Deferred) -> Tensor:
        """Return the value of a deferred tensor, computing it if it is not there yet."""
        if one.known is None:
            (one.known,) = self.reader(self, [one.made])
        return one.known

    def finish(self, values: Mapping[Made, Tensor]) -> None:
        """Deferred tensors become ordinary ones, with these values or those that were read before."""
        held = list(self.alive())
        for call in self.calls:
            # A tensor that is weakly referred to cannot be swapped.
            call.made.clear()
        self.closed = self.finished = True
        for one in held:
            one.known = values.get(one.made, one.known)
            if one.known is not None and not weakref.getweakrefs(one):
                # A collective that has just ended may hold on to the value: what is swapped is an alias of it.
                torch.utils.swap_tensors(one, one.known.detach())

    def alive(self) -> Iterator[Deferred]:
        """Iterate over the deferred tensors that are still referenced."""
        for call in self.calls:
            for reference in call.made.values():
                if (found := reference()) is not None:
                    yield found

    def needed(self, wanted: Iterable[Made]) -> list[int]:
        """Return the calls that compute ``wanted``, and other calls with side effects, in order.

        Traces are what modules write to their buffers, and the numbers of the random numbers that come after. A forward
        of which nobody holds any result, nor can come to hold one, leaves none.
        """
        found = self.with_ancestors({one.call for one in wanted})
        live = found | {one.made.call for one in self.alive()} | {one.call for one in self.losses}
        held = set().union(*(part for part in self._connected() if part & live))
        traces = {n for n in held if self.calls[n].module or self.calls[n].outcome.draws}
        return sorted(self.with_ancestors(found | traces))

    def has(self, one: Made) -> bool:
        """Return whether the tape has this tensor: another rank may have recorded something else."""
        leaves = self.calls[one.call].outcome.leaves if 0 <= one.call < len(self.calls) else ()
        return one.leaf < len(leaves) and isinstance(leaves[one.leaf], Meta)

    def meta(self, one: Made) -> Meta:
        """Return the metadata of a tensor on the tape."""
        found: Meta = self.calls[one.call].outcome.leaves[one.leaf]
        return found

    def with_ancestors(self, calls: Iterable[int]) -> set[int]:
        """Return these calls and their ancestors."""
        found = set(calls)
        for number in range(len(self.calls) - 1, -1, -1):
            if number in found:
                found |= set(self.calls[number].sources())
        return found

    def _connected(self) -> list[set[int]]:
        parts: list[set[int]] = []
        for number, call in enumerate(self.calls):
            mine = {number, *call.sources()}
            parts = [part for part in parts if not part & mine] + [mine.union(*(p for p in parts if p & mine))]
        return parts

    def _argument(self, value: Any, parts: bool) -> Any:
        if isinstance(value, Deferred):
            return value.made
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, DTensor):
            raise InputError(
                "a global tensor was given to the engine, which takes this rank's part of the batch as plain tensors\n"
                "Give zg.to_local(x), or write the step as a zg.ZeroGraph, which takes global tensors."
            )
        if isinstance(value, nn.Parameter) and (name := self.names(value)) is not None:
            return Named(name)
        if value.requires_grad:
            line, code = source.running_line()
            raise InputError(
                f"a tensor of shape {tuple(value.shape)} that requires a gradient meets the engine's\n  {line}   {code}"
                "\nIt is computed outside the step, which knows no way back to where it came from. Compute it with the "
                "engine's model or criterion, or give its detach(). A penalty on parameters belongs into the criterion."
            )
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            # Held as long as the tape, so that no other tensor gets its id.
            self.tensors.append(value)
            self.kinds.append("whole" if value.dim() == 0 else "part" if parts else None)
        return Given(number)

    def _sizes(self, arguments: Sequence[Any]) -> set[int]:
        """Return the sizes of the batch dimension, in this call or in the tape's real tensors."""
        metas = [self.meta(one) for one in arguments if isinstance(one, Made)]
        found = {meta.shape[meta.batch_dim] for meta in metas if meta.batch_dim is not None}
        return found | {len(one) for one, kind in zip(self.tensors, self.kinds, strict=True) if kind == "part"}

    def _operand(self, argument: Any, sizes: set[int]) -> Any:
        if isinstance(argument, Made):
            return Operand(self.meta(argument))
        if isinstance(argument, Given):
            tensor = self.tensors[argument.number]
            shape = tuple(tensor.shape)
            likely: Kind = "part" if shape and shape[0] in sizes else "whole"
            return Operand(Meta(shape, shape, tensor.dtype, tensor.device), True, self.kinds[argument.number], likely)
        return argument

    def _taken_over(self, one: Any) -> Any:
        """Return the value of another tape's result, which this tape takes like any tensor."""
        if not isinstance(one, Deferred) or one.tape is self:
            return one
        if one.requires_grad:
            line, code = source.running_line()
            if not isinstance(one.tape, Tape) or one.tape.numbers is not self.numbers:
                raise CaptureError(
                    f"results of two engines are combined, or given from one to the other\n  {line}   {code}\n"
                    "Each engine makes steps of its own. Make one engine of a module that holds both models; give "
                    "detach() of what is only looked at."
                )
            raise CaptureError(
                f"results of two calls of the engine that belong to different parts of an update are combined\n"
                f"  {line}   {code}\n"
                "With gradient accumulation each call has its own loss and its own backward(); give detach() of what "
                "is only looked at."
            )
        return one.tape.value(one)

    def _over(self, function: Any) -> CaptureError:
        line, code = source.running_line()
        return CaptureError(
            f"{name_of(function)} on results of a call of the engine that engine.step() has closed\n  {line}   {code}\n"
            "With gradient accumulation they have values once the update is made; read them, as with .item(), before."
        )
