"""guard: a step whose gradients overflowed, or whose loss or gradients are not finite, changes no state.

After an overflow of scaled gradients the loss scale falls, by the formulas of ``torch._amp_update_scale_``, with the
hysteresis of Megatron-LM's ``DynamicGradScaler`` and a smallest scale; with the defaults, 1 and 0, they say the same.
What is not finite for other reasons (``config.on_nonfinite``) leaves the scale alone as well, and the buffers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from zerograph.finite import NOT_FINITE, SCALED_GRADIENTS
from zerograph.grad_scaler import GradScaler
from zerograph.passes.context import Context
from zerograph.passes.deal import dealt_update
from zerograph.passes.edit import emit, fake, first_computed
from zerograph.passes.rules import Signature
from zerograph.sbp import broadcast
from zerograph.step_graph import Origin, Role, found_inf, output_nodes, placeholders, returned, writes

aten = torch.ops.aten
_UPDATE = Origin("update")
_FOUND_INF = Role("scaler", "found_inf")


def guard(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Where a gradient overflowed or, on request, is not finite, on any rank, parameters and state stay."""
    graph = module.graph
    overflow, residue = found_inf(graph), returned(graph, "check", NOT_FINITE.name)
    if overflow is None and residue is None:
        return module
    held, skip = None, overflow
    if residue is not None:
        held, skip = _checked(graph, residue, overflow, context.scaler)
    assert skip is not None
    skipped = _is_set(graph, skip)
    updated = {skip.meta["val"].device: skipped}
    by_kind = {"bucket": updated, "state": updated}
    if held is not None:
        # An overflow of scaled gradients says nothing against what forward saw.
        by_kind["buffer"] = {held.meta["val"].device: held}
    for write, target, value in list(writes(graph)):
        conditions = by_kind.get(target.meta["role"].kind)
        if conditions is None:
            continue
        if value.all_input_nodes and value.all_input_nodes[0].target is dealt_update:
            _guard_dealt(value.all_input_nodes[0], skip)
            continue
        with graph.inserting_before(write):
            kept = emit(graph, aten.where.self, (_on(target, conditions), target, value), _UPDATE)
        write.update_arg(1, kept)
    if context.scaler is not None and context.scaler.dynamic:
        assert overflow is not None
        overflowed = skipped if held is None else _is_set(graph, overflow)
        _update_scale(graph, overflowed, context.scaler, held)
    return module


def _is_set(graph: fx.Graph, number: fx.Node) -> fx.Node:
    with graph.inserting_before(number.next):
        return emit(graph, aten.ne.Scalar, (number, 0), _UPDATE)


def _checked(
    graph: fx.Graph, residue: fx.Node, overflow: fx.Node | None, scaler: GradScaler | None
) -> tuple[fx.Node, fx.Node]:
    """Whether the step is not finite, and the number that is not 0 where it changes nothing: the graph returns it."""
    nodes = dict(zip(graph.output_node().meta["roles"], output_nodes(graph), strict=True))
    scaled = nodes.pop(SCALED_GRADIENTS, None)
    read = [node for node in (residue, scaled, overflow) if node is not None]
    with graph.inserting_before(max(read).next):
        made = functools.partial(_made, graph)
        if scaled is not None:
            assert scaler is not None
            residue = made(aten.add.Tensor, residue, _beyond_the_scaler(graph, scaled, scaler))
        held = skip = made(aten.ne.Scalar, residue, 0)
        if overflow is not None:
            skip = made(aten.logical_or.default, held, made(aten.ne.Scalar, overflow, 0))
        number = made(aten._to_copy.default, skip, dtype=torch.float32)
    # What the user gets comes first.
    for role in (_FOUND_INF, NOT_FINITE):
        nodes.pop(role, None)
    nodes |= {_FOUND_INF: number, NOT_FINITE: residue}
    output = graph.output_node()
    output.args = (tuple(nodes.values()),)
    output.meta["roles"] = list(nodes)
    return held, number


