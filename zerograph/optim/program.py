"""Trace one parameter's update as a small graph, elementwise or not.

An optimizer is traced once for each distinct (hyperparameters, shape, dtype), on fake tensors, through its own
``step()``. If every operator of the trace is pointwise over the parameter's shape and over 0-d tensors, the graph
computes the same numbers on any tensor of that dtype, so it can update a flat bucket. Two parameters share a flat
bucket only if their traces are equal operator by operator, constants included. If the optimizer read no tensor's size,
this is so for all shapes, and one trace is enough. Any other update *mixes* elements: its graph is only for whole
parameters of that shape.

The graph also proves that the update reads no other parameter and draws nothing. Initial state is searched from which a
later update computes the first one, so that one compiled step does both.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import pytree
from zerograph.errors import CaptureError
from zerograph.ir.alias import viewed
from zerograph.ir.gradient_edits import is_elementwise
from zerograph.ir.metadata import meta
from zerograph.ir.rewrite import replace_node
from zerograph.ir.step_graph import output_nodes, placeholders
from zerograph.ir.update_program import Path, StateSpec, UpdateProgram
from zerograph.optim import hyperparameters
from zerograph.optim.branches import functional
from zerograph.optim.hyperparameters import Lift, Watched
from zerograph.optim.sampling import FACTORIES, Sample, StateTensor, both, root_of, width
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
    for state, node in zip(returned_state, output_nodes(graph.graph), strict=False):
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
    root = root_of(output_nodes(first.graph)[index])
    if root.op == "get_attr":
        constant = getattr(first, str(root.target))
        return float(constant) if isinstance(constant, Tensor) and constant.numel() == 1 else None
    fill = FACTORIES.get(root.target)  # type: ignore[call-overload]
    number = fill(root) if fill else None
    return float(number) if isinstance(number, (int, float)) else None


def mixing(graph: fx.GraphModule) -> str | None:
    """Describe the first operator that makes the update not elementwise, with its line."""
    mixing_nodes: list[fx.Node] = []
    for node in graph.graph.nodes:
        values = [node.meta.get("val"), *(argument.meta.get("val") for argument in node.all_input_nodes)]
        tensors = any(isinstance(value, Tensor) and value.dim() for value in values)
        # A constant with dimensions has the parameter's shape, or is broadcast over it.
        constant = any(argument.op == "get_attr" and argument.meta["val"].dim() for argument in node.all_input_nodes)
        if node.op == "call_function" and tensors and (constant or not is_elementwise(node.target)):
            mixing_nodes.append(node)
    if not mixing_nodes:
        return None
    # A view says less about the update than an operator that computes.
    telling = [node for node in mixing_nodes if not getattr(node.target, "is_view", False)] or mixing_nodes
    return f"{telling[0].target} at {line_of(telling[0])} mixes elements"


def check_separate(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    shape: torch.Size,
    dtype: torch.dtype,
    device: Any,
    counts: Sequence[Path] = (),
) -> None:
    """Prove by data flow that the update of a parameter reads no other parameter: trace two of one shape together.

    Args:
        counts: numbers that count steps, which are inputs.

    Raises:
        CaptureError: it reads another parameter (for a norm over all gradients, for example).
    """
    sample = Sample(optimizer, group, shape or torch.Size((1,)), dtype, device, counts=counts)
    both, _ = sample.trace(None, parameters=2)
    # The key is the node that allocated the memory: in-place operators and views share it.
    reads: dict[fx.Node, set[str]] = {}
    shared = {"lr", *map(hyperparameters.name, counts)}
    for node in both.graph.nodes:
        if node.op == "placeholder":
            name = meta(node)["update_input"]
            reads[node] = set() if name in shared else {"second" if name.endswith(" 1") else "first"}
        elif node.op != "output":
            memory = _memory(node)
            sources = reads.setdefault(memory, set())
            # A factory takes a shape from a tensor, and no value.
            read = [] if node.target in FACTORIES else node.all_input_nodes
            sources |= {source for argument in read for source in reads[_memory(argument)]}
            if len(sources) > 1:
                raise CaptureError(
                    f"{type(optimizer).__name__} updates a parameter from other parameters' values or gradients: "
                    f"{node.target} at {line_of(node)}\n"
                    "The graph updates each parameter separately. Call code that needs all gradients (clipping, a "
                    "global norm) after backward(), in build() or in the loop."
                )


def _memory(node: fx.Node) -> fx.Node:
    """Return the node that allocated the memory of ``node``, looking through views."""
    root = root_of(node)
    while (source := viewed(root)) is not None:
        root = root_of(source)
    return root


def refuse_random(graph: fx.GraphModule, optimizer: str) -> None:
    """Raise a CaptureError if the update draws random numbers."""
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CaptureError(
                f"{optimizer}.step() draws random numbers ({node.target} at {line_of(node)})\n"
                "They would differ between ranks, but must be equal on all. Use another optimizer."
            )


def line_of(node: fx.Node) -> str:
    """Return the line of the optimizer's source that the node comes from."""
    return str(node.meta.get("custom", {}).get("line") or "a line unknown")


