"""Find the metadata of a recorded call's results by running it on fake tensors, for a part and for the whole batch.

The user's code sees this rank's part, and the step computes with the global batch. A call that would mean something
else there is an error with the user's line: see :mod:`.batchwise`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.capture.modes import ADVICE_BY_OPERATOR, NoReads
from zerograph.capture.random_operators import known_truth, note_comparison
from zerograph.capture.substitutes import substituted
from zerograph.compiler.members import Members, check_devices
from zerograph.errors import CaptureError
from zerograph.loops import batchwise, counts
from zerograph.loops.deferred import Meta, name_of, replaying
from zerograph.loops.tape import Kind, Named, Operand, Outcome
from zerograph.loops.words import words


def patched(function: Any) -> Any:
    """Return the function that replaces one of ``torch.nn.functional`` while a step is traced."""
    own = getattr(function, "__module__", None) == F.__name__
    return getattr(F, function.__name__, function) if own else function


@dataclass(eq=False)
class Outcomes:
    """A cache of the outcomes of calls.

    Attributes:
        members: returns the members of the graph that will contain the calls.
        parts: returns the number of parts of the batch, over ranks and over the calls of an update.
        amp_dtype: returns the dtype of mixed precision, or None.
        warn: issues a warning.
    """

    members: Callable[[], Members]
    parts: Callable[[], int]
    amp_dtype: Callable[[], torch.dtype | None]
    warn: Callable[[str], None]
    _cache: dict[Hashable, Outcome] = field(default_factory=dict)

    def __call__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        tree: pytree.TreeSpec,
        with_gradients: bool,
        opaque: bool,
    ) -> Outcome:
        """Return the outcome of a call.

        Args:
            function: the function that is called.
            arguments: its arguments, flat, with :class:`Operand` for tensors.
            tree: how the arguments are nested.
            with_gradients: whether gradients are enabled.
            opaque: the function is the model or the criterion, which may treat the batch as a whole.

        Raises:
            CaptureError: the call writes to a tensor, its shapes depend on values, or it means something else on the
                whole batch.
        """
        facts = self.members().module_facts if isinstance(function, nn.Module) else ()
        where = id(function) if opaque else function
        keys = tuple(_key(argument) for argument in arguments)
        key = (where, facts, keys, tree, with_gradients, self.parts(), self.amp_dtype())
        if (outcome := self._cache.get(key)) is None:
            if opaque:
                check_devices(self.members(), _placed(arguments, tree))
            run = _Run(self.members(), function, tree, with_gradients, self.amp_dtype(), opaque)
            outcome = self._cache[key] = self._outcome(run, arguments)
        if not opaque:
            counts.check_division(function, arguments, outcome.leaves, self.parts(), self.warn)
        return outcome

    def _outcome(self, run: _Run, arguments: Sequence[Any]) -> Outcome:
        parts = self.parts()
        with _batch_norm_of_a_part() if parts > 1 else contextlib.nullcontext():
            part = run(arguments, whole=False)
        problem: CaptureError | None = None
        for kinds in _choices(arguments):
            entering = [_entering(argument, kind, parts) for argument, kind in zip(arguments, kinds, strict=True)]
            try:
                leaves = _compared(run, part, entering, parts)
            except CaptureError as error:
                problem = problem or error
                continue
            real = [isinstance(argument, Operand) and argument.real for argument in arguments]
            kinds_of_real = tuple(itertools.compress(kinds, real))
            return Outcome(part.tree, tuple(leaves), part.draws, kinds_of_real, part.writes, shared=True)
        assert problem is not None
        raise problem


@contextlib.contextmanager
def _batch_norm_of_a_part() -> Iterator[None]:
    """Let batch norm take a part of one row, which has no variance: the step computes that of the whole batch."""
    plain = F.batch_norm

    def of_a_part(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.numel() == input.size(1):
            return plain(torch.cat([input, input]), *args, **kwargs)[:1]
        return plain(input, *args, **kwargs)

    with patch.object(F, "batch_norm", of_a_part):
        yield


def _compared(run: _Run, part: _Result, entering: Sequence[Any], parts: int) -> list[Any]:
    """Return the call's result leaves, or raise if it means something else on the whole batch than on a part."""
    name = name_of(run.function)
    try:
        whole = part if parts == 1 else run(entering, whole=True)
    except CaptureError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
        raise CaptureError(
            f"{name} fits this rank's part of the batch, but not the whole batch, which the step computes"
            f"{batchwise.here()}\n  on the whole: {str(error).strip().splitlines()[0]}\n"
            f"{_taken(entering, run.tree) if run.opaque else ''}"
            "Sizes written as numbers are those of a part: use -1, flatten() or mean() instead."
        ) from None
    if whole.tree != part.tree:
        batchwise.refuse(f"{name} returns a different number of results for the whole batch than for this rank's part")
    leaves = [
        Meta(
            tuple(leaf.shape),
            tuple(whole_leaf.shape),
            leaf.dtype,
            leaf.device,
            leaf.requires_grad,
            counts.reduction_of(leaf) if run.opaque else None,
        )
        if isinstance(leaf, Tensor)
        else leaf
        for leaf, whole_leaf in zip(part.leaves, whole.leaves, strict=True)
    ]
    if parts > 1:
        leaves = [counts.mark_reduction(run.function, entering, leaf, opaque=run.opaque) for leaf in leaves]
    if run.opaque:
        # A result that compares samples with each other is whole.
        return [
            replace(leaf, shape=leaf.whole) if isinstance(leaf, Meta) and not leaf.parted(parts) else leaf
            for leaf in leaves
        ]
    if parts > 1:
        metas = [argument.meta if isinstance(argument, Operand) else argument for argument in entering]
        batchwise.check(run.function, metas, run.tree, leaves, parts)
    return leaves


