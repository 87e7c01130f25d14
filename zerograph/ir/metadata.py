"""The metadata of nodes: every key that zerograph keeps in ``node.meta``, with its type.

:class:`NodeMeta` is the one table of these keys. :func:`meta` reads a node's metadata through it, so that mypy knows
the type behind each key. Keys of torch itself (``stack_trace``, ``custom``, ...) are not in the table; no pass reads
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

import torch
from torch import fx

from zerograph.ir.dims import SizeInput
from zerograph.ir.loop import Loop
from zerograph.ir.rank_numbers import RankArguments
from zerograph.ir.sbp import NdSbp, Signature, boxing_kind, wire_bytes
from zerograph.ops.blocks import Codec

Phase = Literal["forward", "backward", "update"]
RoleKind = Literal[
    "input",
    "parameter",
    "buffer",
    "bucket",
    # Memory that a bucket is gathered into; the shard is this rank's slice of it.
    "gather_buffer",
    "state",
    # A bucket's gradient that a graph returns, and the sum of such gradients that another graph takes.
    "accumulated",
    # What this rank's codes of a bucket's gradient have lacked; see ``passes/communication/error_feedback``.
    "residual",
    # A bucket as all ranks have it from gathers that send differences.
    "received",
    "hyperparameter",
    "seed",
    # A symbolic size, an integer.
    "size",
    "scaler",
    "check",
    "output",
    "gradient",
    # In the body of a loop: a value computed before the loop, a result of the loop, the number of the micro-batch.
    "value",
    "result",
    "micro_batch",
]
TensorKind = Literal["bucket", "gradient", "value"]


@dataclass(frozen=True)
class Role:
    """The role of an input or output of the graph: ``Role("parameter", "model.fc.weight")``."""

    kind: RoleKind
    name: str

    @property
    def bucket(self) -> str | None:
        """Name of the bucket whose shard, gather buffer, state, gradient or residual this is; None for all else."""
        of_buckets = ("bucket", "gather_buffer", "state", "accumulated", "residual", "received")
        return self.name.partition(".")[0] if self.kind in of_buckets else None

    @property
    def entry(self) -> str | None:
        """Name of the state of a bucket, or mesh dimension of its residual; None for all else."""
        return self.name.partition(".")[2] if self.kind in ("state", "residual") else None

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Origin:
    """The origin of a node in the user's program.

    Attributes:
        phase: phase of the step.
        module: qualified name of the module.
        source: file and line of the user's code.
        code: text of that line.
    """

    phase: Phase
    module: str = ""
    source: str = ""
    code: str = ""

    @property
    def line(self) -> str:
        """The user's line with its text, for messages."""
        return f"  {self.source}   {self.code}"

    @property
    def place(self) -> str:
        """The module, else the user's line, of what a description names."""
        return self.module or self.source or "the step"


@dataclass(frozen=True)
class TensorRef:
    """The global tensor that a boxing node moves.

    Attributes:
        kind: ``"bucket"`` for parameters, ``"gradient"`` for the gradient of a bucket, ``"value"`` for anything else.
        name: name of the bucket; for a value, the name of its node or a description.
    """

    kind: TensorKind
    name: str

    def gradient_of(self, bucket: str) -> bool:
        """Return True if this is the gradient of that bucket."""
        return self.kind == "gradient" and self.name == bucket

    def __str__(self) -> str:
        return f"gradient of {self.name}" if self.kind == "gradient" else self.name


@dataclass(frozen=True)
class Coded:
    """A tensor in coded form.

    Attributes:
        codec: how it is coded.
        bytes: size of the code of what the ranks of a boxing hold together.
        difference: it is coded less what all ranks have received of it before.
        feedback: each rank's own part is coded, with what its earlier codes have lacked.
    """

    codec: Codec
    bytes: int
    difference: bool = False
    feedback: bool = False

    def __str__(self) -> str:
        form = ", differences" if self.difference else ", with error feedback" if self.feedback else ""
        return f"{self.codec}{form}"


@dataclass(frozen=True)
class Boxing:
    """A change of SBP along one mesh dimension.

    Attributes:
        source: the SBP before.
        target: the SBP after; it differs from ``source`` at ``dim`` only.
        dim: the mesh dimension.
        ranks: number of ranks along ``dim``.
        tensor: the global tensor that is moved.
        bytes: size in bytes of the part of the tensor that the ranks along ``dim`` hold together.
        phase: phase of the step.
        reduced: how the parts of a sum are sent; None: as they are.
        gathered: how the pieces of a gather are sent, that of an all-reduce's sums included; None: as they are.
        shifted: the SBP does not change: each rank sends its piece to the next one.
    """

    source: NdSbp
    target: NdSbp
    dim: int
    ranks: int
    tensor: TensorRef
    bytes: int
    phase: Phase
    reduced: Coded | None = None
    gathered: Coded | None = None
    shifted: bool = False

    @property
    def kind(self) -> str:
        """The collective: all-reduce, reduce-scatter, all-gather, all-to-all, shift or slice."""
        if self.shifted:
            return "shift"
        kind = boxing_kind(self.source[self.dim], self.target[self.dim])
        assert kind is not None, self
        return kind

    @property
    def sent(self) -> float:
        """Bytes that each rank sends; see :func:`zerograph.ir.sbp.wire_bytes`. Codes count with their scales."""
        if self.shifted:
            return self.bytes / self.ranks
        halves = (self.reduced, self.gathered) if self.kind == "all-reduce" else (self.reduced or self.gathered,)
        sizes = [self.bytes if coded is None else coded.bytes for coded in halves]
        nbytes = sum(sizes) / len(sizes)
        return wire_bytes(self.source[self.dim], self.target[self.dim], nbytes, self.ranks)

    @property
    def format(self) -> str:
        """The wire format as text; empty for exact values."""
        halves = (self.reduced, self.gathered) if self.kind == "all-reduce" else (self.reduced or self.gathered,)
        names = ["exact" if coded is None else str(coded) for coded in halves]
        return "" if set(names) == {"exact"} else ", sums ".join(dict.fromkeys(names))


