"""Replay a whole step as one CUDA graph, on one rank.

What the CPU computes (step counts, rates) runs before the replay, which reads it from the device: a captured kernel
would read the numbers of the step that was captured. Everything else is launched by one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph.errors import ConfigError
from zerograph.ir.metadata import origin, role
from zerograph.ir.offload_operators import PACK
from zerograph.ir.step_graph import placeholders

aten = torch.ops.aten
_INSTEAD = "Use config.backend = 'inductor'."
# Steps before the one that is captured: libraries allocate their workspaces, kernels are chosen.
_WARM_UP = 2


def as_cuda_graph(graph: fx.GraphModule, compiled: fx.GraphModule) -> _Step:
    """Return a function that runs the step, as a CUDA graph after some steps.

    Args:
        graph: the emitted graph.
        compiled: the graph whose nodes run: compiled regions, and operators.

    Raises:
        ConfigError: the step cannot be one CUDA graph; the message says why.
    """
    inputs = placeholders(graph.graph)
    devices = {node.meta["val"].device for node in inputs if isinstance(node.meta["val"], Tensor)}
    if not any(device.type == "cuda" for device in devices):
        raise ConfigError(f"config.backend = 'cudagraph' needs a model on a CUDA device, not on {devices}\n{_INSTEAD}")
    if collective := next((node for node in graph.graph.nodes if "boxing" in node.meta), None):
        raise ConfigError(
            f"config.backend = 'cudagraph' is for one rank, and this step has collectives ({collective})\n{_INSTEAD}"
        )
    host, device = _split(compiled, next(each for each in devices if each.type == "cuda"))
    batch = [number for number, node in enumerate(inputs) if (of := role(node)) is not None and of.kind == "input"]
    return _Step(host, device, batch)


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
    """A step, as a CUDA graph after some calls; captured again when memory has moved.

    Args:
        host: what the CPU computes.
        device: what is captured.
        batch: the numbers of the inputs that differ from step to step; the others stay where they are.
    """

    def __init__(self, host: fx.GraphModule, device: fx.GraphModule, batch: Sequence[int]) -> None:
        self._host, self._device, self._batch = host, device, frozenset(batch)
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: list[Any] = []
        self._outputs: Sequence[Any] = ()

    def __call__(self, *inputs: Any) -> list[Any]:
        numbers = self._host.forward(*inputs)
        if self._calls < _WARM_UP:
            self._calls += 1
            return list(self._device.forward(*numbers, *inputs))
        first = len(numbers)
        values = [*numbers, *inputs]
        changing = {*range(first), *(first + number for number in self._batch)}
        if self._graph is None or any(
            isinstance(value, Tensor) and value.data_ptr() != kept.data_ptr()
            for number, (value, kept) in enumerate(zip(values, self._static, strict=True))
            if number not in changing
        ):
            self._capture(values, changing)
        else:
            for number in changing:
                self._static[number].copy_(values[number], non_blocking=True)
        assert self._graph is not None
        self._graph.replay()
        # The next replay writes to the same memory.
        return [output.clone() for output in self._outputs]

    def _capture(self, values: Sequence[Any], changing: set[int]) -> None:
        self._static = [value.clone() if number in changing else value for number, value in enumerate(values)]
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile: the watchdog of NCCL does.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = self._device.forward(*self._static)
