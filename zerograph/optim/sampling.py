"""Trace one ``step()`` of an optimizer as a graph, on a copy with fake parameters."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerograph import _torch
from zerograph.base import source
from zerograph.errors import CaptureError, ZeroGraphError
from zerograph.ir.metadata import meta
from zerograph.ir.rewrite import replace_node
from zerograph.ir.step_graph import placeholders
from zerograph.ir.update_program import Path
from zerograph.optim import hyperparameters
from zerograph.optim.branches import Answers, Trace, over_branches
from zerograph.optim.surroundings import (
    constructed_of,
    copied,
    is_known,
    leaf_of,
    numbers_of,
    restored,
    single_process,
    state_like,
    twin_of,
)
from zerograph.optim.tensor_values import ValuesAsTensors, number
from zerograph.runtime.state import flat_state, nested_state

aten = torch.ops.aten


def both(sample: Sample) -> tuple[fx.GraphModule, fx.GraphModule, dict[str, Tensor]]:
    """Trace the first update and a later one, and return them with the state after the first."""
    while True:
        first, state = sample.trace(None)
        spec = {key: StateTensor(tuple(value.shape), width(value)) for key, value in state.items()}
        try:
            return first, sample.trace(spec)[0], state
        except _CountsError as error:
            # Now as tensors. Each error names a number that was none yet.
            sample.counters |= dict.fromkeys(error.names, "int")


class _CountsError(CaptureError):
    """Numbers in a parameter's state change from step to step.

    Attributes:
        names: their names in the state.
    """

    def __init__(self, message: str, names: set[str]) -> None:
        super().__init__(message)
        self.names = names


class _State(dict[str, Any]):
    """The state of one parameter, in which numbers that change from step to step are 0-d fp64 tensors."""

    def __init__(self, counters: dict[str, str], entries: Mapping[str, Any]) -> None:
        super().__init__()
        self._counters = counters
        self.update(entries)

    def __setitem__(self, name: str, value: Any) -> None:
        is_count = name in self._counters and isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_count and isinstance(value, float):
            self._counters[name] = "float"
        super().__setitem__(name, number(torch.full((), value, dtype=torch.float64)) if is_count else value)

    def update(self, entries: Mapping[str, Any] = {}, **named: Any) -> None:  # type: ignore[override]
        """Set entries."""
        for name, value in {**entries, **named}.items():
            self[name] = value

    def setdefault(self, name: str, value: Any = None) -> Any:
        """Return an entry, set first if it is missing."""
        if name not in self:
            self[name] = value
        return self[name]


@dataclass(frozen=True)
class StateTensor:
    """Shape and dtype of one tensor of an optimizer's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Sample:
    """A copy of the optimizer that owns fake parameters of the given shape.

    Attributes:
        shape, dtype, device: of the parameter.
        counters: the types, by name, of numbers in its state that change from step to step, and are traced as tensors.
        counts: paths of numbers of the optimizer and of its group that count steps, and are inputs.
        asks_sizes: while it was traced, the optimizer read a property of a tensor that may depend on its shape.
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
        counts: Sequence[Path] = (),
    ) -> None:
        self._optimizer, self._group = optimizer, group
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self._constructed = constructed_of(optimizer, group, shape, dtype)
        # Adafactor of transformers has none where it computes its steps by itself.
        self._has_rate = group.get("lr", 0.0) is not None
        self._loops = {**_TRACEABLE, "fused": fused or None}
        self._kept: dict[str, Any] = {}
        self.counters: dict[str, str] = {}
        self.counts = tuple(counts)
        self.asks_sizes = False

    def of_shape(self, shape: torch.Size) -> Sample:
        """Return a sample of the same optimizer for a parameter of another shape, on the CPU."""
        sample = Sample(self._optimizer, self._group, shape, self.dtype, "cpu", counts=self.counts)
        sample._constructed = self._constructed
        return sample

    def trace(
        self, state: Mapping[str, StateTensor] | None, parameters: int = 1
    ) -> tuple[fx.GraphModule, dict[str, Tensor]]:
        """Trace one ``step()``, and return it with the optimizer's state tensors after it.

        The graph has mutation, unless the update branches on values.

        The inputs are ``lr``, then the parameter, its gradient and its state, for each parameter. Their
        ``update_input`` is ``param``, ``grad`` or a name of state, with a number appended after the first parameter.
        The numbers that count steps are the last inputs.

        Args:
            state: the optimizer's state tensors before the step; None: the very first step. Other state is as the
                last trace left it.
            parameters: number of parameters.
        """
        after: dict[str, Tensor] = {}
        kept = self._kept

        def traced(answers: Answers) -> Trace:
            found, self._kept = dict[str, Tensor](), kept
            trace = self._traced(state, parameters, answers, found)
            if _forms(found) != _forms(after or found):
                raise CaptureError(f"{type(self._optimizer).__name__} has other state in some branches of its step()")
            after.update(found)
            return trace

        return over_branches(type(self._optimizer).__name__, traced), after

    def _traced(
        self, state: Mapping[str, StateTensor] | None, parameters: int, answers: Answers, after: dict[str, Tensor]
    ) -> Trace:
        """Trace one ``step()`` with these answers to its questions for the truth of tensors; fill ``after``."""
        names = ["param", "grad", *(state or ())]
        # Torch's fused updates count the steps of all buckets at once.
        is_own = not is_known(self._optimizer)
        mode = ValuesAsTensors(answers, keeps_lists=not is_own)

        def step(lr: Tensor, *values: Tensor) -> list[Tensor]:
            values, counts = values[: parameters * len(names)], values[parameters * len(names) :]
            starts = range(0, len(values), len(names))
            each = [dict(zip(names, values[start:], strict=False)) for start in starts]
            for name in self.counters:
                for tensors in each:
                    if name in tensors:
                        number(tensors[name])
            leaves, twin = self._twin(each, lr, {} if state is None else self._kept)
            for path, count in zip(self.counts, counts, strict=True):
                # A group may get its count in the first step. In-place changes are those of a copy.
                before, (name, *_) = hyperparameters.place(self._optimizer, self._group, path)
                if state is not None or name in before:
                    hyperparameters.place(twin, twin.param_groups[0], path)[0][name] = number(count.clone())
            numbers = numbers_of(twin)
            # The class's own step, without the wrappers of torch's profiler and of schedulers.
            function = _torch.unhooked_step(type(twin))
            mode.watching = True
            version = _torch.version(lr)
            function(twin)
            mode.watching = False
            rate = lr if self._has_rate else None
            if twin.param_groups[0].get("lr") is not rate or _torch.version(lr) != version:
                raise CaptureError(
                    f"{type(twin).__name__}.step() changes its learning rate\n"
                    "Use a scheduler, or a number of its own in the group or in the parameter's state."
                )
            changed = [] if state is None else _changed(numbers, numbers_of(twin))
            counted = [*map(location, self.counts), *(f"self.{name}" for name in _numbers_in(twin))]
            changed = [place for place in changed if place not in counted]
            if changed:
                message = (
                    f"{type(twin).__name__} keeps a value that changes from step to step: {', '.join(changed)}\n"
                    "Keep numbers and tensors in the parameter's state, tensors also in a list, tuple or dict there. "
                    "They are then inputs of the graph."
                )
                counters = {name for name in self._kept if f"state[{name!r}]" in changed}
                is_new = len(counters) == len(changed) and not counters <= self.counters.keys()
                raise _CountsError(message, counters) if is_new else CaptureError(message)
            entries = flat_state(twin.state.get(leaves[0], {}))
            _check_separate_memory(type(twin).__name__, {"the parameter": leaves[0], **entries})
            after.update({key: value for key, value in entries.items() if isinstance(value, Tensor)})
            self._kept = {key: value for key, value in entries.items() if not isinstance(value, Tensor)}
            if state is None:
                return [*after.values(), *mode.asked]
            for leaf, before in zip(leaves, each, strict=True):
                _write_back(type(twin).__name__, before, flat_state(twin.state[leaf]))
            return mode.asked

        with _torch.fake_mode(), _torch.compiling(), torch.no_grad():
            lr = torch.empty((), dtype=torch.float64)
            values = [
                value
                for _ in range(parameters)
                for value in (self._fake(), self._fake(), *map(self._fake_state, (state or {}).values()))
            ]
            values += [torch.empty((), dtype=torch.float64) for _ in self.counts]
            with restored(self._optimizer) if is_own else contextlib.nullcontext(), single_process():
                traced = _trace(step, [lr, *values], type(self._optimizer).__name__, mode)
        self._check(traced)
        self.asks_sizes |= mode.asks_sizes
        inputs = ["lr", *names, *(f"{name} {number}" for number in range(1, parameters) for name in names)]
        inputs += map(hyperparameters.name, self.counts)
        for node, name in zip(placeholders(traced.graph), inputs, strict=True):
            meta(node)["update_input"] = name
        _shape_from_param(traced, self.shape)
        _widen_scalars(traced)
        _allow_rate_zero(traced.graph)
        return Trace(traced, len(mode.asked))

    def _check(self, traced: fx.GraphModule) -> None:
        name = type(self._optimizer).__name__
        if any(_torch.has_symbols(node.meta.get("val")) for node in traced.graph.nodes):
            raise CaptureError(
                f"{name}.step() has tensors whose shapes depend on values\n"
                "Use torch.where or masks in place of indexing by masks, or another optimizer."
            )
        constants = {node for node in traced.graph.nodes if node.op == "get_attr"}
        # A 0-d tensor of the optimizer that the update overwrites first is no state.
        own = {id(value) for value in vars(self._optimizer).values()}
        copies = {one for node in constants if id(getattr(traced, str(node.target))) in own for one in node.users}
        overwritten = {copy for copy in copies if next(iter(copy.users), copy).target in _OVERWRITES}
        kept = constants | copies - overwritten
        if any(isinstance(getattr(traced, str(node.target)), _torch.FakeTensor) for node in constants) or any(
            not kept.isdisjoint(_torch.written_arguments(node)) for node in traced.graph.nodes
        ):
            raise CaptureError(
                f"{name} keeps tensors in objects of a parameter's state, or outside of it\n"
                "Keep them as tensors, or in lists, tuples or dicts of tensors, in the parameter's state."
            )
        for copy in overwritten:
            value = copy.meta["val"]
            options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
            copy.target, copy.args, copy.kwargs = aten.full.default, ([], 0), options

    def _twin(
        self, each: Sequence[Mapping[str, Tensor]], lr: Any, kept: Mapping[str, Any]
    ) -> tuple[list[nn.Parameter], Any]:
        leaves = [leaf_of(tensors["param"], tensors["grad"]) for tensors in each]
        if isinstance(lr, Tensor) and not isinstance(self._group.get("lr"), Tensor):
            number(lr)
        twin = twin_of(self._optimizer, {})
        group = {**copied({**self._group, "params": leaves}, {}), "lr": lr if self._has_rate else None}
        group.update({key: value for key, value in self._loops.items() if key in group})
        twin.param_groups = [group]
        twin.state = defaultdict(lambda: _State(self.counters, {}))
        states = [
            {**kept, **{name: value for name, value in tensors.items() if name not in ("param", "grad")}}
            for tensors in each
        ]
        for leaf, state in zip(leaves, states, strict=True):
            begin = _torch.initial_state(twin, leaf) or state_like(self._constructed, leaf)
            if entries := nested_state(state) or begin:
                twin.state[leaf] = _State(self.counters, entries)
        return leaves, twin

    def numbers_over_steps(
        self, parameters: int, groups: int, *, answer: bool = False, forgets: bool = False
    ) -> list[dict[str, Any]]:
        """Return the numbers of the optimizer, and of its last group, before and after each of three steps.

        Args:
            parameters: number of parameters of the first group; a further group has one.
            answer: the answer to every question for the truth of a tensor.
            forgets: each step begins without state.
        """
        mode = ValuesAsTensors([answer] * 1000)
        with _torch.fake_mode(), _torch.compiling(), torch.no_grad(), _torch.preserved_metadata(), mode:
            each = [{"param": self._fake(), "grad": self._fake()} for _ in range(parameters + groups - 1)]
            leaves, twin = self._twin(each, self._group.get("lr", 0.0), {})
            first = twin.param_groups[0]
            twin.param_groups = [
                {**copied(first, {}), "params": own}
                for own in (leaves[:parameters], *([leaf] for leaf in leaves[parameters:]))
            ]
            numbers = [numbers_of(twin)]
            for _ in range(3):
                _torch.unhooked_step(type(twin))(twin)
                numbers.append(numbers_of(twin))
                if forgets:
                    twin.state.clear()
        return numbers

    def after_step(self) -> Any:
        """Return a twin of the optimizer after a step with real tensors of no meaning."""
        with torch.no_grad(), _torch.compiling():
            ones = {name: torch.ones(self.shape, dtype=self.dtype) for name in ("param", "grad")}
            _, twin = self._twin([ones], self._group.get("lr", 0.0), {})
            _torch.unhooked_step(type(twin))(twin)
        return twin

    def _fake(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def _fake_state(self, spec: StateTensor) -> Tensor:
        return torch.empty(spec.shape, dtype=spec.dtype, device=self.device if spec.shape else None)


def _check_separate_memory(optimizer: str, entries: Mapping[str, Any]) -> None:
    """Raise a CaptureError for state that shares memory with other state or with its parameter."""
    places: dict[Any, str] = {}
    for name, value in entries.items():
        if isinstance(value, Tensor):
            other = places.setdefault(_torch.storage_key(value.untyped_storage()), name)
            if other != name:
                raise CaptureError(
                    f"{optimizer} has state that shares memory with other tensors: {other} and {name}\n"
                    "A graph stores each for itself. Store a copy (clone())."
                )


def _write_back(optimizer: str, before: Mapping[str, Tensor], entries: Mapping[str, Any]) -> None:
    """Copy state that the optimizer has assigned, instead of changing it in place, to the inputs of the graph.

    Args:
        optimizer: name of its class.
        before: the inputs: the parameter, its gradient and its state, by name.
        entries: the state after the step.

    Raises:
        CaptureError: the names, shapes or dtypes of the state change after the first step.
    """
    expected = _forms({name: value for name, value in before.items() if name not in ("param", "grad")})
    forms = _forms(entries)
    if expected != forms:
        changed = {name for name in expected.keys() | forms.keys() if expected.get(name) != forms.get(name)}
        raise CaptureError(
            f"{optimizer} changes the shape or dtype of its state, or has other state, after its first step: "
            f"{', '.join(sorted(changed))}\n"
            "Create all state of a parameter in its first step, as it is later."
        )
    assigned = {name: entries[name].clone() for name in expected if entries[name] is not before[name]}
    for name, value in assigned.items():
        before[name].copy_(value)


def _forms(entries: Mapping[str, Any]) -> dict[str, object]:
    return {name: (value.shape, width(value)) for name, value in entries.items() if isinstance(value, Tensor)}


def location(path: Path) -> str:
    """Return the location of a number among :func:`numbers_of`."""
    return f"self.{path[0]}" if path[1:] == hyperparameters.OF_OPTIMIZER else f"param_groups[{path[0]!r}]"


def _trace(
    step: Callable[..., Any], arguments: Sequence[Tensor], optimizer: str, mode: ValuesAsTensors
) -> fx.GraphModule:
    with _torch.preserved_metadata(), mode:
        try:
            return _torch.trace(step, arguments)
        except (_torch.DataDependentOutputException, _torch.GuardOnDataDependentSymNode) as error:
            raise source.refusal(
                f"{optimizer}.step() needs a tensor's value, or a number that it counts, as a Python number",
                "An update is one graph for all values. Compute with the tensor, or use another optimizer.",
                source.raising_line(error.__traceback__),
            ) from None
        except ZeroGraphError:
            raise
        except Exception as error:
            raise source.refusal(
                f"{optimizer}.step() cannot be traced with fake tensors, and 0-d tensors for the learning rate and for "
                f"numbers that it counts: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
                "Use torch's functions, or another optimizer.",
                source.raising_line(error.__traceback__),
            ) from error


# capturable: compute bias corrections from tensors, so that the step count is an input. foreach: the bucket is one
# tensor, so there is no loop over parameters. fused: passes need the plain operators; fused ones are a separate trace.
_TRACEABLE = {"capturable": True, "foreach": False}


def width(value: Tensor) -> torch.dtype:
    """Return the dtype of a state tensor; step counts are fp64 on the CPU.

    Bias corrections are then as exact as Python's, and never wait for a GPU.
    """
    return torch.float64 if value.dim() == 0 and value.dtype.is_floating_point else value.dtype


def _shape_from_param(graph: fx.GraphModule, shape: torch.Size) -> None:
    """Replace factories that spell out the parameter's shape by ``full_like`` of the parameter."""
    param = next(node for node in placeholders(graph.graph) if meta(node)["update_input"] == "param")
    for node in list(graph.graph.nodes):
        if node.target in _SIZED and len(shape) and tuple(node.args[_SIZED[node.target]]) == tuple(shape):
            fill = FACTORIES[node.target](node)
            with graph.graph.inserting_before(node):
                like = graph.graph.call_function(aten.full_like.default, (param, fill), dict(node.kwargs))
            like.meta.update(node.meta)
            replace_node(node, like)


