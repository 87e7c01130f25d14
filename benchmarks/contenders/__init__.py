"""Table of the systems that are compared. It needs no torch, so that the front door never imports what it measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REFERENCE, OFF = "reference", "off"
STAGES = (OFF, "1", "2", "3")


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        name: what the command line and the results call it.
        title: what the report calls it.
        stage: ``"reference"``, ``"off"`` or the ZeRO stage whose split of state it has.
        system: the file next to this one; its ``build(task, **options)`` returns a ``Trainer``.
        options: what ``build`` is given.
        ours: a backend of zerograph; otherwise a peer or a reference.
        compiled: Inductor is at work, so that a first start differs from a later one.
        ranks: how many processes run at once.
        alone: they exchange nothing, so that only their first losses are those of the others.
        coded: parameters and gradients are exchanged in fewer bits, so that its losses are only close to the others'.
        grid: a grid of ranks, a column for each of two hosts; for hosts of several ranks only.
        sockets: ranks of one host send through sockets, as those of all peers do, and do not read each other's memory.
    """

    name: str
    title: str
    stage: str
    system: str
    options: Mapping[str, Any] = field(default_factory=dict)
    ours: bool = False
    compiled: bool = False
    ranks: int = 2
    alone: bool = False
    coded: bool = False
    grid: bool = False
    sockets: bool = False

    @property
    def module(self) -> str:
        return f"{__name__}.{self.system}"

    @property
    def peer(self) -> bool:
        return not self.ours and self.stage != REFERENCE


def _alone(name: str, title: str, ranks: int, model: bool, optimizer: bool = False) -> Contender:
    options = {"compile_model": model, "compile_optimizer": optimizer}
    return Contender(name, title, REFERENCE, "plain", options, compiled=model, ranks=ranks, alone=True)


def _ours(stage: str) -> tuple[Contender, ...]:
    def make(backend: str) -> Contender:
        compiled = backend == "inductor"
        name, options = f"zerograph-{stage}", {"stage": stage, "backend": backend}
        if compiled:
            name += "-inductor"
        return Contender(
            name, f"zerograph {stage}, {backend}", stage, "zerograph", options, ours=True, compiled=compiled
        )

    return make("eager"), make("inductor")


def _over_sockets(stage: str) -> Contender:
    options = {"stage": stage, "backend": "eager"}
    name, title = f"zerograph-{stage}-sockets", f"zerograph {stage}, eager, sockets"
    return Contender(name, title, stage, "zerograph", options, ours=True, sockets=True)


def _fsdp2(name: str, title: str, stage: str, reshard: bool, compiled: bool = False) -> Contender:
    options = {"reshard": reshard, "compiled": compiled}
    return Contender(name, title, stage, "fsdp2", options, compiled=compiled)


# Contender(name, title, stage, system, options), stage by stage: what is compared is measured close together.
TABLE = (
    _alone("alone-1", "one process, eager", 1, model=False),
    _alone("alone-1-compiled", "one process, compiled", 1, model=True),
    _alone("alone-2", "two processes, eager", 2, model=False),
    _alone("alone-2-compiled", "two processes, compiled", 2, model=True),
    _alone("alone-2-compiled-both", "two processes, model and optimizer compiled", 2, model=True, optimizer=True),
    Contender("ddp", "DDP", OFF, "ddp"),
    Contender("ddp-static", "DDP, bucket views, static graph", OFF, "ddp", {"static": True}),
    Contender("ddp-compiled", "DDP, compiled", OFF, "ddp", {"static": True, "compiled": True}, compiled=True),
    *_ours(OFF),
    Contender("zero-redundancy", "DDP + ZeroRedundancyOptimizer", "1", "zero_redundancy"),
    Contender("fairscale", "fairscale OSS + ShardedDDP", "1", "fairscale"),
    Contender("deepspeed-1", "DeepSpeed ZeRO 1", "1", "deepspeed", {"stage": 1}),
    *_ours("1"),
    _over_sockets("1"),
    _fsdp2("fsdp2-kept", "FSDP2, no reshard", "2", reshard=False),
    _fsdp2("fsdp2-kept-compiled", "FSDP2, no reshard, compiled", "2", reshard=False, compiled=True),
    Contender("deepspeed-2", "DeepSpeed ZeRO 2", "2", "deepspeed", {"stage": 2}),
    *_ours("2"),
    _over_sockets("2"),
    _fsdp2("fsdp2", "FSDP2", "3", reshard=True),
    _fsdp2("fsdp2-compiled", "FSDP2, compiled", "3", reshard=True, compiled=True),
    Contender("deepspeed-3", "DeepSpeed ZeRO 3", "3", "deepspeed", {"stage": 3}),
    *_ours("3"),
    _over_sockets("3"),
)


def _between(name: str, title: str, stage: str, *, coded: bool = False, grid: bool = False) -> Contender:
    options = {"stage": stage, "backend": "eager", "wire": "int8" if coded else "exact", "grid": grid}
    return Contender(name, title, stage, "zerograph", options, ours=True, coded=coded, grid=grid)


# Ways to train between hosts only; see hosts.py.
BETWEEN_HOSTS = (
    _between("zerograph-2-int8", "zerograph 2, int8 wire", "2", coded=True),
    _between("zerograph-3-int8", "zerograph 3, int8 wire", "3", coded=True),
    _between("zerograph-3-hpz", "zerograph 3, hpZ", "3", grid=True),
)
CONTENDERS = {one.name: one for one in (*TABLE, *BETWEEN_HOSTS)}
