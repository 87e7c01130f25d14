"""The error for a loss or gradient that is not finite. Ranks run the step again, node by node, to find the cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from zerograph.compiler.compiled import CompiledStep
from zerograph.errors import NonFiniteError
from zerograph.ir.buckets import element_name, spans
from zerograph.ir.dims import SizeInput
from zerograph.ir.finite_check import NOT_FINITE
from zerograph.ir.metadata import Role
from zerograph.ir.step_graph import output_with_role
from zerograph.passes.lower.bind_sizes import bind_sizes
from zerograph.runtime.executor import bind
from zerograph.runtime.find_nonfinite import Cause, NonFiniteSearch
from zerograph.runtime.job.process_group import explaining_failures

# The last pass whose graph is functional: no memory is written twice, and no state is read from files.
_LAST = "loop"


def nonfinite_error(
    step: CompiledStep,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    numbers: Mapping[str, float],
    seed: int,
    doing: str,
    sizes: Mapping[SizeInput, int],
) -> NonFiniteError:
    """Return the error for a step that has just computed a number that is not finite. A collective. Changes no state.

    Args:
        step: the step.
        names: name of each of ``tensors`` in messages.
        tensors, numbers, seed, doing, sizes: the arguments of the step's run.
    """
    job = step.executor.job
    # A graph of its own: ``bind_sizes`` changes it.
    graph = bind_sizes(next(one for one in step.prepared.passes if one.name == _LAST).rebuild(), step.context)
    flag = output_with_role(graph.graph, NOT_FINITE.kind, NOT_FINITE.name)
    assert flag is not None
    search = NonFiniteSearch(graph.graph, flag)
    executor = bind(job, graph, search, step.stores, step.lookups, search.needed)
    executor(tensors, numbers, seed, f"{doing}, run again to find what is not finite", sizes)
    own = None if search.cause is None else (search.cause, _source_name(step, names, search.cause))
    with explaining_failures(job, f"telling what of {doing} is not finite"):
        causes = job.channel.share(own)
    return NonFiniteError(_message(causes, doing, step.context.batch.micro_batches))


def _source_name(step: CompiledStep, names: Sequence[str], cause: Cause) -> str:
    """Return the name of the operator, or of the element of a parameter, buffer or input, that is the cause."""
    source = cause.source
    if not isinstance(source, Role):
        return source
    if source.kind == "input":
        return element_name(names[int(source.name)], cause.index)
    if source.kind == "bucket":
        layout = step.stores[source.name].layout
        row, column = (None, cause.index[0]) if layout.rows is None else cause.index
        for span in spans(layout, step.context.mesh):
            if span.row == row and span.start <= column < span.stop:
                return f"parameter {element_name(span.slot.name, span.element(column - span.start))}"
    return element_name(str(source), cause.index)


def _message(causes: Sequence[tuple[Cause, str] | None], doing: str, micro_batches: int) -> str:
    """Return the message for the earliest cause.

    Args:
        causes: the cause on each rank and its name; None on a rank without.
    """
    head = f"a loss or gradient of {doing} is not finite"
    tail = (
        "Nothing was changed: parameters, buffers, optimizer state and counts are those before the step. "
        "config.checks.on_nonfinite = 'skip' skips such steps."
    )
    orders = [entry[0].order for entry in causes if entry is not None]
    if not orders:
        return (
            f"{head}\n  Run again operator by operator, it was finite on all ranks: sums in another order "
            f"(a compiled or fused kernel) came out at the edge of what the dtype can hold.\n{tail}"
        )
    first = {rank: entry for rank, entry in enumerate(causes) if entry is not None and entry[0].order == min(orders)}
    cause, name = next(iter(first.values()))
    if isinstance(cause.source, Role):
        lines = [f"{head}, because what it is computed from is not"]
        lines += [
            f"  {source} is {_kind(cause)} on rank {rank} ({_counted(cause)})"
            for rank, (cause, source) in first.items()
        ]
        return "\n".join([*lines, tail])
    origin, number = cause.origin, cause.micro_batch
    micro_batch = "" if number is None else f" in micro-batch {number + 1} of {micro_batches}"
    lines = [
        f"{head}, first in the {origin.phase} of {origin.module or 'build()'}{micro_batch}",
        origin.line.rstrip(),
        *(f"  {name} computed {_counted(cause)} on rank {rank}{_inputs(cause)}" for rank, (cause, _) in first.items()),
    ]
    return "\n".join([*lines, tail])


def _kind(cause: Cause) -> str:
    return "not a number" if cause.nans else "infinite"


def _counted(cause: Cause) -> str:
    parts = [f"{count} {word}" for count, word in ((cause.nans, "NaN"), (cause.infinities, "infinite")) if count]
    return f"{' and '.join(parts)} of {cause.elements} element{'s' if cause.elements != 1 else ''}"


def _inputs(cause: Cause) -> str:
    if cause.infinities_from is None:
        return ", from finite ones"
    source, origin = cause.infinities_from.source, cause.infinities_from.origin
    return f", from infinities of {source}" + ("" if isinstance(source, Role) else f", {origin.source}")
