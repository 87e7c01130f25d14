"""Bytes of forward's activations that backward recomputes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from zerograph.ir.memory import Profile, show_bytes
from zerograph.ir.metadata import meta, origin


def made_again(whole: Profile, blocks: Sequence[str]) -> str:
    """The share of the activations that backward recomputes, in words; empty if it recomputes none.

    Args:
        blocks: module paths of the blocks that the model repeats, of which the recomputed ones are counted.
    """
    made = kept = 0
    where: set[str] = set()
    for found in (whole, *whole.bodies.values()):
        where |= {origin(node).module for node in found.nodes if meta(node).get("recomputed")}
        for one in found.storages:
            born, dies = found.nodes[one.born], found.nodes[one.dies]
            if one.kind == "activations" and meta(born).get("recomputed"):
                made += one.bytes
            elif one.kind == "activations" and _crosses(born, dies):
                kept += one.bytes
    if not made:
        return ""
    counted = sum(any(f"{one}.".startswith(f"{block}.") for one in where) for block in blocks)
    share = f"{made / (made + kept):.0%} of the activations that backward reads are recomputed"
    sizes = f"{show_bytes(made)}; {show_bytes(kept)} are kept"
    return f"{f'{counted} blocks: ' if counted else ''}{share} ({sizes})"


def _crosses(born: fx.Node, dies: fx.Node) -> bool:
    return origin(born).phase == "forward" and origin(dies).phase == "backward"
