"""What a user can see of a compiled step: its collectives, its placements, a page of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx, nn

from zerograph.buckets import Bucket, Slot
from zerograph.compiler import CompiledStep
from zerograph.members import Members
from zerograph.memory import profile, show_bytes
from zerograph.runtime.state import Store, bytes_at_rest, store_of
from zerograph.sbp import NdSbp, Sbp, show, whole
from zerograph.step_graph import Boxing, Phase, collective_runs, origin, placeholders
from zerograph.update import UpdateProgram


@dataclass(frozen=True)
class Collective:
    """One collective of the emitted graph.

    Attributes:
        kind: all-reduce, reduce-scatter, all-gather or all-to-all.
        bytes: what each rank sends, in bytes (ring algorithms; see :func:`zerograph.sbp.wire_bytes`).
        tensor_bytes: size of what the ranks that take part hold together: on a mesh of one dimension the whole tensor.
        tensors: the parameters in the bucket that it moves, or what else it moves.
        phase: forward, backward or update.
        mesh_dim: the dimension of the mesh along which it runs.
    """

    kind: str
    bytes: int
    tensor_bytes: int
    tensors: tuple[str, ...]
    phase: Phase
    mesh_dim: int = 0


def collectives(step: CompiledStep) -> list[Collective]:
    """The collectives of a step in the last graph's order; one that runs for each micro-batch as often."""
    return [one for one, times in _runs(step) for _ in range(times)]


def _runs(step: CompiledStep) -> list[tuple[Collective, int]]:
    """Each with how often it runs in a step."""
    contents = {bucket.name: tuple(slot.name for slot in bucket.slots) for bucket in step.context.buckets}
    return [(_collective(node, contents), times) for node, times in collective_runs(step.executor.graph.graph)]


def _collective(node: fx.Node, contents: dict[str, tuple[str, ...]]) -> Collective:
    found: Boxing = node.meta["boxing"]
    bucket = found.tensor.removeprefix("gradient of ")
    tensors = contents.get(bucket, (found.tensor,))
    return Collective(found.kind, round(found.sent), found.bytes, tensors, found.phase, found.dim)


def placements(step: CompiledStep, members: Members) -> dict[str, Sbp | NdSbp]:
    """SBP of every parameter, optimizer state (``<parameter>.<state>``) and buffer between steps."""
    found: dict[str, NdSbp] = {}
    everywhere = whole(step.context.mesh.dims)
    for name, parameter in members.parameters.items():
        store = store_of(parameter)
        if store is None:
            found[name] = everywhere
            continue
        index = _slot(store, parameter)
        found[name] = store.layout.sbp_of(store.layout.slots[index])
        for state in store.specs:
            layout = store.layouts.get(state)
            found[f"{name}.{state}"] = everywhere if layout is None else layout.sbp_of(layout.slots[index])
    found |= dict.fromkeys(members.buffers, everywhere)
    found |= {alias: found[name] for alias, name in members.aliases.items()}
    return {name: sbp[0] if len(sbp) == 1 else sbp for name, sbp in found.items()}


def owners(step: CompiledStep, members: Members) -> dict[str, int]:
    """Which rank each parameter that is dealt out whole belongs to: its place along the dimension of ZeRO."""
    found: dict[str, int] = {}
    for name, parameter in members.parameters.items():
        store = store_of(parameter)
        if store is not None and store.layout.owners is not None:
            found[name] = store.layout.owners[_slot(store, parameter)]
    return found | {alias: found[name] for alias, name in members.aliases.items() if name in found}


def _slot(store: Store, parameter: nn.Parameter) -> int:
    return next(index for index, one in enumerate(store.parameters) if one is parameter)


def describe(step: CompiledStep, members: Members) -> str:
    """The step on a page: inputs and outputs, parameters, collectives, passes."""
    parts = [
        _section("inputs", _inputs(step)),
        _section("outputs", [f"{_shape(shape)} {show(sbp)}" for sbp, shape in step.outputs]),
        _section("parameters at rest", _parameters(step, members)),
        _section("collectives", _collectives(step)),
        _section("recompute", _recompute(step)),
        _section("passes", [f"{one.name:<10} {one.nodes:>6} nodes {one.seconds:>8.3f} s" for one in step.passes]),
    ]
    return "\n".join(parts)


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"  {title}:", *(f"    {line}" for line in lines or ["none"])])


