"""Find the results of a step that the loop still refers to, on any rank."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from zerograph.loops.deferred import Result
from zerograph.loops.graphs import Recorded
from zerograph.loops.tape import Tape


def agreed_outputs(graph: Recorded, tapes: Sequence[Tape]) -> list[list[Result]]:
    """Return the step's outputs for each call: those that any rank needs. A collective."""
    if not _alike(tapes):
        # A forward without references that waits for the garbage collector is not a call of the step.
        gc.collect()
    outputs = _outputs_of_all_calls(tapes)
    if graph.outputs_of_all_ranks(_from_the_end(tapes, outputs)) is None:
        return outputs
    # A tensor without references may wait for the garbage collector on one rank, and be freed on another.
    gc.collect()
    outputs = _outputs_of_all_calls(tapes)
    for rank_outputs in graph.outputs_of_all_ranks(_from_the_end(tapes, outputs)) or ():
        for tape, own, needed in zip(tapes, outputs, rank_outputs, strict=False):
            results = {Result(len(tape.calls) - call, leaf) for call, leaf in needed}
            own[:] = sorted({*own, *filter(tape.has, results)})
    return outputs


def _from_the_end(tapes: Sequence[Tape], outputs: Sequence[Sequence[Result]]) -> list[list[tuple[int, int]]]:
    """Count calls from the end, so that ranks with earlier calls on their tapes agree on the numbers."""
    return [
        [(len(tape.calls) - result.call, result.leaf) for result in results]
        for tape, results in zip(tapes, outputs, strict=True)
    ]


def _outputs_of_all_calls(tapes: Sequence[Tape]) -> list[list[Result]]:
    outputs = [_outputs(tape) for tape in tapes]
    if not _alike(tapes):
        return outputs
    # A result that is referenced in one call may not be referenced in another.
    return [sorted(set().union(*outputs)) for _ in tapes]


def _alike(tapes: Sequence[Tape]) -> bool:
    """Return whether the same functions were called on each tape."""
    return len({tuple(call.function for call in tape.calls) for tape in tapes}) == 1


def _outputs(tape: Tape) -> list[Result]:
    """Return the step's outputs: referenced tensors, except those already read on which no loss depends.

    A number that is only read now and then therefore does not change the step.
    """
    to_losses = set(tape.with_ancestors(loss.call for loss in tape.losses))
    return sorted({tensor.result for tensor in tape.alive() if tensor.value is None or tensor.result.call in to_losses})
