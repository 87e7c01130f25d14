"""reshard_after_forward: free a gathered bucket after forward and gather it again for backward.

A gathered weight that backward reads stays alive from its first use on, and so do its views, casts and transposes. All
of them are therefore derived again from a second gather. A bucket is gathered at most twice: it is freed in the widest
gap between its uses. For most layers that gap lies between forward and backward. For a weight tied between the first
and the last layer it lies between those two, which keeps the traffic at 3 Psi.

Where ZeRO splits along several mesh dimensions, a bucket is gathered along one after the other, and the last of
these gathers alone is repeated: what the others have made stays until backward (hpZ of ZeRO++, arXiv 2306.10209).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right

import torch
from torch import fx

from zerograph.ir.alias import is_view_or_copy
from zerograph.ir.metadata import meta, origin
from zerograph.ir.rewrite import closure, drop_unused
from zerograph.ir.sbp import Split
from zerograph.ir.step_graph import gathers_bucket, source_bucket
from zerograph.passes.context import Context
from zerograph.passes.edits import copy_for
from zerograph.passes.placement.boxing import boxing

aten = torch.ops.aten


def reshard_after_forward(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Free each gathered bucket in the widest gap between its uses and gather it again, if the stage says so."""
    if not context.policy.reshard_after_forward:
        return module
    graph = module.graph
    gathers = bucket_gathers(graph)
    order = {node: index for index, node in enumerate(graph.nodes)}
    uses = {gather: sorted(_uses(gather)) for gather in gathers}
    used = sorted(order[use] for gather in gathers for use in uses[gather])
    for gather in gathers:
        later = _after_widest_gap(uses[gather], order, used)
        if later:
            _gather_again(gather, later)
    drop_unused(graph)
    return module


def bucket_gathers(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that gather a split bucket, or a parameter that the user splits, in order.

    Of a bucket that is gathered along several mesh dimensions, it is the last gather.
    """
    return [
        node
        for node in graph.find_nodes(op="call_function", target=boxing)
        if source_bucket(_original(_first_of_chain(node).all_input_nodes[0])) is not None
        and any(isinstance(sbp, Split) for sbp in meta(node.all_input_nodes[0])["sbp"])
        and not any(_first_of_chain(user) is not user for user in node.users if user.target is boxing)
    ]


def _first_of_chain(node: fx.Node) -> fx.Node:
    """Return the gather of a stored bucket whose result a gather of the same bucket gathers further, or the node."""
    while (source := node.all_input_nodes[0]).target is boxing and gathers_bucket(node) and gathers_bucket(source):
        node = source
    return node


def _uses(gather: fx.Node) -> set[fx.Node]:
    """Return the nodes that compute with the bucket: users of the gather, of its views, casts and copies."""
    forms = closure([gather], lambda form: (user for user in form.users if is_view_or_copy(user)))
    return {user for form in forms for user in form.users} - forms


def _after_widest_gap(uses: list[fx.Node], order: dict[fx.Node, int], used: list[int]) -> list[fx.Node]:
    """Return the uses after the widest gap, measured in uses of other buckets, then in nodes.

    Args:
        uses: the bucket's uses, in order.
        order: position of every node.
        used: positions of all buckets' uses, ascending. Between two uses of one bucket are only those of others.
    """
    best, first_after = (0, 0), 0
    for index, (before, after) in enumerate(itertools.pairwise(uses)):
        left, right = order[before], order[after]
        crosses = origin(before).phase == "forward" and origin(after).phase == "backward"
        between = bisect_left(used, right) - bisect_right(used, left)
        if (crosses or between) and (between, right - left) > best:
            best, first_after = (between, right - left), index + 1
    return uses[first_after:] if first_after else []


def _gather_again(gather: fx.Node, uses: list[fx.Node]) -> None:
    copies: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node, reader: fx.Node) -> fx.Node:
        if node is not gather and not (is_view_or_copy(node) and _original(node) is gather):
            return node
        if node not in copies:
            inputs = {source: copy(source, reader) for source in node.all_input_nodes if node is not gather}
            if node is gather and (cast := gather.all_input_nodes[0]).op != "placeholder" and cast.target is not boxing:
                # A cast to the compute dtype: only the master shard is stored.
                inputs = {cast: copy_for(reader, cast)}
            copies[node] = copy_for(reader, node, inputs)
        return copies[node]

    for use in uses:
        for source in use.all_input_nodes:
            use.replace_input_with(source, copy(source, use))


def _original(node: fx.Node) -> fx.Node:
    """Return what the node is a view, cast or copy of, or the node itself."""
    while is_view_or_copy(node):
        node = node.all_input_nodes[0]
    return node
