"""Local regions of ``build()``, which every rank computes on its own shards, as in data-parallel code.

Outside a region, N ranks compute what one device computes on the whole batch. Some computations are easier to write for
one rank: routing of tokens with a capacity per rank, sampling without the samples of other ranks, a kernel that needs
its input whole. The declared SBPs then say which global tensors the results are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, fx, nn

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base.contexts import given
from zerograph.base.source import refusal
from zerograph.capture.random_operators import Draws, refuse_others
from zerograph.errors import PlacementError
from zerograph.ir.functionalize import without_mutation
from zerograph.ir.region import GlobalSpec, Region, local as local_operator, split_joint
from zerograph.ir.rewrite import replace_node
from zerograph.ir.sbp import Broadcast, PartialSum, Sbp, Split, broadcast, partial_sum
from zerograph.ir.step_graph import placeholders, restore_origins, writes

# One SBP for all tensors, or one for each, in the order of arguments or results.
Sbps = Sbp | Sequence[Sbp]
F = TypeVar("F", bound=Callable[..., Any])


@overload
def local(region: nn.Module, *, inputs: Sbps | None = ..., outputs: Sbps = ...) -> Local: ...
@overload
def local(region: F, *, inputs: Sbps | None = ..., outputs: Sbps = ...) -> F: ...
def local(region: Any, *, inputs: Sbps | None = None, outputs: Sbps = Split(0)) -> Any:  # noqa: B008
    """Return ``region`` as a local region: in ``build()`` it gets this rank's shards, in plain PyTorch it is unchanged.

    With several micro-batches it gets this rank's shards of one micro-batch.

    Parameters and buffers that it uses, its own or others of the graph, are whole, and their gradients are summed
    over the ranks. Every other tensor that it reads must be among its arguments. Random numbers differ between ranks.

    Args:
        region: a module, or a function of tensors in any nesting.
        inputs: SBP of the tensors among the arguments, one for all or one for each. Default: split(0), and broadcast
            for 0-d ones.
        outputs: SBP of the tensors that it returns, one for all or one for each; ``partial_sum`` for a sum over ranks.

    Raises:
        PlacementError: ``region`` is neither module nor function, an SBP is none, an input is a partial sum, or an
            output is broadcast, although ranks compute different results from their shards.
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
    """A module as a local region.

    Attributes:
        inner: the module itself.
        declared: the declared SBPs as text.
    """

    def __init__(self, inner: nn.Module, inputs: Sbps | None, outputs: Sbps) -> None:
        super().__init__()
        self.inner = inner
        # Text in an attribute is a guard: another declaration is captured again.
        self.declared = f"{inputs} -> {outputs}"
        self._inputs, self._outputs = inputs, outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, in ``build()`` on this rank's shards."""
        return _call(self.inner, args, kwargs, self._inputs, self._outputs)

    def extra_repr(self) -> str:
        """Return the declared SBPs."""
        return self.declared


@dataclass
class Capturing:
    """The capture that a region is called in.

    Attributes:
        ranks: number of shards of a split tensor.
        mode: the fake mode of all tensors.
        table: decompositions.
        draws: the random numbers that the trace has drawn.
        recorder: returns a mode that records each operator's origin.
        replace: replaces parameters and buffers by other tensors, by name.
        state: the traced parameters and buffers, by name.
        regions: the regions so far.
    """

    ranks: int
    mode: _torch.FakeTensorMode
    table: dict[Any, Callable[..., Any]]
    draws: Draws
    recorder: Callable[[], AbstractContextManager[Any]]
    replace: Callable[[dict[str, Tensor]], AbstractContextManager[None]]
    state: dict[str, Tensor]
    regions: list[Region] = field(default_factory=list)


_capturing: ContextVar[Capturing | None] = ContextVar("capturing", default=None)


def inside(capturing: Capturing) -> AbstractContextManager[None]:
    """Make local regions that are called inside parts of this capture."""
    return given(_capturing, capturing)


@dataclass(frozen=True)
class _Plan:
    """The regions of forward and backward of one call.

    Attributes:
        forward: the region of forward.
        backward: the region of backward.
        forward_inputs: indices of the call's tensors that forward reads.
        backward_inputs: indices of the call's tensors that backward reads.
        differentiable: indices of the outputs whose gradient backward reads.
        gradients: indices of the tensors whose gradient backward returns.
    """

    forward: Region
    backward: Region
    forward_inputs: tuple[int, ...]
    backward_inputs: tuple[int, ...]
    differentiable: tuple[int, ...]
    gradients: tuple[int, ...]

    @property
    def saved(self) -> int:
        """Number of values that forward saves for backward."""
        return len(self.backward.inputs) - len(self.backward_inputs) - len(self.differentiable)


