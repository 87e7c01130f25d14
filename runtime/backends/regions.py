"""Cut the emitted graph into regions worth compiling on an accelerator: a layer's operators between two collectives.

Inductor then chooses layouts, and fuses what stands before and after products, as under ``torch.compile``. Equal layers
are equal regions, so a deep model compiles as fast as a shallow one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from operator import getitem

import torch
from torch import fx

from zerograph._torch import OpOverload
from zerograph.ir.alias import WAIT, is_view
from zerograph.ir.layers import layers_of
from zerograph.ir.memory import profile
from zerograph.ir.metadata import origin
from zerograph.ir.step_graph import tensors_of
from zerograph.ops.attention import ACCELERATED, BACKWARD, FORWARD
from zerograph.runtime.backends.pieces import (
    FACTORIES,
    Cutter,
    OpenPiece,
    Program,
    memory_owners,
    on_tensors,
    read_numbers,
    symbol_inputs,
)

aten = torch.ops.aten

_ATTENTION = {FORWARD, BACKWARD, *ACCELERATED, *ACCELERATED.values()}
_PRODUCTS = _ATTENTION | {
    aten.addmm.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.mm.default,
    aten.mm.out,
}
_COSTS_NOTHING = {getitem, *FACTORIES}


def cut_regions(graph: fx.Graph) -> Program:
    """Return the graph as a program: regions of forward and backward, pieces of updates, and nodes to run as they are.

    A region ends where a layer ends, before a wait for a collective that its products overlap, and before a node that
    reads one of its values or writes to one of its inputs. A collective that reads a value of a region starts when the
    region has run; collectives keep their order. Other nodes run before the region. One that allocates memory ends the
    region where the step would else hold more than its predicted peak.
    """
    cutter = _Cutter(graph)
    for node in graph.nodes:
        if node.op != "output":
            cutter.place(node)
    cutter.close()
    cutter.others.close()
    return read_numbers(graph, cutter.others.program)


class _Cutter:
    """Visit nodes in order; the program grows by nodes and finished regions.

    Attributes:
        others: puts what is in no region into the program.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.others = Cutter(graph, of_updates=True)
        self._with_symbols = symbol_inputs(graph)
        self._memory = memory_owners(graph)
        self._layers = layers_of(graph)
        usage = profile(graph)
        self._bytes, self._peak = dict(zip(usage.nodes, usage.bytes, strict=True)), usage.peak
        self._allocated = Counter[fx.Node]()
        for storage in usage.storages:
            self._allocated[usage.nodes[storage.born]] += storage.bytes
        # Bytes in memory while the region runs, with what is allocated before it instead of within.
        self._most = 0
        self._region = OpenPiece(self._memory)
        self._layer = ""
        # Collectives that start when the region has run.
        self._starts: dict[fx.Node, None] = {}
        self._placed: set[fx.Node] = set()

    def place(self, node: fx.Node) -> None:
        """Put the node into the region or into the program."""
        if node in self._placed:
            return
        if not _may_join(node) or (is_view(node) and not self._region.allocates(node)):
            self._place_outside(node)
            return
        layer = self._layers.get(node, self._layer)
        if self._region.nodes and (layer != self._layer or not self._region.takes(node)):
            self.close()
        self._layer = layer
        self._most = max(self._most, self._bytes[node])
        results = [user for user in node.users if user.target is getitem]
        for joining in (node, *results):
            self._region.add(joining)
        self._placed.update(results)

    def close(self) -> None:
        """Append the region to the program, then the views of its values, and the collectives that wait for it."""
        computed = [node for node in self._region.nodes if not is_view(node) and node.target not in _COSTS_NOTHING]
        following = list(self._region.nodes)
        # A compiler gains nothing by a single operator.
        if len(computed) > 1:
            views = self._leaving_views()
            self.others.close()
            self.others.program.append(self._region.piece(self._with_symbols, views))
            following = list(views)
        for node in (*following, *self._starts):
            self.others.place(node)
        self._region, self._starts, self._most = OpenPiece(self._memory), {}, 0

    def _leaving_views(self) -> dict[fx.Node, None]:
        """Return the views of the region's values that nodes outside read, with those that they are views of.

        Inductor would store an expanded view as a copy, and hold several views of a value as several values.
        """
        nodes = self._region.nodes
        leaving: set[fx.Node] = set()
        for node in reversed(nodes):
            if (
                is_view(node)
                and node.args[0] in nodes
                and any(user not in nodes or user in leaving for user in node.users)
            ):
                leaving.add(node)
        return dict.fromkeys(node for node in nodes if node in leaving)

    def _place_outside(self, node: fx.Node) -> None:
        if "boxing" in node.meta and node.users and all(user.target is WAIT for user in node.users):
            if self._starts or self._region.conflicts(node):
                self._starts[node] = None
                return
        elif (
            self._region.conflicts(node)
            or any(source in self._starts for source in node.all_input_nodes)
            or self._ends(node)
        ):
            self.close()
        if self._region.nodes:
            self._most += self._allocated[node]
        self.others.place(node)

    def _ends(self, node: fx.Node) -> bool:
        """Return whether the node waits for a collective that the region overlaps, or needs memory that it has freed.

        What is before a layer's first product takes little time: it runs after the wait, with the product.
        """
        if node.target is WAIT and any(inner.target in _PRODUCTS for inner in self._region.nodes):
            return True
        # The next gather starts after the wait, which is to overlap the region, too.
        starts = node.target is WAIT and "boxing" in node.next.meta
        return bool(self._region.nodes) and self._most + self._allocated[node.next if starts else node] > self._peak


def _may_join(node: fx.Node) -> bool:
    """Return whether the node may be in a region: a plain operator of forward or backward on accelerator tensors."""
    target = node.target
    if target in _ATTENTION:
        # Tagged as random for a dropout that no captured graph has. Sizes and seeds are among the results.
        return True
    if not isinstance(target, OpOverload) or "boxing" in node.meta or not on_tensors(node):
        return False
    if target is aten.empty.memory_format:
        # A gradient of several parts: regions write to it in place, where Inductor would join copies of its own.
        return False
    if target.namespace not in ("aten", "prims") or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    if origin(node).phase == "update" or target.name().startswith("aten::_fused_"):
        return False
    values = itertools.chain.from_iterable(map(tensors_of, (node, *node.all_input_nodes)))
    return all(value.device.type != "cpu" or value.dim() for value in values)
