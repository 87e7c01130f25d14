"""Replay a step as CUDA graphs: one for the whole step, or one for each stretch between two collectives.

What the CPU computes (step counts, rates) runs before the replay, which reads it from the device: a captured kernel
would read the numbers of the step that was captured. Everything else is launched by one call a stretch.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph._torch import OpOverload, written_arguments
from zerograph.errors import ConfigError
from zerograph.ir.alias import WAIT, is_view
from zerograph.ir.loop import loops
from zerograph.ir.metadata import origin, role
from zerograph.ir.step_graph import placeholders
from zerograph.ops.offload import PACK

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Replay = Callable[[], object]
_INSTEAD = "Use config.backend = 'inductor'."
# Steps before the one that is captured: libraries allocate their workspaces, kernels are chosen.
_WARM_UP = 2


def as_cuda_graph(graph: fx.GraphModule, compiled: fx.GraphModule) -> _Step:
    """Return a function that runs the step, as CUDA graphs after some steps.

    Args:
        graph: the emitted graph.
        compiled: the graph whose nodes run: compiled regions, and operators.

    Raises:
        ConfigError: the step cannot be captured; the message says why.
    """
    inputs = placeholders(graph.graph)
    devices = {node.meta["val"].device for node in inputs if isinstance(node.meta["val"], Tensor)}
    if not any(device.type == "cuda" for device in devices):
        kinds = ", ".join(sorted({device.type for device in devices}))
        raise ConfigError(f"config.backend = 'cudagraph' needs a model on a CUDA device, not on {kinds}\n{_INSTEAD}")
    _check_loops(graph.graph)
    host, device = _split(compiled, next(each for each in devices if each.type == "cuda"))
    batch = [number for number, node in enumerate(inputs) if (of := role(node)) is not None and of.kind == "input"]
    return _Step(host, device, batch)


def _check_loops(graph: fx.Graph) -> None:
    for loop in loops(graph):
        if any(map(_is_collective, loop.body.graph.nodes)):
            raise ConfigError(
                "config.backend = 'cudagraph': a loop over micro-batches is captured whole, this one has collectives\n"
                f"Leave config.gradient_accumulation_steps at 1, or use stage 1. {_INSTEAD}"
            )


def _split(module: fx.GraphModule, device: torch.device) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return what the CPU computes, which returns what the device reads of it, and what the device computes.

    Both take all inputs; the second one takes the results of the first one before them.
    """
    graph = module.graph
    on_host = {node for node in graph.nodes if node.op == "call_function" and _is_host(node)}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    host, rest = fx.Graph(), fx.Graph()
    host_nodes = {node: host.placeholder(node.name) for node in inputs}
    for node in graph.nodes:
        if node in on_host:
            host_nodes[node] = host.node_copy(node, lambda argument: _host_node(argument, host_nodes))
    # By what the device reads: the node of the host's graph that puts it there.
    crossing: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "placeholder" and node not in on_host:
            for source in _host_operands(node, on_host):
                if source not in crossing:
                    crossing[source] = _on_device(source, host_nodes[source], device, node)
    host.output(tuple(crossing.values()))
    on_device = {source: rest.placeholder(f"{source.name}_on_device") for source in crossing}
    values = {node: rest.placeholder(node.name) for node in inputs} | on_device
    for node in graph.nodes:
        if node.op != "placeholder" and node not in on_host:
            values[node] = rest.node_copy(node, values.__getitem__)
    return _torch.graph_module(module, host), _torch.graph_module(module, rest)


def _is_host(node: fx.Node) -> bool:
    """Return whether the node computes numbers on the CPU, or copies them to the device."""
    if node.target is PACK:
        return True
    tensors = [value for each in (node, *node.all_input_nodes) if isinstance(value := each.meta.get("val"), Tensor)]
    return bool(tensors) and all(value.device.type == "cpu" for value in tensors)


def _host_node(argument: fx.Node, nodes: dict[fx.Node, fx.Node]) -> fx.Node:
    if argument not in nodes:
        raise ConfigError(
            f"config.backend = 'cudagraph': the CPU reads a value of the device in the step ({argument}), as step "
            f"counts of a scaled loss do\n{_INSTEAD}"
        )
    return nodes[argument]


