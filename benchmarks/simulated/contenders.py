"""Table of the systems that are compared. It needs no torch, so that the front door never imports what it measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contender:
    """One way to train in bf16 with fp32 masters.

    Attributes:
        name: what the command line and the results call it.
        title: what the report calls it.
        stage: the ZeRO stage whose split of state it has; for stage 1, which FSDP2 lacks, its nearest stands in.
        ours: zerograph.
        compiled: Inductor is at work.
    """

    name: str
    title: str
    stage: int
    ours: bool
    compiled: bool


def _make(stage: int) -> tuple[Contender, ...]:
    ours = [
        Contender(f"zerograph-{stage}-{backend}", f"zerograph {stage}, {backend}", stage, True, backend == "inductor")
        for backend in ("eager", "inductor")
    ]
    if stage == 1:
        return tuple(ours)
    what = "fsdp2-kept" if stage == 2 else "fsdp2"
    title = "FSDP2, no reshard" if stage == 2 else "FSDP2"
    return (
        *ours,
        Contender(f"{what}-eager", f"{title}, eager", stage, False, False),
        Contender(f"{what}-compiled", f"{title}, compiled", stage, False, True),
    )


TABLE = tuple(one for stage in (1, 2, 3) for one in _make(stage))
CONTENDERS = {one.name: one for one in TABLE}
# FSDP2 has no stage 1; there its stage 2 is what ours is weighed against.
RIVALS = {1: "fsdp2-kept-compiled", 2: "fsdp2-kept-compiled", 3: "fsdp2-compiled"}
