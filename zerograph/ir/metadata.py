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

from zerograph.ir.loop import Loop
from zerograph.ir.memory_budget import Shortage
from zerograph.ir.sbp import NdSbp, Signature, boxing_kind, wire_bytes

Phase = Literal["forward", "backward", "update"]
RoleKind = Literal[
    "input",
    "parameter",
    "buffer",
    "bucket",
    # Memory for the whole of a bucket; the shard is this rank's piece of it.
    "gather_buffer",
    "state",
    "hyperparameter",
    "seed",
    "scaler",
    "check",
    "output",
    "gradient",
    # Of a loop's body: a value computed before the loop, a result of the loop, and the number of the micro-batch.
    "value",
    "result",
    "micro_batch",
]
TensorKind = Literal["bucket", "gradient", "value"]


@dataclass(frozen=True)
class Role:
    """What an input or output of the graph is: ``Role("parameter", "model.fc.weight")``."""

    kind: RoleKind
    name: str

    @property
    def bucket(self) -> str | None:
        """Name of the bucket whose shard, gather buffer or state this is; None for everything else."""
        return self.name.partition(".")[0] if self.kind in ("bucket", "gather_buffer", "state") else None

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Origin:
    """Where a node comes from.

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


@dataclass(frozen=True)
class TensorRef:
    """The global tensor that a boxing node moves.

    Attributes:
        kind: ``"bucket"`` for parameters, ``"gradient"`` for the gradient of a bucket, ``"value"`` for anything else.
        name: name of the bucket; for a value, the name of its node or what it is.
    """

    kind: TensorKind
    name: str

    def gradient_of(self, bucket: str) -> bool:
        """Return whether this is the gradient of that bucket."""
        return self.kind == "gradient" and self.name == bucket

    def __str__(self) -> str:
        return f"gradient of {self.name}" if self.kind == "gradient" else self.name


@dataclass(frozen=True)
class Boxing:
    """A change of SBP along one mesh dimension.

    Attributes:
        source, target: the SBPs before and after; they differ at ``dim`` only.
        dim: the mesh dimension.
        ranks: number of ranks along ``dim``.
        tensor: the global tensor that is moved.
        bytes: size in bytes of the part of the tensor that the ranks along ``dim`` hold together.
        phase: phase of the step.
    """

    source: NdSbp
    target: NdSbp
    dim: int
    ranks: int
    tensor: TensorRef
    bytes: int
    phase: Phase

    @property
    def kind(self) -> str:
        """all-reduce, reduce-scatter, all-gather, all-to-all or slice."""
        kind = boxing_kind(self.source[self.dim], self.target[self.dim])
        assert kind is not None, self
        return kind

    @property
    def sent(self) -> float:
        """Bytes that each rank sends; see :func:`zerograph.ir.sbp.wire_bytes`."""
        return wire_bytes(self.source[self.dim], self.target[self.dim], self.bytes, self.ranks)


# "global" is a keyword, which the class syntax does not allow as a name.
_Global = TypedDict("_Global", {"global": tuple[int, ...]}, total=False)


class NodeMeta(_Global, total=False):
    """Every key of ``node.meta`` that one part of zerograph writes and another reads.

    Of every node:

    Attributes:
        val: fake tensor of the node's value, or a sequence of them; in the global shape until ``localize``, in this
            rank's shape afterwards.
        origin: phase, module path and source line.
        sbp: one SBP per mesh dimension, from ``place`` on; of a node with several results a tuple of such tuples.
        recomputed: backward computes a value of forward again.
        edit: ``build()`` computed the node from gradients, after the last ``backward()``.
        local: the node is inside a local region, from ``localize`` on: it has no global tensor.

    Of inputs and outputs:

    Attributes:
        role: what a placeholder is.
        roles: of the output node: what each returned tensor is.
        needs: of the output node, from ``place`` on: the SBP that each returned tensor must have.
        shortage: of the output node, from ``fit_memory_budget`` on: bytes that are missing to keep the memory budget;
            absent where it is kept.
        update_input: of a placeholder in an update program: ``"param"``, ``"grad"``, ``"lr"``, or the name of a state
            entry or hyperparameter.

    Of placement:

    Attributes:
        signature: the signature chosen along each mesh dimension, for nodes of operators.
        signatures: the only signature that ``place`` may choose along each mesh dimension, for operators without a
            rule.
        target_sbp: of a boxing node, the SBP that it yields.
        by_user: of a boxing node: its target was annotated by the user, so its cost counts in placement.
        tensor: of a boxing node before ``localize``: the tensor that it moves.
        boxing: of a collective or slice, from ``localize`` on: the change of SBP that it makes.
        rank_arguments: positions of the arguments that differ between ranks; all others are equal on all ranks.

    Of parameters, gradients and updates:

    Attributes:
        parameter: of a view of a bucket: qualified name of the parameter.
        bucket: of the update of a dealt bucket: its name.
        gradient: of a flat gradient: name of its bucket.
        gradient_of: of the gradient that a fused update reads: name of its bucket.
        accumulated: of a flat gradient that a loop accumulated: name of its bucket, if it has one.
        temporary: bytes that the node allocates and frees while it runs.

    Of embedding tables that stay split by rows:

    Attributes:
        looked_up: the node is the result of a lookup that fetched its rows from their owners.
        indices_split_dim: of the gradient of such a table: the dimension along which the indices are split.
        sum_dtype: of the gradient of such a table: the dtype that it is summed in.

    Of micro-batches:

    Attributes:
        global: the global shape, from ``localize`` on.
        loop: of a node that runs one: the loop, whose body is a graph with the same keys.
        draw_dim: of a draw of random numbers: the dimension along which each micro-batch draws the next part.

    Of the backend:

    Attributes:
        compiled: of a call of a compiled piece: names of the nodes in it.
    """

    val: Any
    origin: Origin
    sbp: Any
    recomputed: bool
    edit: bool
    local: bool
    role: Role
    roles: list[Role]
    needs: list[NdSbp]
    shortage: Shortage
    update_input: str
    signature: tuple[Signature, ...]
    signatures: tuple[Signature, ...]
    target_sbp: NdSbp
    by_user: bool
    tensor: TensorRef
    boxing: Boxing
    rank_arguments: tuple[int, ...]
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


def meta(node: fx.Node) -> NodeMeta:
    """Return the metadata of a node, typed. Writes go to the node."""
    return cast(NodeMeta, node.meta)


def origin(node: fx.Node) -> Origin:
    """Return the node's origin; nodes without one belong to the forward phase."""
    known = node.meta.get("origin")
    return known if isinstance(known, Origin) else Origin("forward")


def role(node: fx.Node) -> Role | None:
    """Return the role of a placeholder, or None."""
    known = node.meta.get("role")
    return known if isinstance(known, Role) else None


def boxing_of(node: fx.Node) -> Boxing | None:
    """Return the change of SBP that a collective or slice makes, or None."""
    known = node.meta.get("boxing")
    return known if isinstance(known, Boxing) else None


def value(node: fx.Node) -> Any:
    """Return the fake value of a node: a tensor, a sequence of tensors, or None for a node without a value."""
    return node.meta.get("val")
