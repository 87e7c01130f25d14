"""Capture FlexAttention: its score and mask functions as text, the tensors that they capture as inputs.

A function is traced by itself, at one position. What it reads besides positions becomes an input of the operator. A
dimension that is looked up by the batch index alone is split as the batch is: there each rank counts from 0. Where the
batch index itself counts, it is looked up in a table of batch indices, which is split like the batch too.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from zerograph import _torch
from zerograph.base.source import refusal
from zerograph.ir.rewrite import replace_node
from zerograph.ir.step_graph import placeholders
from zerograph.ops.flex_attention import (
    BATCH,
    HEADS,
    OTHER,
    POSITIONS,
    flex_attention,
    flex_attention_backward,
    modification_text,
)

aten = torch.ops.aten


def captured_flex_attention() -> contextlib.AbstractContextManager[Any]:
    """Make ``torch.nn.attention.flex_attention.flex_attention`` one operator of the step."""
    return _torch.replaced_flex_attention(_attend) if _torch.uses_flex_attention() else contextlib.nullcontext()


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Emit the operator; return its result, and the log-sum-exp in base 2, as torch's higher-order operator does."""
    if kernel_options.get("OUTPUT_MAX"):
        raise refusal("flex_attention() is asked for the largest scores", "Leave max_scores out of return_aux.")
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
    score = None if _torch.is_identity(score_mod) else score_mod
    functions = _Functions(query, score, _mask(block_mask, query))
    tensors = (query, key, value, *functions.captured)
    out, lse = _Attention.apply(functions.axes, *functions.texts(), float(scale), *tensors)
    lse = lse / math.log(2)
    return out, lse, lse


