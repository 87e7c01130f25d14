"""capture, the optimizer's part: one parameter's update as a small graph, elementwise or not.

An optimizer is traced once for each distinct (hyperparameters, shape, dtype), on fake tensors, through its own
``step()``. If every operator of the trace is pointwise over the parameter's shape and over 0-d tensors, the same
graph computes the same numbers on any tensor of that dtype, so it may be laid over a flat bucket. Two parameters
share a flat bucket only if their traces are the same operator by operator, constants included. Any other update
*mixes* elements: its graph is good for whole parameters of that shape.
"""

from __future__ import annotations

import builtins
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from zerograph import _torch, hyperparameters, source
from zerograph.errors import CaptureError
from zerograph.hyperparameters import Lift, Path, Watched
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
    """An update as a functional graph: placeholders param, grad, state and numbers by name; writes as ``copy_`` nodes.

    ``first`` is the graph of the very first update where it differs from the later ones. ``fused`` is the update as
    the optimizer's own fused operators make it, in place, where its group asks for them (``fused=True``) and they can
    stand for every update. ``key`` is equal for equal programs; it says nothing about the shape of an elementwise one.

    Attributes:
        mixes: the operator that makes it not elementwise, and where it is called; None if there is none.
        shapes: of the state's entries, where ``mixes``.
        numbers: the hyperparameters that are inputs, by name: where they stand in the group.
        thresholds: numbers with which the optimizer compared those, by name.
    """

    optimizer: str
    key: str
    graph: fx.GraphModule
    first: fx.GraphModule | None
    fused: fx.GraphModule | None
    state: Mapping[str, StateSpec]
    operators: int
    mixes: str | None
    shapes: Mapping[str, tuple[int, ...]]
    numbers: Mapping[str, Path]
    thresholds: Mapping[str, set[float]]


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
            draws random numbers, or belongs to an optimizer that cannot be one graph.
    """
    name = type(optimizer).__name__
    if name in UNSUPPORTED:
        raise CaptureError(f"{name} cannot be part of a step graph: {UNSUPPORTED[name]}\nUse another optimizer.")
    # In a 0-d parameter's state nobody could tell its moments from the step count.
    shape_traced = shape or torch.Size((1,))
    numbers = {hyperparameters.name(path): path for path in lifted}
    thresholds: dict[str, set[float]] = {number: set() for number in numbers}
    for number, path in numbers.items():
        watched = Watched(hyperparameters.read(group, path), thresholds[number])
        group = hyperparameters.replaced(group, path, watched)
    first, steady, state = _both(_Sample(optimizer, group, shape_traced, dtype, device))
    lifts = Lift(first), Lift(steady)
    for number, path in list(numbers.items()):
        old = hyperparameters.read(group, path)
        new = hyperparameters.another(old, thresholds[number])
        if new is None:
            # Nothing but this very value takes this branch of the update: there it is a constant.
            del numbers[number]
            continue
        other = hyperparameters.replaced(group, path, new)
        graphs = _both(_Sample(optimizer, other, shape_traced, dtype, device))
        for lift, graph in zip(lifts, graphs[:2], strict=True):
            lift.compare(graph, number, old, new)
    for lift in lifts:
        lift.apply(list(numbers))
    _refuse_random(steady, name)
    mixes = _mixing(steady) or _mixing(first)
    initial = {key: _initial_value(first, index) for index, key in enumerate(state)}
    specs = {key: StateSpec(value.dim() == 0, _width(value), initial[key], value.dtype) for key, value in state.items()}
    same = None not in initial.values() and _key(first, list(state)) == _key(steady, ())
    key = _key(steady, ()) if same else _key(first, ()) + _key(steady, ())
    shapes = {} if mixes is None else {entry: tuple(value.shape) for entry, value in state.items()}
    if mixes is not None:
        key += f"\n{tuple(shape)}"
    # Fused operators take no other hyperparameter as a tensor, and make no state of a first update of its own.
    fused = bool(group.get("fused")) and same and mixes is None and not lifted
    for program in known:
        if (program.optimizer, program.key, program.state, program.fused is not None) == (name, key, specs, fused):
            return program
    functional = _functional(steady)
    return UpdateProgram(
        optimizer=name,
        key=key,
        graph=functional,
        first=None if same else _functional(first),
        fused=_fused(_Sample(optimizer, group, shape_traced, dtype, device, fused=True), specs) if fused else None,
        state=specs,
        operators=sum(node.op == "call_function" for node in functional.graph.nodes),
        mixes=mixes,
        shapes=shapes,
        numbers={"lr": hyperparameters.LR, **numbers},
        thresholds=thresholds,
    )


def _both(sample: _Sample) -> tuple[fx.GraphModule, fx.GraphModule, dict[str, Tensor]]:
    """The first update, the later ones, and the state that the first leaves."""
    first, state = sample.trace(None)
    spec = {key: _StateTensor(tuple(value.shape), _width(value)) for key, value in state.items()}
    steady, _ = sample.trace(spec)
    return first, steady, state


def _fused(sample: _Sample, state: Mapping[str, StateSpec]) -> fx.GraphModule:
    """The update by fused operators, given the state that the plain one keeps."""
    graph, _ = sample.trace(
        {key: _StateTensor(() if spec.scalar else sample.shape, spec.dtype) for key, spec in state.items()}
    )
    for node in graph.graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.graph.erase_node(node)
    return graph


@dataclass(frozen=True)
class _StateTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Sample:
    """A copy of the optimizer that owns fake parameters of the given shape."""

    def __init__(
        self,
        optimizer: Any,
        group: Mapping[str, Any],
        shape: torch.Size,
        dtype: Any,
        device: Any,
        *,
        fused: bool = False,
    ) -> None:
        self._optimizer, self._group = optimizer, group
        self.shape, self._dtype, self._device = shape, dtype, device
        self._loops = {**_TRACEABLE, "fused": fused or None}
        self._kept: dict[str, Any] = {}

    def trace(
        self, state: Mapping[str, _StateTensor] | None, parameters: int = 1
    ) -> tuple[fx.GraphModule, dict[str, Tensor]]:
        """The graph of one ``step()``, with mutation, and the state tensors that the optimizer holds after it.

        Its inputs are ``lr``, then for each parameter itself, its gradient and its state, as ``update_input`` says:
        ``param``, ``grad`` and names of state, of parameters but the first with a number behind.

        Args:
            state: what the optimizer holds before, besides what is no tensor: that is as the last trace left it.
                None: the very first step.
        """
        after: dict[str, Tensor] = {}
        names = ["param", "grad", *(state or ())]

        def step(lr: Tensor, *values: Tensor) -> list[Tensor]:
            starts = range(0, len(values), len(names))
            each = [dict(zip(names, values[start:], strict=False)) for start in starts]
            leaves, twin = self._twin(each, lr, {} if state is None else self._kept)
            numbers = _numbers(twin)
            # The class's own step, without torch's profiling wrapper and without what schedulers put around it.
            function = type(twin).step
            getattr(function, "__wrapped__", function)(twin)
            if state is not None and (changed := _changed(numbers, _numbers(twin))):
                raise CaptureError(
                    f"{type(twin).__name__} keeps a number that changes from step to step: {changed}\n"
                    "Keep it as a 0-d tensor in the parameter's state, so that it is an input of the graph."
                )
            found = twin.state.get(leaves[0], {})
            after.update({key: value for key, value in found.items() if isinstance(value, Tensor)})
            self._kept = {key: value for key, value in found.items() if not isinstance(value, Tensor)}
            return list(after.values()) if state is None else []

        with _torch.fake_mode(), _torch.compiling(), torch.no_grad():
            lr = torch.empty((), dtype=torch.float64)
            values = [
                value
                for _ in range(parameters)
                for value in (self._fake(), self._fake(), *map(self._fake_state, (state or {}).values()))
            ]
            traced = _trace(step, [lr, *values], type(self._optimizer).__name__)
        inputs = ["lr", *names, *(f"{name} {number}" for number in range(1, parameters) for name in names)]
        for node, name in zip(placeholders(traced.graph), inputs, strict=True):
            node.meta["update_input"] = name
        _shape_from_param(traced, self.shape)
        _widen_scalars(traced)
        return traced, after

    def _twin(
        self, each: Sequence[Mapping[str, Tensor]], lr: Tensor, kept: Mapping[str, Any]
    ) -> tuple[list[nn.Parameter], Any]:
        leaves = []
        for one in each:
            leaves.append(nn.Parameter(one["param"]))
            leaves[-1].grad = one["grad"]
        # Not copy.copy(): optimizers leave out of it what their classes keep beside groups and state. And without
        # step(), which a scheduler replaces on the instance; the twin must run the class's.
        twin = object.__new__(type(self._optimizer))
        # The last: whether the first fused step has yet to look at its parameters.
        own = ("step", "state", "param_groups", "_need_device_dtype_check_for_fused")
        vars(twin).update({key: _containers(value) for key, value in vars(self._optimizer).items() if key not in own})
        group = {**_containers({**self._group, "params": leaves}), "lr": lr}
        group.update({key: value for key, value in self._loops.items() if key in group})
        twin.param_groups = [group]
        twin._need_device_dtype_check_for_fused = False
        states = [
            {**kept, **{name: value for name, value in one.items() if name not in ("param", "grad")}} for one in each
        ]
        twin.state = defaultdict(dict, {leaf: one for leaf, one in zip(leaves, states, strict=True) if one})
        return leaves, twin

    def _fake(self) -> Tensor:
        return torch.empty(self.shape, dtype=self._dtype, device=self._device)

    def _fake_state(self, spec: _StateTensor) -> Tensor:
        return torch.empty(spec.shape, dtype=spec.dtype, device=self._device if spec.shape else None)


def _containers(value: Any) -> Any:
    """The same values in lists and dicts of their own, for tracing to change."""
    if type(value) is dict:
        return {key: _containers(one) for key, one in value.items()}
    return [_containers(one) for one in value] if type(value) is list else value


def _trace(step: Callable[..., Any], arguments: Sequence[Tensor], optimizer: str) -> fx.GraphModule:
    with _torch.preserved_metadata(), _ValuesAsTensors():
        try:
            return _torch.trace(step, arguments)
        except (_torch.DataDependentOutputException, _torch.GuardOnDataDependentSymNode):
            raise CaptureError(
                f"{optimizer}.step() branches on a tensor's value\n"
                "An update is one graph for all values; use torch.where, or another optimizer."
            ) from None


class _ValuesAsTensors(TorchFunctionMode):
    """Inside, ``tensor.item()`` is a 0-d fp64 tensor, as exact as the Python number it stands for, and ``max`` and
    ``min`` know such numbers: optimizers that compute with values (Adafactor, Adagrad) become part of the graph.

    Also notes the line of the optimizer that calls each operator.
    """

    def __enter__(self) -> Any:
        self._builtins = builtins.max, builtins.min
        builtins.max = _with_tensors(builtins.max, torch.maximum, torch.clamp_min)
        builtins.min = _with_tensors(builtins.min, torch.minimum, torch.clamp_max)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        builtins.max, builtins.min = self._builtins
        super().__exit__(*raised)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **(kwargs or {}))
        with _torch.annotated({"line": source.running_line(optimizers=True)[0]}):
            if func is Tensor.item:
                return args[0].detach().reshape(()).to(torch.float64, copy=True)
            if func in _LERPS and len(args) == 3 and isinstance(args[2], Tensor):
                end, weight = args[1], args[2]
                # The plain optimizer gives lerp a number, whatever the dtype.
                if weight.dim() == 0 and weight.dtype is not end.dtype:
                    return func(args[0], end, weight.item())
            return func(*args, **(kwargs or {}))


_LERPS = (Tensor.lerp, Tensor.lerp_, torch.lerp)


def _with_tensors(
    builtin: Callable[..., Any], of_tensors: Callable[..., Tensor], of_number: Callable[..., Tensor]
) -> Callable[..., Any]:
    """``max`` or ``min``, also among numbers of which some are 0-d tensors."""

    def extreme(*values: Any, **kwargs: Any) -> Any:
        tensors = [value for value in values if isinstance(value, Tensor)]
        if len(values) < 2 or kwargs or not tensors:
            return builtin(*values, **kwargs)
        numbers = [value for value in values if not isinstance(value, Tensor)]
        found = functools.reduce(of_tensors, tensors)
        return of_number(found, builtin(numbers)) if numbers else found

    return extreme


# capturable: bias corrections from tensors, so that the step count is an input. foreach says how torch loops over
# parameters; the graph's bucket has one tensor. Passes want to see an update's operators: what fused ones make of it
# is a second trace.
_TRACEABLE = {"capturable": True, "foreach": False}


def _width(value: Tensor) -> torch.dtype:
    """Step counts as fp64 on the CPU: bias corrections are as exact as Python's, and never wait for a GPU."""
    return torch.float64 if value.dim() == 0 and value.dtype.is_floating_point else value.dtype