def _inputs(step: CompiledStep) -> list[str]:
    # The captured graph is the last one in global shapes.
    nodes = placeholders(step.captured.graph.graph, "input")
    return [
        f"{_shape(node.meta['val'].shape)} {node.meta['val'].dtype} {show(sbp)}"
        for node, sbp in zip(nodes, step.context.inputs, strict=True)
    ]


def _parameters(step: CompiledStep, members: Members) -> list[str]:
    lines = []
    for bucket in step.context.buckets:
        update = step.context.updates.get(bucket.name)
        how = "no update" if update is None else _how(update.program, bucket)
        dtype = str(bucket.dtype) if bucket.compute_dtype is None else f"{bucket.dtype} as {bucket.compute_dtype}"
        numel = bucket.numel * (bucket.rows or 1)
        lines.append(f"{bucket.name} {show(bucket.sbp)}  {numel:,} elements, {dtype}{_rests(bucket)}  ({how})")
        owners = [""] * len(bucket.slots) if bucket.owners is None else [f"  rank {one}" for one in bucket.owners]
        lines += [
            f"  {slot.name} {_shape(slot.shape)}{_cut(bucket, slot)}{owner}"
            for slot, owner in zip(bucket.slots, owners, strict=True)
        ]
    plain = [name for name, parameter in members.parameters.items() if store_of(parameter) is None]
    lines += [f"{name} {_shape(members.parameters[name].shape)} B" for name in plain]
    lines.append(f"{bytes_at_rest(step.stores.values()):,} bytes of parameters and optimizer state on this rank")
    return lines


def _cut(bucket: Bucket, slot: Slot) -> str:
    """How the user has split a parameter, which its bucket of rows does not tell."""
    return "" if slot.split is None else f" {show(bucket.sbp_of(slot))}"


def _rests(bucket: Bucket) -> str:
    """Where it lies between steps, if not on its device."""
    files = [what for what, folder in (("shard", bucket.rest.parameters), ("state", bucket.rest.state)) if folder]
    return (f", on the {bucket.home}" if bucket.rest.device else "") + (
        f", {' and '.join(files)} in files" * bool(files)
    )


def _how(program: UpdateProgram, bucket: Bucket) -> str:
    if program.mixes is None and bucket.dealt:
        return f"{program.optimizer}, elementwise, whole parameters dealt out to ranks"
    if program.mixes is None:
        return f"{program.optimizer}, elementwise on the flat bucket"
    return f"{program.optimizer}, whole parameters dealt out to ranks: {program.mixes}"


def _collectives(step: CompiledStep) -> list[str]:
    found = _runs(step)
    lines = [
        f"{one.phase:<8} {one.kind:<14} {one.bytes:>13,} bytes  {f'{times} times ' if times > 1 else ''}"
        f"{_short(one.tensors)}"
        for one, times in found
    ]
    total = sum(one.bytes * times for one, times in found)
    return [*lines, f"{total:,} bytes sent by each rank per step"] if lines else []


def _recompute(step: CompiledStep) -> list[str]:
    """What backward makes again, of what it reads of forward's."""
    whole = profile(step.executor.graph.graph)
    made = kept = 0
    where: set[str] = set()
    for found in (whole, *whole.bodies.values()):
        where |= {origin(node).module for node in found.nodes if node.meta.get("recomputed")}
        for one in found.storages:
            born, dies = found.nodes[one.born], found.nodes[one.dies]
            if one.kind == "activations" and born.meta.get("recomputed"):
                made += one.bytes
            elif one.kind == "activations" and origin(born).phase == "forward" and origin(dies).phase == "backward":
                kept += one.bytes
    if not made:
        return []
    blocks = sum(any(f"{one}.".startswith(f"{block}.") for one in where) for block in step.context.blocks)
    share = f"{made / (made + kept):.0%} of the activations that backward reads are made again"
    sizes = f"{show_bytes(made)}; {show_bytes(kept)} are kept"
    return [f"{f'{blocks} blocks: ' if blocks else ''}{share} ({sizes})"]


def _short(tensors: Sequence[str]) -> str:
    return tensors[0] if len(tensors) == 1 else f"{tensors[0]} ... {tensors[-1]} ({len(tensors)})"


def _shape(shape: Iterable[int]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"