# Adding -0.0, or -0.0 times a positive number, changes no bit of a number, not even the sign of a zero.
# Adding 0.0 does: -0.0 + 0.0 is 0.0.
_NEUTRAL = -0.0
_SPECIAL = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-30, -3e-39, 1e30, 0.1)
_ELEMENTS = 4096
_TRIALS = 3


def beginning(
    first: fx.GraphModule,
    steady: fx.GraphModule,
    initial: Mapping[str, float | None],
    state: Mapping[str, Tensor],
    numbers: Mapping[str, float],
    shape: Sequence[int] | None,
    dtype: torch.dtype,
) -> dict[str, float] | None:
    """Return initial values of the state with which ``steady`` computes what ``first`` does, or None.

    Both graphs are run on many kinds of numbers, and must agree in every bit. SGD's momentum, which the first update
    sets to the gradient, starts as -0.0.

    Args:
        first: the traced graph of the first update.
        steady: the traced graph of later updates.
        initial: the constant that the first update creates each entry from; None for an entry that is computed.
        state: the entries after the first update.
        numbers: hyperparameters that are inputs, by name.
        shape: the shape that the graphs were traced for; None for any.
        dtype: the parameter's dtype.
    """
    begin = {name: _NEUTRAL if value is None else value for name, value in initial.items()}
    if any(initial[name] is None and not value.is_floating_point() for name, value in state.items()):
        return None
    size = (_ELEMENTS,) if shape is None else tuple(shape)
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            agreeing = all(
                _agree(first, steady, begin, state, numbers, _values(size, dtype, generator), trial)
                for trial in range(_TRIALS)
            )
    except (RuntimeError, NotImplementedError):
        # The graph has operators of another device.
        return None
    return begin if agreeing else None


def _agree(
    first: fx.GraphModule,
    steady: fx.GraphModule,
    starts: Mapping[str, float],
    state: Mapping[str, Tensor],
    numbers: Mapping[str, float],
    values: Mapping[str, Tensor],
    trial: int,
) -> bool:
    """Run both graphs on the same values, and compare the parameter and the state after them."""
    scale = 1.0 + trial / 4
    sources: dict[str, Callable[[], Tensor]] = {name: value.clone for name, value in values.items()}
    sources["lr"] = lambda: torch.tensor(0.1 * scale, dtype=torch.float64)
    sources |= {name: _constant(value / scale, ()) for name, value in numbers.items()}
    for name, value in state.items():
        size = value.shape if values["param"].dim() != 1 or not value.dim() else values["param"].shape
        sources[name] = _constant(starts[name], size, width(value))
    results = []
    for graph in (first, steady):
        inputs = {
            meta(node)["update_input"]: sources[meta(node)["update_input"]]() for node in placeholders(graph.graph)
        }
        returned = graph(*inputs.values())
        left = dict(zip(state, returned, strict=True)) if graph is first else {name: inputs[name] for name in state}
        results.append({"param": inputs["param"], **left})
    return all(same_bits(results[0][name], results[1][name]) for name in results[0])


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal in every bit, except for the payload of NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    same = (first == second) & (first.signbit() == second.signbit()) if first.is_floating_point() else first == second
    return bool((same | (first.isnan() & second.isnan())).all())


def _constant(value: float, size: Sequence[int], dtype: torch.dtype = torch.float64) -> Callable[[], Tensor]:
    return lambda: torch.full(tuple(size), value, dtype=dtype)


def _values(size: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw a parameter and a gradient over many orders of magnitude, with special numbers if the shape is free."""
    values = {}
    for place, name in enumerate(("param", "grad")):
        value = torch.randn(size, generator=generator, dtype=torch.float64)
        value *= 10 ** torch.empty(size, dtype=torch.float64).uniform_(-6, 3, generator=generator)
        if tuple(size) == (_ELEMENTS,):
            pairs = torch.tensor(list(itertools.product(_SPECIAL, _SPECIAL)), dtype=torch.float64)
            value[: len(pairs)] = pairs[:, place]
        values[name] = value.to(dtype)
    return values
