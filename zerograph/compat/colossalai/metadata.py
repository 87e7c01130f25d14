"""What a recorded call returns, known from running it once on fake tensors: on this rank's part, and on the batch.

The user's code sees this rank's part, the step computes with the global batch. Where a call would mean one thing here
and another there, it is refused, on the user's own line: see :mod:`.batchwise`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.capture.guards import module_guards
from zerograph.capture.substitutes import substituted
from zerograph.compat.colossalai import batchwise, counts
from zerograph.compat.colossalai.deferred import Meta, name_of
from zerograph.compat.colossalai.tape import Kind, Named, Operand, Outcome
from zerograph.compiler.members import Members
from zerograph.errors import CaptureError


def patched(function: Any) -> Any:
    """Return the function that replaces one of ``torch.nn.functional`` while a step is traced."""
    own = getattr(function, "__module__", None) == F.__name__
    return getattr(F, function.__name__, function) if own else function


@dataclass(eq=False)
class Knowledge:
    """Outcomes of calls, each found out once.

    Attributes:
        members: of the graph that is to hold the calls.
        parts: into how many parts the batch is cut, on ranks beside each other and calls one after another.
        amp_dtype: what the step computes in, if not in the parameters' own dtype.
    """

    members: Callable[[], Members]
    parts: Callable[[], int]
    amp_dtype: Callable[[], torch.dtype | None]
    warn: Callable[[str], None]
    _known: dict[Hashable, Outcome] = field(default_factory=dict)

    def __call__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        tree: pytree.TreeSpec,
        with_gradients: bool,
        opaque: bool,
    ) -> Outcome:
        """Return the outcome of ``function``; an ``opaque`` one, model or criterion, takes the whole batch.

        Raises:
            CaptureError: it writes to a tensor, makes shapes of values, or means something else on the whole batch.
        """
        facts = module_guards(function) if isinstance(function, nn.Module) else ()
        where = id(function) if opaque else function
        shown = tuple(_key(one) for one in arguments)
        key = (where, facts, shown, tree, with_gradients, self.parts(), self.amp_dtype())
        if (found := self._known.get(key)) is None:
            run = _Run(self.members(), function, tree, with_gradients, self.amp_dtype(), opaque)
            found = self._known[key] = self._found(run, arguments)
        if not opaque:
            counts.look(function, arguments, found.leaves, self.parts(), self.warn)
        return found

    def _found(self, run: _Run, arguments: Sequence[Any]) -> Outcome:
        parts = self.parts()
        part = run(arguments, whole=False)
        problem: CaptureError | None = None
        for kinds in _choices(arguments):
            entering = [_entering(one, kind, parts) for one, kind in zip(arguments, kinds, strict=True)]
            try:
                leaves = _compared(run, part, entering, parts)
            except CaptureError as error:
                problem = problem or error
                continue
            known = [kind for one, kind in zip(arguments, kinds, strict=True) if isinstance(one, Operand) and one.real]
            return Outcome(part.tree, tuple(leaves), part.draws, tuple(known))
        assert problem is not None
        raise problem


def _compared(run: _Run, part: _Result, entering: Sequence[Any], parts: int) -> list[Any]:
    """Return the call's leaves if it means the same on the whole batch as on this rank's part."""
    name = name_of(run.function)
    try:
        whole = part if parts == 1 else run(entering, whole=True)
    except CaptureError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
        raise CaptureError(
            f"{name} fits this rank's part of the batch, but not the whole batch, of which the step is made"
            f"{batchwise.here()}\n  on the whole: {str(error).strip().splitlines()[0]}\n"
            f"{_taken(entering, run.tree) if run.opaque else ''}"
            "Sizes written as numbers are those of a part: use -1, flatten() or mean() instead."
        ) from None
    if whole.tree != part.tree:
        batchwise.refuse(f"{name} returns a different number of results for the whole batch than for this rank's part")
    leaves = [
        Meta(tuple(one.shape), tuple(other.shape), one.dtype, one.device, one.requires_grad)
        if isinstance(one, Tensor)
        else one
        for one, other in zip(part.leaves, whole.leaves, strict=True)
    ]
    if parts > 1:
        leaves = [counts.comes(run.function, entering, one, opaque=run.opaque) for one in leaves]
    if run.opaque:
        # What compares samples with each other there is returned whole.
        return [
            replace(one, shape=one.whole) if isinstance(one, Meta) and not one.parted(parts) else one for one in leaves
        ]
    if parts > 1:
        metas = [one.meta if isinstance(one, Operand) else one for one in entering]
        batchwise.check(run.function, metas, run.tree, leaves, parts)
    return leaves


def _taken(entering: Sequence[Any], tree: pytree.TreeSpec) -> str:
    """List the model's or criterion's arguments that are taken as parts of the batch, with advice."""
    args, kwargs = pytree.tree_unflatten(list(entering), tree)
    named = [(f"argument {n + 1}", one) for n, one in enumerate(args)] + [(f"{k}=", v) for k, v in kwargs.items()]
    lines = [
        f"  {name} of shape {leaf.meta.shape} was taken as this rank's part of the batch\n"
        for name, one in named
        for leaf in pytree.tree_leaves(one)
        if isinstance(leaf, Operand) and leaf.real and leaf.kind == "part"
    ]
    advice = (
        "The batch is the first dimension of all that is given. What is the same for all samples (positions, weights "
        "of classes) is to be a buffer of the model or an attribute of the criterion; what has the batch elsewhere "
        "(states of an LSTM) is to be given with the batch first.\n"
    )
    return "".join(lines) + advice if lines else ""


def _key(argument: Any) -> Hashable:
    if isinstance(argument, slice):
        return "slice", argument.start, argument.stop, argument.step
    try:
        hash(argument)
    except TypeError:
        return type(argument), repr(argument)
    # 1, 1.0 and True are one key of a dict.
    return type(argument), argument


def _choices(arguments: Sequence[Any]) -> Iterator[list[Kind | None]]:
    """Iterate over ways in which real tensors may enter: the likely one, then with one, then all, flipped."""
    operands = [one if isinstance(one, Operand) else None for one in arguments]
    other: dict[Kind, Kind] = {"part": "whole", "whole": "part"}
    likely = [None if one is None else one.kind or one.likely for one in operands]
    yield likely
    free = [n for n, one in enumerate(operands) if one is not None and one.real and one.kind is None]
    for flipped in [*([n] for n in free), *([free] if len(free) > 1 else [])]:
        yield [other[kind] if n in flipped and kind else kind for n, kind in enumerate(likely)]


def _entering(argument: Any, kind: Kind | None, parts: int) -> Any:
    """Return a real tensor's operand with its shape in the step; anything else unchanged."""
    if not isinstance(argument, Operand) or not argument.real:
        return argument
    shape = argument.meta.shape
    whole = (shape[0] * parts, *shape[1:]) if kind == "part" and shape else shape
    return replace(argument, meta=replace(argument.meta, whole=whole), kind=kind)


