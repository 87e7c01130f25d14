"""A local region in the step graph: one node for its forward and one for its backward, each with its own graph.

The node ``zerograph::local`` has global shapes and one signature. ``localize`` replaces it by the region's graph, which
is that of one rank, in local shapes. The tensors that forward saves for backward are no shards of a global tensor.
Between the two nodes they have a leading dimension along which they are split.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from zerograph.ir.metadata import meta
from zerograph.ir.rewrite import closure
from zerograph.ir.sbp import Sbp
from zerograph.ops.definition import define

aten = torch.ops.aten


@dataclass(frozen=True)
class GlobalSpec:
    """Global shape, dtype, device and SBP of a region's output."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sbp: Sbp


@dataclass(frozen=True, eq=False)
class Region:
    """The region that a node ``local`` refers to.

    Attributes:
        graph: one rank's computation, from shards of the node's inputs to shards of its outputs.
        inputs: the SBP of each input along every mesh dimension.
        outputs: each output as a global tensor.
        number: the node's reference to the region.
    """

    graph: fx.Graph
    inputs: tuple[Sbp, ...]
    outputs: tuple[GlobalSpec, ...]
    number: int = field(default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        _regions[self.number] = self


# References by number; the captured graph keeps its regions alive.
_regions: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()


def region_of(node: fx.Node) -> Region:
    """Return the region of a node ``local``."""
    number = node.args[1]
    assert isinstance(number, int)
    return _regions[number]


def _local_fake(inputs: Sequence[Tensor], region: int) -> list[Tensor]:
    return [torch.empty(spec.shape, dtype=spec.dtype, device=spec.device) for spec in _regions[region].outputs]


def _local(inputs: Sequence[Tensor], region: int) -> list[Tensor]:
    raise NotImplementedError("a local region runs only as part of a step graph")


local = define("local", "(Tensor[] inputs, int region) -> Tensor[]", _local, _local_fake)


@dataclass(frozen=True)
class Halves:
    """The forward and backward graph of a joint graph.

    Attributes:
        forward: takes ``forward_inputs``; returns the outputs, then the values saved for backward.
        backward: takes ``backward_inputs``, the saved values, and the gradients of the outputs.
        forward_inputs: indices of the joint graph's inputs that forward takes.
        backward_inputs: indices of the joint graph's inputs that backward takes.
        saved: fake values that forward saves for backward, in local shapes.
    """

    forward: fx.Graph
    backward: fx.Graph
    forward_inputs: tuple[int, ...]
    backward_inputs: tuple[int, ...]
    saved: tuple[Tensor, ...]


def split_joint(joint: fx.Graph, inputs: int, outputs: int) -> Halves:
    """Split a joint graph into forward and backward.

    Backward recomputes views: a saved view of a weight would keep the gathered weight alive.

    Args:
        joint: a functional graph. Its placeholders are the inputs, then the gradients of the outputs. It returns the
            outputs, then the gradients of inputs.
        inputs: number of inputs.
        outputs: number of outputs.
    """
    arguments = joint.find_nodes(op="placeholder")
    returned = joint.output_node().args[0]
    assert isinstance(returned, (list, tuple))
    results, gradients = list(returned[:outputs]), list(returned[outputs:])
    needed_forward = _needed(results, set())
    in_forward = needed_forward | {
        node for node in joint.nodes if node.target is operator.getitem and node.args[0] in needed_forward
    }
    kept = {node for node in in_forward if node.op != "placeholder" and not getattr(node.target, "is_view", False)}
    needed_backward = _needed(gradients, kept)
    saved = [node for node in joint.nodes if node in kept and node in needed_backward]
    first = [node for node in arguments[:inputs] if node in needed_forward]
    second = [node for node in arguments[:inputs] if node in needed_backward]
    return Halves(
        _extract(joint, first, [], results, saved),
        _extract(joint, second, saved, gradients, [], arguments[inputs:]),
        tuple(map(arguments.index, first)),
        tuple(map(arguments.index, second)),
        tuple(node.meta["val"] for node in saved),
    )


def _needed(nodes: Sequence[fx.Node], saved: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes and their ancestors, but not the ancestors of ``saved`` nodes."""
    return closure(nodes, lambda node: () if node in saved else node.all_input_nodes)


def _extract(
    joint: fx.Graph,
    inputs: Sequence[fx.Node],
    restored: Sequence[fx.Node],
    results: Sequence[fx.Node],
    saved: Sequence[fx.Node],
    last_inputs: Sequence[fx.Node] = (),
) -> fx.Graph:
    """Return a graph from ``inputs``, ``restored`` (saved) values and ``last_inputs`` to ``results`` and ``saved``."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = _placeholder(graph, node.meta["val"])
    packed = {node: _placeholder(graph, node.meta["val"].unsqueeze(0)) for node in restored}
    for node in last_inputs:
        copies[node] = _placeholder(graph, node.meta["val"])
    for node, placeholder in packed.items():
        copies[node] = graph.call_function(aten.select.int, (placeholder, 0, 0))
        meta(copies[node])["origin"] = meta(node)["origin"]
    needed = _needed([*results, *saved], set(restored))
    for node in joint.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    unpacked = [graph.call_function(aten.unsqueeze.default, (copies[node], 0)) for node in saved]
    for node, source in zip(unpacked, saved, strict=True):
        meta(node)["origin"] = meta(source)["origin"]
    graph.output((*(copies[node] for node in results), *unpacked))
    return graph


def _placeholder(graph: fx.Graph, value: Any) -> fx.Node:
    node = graph.placeholder(f"arg{len(graph.nodes)}")
    node.meta["val"] = value
    return node
