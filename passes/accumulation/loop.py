"""loop: cut the flat graph into what comes before the micro-batches, the body of one micro-batch, and what comes after.

Nodes that are equal in all micro-batches and that the body reads stand before the loop; nodes that follow from a sum
over the micro-batches stand after it. The body recomputes views, which costs nothing and keeps the aliases visible. If
the stage frees gathered parameters between their uses, the body also recomputes all that is computed from a bucket.

Where micro-batches are the slices of ``config.virtual_ranks``, sums are added in a tree. A micro-batch may then need a
sum over all of them, such as the statistics of batch norm: loops follow each other, and a loop reads sums of those
before it. A rank with one slice has no loop.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph.ir.alias import is_view, viewed
from zerograph.ir.loop import Loop, Result, accumulate, collect, loop_of
from zerograph.ir.metadata import Origin, Role, boxing_of, has_role, meta, origin, role
from zerograph.ir.pause import GRADIENT_OF
from zerograph.ir.rank_numbers import along
from zerograph.ir.rewrite import ancestors, closure, copy_placement, emit, emit_like, fake, operand, replace_node
from zerograph.ir.sbp import NdSbp, Signature, Split, broadcast
from zerograph.ops.random import uniform
from zerograph.ops.tree_sum import accumulate_in_tree, levels, nodes_per_rank
from zerograph.passes.accumulation.time_boxing import change_sbps, enter, leave, sbps
from zerograph.passes.context import Context

aten = torch.ops.aten
NAME = "micro_batches"


def loop(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Replace all micro-batches by one node, whose body is the graph of one; drop time from every SBP."""
    if not context.has_time:
        return module
    graph = module.graph
    if context.batch.micro_batches > 1:
        _compute_gradients_outside(graph, context)
    if context.batch.micro_batches == 1:
        _remove_marks(graph)
    elif in_loop := _loop_nodes(graph):
        *earlier, last = _divide(graph, in_loop, context)
        for number, nodes in enumerate(earlier):
            _cut(module, nodes, context, f"earlier_{NAME}_{number}")
        _cut(module, last, context, NAME)
    for node in graph.nodes:
        _drop_time(node)
    return module


def _compute_gradients_outside(graph: fx.Graph, context: Context) -> None:
    """Have gradients that the caller computes be those of all micro-batches: it pauses the step between two loops."""
    for node in graph.find_nodes(op="call_function", target=GRADIENT_OF):
        result, time = node.all_input_nodes[0], meta(node)["sbp"][-1]
        if isinstance(time, Split):
            # The result is an output, which the caller reads at the pause.
            whole = next(user for user in result.users if user.target is leave)
            node.prepend(whole)
            with graph.inserting_before(node):
                gradient = emit_like(whole, GRADIENT_OF, whole, node.args[1])
                part = emit_like(node, enter, gradient, time.dim, context.batch.micro_batches)
            meta(gradient)["origin"] = origin(node)
            replace_node(node, part)


def _remove_marks(graph: fx.Graph) -> None:
    """Replace the parts and results of the only micro-batch by the tensors themselves."""
    for node in list(graph.nodes):
        meta(node).pop("draw_dim", None)
        if node.target in (enter, leave):
            replace_node(node, node.all_input_nodes[0])


