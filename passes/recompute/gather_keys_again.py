"""gather_keys_again: free gathered keys and values after forward, and gather them again for backward."""

from __future__ import annotations

from torch import fx

from zerograph.ir.metadata import boxing_of, origin
from zerograph.passes import rules
from zerograph.passes.context import Context
from zerograph.passes.edits import copy_for
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
                copies[source] = copy_for(node, source)
            if source in copies:
                node.replace_input_with(source, copies[source])
    return module
