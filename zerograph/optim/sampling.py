"""One ``step()`` of an optimizer as a graph, on fake parameters of its own."""

from __future__ import annotations

import builtins
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base import source
from zerograph.errors import CaptureError
from zerograph.ir.metadata import meta
from zerograph.ir.step_graph import placeholders
from zerograph.optim.memory import FACTORIES

aten = torch.ops.aten


def both(sample: Sample) -> tuple[fx.GraphModule, fx.GraphModule, dict[str, Tensor]]:
    """Trace the first update and a later one, and return them with the state after the first."""
    first, state = sample.trace(None)
    spec = {key: StateTensor(tuple(value.shape), width(value)) for key, value in state.items()}
    steady, _ = sample.trace(spec)
    return first, steady, state


@dataclass(frozen=True)
class StateTensor:
    """Shape and dtype of one tensor of an optimizer's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Sample:
    """A copy of the optimizer that owns fake parameters of the given shape.

    Attributes:
        shape, dtype, device: of the parameter.
        asks_sizes: while it was traced the optimizer learned something of a tensor that may differ between shapes.
    """

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
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self._loops = {**_TRACEABLE, "fused": fused or None}
        self._kept: dict[str, Any] = {}
        self.asks_sizes = False

    def of_shape(self, shape: torch.Size) -> Sample:
        """Return a sample of the same optimizer for a parameter of another shape, on the CPU."""
        return Sample(self._optimizer, self._group, shape, self.dtype, "cpu")

    def trace(
        self, state: Mapping[str, StateTensor] | None, parameters: int = 1
    ) -> tuple[fx.GraphModule, dict[str, Tensor]]:
        """Trace one ``step()``, with mutation, and return it with the state tensors that the optimizer has after it.

        Its inputs are ``lr``, then for each parameter itself, its gradient and its state, as ``update_input`` says:
        ``param``, ``grad`` and names of state, of parameters but the first with a number behind.

        Args:
            state: what the optimizer holds before, besides what is no tensor: that is as the last trace left it.
                None: the very first step.
        """
        after: dict[str, Tensor] = {}
        names = ["param", "grad", *(state or ())]
        mode = _ValuesAsTensors()

        def step(lr: Tensor, *values: Tensor) -> list[Tensor]:
            starts = range(0, len(values), len(names))
            each = [dict(zip(names, values[start:], strict=False)) for start in starts]
            leaves, twin = self._twin(each, lr, {} if state is None else self._kept)
            numbers = _numbers(twin)
            # The class's own step, without torch's profiling wrapper and without what schedulers put around it.
            function = type(twin).step
            mode.watching = True
            getattr(function, "__wrapped__", function)(twin)
            mode.watching = False
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
            traced = _trace(step, [lr, *values], type(self._optimizer).__name__, mode)
        self.asks_sizes |= mode.asks_sizes
        inputs = ["lr", *names, *(f"{name} {number}" for number in range(1, parameters) for name in names)]
        for node, name in zip(placeholders(traced.graph), inputs, strict=True):
            meta(node)["update_input"] = name
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
        twin.state = defaultdict(dict)
        states = [
            {**kept, **{name: value for name, value in one.items() if name not in ("param", "grad")}} for one in each
        ]
        for leaf, one in zip(leaves, states, strict=True):
            if found := one or _torch.initial_state(twin, leaf):
                twin.state[leaf] = found
        return leaves, twin

    def _fake(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def _fake_state(self, spec: StateTensor) -> Tensor:
        return torch.empty(spec.shape, dtype=spec.dtype, device=self.device if spec.shape else None)


def _containers(value: Any) -> Any:
    """Copy the lists and dicts around the values, so that tracing may change them."""
    if type(value) is dict:
        return {key: _containers(one) for key, one in value.items()}
    return [_containers(one) for one in value] if type(value) is list else value


def _trace(
    step: Callable[..., Any], arguments: Sequence[Tensor], optimizer: str, mode: _ValuesAsTensors
) -> fx.GraphModule:
    with _torch.preserved_metadata(), mode:
        try:
            return _torch.trace(step, arguments)
        except (_torch.DataDependentOutputException, _torch.GuardOnDataDependentSymNode):
            raise CaptureError(
                f"{optimizer}.step() branches on a tensor's value\n"
                "An update is one graph for all values; use torch.where, or another optimizer."
            ) from None


class _ValuesAsTensors(TorchFunctionMode):
    """Let ``tensor.item()`` return a 0-d fp64 tensor, as exact as the Python number.

    ``max`` and ``min`` take such tensors, so optimizers that compute with values (Adafactor, Adagrad) are traced.

    Also notes the line of the optimizer that calls each operator, and, while ``watching``, whether it asks anything
    but other tensors of a tensor that has dimensions (``asks_sizes``): if not, none of its Python can depend on a size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watching = self.asks_sizes = False

    def __enter__(self) -> Any:
        self._builtins = builtins.max, builtins.min
        builtins.max = _with_tensors(builtins.max, torch.maximum, torch.clamp_min)
        builtins.min = _with_tensors(builtins.min, torch.minimum, torch.clamp_max)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        builtins.max, builtins.min = self._builtins
        super().__exit__(*raised)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._computed(func, args, kwargs or {})
        if self.watching and not self.asks_sizes and _what(func) not in _OF_ANY_SIZE:
            self.asks_sizes = any(
                not isinstance(one, Tensor) and one is not None for one in pytree.tree_leaves(result)
            ) and any(isinstance(one, Tensor) and one.dim() for one in pytree.tree_leaves((args, kwargs)))
        return result

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        with _torch.annotated({"line": source.running_line(optimizers=True)[0]}):
            if func is Tensor.item:
                return args[0].detach().reshape(()).to(torch.float64, copy=True)
            if func in _LERPS and len(args) == 3 and isinstance(args[2], Tensor):
                end, weight = args[1], args[2]
                # The plain optimizer gives lerp a number, whatever the dtype.
                if weight.dim() == 0 and weight.dtype is not end.dtype:
                    return func(args[0], end, weight.item())
            return func(*args, **kwargs)


