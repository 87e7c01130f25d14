"""loop: the flat graph is cut where time begins and ends: before, the body of one micro-batch, and after.

What no micro-batch differs in and the body reads stands before the loop, once; what follows from a sum over the
micro-batches stands behind it. Views are made again in the body, where they cost nothing and say what they are views
of; so is, where the stage frees gathered parameters between their uses, all that comes of a bucket.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph.ir.alias import is_view
from zerograph.ir.loop import Loop, Result, accumulate, collect
from zerograph.ir.metadata import Boxing, Origin, Role, boxing_of, meta, origin, role
from zerograph.ir.random import uniform
from zerograph.ir.rewrite import ancestors, copy_placement, emit, emit_like, fake
from zerograph.ir.sbp import NdSbp, Signature, broadcast
from zerograph.passes.accumulation.in_time import change_sbps, enter, leave, sbps
from zerograph.passes.context import Context

aten = torch.ops.aten
NAME = "micro_batches"


def loop(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """All micro-batches are one node, whose body is the graph of one; no SBP has time any more."""
    if not context.timed:
        return module
    graph = module.graph
    within = _within(graph)
    if within:
        _cut(module, within, context)
    for node in graph.nodes:
        _forget_time(node)
    return module


def _within(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that are another for each micro-batch."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node.target is leave:
            continue
        timed = any(sbp[-1] != broadcast for sbp in sbps(node))
        if node.target is enter or timed or "draw_dim" in node.meta or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _cut(module: fx.GraphModule, within: set[fx.Node], context: Context) -> None:
    graph = module.graph
    leaving = graph.find_nodes(op="call_function", target=leave)
    making = _Body(graph, context, within)
    inner = [node for node in graph.nodes if node in within and node.target is not enter]
    for node in (*inner, *leaving):
        making.need(node)
    making.begin(leaving)
    for node in inner:
        making.put(node)
    results = [making.result(node, place) for node, place in zip(leaving, making.results, strict=True)]
    found = Loop(making.end(), context.batch.micro_batches, making.cuts, results)
    module.add_submodule(NAME, found)
    before = ancestors(making.operands).union(making.operands)
    # What needs a result, and what nobody needs before, stands behind the loop.
    moving = {node for node in graph.nodes if _is_computed(node) and node not in before and node not in within}
    output = graph.output_node()
    with graph.inserting_before(output):
        ran = graph.call_module(NAME, tuple(making.operands))
        meta(ran).update(
            {
                "loop": found,
                "origin": Origin("backward"),
                "val": tuple(one.meta["val"] for one in making.results),
            }
        )
        for index, (node, result) in enumerate(zip(leaving, results, strict=True)):
            taken = _result(emit_like(node, operator.getitem, ran, index), result)
            _narrow(graph, node, taken, result)
            node.replace_all_uses_with(taken)
    for node in list(graph.nodes):
        if node in moving:
            output.prepend(node)
    for node in reversed(list(graph.nodes)):
        if node in within or node.target is leave:
            graph.erase_node(node)
    # What the body makes for itself may be needed by nobody else; it stands behind the loop by now.
    for node in reversed(list(graph.nodes)):
        if node in making.remade and not node.users:
            graph.erase_node(node)


def _result(made: fx.Node, result: Result) -> fx.Node:
    if result.gradient is not None:
        meta(made)["accumulated"] = result.gradient
    return made


def _narrow(graph: fx.Graph, node: fx.Node, taken: fx.Node, result: Result) -> None:
    """A gradient that travels in a low precision, but was summed in fp32, is cast for those who read it so."""
    dtype = node.meta["val"].dtype
    if dtype is result.dtype:
        return
    narrow: fx.Node | None = None
    for reader in list(node.users):
        if reader.target is aten._to_copy.default and reader.meta["val"].dtype is result.dtype:
            reader.replace_all_uses_with(taken)
            graph.erase_node(reader)
            continue
        if narrow is None:
            narrow = _result(emit_like(node, aten._to_copy.default, taken, dtype=dtype), result)
        reader.replace_input_with(node, narrow)


def _is_computed(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "output") and node.target is not leave


@dataclass
class _Body:
    """The body in the making.

    Attributes:
        within: the nodes that are copied into it.
        operands: what it reads of the graph around it, in order; ``cuts``: the dimension along which it is given a
            part of each, or None.
        remade: nodes around it that it has copies of.
    """

    outer: fx.Graph
    context: Context
    within: set[fx.Node]
    operands: list[fx.Node] = field(default_factory=list)
    cuts: list[int | None] = field(default_factory=list)
    remade: set[fx.Node] = field(default_factory=set)
    graph: fx.Graph = field(default_factory=fx.Graph)
    results: list[fx.Node] = field(default_factory=list)
    _known: dict[fx.Node, None] = field(default_factory=dict)
    _copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _of_buckets: dict[fx.Node, bool] = field(default_factory=dict)

    def need(self, node: fx.Node) -> None:
        """Note the operands that the node needs."""
        for given in node.all_input_nodes:
            if given in self._known:
                continue
            self._known[given] = None
            if given.target is enter:
                source, along, _ = given.args
                assert isinstance(source, fx.Node)
                assert isinstance(along, int)
                self.operands.append(source)
                self.cuts.append(along)
                self._copies[given] = given
            elif given in self.within:
                continue
            elif self._is_remade(given):
                self.remade.add(given)
                self.need(given)
            else:
                self.operands.append(given)
                self.cuts.append(None)
                self._copies[given] = given

    def begin(self, leaving: Sequence[fx.Node]) -> None:
        """Make the body's inputs: the operands, a place for each of ``leaving``, the number of the micro-batch."""
        # In the order of the operands: what was noted for each was noted with it.
        for given in list(self._copies):
            placeholder = self.graph.placeholder(given.name)
            found = role(given.all_input_nodes[0] if given.target is enter else given)
            placeholder.meta = {**given.meta, "role": found or Role("value", given.name)}
            meta(placeholder).pop("boxing", None)
            meta(placeholder).pop("signature", None)
            self._copies[given] = placeholder
        self.results = [self.graph.placeholder(f"{NAME}_{index}") for index in range(len(leaving))]
        for placeholder, node in zip(self.results, leaving, strict=True):
            copy_placement(placeholder, node)
            meta(placeholder).update({"role": Role("result", placeholder.name), "val": _summed(self.outer, node)})
        self.turn = self.graph.placeholder("micro_batch")
        meta(self.turn).update(
            {
                "role": Role("micro_batch", "micro_batch"),
                "val": fake(self.outer, (), torch.int64, torch.device("cpu")),
                "sbp": (broadcast,) * self.context.mesh.dims,
            }
        )

    def put(self, node: fx.Node) -> None:
        """Copy a node, and before it what is made again for it."""
        for given in node.all_input_nodes:
            if given not in self._copies:
                self.put(given)
        copy = self.graph.node_copy(node, self._copies.__getitem__)
        if "draw_dim" in node.meta:
            assert copy.target is uniform
            copy.args = (*copy.args, self.turn, meta(copy).pop("draw_dim"))
            # Of the operator without the number of the micro-batch.
            meta(copy).pop("signature", None)
        self._copies[node] = copy

    def result(self, node: fx.Node, place: fx.Node) -> Result:
        """What a node that leaves the loop is; the body writes it to ``place``."""
        source, along, _ = node.args
        assert isinstance(source, fx.Node)
        assert along is None or isinstance(along, int)
        part = self._copies[source]
        if along is None:
            emit(self.graph, accumulate, (place, part, self.turn), origin(node))
        else:
            emit(self.graph, collect, (place, part, self.turn, along), origin(node))
        value: Tensor = place.meta["val"]
        return Result(tuple(value.shape), value.dtype, value.device, along, _gradient_of(node))

    def end(self) -> fx.GraphModule:
        meta(self.graph.output(()))["roles"] = []
        for node in self.graph.nodes:
            _forget_time(node)
        return _torch.graph_module(torch.nn.Module(), self.graph)

    def _is_remade(self, node: fx.Node) -> bool:
        """Whether the body makes it again rather than be given it."""
        if node.op != "call_function":
            return False
        if is_view(node):
            return True
        return self.context.policy.reshard_after_forward and self._comes_from_bucket(node)

    def _comes_from_bucket(self, node: fx.Node) -> bool:
        if node not in self._of_buckets:
            if node.op == "placeholder":
                found = role(node)
                self._of_buckets[node] = found is not None and found.kind == "bucket"
            else:
                self._of_buckets[node] = any(map(self._comes_from_bucket, node.all_input_nodes))
        return self._of_buckets[node]