@dataclass
class _Result:
    tree: pytree.TreeSpec
    leaves: list[Any]
    draws: bool


@dataclass
class _Run:
    """Calls a function on fake tensors."""

    members: Members
    function: Callable[..., Any]
    tree: pytree.TreeSpec
    with_gradients: bool
    amp_dtype: torch.dtype | None
    opaque: bool

    def __call__(self, arguments: Sequence[Any], *, whole: bool) -> _Result:
        """Run on the whole batch, or on one part of it.

        Raises:
            CaptureError: it writes to a tensor, or needs values.
        """
        mode = _torch.fake_mode()
        specs = self.members.specs(self.members.parameters) | self.members.specs(self.members.buffers)
        with mode:
            state = {
                name: nn.Parameter(spec.fake(), spec.requires_grad) if name in self.members.parameters else spec.fake()
                for name, spec in specs.items()
            }
            fakes = [self._fake(one, state, whole=whole) for one in arguments]
        device = next((one.device.type for one in fakes if isinstance(one, Tensor)), "cpu")
        before = [_torch.version(one) for one in fakes if isinstance(one, Tensor)]
        args, kwargs = pytree.tree_unflatten(fakes, self.tree)
        tensors = state | {alias: state[name] for alias, name in self.members.aliases.items()}
        watch = _Watch()
        with (
            mode,
            _torch.without_onednn(),
            substituted(),
            _torch.compiling(),
            _torch.errors_unlogged(),
            _torch.with_tensors(self.members.root, tensors),
            torch.set_grad_enabled(self.with_gradients),
            contextlib.nullcontext() if self.amp_dtype is None else torch.autocast(device, self.amp_dtype),
            watch,
        ):
            result = patched(self.function)(*args, **kwargs)
        after = [_torch.version(one) for one in fakes if isinstance(one, Tensor)]
        tensors_given = [one for one, fake in zip(arguments, fakes, strict=True) if isinstance(fake, Tensor)]
        written = [one for one, a, b in zip(tensors_given, before, after, strict=True) if a != b]
        if any(isinstance(one, Operand) and one.real for one in written) and not self.opaque:
            raise CaptureError(
                f"{name_of(self.function)} writes into a tensor in place what engine.step() has yet to compute"
                f"{batchwise.here()}\nWrite total = total + loss.detach() instead of total += loss.detach(), or move "
                "the line after engine.step()."
            )
        if written and not self.opaque:
            raise CaptureError(
                f"{name_of(self.function)} writes to a tensor in place{batchwise.here()}\n"
                "What the engine returns is computed with engine.step(), and cannot be written to before: write "
                "x = x + y instead of x += y."
            )
        leaves, tree = pytree.tree_flatten(result)
        return _Result(tree, leaves, watch.draws)

    def _fake(self, argument: Any, state: Mapping[str, Tensor], *, whole: bool) -> Any:
        if isinstance(argument, Named):
            return state[argument.name]
        if not isinstance(argument, Operand):
            return argument
        meta = argument.meta
        made = torch.empty(meta.whole if whole else meta.shape, dtype=meta.dtype, device=meta.device)
        # A leaf could not be written to, which is to be noticed.
        return made.requires_grad_().clone() if meta.requires_grad else made


class _Watch(_torch.TorchDispatchMode):
    """Notes whether an operator ran that may draw random numbers, and refuses those that need values."""

    draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        result = None if func in _READS else func(*args, **(kwargs or {}))
        tensors = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]
        if func in _READS or not all(isinstance(size, int) for one in tensors for size in one.shape):
            what = "indexing by a mask" if func is torch.ops.aten.index.Tensor else str(func)
            raise CaptureError(
                f"{what} needs values that engine.step() has yet to compute{batchwise.here()}\n"
                "A step is one graph for all values: use torch.where, multiply by a mask, or look at the values after "
                "engine.step()."
            )
        return result


_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
