"""The input of the passes besides the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from zerograph._torch import OpOverload
from zerograph.ir.buckets import Bucket
from zerograph.ir.grad_scaler import GradScaler
from zerograph.ir.hosts import HostLayout
from zerograph.ir.mesh import TIME, Mesh, with_slices
from zerograph.ir.pass_edits import PassEdit
from zerograph.ir.sbp import NdSbp, Signature, Split, broadcast
from zerograph.ir.update_program import UpdateProgram
from zerograph.ir.zero import ZeroPolicy

# A graph uses the gradients that it computes to "update", or it only returns them for sums ("accumulate"), or what each
# rank adds to them ("unreduced"). Or it computes none, and updates by sums ("accumulated") or edits sums ("edit").
GradientUse = Literal["update", "accumulate", "unreduced", "accumulated", "edit"]


@dataclass(frozen=True)
class BucketUpdate:
    """How a bucket is updated.

    Attributes:
        programs: the update program of each slot, if slots have owners; else one program for the whole bucket.
        first: whether this is the first update, so that the state is new.
        numbers: name of the graph input of each hyperparameter (learning rate, ...), by its name in the programs.
        layouts: layout of each 1-D entry of the optimizer state, by name; see :class:`zerograph.runtime.state.Store`.
        unused: layout of each 1-D entry that another update of the optimizer reads, and this one does not.
        unused_counts: dtype of each 0-d entry of this kind.
        optimizer: name of the optimizer in the graph, ``"optimizer0"``.
    """

    programs: tuple[UpdateProgram, ...]
    first: bool
    numbers: Mapping[str, str]
    layouts: Mapping[str, Bucket]
    unused: Mapping[str, Bucket]
    unused_counts: Mapping[str, torch.dtype]
    optimizer: str

    def found_inf_of(self, found_infs: Mapping[str, fx.Node]) -> fx.Node | None:
        """Return the entry for this bucket's optimizer of what ``step_graph.found_infs`` returns, or None."""
        return found_infs.get(self.optimizer, found_infs.get(""))

    @property
    def program(self) -> UpdateProgram:
        """Program of the first slot, for properties that all slots share."""
        return self.programs[0]


@dataclass(frozen=True)
class BatchLayout:
    """How the inputs of a step are placed and cut into micro-batches, and which outputs it returns when.

    Attributes:
        inputs: SBP of each input, in order.
        micro_batches: number of micro-batches, computed one after another; see :meth:`Context.with_time_dim`.
        cut: whether each input is cut into micro-batches.
        packed: outputs have one entry per micro-batch.
        early_outputs: number of outputs, the first ones, that a loop reads before backward.
        attention: the form of attention where ranks split the sequence; see ``config.mesh.context_parallel_method``.
        expert_capacity: capacity of an exchange of tokens for experts; see ``config.mesh.expert_capacity``.
        slices: ``config.virtual_ranks``: number of micro-batches of all ranks, over which sums are added in one tree.
        outputs: the SBP in which each output is returned, None for the one in which it is computed. None for all: as
            a user of graphs receives them, never partial, and split only along what splits the batch.
    """

    inputs: tuple[NdSbp, ...]
    micro_batches: int = 1
    cut: tuple[bool, ...] = ()
    packed: bool = False
    early_outputs: int = 0
    attention: str = "auto"
    expert_capacity: float | None = None
    slices: int | None = None
    outputs: tuple[NdSbp | None, ...] | None = None


@dataclass(frozen=True)
class Numerics:
    """Precision of reductions, and what happens to a step that overflows.

    Attributes:
        reduce_dtype: dtype in which gradients are reduced; None: the dtype that their parameters are computed with.
        scaler: scales the loss; None: no scaling.
        checked: skip the update of a step whose loss or gradients are not finite.
        wire: ``config.precision.wire``, which :func:`zerograph.ir.wire.format_of` reads.
    """

    reduce_dtype: torch.dtype | None = None
    scaler: GradScaler | None = None
    checked: bool = False
    wire: Any = "exact"


@dataclass(frozen=True)
class MemoryOptions:
    """Limits of memory, and what may be done to keep them.

    Attributes:
        budget: maximum bytes of a rank during a step; None: no limit.
        recompute: ``config.memory.activation_checkpointing``.
        blocks: module paths of the blocks that the model repeats.
        min_recompute_bytes: with ``activation_checkpointing="auto"``, recompute at least this many bytes of activations
            per rank instead of saving them for backward.
        offload_activations: offload activations of an accelerator to the CPU between forward and backward.
    """

    budget: int | None = None
    recompute: str = "none"
    blocks: tuple[str, ...] = ()
    min_recompute_bytes: int = 0
    offload_activations: bool = False