def _host_operands(node: fx.Node, on_host: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield the operands of a node of the device that the CPU has."""
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        is_cpu = isinstance(value, Tensor) and value.device.type == "cpu"
        if source in on_host or (source.op == "placeholder" and is_cpu and node.op != "output"):
            yield source


def _on_device(source: fx.Node, host_node: fx.Node, device: torch.device, reader: fx.Node) -> fx.Node:
    """Emit the operand on the device, where it is not there yet."""
    if source.meta["val"].device.type != "cpu":
        return host_node
    if not str(reader.target).startswith("aten._fused_") or source.meta["val"].dim():
        where = origin(reader)
        raise ConfigError(
            f"config.backend = 'cudagraph': an operator takes a number from the CPU ({reader.target} in the "
            f"{where.phase} of {where.module or 'build()'}), which a CUDA graph would keep for all steps\n"
            f"Optimizers with fused=True take theirs from the device; random numbers have none. {_INSTEAD}"
        )
    # Fused kernels read a rate on the device as fp32.
    packed = host_node.graph.call_function(PACK, ([host_node], torch.float32, device))
    return host_node.graph.call_function(aten.select.int, (packed, 0, 0))


class _Step:
    """A step, as CUDA graphs after some calls; captured again when memory has moved.

    Args:
        host: what the CPU computes.
        device: what is captured.
        batch: the numbers of the inputs that differ from step to step; the others stay where they are.
    """

    def __init__(self, host: fx.GraphModule, device: fx.GraphModule, batch: Sequence[int]) -> None:
        self._host, self._device, self._batch = host, device, frozenset(batch)
        self._calls = 0
        self._replay: Callable[..., Sequence[Any]] | None = None
        self._static: list[Any] = []

    def __call__(self, *inputs: Any) -> list[Any]:
        numbers = self._host.forward(*inputs)
        if self._calls < _WARM_UP:
            self._calls += 1
            return list(self._device.forward(*numbers, *inputs))
        first = len(numbers)
        values = [*numbers, *inputs]
        changing = {*range(first), *(first + number for number in self._batch)}
        if self._replay is None or any(
            isinstance(value, Tensor) and value.data_ptr() != kept.data_ptr()
            for number, (value, kept) in enumerate(zip(values, self._static, strict=True))
            if number not in changing
        ):
            self._static = [value.clone() if number in changing else value for number, value in enumerate(values)]
            self._replay = in_stretches(self._device, Captures()).forward
        else:
            for number in changing:
                self._static[number].copy_(values[number], non_blocking=True)
        try:
            # The next replay writes to the same memory.
            return [output.clone() for output in self._replay(*self._static)]
        except BaseException:
            # Of stretches that were captured in part, later ones would use the memory of earlier ones.
            self._replay = None
            raise


class Captures:
    """Captures into one pool of memory: what one stretch frees, those captured after it use."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def capture(self, function: Callable[..., Sequence[Any]], inputs: Sequence[Any]) -> tuple[Replay, Sequence[Any]]:
        """Return a function that computes the results again, in the same memory, and the results, not computed yet."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            # One that only allocates has no kernel.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            # Other threads may call CUDA meanwhile: the watchdog of NCCL does.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                results = function(*inputs)
            finally:
                graph.capture_end()
        return graph.replay, results

    def allocate(self, like: Tensor) -> Tensor:
        """Return memory of the pool for a tensor of the same shape and dtype."""

        def empty() -> Sequence[Tensor]:
            return (torch.empty(like.shape, dtype=like.dtype, device=like.device),)

        memory: Tensor = self.capture(empty, ())[1][0]
        return memory

    def static(self, tensor: Any) -> Any:
        """Return a tensor in the same memory that does not keep it from being used again."""
        return _torch.borrowed(tensor) if isinstance(tensor, Tensor) else tensor


def in_stretches(module: fx.GraphModule, captures: Captures) -> fx.GraphModule:
    """Return the graph with one call for each stretch between two collectives, captured in the first run.

    Collectives run as they are, in their order; their results are in the same memory in each run. Memory is freed in
    the first run as it would be without captures, and so each stretch may use what is free by then.
    """
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for stays, run in itertools.groupby(list(module.graph.nodes), _stays):
        stretch = list(run)
        if stays or all(is_view(node) or node.target is getitem for node in stretch):
            for node in stretch:
                nodes[node] = _outside(graph, node, nodes, captures)
            continue
        function, inputs, outputs = outline(module, stretch)
        call = graph.call_function(_stretch(function, captures), tuple(nodes[node] for node in inputs))
        for number, node in enumerate(outputs):
            nodes[node] = graph.create_node("call_function", getitem, (call, number), name=node.name)
    return _torch.graph_module(module, graph)


def _stays(node: fx.Node) -> bool:
    """Return whether the node is not captured: a collective, a wait for one, or no call."""
    return node.op not in ("call_function", "call_module") or _is_collective(node) or node.target is WAIT


def _is_collective(node: fx.Node) -> bool:
    is_operator = isinstance(node.target, OpOverload)
    return is_operator and any(each.name == "group_name" for each in _torch.schema_arguments(node.target))


def _outside(graph: fx.Graph, node: fx.Node, nodes: dict[fx.Node, fx.Node], captures: Captures) -> fx.Node:
    """Copy a node that is not captured; results of collectives get memory that stays."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), nodes.__getitem__)
    if node.target is WAIT:
        # A collective reads its operands until then: no stretch in between may use their memory.
        (started,) = node.all_input_nodes
        start = started.all_input_nodes[0] if started.target is getitem else started
        operands = tuple(nodes[source] for source in start.all_input_nodes)
        has_place = start.target in _WITH_PLACE or bool(written_arguments(start))
        return graph.create_node(
            "call_function", _wait if has_place else _landing(captures), (*args, *operands), name=node.name
        )
    if node.target in _WITH_PLACE:
        target = _placed(_WITH_PLACE[node.target], captures, node.meta["val"])
        return graph.create_node("call_function", target, args, kwargs, name=node.name)
    return graph.create_node(node.op, node.target, args, kwargs, name=node.name)


def _stretch(function: Callable[..., Sequence[Any]], captures: Captures) -> Callable[..., Sequence[Any]]:
    replay: Replay | None = None
    results: Sequence[Any] = ()

    def stretch(*inputs: Any) -> Sequence[Any]:
        nonlocal replay, results
        if replay is not None:
            replay()
            return results
        replay, owned = captures.capture(function, inputs)
        results = tuple(map(captures.static, owned))
        replay()
        return owned

    return stretch


def _wait(started: Tensor, *operands: Any) -> Tensor:
    waited: Tensor = WAIT(started)
    return waited


def _landing(captures: Captures) -> Callable[..., Tensor]:
    place: Tensor | None = None

    def land(started: Tensor, *operands: Any) -> Tensor:
        nonlocal place
        waited = WAIT(started)
        if place is not None:
            return place.copy_(waited)
        owned = captures.allocate(waited).copy_(waited)
        place = captures.static(owned)
        return owned

    return land


def _placed(run: Callable[..., Tensor], captures: Captures, like: Tensor) -> Callable[..., Tensor]:
    place: Tensor | None = None

    def start(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal place
        if place is not None:
            return run(*args, **kwargs, out=place)
        # The shapes are static; the device is that of the operand.
        owned = captures.allocate(torch.empty(like.shape, dtype=like.dtype, device=args[0].device))
        place = captures.static(owned)
        return run(*args, **kwargs, out=owned)

    return start


def _all_reduce(x: Tensor, operation: str, group_name: str, *, out: Tensor) -> Tensor:
    reduced: Tensor = c10d.all_reduce_.default(out.copy_(x), operation, group_name)
    return reduced


# Collectives that write where they are told to; results of others are copied to where they stay.
_WITH_PLACE: dict[Any, Callable[..., Tensor]] = {
    c10d.all_gather_into_tensor.default: c10d.all_gather_into_tensor_out.default,
    c10d.all_reduce.default: _all_reduce,
}
if hasattr(c10d, "reduce_scatter_tensor_out"):
    _WITH_PLACE[c10d.reduce_scatter_tensor.default] = c10d.reduce_scatter_tensor_out.default


Outline = tuple[Callable[..., Sequence[Any]], list[fx.Node], list[fx.Node]]


def outline(module: fx.GraphModule, run: Sequence[fx.Node]) -> Outline:
    """Return a function that computes a run of nodes, the nodes that it takes, and those whose values it returns.

    Args:
        module: the graph.
        run: nodes of it, one after the other.
    """
    graph, own = fx.Graph(), set(run)
    inputs = list(dict.fromkeys(source for node in run for source in node.all_input_nodes if source not in own))
    values = {source: graph.placeholder(source.name) for source in inputs}
    for node in run:
        # The name leads from a line that fails back to the emitted graph.
        values[node] = graph.node_copy(node, values.__getitem__)
    outputs = [node for node in run if any(user not in own for user in node.users)]
    graph.output(tuple(values[node] for node in outputs))
    # Not the module: GraphModule.__call__ drops the traceback that names the failed node.
    function: Callable[..., Sequence[Any]] = _torch.graph_module(module, graph).forward
    return function, inputs, outputs
