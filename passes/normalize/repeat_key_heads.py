"""repeat_key_heads: repeat heads of keys and values until the ranks that split the sequence divide them."""

from __future__ import annotations

import math
import operator

from torch import fx

from zerograph.ir.evaluate import evaluate
from zerograph.ir.mesh import size_along
from zerograph.ir.metadata import origin
from zerograph.ir.rewrite import emit
from zerograph.ir.sbp import Split
from zerograph.ops.attention import BACKWARD, FORWARD, HEADS, repeat_heads, sum_heads
from zerograph.passes import rules
from zerograph.passes.context import Context


def repeat_key_heads(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Repeat heads of keys and values where ``config.mesh.context_parallel_method = "ulysses"`` finds too few of them.

    Queries of several heads share one of keys. The ranks divide the heads of queries, and so the repeated ones of keys.
    """
    split = {dim for sbp in context.batch.inputs for dim, one in enumerate(sbp) if isinstance(one, Split) and one.dim}
    ranks = size_along(context.mesh, split)
    if context.batch.attention != "ulysses" or ranks == 1:
        return module
    repeated: dict[fx.Node, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.target in (FORWARD, BACKWARD):
            arguments = rules.arguments(node)
            heads, key_heads = (arguments[name].meta["val"].shape[HEADS] for name in ("query", "key"))
            if key_heads > 1 and key_heads % ranks and heads % ranks == 0:
                _repeat(node, ranks // math.gcd(key_heads, ranks), repeated)
    return module


def _repeat(node: fx.Node, times: int, repeated: dict[fx.Node, fx.Node]) -> None:
    """Let attention read repeated keys and values; sum the gradients of the repetitions in backward."""
    graph, arguments = node.graph, rules.arguments(node)
    for source in dict.fromkeys((arguments["key"], arguments["value"])):
        if source not in repeated:
            with graph.inserting_before(node):
                repeated[source] = emit(graph, repeat_heads, (source, times), origin(node))
        node.replace_input_with(source, repeated[source])
    node.meta["val"] = evaluate(node)
    for gradient in list(node.users):
        if gradient.target is operator.getitem and gradient.args[1] in (1, 2) and node.target is BACKWARD:
            readers = list(gradient.users)
            gradient.meta["val"] = evaluate(gradient)
            with graph.inserting_before(gradient.next):
                total = emit(graph, sum_heads, (gradient, times), origin(gradient))
            for reader in readers:
                reader.replace_input_with(gradient, total)