def _shape_from_param(graph: fx.GraphModule, shape: torch.Size) -> None:
    """Tensors made with the parameter's shape written out are made like the parameter instead."""
    param = next(node for node in placeholders(graph.graph) if node.meta["update_input"] == "param")
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
    """Numbers that the optimizer holds outside the parameters' states, by where it holds them.

    Python's by value, tensors by identity and version: both would be constants of the graph.
    """
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found: dict[str, Any] = {}

    def collect(where: str, value: Any) -> None:
        if isinstance(value, (int, float)):
            found[where] = value
        elif isinstance(value, Tensor):
            found[where] = id(value), value._version
        elif isinstance(value, (list, tuple)):
            for index, one in enumerate(value):
                collect(f"{where}[{index}]", one)
        elif isinstance(value, dict):
            for key, one in value.items():
                collect(f"{where}[{key!r}]", one)

    for name, value in vars(optimizer).items():
        if name not in ("state", "param_groups", "defaults"):
            collect(name, value)
    for owner, state in optimizer.state.items():
        if id(owner) not in parameters:
            collect(f"state[{owner!r:.40}]", state)
        else:
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    collect(f"state[{key!r}]", value)
    for group in optimizer.param_groups:
        collect("param_groups", {key: value for key, value in group.items() if key not in ("params", "lr")})
    return found


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    return ", ".join(key for key in after if key not in before or before[key] != after[key])


