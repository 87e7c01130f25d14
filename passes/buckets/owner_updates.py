"""Updates of a bucket whose parameters are each updated by one rank, their owner.

The graph of global tensors has one node for the whole bucket. ``localize`` replaces it by a module of each rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerograph.ir.buckets import Bucket
from zerograph.ir.metadata import meta
from zerograph.ir.rewrite import closure
from zerograph.ir.slots import Slot
from zerograph.ir.update_program import UpdateProgram
from zerograph.passes.context import BucketUpdate

aten = torch.ops.aten


def owner_update(
    flat: Tensor, gradient: Tensor, numbers: Sequence[Tensor], states: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the new values of a bucket and of its state. Stands for the update of every parameter until ``localize``.

    Args:
        flat, gradient: the bucket and its gradient, [padded].
        numbers: hyperparameters, each [].
        states: the bucket's optimizer state, each [padded of its layout].
    """
    return (torch.empty_like(flat), *(torch.empty_like(state) for state in states))


def owner_update_module(bucket: Bucket, update: BucketUpdate, rank: int, *, guarded: bool = False) -> fx.GraphModule:
    """Return a module that updates in place the parameters that ``rank`` owns.

    Its inputs are this rank's shards of the bucket and its gradient, the hyperparameters, if ``guarded`` a 0-d number
    that is not 0 to skip the update, and the shards of the states. It returns the shard of the bucket. Parameters of
    one shape share a program.

    Args:
        bucket: a bucket with owners.
        update: its update programs.
        rank: the owner's position along ZeRO's mesh dimension.
        guarded: whether the update can be skipped.
    """
    root = nn.Module()
    graph = fx.Graph()
    flat, gradient = graph.placeholder("flat"), graph.placeholder("gradient")
    numbers = {name: graph.placeholder(f"number_{index}") for index, name in enumerate(update.numbers)}
    condition = {"found_inf": graph.placeholder("found_inf")} if guarded else {}
    states = {name: graph.placeholder(f"state_{index}") for index, name in enumerate(update.layouts)}
    modules: dict[UpdateProgram, str] = {}
    assert bucket.owners is not None
    for index, (slot, owner) in enumerate(zip(bucket.slots, bucket.owners, strict=True)):
        if owner != rank:
            continue
        program = update.programs[index]
        if program not in modules:
            modules[program] = f"update_{len(modules)}"
            root.add_module(modules[program], in_place_module(program, first=update.first, guarded=guarded))
        shard = bucket.padded // bucket.ranks
        shape = slot.shape or (1,)
        own = {
            "param": _part(graph, flat, slot, slot.offset - rank * shard, shape),
            "grad": _part(graph, gradient, slot, slot.offset - rank * shard, shape),
            **numbers,
            **condition,
        }
        for name, layout in update.layouts.items():
            part = layout.slots[index]
            own[name] = _part(
                graph, states[name], part, part.offset - rank * (layout.padded // layout.ranks), program.shapes[name]
            )
        graph.call_module(modules[program], tuple(own.values()))
    graph.output(flat)
    module = fx.GraphModule(root, graph)
    # Keeps dead-code elimination from removing the call: its results need not be read.
    module._is_impure = True  # type: ignore[assignment]
    return module


def _part(graph: fx.Graph, flat: fx.Node, slot: Slot, offset: int, shape: Sequence[int]) -> fx.Node:
    part = graph.call_function(aten.slice.Tensor, (flat, 0, offset, offset + slot.numel))
    return graph.call_function(aten.view.default, (part, list(shape)))


def in_place_module(program: UpdateProgram, *, first: bool, guarded: bool = False) -> nn.Module:
    """Return the program as a module that writes its results in place and returns nothing.

    Its inputs are param, grad, every number, the condition if ``guarded``, and every state. Of two values that a
    condition selects, only that one is computed, where the CPU knows the condition.
    """
    source = program.first if first and program.first is not None else program.graph
    return _in_place(source, program, guarded, {})


class Branch(nn.Module):
    """Run one of two updates, by a condition on 0-d inputs."""

    def __init__(self, condition: fx.GraphModule, yes: nn.Module, no: nn.Module) -> None:
        super().__init__()
        self.condition, self.yes, self.no = condition, yes, no

    def forward(self, *inputs: Tensor) -> None:
        """Update the parameter and its state."""
        (self.yes if self.condition(*inputs) else self.no)(*inputs)


def _in_place(
    source: fx.GraphModule, program: UpdateProgram, guarded: bool, chosen: Mapping[fx.Node, int]
) -> nn.Module:
    """Return a module for the update where conditions are known: by condition, the position of the selected value."""
    ends = [node for node in source.graph.nodes if node.op == "output" or node.target is aten.copy_.default]
    needed = closure(ends, lambda node: _read(node, chosen))
    selections = [node for node in needed if node.target is aten.where.self and node.args[0] not in chosen]
    conditions = {node.args[0] for node in selections if _is_known(node.args[0])}
    condition = next((node for node in source.graph.nodes if node in conditions), None)
    if condition is None:
        return _module(source, program, guarded, needed, chosen, None)
    asking = closure([condition], lambda node: _read(node, chosen))
    asked = _module(source, program, guarded, asking, chosen, condition)
    yes, no = (_in_place(source, program, guarded, {**chosen, condition: position}) for position in (1, 2))
    return Branch(asked, yes, no)


def _read(node: fx.Node, chosen: Mapping[fx.Node, int]) -> list[Any]:
    is_chosen = node.target is aten.where.self and node.args[0] in chosen
    return [node.args[chosen[node.args[0]]]] if is_chosen else node.all_input_nodes  # type: ignore[index]


def _is_known(condition: Any) -> bool:
    """Return True for a truth that is computed on the CPU from 0-d inputs alone."""
    value = condition.meta.get("val")
    is_scalar = isinstance(value, Tensor) and not value.dim() and value.device.type == "cpu"
    return is_scalar and all(map(_is_known, condition.all_input_nodes))


def _module(
    source: fx.GraphModule,
    program: UpdateProgram,
    guarded: bool,
    needed: Collection[fx.Node],
    chosen: Mapping[fx.Node, int],
    result: fx.Node | None,
) -> fx.GraphModule:
    """Return a module of the needed nodes that writes the results in place, or returns this one."""
    graph = fx.Graph()
    inputs = {name: graph.placeholder(name) for name in ("param", "grad")}
    inputs |= {name: graph.placeholder(f"number_{index}") for index, name in enumerate(program.numbers)}
    overflow = graph.call_function(aten.ne.Scalar, (graph.placeholder("found_inf"), 0)) if guarded else None
    inputs |= {name: graph.placeholder(f"state_{index}") for index, name in enumerate(program.state)}
    if overflow is not None and any("linalg" in str(node.target) for node in source.graph.nodes):
        # The results are discarded, but factorisations raise an error on values that are not finite.
        inputs["grad"] = graph.call_function(aten.where.ScalarSelf, (overflow, 0, inputs["grad"]))
    copies: dict[fx.Node, fx.Node] = {}
    for node in source.graph.nodes:
        if node.op == "placeholder":
            copies[node] = inputs[meta(node)["update_input"]]
        elif node not in needed:
            continue
        elif node.op == "output":
            returned = node.args[0]
            for name, new in zip(program.state, returned if isinstance(returned, (list, tuple)) else (), strict=False):
                _write(graph, inputs[name], fx.map_arg(new, copies.__getitem__), overflow)
        elif node.target is aten.copy_.default:
            target, value = (copies[argument] for argument in node.all_input_nodes)
            _write(graph, target, value, overflow)
        elif (read := _read(node, chosen)) != node.all_input_nodes:
            copies[node] = copies[read[0]]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(() if result is None else copies[result])
    return fx.GraphModule(source, graph)


def _write(graph: fx.Graph, target: fx.Node, value: Any, overflow: fx.Node | None) -> None:
    if overflow is not None:
        value = graph.call_function(aten.where.self, (overflow, target, value))
    graph.call_function(aten.copy_.default, (target, value))