def _gradient_of(node: fx.Node) -> str | None:
    """Return the name of the bucket whose gradient a boxing node moves, or None."""
    boxing = boxing_of(node)
    return boxing.tensor.name if boxing is not None and boxing.tensor.kind == "gradient" else None


def _summed(graph: fx.Graph, node: fx.Node) -> Tensor:
    """What holds the result: gradients of a low precision add up in fp32, as they do in ``.grad`` under autocast."""
    value: Tensor = node.meta["val"]
    if _gradient_of(node) is None or value.dtype.itemsize >= torch.float32.itemsize:
        return value
    return fake(graph, tuple(value.shape), torch.float32, value.device)


def _forget_time(node: fx.Node) -> None:
    """Outside of the loop as in its body there are ranks only."""
    change_sbps(node, lambda sbp: sbp[:-1])
    signature: tuple[Signature, ...] | None = meta(node).get("signature")
    if signature is not None:
        meta(node)["signature"] = signature[:-1]
    found = meta(node).get("boxing")
    if isinstance(found, Boxing):
        meta(node)["boxing"] = replace(found, source=found.source[:-1], target=found.target[:-1])
    if "needs" in node.meta:
        needs: list[NdSbp] = meta(node)["needs"]
        meta(node)["needs"] = [one[:-1] for one in needs]