def _taken(entering: Sequence[Any], tree: pytree.TreeSpec) -> str:
    """List the model's or criterion's arguments that are taken as parts of the batch, with advice."""
    args, kwargs = pytree.tree_unflatten(list(entering), tree)
    named = [(f"argument {n + 1}", value) for n, value in enumerate(args)] + [(f"{k}=", v) for k, v in kwargs.items()]
    lines = [
        f"  {name} of shape {leaf.meta.shape} was taken as this rank's part of the batch\n"
        for name, value in named
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Operand) and leaf.real and leaf.kind == "part"
    ]
    advice = (
        "The batch is the first dimension of all tensors that are passed. Make a tensor that is the same for all "
        "samples (positions, class weights) a buffer of the model or an attribute of the criterion; pass a tensor that "
        "has the batch elsewhere (states of an LSTM) with the batch first.\n"
    )
    return "".join(lines) + advice if lines else ""


def _key(argument: Any) -> Hashable:
    if isinstance(argument, slice):
        return "slice", argument.start, argument.stop, argument.step
    try:
        hash(argument)
    except TypeError:
        return type(argument), repr(argument)
    # 1, 1.0 and True are the same key of a dict.
    return type(argument), argument


def _choices(arguments: Sequence[Any]) -> Iterator[list[Kind | None]]:
    """Iterate over choices of kinds for real tensors: the likely ones, then with one flipped, then with all flipped."""
    operands = [argument if isinstance(argument, Operand) else None for argument in arguments]
    other: dict[Kind, Kind] = {"part": "whole", "whole": "part"}
    likely = [None if operand is None else operand.kind or operand.likely for operand in operands]
    yield likely
    free = [n for n, operand in enumerate(operands) if operand and operand.real and operand.kind is None]
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
    writes: bool


