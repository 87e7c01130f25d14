"""A step in numbers: what was traced, what is placed where, what is sent, what is held."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx

from zerograph.compiler.compiled import RewrittenStep
from zerograph.inspection.collectives import collectives
from zerograph.inspection.recompute import made_again
from zerograph.inspection.text import dtype_name
from zerograph.ir.buckets import Bucket
from zerograph.ir.memory import Memory, MemoryKind, profile
from zerograph.ir.mesh import local_shape
from zerograph.ir.metadata import meta, role
from zerograph.ir.sbp import NdSbp, show
from zerograph.ir.step_graph import output_nodes, placeholders
from zerograph.ir.update_program import UpdateProgram


@dataclass(frozen=True)
class Value:
    """An input or output of the step: SBP, dtype and global shape."""

    name: str
    sbp: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {self.sbp} ({', '.join(map(str, self.shape))})"


@dataclass(frozen=True)
class Placed:
    """A bucket, and what is placed where.

    Attributes:
        parameters: their names, in the order in which they lie.
        numel: elements of the parameters together, without padding.
        dtype, compute_dtype: at rest, and as the step computes with them.
        sbp: between steps.
        gradient: SBP of the reduced gradient; None where there is none.
        state: SBP of each entry of the optimizer's state, by name.
        bytes: of the parameters on this rank between steps.
        rests: where, if not in the memory of the device that computes with it.
        optimizer: its class; None where nothing updates the bucket.
        how: how it is updated, in words.
        dealt: whole parameters are dealt out to ranks.
        owners: the rank that each parameter is dealt out to; empty where none is.
    """

    name: str
    parameters: tuple[str, ...]
    numel: int
    dtype: str
    compute_dtype: str
    sbp: str
    gradient: str | None
    state: dict[str, str]
    bytes: int
    rests: str
    optimizer: str | None
    how: str
    dealt: bool
    owners: tuple[int, ...]


@dataclass(frozen=True)
class Sent:
    """The collectives of one kind in one phase: how many run in a step, and the bytes that each rank sends."""

    phase: str
    kind: str
    times: int
    bytes: int


@dataclass(frozen=True)
class Summary:
    """A step on this rank.

    Attributes:
        mesh: number of ranks along each dimension; ``position``: this rank's place along each.
        micro_batches: computed one after another.
        nodes_captured, nodes: of the traced graph, and of what runs (bodies of loops once).
        seconds: that tracing and all passes took.
        plain: parameters that lie in no bucket, whole on every rank.
        sent: by phase and kind.
        memory: the predicted peak.
        at_rest: bytes between steps, by kind.
        recompute: activations that backward recomputes, in words; empty if there are none.
        warnings: what was said while it was compiled.
    """

    mesh: tuple[int, ...]
    position: tuple[int, ...]
    micro_batches: int
    nodes_captured: int
    nodes: int
    seconds: float
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    buckets: tuple[Placed, ...]
    plain: tuple[str, ...]
    sent: tuple[Sent, ...]
    memory: Memory
    at_rest: dict[str, int]
    recompute: str
    warnings: tuple[str, ...]

    @property
    def bytes_sent(self) -> int:
        """By each rank, per step."""
        return sum(one.bytes for one in self.sent)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: numbers in bytes and seconds."""
        return asdict(self)


def summary(step: RewrittenStep) -> Summary:
    """The numbers of a step, read off its graphs."""
    context, emitted = step.context, step.emitted
    whole = profile(emitted)
    at_rest: Counter[MemoryKind] = Counter()
    for node in placeholders(emitted):
        for one in whole.of[node]:
            if one is not None and one.kind != "inputs":
                at_rest[one.kind] += one.bytes
    sent: dict[tuple[str, str], list[int]] = {}
    for moved, times in collectives(emitted, context.buckets):
        entry = sent.setdefault((moved.phase, moved.kind), [0, 0])
        entry[0] += times
        entry[1] += moved.bytes * times
    return Summary(
        mesh=context.mesh.shape,
        position=context.mesh.position,
        micro_batches=context.batch.micro_batches,
        nodes_captured=step.passes[0].nodes,
        nodes=step.passes[-1].nodes,
        seconds=sum(record.seconds for record in step.passes),
        inputs=inputs(step),
        outputs=outputs(emitted),
        buckets=tuple(_placed(bucket, step) for bucket in context.buckets),
        plain=tuple(found.name for node in placeholders(emitted, "parameter") if (found := role(node)) is not None),
        sent=tuple(Sent(phase, kind, *counts) for (phase, kind), counts in sorted(sent.items(), key=_by_phase)),
        memory=whole.memory(),
        at_rest={kind: count for kind, count in at_rest.items() if count},
        recompute=made_again(whole, context.memory.blocks),
        warnings=step.warnings,
    )


