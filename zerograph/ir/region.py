"""A local region in the step graph: one node of its forward, one of its backward, each with a graph of its own.

The node ``zerograph::local`` has global shapes outside, one signature, and no meaning of its own: ``localize`` puts
the region's graph in its place. That graph is one rank's, in local shapes. What forward saves for backward is no
part of any global tensor; it travels between the two nodes with a leading dimension along which it is split.
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

aten = torch.ops.aten

_library = torch.library.Library("zerograph", "FRAGMENT")
_library.define("local(Tensor[] inputs, int region) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
local = torch.ops.zerograph.local.default


@dataclass(frozen=True)
class GlobalSpec:
    """A region's output seen whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sbp: Sbp


@dataclass(frozen=True, eq=False)
class Region:
    """What stands behind a node ``local``.

    Attributes:
        graph: one rank's computation, from this rank's parts of the node's inputs to those of its outputs.
        inputs: the SBP of each input along one mesh dimension.
        outputs: what each output is globally.
        number: by which the node names it.
    """

    graph: fx.Graph
    inputs: tuple[Sbp, ...]
    outputs: tuple[GlobalSpec, ...]
    number: int = field(default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        _regions[self.number] = self


# The captured graph keeps its regions; here they are only found.
_regions: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()


def region_of(node: fx.Node) -> Region:
    """The region behind a node ``local``."""
    number = node.args[1]
    assert isinstance(number, int)
    return _regions[number]


def _local_fake(inputs: Sequence[Tensor], region: int) -> list[Tensor]:
    return [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in _regions[region].outputs]


def _local(inputs: Sequence[Tensor], region: int) -> list[Tensor]:
    raise NotImplementedError("a local region runs only as part of a step graph")


_library.impl("local", _local, "CompositeExplicitAutograd")
torch.library.register_fake("zerograph::local", _local_fake, lib=_library)


@dataclass(frozen=True)
class Halves:
    """A joint graph cut in two.

    Attributes:
        forward: from the inputs numbered ``forward_inputs`` to the outputs, then what backward needs.
        backward: from the inputs numbered ``backward_inputs``, what forward saved, and the outputs' gradients.
        saved: the saved values, as one rank has them.
    """

    forward: fx.Graph
    backward: fx.Graph
    forward_inputs: tuple[int, ...]
    backward_inputs: tuple[int, ...]
    saved: tuple[Tensor, ...]


def cut(joint: fx.Graph, inputs: int, outputs: int) -> Halves:
    """Cut a functional graph of outputs and gradients, whose placeholders are inputs and then outputs' gradients.

    Views are made again for backward, so that none of a weight, whose gathered whole they would keep, is saved.
    """
    given = joint.find_nodes(op="placeholder")
    returned = joint.output_node().args[0]
    assert isinstance(returned, (list, tuple))
    results, gradients = list(returned[:outputs]), list(returned[outputs:])
    early = _needed(results, set())
    early |= {node for node in joint.nodes if node.target is operator.getitem and node.args[0] in early}
    saved: dict[fx.Node, None] = {}
    stack, seen = list(gradients), set()
    while stack:
        node = stack.pop()
        if node in seen or node.op == "placeholder":
            continue
        seen.add(node)
        if node in early and not getattr(node.target, "is_view", False):
            saved[node] = None
        else:
            stack += node.all_input_nodes
    first = [node for node in given[:inputs] if node in _needed(results, set())]
    late = _needed(gradients, set(saved))
    second = [node for node in given[:inputs] if node in late]
    return Halves(
        _extract(joint, first, [], results, list(saved)),
        _extract(joint, second, list(saved), gradients, [], given[inputs:]),
        tuple(given.index(node) for node in first),
        tuple(given.index(node) for node in second),
        tuple(node.meta["val"] for node in saved),
    )


def _needed(wanted: Sequence[fx.Node], known: set[fx.Node]) -> set[fx.Node]:
    """Return ``wanted`` and their ancestors, up to nodes that are known."""
    return closure(wanted, lambda node: () if node in known else node.all_input_nodes)


def _extract(
    joint: fx.Graph,
    inputs: Sequence[fx.Node],
    restored: Sequence[fx.Node],
    results: Sequence[fx.Node],
    saved: Sequence[fx.Node],
    last_inputs: Sequence[fx.Node] = (),
) -> fx.Graph:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = _placeholder(graph, node.meta["val"])
    packed = {node: _placeholder(graph, node.meta["val"].unsqueeze(0)) for node in restored}
    for node in last_inputs:
        copies[node] = _placeholder(graph, node.meta["val"])
    for node, one in packed.items():
        copies[node] = graph.call_function(aten.select.int, (one, 0, 0))
        meta(copies[node])["origin"] = meta(node)["origin"]
    needed = _needed([*results, *saved], set(restored))
    for node in joint.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    unpacked = [graph.call_function(aten.unsqueeze.default, (copies[node], 0)) for node in saved]
    for node, one in zip(unpacked, saved, strict=True):
        meta(node)["origin"] = meta(one)["origin"]
    graph.output((*(copies[node] for node in results), *unpacked))
    return graph


def _placeholder(graph: fx.Graph, value: Any) -> fx.Node:
    node = graph.placeholder(f"given{len(graph.nodes)}")
    node.meta["val"] = value
    return node