def check_separate(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: torch.Size, dtype: torch.dtype, device: Any
) -> None:
    """Prove that no parameter's update reads another parameter: two of one shape, updated together, by data flow.

    Raises:
        CaptureError: it does (a norm over all gradients, for example).
    """
    sample = _Sample(optimizer, group, shape or torch.Size((1,)), dtype, device)
    both, _ = sample.trace(None, parameters=2)
    # By the node that made the memory: in-place operators and views share it.
    reads: dict[fx.Node, set[str]] = {}
    for node in both.graph.nodes:
        if node.op == "placeholder":
            name = node.meta["update_input"]
            reads[node] = set() if name == "lr" else {"second" if name.endswith(" 1") else "first"}
        elif node.op != "output":
            memory = _memory(node)
            found = reads.setdefault(memory, set())
            found |= {one for given in node.all_input_nodes for one in reads[_memory(given)]}
            if len(found) > 1:
                raise CaptureError(
                    f"{type(optimizer).__name__} updates a parameter from other parameters' values or gradients: "
                    f"{node.target} at {_line(node)}\n"
                    "The graph updates each parameter for itself. What needs all gradients (clipping, a global norm) "
                    "belongs into build(), behind backward()."
                )


def _memory(node: fx.Node) -> fx.Node:
    """The node that made the tensor which ``node`` is, or is a view of."""
    root = _root(node)
    while root.op == "call_function" and getattr(root.target, "is_view", False):
        root = _root(root.all_input_nodes[0])
    return root


