"""The stages of ZeRO as choices of placements (arXiv 1910.02054, section 5): the one table that knows them."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ZeroPolicy:
    """What a stage decides; every pass asks this and none asks for the stage.

    Attributes:
        split: parameters, optimizer state and master weights at rest are S(0), else B.
        reshard_after_forward: gathered parameters are freed after forward and gathered again for backward.
        reduce_early: a bucket's gradient is reduced as soon as it is complete, else when backward has ended.
        deals: shards do not cut through parameters: each is dealt out whole to one rank.
        dim: the mesh dimension that is split along.
    """

    name: str
    split: bool
    reshard_after_forward: bool
    reduce_early: bool
    deals: bool = False
    dim: int = 0


OFF = ZeroPolicy("off", split=False, reshard_after_forward=False, reduce_early=True)
STAGES = {
    1: ZeroPolicy("stage 1", split=True, reshard_after_forward=False, reduce_early=False),
    2: ZeroPolicy("stage 2", split=True, reshard_after_forward=False, reduce_early=True),
    3: ZeroPolicy("stage 3", split=True, reshard_after_forward=True, reduce_early=True),
}
MODES = ("distributed_split", "non_distributed", "off")


def policy(mode: str, stage: int) -> ZeroPolicy:
    """The policy of a mode and stage that :class:`zerograph.config.Config` has let pass."""
    if mode == "off":
        return OFF
    found = STAGES[stage]
    return replace(found, name=f"{found.name}, non-distributed", deals=True) if mode == "non_distributed" else found
