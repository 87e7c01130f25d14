"""What passes need to know besides the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import fx

from zerograph.buckets import Bucket
from zerograph.passes.rules.factors import Signature
from zerograph.sbp import NdSbp
from zerograph.update import UpdateProgram
from zerograph.zero import ZeroPolicy


@dataclass(frozen=True)
class BucketUpdate:
    """How a bucket is updated: the program, whether it is the first update, the learning rate's input name."""

    program: UpdateProgram
    first: bool
    lr: str


@dataclass(frozen=True)
class Context:
    """One compilation's facts.

    Attributes:
        ranks, rank: size of the mesh and this rank's place in it.
        group: name of the process group that collectives run in.
        policy: what the ZeRO stage decides.
        buckets: layout of the parameters that lie in buckets, in order of first use.
        updates: by bucket name, for those that this step updates.
        inputs: SBP of each input of the batch, by its number.
        on_missing_rule: what to do about operators without a rule, as in the configuration.
        warn: is told, once per operator, what could not be done well.
        discovered: signatures found by trying operators without a rule, by node.
    """

    ranks: int
    rank: int
    group: str
    policy: ZeroPolicy
    buckets: tuple[Bucket, ...]
    updates: Mapping[str, BucketUpdate]
    inputs: tuple[NdSbp, ...]
    on_missing_rule: str = "gather"
    warn: Callable[[str], None] = field(default=lambda message: None)
    discovered: dict[fx.Node, tuple[Signature, ...] | None] = field(default_factory=dict)