# "global" is a keyword, which the class syntax does not allow as a name.
_Global = TypedDict("_Global", {"global": tuple[int, ...]}, total=False)


class NodeMeta(_Global, total=False):
    """Every key of ``node.meta`` that one part of zerograph writes and another reads.

    Every node:

    Attributes:
        val: fake tensor of the node's value, or a sequence of them. The shape is the global one until ``localize``,
            this rank's one afterwards.
        origin: phase, module path and source line.
        sbp: one SBP per mesh dimension, from ``place`` on; a tuple of such tuples for a node with several results.
        recomputed: backward recomputes a value of forward.
        edit: ``build()`` computed the node from gradients, after the last ``backward()``.
        local: the node is inside a local region and has no global tensor; from ``localize`` on.

    Inputs and outputs:

    Attributes:
        role: role of a placeholder.
        size: what the placeholder of a symbolic size stands for.
        roles: on the output node: role of each returned tensor.
        needs: on the output node, from ``place`` on: the SBP that each returned tensor must have.
        update_input: on a placeholder of an update program: ``"param"``, ``"grad"``, ``"lr"``, or the name of a state
            entry or hyperparameter.

    Placement:

    Attributes:
        sequence_dims: for each tensor that the node yields, the dimension that stays split along each mesh dimension
            that splits a sequence; see ``batch_first``.
        signature: the signature chosen along each mesh dimension, for nodes of operators.
        signatures: the only signature that ``place`` may choose along each mesh dimension, for operators without a
            rule.
        target_sbp: on a boxing node: the SBP of its result.
        by_user: on a boxing node: the user annotated its target, so its cost counts in placement.
        tensor: on a boxing node before ``localize``: the tensor that it moves.
        boxing: on a collective or slice, from ``localize`` on: its change of SBP.
        rank_arguments: the arguments that differ between ranks, by position; all others are equal on all ranks.

    Parameters, gradients and updates:

    Attributes:
        parameter: on a view of a bucket: qualified name of the parameter.
        bucket: on the update of a bucket with owners: its name.
        gradient: on a flat gradient: name of its bucket.
        gradient_of: on the gradient that a fused update reads: name of its bucket.
        accumulated: on a flat gradient that a loop accumulated: name of its bucket, if it has one.
        temporary: bytes that the node allocates and frees while it runs.

    Embedding tables that stay split by rows:

    Attributes:
        looked_up: the node is the result of a lookup that fetched rows from their owners.
        indices_split_dim: on the gradient of a table: the dimension along which the indices are split.
        sum_dtype: on the gradient of a table: the dtype that it is summed in.

    Micro-batches:

    Attributes:
        global: the global shape, from ``localize`` on.
        loop: on a node that runs a loop: the loop, whose body is a graph with the same keys.
        draw_dim: on a random operator: the dimension along which each micro-batch draws the next slice.

    The backend:

    Attributes:
        compiled: on a call of a compiled piece: names of the nodes in it.
        fused: the backend's compiler computes the value where it is read and never stores it, as predicted.
    """

    val: Any
    origin: Origin
    sbp: Any
    recomputed: bool
    edit: bool
    local: bool
    role: Role
    size: SizeInput
    roles: list[Role]
    needs: list[NdSbp]
    update_input: str
    sequence_dims: tuple[dict[int, int], ...]
    signature: tuple[Signature, ...]
    signatures: tuple[Signature, ...]
    target_sbp: NdSbp
    by_user: bool
    tensor: TensorRef
    boxing: Boxing
    rank_arguments: RankArguments
    parameter: str
    bucket: str
    gradient: str
    gradient_of: str
    accumulated: str | None
    temporary: int
    looked_up: bool
    indices_split_dim: int
    sum_dtype: torch.dtype
    loop: Loop
    draw_dim: int
    compiled: Sequence[str]
    fused: bool


def meta(node: fx.Node) -> NodeMeta:
    """Return the metadata of a node, typed. Writes go to the node."""
    return cast(NodeMeta, node.meta)


def origin(node: fx.Node) -> Origin:
    """Return the node's origin; nodes without one belong to the forward phase."""
    node_origin = node.meta.get("origin")
    return node_origin if isinstance(node_origin, Origin) else Origin("forward")


def role(node: fx.Node) -> Role | None:
    """Return the role of a placeholder, or None."""
    node_role = node.meta.get("role")
    return node_role if isinstance(node_role, Role) else None


def has_role(node: fx.Node, *kinds: RoleKind) -> bool:
    """Return whether the node is a placeholder with a role of one of these kinds."""
    node_role = role(node)
    return node_role is not None and node_role.kind in kinds


def boxing_of(node: fx.Node) -> Boxing | None:
    """Return the change of SBP of a collective or slice, or None for any other node."""
    boxing = node.meta.get("boxing")
    return boxing if isinstance(boxing, Boxing) else None


def value(node: fx.Node) -> Any:
    """Return the fake value of a node: a tensor, a sequence of tensors, or None for a node without a value."""
    return node.meta.get("val")
