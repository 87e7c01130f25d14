"""Table of the systems that are compared. It needs no torch, so that the front door never imports what it measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contender:
    """One way to train in bf16 with fp32 masters.

    Attributes:
        name: what the command line and the results call it.
        title: what the report calls it.
        stage: the ZeRO stage whose split of state it has; 0: plain PyTorch, on one rank only.
        ours: zerograph.
        backend: zerograph's, or "inductor" where blocks are compiled.
        offload: the optimizer's state is offloaded to the CPU.
    """

    name: str
    title: str
    stage: int
    ours: bool
    backend: str
    offload: bool = False

    @property
    def planned(self) -> bool:
        """Return whether the page holds a prediction against it: of what the device computes."""
        return self.ours and not self.offload


def _make(stage: int) -> tuple[Contender, ...]:
    ours = [
        Contender(f"zerograph-{stage}-{backend}", f"zerograph {stage}, {backend}", stage, True, backend)
        for backend in ("eager", "inductor", "cudagraph")
    ]
    ours += [
        Contender(
            f"zerograph-{stage}-{backend}-offload",
            f"zerograph {stage}, {backend}, offloaded",
            stage,
            True,
            backend,
            True,
        )
        for backend in ("eager", "inductor")
    ]
    what = "fsdp2-kept" if stage == 2 else "fsdp2"
    title = "FSDP2, no reshard" if stage == 2 else "FSDP2"
    return (
        *ours,
        Contender(f"{what}-eager", f"{title}, eager", stage, False, "eager"),
        Contender(f"{what}-compiled", f"{title}, compiled", stage, False, "inductor"),
    )


_PLAIN = (
    Contender("plain-eager", "plain PyTorch, eager", 0, False, "eager"),
    Contender("plain-compiled", "plain PyTorch, compiled", 0, False, "inductor"),
)
CONTENDERS = {each.name: each for each in (*_PLAIN, *(each for stage in (2, 3) for each in _make(stage)))}
# What ours is weighed against, on any number of ranks.
RIVAL = "fsdp2-compiled"
