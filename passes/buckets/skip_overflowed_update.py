"""skip_overflowed_update: let an optimizer whose gradients overflowed, or a step that is not finite, change nothing.

Each optimizer skips its update if its own gradients overflow, as with ``torch.amp.GradScaler.step``, or if gradients
overflow that its own were edited with. After an overflow of scaled gradients the loss scale falls, by the formulas of
``torch._amp_update_scale_`` with the hysteresis of Megatron-LM's ``DynamicGradScaler`` and a minimum scale; the
defaults, 1 and 0, give torch's formulas. A step that is not finite for other reasons (``config.checks.on_nonfinite``)
keeps the scale and the buffers as well.
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
from zerograph.ir.rewrite import emit
from zerograph.ir.sbp import Signature, broadcast
from zerograph.ir.step_graph import (
    found_inf_role,
    found_infs,
    inputs_by_name,
    output_nodes,
    output_with_role,
    writes,
)
from zerograph.passes.buckets.owner_updates import owner_update
from zerograph.passes.context import Context
from zerograph.passes.edits import add_input, on_device

aten = torch.ops.aten
_UPDATE = Origin("update")


def skip_overflowed_update(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Skip the update of an optimizer whose gradients overflowed or, on request, of a step that is not finite."""
    graph = module.graph
    overflows, residue = found_infs(graph), output_with_role(graph, "check", NOT_FINITE.name)
    if not overflows and residue is None:
        return module
    not_finite, skip_numbers = None, overflows
    if residue is not None:
        not_finite, skip_numbers = _finite_check(graph, residue, overflows, context.numerics.scaler)
    # For each number that is not 0 to skip an update: the condition, by device.
    skipped = {number: {number.meta["val"].device: _is_set(graph, number)} for number in skip_numbers.values()}
    buffer_conditions = None if not_finite is None else {not_finite.meta["val"].device: not_finite}
    for write, target, value in list(writes(graph)):
        role = meta(target)["role"]
        if role.bucket is not None and role.bucket in context.updates:
            number = context.updates[role.bucket].found_inf_of(skip_numbers)
            assert number is not None
            if value.all_input_nodes and value.all_input_nodes[0].target is owner_update:
                _guard_owner_update(value.all_input_nodes[0], number)
                continue
            conditions = skipped[number]
        elif role.kind == "buffer" and buffer_conditions is not None:
            # Buffers are computed in forward: an overflow of scaled gradients does not concern them.
            conditions = buffer_conditions
        else:
            continue
        with graph.inserting_before(write):
            new = emit(graph, aten.where.self, (_condition_for(target, conditions), target, value), _UPDATE)
        write.update_arg(1, new)
    if context.numerics.scaler is not None and context.numerics.scaler.dynamic and overflows:
        first_conditions = {number: next(iter(conditions.values())) for number, conditions in skipped.items()}
        flags = [
            first_conditions[overflow] if overflow in first_conditions else _is_set(graph, overflow)
            for overflow in overflows.values()
        ]
        _update_scale(graph, _any(graph, flags), context.numerics.scaler, not_finite)
    return module


def _is_set(graph: fx.Graph, number: fx.Node) -> fx.Node:
    with graph.inserting_before(number.next):
        return emit(graph, aten.ne.Scalar, (number, 0), _UPDATE)


def _any(graph: fx.Graph, flags: Sequence[fx.Node]) -> fx.Node:
    """Emit the logical or of the flags."""
    with graph.inserting_before(max(flags).next):
        return functools.reduce(lambda left, right: _emit_update(graph, aten.logical_or.default, left, right), flags)


def _finite_check(
    graph: fx.Graph, residue: fx.Node, overflows: Mapping[str, fx.Node], scaler: GradScaler | None
) -> tuple[fx.Node, dict[str, fx.Node]]:
    """Emit whether the step is not finite, and for each optimizer a number that is not 0 to skip its update.

    The graph returns these numbers instead of the overflows. If no loss is scaled there is one number, under ``""``.
    """
    nodes = dict(zip(meta(graph.output_node())["roles"], output_nodes(graph), strict=True))
    scaled = nodes.pop(SCALED_GRADIENTS, None)
    inputs = [node for node in (residue, scaled, *overflows.values()) if node is not None]
    with graph.inserting_before(max(inputs).next):
        op = functools.partial(_emit_update, graph)
        if scaled is not None:
            assert scaler is not None
            residue = op(aten.add.Tensor, residue, _unscalable_residue(graph, scaled, scaler))
        not_finite = op(aten.ne.Scalar, residue, 0)
        numbers = {}
        for optimizer in overflows or [""]:
            skip = not_finite
            if optimizer in overflows:
                skip = op(aten.logical_or.default, not_finite, op(aten.ne.Scalar, overflows[optimizer], 0))
            numbers[optimizer] = op(aten._to_copy.default, skip, dtype=torch.float32)
    # The user's outputs come first.
    returned_numbers = {found_inf_role(optimizer): number for optimizer, number in numbers.items()}
    for role in (*returned_numbers, NOT_FINITE):
        nodes.pop(role, None)
    nodes |= returned_numbers | {NOT_FINITE: residue}
    output = graph.output_node()
    output.args = (tuple(nodes.values()),)
    meta(output)["roles"] = list(nodes)
    return not_finite, numbers


