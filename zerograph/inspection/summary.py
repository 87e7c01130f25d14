"""A step in numbers: traced graph, placement of buckets, collectives, memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx

from zerograph.compiler.compiled import PreparedStep
from zerograph.inspection.collectives import collectives
from zerograph.inspection.text import dtype_name, show_shape
from zerograph.ir.buckets import Bucket
from zerograph.ir.memory import Memory, Profile, profile, show_bytes
from zerograph.ir.mesh import local_shape
from zerograph.ir.metadata import meta, origin
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
        return f"{self.dtype} {self.sbp} {show_shape(self.shape)}"


@dataclass(frozen=True)
class Placed:
    """A bucket and its placement.

    Attributes:
        parameters: qualified names, in the order of their offsets.
        numel: elements of all parameters, without padding.
        dtype: stored dtype of the parameters; ``compute_dtype`` is the dtype of their gathered copies.
        sbp: SBP of the parameters between steps.
        gradient: SBP of the reduced gradient; None without an update.
        state: SBP of each entry of the optimizer's state, by name.
        bytes: size of this rank's shard of the parameters.
        location: where parameters and state are offloaded to, in words; empty if they are not.
        optimizer: class name; None without an update.
        how: description of the update.
        has_owners: True if each parameter belongs to one rank as a whole.
        owners: rank of each parameter if ``has_owners``, else empty.
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
    location: str
    optimizer: str | None
    how: str
    has_owners: bool
    owners: tuple[int, ...]


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind in one phase: their number per step, and the bytes that each rank sends.

    Attributes:
        between: those of the bytes that go to other hosts; 0 if the hosts of the ranks are unknown.
    """

    phase: str
    kind: str
    times: int
    bytes: int
    between: int = 0


@dataclass(frozen=True)
class Summary:
    """A step on this rank.

    Attributes:
        mesh: number of ranks along each dimension; ``position`` is this rank's index along each.
        micro_batches: number of micro-batches per step.
        nodes_captured: number of nodes of the traced graph.
        nodes: number of nodes of the emitted graph; bodies of loops count once.
        seconds: duration of tracing and of all passes.
        inputs, outputs: tensors of the batch, and tensors that the step returns.
        buckets: in order of first use.
        plain: parameters in no bucket; every rank holds them whole.
        sent: collectives by phase and kind.
        memory: predicted peak.
        at_rest: bytes between steps, by kind.
        recompute: activations that backward recomputes, in words; empty if there are none.
        warnings: messages of the compilation.
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
        """Return the bytes that each rank sends per step."""
        return sum(one.bytes for one in self.sent)

    @property
    def bytes_between(self) -> int:
        """Return the bytes of them that go to other hosts."""
        return sum(one.between for one in self.sent)

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as data for JSON, in bytes and seconds."""
        return asdict(self)


def summary(step: PreparedStep) -> Summary:
    """Compute the numbers of a step from its graphs."""
    context, emitted = step.context, step.emitted
    whole = profile(emitted)
    sent: dict[tuple[str, str], list[int]] = {}
    for collective, times in collectives(emitted, context):
        totals = sent.setdefault((collective.phase, collective.kind), [0, 0, 0])
        totals[0] += times
        totals[1] += collective.bytes * times
        totals[2] += collective.between * times
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
        plain=tuple(meta(node)["role"].name for node in placeholders(emitted, "parameter")),
        sent=tuple(Sent(phase, kind, *counts) for (phase, kind), counts in sorted(sent.items(), key=_by_phase)),
        memory=whole.memory(),
        at_rest=at_rest(whole),
        recompute=_recomputation(whole, context.memory.blocks),
        warnings=step.warnings,
    )


def at_rest(memory: Profile) -> dict[str, int]:
    """Return the bytes that a rank stores between steps, by kind."""
    counts: Counter[str] = Counter()
    for node in memory.nodes:
        if node.op in ("placeholder", "get_attr"):
            for storage in memory.of[node]:
                if storage is not None and storage.bytes and storage.kind != "inputs":
                    counts[storage.kind] += storage.bytes
    return dict(counts)


def _by_phase(entry: tuple[tuple[str, str], list[int]]) -> tuple[int, str]:
    (phase, kind), _ = entry
    return ("forward", "backward", "update").index(phase), kind


def inputs(step: PreparedStep) -> tuple[Value, ...]:
    """Return the tensors of the batch."""
    # Only the captured graph has global shapes.
    nodes = placeholders(step.captured.graph.graph, "input")
    return tuple(
        Value(f"input{meta(node)['role'].name}", show(sbp), dtype_name(value.dtype), tuple(value.shape))
        for node, sbp in zip(nodes, step.context.batch.inputs, strict=True)
        if (value := node.meta["val"]) is not None
    )


def outputs(emitted: fx.Graph) -> tuple[Value, ...]:
    """Return the tensors that the step returns."""
    returns = emitted.output_node().meta
    values = zip(returns["needs"], output_nodes(emitted), returns["roles"], strict=True)
    return tuple(
        Value(f"output{value.name}", show(sbp), dtype_name(node.meta["val"].dtype), tuple(meta(node)["global"]))
        for sbp, node, value in values
        if value.kind == "output"
    )


def _placed(bucket: Bucket, step: PreparedStep) -> Placed:
    update = step.context.updates.get(bucket.name)
    target: NdSbp = bucket.split_sbp if bucket.one_by_one else bucket.sbp
    state = {} if update is None else {name: show(layout.sbp) for name, layout in update.layouts.items()}
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
        bytes=math.prod(local_shape(bucket.shape, bucket.sbp, step.context.mesh)) * bucket.dtype.itemsize,
        location=offloaded_to(bucket),
        optimizer=None if update is None else update.program.optimizer,
        how="no update" if update is None else _how(update.program, bucket),
        has_owners=bucket.has_owners,
        owners=bucket.owners or (),
    )


def offloaded_to(bucket: Bucket) -> str:
    """Describe where a bucket is offloaded to; empty if it stays in its device's memory."""
    files = [part for part, folder in (("shard", bucket.storage.parameters), ("state", bucket.storage.state)) if folder]
    device = [f"on the {bucket.storage_device}"] if bucket.storage.device else []
    return ", ".join([*device, *([f"{' and '.join(files)} in files"] if files else [])])


