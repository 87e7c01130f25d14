"""local: a region of ``build()`` that every rank computes on its own part, as data-parallel code would.

Outside such a region, N ranks compute what one device would compute on the whole batch. Routing of tokens with a
capacity per rank, a sampling that must not see other ranks' samples, a kernel that needs its input whole are easier
to say from one rank's point of view; the declared SBPs then say what the results mean globally.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar, overload

import torch
from torch import Tensor, fx, nn

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base import source
from zerograph.capture.random_operators import Draws, refuse_others
from zerograph.errors import CaptureError, PlacementError
from zerograph.ir.functionalize import without_mutation
from zerograph.ir.region import GlobalSpec, Region, split_joint
from zerograph.ir.region import local as local_operator
from zerograph.ir.sbp import Broadcast, PartialSum, Sbp, Split, broadcast, partial_sum
from zerograph.ir.step_graph import placeholders, restore_origins, writes

# One for all tensors, or one for each, in the order in which they stand among arguments or results.
Sbps = Sbp | Sequence[Sbp]
F = TypeVar("F", bound=Callable[..., Any])


@overload
def local(region: nn.Module, *, inputs: Sbps | None = ..., outputs: Sbps = ...) -> Local: ...
@overload
def local(region: F, *, inputs: Sbps | None = ..., outputs: Sbps = ...) -> F: ...
def local(region: Any, *, inputs: Sbps | None = None, outputs: Sbps = Split(0)) -> Any:  # noqa: B008
    """``region``, to be called in ``build()`` with this rank's parts; in plain PyTorch it is what it was.

    With several micro-batches a part is a rank's part of one of them.

    Parameters and buffers that it uses, its own or others of the graph, are whole, and their gradients are summed
    over the ranks. Every other tensor that it reads must be among its arguments. Random numbers differ between ranks.

    Args:
        region: a module, or a function of tensors in any nesting.
        inputs: SBP of the tensors among the arguments, one for all or one for each. Default: split(0), and broadcast
            for 0-d ones.
        outputs: SBP of the tensors that it returns, likewise; ``partial_sum`` for what is summed over the ranks.

    Raises:
        PlacementError: neither module nor function, what is no SBP, an input that is a partial sum, or an output that
            is broadcast: nothing that ranks compute on their own parts is equal on all of them.
    """
    if not callable(region):
        raise PlacementError(f"local() takes a module or a function, not {region!r:.60}")
    for sbp in () if inputs is None else _listed(inputs):
        if not isinstance(sbp, (Split, Broadcast)):
            raise PlacementError(f"local(inputs=...) has {sbp!r}: give sbp.split(d) or sbp.broadcast")
    for sbp in _listed(outputs):
        if not isinstance(sbp, (Split, PartialSum)):
            raise PlacementError(
                f"local(outputs=...) has {sbp!r}: give sbp.split(d), or sbp.partial_sum for what is summed over the "
                "ranks\nWhat is to be equal on all ranks, compute outside the region."
            )
    if isinstance(region, nn.Module):
        return Local(region, inputs, outputs)

    @functools.wraps(region)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _call(region, args, kwargs, inputs, outputs)

    return call


class Local(nn.Module):
    """A module as a local region; ``inner`` is the module itself, whose parameters stay where they are."""

    def __init__(self, inner: nn.Module, inputs: Sbps | None, outputs: Sbps) -> None:
        super().__init__()
        self.inner = inner
        # A graph is captured anew when it changes: it is text.
        self.declared = f"{inputs} -> {outputs}"
        self._inputs, self._outputs = inputs, outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self.inner, args, kwargs, self._inputs, self._outputs)

    def extra_repr(self) -> str:
        return self.declared


@dataclass
class Capturing:
    """What a region needs to know of the capture that it is called in.

    Attributes:
        ranks: how many parts there are.
        mode: the fake mode of all tensors.
        table: decompositions.
        drawn: the random numbers so far.
        recorder: makes what notes each operator's origin.
        replace: puts other tensors in the place of parameters and buffers, by name.
        own: parameters and buffers as the step sees them, by name.
        regions: those met so far.
    """

    ranks: int
    mode: _torch.FakeTensorMode
    table: dict[Any, Callable[..., Any]]
    drawn: Draws
    recorder: Callable[[], AbstractContextManager[Any]]
    replace: Callable[[dict[str, Tensor]], AbstractContextManager[None]]
    own: dict[str, Tensor]
    regions: list[Region] = field(default_factory=list)


_capturing: ContextVar[Capturing | None] = ContextVar("capturing", default=None)


@contextmanager
def inside(capturing: Capturing) -> Iterator[None]:
    """Local regions that are called inside become parts of this capture."""
    token = _capturing.set(capturing)
    try:
        yield
    finally:
        _capturing.reset(token)


@dataclass(frozen=True)
class _Plan:
    """The halves of a region as one call needs them.

    Attributes:
        forward_inputs, backward_inputs: which of the call's tensors each half reads.
        differentiable: which outputs give backward a gradient.
        gradients: the tensors that backward makes a gradient for.
    """

    forward: Region
    backward: Region
    forward_inputs: tuple[int, ...]
    backward_inputs: tuple[int, ...]
    differentiable: tuple[int, ...]
    gradients: tuple[int, ...]

    @property
    def saved(self) -> int:
        """How many values forward saves for backward."""
        return len(self.backward.inputs) - len(self.backward_inputs) - len(self.differentiable)


def _call(function: Callable[..., Any], args: Any, kwargs: Any, inputs: Sbps | None, outputs: Sbps) -> Any:
    here = _capturing.get()
    if here is None:
        return function(*args, **kwargs)
    leaves, tree = pytree.tree_flatten((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    asked = [broadcast if not x.dim() else Split(0) for x in given] if inputs is None else _spread(inputs, len(given))
    assert here.drawn.seed is not None
    tensors = [*given, *here.own.values(), here.drawn.seed]
    sbps = [*asked, *[broadcast] * (len(tensors) - len(given))]
    returned: list[Any] = []

    def run(*parts: Tensor) -> tuple[list[Tensor], pytree.TreeSpec]:
        """The region on one rank's parts of ``tensors``."""
        arguments = iter(parts)
        own_args, own_kwargs = pytree.tree_unflatten(
            [next(arguments) if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree
        )
        replaced = dict(zip(here.own, arguments, strict=False))
        before, here.drawn.seed = here.drawn.seed, parts[-1]
        try:
            with here.replace(replaced), here.recorder():
                returned[:], spec = pytree.tree_flatten(function(*own_args, **own_kwargs))
        finally:
            here.drawn.seed = before
        return [value for value in returned if isinstance(value, Tensor)], spec

    # Its forward and backward are traced here and now: a checkpoint around it keeps nothing of their inside.
    with _torch.no_modes(), here.mode, torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
        parts = [_part(tensor, sbp, here.ranks) for tensor, sbp in zip(tensors, sbps, strict=True)]
        count = here.drawn.count
        results, spec = run(*parts)
        here.drawn.count = count
        plan, constants = _plan(
            lambda *parts: run(*parts)[0], parts, results, sbps, _spread(outputs, len(results)), here
        )
    found = iter(_Run.apply(plan, *tensors, *constants))
    return pytree.tree_unflatten([next(found) if isinstance(value, Tensor) else value for value in returned], spec)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _listed(sbps: Sbps) -> Sequence[Sbp]:
    return sbps if isinstance(sbps, Sequence) else (sbps,)


def _spread(sbps: Sbps, count: int) -> list[Sbp]:
    """One for each of ``count`` tensors."""
    if isinstance(sbps, Sbp):
        return [sbps] * count
    if len(sbps) != count:
        _refuse(
            f"a local region was declared with {len(sbps)} SBPs for {count} tensors",
            "Give one SBP for all, or one for each tensor in order.",
        )
    return list(sbps)


def _refuse(what: str, instead: str) -> NoReturn:
    line, code = source.running_line()
    raise CaptureError(f"{what}\n  {line}   {code}\n{instead}")


def _part(tensor: Tensor, sbp: Sbp, ranks: int) -> Tensor:
    """A tensor like one rank's part."""
    shape = list(tensor.shape)
    if isinstance(sbp, Split):
        if sbp.dim >= len(shape) or shape[sbp.dim] % ranks:
            _refuse(
                f"a local region is given a tensor of shape {tuple(shape)} as {sbp}, which {ranks} ranks cannot part",
                "Give it a tensor whose dimension they divide, or declare it sbp.broadcast.",
            )
        shape[sbp.dim] //= ranks
    part = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    return (
        nn.Parameter(part, tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else part.requires_grad_(tensor.requires_grad)
    )


def _plan(
    run: Callable[..., list[Tensor]],
    parts: Sequence[Tensor],
    results: Sequence[Tensor],
    inputs: Sequence[Sbp],
    outputs: Sequence[Sbp],
    here: Capturing,
) -> tuple[_Plan, list[Tensor]]:
    """Trace one rank's forward and backward, cut them apart; also the constants that are further inputs."""
    differentiable = [i for i, result in enumerate(results) if result.requires_grad]
    wanted = [i for i, part in enumerate(parts) if part.requires_grad] if differentiable else []
    gradients: list[int] = []

    def joint(*tensors: Tensor) -> list[Tensor]:
        own = tensors[: len(parts)]
        made = run(*own)
        found: Sequence[Tensor | None] = ()
        if wanted:
            found = torch.autograd.grad(
                [made[i] for i in differentiable], [own[i] for i in wanted], tensors[len(parts) :], allow_unused=True
            )
        gradients[:] = [i for i, gradient in zip(wanted, found, strict=True) if gradient is not None]
        return [result.detach() for result in made] + [gradient for gradient in found if gradient is not None]

    tangents = [torch.empty(results[i].shape, dtype=results[i].dtype, device=results[i].device) for i in differentiable]
    traced = _torch.trace(joint, [*parts, *tangents], here.table)
    module = without_mutation(traced)
    restore_origins(module.graph)
    refuse_others(module.graph)
    if any(True for _ in writes(module.graph)):
        _refuse(
            "a local region changes a buffer or one of its arguments in place",
            "Each rank would have its own; return the new value, declared partial_sum or split, and write it outside.",
        )
    constants = _constants_as_inputs(module, len(parts))
    halves = split_joint(module.graph, len(parts) + len(constants), len(results))
    whole = [*inputs, *[broadcast] * len(constants)]
    saved = [GlobalSpec((here.ranks, *v.shape), v.dtype, v.device, Split(0)) for v in halves.saved]
    forward = Region(
        halves.forward,
        tuple(whole[i] for i in halves.forward_inputs),
        (*(_seen_whole(v, sbp, here.ranks) for v, sbp in zip(results, outputs, strict=True)), *saved),
    )
    backward = Region(
        halves.backward,
        (
            *(whole[i] for i in halves.backward_inputs),
            *(one.sbp for one in saved),
            *(_gradient_sbp(outputs[i]) for i in differentiable),
        ),
        tuple(_seen_whole(parts[i], _gradient_sbp(inputs[i]), here.ranks) for i in gradients),
    )
    here.regions += [forward, backward]
    return _Plan(
        forward, backward, halves.forward_inputs, halves.backward_inputs, tuple(differentiable), tuple(gradients)
    ), constants


def _gradient_sbp(sbp: Sbp) -> Sbp:
    """A whole tensor that every rank reads gets a gradient from each; every rank's summand gets that of the sum."""
    return sbp if isinstance(sbp, Split) else partial_sum if isinstance(sbp, Broadcast) else broadcast


def _seen_whole(part: Tensor, sbp: Sbp, ranks: int) -> GlobalSpec:
    shape = list(part.shape)
    if isinstance(sbp, Split):
        if sbp.dim >= len(shape):
            _refuse(
                f"a local region returns a tensor of shape {tuple(shape)}, declared {sbp}",
                "Declare outputs= with a dimension that it has, or as sbp.partial_sum if ranks are to be summed.",
            )
        shape[sbp.dim] *= ranks
    return GlobalSpec(tuple(shape), part.dtype, part.device, sbp)


def _constants_as_inputs(module: fx.GraphModule, position: int) -> list[Tensor]:
    """Tensors made of Python numbers become placeholders, from ``position`` on; returns them.

    Raises:
        CaptureError: one is no constant, but comes from outside the region.
    """
    graph = module.graph
    found: list[Tensor] = []
    behind = placeholders(graph)[position - 1]
    for node in graph.find_nodes(op="get_attr"):
        constant = getattr(module, str(node.target))
        if isinstance(constant, _torch.FakeTensor) or constant.requires_grad:
            _refuse(
                f"a local region reads a tensor of shape {tuple(constant.shape)} that is not among its arguments",
                "Give it as an argument, so that its SBP is declared; parameters and buffers of the graph may be read.",
            )
        with graph.inserting_after(behind):
            behind = graph.placeholder(f"constant{len(found)}")
        behind.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(behind)
        graph.erase_node(node)
        found.append(constant)
    return found


class _Run(torch.autograd.Function):
    """The two nodes of a region in the step that is being traced."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        made = local_operator([tensors[i] for i in plan.forward_inputs], plan.forward.number)
        count = len(plan.forward.outputs) - plan.saved
        ctx.plan, ctx.given = plan, len(tensors)
        ctx.save_for_backward(*[tensors[i] for i in plan.backward_inputs], *made[count:])
        ctx.mark_non_differentiable(*[one for i, one in enumerate(made[:count]) if i not in plan.differentiable])
        return tuple(made[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        own = [gradients[i] for i in plan.differentiable]
        made = local_operator([*ctx.saved_tensors, *own], plan.backward.number)
        found = dict(zip(plan.gradients, made, strict=True))
        return None, *[found.get(i) for i in range(ctx.given)]
