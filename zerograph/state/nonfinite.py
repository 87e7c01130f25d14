"""Where what is not finite in a loss or gradient comes from: the step is run again, node by node, by all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from zerograph.compiler.compiled import CompiledStep
from zerograph.errors import NonFiniteError
from zerograph.ir.buckets import element_name, spans
from zerograph.ir.finite_check import NOT_FINITE
from zerograph.ir.metadata import Role
from zerograph.ir.step_graph import output_with_role
from zerograph.runtime.executor import bind
from zerograph.runtime.find_nonfinite import Cause, NonFiniteSearch
from zerograph.runtime.job.process_group import explained as exchange_explained

# The last pass whose graph makes values only: no memory is written twice, and none rests in files.
_LAST = "loop"


def nonfinite_error(
    step: CompiledStep,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    numbers: Mapping[str, float],
    seed: int,
    doing: str,
) -> NonFiniteError:
    """The error for a step that has just been found not finite. Every rank calls it; no state changes.

    Args:
        names: what each of ``tensors``, this rank's part of the batch, is called in messages.
        numbers, seed, doing: as the step was run with them.
    """
    job = step.executor.job
    graph = next(record for record in step.passes if record.name == _LAST).graph
    wanted = output_with_role(graph.graph, NOT_FINITE.kind, NOT_FINITE.name)
    assert wanted is not None
    search = NonFiniteSearch(graph.graph, wanted)
    again = bind(job, graph, search, step.stores, step.lookups, search.needed)
    again(tensors, numbers, seed, f"{doing}, run again to find what is not finite")
    mine = None if search.cause is None else (search.cause, _named(step, names, search.cause))
    found: list[tuple[Cause, str] | None] = [mine]
    if job.size > 1:
        found = [None] * job.size
        with exchange_explained(job, f"telling what of {doing} is not finite"):
            dist.all_gather_object(found, mine, group=job.control)
    return NonFiniteError(_message(found, doing, step.context.batch.micro_batches))


def _named(step: CompiledStep, names: Sequence[str], cause: Cause) -> str:
    """The operator, or the parameter, buffer or tensor of the batch, and where in it."""
    what = cause.source
    if not isinstance(what, Role):
        return what
    if what.kind == "input":
        return element_name(names[int(what.name)], cause.index)
    if what.kind == "bucket":
        layout = step.stores[what.name].layout
        row, at = (None, cause.index[0]) if layout.rows is None else cause.index
        for span in spans(layout, step.context.mesh):
            if span.row == row and span.start <= at < span.stop:
                return f"parameter {element_name(span.slot.name, span.element(at - span.start, layout.rows))}"
    return element_name(str(what), cause.index)


def _message(found: Sequence[tuple[Cause, str] | None], doing: str, micro_batches: int) -> str:
    head = f"a loss or gradient of {doing} is not finite"
    tail = (
        "Nothing was changed: parameters, buffers, optimizer state and counts are those before the step. "
        "config.on_nonfinite = 'skip' leaves such steps out."
    )
    orders = [one[0].order for one in found if one is not None]
    if not orders:
        return (
            f"{head}\n  Run again operator by operator, it was finite on all ranks: sums in another order "
            f"(a compiled or fused kernel) came out at the edge of what the dtype can hold.\n{tail}"
        )
    first = {rank: one for rank, one in enumerate(found) if one is not None and one[0].order == min(orders)}
    cause, name = next(iter(first.values()))
    if isinstance(cause.source, Role):
        lines = [f"{head}: what it is computed from is not"]
        lines += [f"  {one} is {_kind(c)} on rank {rank} ({_counted(c)})" for rank, (c, one) in first.items()]
        return "\n".join([*lines, tail])
    where, number = cause.origin, cause.micro_batch
    micro_batch = "" if number is None else f" in micro-batch {number + 1} of {micro_batches}"
    lines = [
        f"{head}, first in the {where.phase} of {where.module or 'build()'}{micro_batch}",
        f"  {where.source}   {where.code}".rstrip(),
        *(f"  {name} made {_counted(c)} on rank {rank}{_of(c)}" for rank, (c, _) in first.items()),
    ]
    return "\n".join([*lines, tail])


def _kind(cause: Cause) -> str:
    return "not a number" if cause.nans else "infinite"


def _counted(cause: Cause) -> str:
    parts = [f"{count} {word}" for count, word in ((cause.nans, "NaN"), (cause.infinities, "infinite")) if count]
    return f"{' and '.join(parts)} of {cause.elements} element{'s' if cause.elements != 1 else ''}"


def _of(cause: Cause) -> str:
    if cause.infinities_from is None:
        return ", of finite ones"
    of = cause.infinities_from
    what = f"of {of.source}" if isinstance(of.source, Role) else f"of {of.source}, {of.origin.source}"
    return f", with the infinities {what}"
