"""The memory budget of a step whose sizes differ between calls: for which sizes the step keeps it.

A step keeps its budget for declared maxima, and for the largest sizes that were seen when it was compiled. If these do
not fit all together, which perhaps no call needs, the sizes of one call decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerograph.compiler.batch import Batch
from zerograph.compiler.compiled import CompiledStep, PreparedStep
from zerograph.errors import MemoryBudgetError
from zerograph.ir.dims import Dim
from zerograph.ir.memory import profile
from zerograph.ir.sizes import Sizes


def prepare_for_sizes(prepare: Callable[[], PreparedStep], sizes: Sizes | None, batch: Batch) -> PreparedStep:
    """Prepare a step for the largest sizes seen or declared; if these exceed the budget, for those of the call.

    Args:
        prepare: runs the memory search.
        sizes: the symbols of the step; None for one without.
        batch: the inputs of the call.

    Raises:
        MemoryBudgetError: the step exceeds its budget for the sizes of the call, or for a declared maximum.
    """
    if sizes is None:
        return prepare()
    largest = list(dict.fromkeys(size for spec in batch.specs for size in spec.shape if isinstance(size, Dim)))
    before = list(sizes.dims.values())
    for dims in (largest, _of_call(largest, batch)):
        sizes.predict_for(dims)
        try:
            return prepare()
        except MemoryBudgetError as error:
            problem = error
    sizes.predict_for(before)
    raise problem


def keeps_budget(step: CompiledStep, batch: Batch) -> bool:
    """Return whether a step keeps its memory budget for the sizes of a call. All ranks return the same.

    Sizes that it keeps the budget for are remembered, and ``step.inspect.memory`` is then predicted for them.
    """
    budget, sizes = step.context.memory.budget, step.captured.sizes
    if budget is None or sizes is None:
        return True
    dims = step.dims
    if all(dim.holds(batch.sizes[name]) for name, dim in dims.items()):
        return True
    call = tuple(batch.sizes.items())
    if call in step.fitting_calls:
        return True
    before = list(sizes.dims.values())
    grown = {name: dim.grown(batch.sizes[name]) for name, dim in dims.items()}
    if _peak(step, sizes, list(grown.values())) <= budget:
        dims.update(grown)
        return True
    fits = _peak(step, sizes, _of_call(list(dims.values()), batch)) <= budget
    sizes.predict_for(before)
    if fits:
        step.fitting_calls.add(call)
    return fits


def _of_call(dims: Sequence[Dim], batch: Batch) -> list[Dim]:
    return [dim.of(batch.sizes[dim.name]) for dim in dims]


def _peak(step: CompiledStep, sizes: Sizes, dims: Sequence[Dim]) -> int:
    sizes.predict_for(dims)
    return profile(step.prepared.emitted).peak
