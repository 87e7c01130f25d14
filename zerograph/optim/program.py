"""Trace one parameter's update as a small graph, elementwise or not.

An optimizer is traced once for each distinct (hyperparameters, shape, dtype), on fake tensors, through its own
``step()``. If every operator of the trace is pointwise over the parameter's shape and over 0-d tensors, the graph
computes the same numbers on any tensor of that dtype, so it can update a flat bucket. Two parameters share a flat
bucket only if their traces are equal operator by operator, constants included. If the optimizer read no tensor's size,
this is so for all shapes, and one trace is enough. Any other update *mixes* elements: its graph is only for whole
parameters of that shape.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import pytree
from zerograph.ir.metadata import meta
from zerograph.ir.rewrite import replace_node
from zerograph.ir.update_program import Path, StateSpec, UpdateProgram
from zerograph.optim import hyperparameters
from zerograph.optim.beginning import beginning
from zerograph.optim.branches import functional
from zerograph.optim.hyperparameters import Lift, Watched
from zerograph.optim.memory import FACTORIES, root_of
from zerograph.optim.proofs import mixing, refuse_random
from zerograph.optim.sampling import Sample, StateTensor, both, width
from zerograph.optim.surroundings import is_known

aten = torch.ops.aten


@dataclass
class Programs:
    """A cache of update programs.

    Attributes:
        traced: programs by optimizer, hyperparameters, dtype and device, and by shape if it matters.
        separate: keys of programs that were proved to read no other parameter.
    """

    traced: dict[tuple[Hashable, ...], UpdateProgram] = field(default_factory=dict)
    separate: set[Hashable] = field(default_factory=set)


_OF_TORCH = Programs()


def programs_of(optimizer: torch.optim.Optimizer, own: Programs) -> tuple[Hashable, Programs]:
    """Return the optimizer's part of a key, and the cache of its programs.

    Optimizers of torch and of ``flow.optim`` compute with their groups and the functions of their modules alone, so all
    instances share a cache. A user's class may store anything, so its programs are only for this instance, in the
    graph's cache ``own``.
    """
    kind: Any = type(optimizer)
    if is_known(optimizer):
        # They can be replaced.
        modules = {one.__module__: sys.modules[one.__module__] for one in kind.__mro__[:-1]}
        return (
            kind,
            *(value for one in modules.values() for value in vars(one).values() if callable(value)),
        ), _OF_TORCH
    return id(optimizer), own


def trace_update(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    shape: torch.Size,
    dtype: torch.dtype,
    device: Any,
    programs: Iterable[UpdateProgram] = (),
    lifted: Sequence[Path] = (),
    counts: Sequence[Path] = (),
) -> UpdateProgram:
    """Trace ``optimizer.step()`` for one parameter of ``group``, without changing the optimizer.

    Args:
        programs: programs for other shapes. An equal one is returned instead of a new one.
        lifted: hyperparameters besides the learning rate that become inputs.
        counts: numbers of the optimizer and the group that count steps, which become inputs too.

    Raises:
        NotLiftedError: the update uses one of ``lifted`` other than as the number itself or one minus it.
        CaptureError: the update stores a Python number that changes from step to step, branches on a tensor's value,
            draws random numbers, or cannot be traced for another reason.
    """
    name = type(optimizer).__name__
    # In the state of a 0-d parameter, moments and the step count would have equal shapes.
    shape_traced = shape or torch.Size((1,))
    numbers = {hyperparameters.name(path): path for path in lifted}
    thresholds: dict[str, set[float]] = {number: set() for number in numbers}
    for number, path in numbers.items():
        watched = Watched(hyperparameters.read(group, path), thresholds[number])
        group = hyperparameters.replaced(group, path, watched)
    sample = Sample(optimizer, group, shape_traced, dtype, device, counts=counts)
    first, steady, state = both(sample)
    lifts = Lift(first), Lift(steady)
    for number, path in list(numbers.items()):
        old = hyperparameters.read(group, path)
        new = hyperparameters.another(old, thresholds[number])
        if new is None:
            # Only this value takes this branch of the update, so it is a constant there.
            del numbers[number]
            continue
        changed_group = hyperparameters.replaced(group, path, new)
        graphs = both(Sample(optimizer, changed_group, shape_traced, dtype, device, counts=counts))
        for lift, graph in zip(lifts, graphs[:2], strict=True):
            lift.compare(graph, number, old, new)
    for lift in lifts:
        lift.apply(list(numbers))
    refuse_random(steady, name)
    mixes = mixing(steady) or mixing(first)
    initial: Mapping[str, float | None] = {key: initial_value(first, index) for index, key in enumerate(state)}
    # Equal operator by operator. Only such updates may use fused operators.
    alike = None not in initial.values() and key_of(first, list(state)) == key_of(steady, ())
    if not alike:
        values = {number: hyperparameters.read(group, path) for number, path in numbers.items()}
        counted = {
            hyperparameters.name(path): hyperparameters.read(*hyperparameters.place(optimizer, group, path))
            for path in counts
        }
        start = _beginning(first, steady, initial, state, values, counted, sample, mixes)
        initial = initial if start is None else start
    same = alike or start is not None
    specs = {
        key: StateSpec(value.dim() == 0, width(value), initial[key], value.dtype, number=sample.counters.get(key))
        for key, value in state.items()
    }
    key = key_of(steady, ()) if same else key_of(first, ()) + key_of(steady, ())
    shapes = {} if mixes is None else {entry: tuple(value.shape) for entry, value in state.items()}
    if mixes is not None:
        key += f"\n{tuple(shape)}"
    # Fused operators take only the learning rate as a tensor, and have no separate first update.
    fused = bool(group.get("fused")) and alike and mixes is None and not lifted and not counts
    for program in programs:
        if (program.optimizer, program.key, program.state, program.fused is not None) == (name, key, specs, fused):
            return program
    later = functional(steady)
    return UpdateProgram(
        optimizer=name,
        key=key,
        graph=later,
        first=None if same else functional(first),
        fused=_fused(Sample(optimizer, group, shape_traced, dtype, device, fused=True), specs) if fused else None,
        state=specs,
        operators=sum(node.op == "call_function" for node in later.graph.nodes),
        mixes=mixes,
        any_shape=mixes is None and not sample.asks_sizes,
        shapes=shapes,
        numbers={"lr": hyperparameters.LR, **numbers, **{hyperparameters.name(path): path for path in counts}},
        thresholds=thresholds,
    )


def _beginning(
    first: fx.GraphModule,
    steady: fx.GraphModule,
    initial: Mapping[str, float | None],
    state: Mapping[str, Tensor],
    numbers: Mapping[str, float],
    counted: Mapping[str, float],
    sample: Sample,
    mixes: str | None,
) -> Mapping[str, float] | None:
    """Call :func:`beginning`; trace an update that is not elementwise for a small parameter first."""
    if mixes is None and not sample.asks_sizes:
        return beginning(first, steady, initial, state, {**numbers, **counted}, None, sample.dtype)
    small = sample.of_shape(torch.Size(min(size, _SMALL) for size in sample.shape))
    first, steady, state = both(small)
    if state.keys() != initial.keys():
        return None
    return beginning(first, steady, initial, state, counted, small.shape, small.dtype)


_SMALL = 24


def _fused(sample: Sample, state: Mapping[str, StateSpec]) -> fx.GraphModule:
    """Trace the update with fused operators, for the state that the plain update has."""
    specs = {key: StateTensor(() if spec.scalar else sample.shape, spec.dtype) for key, spec in state.items()}
    graph, _ = sample.trace(specs)
    for node in graph.graph.find_nodes(op="call_function", target=aten.detach.default):
        replace_node(node, node.all_input_nodes[0])
    _move_scalars(graph, sample)
    return graph


def _move_scalars(graph: fx.GraphModule, sample: Sample) -> None:
    """Copy step counts to the accelerator as fp32, because its fused kernels read them without a check.

    The step counts themselves are on the CPU, in fp64 (see :func:`width`).
    """
    if sample.device.type == "cpu":
        return
    options: dict[str, Any] = {"dtype": torch.float32, "device": sample.device}
    for node in list(graph.graph.nodes):
        if not str(node.target).startswith("aten._fused_"):
            continue
        arguments = [leaf for leaf in pytree.tree_leaves(node.args) if isinstance(leaf, fx.Node)]
        with graph.graph.inserting_before(node):
            for argument in arguments:
                if argument.meta["val"].dim() == 0:
                    copy = graph.graph.call_function(aten._to_copy.default, (argument,), options)
                    node.replace_input_with(argument, copy)


def key_of(graph: fx.GraphModule, returned_state: Sequence[str]) -> str:
    """Return a text of the operators and constants in order, with tensors numbered.

    State that the graph itself creates counts as an input, so a first update may equal a later one.
    """
    names: dict[fx.Node, str] = {}
    output = graph.graph.output_node().args[0]
    for state, node in zip(returned_state, output if isinstance(output, (list, tuple)) else (), strict=False):
        names[_made_at(node)] = state
    lines: list[str] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            names[node] = meta(node)["update_input"]
        elif node.op == "call_function" and node not in names:
            names[node] = f"%{len(lines)}"
            lines.append(f"{node.target} {_shown(node.args, names)} {_shown(node.kwargs, names)}")
    return "\n".join(lines)


def _shown(argument: Any, names: Mapping[fx.Node, str]) -> str:
    return str(fx.map_arg(argument, lambda node: names.get(node, str(node))))


def _made_at(node: fx.Node) -> fx.Node:
    """Return :func:`root_of` the node; for a constant, the node that copies it."""
    root = root_of(node)
    return next(iter(root.users)) if root.op == "get_attr" else root


def initial_value(first: fx.GraphModule, index: int) -> float | None:
    """Return the constant value of a result of the first update, or None if it is computed."""
    returned = first.graph.output_node().args[0]
    assert isinstance(returned, (list, tuple))
    result = returned[index]
    assert isinstance(result, fx.Node)
    root = root_of(result)
    if root.op == "get_attr":
        constant = getattr(first, str(root.target))
        return float(constant) if isinstance(constant, Tensor) and constant.numel() == 1 else None
    fill = FACTORIES.get(root.target)  # type: ignore[call-overload]
    number = fill(root) if fill else None
    return float(number) if isinstance(number, (int, float)) else None