@dataclass
class _Run:
    """A call of a function on fake tensors."""

    members: Members
    function: Callable[..., Any]
    tree: pytree.TreeSpec
    with_gradients: bool
    amp_dtype: torch.dtype | None
    opaque: bool

    def __call__(self, arguments: Sequence[Any], *, whole: bool) -> _Result:
        """Run on the whole batch, or on one part of it.

        Raises:
            CaptureError: the function writes to a tensor, or needs values.
        """
        mode = _torch.fake_mode()
        specs = self.members.specs(self.members.parameters) | self.members.specs(self.members.buffers)
        with mode:
            state = {
                name: nn.Parameter(spec.fake(), spec.requires_grad) if name in self.members.parameters else spec.fake()
                for name, spec in specs.items()
            }
            fakes = [self._fake(argument, state, whole=whole) for argument in arguments]
        device = next((fake.device.type for fake in fakes if isinstance(fake, Tensor)), "cpu")
        before = [_torch.version(fake) for fake in fakes if isinstance(fake, Tensor)]
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
            NoReads(_read),
            replaying(),
        ):
            result = patched(self.function)(*args, **kwargs)
        after = [_torch.version(fake) for fake in fakes if isinstance(fake, Tensor)]
        operands = [argument for argument, fake in zip(arguments, fakes, strict=True) if isinstance(fake, Tensor)]
        written = [operand for operand, a, b in zip(operands, before, after, strict=True) if a != b]
        if any(isinstance(operand, Operand) and operand.real for operand in written) and not self.opaque:
            raise CaptureError(
                f"{name_of(self.function)} writes a value that {words().step} has yet to compute into a tensor in place"
                f"{batchwise.here()}\nWrite total = total + loss.detach() instead of total += loss.detach(), or move "
                f"the line after {words().step}."
            )
        if written and not self.opaque:
            raise CaptureError(
                f"{name_of(self.function)} writes to a tensor in place{batchwise.here()}\n"
                f"Results of {words().model} are computed by {words().step}, and cannot be written to before: write "
                "x = x + y instead of x += y."
            )
        leaves, tree = pytree.tree_flatten(result)
        buffers = [fake for name, fake in state.items() if name in self.members.buffers]
        return _Result(tree, leaves, watch.draws, any(map(_torch.version, buffers)))

    def _fake(self, argument: Any, state: Mapping[str, Tensor], *, whole: bool) -> Any:
        if isinstance(argument, Named):
            return state[argument.name]
        if not isinstance(argument, Operand):
            return argument
        meta = argument.meta
        fake = torch.empty(meta.whole if whole else meta.shape, dtype=meta.dtype, device=meta.device)
        # Not a leaf: torch would refuse to write to it, before we can report that.
        return fake.requires_grad_().clone() if meta.requires_grad else fake


def _placed(arguments: Sequence[Any], tree: pytree.TreeSpec) -> Iterator[tuple[str, torch.device]]:
    """Yield name and device of each tensor among a call's arguments that has a dimension."""
    try:
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(len(arguments))), tree))
        names = [
            f"{'args' if pytree.keystr(path[:1]) == '[0]' else 'kwargs'}{pytree.keystr(path[1:])}" for path, _ in paths
        ]
    except ValueError:
        # A type of a library that is registered without keys.
        names = [f"tensor {number} of the call" for number in range(len(arguments))]
    for name, argument in zip(names, arguments, strict=True):
        if isinstance(argument, Operand) and argument.meta.shape:
            yield name, argument.meta.device


class _Watch(_torch.TorchDispatchMode):
    """Record whether an operator draws random numbers, mark sums and means, and refuse operators that need values."""

    draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (truth := known_truth(func, args)) is not None:
            return truth
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        try:
            result = None if func in _READS else func(*args, **(kwargs or {}))
        except _torch.DataDependentOutputException:
            raise _read(str(func)) from None
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if func in _READS or not all(isinstance(size, int) for tensor in tensors for size in tensor.shape):
            what = "indexing by a mask" if func is torch.ops.aten.index.Tensor else str(func)
            advice = ADVICE_BY_OPERATOR.get(func)
            raise _read(what, advice)
        note_comparison(func, args, result)
        counts.note_reduction(func, args, kwargs or {}, result)
        return result


def _read(what: str, advice: str | None = None) -> CaptureError:
    advice = advice or f"Use torch.where, multiply by a mask, or look at the values after {words().step}."
    return CaptureError(
        f"{what} needs values that {words().step} has yet to compute{batchwise.here()}\n"
        f"A step is one graph for all values. {advice}"
    )


_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
