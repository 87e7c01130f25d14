"""The boxing node: the one thing between a producer's SBP and the one that its consumer needs."""

from __future__ import annotations

from torch import Tensor

from zerograph.sbp import Broadcast, NdSbp, PartialSum, Sbp, Split

KINDS = {
    (PartialSum, Broadcast): "all-reduce",
    (PartialSum, Split): "reduce-scatter",
    (Split, Broadcast): "all-gather",
    (Split, Split): "all-to-all",
    (Broadcast, Split): "slice",
}


def boxing(x: Tensor, sbp: str) -> Tensor:
    """The same global tensor under another SBP. Says nothing yet of how: ``localize`` makes it a collective."""
    return x.view_as(x)


def kind(source: Sbp, target: Sbp) -> str | None:
    """What the change is called, along one mesh dimension; None where there is no such change."""
    return None if source == target else KINDS.get((type(source), type(target)))


def wire_bytes(source: NdSbp, target: NdSbp, nbytes: int, ranks: int) -> float:
    """Bytes that each rank sends for a global tensor of ``nbytes`` (DESIGN.md's table; ring algorithms).

    Returns ``inf`` for a change that no boxing makes, such as broadcast to partial.
    """
    return sum(_wire_bytes(one, other, nbytes, ranks) for one, other in zip(source, target, strict=True))


def _wire_bytes(source: Sbp, target: Sbp, nbytes: int, ranks: int) -> float:
    if source == target:
        return 0.0
    moved = nbytes * (ranks - 1) / ranks
    return {
        "all-reduce": 2 * moved,
        "reduce-scatter": moved,
        "all-gather": moved,
        "all-to-all": moved / ranks,
        "slice": 0.0,
        None: float("inf"),
    }[kind(source, target)]
