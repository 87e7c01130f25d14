"""The stages of ZeRO as choices of placements (arXiv 1910.02054, section 5). No other module depends on the stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class ZeroPolicy:
    """The decisions of a stage, which passes read instead of the stage.

    Attributes:
        name: name of the stage in texts.
        split: parameters, optimizer state and master weights are stored S(0), else B.
        reshard_after_forward: gathered parameters are freed after forward and gathered again for backward.
        reduce_early: each micro-batch's gradient is reduced, and at most two buckets are whole at once. Else gradients
            stay whole until the update, and their sum over micro-batches is reduced.
        assigns_owners: each parameter is whole on one rank, its owner, so that shards do not cut through parameters.
        dims: the mesh dimensions that ZeRO splits along, ascending.
    """

    name: str
    split: bool
    reshard_after_forward: bool
    reduce_early: bool
    assigns_owners: bool = False
    dims: tuple[int, ...] = (0,)


OFF = ZeroPolicy("off", split=False, reshard_after_forward=False, reduce_early=True)
STAGES = {
    1: ZeroPolicy("stage 1", split=True, reshard_after_forward=False, reduce_early=False),
    2: ZeroPolicy("stage 2", split=True, reshard_after_forward=False, reduce_early=True),
    3: ZeroPolicy("stage 3", split=True, reshard_after_forward=True, reduce_early=True),
}
Mode = Literal["distributed_split", "non_distributed", "off"]
Stage = Literal[1, 2, 3, "auto"]
# What every door takes where ZeRO is on and no stage is named: it sends no more than plain data parallel does.
DEFAULT_STAGE: Literal[2] = 2
MODES = ("distributed_split", "non_distributed", "off")


def policy(mode: str, stage: int) -> ZeroPolicy:
    """Return the policy of a mode and stage that :class:`zerograph.config.Config` has checked."""
    if mode == "off":
        return OFF
    chosen = STAGES[stage]
    if mode == "non_distributed":
        return replace(chosen, name=f"{chosen.name}, non-distributed", assigns_owners=True)
    return chosen
