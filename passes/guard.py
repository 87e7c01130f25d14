"""guard: a step whose gradients overflowed changes nothing but the loss scale.

The formulas are those of ``torch._amp_update_scale_``, with the hysteresis of Megatron-LM's ``DynamicGradScaler`` and a
smallest scale; with the defaults, 1 and 0, they say the same.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from zerograph.grad_scaler import GradScaler
from zerograph.passes.context import Context
from zerograph.passes.deal import dealt_update
from zerograph.passes.edit import emit, fake, first_computed
from zerograph.passes.rules import Signature
from zerograph.sbp import broadcast
from zerograph.step_graph import Origin, Role, found_inf, placeholders, writes

aten = torch.ops.aten
_UPDATE = Origin("update")


def guard(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Where a gradient is infinite or not a number on any rank, parameters and state stay, and the loss scale falls."""
    if context.scaler is None:
        return module
    graph = module.graph
    found = found_inf(graph)
    assert found is not None
    with graph.inserting_before(found.next):
        overflow = emit(graph, aten.ne.Scalar, (found, 0), _UPDATE)
    conditions = {found.meta["val"].device: overflow}
    for write, target, value in list(writes(graph)):
        if target.meta["role"].kind not in ("bucket", "state"):
            continue
        if value.all_input_nodes and value.all_input_nodes[0].target is dealt_update:
            _guard_dealt(value.all_input_nodes[0], found)
            continue
        with graph.inserting_before(write):
            kept = emit(graph, aten.where.self, (_on(target, conditions), target, value), _UPDATE)
        write.update_arg(1, kept)
    if context.scaler.dynamic:
        _update_scale(graph, overflow, context.scaler)
    return module


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


def _update_scale(graph: fx.Graph, overflow: fx.Node, scaler: GradScaler) -> None:
    scale = next(node for node in placeholders(graph, "scaler") if node.meta["role"].name == "scale")
    device = scale.meta["val"].device
    steps, left = (_tracker(graph, name, device) for name in ("growth_tracker", "hysteresis_tracker"))
    with graph.inserting_before(graph.output_node()):
        made = functools.partial(_made, graph)
        zero, one = (made(aten.full.default, [], value, dtype=torch.int32, device=device) for value in (0, 1))
        fewer = made(aten.sub.Tensor, left, one)
        lowered = made(aten.clamp_min.default, made(aten.mul.Tensor, scale, scaler.backoff_factor), scaler.min_scale)
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
            made(aten.copy_.default, target, value)


def _tracker(graph: fx.Graph, name: str, device: torch.device) -> fx.Node:
    with graph.inserting_before(first_computed(graph)):
        node = graph.placeholder(name)
    node.meta |= {"role": Role("scaler", name), "val": fake(graph, (), torch.int32, device)}
    return node


def _made(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return emit(graph, target, args, _UPDATE, **kwargs)