def _call(function: Callable[..., Any], args: Any, kwargs: Any, inputs: Sbps | None, outputs: Sbps) -> Any:
    capturing = _capturing.get()
    if capturing is None:
        return function(*args, **kwargs)
    leaves, tree = pytree.tree_flatten((args, kwargs))
    arguments = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if inputs is None:
        sbps: list[Sbp] = [Split(0) if tensor.dim() else broadcast for tensor in arguments]
    else:
        sbps = _one_for_each(inputs, len(arguments))
    draws = capturing.draws
    assert draws.seed is not None
    tensors = [*arguments, *capturing.state.values(), draws.seed]
    sbps += [broadcast] * (len(tensors) - len(arguments))
    returned: list[Any] = []

    def run(*parts: Tensor) -> tuple[list[Tensor], pytree.TreeSpec]:
        """Run the region on one rank's parts of ``tensors``."""
        remaining = iter(parts)
        local_args, local_kwargs = pytree.tree_unflatten(
            [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree
        )
        state = dict(zip(capturing.state, remaining, strict=False))
        seed, draws.seed = draws.seed, parts[-1]
        try:
            with capturing.replace(state), capturing.recorder():
                returned[:], spec = pytree.tree_flatten(function(*local_args, **local_kwargs))
        finally:
            draws.seed = seed
        return [value for value in returned if isinstance(value, Tensor)], spec

    # Forward and backward are traced now, so that a checkpoint around the region saves nothing inside it.
    with _torch.no_modes(), capturing.mode, torch.autograd.graph.saved_tensors_hooks(_identity, _identity):
        parts = [_part(tensor, sbp, capturing.ranks) for tensor, sbp in zip(tensors, sbps, strict=True)]
        count = draws.count
        results, spec = run(*parts)
        draws.count = count
        plan, constants = _plan(
            lambda *parts: run(*parts)[0], parts, results, sbps, _one_for_each(outputs, len(results)), capturing
        )
    outputs_in_step = iter(_Run.apply(plan, *tensors, *constants))
    return pytree.tree_unflatten(
        [next(outputs_in_step) if isinstance(value, Tensor) else value for value in returned], spec
    )


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _listed(sbps: Sbps) -> Sequence[Sbp]:
    return sbps if isinstance(sbps, Sequence) else (sbps,)


def _one_for_each(sbps: Sbps, count: int) -> list[Sbp]:
    """Return one SBP for each of ``count`` tensors."""
    if isinstance(sbps, Sbp):
        return [sbps] * count
    if len(sbps) != count:
        raise refusal(
            f"a local region was declared with {len(sbps)} SBPs for {count} tensors",
            "Give one SBP for all, or one for each tensor in order.",
        )
    return list(sbps)


def _part(tensor: Tensor, sbp: Sbp, ranks: int) -> Tensor:
    """Return an empty tensor like one rank's shard."""
    shape = list(tensor.shape)
    if not all(isinstance(size, int) for size in shape):
        raise refusal(
            f"a local region is given a tensor of shape {tuple(shape)}, whose size differs between calls or ranks",
            "A region is compiled for one size of its inputs: give all ranks equally many rows.",
        )
    if isinstance(sbp, Split):
        if sbp.dim >= len(shape) or shape[sbp.dim] % ranks:
            raise refusal(
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
    capturing: Capturing,
) -> tuple[_Plan, list[Tensor]]:
    """Trace one rank's forward and backward and split them; return also the constants that are further inputs."""
    differentiable = [i for i, result in enumerate(results) if result.requires_grad]
    module, gradients = _joint_graph(run, parts, results, differentiable, capturing)
    if any(True for _ in writes(module.graph)):
        raise refusal(
            "a local region changes a buffer or one of its arguments in place",
            "Each rank would have its own; return the new value, declared partial_sum or split, and write it outside.",
        )
    ranks = capturing.ranks
    constants = _constants_as_inputs(module, len(parts))
    halves = split_joint(module.graph, len(parts) + len(constants), len(results))
    sbps = [*inputs, *[broadcast] * len(constants)]
    saved = [GlobalSpec((ranks, *value.shape), value.dtype, value.device, Split(0)) for value in halves.saved]
    forward = Region(
        halves.forward,
        tuple(sbps[i] for i in halves.forward_inputs),
        (*(_global_spec(result, sbp, ranks) for result, sbp in zip(results, outputs, strict=True)), *saved),
    )
    backward = Region(
        halves.backward,
        (
            *(sbps[i] for i in halves.backward_inputs),
            *(spec.sbp for spec in saved),
            *(_gradient_sbp(outputs[i]) for i in differentiable),
        ),
        tuple(_global_spec(parts[i], _gradient_sbp(inputs[i]), ranks) for i in gradients),
    )
    capturing.regions += [forward, backward]
    return _Plan(
        forward, backward, halves.forward_inputs, halves.backward_inputs, tuple(differentiable), tuple(gradients)
    ), constants


def _joint_graph(
    run: Callable[..., list[Tensor]],
    parts: Sequence[Tensor],
    results: Sequence[Tensor],
    differentiable: Sequence[int],
    capturing: Capturing,
) -> tuple[fx.GraphModule, list[int]]:
    """Return the functional graph of outputs and gradients, and the indices of the parts that get a gradient."""
    with_grad = [i for i, part in enumerate(parts) if part.requires_grad] if differentiable else []
    gradients: list[int] = []

    def joint(*tensors: Tensor) -> list[Tensor]:
        local_parts, tangents = tensors[: len(parts)], tensors[len(parts) :]
        outputs = run(*local_parts)
        grads: Sequence[Tensor | None] = ()
        if with_grad:
            grads = torch.autograd.grad(
                [outputs[i] for i in differentiable], [local_parts[i] for i in with_grad], tangents, allow_unused=True
            )
        gradients[:] = [i for i, grad in zip(with_grad, grads, strict=True) if grad is not None]
        return [output.detach() for output in outputs] + [grad for grad in grads if grad is not None]

    tangents = [torch.empty(results[i].shape, dtype=results[i].dtype, device=results[i].device) for i in differentiable]
    module = without_mutation(_torch.trace(joint, [*parts, *tangents], capturing.table))
    restore_origins(module.graph)
    refuse_others(module.graph)
    return module, gradients


def _gradient_sbp(sbp: Sbp) -> Sbp:
    """Return the SBP of the gradient: partial for a broadcast tensor, broadcast for a partial sum."""
    return sbp if isinstance(sbp, Split) else partial_sum if isinstance(sbp, Broadcast) else broadcast


def _global_spec(part: Tensor, sbp: Sbp, ranks: int) -> GlobalSpec:
    """Return the global tensor of which ``part`` is one rank's shard."""
    shape = list(part.shape)
    if isinstance(sbp, Split):
        if sbp.dim >= len(shape):
            raise refusal(
                f"a local region returns a tensor of shape {tuple(shape)}, declared {sbp}",
                "Declare outputs= with a dimension that it has, or as sbp.partial_sum if ranks are to be summed.",
            )
        shape[sbp.dim] *= ranks
    return GlobalSpec(tuple(shape), part.dtype, part.device, sbp)


def _constants_as_inputs(module: fx.GraphModule, position: int) -> list[Tensor]:
    """Replace constants made from Python numbers by placeholders from ``position`` on; return the constants.

    Raises:
        CaptureError: a tensor is no constant, but comes from outside the region.
    """
    graph = module.graph
    constants: list[Tensor] = []
    last = placeholders(graph)[position - 1]
    for node in graph.find_nodes(op="get_attr"):
        constant = getattr(module, str(node.target))
        if isinstance(constant, _torch.FakeTensor) or constant.requires_grad:
            raise refusal(
                f"a local region reads a tensor of shape {tuple(constant.shape)} that is not among its arguments",
                "Give it as an argument, so that its SBP is declared; parameters and buffers of the graph may be read.",
            )
        with graph.inserting_after(last):
            last = graph.placeholder(f"constant{len(constants)}")
        last.meta["val"] = node.meta["val"]
        replace_node(node, last)
        constants.append(constant)
    return constants


class _Run(torch.autograd.Function):
    """The two nodes of a region in the traced step."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Emit the node of forward; save what the node of backward reads."""
        results = local_operator([tensors[i] for i in plan.forward_inputs], plan.forward.number)
        count = len(plan.forward.outputs) - plan.saved
        outputs, saved = results[:count], results[count:]
        ctx.plan, ctx.tensors = plan, len(tensors)
        ctx.save_for_backward(*[tensors[i] for i in plan.backward_inputs], *saved)
        ctx.mark_non_differentiable(*[output for i, output in enumerate(outputs) if i not in plan.differentiable])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Emit the node of backward; return the gradients of the tensors."""
        plan: _Plan = ctx.plan
        tangents = [gradients[i] for i in plan.differentiable]
        results = local_operator([*ctx.saved_tensors, *tangents], plan.backward.number)
        by_tensor = dict(zip(plan.gradients, results, strict=True))
        return None, *[by_tensor.get(i) for i in range(ctx.tensors)]
