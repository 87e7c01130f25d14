"""skip_overflowed_update: an optimizer whose gradients overflowed changes nothing, nor does a step that is not finite.

Each optimizer skips its update for an overflow of its own gradients, as with ``torch.amp.GradScaler.step``, and for one
of others' gradients that its own were edited with.
After an overflow of scaled gradients the loss scale falls, by the formulas of ``torch._amp_update_scale_``, with the
hysteresis of Megatron-LM's ``DynamicGradScaler`` and a smallest scale; with the defaults, 1 and 0, they say the same.
What is not finite for other reasons (``config.on_nonfinite``) leaves the scale alone as well, and the buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from zerograph.ir.finite_check import NOT_FINITE, SCALED_GRADIENTS
from zerograph.ir.grad_scaler import GradScaler
from zerograph.ir.metadata import Origin, Role, meta
from zerograph.ir.rewrite import emit, fake, first_computed
from zerograph.ir.sbp import Signature, broadcast
from zerograph.ir.step_graph import found_inf_role, found_infs, output_nodes, output_with_role, placeholders, writes
from zerograph.passes.buckets.deal import dealt_update
from zerograph.passes.context import Context

aten = torch.ops.aten
_UPDATE = Origin("update")


def skip_overflowed_update(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Keep what an optimizer updates where its gradients overflowed or, on request, the step is not finite."""
    graph = module.graph
    overflows, residue = found_infs(graph), output_with_role(graph, "check", NOT_FINITE.name)
    if not overflows and residue is None:
        return module
    held, skips = None, overflows
    if residue is not None:
        held, skips = _checked(graph, residue, overflows, context.numerics.scaler)
    # By the number that is not 0 where an optimizer changes nothing: the condition on each device.
    skipped = {skip: {skip.meta["val"].device: _is_set(graph, skip)} for skip in skips.values()}
    of_buffers = None if held is None else {held.meta["val"].device: held}
    for write, target, value in list(writes(graph)):
        role = meta(target)["role"]
        if role.bucket is not None and role.bucket in context.updates:
            skip = context.updates[role.bucket].number_of(skips)
            assert skip is not None
            if value.all_input_nodes and value.all_input_nodes[0].target is dealt_update:
                _guard_dealt(value.all_input_nodes[0], skip)
                continue
            conditions = skipped[skip]
        elif role.kind == "buffer" and of_buffers is not None:
            # An overflow of scaled gradients says nothing against what forward saw.
            conditions = of_buffers
        else:
            continue
        with graph.inserting_before(write):
            kept = emit(graph, aten.where.self, (_on(target, conditions), target, value), _UPDATE)
        write.update_arg(1, kept)
    if context.numerics.scaler is not None and context.numerics.scaler.dynamic and overflows:
        by_overflow = {number: next(iter(conditions.values())) for number, conditions in skipped.items()}
        flags = [by_overflow[one] if one in by_overflow else _is_set(graph, one) for one in overflows.values()]
        _update_scale(graph, _any(graph, flags), context.numerics.scaler, held)
    return module


def _is_set(graph: fx.Graph, number: fx.Node) -> fx.Node:
    with graph.inserting_before(number.next):
        return emit(graph, aten.ne.Scalar, (number, 0), _UPDATE)


def _any(graph: fx.Graph, flags: Sequence[fx.Node]) -> fx.Node:
    """Return whether any of the flags is set."""
    with graph.inserting_before(max(flags).next):
        return functools.reduce(lambda one, other: _made(graph, aten.logical_or.default, one, other), flags)


def _checked(
    graph: fx.Graph, residue: fx.Node, overflows: Mapping[str, fx.Node], scaler: GradScaler | None
) -> tuple[fx.Node, dict[str, fx.Node]]:
    """Return whether the step is not finite, and the numbers that are not 0 where an optimizer changes nothing.

    The graph returns these instead of the overflows; there is one for all, under ``""``, if no loss is scaled.
    """
    nodes = dict(zip(meta(graph.output_node())["roles"], output_nodes(graph), strict=True))
    scaled = nodes.pop(SCALED_GRADIENTS, None)
    read = [node for node in (residue, scaled, *overflows.values()) if node is not None]
    with graph.inserting_before(max(read).next):
        made = functools.partial(_made, graph)
        if scaled is not None:
            assert scaler is not None
            residue = made(aten.add.Tensor, residue, _beyond_the_scaler(graph, scaled, scaler))
        held = made(aten.ne.Scalar, residue, 0)
        numbers = {}
        for optimizer in overflows or [""]:
            skip = held
            if optimizer in overflows:
                skip = made(aten.logical_or.default, held, made(aten.ne.Scalar, overflows[optimizer], 0))
            numbers[optimizer] = made(aten._to_copy.default, skip, dtype=torch.float32)
    # What the user gets comes first.
    returned_numbers = {found_inf_role(optimizer): number for optimizer, number in numbers.items()}
    for role in (*returned_numbers, NOT_FINITE):
        nodes.pop(role, None)
    nodes |= returned_numbers | {NOT_FINITE: residue}
    output = graph.output_node()
    output.args = (tuple(nodes.values()),)
    meta(output)["roles"] = list(nodes)
    return held, numbers


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
    meta(update)["signatures"] = tuple(
        Signature((*one.inputs[:at], broadcast, *one.inputs[at:]), one.outputs) for one in meta(update)["signatures"]
    )


def _scale(graph: fx.Graph) -> fx.Node:
    return next(node for node in placeholders(graph, "scaler") if meta(node)["role"].name == "scale")


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
    meta(node).update({"role": Role("scaler", name), "val": fake(graph, (), torch.int32, device)})
    return node


def _made(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return emit(graph, target, args, _UPDATE, **kwargs)