def _beyond_the_scaler(graph: fx.Graph, scaled: fx.Node, scaler: GradScaler) -> fx.Node:
    """The residue of the scaled gradients where the scale cannot fall, else 0."""
    if not scaler.dynamic:
        return scaled
    made = functools.partial(_made, graph)
    scale = _scale(graph)
    lowest = made(aten.ge.Tensor, _lowered(graph, scale, scaler), scale)
    zero = made(aten.full.default, [], 0.0, dtype=torch.float32, device=scaled.meta["val"].device)
    return made(aten.where.self, lowest, scaled, zero)


def _on(target: fx.Node, conditions: dict[torch.device, fx.Node]) -> fx.Node:
    """The condition where the target lies: step counts lie on the CPU. Made once for each device."""
    device, value = target.meta["val"].device, target.meta["val"]
    if device not in conditions:
        first = next(iter(conditions.values()))
        with first.graph.inserting_before(first.next):
            conditions[device] = emit(first.graph, aten._to_copy.default, (first,), _UPDATE, device=value.device)
    return conditions[device]


def _guard_dealt(update: fx.Node, found: fx.Node) -> None:
    """The condition is one more of its numbers."""
    flat, gradient, numbers, states = update.args
    assert isinstance(numbers, (list, tuple))
    if found in numbers:
        return
    update.args = (flat, gradient, [*numbers, found], states)
    at = 2 + len(numbers)
    update.meta["signatures"] = tuple(
        Signature((*one.inputs[:at], broadcast, *one.inputs[at:]), one.outputs) for one in update.meta["signatures"]
    )


def _scale(graph: fx.Graph) -> fx.Node:
    return next(node for node in placeholders(graph, "scaler") if node.meta["role"].name == "scale")


def _lowered(graph: fx.Graph, scale: fx.Node, scaler: GradScaler) -> fx.Node:
    fallen = _made(graph, aten.mul.Tensor, scale, scaler.backoff_factor)
    return _made(graph, aten.clamp_min.default, fallen, scaler.min_scale)


def _update_scale(graph: fx.Graph, overflow: fx.Node, scaler: GradScaler, held: fx.Node | None) -> None:
    """``overflow``: whether a scaled gradient did; ``held``: whether the scale stays in any case."""
    scale = _scale(graph)
    device = scale.meta["val"].device
    steps, left = (_tracker(graph, name, device) for name in ("growth_tracker", "hysteresis_tracker"))
    with graph.inserting_before(graph.output_node()):
        made = functools.partial(_made, graph)
        zero, one = (made(aten.full.default, [], value, dtype=torch.int32, device=device) for value in (0, 1))
        fewer = made(aten.sub.Tensor, left, one)
        lowered = _lowered(graph, scale, scaler)
        lowered = made(aten.where.self, made(aten.le.Scalar, fewer, 0), lowered, scale)
        more = made(aten.add.Tensor, steps, one)
        grows = made(aten.eq.Scalar, more, scaler.growth_interval)
        raised = made(aten.mul.Tensor, scale, scaler.growth_factor)
        # The largest finite scale stays.
        finite = made(aten.lt.Scalar, raised, float("inf"))
        raised = made(aten.where.self, made(aten.logical_and.default, grows, finite), raised, scale)
        again = made(aten.logical_or.default, overflow, grows)
        full = made(aten.full.default, [], scaler.hysteresis, dtype=torch.int32, device=device)
        left_now = made(aten.where.self, grows, full, left)
        for target, value in (
            (scale, made(aten.where.self, overflow, lowered, raised)),
            (steps, made(aten.where.self, again, zero, more)),
            (left, made(aten.where.self, overflow, fewer, left_now)),
        ):
            kept = value if held is None else made(aten.where.self, held, target, value)
            made(aten.copy_.default, target, kept)


def _tracker(graph: fx.Graph, name: str, device: torch.device) -> fx.Node:
    with graph.inserting_before(first_computed(graph)):
        node = graph.placeholder(name)
    node.meta |= {"role": Role("scaler", name), "val": fake(graph, (), torch.int32, device)}
    return node


def _made(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return emit(graph, target, args, _UPDATE, **kwargs)
