"""What the ranks of a job compare before anything runs: the buckets and the emitted graph, line by line."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from zerograph.compiler.layout import Planned
from zerograph.ir.loop import loop_of
from zerograph.ir.metadata import Boxing, meta


def fingerprint(layout: Sequence[Planned], graph: fx.GraphModule) -> list[str]:
    """The buckets and the emitted graph line by line, the same on every rank of a job that runs one step."""
    lines = [
        f"{one.bucket.name}: {', '.join(slot.name for slot in one.bucket.slots)}; optimizer state "
        f"{'none yet' if one.fresh else ', '.join(one.specs)}"
        f"{f'; dealt out to ranks {one.bucket.owners}' if one.bucket.dealt else ''}"
        for one in layout
    ]
    return [*lines, *_lines(graph.graph)]


def _lines(graph: fx.Graph) -> list[str]:
    lines = []
    for node in graph.nodes:
        args = tuple(
            "this rank's own" if position in meta(node).get("rank_arguments", ()) else argument
            for position, argument in enumerate(node.args)
        )
        # The group of ranks that a collective runs in is this rank's own as well.
        if isinstance(found := meta(node).get("boxing"), Boxing) and "rank_arguments" not in node.meta:
            args = (*node.args[:-1], f"along mesh dimension {found.dim}")
        value = node.meta.get("val")
        shown = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else ""
        lines.append(f"{node.name} = {node.target} {args} {node.kwargs} {shown}".rstrip())
        if (loop := loop_of(node)) is not None:
            lines += [f"in {node.name}, {loop.micro_batches} times: {line}" for line in _lines(loop.body.graph)]
    return lines


def numbered(lines: Sequence[str]) -> dict[str, str]:
    """The lines by what messages call them."""
    return {f"line {number} of the emitted graph": line for number, line in enumerate(lines)}
