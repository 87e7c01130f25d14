"""What ``graph.debug()`` prints when a step has been compiled."""

from __future__ import annotations

from zerograph.graph import ZeroGraph
from zerograph.ir.metadata import origin
from zerograph.ir.sbp import show


def report(graph: ZeroGraph, title: str, level: int) -> str:
    """A line at level 0; 1 adds the passes, 2 the operators of the graph that runs, 3 the user's line of each."""
    seconds = sum(one.seconds for one in graph.passes)
    lines = [f"{title} compiled in {seconds:.2f} s, {len(graph.collectives())} collectives"]
    if level >= 1:
        lines += [f"  pass {one.name}: {one.nodes} nodes, {one.seconds:.3f} s. {one.summary}" for one in graph.passes]
    if level >= 2:
        for node in graph.graph().graph.nodes:
            sbp = node.meta.get("sbp")
            where = origin(node)
            line = f"  {node.format_node() or node.name}{f'  {show(sbp)}' if isinstance(sbp, tuple) else ''}"
            lines.append(line + (f"  {where.module} {where.source} {where.code}".rstrip() if level >= 3 else ""))
    return "\n".join(lines)
