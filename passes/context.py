"""What passes need to know besides the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from zerograph._torch import OpOverload
from zerograph.buckets import Bucket
from zerograph.grad_scaler import GradScaler
from zerograph.ir.signature import Signature
from zerograph.mesh import Mesh
from zerograph.sbp import NdSbp, Split, broadcast
from zerograph.update_program import UpdateProgram
from zerograph.zero import ZeroPolicy


@dataclass(frozen=True)
class BucketUpdate:
    """How a bucket is updated.

    Attributes:
        programs: of each slot; where the bucket is not dealt, one for all.
        first: it is the first update.
        numbers: name of each hyperparameter's input in the graph, by its name in the programs: the learning rate, ...
        layouts: of the state's entries that are 1-D, by name; see :class:`zerograph.runtime.state.Store`.
        optimizer: name of the optimizer in the graph, ``"optimizer0"``.
    """

    programs: tuple[UpdateProgram, ...]
    first: bool
    numbers: Mapping[str, str]
    layouts: Mapping[str, Bucket]
    optimizer: str

    def number_of(self, found_infs: Mapping[str, fx.Node]) -> fx.Node | None:
        """Return the bucket's number of those that ``step_graph.found_infs`` returns, if there is any."""
        return found_infs.get(self.optimizer, found_infs.get(""))

    @property
    def program(self) -> UpdateProgram:
        """The first slot's: what all have in common can be asked of it."""
        return self.programs[0]


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
        micro_batches: how many are computed one after another; see :meth:`in_time`.
        cut: whether each input of the batch is cut into micro-batches.
        packed: outputs have one entry for each micro-batch.
        timed: the last mesh dimension is time.
        on_missing_rule: what to do about operators without a rule, as in the configuration.
        exchanges: operators to be used instead of torch's collectives, by kind; see ``zerograph.runtime.wire``.
        node_by_node: the backend runs the graph as it is, rather than compiling it.
        inputs_may_overlap: the backend writes to inputs where the graph does, so that one may lie in another's memory.
        reduce_dtype: that in which gradients travel; None for the dtype that their parameters are computed with in.
        scaler: scales the loss; None for no scaling.
        checked: a step whose loss or gradients are not finite is to change nothing.
        memory_budget: the most bytes that a rank may hold during a step; None for as many as it takes.
        recompute: what backward makes again, as in the configuration.
        blocks: module paths of the blocks that the model repeats.
        forgone: with ``recompute="auto"``, bytes on a rank that backward is not to be given by forward, at least.
        offload_activations: activations of an accelerator may wait for backward in the CPU's memory.
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
    micro_batches: int = 1
    cut: tuple[bool, ...] = ()
    packed: bool = False
    timed: bool = False
    exchanges: Mapping[str, OpOverload] = field(default_factory=dict)
    node_by_node: bool = True
    inputs_may_overlap: bool = True
    reduce_dtype: torch.dtype | None = None
    scaler: GradScaler | None = None
    checked: bool = False
    memory_budget: int | None = None
    recompute: str = "none"
    blocks: tuple[str, ...] = ()
    forgone: int = 0
    offload_activations: bool = False
    warn: Callable[[str], None] = field(default=lambda message: None)
    discovered: dict[tuple[fx.Node, int], tuple[Signature, ...] | None] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.mesh.size

    @property
    def guarded(self) -> bool:
        """Whether updates are made on a condition."""
        return self.scaler is not None or self.checked

    @property
    def rank_dims(self) -> int:
        """How many mesh dimensions are ranks beside each other."""
        return self.mesh.dims - self.timed

    @property
    def time_dim(self) -> int | None:
        """The mesh dimension that is time, if there is one."""
        return self.mesh.dims - 1 if self.timed else None

    def in_time(self) -> Context:
        """The same with a further mesh dimension, the innermost, which is time: its places are micro-batches.

        Along it the batch is S(0), so that gradients come out P; all that is at rest is B. What is one place's there is
        what this rank holds while it computes that micro-batch. To go from P to B along time is to accumulate, from S
        to B to collect, from B to S to take a micro-batch: nothing is sent, but the first two are done only when the
        last micro-batch is.
        """
        if self.micro_batches == 1:
            return self
        mesh = Mesh((*self.mesh.shape, self.micro_batches), (*self.mesh.position, 0), (*self.mesh.groups, "time"))
        return replace(
            self,
            mesh=mesh,
            timed=True,
            buckets=tuple(map(_at_all_times, self.buckets)),
            updates={
                name: replace(one, layouts={entry: _at_all_times(layout) for entry, layout in one.layouts.items()})
                for name, one in self.updates.items()
            },
            inputs=tuple(
                (*sbp, Split(0) if cut else broadcast) for sbp, cut in zip(self.inputs, self.cut, strict=True)
            ),
        )


def _at_all_times(bucket: Bucket) -> Bucket:
    return replace(bucket, sbp=(*bucket.sbp, broadcast))