def _by_phase(entry: tuple[tuple[str, str], list[int]]) -> tuple[int, str]:
    (phase, kind), _ = entry
    return ("forward", "backward", "update").index(phase), kind


def inputs(step: RewrittenStep) -> tuple[Value, ...]:
    """The tensors of the batch."""
    # The captured graph is the last one in global shapes.
    nodes = placeholders(step.captured.graph.graph, "input")
    return tuple(
        Value(f"input{meta(node)['role'].name}", show(sbp), dtype_name(value.dtype), tuple(value.shape))
        for node, sbp in zip(nodes, step.context.batch.inputs, strict=True)
        if (value := node.meta["val"]) is not None
    )


def outputs(emitted: fx.Graph) -> tuple[Value, ...]:
    """The tensors that the step gives back."""
    about = emitted.output_node().meta
    returned = zip(about["needs"], output_nodes(emitted), about["roles"], strict=True)
    return tuple(
        Value(f"output{found.name}", show(need), dtype_name(node.meta["val"].dtype), tuple(meta(node)["global"]))
        for need, node, found in returned
        if found.kind == "output"
    )


def bytes_here(bucket: Bucket, step: RewrittenStep) -> int:
    """Of the bucket's parameters on this rank between steps."""
    count = 1
    for size in local_shape(bucket.shape, bucket.sbp, step.context.mesh):
        count *= size
    return count * bucket.dtype.itemsize


def _placed(bucket: Bucket, step: RewrittenStep) -> Placed:
    update = step.context.updates.get(bucket.name)
    target: NdSbp = bucket.split_sbp if bucket.one_by_one else bucket.sbp
    state = {} if update is None else {name: show(one.sbp) for name, one in update.layouts.items()}
    scalars = [] if update is None else [name for name in update.program.state if name not in state]
    everywhere = "B" if step.context.mesh.dims == 1 else f"({', '.join('B' * step.context.mesh.dims)})"
    return Placed(
        name=bucket.name,
        parameters=tuple(slot.name for slot in bucket.slots),
        numel=sum(slot.numel for slot in bucket.slots) * (bucket.rows or 1),
        dtype=dtype_name(bucket.dtype),
        compute_dtype=dtype_name(bucket.compute_dtype or bucket.dtype),
        sbp=show(bucket.sbp),
        gradient=None if update is None else show(target),
        state=state | dict.fromkeys(scalars, everywhere),
        bytes=bytes_here(bucket, step),
        rests=rests(bucket),
        optimizer=None if update is None else update.program.optimizer,
        how="no update" if update is None else _how(update.program, bucket),
        dealt=bucket.dealt,
        owners=bucket.owners or (),
    )


def rests(bucket: Bucket) -> str:
    """Where a bucket lies between steps, if not on its device."""
    files = [what for what, folder in (("shard", bucket.storage.parameters), ("state", bucket.storage.state)) if folder]
    found = [f"on the {bucket.storage_device}"] if bucket.storage.device else []
    return ", ".join([*found, *([f"{' and '.join(files)} in files"] if files else [])])


def _how(program: UpdateProgram, bucket: Bucket) -> str:
    if program.mixes is None and bucket.dealt:
        return f"{program.optimizer}, elementwise, whole parameters dealt out to ranks"
    if program.mixes is None:
        return f"{program.optimizer}, elementwise on the flat bucket"
    return f"{program.optimizer}, whole parameters dealt out to ranks: {program.mixes}"