def _unscalable_residue(graph: fx.Graph, scaled: fx.Node, scaler: GradScaler) -> fx.Node:
    """Emit the residue of the scaled gradients where the scale cannot fall, else 0."""
    if not scaler.dynamic:
        return scaled
    op = functools.partial(_emit_update, graph)
    scale = inputs_by_name(graph, "scaler")["scale"]
    lowest = op(aten.ge.Tensor, _lowered(graph, scale, scaler), scale)
    zero = op(aten.full.default, [], 0.0, dtype=torch.float32, device=scaled.meta["val"].device)
    return op(aten.where.self, lowest, scaled, zero)


def _condition_for(target: fx.Node, conditions: dict[torch.device, fx.Node]) -> fx.Node:
    """Return the condition on the device of ``target`` (step counts are on the CPU); one copy per device."""
    device = target.meta["val"].device
    if device not in conditions:
        first = next(iter(conditions.values()))
        with first.graph.inserting_before(first.next):
            conditions[device] = on_device(first, device, _UPDATE)
    return conditions[device]


def _guard_owner_update(update: fx.Node, number: fx.Node) -> None:
    """Add the condition to the hyperparameters of the update."""
    flat, gradient, numbers, states = update.args
    assert isinstance(numbers, (list, tuple))
    if number in numbers:
        return
    update.args = (flat, gradient, [*numbers, number], states)
    index = 2 + len(numbers)
    meta(update)["signatures"] = tuple(
        Signature((*signature.inputs[:index], broadcast, *signature.inputs[index:]), signature.outputs)
        for signature in meta(update)["signatures"]
    )


def _lowered(graph: fx.Graph, scale: fx.Node, scaler: GradScaler) -> fx.Node:
    scaled = _emit_update(graph, aten.mul.Tensor, scale, scaler.backoff_factor)
    return _emit_update(graph, aten.clamp_min.default, scaled, scaler.min_scale)


def _update_scale(graph: fx.Graph, overflow: fx.Node, scaler: GradScaler, not_finite: fx.Node | None) -> None:
    """Emit the update of the loss scale.

    Args:
        graph: the step graph.
        overflow: whether a scaled gradient overflowed.
        scaler: factors and limits.
        not_finite: whether the scale stays in any case; None: never.
    """
    scale = inputs_by_name(graph, "scaler")["scale"]
    device = scale.meta["val"].device
    roles = Role("scaler", "growth_tracker"), Role("scaler", "hysteresis_tracker")
    steps, hysteresis = (add_input(graph, role, (), torch.int32, device) for role in roles)
    with graph.inserting_before(graph.output_node()):
        op = functools.partial(_emit_update, graph)
        zero, one = (op(aten.full.default, [], value, dtype=torch.int32, device=device) for value in (0, 1))
        decremented = op(aten.sub.Tensor, hysteresis, one)
        lowered = _lowered(graph, scale, scaler)
        lowered = op(aten.where.self, op(aten.le.Scalar, decremented, 0), lowered, scale)
        incremented = op(aten.add.Tensor, steps, one)
        grows = op(aten.eq.Scalar, incremented, scaler.growth_interval)
        raised = op(aten.mul.Tensor, scale, scaler.growth_factor)
        # The scale does not grow beyond the largest finite number.
        finite = op(aten.lt.Scalar, raised, float("inf"))
        raised = op(aten.where.self, op(aten.logical_and.default, grows, finite), raised, scale)
        restarts = op(aten.logical_or.default, overflow, grows)
        full = op(aten.full.default, [], scaler.hysteresis, dtype=torch.int32, device=device)
        new_hysteresis = op(aten.where.self, grows, full, hysteresis)
        counted = op(aten.where.self, restarts, zero, incremented)
        if scaler.growth_delay:
            delayed = op(aten.full.default, [], -scaler.growth_delay, dtype=torch.int32, device=device)
            counted = op(aten.where.self, overflow, delayed, counted)
        for target, value in (
            (scale, op(aten.where.self, overflow, lowered, raised)),
            (steps, counted),
            (hysteresis, op(aten.where.self, overflow, decremented, new_hysteresis)),
        ):
            new = value if not_finite is None else op(aten.where.self, not_finite, target, value)
            op(aten.copy_.default, target, new)


def _emit_update(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return emit(graph, target, args, _UPDATE, **kwargs)
