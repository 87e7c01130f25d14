"""Find numbers of an optimizer, or of its groups, that change from step to step: they are inputs of the graph.

``group["step"] += 1`` and ``self.steps += 1`` change Python numbers, which a traced update would have as constants. The
graph reads the number before a step. Afterwards the optimizer's own code, run on a parameter of one element, says what
it is then: these numbers depend on no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerograph.ir.update_program import Path
from zerograph.optim.hyperparameters import OF_OPTIMIZER, place
from zerograph.optim.sampling import Sample, location
from zerograph.optim.surroundings import is_known, numbers_of, restored


def counts_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[Path, ...]:
    """Find the numbers of an optimizer and of its group that change in a step, whatever the tensors are.

    Only numbers that change alike for any number of parameters and groups, and for any state, are among them.
    """
    if is_known(optimizer) or not group["params"]:
        return ()
    parameter = group["params"][0]
    sample = Sample(optimizer, group, parameter.shape or torch.Size((1,)), parameter.dtype, parameter.device)
    try:
        with restored(optimizer):
            alone, *others = (
                sample.numbers_over_steps(1, 1),
                sample.numbers_over_steps(2, 2),
                sample.numbers_over_steps(1, 1, answer=True),
                sample.numbers_over_steps(1, 1, forgets=True),
            )
            twin = _after_step(optimizer, group)
            after = numbers_of(twin)
    except Exception:
        # The trace of the update reports it.
        return ()
    counts: list[Path] = []
    for path in (*((name,) for name in twin.param_groups[0]), *((name, *OF_OPTIMIZER) for name in vars(twin))):
        where = location(path)
        values, *different = ([found.get(where) for found in one] for one in (alone, *others))
        is_number = all(type(value) in (int, float) for value in values[1:])
        is_alike = after.get(where) == values[1] and all(other[1:] == values[1:] for other in different)
        if is_number and is_alike and len(set(values)) > 1:
            counts.append(path)
    return tuple(counts)


def without(group: Mapping[str, Any], counts: Sequence[Path]) -> Mapping[str, Any]:
    """Return the group without the numbers that change."""
    return {name: value for name, value in group.items() if (name,) not in counts}


def advance(optimizer: torch.optim.Optimizer, of_groups: Mapping[int, Sequence[Path]]) -> None:
    """Change the numbers as one step of the optimizer does.

    Args:
        of_groups: the paths of the numbers, by number of the group; those of the optimizer itself may be in several.
    """
    found = []
    for index, counts in of_groups.items():
        if counts:
            group = optimizer.param_groups[index]
            found.append((group, counts, _after_step(optimizer, group)))
    for group, counts, twin in found:
        for path in counts:
            mapping, (name,) = place(optimizer, group, path)
            mapping[name] = place(twin, twin.param_groups[0], path)[0][name]


def _after_step(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Any:
    parameter = group["params"][0]
    shape = torch.Size((1,) * max(parameter.dim(), 1))
    return Sample(optimizer, group, shape, parameter.dtype, "cpu").after_step()