def _what(func: Any) -> str:
    """``is_complex`` of the function; ``dtype`` of what reads that attribute."""
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name == "__get__" else name


# What tensors tell of themselves whatever their size.
_OF_ANY_SIZE = {
    "device",
    "dtype",
    "is_complex",
    "is_cpu",
    "is_cuda",
    "is_floating_point",
    "is_meta",
    "is_sparse",
    "layout",
    "requires_grad",
}


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
# is a trace of its own.
_TRACEABLE = {"capturable": True, "foreach": False}


def width(value: Tensor) -> torch.dtype:
    """Step counts as fp64 on the CPU: bias corrections are as exact as Python's, and never wait for a GPU."""
    return torch.float64 if value.dim() == 0 and value.dtype.is_floating_point else value.dtype


def _shape_from_param(graph: fx.GraphModule, shape: torch.Size) -> None:
    """Tensors made with the parameter's shape written out are made like the parameter instead."""
    param = next(node for node in placeholders(graph.graph) if meta(node)["update_input"] == "param")
    for node in list(graph.graph.nodes):
        if node.target in _SIZED and len(shape) and tuple(node.args[_SIZED[node.target]]) == tuple(shape):
            fill = FACTORIES[node.target](node)
            with graph.graph.inserting_before(node):
                like = graph.graph.call_function(aten.full_like.default, (param, fill), dict(node.kwargs))
            like.meta.update(node.meta)
            node.replace_all_uses_with(like)
            graph.graph.erase_node(node)


def _widen_scalars(graph: fx.GraphModule) -> None:
    """0-d numbers that the first update makes are as wide as those that later ones are given."""
    widened: set[fx.Node] = set()
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dim() or value.dtype is not torch.float32:
            continue
        if node.kwargs.get("dtype") is torch.float32:
            node.update_kwarg("dtype", torch.float64)
        elif node.op == "get_attr":
            setattr(graph, str(node.target), getattr(graph, str(node.target)).double())
        elif widened.isdisjoint(node.all_input_nodes):
            continue
        widened.add(node)
        node.meta["val"] = value.double()
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