def _mask(block_mask: tuple[Any, ...], query: Tensor) -> Callable[..., Tensor] | None:
    """Return the mask as a function of positions, together with the blocks that are not attended at all."""
    mask_mod: Callable[..., Tensor] | None
    mask_mod, blocks = _torch.mask_of_blocks(block_mask)
    batch = block_mask[2].shape[0]
    if not _is(batch, 1) and not _is(batch, query.shape[0]):
        raise refusal(
            f"a block mask was made for a batch of {batch}, but the whole batch has {query.shape[0]} rows",
            "Tensors in build() are of the whole batch of all ranks. Call create_block_mask() inside build(), with "
            "B=x.shape[0] and document ids that are an input, or with B=None for a mask that is equal for all rows.",
        )
    if blocks is None:
        return mask_mod
    rows, columns = blocks["size"]
    size = blocks["columns"].shape[-1]
    applied = _torch.dense_blocks(blocks["counts"], blocks["columns"], size).bool()
    whole = None
    if blocks["full_counts"] is not None:
        whole = _torch.dense_blocks(blocks["full_counts"], blocks["full_columns"], size).bool()

    def masked(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        index = (
            b if _is(applied.shape[0], query.shape[0]) else torch.zeros_like(b),
            h if _is(applied.shape[1], query.shape[1]) else torch.zeros_like(h),
            q // rows,
            k // columns,
        )
        allowed = applied[index]
        if mask_mod is not None:
            allowed = allowed & mask_mod(b, h, q, k)
        return allowed if whole is None else allowed | whole[index]

    return masked


def _is(size: Any, other: Any) -> bool:
    """Return whether two sizes are equal whatever the values of their symbols."""
    return bool(_torch.size_key(size) == _torch.size_key(other))


class _Functions:
    """The functions of one call: graphs of 0-d tensors, from a score, the four positions, and captured tensors.

    Attributes:
        captured: the tensors that the functions read besides scores and positions.
        axes: for each of them a letter for each dimension: the position that alone it is looked up by.
    """

    def __init__(self, query: Tensor, *functions: Callable[..., Tensor] | None) -> None:
        self._query = query
        self._sizes = {BATCH: query.shape[0], HEADS: query.shape[1]}
        # The first function takes a score.
        sizes = _SizesAsTensors(_torch.fake_mode_of(query))
        modules = [
            None if function is None else _traced(function, query, 1 if number == 0 else 0, sizes)
            for number, function in enumerate(functions)
        ]
        self._graphs = [None if module is None else module.graph for module in modules]
        self._positions = {graph: placeholders(graph)[-len(POSITIONS) :] for graph in self._graphs if graph is not None}
        constants = [
            (node, getattr(module, str(node.target)))
            for module in modules
            if module is not None
            for node in module.graph.find_nodes(op="get_attr")
        ]
        self.captured: list[Tensor] = []
        self._inputs: list[dict[fx.Graph, fx.Node]] = []
        for tensor in {id(tensor): tensor for _, tensor in constants}.values():
            inputs = self._add(sizes.filled(tensor))
            for node in [node for node, other in constants if other is tensor]:
                replace_node(node, inputs[node.graph])
        self.axes = [
            self._looked_up(tensor, inputs) for tensor, inputs in zip(self.captured, self._inputs, strict=True)
        ]
        for axis in (BATCH, HEADS):
            self._number(axis)

    def texts(self) -> list[str]:
        """Return the functions as text; empty for None."""
        return ["" if graph is None else modification_text(graph) for graph in self._graphs]

    def _add(self, tensor: Tensor) -> dict[fx.Graph, fx.Node]:
        """Make a tensor the last input of all functions; return its placeholders."""
        inputs = {}
        for graph in self._positions:
            with graph.inserting_after(placeholders(graph)[-1]):
                inputs[graph] = graph.placeholder(f"t{len(self.captured)}")
        self.captured.append(tensor)
        self._inputs.append(inputs)
        return inputs

    def _looked_up(self, tensor: Tensor, inputs: dict[fx.Graph, fx.Node]) -> str:
        """Return the axes of a captured tensor."""
        axes = [{axis for axis, size in self._sizes.items() if _is(size, length)} for length in tensor.shape]
        for graph, node in inputs.items():
            for user in node.users:
                indices = _indices(user, node)
                for dim, letters in enumerate(axes):
                    index = indices[dim] if dim < len(indices) else None
                    letters &= {axis for axis in letters if index is self._position(graph, axis)}
        return "".join(min(letters, default=OTHER) for letters in axes)

    def _position(self, graph: fx.Graph, axis: str) -> fx.Node:
        return self._positions[graph][POSITIONS.index(axis)]

    def _number(self, axis: str) -> None:
        """Replace a position by its number in the whole batch, except where it looks up a dimension of its axis."""
        own = {
            (graph, node): {dim for dim, letter in enumerate(axes) if letter == axis}
            for axes, inputs in zip(self.axes, self._inputs, strict=True)
            for graph, node in inputs.items()
        }
        counted = []
        for graph in self._positions:
            position = self._position(graph, axis)
            for user in list(position.users):
                source = user.args[0]
                kept = own.get((graph, source), set()) if isinstance(source, fx.Node) else set()
                indices = _indices(user, source) if kept else []
                others = [dim for dim, index in enumerate(indices) if index is position and dim not in kept]
                if others or not kept:
                    counted.append((user, position, kept))
        if not counted:
            return
        table = self._add(torch.arange(self._sizes[axis], device=self._query.device))
        self.axes.append(axis)
        numbers: dict[fx.Graph, fx.Node] = {}
        for user, position, kept in counted:
            graph = user.graph
            if graph not in numbers:
                with graph.inserting_after(placeholders(graph)[-1]):
                    numbers[graph] = graph.call_function(aten.index.Tensor, (table[graph], [position]))
            if not kept:
                user.replace_input_with(position, numbers[graph])
                continue
            indices = _indices(user, user.args[0])
            user.update_arg(
                1,
                [
                    numbers[graph] if index is position and dim not in kept else index
                    for dim, index in enumerate(indices)
                ],
            )


def _indices(user: fx.Node, source: Any) -> Sequence[Any]:
    """Return the indices by which a node looks up elements of ``source``; none for any other use of it."""
    if user.target is not aten.index.Tensor or user.args[0] is not source:
        return ()
    indices = user.args[1]
    assert isinstance(indices, (list, tuple))
    return () if source in indices else indices


class _SizesAsTensors(TorchFunctionMode):
    """A mode in which operators compute with 0-d tensors in place of symbolic sizes."""

    def __init__(self, mode: _torch.FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._tensors: dict[Any, tuple[torch.SymInt, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function."""
        return func(*map(self._tensor, args), **{name: self._tensor(value) for name, value in (kwargs or {}).items()})

    def filled(self, tensor: Tensor) -> Tensor:
        """Return the size that a tensor stands for, as a tensor of the step; any other tensor itself."""
        for size, stand_in in self._tensors.values():
            if stand_in is tensor:
                return torch.full((), size)  # type: ignore[call-overload, no-any-return]
        return tensor

    def _tensor(self, value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        key = _torch.size_key(value)
        if key not in self._tensors:
            # Made outside of the trace, which captures it then.
            with _torch.no_modes(), self._mode:
                self._tensors[key] = value, torch.empty((), dtype=torch.int64)
        return self._tensors[key][1]


def _traced(function: Callable[..., Tensor], query: Tensor, scores: int, sizes: _SizesAsTensors) -> fx.GraphModule:
    """Trace a function at one position; captured tensors are attributes of the module.

    Args:
        scores: number of scores that it takes before the positions.
        sizes: is active during the trace.
    """
    with _torch.no_modes(), _torch.fake_mode_of(query), torch.no_grad(), _torch.indexed_by_tensors():
        dtype = torch.promote_types(query.dtype, torch.float32)
        score = [torch.empty((), dtype=dtype, device=query.device) for _ in range(scores)]
        positions = [torch.empty((), dtype=torch.int64, device=query.device) for _ in POSITIONS]

        def at_one_position(*arguments: Tensor) -> Tensor:
            with sizes, _torch.sizes_untraced():
                return function(*arguments)

        try:
            module = _torch.trace(at_one_position, [*score, *positions])
        except (_torch.GuardOnDataDependentSymNode, _torch.DataDependentOutputException):
            raise refusal(
                "a function of flex_attention() reads a value: a position, or an element that it looks up",
                "Use torch.where for branches, and look numbers up in tensors, not in lists.",
            ) from None
    for node, name in zip(reversed(placeholders(module.graph)), reversed(("score", *POSITIONS)), strict=False):
        node.name = name
    module.graph.eliminate_dead_code()
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if not isinstance(node.target, _torch.OpOverload):
            raise refusal(
                f"a function of flex_attention() computes {node.target.__name__} with a size",
                "Compute with it outside of the function.",
            )
        if _torch.is_mutable(node.target) or torch.Tag.nondeterministic_seeded in node.target.tags:
            raise refusal(
                f"a function of flex_attention() calls {node.target}, which writes or draws random numbers",
                "Compute scores and masks from positions, and from tensors that the function only reads.",
            )
    return module


class _Attention(torch.autograd.Function):
    """The two operators of one call in the traced step."""

    @staticmethod
    def forward(ctx: Any, axes: list[str], score: str, mask: str, scale: float, *tensors: Tensor) -> Any:
        """Emit the operator of forward."""
        query, key, value, *captured = tensors
        ctx.options = axes, score, mask, scale
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return flex_attention(query, key, value, captured, axes, score, mask, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Emit the operator of backward."""
        query, key, value, *captured = ctx.saved_tensors
        wanted = ctx.needs_input_grad[_FIRST_TENSOR:]
        if grad_out is None:
            grad_out = query.new_zeros((*query.shape[:3], value.shape[3]))
        differentiable = [index for index, is_wanted in enumerate(wanted[3:]) if is_wanted]
        results = flex_attention_backward(grad_out, grad_lse, query, key, value, captured, *ctx.options, differentiable)
        gradients: list[Tensor | None] = [None] * len(wanted)
        for index, gradient in zip([0, 1, 2, *(3 + index for index in differentiable)], results, strict=True):
            gradients[index] = gradient if wanted[index] else None
        return None, None, None, None, *gradients


# Position of the first tensor among the arguments of the function.
_FIRST_TENSOR = 4
