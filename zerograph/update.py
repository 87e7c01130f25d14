"""capture, the optimizer's part: one parameter's update as a small graph, proved elementwise.

An optimizer is traced once for each distinct (hyperparameters, shape, dtype), on fake tensors, through its own
``step()``. If every operator of the trace is pointwise over the parameter's shape and over 0-d tensors, the same
graph computes the same numbers on any tensor of that dtype, so it may be laid over a flat bucket. Two parameters
share a bucket only if their traces are the same operator by operator, constants included.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerograph import _torch
from zerograph.errors import CaptureError
from zerograph.step_graph import placeholders

aten = torch.ops.aten

UNSUPPORTED = {
    "LBFGS": "it evaluates the loss several times per step, each time depending on values",
    "SparseAdam": "it needs sparse gradients, which have no placement",
}


@dataclass(frozen=True)
class StateSpec:
    """One entry of an optimizer's state: shaped as the parameter, or a 0-d tensor.

    ``initial`` is its value before the first update where that is a constant; None where the first update itself
    makes it (SGD's momentum is the first gradient). ``plain_dtype`` is what the optimizer itself would hold.
    """

    scalar: bool
    dtype: torch.dtype
    initial: float | None
    plain_dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class UpdateProgram:
    """An update as a functional graph: placeholders param, grad, state by name, lr; writes as ``copy_`` nodes.

    ``first`` is the graph of the very first update where it differs from the later ones. ``key`` is equal for
    equal programs and says nothing about the shape.
    """

    optimizer: str
    key: str
    graph: fx.GraphModule
    first: fx.GraphModule | None
    state: Mapping[str, StateSpec]
    operators: int


def trace_update(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    shape: torch.Size,
    dtype: torch.dtype,
    device: Any,
    known: Iterable[UpdateProgram] = (),
) -> UpdateProgram:
    """Trace ``optimizer.step()`` for one parameter of ``group``, leaving the optimizer itself alone.

    Args:
        known: programs for other shapes, to return one of them if it is the same.

    Raises:
        CaptureError: the update is not elementwise, keeps a Python number that changes from step to step, reads
            a tensor's value, or belongs to an optimizer that cannot be one graph.
    """
    name = type(optimizer).__name__
    if name in UNSUPPORTED:
        raise CaptureError(f"{name} cannot be part of a step graph: {UNSUPPORTED[name]}\nUse another optimizer.")
    # In a 0-d parameter's state nobody could tell its moments from the step count.
    sample = _Sample(optimizer, group, shape or torch.Size((1,)), dtype, device)
    first, state = sample.trace({})
    steady, _ = sample.trace({key: _StateTensor(value.dim() == 0, _width(value)) for key, value in state.items()})
    _prove_elementwise(steady, shape, name)
    _prove_elementwise(first, shape, name)
    initial = {key: _initial_value(first, index) for index, key in enumerate(state)}
    specs = {key: StateSpec(value.dim() == 0, _width(value), initial[key], value.dtype) for key, value in state.items()}
    same = None not in initial.values() and _key(first, list(state)) == _key(steady, ())
    key = _key(steady, ()) if same else _key(first, ()) + _key(steady, ())
    for program in known:
        if (program.optimizer, program.key, program.state) == (name, key, specs):
            return program
    functional = _functional(steady)
    return UpdateProgram(
        optimizer=name,
        key=key,
        graph=functional,
        first=None if same else _functional(first),
        state=specs,
        operators=sum(node.op == "call_function" for node in functional.graph.nodes),
    )


@dataclass(frozen=True)
class _StateTensor:
    scalar: bool
    dtype: torch.dtype


class _Sample:
    """A copy of the optimizer that owns a single fake parameter of the given shape."""

    def __init__(self, optimizer: Any, group: Mapping[str, Any], shape: torch.Size, dtype: Any, device: Any) -> None:
        self._optimizer, self._group = optimizer, group
        self._shape, self._dtype, self._device = shape, dtype, device

    def trace(self, state: Mapping[str, _StateTensor]) -> tuple[fx.GraphModule, dict[str, Tensor]]:
        """The graph of one ``step()``, with mutation, and the state tensors that the optimizer holds after it."""
        after: dict[str, Tensor] = {}
        names = list(state)

        def step(param: Tensor, grad: Tensor, lr: Tensor, *values: Tensor) -> list[Tensor]:
            held = dict(zip(names, values, strict=True))
            twin = self._twin(param, grad, lr, held)
            numbers = _numbers(twin)
            # The class's own step, without torch's profiling wrapper and without what schedulers put around it.
            function = type(twin).step
            getattr(function, "__wrapped__", function)(twin)
            if held and (changed := _changed(numbers, _numbers(twin))):
                raise CaptureError(
                    f"{type(twin).__name__} keeps a Python number that changes from step to step: {changed}\n"
                    "Keep it as a 0-d tensor in the optimizer's state, so that it is an input of the graph."
                )
            found = twin.state.get(twin.param_groups[0]["params"][0], {})
            after.update({key: value for key, value in found.items() if isinstance(value, Tensor)})
            return [] if names else list(after.values())

        with _torch.fake_mode(), _torch.compiling(), torch.no_grad():
            param, grad = self._fake(), self._fake()
            values = [self._fake_state(spec) for spec in state.values()]
            lr = torch.empty((), dtype=torch.float64)
            try:
                traced = _torch.trace(step, [param, grad, lr, *values])
            except (_torch.DataDependentOutputException, _torch.GuardOnDataDependentSymNode):
                raise CaptureError(
                    f"{type(self._optimizer).__name__}.step() branches on a tensor's value\n"
                    "An update is one graph for all values; use torch.where, or another optimizer."
                ) from None
        _shape_from_param(traced, self._shape)
        _widen_scalars(traced)
        for node, name in zip(placeholders(traced.graph), ["param", "grad", "lr", *names], strict=True):
            node.meta["update_input"] = name
        return traced, after

    def _twin(self, param: Tensor, grad: Tensor, lr: Tensor, state: dict[str, Tensor]) -> Any:
        leaf = nn.Parameter(param)
        leaf.grad = grad
        twin = copy.copy(self._optimizer)
        # A scheduler replaces step() on the instance; the twin must run the class's.
        twin.__dict__ = {key: value for key, value in twin.__dict__.items() if key != "step"}
        group = {**self._group, "params": [leaf], "lr": lr}
        group.update({key: value for key, value in _TRACEABLE.items() if key in group})
        twin.param_groups = [group]
        twin.state = defaultdict(dict, {leaf: dict(state)} if state else {})
        return twin

    def _fake(self) -> Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)

    def _fake_state(self, spec: _StateTensor) -> Tensor:
        if spec.scalar:
            return torch.empty((), dtype=spec.dtype)
        return torch.empty(self._shape, dtype=spec.dtype, device=self._device)


# capturable: bias corrections from tensors, so that the step count is an input. foreach and fused say how torch
# loops over parameters; the graph's bucket has one tensor, and the passes want to see its operators.
_TRACEABLE = {"capturable": True, "foreach": False, "fused": None}


def _width(value: Tensor) -> torch.dtype:
    """Step counts as fp64 on the CPU: bias corrections are as exact as Python's, and never wait for a GPU."""
    return torch.float64 if value.dim() == 0 and value.dtype.is_floating_point else value.dtype


def _shape_from_param(graph: fx.GraphModule, shape: torch.Size) -> None:
    """Tensors made with the parameter's shape written out are made like the parameter instead."""
    param = placeholders(graph.graph)[0]
    for node in list(graph.graph.nodes):
        if node.target in _SIZED and len(shape) and tuple(node.args[_SIZED[node.target]]) == tuple(shape):
            fill = _FACTORIES[node.target](node)
            with graph.graph.inserting_before(node):
                like = graph.graph.call_function(aten.full_like.default, (param, fill), dict(node.kwargs))
            like.meta.update(node.meta)
            node.replace_all_uses_with(like)
            graph.graph.erase_node(node)


def _widen_scalars(graph: fx.GraphModule) -> None:
    """0-d numbers that the first update makes are as wide as those that later ones are given."""
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dim() or value.dtype is not torch.float32:
            continue
        if node.kwargs.get("dtype") is torch.float32:
            node.update_kwarg("dtype", torch.float64)
        elif node.op == "get_attr":
            setattr(graph, str(node.target), getattr(graph, str(node.target)).double())
    graph.recompile()


_SIZED = {aten.zeros.default: 0, aten.ones.default: 0, aten.full.default: 0, aten.new_zeros.default: 1}


def _numbers(optimizer: Any) -> dict[str, Any]:
    """Python numbers that the optimizer holds, by where it holds them."""
    found = {key: value for key, value in vars(optimizer).items() if isinstance(value, (int, float))}
    for state in optimizer.state.values():
        found |= {f"state[{key!r}]": value for key, value in state.items() if isinstance(value, (int, float))}
    for group in optimizer.param_groups:
        found |= {f"param_groups[{key!r}]": value for key, value in group.items() if isinstance(value, (int, float))}
    return found


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    return ", ".join(key for key in after if key not in before or before[key] != after[key])


def _prove_elementwise(graph: fx.GraphModule, shape: torch.Size, optimizer: str) -> None:
    for node in graph.graph.nodes:
        if node.op != "call_function" or _is_pointwise(node.target):
            continue
        values = [node.meta.get("val"), *(given.meta.get("val") for given in node.all_input_nodes)]
        if all(not isinstance(value, Tensor) or value.dim() == 0 for value in values):
            continue
        raise CaptureError(
            f"the update of {optimizer} is not elementwise: "
            f"it uses {node.target} on a parameter of shape {tuple(shape)}\n"
            "Its parameters cannot lie in flat buckets, and this version places no other updates. "
            "Use an elementwise optimizer (SGD, Adam, AdamW, ...)."
        )


# Copies and fills work element by element, but carry no pointwise tag.
_ELEMENTWISE = {
    aten.copy_.default,
    aten.clone.default,
    aten.detach.default,
    aten._to_copy.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
}


def _is_pointwise(target: Any) -> bool:
    return target in _ELEMENTWISE or (isinstance(target, _torch.OpOverload) and torch.Tag.pointwise in target.tags)


_FACTORIES = {
    aten.zeros_like.default: lambda node: 0.0,
    aten.zeros.default: lambda node: 0.0,
    aten.new_zeros.default: lambda node: 0.0,
    aten.ones_like.default: lambda node: 1.0,
    aten.ones.default: lambda node: 1.0,
    aten.full_like.default: lambda node: node.args[1],
    aten.full.default: lambda node: node.args[1],
}


def _root(node: fx.Node) -> fx.Node:
    """The node that made the tensor which ``node``, after in-place operators, still is."""
    while node.op == "call_function" and isinstance(node.target, _torch.OpOverload) and _in_place(node.target):
        out = node.kwargs.get("out")
        node = out if isinstance(out, fx.Node) else node.all_input_nodes[0]
    return node


def _made_at(node: fx.Node) -> fx.Node:
    """As :func:`_root`, but of a constant its fresh copy: the first node that is the tensor itself."""
    root = _root(node)
    return next(iter(root.users)) if root.op == "get_attr" else root


def _in_place(target: Any) -> bool:
    if target in (aten.lift_fresh_copy.default, aten.detach.default):
        return True
    _, name, overload = str(target).split(".")
    return name.endswith("_") or overload == "out"


def _initial_value(first: fx.GraphModule, index: int) -> float | None:
    returned = first.graph.output_node().args[0]
    assert isinstance(returned, (list, tuple))
    made = returned[index]
    assert isinstance(made, fx.Node)
    root = _root(made)
    if root.op == "get_attr":
        constant = getattr(first, str(root.target))
        return float(constant) if isinstance(constant, Tensor) and constant.numel() == 1 else None
    found = _FACTORIES.get(root.target)  # type: ignore[call-overload]
    number = found(root) if found else None
    return float(number) if isinstance(number, (int, float)) else None


def _key(graph: fx.GraphModule, returned_state: Sequence[str]) -> str:
    """Operators and constants in order, tensors by number; state that the graph itself makes counts as given."""
    names: dict[fx.Node, str] = {}
    output = graph.graph.output_node().args[0]
    for state, node in zip(returned_state, output if isinstance(output, (list, tuple)) else (), strict=False):
        names[_made_at(node)] = state
    lines: list[str] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            names[node] = node.meta["update_input"]
        elif node.op == "call_function" and node not in names:
            names[node] = f"%{len(lines)}"
            lines.append(f"{node.target} {_shown(node.args, names)} {_shown(node.kwargs, names)}")
    return "\n".join(lines)


def _shown(argument: Any, names: Mapping[fx.Node, str]) -> str:
    return str(fx.map_arg(argument, lambda node: names.get(node, str(node))))


def _functional(graph: fx.GraphModule) -> fx.GraphModule:
    nodes = placeholders(graph.graph)
    functional = _torch.functional_trace(graph, [node.meta["val"] for node in nodes])
    for old, new in zip(nodes, placeholders(functional.graph), strict=True):
        new.meta["update_input"] = old.meta["update_input"]
    # No autograd here: what is detached is the tensor itself, and can be written in place as such.
    for node in functional.graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.all_input_nodes[0])
        functional.graph.erase_node(node)
    return functional
