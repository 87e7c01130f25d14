"""gather_keys_again: free gathered keys and values after forward, and gather them again for backward."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from zerograph.ir.metadata import boxing_of, meta, origin
from zerograph.passes import rules
from zerograph.passes.context import Context
from zerograph.passes.placement.attention import BACKWARDS
from zerograph.passes.placement.boxing import boxing


def gather_keys_again(module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Gather keys and values of attention a second time in backward, where ranks split the sequence."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.target not in BACKWARDS:
            continue
        arguments = rules.arguments(node)
        for source in dict.fromkeys((arguments["key"], arguments["value"])):
            change = boxing_of(source)
            if source.target is not boxing or change is None or change.kind != "all-gather":
                continue
            if source not in copies and origin(source).phase == "forward":
                with module.graph.inserting_before(node):
                    copies[source] = module.graph.node_copy(source)
                meta(copies[source])["origin"] = origin(node)
                meta(copies[source])["boxing"] = replace(change, phase=origin(node).phase)
            if source in copies:
                node.replace_input_with(source, copies[source])
    return module
