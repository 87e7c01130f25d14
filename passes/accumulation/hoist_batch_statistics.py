"""hoist_batch_statistics: compute what every micro-batch needs of the whole batch before the first one, or refuse.

A loss that divides by the count of valid tokens divides by that of the whole batch, in each micro-batch. The count
follows from the batch alone, so it can be had first, from the whole batch, at the cost of what leads to it. What also
depends on parameters (batch norm's statistics, a loss between all pairs of samples) would be the whole forward pass.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from zerograph._torch import OpOverload
from zerograph.errors import PlacementError
from zerograph.ir.metadata import Boxing, meta, origin, role
from zerograph.ir.rewrite import ancestors, drop_unused
from zerograph.ir.sbp import NdSbp, Signature, broadcast, partial_sum
from zerograph.passes import rules
from zerograph.passes.accumulation.in_time import along_time, change_sbps, follow_from_batch, sbps
from zerograph.passes.context import Context
from zerograph.passes.placement.boxing import boxing


def hoist_batch_statistics(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """No micro-batch waits for what only all of them together yield."""
    if not context.timed:
        return module
    graph = module.graph
    within, known = _within(graph, context), follow_from_batch(graph)
    whole = _Whole(context)
    for node in list(graph.nodes):
        if node in within and (found := along_time(node, context)) and found.target[-1] == broadcast:
            if node not in known:
                _refuse(node, within, context)
            node.replace_all_uses_with(whole.copy(node))
    drop_unused(graph)
    _check_gradients(graph, context)
    return module


def _check_gradients(graph: fx.Graph, context: Context) -> None:
    """Refuse a step of which micro-batches have no part, because the whole batch is put together before the model."""
    known = follow_from_batch(graph)
    for joined in graph.nodes:
        if "gradient" not in joined.meta or meta(joined)["sbp"][-1] != broadcast:
            continue
        cone = ancestors([joined])
        sums = any((found := along_time(one, context)) and found.source[-1] == partial_sum for one in cone)
        model = cone - known
        fed = [one for one in graph.nodes if one in model and not known.isdisjoint(one.all_input_nodes)]
        if fed and not sums and any(_is_input(one) for one in cone):
            _refuse(fed[0], model, context)


def _is_input(node: fx.Node) -> bool:
    found = role(node)
    return found is not None and found.kind == "input" and bool(node.meta["val"].dim())


def _within(graph: fx.Graph, context: Context) -> set[fx.Node]:
    """What micro-batches differ in, and all that such nodes read."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and (_varies(node, context) or not found.isdisjoint(node.users)):
            found.add(node)
    return found


def _varies(node: fx.Node, context: Context) -> bool:
    """Whether the node is another for each micro-batch: it yields, or reads, what is not B along time."""
    if (found := along_time(node, context)) is not None:
        return found.target[-1] != broadcast
    return any(sbp[-1] != broadcast for one in (node, *node.all_input_nodes) for sbp in sbps(one))


class _Whole:
    """Copies of nodes that are B along time: computed once, from the whole batch."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.copies: dict[fx.Node, fx.Node] = {}

    def copy(self, node: fx.Node) -> fx.Node:
        """What the node is of the whole batch: itself, where it is that already."""
        if along_time(node, self.context) is not None:
            return self.copy(node.all_input_nodes[0])
        if not _varies(node, self.context):
            return node
        if node not in self.copies:
            inputs = {given: self.copy(given) for given in node.all_input_nodes}
            with node.graph.inserting_before(node):
                made = node.graph.node_copy(node, inputs.__getitem__)
            self._settle(made)
            self.copies[node] = made
        return self.copies[node]

    def _settle(self, made: fx.Node) -> None:
        change_sbps(made, _always)
        if "signature" in made.meta:
            *others, last = meta(made)["signature"]
            whole = Signature((broadcast,) * len(last.inputs), (broadcast,) * len(last.outputs))
            meta(made)["signature"] = (*others, whole)
        found = meta(made).get("boxing")
        if isinstance(found, Boxing):
            meta(made)["boxing"] = replace(found, source=_always(found.source), target=_always(found.target))


def _always(sbp: NdSbp) -> NdSbp:
    return (*sbp[:-1], broadcast)


def _refuse(node: fx.Node, within: set[fx.Node], context: Context) -> None:
    reader = _reader(node, within)
    where = origin(reader)
    help_ = (
        "No rule says how it may be split: give it one with zg.register_rule."
        if isinstance(reader.target, OpOverload) and rules.find(reader.target) is None
        else "For batch norm set config.batch_norm = 'local': the statistics are then each micro-batch's. What else "
        "compares samples can be computed on each micro-batch by itself, in a region (zg.local)."
    )
    raise PlacementError(
        f"{reader.target} needs the whole batch at once, but config.gradient_accumulation_steps cuts it into "
        f"{context.batch.micro_batches} micro-batches, computed one after another\n"
        f"  {where.source}   {where.code}\n"
        f"{help_}\nOr set gradient_accumulation_steps to 1."
    )


def _reader(node: fx.Node, within: set[fx.Node]) -> fx.Node:
    """What computes with it in the loop, behind boxing."""
    while node.target is boxing:
        node = next(user for user in node.users if user in within)
    return node