def _refuse_random(graph: fx.GraphModule, optimizer: str) -> None:
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CaptureError(
                f"{optimizer}.step() draws random numbers ({node.target} at {_line(node)})\n"
                "They would differ between ranks, where the numbers of one device need them equal. Use another one."
            )


def _line(node: fx.Node) -> str:
    return str(node.meta.get("custom", {}).get("line") or "a line unknown")


def _mixing(graph: fx.GraphModule) -> str | None:
    """The first operator that makes the update not elementwise, and where it stands, for a reader."""
    found: list[fx.Node] = []
    for node in graph.graph.nodes:
        values = [node.meta.get("val"), *(given.meta.get("val") for given in node.all_input_nodes)]
        tensors = any(isinstance(value, Tensor) and value.dim() for value in values)
        # A constant with dimensions has the parameter's shape, or is broadcast over it.
        constant = any(given.op == "get_attr" and given.meta["val"].dim() for given in node.all_input_nodes)
        if node.op == "call_function" and tensors and (constant or not _is_pointwise(node.target)):
            found.append(node)
    if not found:
        return None
    # A view says less of what the update does than what computes on it.
    telling = [node for node in found if not getattr(node.target, "is_view", False)] or found
    return f"{telling[0].target} at {_line(telling[0])} mixes elements"


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