@dataclass(frozen=True)
class BackendTraits:
    """Properties of the backend and the transport that passes rely on.

    Attributes:
        node_by_node: the backend runs the graph as it is and does not compile it.
        inputs_may_overlap: the backend writes to inputs where the graph does, so an input may be a view of another.
        exchanges: operators that replace torch's collectives, by kind; see ``zerograph.runtime.wire.selection``.
        hosts: which ranks share a host; None: unknown. No pass reads it.
    """

    node_by_node: bool = True
    inputs_may_overlap: bool = True
    exchanges: Mapping[str, OpOverload] = field(default_factory=dict)
    hosts: HostLayout | None = None


@dataclass(frozen=True)
class MissingRules:
    """How to handle operators without a rule.

    Attributes:
        action: ``config.checks.on_missing_rule``.
        warn: is called with messages about operators whose inputs are gathered, once per operator.
        discovered: signatures found by running such operators; see :func:`zerograph.passes.rules.discover.discover`.
    """

    action: str = "gather"
    warn: Callable[[str], None] = field(default=lambda message: None)
    discovered: dict[str, tuple[Signature, ...] | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """The input of the passes besides the graph.

    Attributes:
        mesh: the ranks of the step, and the position of this rank. With a time dimension it is the last one.
        policy: what the ZeRO stage decides.
        buckets: layout of the parameters that are in buckets, in order of first use.
        updates: how each bucket that this step updates is updated, by bucket name.
        batch: how the inputs are placed and cut.
        gradients: the use of gradients.
        numerics: precision of reductions, loss scaling, checks.
        memory: limits of memory, and what may be done to keep them.
        backend: traits of the backend and the transport.
        missing_rules: what to do about operators without a rule.
        pass_edits: the user's edits of the pipeline.
    """

    mesh: Mesh
    policy: ZeroPolicy
    buckets: tuple[Bucket, ...]
    updates: Mapping[str, BucketUpdate]
    batch: BatchLayout
    gradients: GradientUse = "update"
    numerics: Numerics = Numerics()
    memory: MemoryOptions = MemoryOptions()
    backend: BackendTraits = field(default_factory=BackendTraits)
    missing_rules: MissingRules = field(default_factory=MissingRules)
    pass_edits: tuple[PassEdit, ...] = ()

    @property
    def has_time(self) -> bool:
        """True if the last mesh dimension is time."""
        return self.mesh.groups[-1:] == (TIME,)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.mesh.size

    @property
    def guarded(self) -> bool:
        """True if updates depend on a condition that is computed in the step."""
        return self.numerics.scaler is not None or self.numerics.checked

    @property
    def rank_dims(self) -> int:
        """Number of mesh dimensions that are ranks, without time."""
        return self.mesh.dims - self.has_time

    @property
    def time_dim(self) -> int | None:
        """Index of the mesh dimension that is time, or None."""
        return self.mesh.dims - 1 if self.has_time else None

    @property
    def mesh_of_rows(self) -> Mesh:
        """The mesh with ``config.virtual_ranks`` if ranks do not divide it, for tensors that have rows of the batch."""
        return with_slices(self.mesh, self.batch.slices)

    def bucket(self, name: str) -> Bucket:
        """Return the layout of a bucket."""
        return next(bucket for bucket in self.buckets if bucket.name == name)

    def along_slices(self) -> Context:
        """Return the context as if one rank computed all slices of ``config.virtual_ranks``, if there are any.

        What depends on it is the same for each number of ranks.
        """
        if self.batch.slices is None:
            return self
        return replace(self, mesh=replace(self.mesh, shape=(*(1 for _ in range(self.rank_dims)), self.batch.slices)))

    def with_time_dim(self) -> Context:
        """Return the context with a further, innermost mesh dimension for time: one place per micro-batch.

        Along time the batch is S(0), so gradients come out P, and all state is B. Boxing from P to B along time
        accumulates, from S to B collects, from B to S takes a micro-batch. None of these sends anything. The first two
        are complete only after the last micro-batch.
        """
        if self.batch.micro_batches == 1 and self.batch.slices is None:
            return self
        mesh = Mesh((*self.mesh.shape, self.batch.micro_batches), (*self.mesh.position, 0), (*self.mesh.groups, TIME))
        inputs = tuple(
            (*sbp, (Split(0) if self.batch.slices is None else sbp[0]) if cut else broadcast)
            for sbp, cut in zip(self.batch.inputs, self.batch.cut, strict=True)
        )
        return replace(
            self,
            mesh=mesh,
            buckets=tuple(map(_whole_in_time, self.buckets)),
            updates={
                name: replace(
                    update, layouts=_all_whole_in_time(update.layouts), unused=_all_whole_in_time(update.unused)
                )
                for name, update in self.updates.items()
            },
            batch=replace(self.batch, inputs=inputs),
        )


def _all_whole_in_time(layouts: Mapping[str, Bucket]) -> dict[str, Bucket]:
    return {entry: _whole_in_time(layout) for entry, layout in layouts.items()}


def _whole_in_time(bucket: Bucket) -> Bucket:
    return replace(bucket, sbp=(*bucket.sbp, broadcast))
