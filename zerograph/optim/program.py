"""One parameter's update as a small graph, elementwise or not.

An optimizer is traced once for each distinct (hyperparameters, shape, dtype), on fake tensors, through its own
``step()``. If every operator of the trace is pointwise over the parameter's shape and over 0-d tensors, the same
graph computes the same numbers on any tensor of that dtype, so it may be laid over a flat bucket. Two parameters
share a flat bucket only if their traces are the same operator by operator, constants included; where the optimizer
asked no tensor for its size they are, and one trace does for all shapes. Any other update *mixes* elements: its graph
is good for whole parameters of that shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import pytree
from zerograph.errors import CaptureError
from zerograph.ir.functionalize import without_mutation
from zerograph.ir.metadata import meta
from zerograph.ir.step_graph import placeholders
from zerograph.ir.update_program import Path, StateSpec, UpdateProgram
from zerograph.optim import hyperparameters
from zerograph.optim.beginning import beginning
from zerograph.optim.hyperparameters import Lift, Watched
from zerograph.optim.keying import initial_value, key_of
from zerograph.optim.proofs import mixing, refuse_random
from zerograph.optim.sampling import Sample, StateTensor, both, width

aten = torch.ops.aten

UNSUPPORTED = {
    "LBFGS": "it evaluates the loss several times per step, each time depending on values",
    "SparseAdam": "it needs sparse gradients, which have no placement",
}


def refuse_unsupported(optimizer: torch.optim.Optimizer) -> None:
    """Raise of an optimizer of torch that is known to be no graph.

    Raises:
        CaptureError: it says why.
    """
    name = type(optimizer).__name__
    if name in UNSUPPORTED:
        raise CaptureError(f"{name} cannot be part of a step graph: {UNSUPPORTED[name]}\nUse another optimizer.")


def trace_update(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    shape: torch.Size,
    dtype: torch.dtype,
    device: Any,
    known: Iterable[UpdateProgram] = (),
    lifted: Sequence[Path] = (),
) -> UpdateProgram:
    """Trace ``optimizer.step()`` for one parameter of ``group``, leaving the optimizer itself alone.

    Args:
        known: programs for other shapes, to return one of them if it is the same.
        lifted: hyperparameters besides the learning rate that are to be inputs.

    Raises:
        NotLiftedError: the update uses one of ``lifted`` in a way that is not understood.
        CaptureError: the update keeps a Python number that changes from step to step, branches on a tensor's value,
            draws random numbers, or is otherwise no graph.
    """
    name = type(optimizer).__name__
    # In a 0-d parameter's state nobody could tell its moments from the step count.
    shape_traced = shape or torch.Size((1,))
    numbers = {hyperparameters.name(path): path for path in lifted}
    thresholds: dict[str, set[float]] = {number: set() for number in numbers}
    for number, path in numbers.items():
        watched = Watched(hyperparameters.read(group, path), thresholds[number])
        group = hyperparameters.replaced(group, path, watched)
    sample = Sample(optimizer, group, shape_traced, dtype, device)
    first, steady, state = both(sample)
    lifts = Lift(first), Lift(steady)
    for number, path in list(numbers.items()):
        old = hyperparameters.read(group, path)
        new = hyperparameters.another(old, thresholds[number])
        if new is None:
            # Nothing but this very value takes this branch of the update: there it is a constant.
            del numbers[number]
            continue
        other = hyperparameters.replaced(group, path, new)
        graphs = both(Sample(optimizer, other, shape_traced, dtype, device))
        for lift, graph in zip(lifts, graphs[:2], strict=True):
            lift.compare(graph, number, old, new)
    for lift in lifts:
        lift.apply(list(numbers))
    refuse_random(steady, name)
    mixes = mixing(steady) or mixing(first)
    initial: Mapping[str, float | None] = {key: initial_value(first, index) for index, key in enumerate(state)}
    # Operator by operator; fused operators are for these.
    alike = None not in initial.values() and key_of(first, list(state)) == key_of(steady, ())
    if not alike:
        values = {number: hyperparameters.read(group, path) for number, path in numbers.items()}
        found = _beginning(first, steady, initial, state, values, sample, mixes)
        initial = initial if found is None else found
    same = alike or found is not None
    specs = {key: StateSpec(value.dim() == 0, width(value), initial[key], value.dtype) for key, value in state.items()}
    key = key_of(steady, ()) if same else key_of(first, ()) + key_of(steady, ())
    shapes = {} if mixes is None else {entry: tuple(value.shape) for entry, value in state.items()}
    if mixes is not None:
        key += f"\n{tuple(shape)}"
    # Fused operators take no other hyperparameter as a tensor, and make no state of a first update of its own.
    fused = bool(group.get("fused")) and alike and mixes is None and not lifted
    for program in known:
        if (program.optimizer, program.key, program.state, program.fused is not None) == (name, key, specs, fused):
            return program
    functional = _functional(steady)
    return UpdateProgram(
        optimizer=name,
        key=key,
        graph=functional,
        first=None if same else _functional(first),
        fused=_fused(Sample(optimizer, group, shape_traced, dtype, device, fused=True), specs) if fused else None,
        state=specs,
        operators=sum(node.op == "call_function" for node in functional.graph.nodes),
        mixes=mixes,
        any_shape=mixes is None and not sample.asks_sizes,
        shapes=shapes,
        numbers={"lr": hyperparameters.LR, **numbers},
        thresholds=thresholds,
    )


def _beginning(
    first: fx.GraphModule,
    steady: fx.GraphModule,
    initial: Mapping[str, float | None],
    state: Mapping[str, Tensor],
    numbers: Mapping[str, float],
    sample: Sample,
    mixes: str | None,
) -> Mapping[str, float] | None:
    """As :func:`beginning`; an update that is not elementwise is traced for a small parameter."""
    if mixes is None and not sample.asks_sizes:
        return beginning(first, steady, initial, state, numbers, None, sample.dtype)
    small = sample.of_shape(torch.Size(min(size, _SMALL) for size in sample.shape))
    first, steady, state = both(small)
    if state.keys() != initial.keys():
        return None
    return beginning(first, steady, initial, state, {}, small.shape, small.dtype)


_SMALL = 24


def _fused(sample: Sample, state: Mapping[str, StateSpec]) -> fx.GraphModule:
    """Trace the update by fused operators, for the state that the plain update keeps."""
    given = {key: StateTensor(() if spec.scalar else sample.shape, spec.dtype) for key, spec in state.items()}
    graph, _ = sample.trace(given)
    for node in graph.graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.graph.erase_node(node)
    _move_scalars(graph, sample)
    return graph


def _move_scalars(graph: fx.GraphModule, sample: Sample) -> None:
    """Move step counts to the accelerator as fp32, as its fused kernels read them without a check.

    Ours are counted up on the CPU, in fp64 (``width``): what a kernel reads is a copy.
    """
    if sample.device.type == "cpu":
        return
    options: dict[str, Any] = {"dtype": torch.float32, "device": sample.device}
    for node in list(graph.graph.nodes):
        if not str(node.target).startswith("aten._fused_"):
            continue
        given = [one for one in pytree.tree_leaves(node.args) if isinstance(one, fx.Node)]
        with graph.graph.inserting_before(node):
            for one in given:
                if one.meta["val"].dim() == 0:
                    copy = graph.graph.call_function(aten._to_copy.default, (one,), options)
                    node.replace_input_with(one, copy)


def _functional(graph: fx.GraphModule) -> fx.GraphModule:
    nodes = placeholders(graph.graph)
    functional = without_mutation(graph)
    for old, new in zip(nodes, placeholders(functional.graph), strict=True):
        meta(new)["update_input"] = meta(old)["update_input"]
    for node in functional.graph.find_nodes(op="get_attr"):
        constant = getattr(functional, str(node.target))
        if isinstance(constant, Tensor) and constant.dim() == 0:
            with functional.graph.inserting_before(node):
                options: dict[str, Any] = {"dtype": constant.dtype, "device": constant.device}
                full = functional.graph.call_function(aten.full.default, ([], constant.item()), options)
            full.meta.update(node.meta)
            node.replace_all_uses_with(full)
            functional.graph.erase_node(node)
    # No autograd here: what is detached is the tensor itself, and can be written in place as such.
    for node in functional.graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.all_input_nodes[0])
        functional.graph.erase_node(node)
    return functional