def _widen_scalars(graph: fx.GraphModule) -> None:
    """Make 0-d fp32 tensors that the first update creates fp64, as they are in later updates."""
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


def _allow_rate_zero(graph: fx.Graph) -> None:
    """Let an update that divides by its learning rate leave the parameter as it is where the rate is 0.

    Adam with ``capturable`` divides ``x / (c * rate) + eps / rate``, and the average of gradients by this. At rate 0,
    with which a warm-up begins, that is 0 / 0 where a parameter had no gradient yet. ``x / 1 + eps / 0`` is infinite.
    """
    for node in list(graph.nodes):
        if node.target is not aten.reciprocal.default or node.meta["val"].dim():
            continue
        (rate,) = node.all_input_nodes
        for divisor in [user for user in rate.users if user.target is aten.mul.Tensor]:
            for quotient in [user for user in divisor.users if user.target is aten.div.Tensor]:
                if quotient.args[1] is divisor and isinstance(quotient.args[0], fx.Node):
                    _replace_zero(graph, quotient, divisor)


def _replace_zero(graph: fx.Graph, quotient: fx.Node, divisor: fx.Node) -> None:
    """Divide by 1 where a 0-d divisor is 0."""
    value = divisor.meta["val"]
    with graph.inserting_before(quotient):
        zero = graph.call_function(aten.eq.Scalar, (divisor, 0))
        zero.meta.update(divisor.meta, val=value == 0)
        safe = graph.call_function(aten.masked_fill.Scalar, (divisor, zero, 1.0))
        safe.meta.update(divisor.meta, val=value)
    quotient.update_arg(1, safe)


