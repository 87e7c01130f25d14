"""The fingerprint of a step: its buckets and emitted graph as lines of text, which ranks compare before a run."""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType

from torch import Tensor, fx

from zerograph.compiler.layout import PlannedBucket
from zerograph.ir.loop import loop_of
from zerograph.ir.metadata import boxing_of, meta


def fingerprint(layout: Sequence[PlannedBucket], graph: fx.GraphModule) -> list[str]:
    """Return the buckets and the emitted graph as lines of text, equal on all ranks that run the same step."""
    lines = [
        f"{planned.layout.name}: {', '.join(slot.name for slot in planned.layout.slots)}; optimizer state "
        f"{'none yet' if planned.fresh else ', '.join(planned.specs)}"
        f"{f'; owned by ranks {planned.layout.owners}' if planned.layout.has_owners else ''}"
        for planned in layout
    ]
    return [*lines, *graph_lines(graph.graph)]


def graph_lines(graph: fx.Graph) -> list[str]:
    """Return a graph as lines of text, equal on all ranks."""
    lines = []
    for node in graph.nodes:
        args = tuple(
            "this rank's own" if position in meta(node).get("rank_arguments", ()) else argument
            for position, argument in enumerate(node.args)
        )
        # The name of a collective's process group differs between ranks too.
        if (boxing := boxing_of(node)) is not None and isinstance(node.args[-1], str):
            args = (*args[:-1], f"along mesh dimension {boxing.dim}")
        value = node.meta.get("val")
        shown = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else ""
        # The text of a Python function has its address.
        target = node.target.__qualname__ if isinstance(node.target, FunctionType) else node.target
        lines.append(f"{node.name} = {target} {args} {node.kwargs} {shown}".rstrip())
        if (loop := loop_of(node)) is not None:
            lines += [f"in {node.name}, {loop.micro_batches} times: {line}" for line in graph_lines(loop.body.graph)]
    return lines


def numbered(lines: Sequence[str]) -> dict[str, str]:
    """Return the lines by their names in messages."""
    return {f"line {number} of the emitted graph": line for number, line in enumerate(lines)}