def _how(program: UpdateProgram, bucket: Bucket) -> str:
    if program.mixes is None and bucket.has_owners:
        return f"{program.optimizer}, elementwise, whole parameters dealt out to ranks"
    if program.mixes is None:
        return f"{program.optimizer}, elementwise on the flat bucket"
    return f"{program.optimizer}, whole parameters dealt out to ranks: {program.mixes}"


def _recomputation(whole: Profile, blocks: Sequence[str]) -> str:
    """Describe the share of forward's activations that backward recomputes; empty if it recomputes none.

    Args:
        blocks: module paths of the model's repeated blocks; those with recomputed nodes are counted.
    """
    recomputed = saved = 0
    modules: set[str] = set()
    for graph in (whole, *whole.bodies.values()):
        modules |= {origin(node).module for node in graph.nodes if meta(node).get("recomputed")}
        for storage in graph.storages:
            born, dies = graph.nodes[storage.born], graph.nodes[storage.dies]
            if storage.kind != "activations":
                continue
            if meta(born).get("recomputed"):
                recomputed += storage.bytes
            elif origin(born).phase == "forward" and origin(dies).phase == "backward":
                saved += storage.bytes
    if not recomputed:
        return ""
    count = sum(any(f"{module}.".startswith(f"{block}.") for module in modules) for block in blocks)
    share = f"{recomputed / (recomputed + saved):.0%} of the activations that backward reads are recomputed"
    sizes = f"{show_bytes(recomputed)}; {show_bytes(saved)} are saved"
    return f"{f'{count} blocks: ' if count else ''}{share} ({sizes})"