def _loop_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that differ between micro-batches."""
    nodes: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node.target is leave:
            continue
        differs = any(sbp[-1] != broadcast for sbp in sbps(node))
        if node.target is enter or differs or "draw_dim" in node.meta or not nodes.isdisjoint(node.all_input_nodes):
            nodes.add(node)
    return nodes


def _divide(graph: fx.Graph, in_loop: set[fx.Node], context: Context) -> list[set[fx.Node]]:
    """Divide the nodes of the micro-batches among loops that follow each other, each node as late as possible.

    A tensor of one loop that a later one reads is stored for all micro-batches; views of it are computed again. Results
    that need no gradient of the caller's are there when the step pauses for these.
    """
    # For each node the number of loops after the one that computes it, or before which it is computed.
    after: dict[fx.Node, int] = {}
    gradients, after_pause = graph.find_nodes(op="call_function", target=GRADIENT_OF), 0
    late = closure(gradients, lambda node: node.users)
    for _ in range(2 if gradients else 1):
        for node in reversed(graph.nodes):
            needed = (after[user] + (user in in_loop and node not in in_loop) for user in node.users)
            after[node] = max(needed, default=0)
            if node.target is leave and node not in late:
                after[node] = max(after[node], after_pause)
            if not isinstance(node.meta.get("val"), Tensor):
                # An operator's results are read in its loop.
                after.update(dict.fromkeys(node.users, after[node]))
        after_pause = max((after[node] for node in gradients), default=0)
    for node in graph.find_nodes(op="call_function", target=leave):
        if after[node] and node.all_input_nodes[0].target is enter:
            # All parts of a tensor that is there before the first loop.
            replace_node(node, node.all_input_nodes[0].all_input_nodes[0])
    for node in reversed([node for node in graph.nodes if node in in_loop and node.target is not enter]):
        for number in sorted({after[user] for user in node.users if user in in_loop} - {after[node]}):
            readers = [user for user in node.users if user in in_loop and after[user] == number]
            with graph.inserting_before(node.next):
                stored, again = ([], [graph.node_copy(node)]) if viewed(node) else _stored(node, context)
            in_loop.update(stored, again)
            after.update(dict.fromkeys(stored, after[node]) | dict.fromkeys(again, number))
            for reader in readers:
                reader.replace_input_with(node, again[-1])
    count = 1 + max(after[node] for node in in_loop)
    loops = [{node for node in in_loop if after[node] == number} for number in range(count)]
    parts = {node for node in in_loop if node.target is enter}
    return [loop - parts for loop in loops[:0:-1]] + [loops[0] | parts]


def _stored(node: fx.Node, context: Context) -> tuple[list[fx.Node], list[fx.Node]]:
    """Emit nodes that store a tensor of all micro-batches, and nodes that take a part of it in its memory format."""
    value, time = node.meta["val"], meta(node)["sbp"][-1]
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    stored = [emit_like(node, aten.permute.default, node, order)]
    if not isinstance(time, Split):
        stored.append(emit_like(node, aten.unsqueeze.default, stored[-1], 0))
    along = order.index(time.dim) if isinstance(time, Split) else 0
    whole = emit_like(node, leave, stored[-1], along, context.batch.micro_batches)
    again = [emit_like(node, enter, whole, along, context.batch.micro_batches)]
    if not isinstance(time, Split):
        again.append(emit_like(node, aten.squeeze.dim, again[-1], 0))
    again.append(emit_like(node, aten.permute.default, again[-1], [order.index(dim) for dim in range(value.dim())]))
    return stored, again


def _cut(module: fx.GraphModule, in_loop: set[fx.Node], context: Context, name: str) -> None:
    """Move the nodes of ``in_loop`` into the body of one loop node; place the others before or after it."""
    graph = module.graph
    leaving = [node for node in graph.find_nodes(op="call_function", target=leave) if node.args[0] in in_loop]
    body = _Body(graph, context, in_loop)
    inner = [node for node in graph.nodes if node in in_loop and node.target is not enter]
    for node in (*inner, *leaving):
        body.add_operands(node)
    body.add_inputs(leaving)
    for node in inner:
        body.copy(node)
    results = [body.add_result(node, buffer) for node, buffer in zip(leaving, body.results, strict=True)]
    run = Loop(body.finish(), context.batch.micro_batches, body.cuts, results)
    module.add_submodule(name, run)
    before = ancestors(body.operands).union(body.operands)
    # Nodes that need a result, and nodes that the loop does not need, stand after the loop.
    elsewhere = {*before, *in_loop, *leaving}
    after = {node for node in graph.nodes if _is_computed(node) and node not in elsewhere}
    _insert_loop(graph, body, run, leaving, name)
    for node in list(graph.nodes):
        if node in after:
            graph.output_node().prepend(node)
    for node in reversed(list(graph.nodes)):
        if node in in_loop or node in leaving:
            graph.erase_node(node)
    # Nodes that the body recomputes may have no other user. They stand after the loop by now.
    for node in reversed(list(graph.nodes)):
        if node in body.recomputed and not node.users:
            graph.erase_node(node)


def _insert_loop(graph: fx.Graph, body: _Body, run: Loop, leaving: Sequence[fx.Node], name: str) -> None:
    """Insert the node of the loop before the output; its results replace the nodes that leave the loop."""
    with graph.inserting_before(graph.output_node()):
        call = graph.call_module(name, tuple(body.operands))
        values = tuple(buffer.meta["val"] for buffer in body.results)
        meta(call).update({"loop": run, "origin": Origin("backward"), "val": values})
        for index, (node, result) in enumerate(zip(leaving, run.results, strict=True)):
            total = _mark_accumulated(emit_like(node, operator.getitem, call, index), result)
            if total.meta["val"].dim() > node.meta["val"].dim():
                # Stands for all nodes of the rank up to ``add_in_tree``.
                total = _mark_accumulated(emit_like(node, aten.select.int, total, 0, 0), result)
            _cast_for_readers(node, total, result)
            node.replace_all_uses_with(total)


def _mark_accumulated(node: fx.Node, result: Result) -> fx.Node:
    if result.gradient is not None:
        meta(node)["accumulated"] = result.gradient
    return node


def _cast_for_readers(node: fx.Node, total: fx.Node, result: Result) -> None:
    """Cast a gradient that was summed in fp32 for readers that want the low precision of ``node``."""
    dtype = node.meta["val"].dtype
    if dtype is result.dtype:
        return
    cast: fx.Node | None = None
    for reader in list(node.users):
        if reader.target is aten._to_copy.default and reader.meta["val"].dtype is result.dtype:
            replace_node(reader, total)
            continue
        if cast is None:
            cast = _mark_accumulated(emit_like(node, aten._to_copy.default, total, dtype=dtype), result)
        reader.replace_input_with(node, cast)


def _is_computed(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "output")


@dataclass
class _Body:
    """The body under construction.

    Attributes:
        outer: the graph around the loop.
        context: the context of the passes.
        in_loop: the nodes that are copied into the body.
        operands: nodes of the outer graph that the body reads, in order.
        cuts: for each operand the dimension along which a micro-batch takes its part; None: all of it.
        recomputed: nodes of the outer graph that are outside the loop, and that the body copies.
        graph: the graph of the body.
        results: placeholders for the tensors into which the body writes its results.
        partial: placeholders for the partial sums of those that are added in a tree.
        micro_batch: placeholder for the number of the micro-batch.
    """

    outer: fx.Graph
    context: Context
    in_loop: set[fx.Node]
    operands: list[fx.Node] = field(default_factory=list)
    cuts: list[int | None] = field(default_factory=list)
    recomputed: set[fx.Node] = field(default_factory=set)
    graph: fx.Graph = field(default_factory=fx.Graph)
    results: list[fx.Node] = field(default_factory=list)
    partial: dict[fx.Node, fx.Node] = field(default_factory=dict)
    micro_batch: fx.Node = field(init=False)
    _visited: dict[fx.Node, None] = field(default_factory=dict)
    _copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _from_buckets: dict[fx.Node, bool] = field(default_factory=dict)

    def add_operands(self, node: fx.Node) -> None:
        """Add the operands that a node needs, or that nodes which the body recomputes for it need."""
        for source in node.all_input_nodes:
            if source in self._visited:
                continue
            self._visited[source] = None
            if source.target is enter:
                _, along, _, *bounds = source.args
                assert isinstance(along, int)
                self.operands.append(operand(source))
                # The body itself takes a part whose size is a symbol.
                self.cuts.append(None if bounds else along)
                self._copies[source] = source
            elif source in self.in_loop:
                continue
            elif self._is_recomputed(source):
                self.recomputed.add(source)
                self.add_operands(source)
            else:
                self.operands.append(source)
                self.cuts.append(None)
                self._copies[source] = source

    def add_inputs(self, leaving: Sequence[fx.Node]) -> None:
        """Add placeholders: the operands, a buffer per node of ``leaving``, the number of the micro-batch."""
        # _copies has the order of the operands.
        for source in list(self._copies):
            placeholder = self.graph.placeholder(source.name)
            operand = source.all_input_nodes[0] if source.target is enter else source
            like = operand if _takes_part(source) else source
            placeholder.meta = {**like.meta, "role": role(operand) or Role("value", source.name)}
            meta(placeholder).pop("boxing", None)
            meta(placeholder).pop("signature", None)
            self._copies[source] = placeholder
        self.results = [self.graph.placeholder(f"{NAME}_{index}") for index in range(len(leaving))]
        for placeholder, node in zip(self.results, leaving, strict=True):
            copy_placement(placeholder, node)
            value, slices = self._result_value(node), self.context.batch.slices
            if node.args[1] is None and slices is not None and (count := nodes_per_rank(slices, self._ranks)) > 1:
                value = fake(self.outer, (count, *value.shape), value.dtype, value.device)
            meta(placeholder).update({"role": Role("result", placeholder.name), "val": value})
        for placeholder, node in zip(self.results, leaving, strict=True):
            if node.args[1] is None and self.context.batch.slices is not None:
                self.partial[placeholder] = partial = self.graph.placeholder(f"{placeholder.name}_partial")
                value, one = placeholder.meta["val"], self._result_value(node)
                shape = (levels(self.context.batch.slices, self._ranks), *one.shape)
                copy_placement(partial, node)
                new = fake(self.outer, shape, value.dtype, value.device)
                meta(partial).update({"role": Role("result", partial.name), "val": new})
        self.micro_batch = self.graph.placeholder("micro_batch")
        meta(self.micro_batch).update(
            {
                "role": Role("micro_batch", "micro_batch"),
                "val": fake(self.outer, (), torch.int64, torch.device("cpu")),
                "sbp": (broadcast,) * self.context.mesh.dims,
            }
        )
        for source, whole in list(self._copies.items()):
            if _takes_part(source):
                _, along, _, start, size = source.args
                part = emit(self.graph, aten.narrow.default, (whole, along, start, size), origin(source), like=source)
                self._copies[source] = part
            elif source.target is enter and self.context.batch.slices is not None:
                # Products of a part that begins at another address may round otherwise.
                layout = torch.contiguous_format
                part = emit(self.graph, aten.clone.default, (whole,), origin(source), like=source, memory_format=layout)
                self._copies[source] = part

    def copy(self, node: fx.Node) -> None:
        """Copy a node into the body, after the nodes that are recomputed for it."""
        for source in node.all_input_nodes:
            if source not in self._copies:
                self.copy(source)
        copy = self.graph.node_copy(node, self._copies.__getitem__)
        if "draw_dim" in node.meta:
            assert copy.target is uniform
            copy.args = (*copy.args, self.micro_batch, meta(copy).pop("draw_dim"))
            # The signature is that of the operator without the number of the micro-batch.
            meta(copy).pop("signature", None)
        self._copies[node] = copy

    def add_result(self, node: fx.Node, buffer: fx.Node) -> Result:
        """Write what a node of ``leaving`` reads into ``buffer``; return the result's description."""
        _, dim, _, *bounds = node.args
        assert dim is None or isinstance(dim, int)
        part = self._copies[operand(node)]
        if (partial := self.partial.get(buffer)) is not None:
            rank, slices = along(0, 1), self.context.batch.slices
            position = self._ranks, rank.at(self.context.mesh.position)
            add = (buffer, partial, part, self.micro_batch, slices, *position)
            meta(emit(self.graph, accumulate_in_tree, add, origin(node)))["rank_arguments"] = {6: rank}
        elif dim is None:
            emit(self.graph, accumulate, (buffer, part, self.micro_batch), origin(node))
        else:
            emit(self.graph, collect, (buffer, part, self.micro_batch, dim, *bounds[:1]), origin(node))
        value: Tensor = buffer.meta["val"]
        waiting = None if partial is None else tuple(partial.meta["val"].shape)
        return Result(tuple(value.shape), value.dtype, value.device, dim, _gradient_of(node), waiting)

    @property
    def _ranks(self) -> int:
        """Number of ranks, over which the slices are spread."""
        return self.context.mesh.size // self.context.batch.micro_batches

    def finish(self) -> fx.GraphModule:
        """Close the graph of the body and return it as a module."""
        meta(self.graph.output(()))["roles"] = []
        for node in self.graph.nodes:
            _drop_time(node)
        return _torch.graph_module(torch.nn.Module(), self.graph)

    def _result_value(self, node: fx.Node) -> Tensor:
        """Return a fake tensor of the result; low-precision gradients add up in fp32, as ``.grad`` under autocast."""
        value: Tensor = node.meta["val"]
        # Along a tree all sums have one dtype, those over ranks too.
        wide = value.dtype.itemsize >= torch.float32.itemsize or self.context.batch.slices is not None
        if _gradient_of(node) is None or wide:
            return value
        return fake(self.outer, tuple(value.shape), torch.float32, value.device)

    def _is_recomputed(self, node: fx.Node) -> bool:
        """Return whether the body computes the node again instead of reading it from outside."""
        if node.op != "call_function":
            return False
        if is_view(node):
            return True
        return self.context.policy.reshard_after_forward and self._comes_from_bucket(node)

    def _comes_from_bucket(self, node: fx.Node) -> bool:
        if node not in self._from_buckets:
            if loop_of(node) is not None:
                # A loop reads the sums of an earlier one.
                self._from_buckets[node] = False
            elif node.op == "placeholder":
                self._from_buckets[node] = has_role(node, "bucket")
            else:
                self._from_buckets[node] = any(map(self._comes_from_bucket, node.all_input_nodes))
        return self._from_buckets[node]


def _takes_part(node: fx.Node) -> bool:
    """Return whether a node marks an operand of which each micro-batch takes a part of symbolic size."""
    return node.target is enter and len(node.args) > 3


def _gradient_of(node: fx.Node) -> str | None:
    """Return the name of the bucket whose gradient a boxing node moves, or None."""
    boxing = boxing_of(node)
    return boxing.tensor.name if boxing is not None and boxing.tensor.kind == "gradient" else None


def _drop_time(node: fx.Node) -> None:
    """Remove the time dimension from the node's metadata."""
    change_sbps(node, lambda sbp: sbp[:-1])
    signature: tuple[Signature, ...] | None = meta(node).get("signature")
    if signature is not None:
        meta(node)["signature"] = signature[:-1]
    boxing = boxing_of(node)
    if boxing is not None:
        meta(node)["boxing"] = replace(boxing, source=boxing.source[:-1], target=boxing.target[:-1])
    if "needs" in node.meta:
        needs: list[NdSbp] = meta(node)["needs"]
        meta(node)["needs"] = [sbp[:-1] for sbp in needs]
