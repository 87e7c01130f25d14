"""hoist_batch_statistics: compute before the first micro-batch what each one needs of the whole batch, or refuse.

A loss that divides by the count of valid tokens divides by that of the whole batch, in each micro-batch. The count
follows from the batch alone, so it is computed first, from the whole batch, with everything that leads to it. What
also depends on parameters (statistics of batch norm, a loss between all pairs of samples) would need the whole forward
pass first; such a step is refused.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from zerograph._torch import OpOverload
from zerograph.errors import PlacementError
from zerograph.ir.metadata import boxing_of, has_role, meta, origin
from zerograph.ir.rewrite import ancestors, drop_unused
from zerograph.ir.sbp import NdSbp, Signature, Split, broadcast, partial_sum
from zerograph.passes import rules
from zerograph.passes.accumulation.time_boxing import batch_only_nodes, change_sbps, sbps, time_boxing
from zerograph.passes.context import Context
from zerograph.passes.placement.boxing import boxing


def hoist_batch_statistics(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Compute batch statistics that every micro-batch needs once, before the first micro-batch."""
    if not context.has_time or context.batch.slices is not None:
        # Slices wait for sums over all of them, which are added in a tree.
        return module
    graph = module.graph
    in_loop, batch_only = _loop_nodes(graph, context), batch_only_nodes(graph)
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node in in_loop and (change := time_boxing(node, context)) and change.target[-1] == broadcast:
            if node not in batch_only:
                _refuse(node, in_loop, context)
            node.replace_all_uses_with(_on_whole_batch(node, context, copies))
    drop_unused(graph)
    _check_gradients(graph, context)
    return module


def _check_gradients(graph: fx.Graph, context: Context) -> None:
    """Reject a step that gathers the whole batch before the model: micro-batching would save nothing."""
    batch_only = batch_only_nodes(graph)
    for joined in graph.nodes:
        if "gradient" not in joined.meta or meta(joined)["sbp"][-1] != broadcast:
            continue
        sources = ancestors([joined])
        sums = any((change := time_boxing(node, context)) and change.source[-1] == partial_sum for node in sources)
        model_nodes = sources - batch_only
        entries = [
            node for node in graph.nodes if node in model_nodes and not batch_only.isdisjoint(node.all_input_nodes)
        ]
        reads_batch = any(has_role(node, "input") and node.meta["val"].dim() for node in sources)
        if entries and not sums and reads_batch:
            _refuse(entries[0], model_nodes, context)


def _loop_nodes(graph: fx.Graph, context: Context) -> set[fx.Node]:
    """Return the nodes that differ between micro-batches, and their ancestors."""
    nodes: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and (_varies(node, context) or not nodes.isdisjoint(node.users)):
            nodes.add(node)
    return nodes


def _varies(node: fx.Node, context: Context) -> bool:
    """Return whether a node differs between micro-batches: it yields, or reads, a tensor that is not B along time."""
    if (change := time_boxing(node, context)) is not None:
        return change.target[-1] != broadcast
    return any(sbp[-1] != broadcast for source in (node, *node.all_input_nodes) for sbp in sbps(source))


def _on_whole_batch(node: fx.Node, context: Context, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the node's counterpart that is computed once, from the whole batch: itself if it is B along time."""
    if time_boxing(node, context) is not None:
        return _on_whole_batch(node.all_input_nodes[0], context, copies)
    if not _varies(node, context):
        return node
    if node not in copies:
        inputs = {source: _on_whole_batch(source, context, copies) for source in node.all_input_nodes}
        with node.graph.inserting_before(node):
            copies[node] = node.graph.node_copy(node, inputs.__getitem__)
        _make_broadcast(copies[node])
    return copies[node]


def _make_broadcast(node: fx.Node) -> None:
    change_sbps(node, _whole_in_time)
    if "signature" in node.meta:
        *others, last = meta(node)["signature"]
        whole = Signature((broadcast,) * len(last.inputs), (broadcast,) * len(last.outputs))
        meta(node)["signature"] = (*others, whole)
    change = boxing_of(node)
    if change is not None:
        source, target = _whole_in_time(change.source), _whole_in_time(change.target)
        meta(node)["boxing"] = replace(change, source=source, target=target)


def _whole_in_time(sbp: NdSbp) -> NdSbp:
    return (*sbp[:-1], broadcast)


def _refuse(node: fx.Node, in_loop: set[fx.Node], context: Context) -> None:
    reader = _reader(node, in_loop)
    if isinstance(reader.target, OpOverload) and rules.rule_of(reader.target) is None:
        advice = "No rule says how it may be split: give it one with zg.register_rule."
    elif any(isinstance(one, Split) and one.dim for sbp in context.batch.inputs for one in sbp):
        advice = (
            "Ranks that split the sequence (config.mesh.context_parallel) cut attention into micro-batches where it is "
            "one operator: F.scaled_dot_product_attention with heads of one width, and no bias that has a gradient."
        )
    else:
        advice = (
            "For batch norm set config.batch_norm = 'local': the statistics are then each micro-batch's. What else "
            "compares samples can be computed on each micro-batch by itself, in a region (zg.local)."
        )
    raise PlacementError(
        f"{reader.target} needs the whole batch at once, but config.gradient_accumulation_steps cuts it into "
        f"{context.batch.micro_batches} micro-batches, computed one after another\n"
        f"{origin(reader).line}\n"
        f"{advice}\nOr set gradient_accumulation_steps to 1."
    )


def _reader(node: fx.Node, in_loop: set[fx.Node]) -> fx.Node:
    """Return the operator in the loop that reads the node, through boxing nodes."""
    while node.target is boxing:
        node = next(user for user in node.users if user in in_loop)
    return node