_OVERWRITES = (aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default, aten.zero_.default)
_SIZED = {aten.zeros.default: 0, aten.ones.default: 0, aten.full.default: 0, aten.new_zeros.default: 1}


def _numbers_in(twin: Any) -> list[str]:
    """Return the names of attributes that are 0-d tensors: the graph shows what the update does to them."""
    return [name for name, value in vars(twin).items() if isinstance(value, Tensor) and not value.dim()]


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [key for key in after if key not in before or before[key] != after[key]]


# The value that each factory fills a tensor with.
FACTORIES = {
    aten.zeros_like.default: lambda node: 0.0,
    aten.zeros.default: lambda node: 0.0,
    aten.new_zeros.default: lambda node: 0.0,
    aten.ones_like.default: lambda node: 1.0,
    aten.ones.default: lambda node: 1.0,
    aten.full_like.default: lambda node: node.args[1],
    aten.full.default: lambda node: node.args[1],
}


def root_of(node: fx.Node) -> fx.Node:
    """Return the node that allocated the tensor; ``node`` may be the result of in-place operators on it."""
    while node.op == "call_function" and isinstance(node.target, _torch.OpOverload) and _in_place(node.target):
        out = node.kwargs.get("out")
        node = out if isinstance(out, fx.Node) else node.all_input_nodes[0]
    return node


def _in_place(target: Any) -> bool:
    if target in (aten.lift_fresh_copy.default, aten.detach.default):
        return True
    _, name, overload = str(target).split(".")
    return name.endswith("_") or overload == "out"
