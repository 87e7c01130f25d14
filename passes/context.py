"""What passes need to know besides the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import fx

from zerograph.buckets import Bucket
from zerograph.mesh import Mesh
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
        mesh: the ranks of the step, and this one's place among them.
        zero_dim: the mesh dimension that ZeRO splits along.
        policy: what the ZeRO stage decides.
        buckets: layout of the parameters that lie in buckets, in order of first use.
        updates: by bucket name, for those that this step updates.
        inputs: SBP of each input of the batch, by its number.
        on_missing_rule: what to do about operators without a rule, as in the configuration.
        warn: is told, once per operator, what could not be done well.
        discovered: signatures found by trying operators without a rule, by node and mesh dimension.
    """

    mesh: Mesh
    policy: ZeroPolicy
    buckets: tuple[Bucket, ...]
    updates: Mapping[str, BucketUpdate]
    inputs: tuple[NdSbp, ...]
    zero_dim: int = 0
    on_missing_rule: str = "gather"
    warn: Callable[[str], None] = field(default=lambda message: None)
    discovered: dict[tuple[fx.Node, int], tuple[Signature, ...] | None] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.mesh.size
