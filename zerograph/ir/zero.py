"""The stages of ZeRO as choices of placements (arXiv 1910.02054, section 5). No other module depends on the stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from zerograph.base.options import is_one_of
from zerograph.errors import ConfigError


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
Stage = Literal[0, 1, 2, 3, "auto"]
ShardBy = Literal["elements", "parameters"]
Mode = Literal["distributed_split", "non_distributed", "off"]
# What every door takes where ZeRO is on and no stage is named: it sends no more than plain data parallel does.
DEFAULT_STAGE: Literal[2] = 2
# OneFlow's names of what is sharded.
_MODES: dict[Any, ShardBy] = {"distributed_split": "elements", "non_distributed": "parameters"}


def policy(stage: int, shard_by: ShardBy) -> ZeroPolicy:
    """Return the policy of options that :class:`zerograph.config.Config` has checked."""
    if stage == 0:
        return OFF
    chosen = STAGES[stage]
    if shard_by == "parameters":
        return replace(chosen, name=f"{chosen.name}, whole parameters", assigns_owners=True)
    return chosen


def options_of_mode(mode: Any, stage: Stage) -> dict[str, Any]:
    """Return the options of one of OneFlow's modes, True for ``"distributed_split"`` or False for ``"off"``.

    Raises:
        ConfigError: there is no such mode, or it has no such stage.
    """
    if mode is False or mode == "off":
        return {"stage": 0}
    if mode is not True and not is_one_of(mode, *_MODES):
        raise ConfigError(
            f"mode = {mode!r:.60}: unknown ZeRO mode; choose one of {', '.join(map(repr, (*_MODES, 'off')))}, and give "
            "the stage as stage="
        )
    if stage == 0:
        raise ConfigError(f"stage = 0 with the mode {mode!r}: choose stage 1, 2 or 3, or the mode 'off'")
    return {"stage": stage, "shard_by": "elements" if mode is True else _MODES[mode]}


def mode_of(stage: Stage, shard_by: ShardBy) -> Mode:
    """Return OneFlow's name of what options shard."""
    return "off" if stage == 0 else "distributed_split" if shard_by == "elements" else "non_distributed"
