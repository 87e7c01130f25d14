"""Find numbers of an optimizer, or of its groups, that count steps: they are inputs of the graph.

``group["step"] += 1`` and ``self.steps += 1`` change Python numbers, which a traced update would have as constants. The
graph reads the number before a step, and afterwards it is advanced as the optimizer's code does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from zerograph.ir.update_program import Path
from zerograph.optim.hyperparameters import OF_OPTIMIZER, place
from zerograph.optim.sampling import Sample

# The amount by which each number changes in a step, and what it is after the first step if it is not there before.
Counts = Mapping[Path, tuple[Any, Any]]


def counts_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Counts:
    """Find the numbers of an optimizer and of its group that change by the same amount in every step.

    Only numbers that change alike for any number of parameters and groups are among them.
    """
    if type(optimizer).__module__.startswith("torch.optim.") or not group["params"]:
        return {}
    parameter = group["params"][0]
    sample = Sample(optimizer, group, parameter.shape or torch.Size((1,)), parameter.dtype, parameter.device)
    try:
        alone, together = sample.numbers_over_steps(1, 1), sample.numbers_over_steps(2, 2)
    except Exception:
        # The trace of the update reports it.
        return {}
    counts: dict[Path, tuple[Any, Any]] = {}
    for where in alone[1]:
        in_group = re.fullmatch(r"param_groups\['(.*)'\]", where)
        path: Path = (in_group[1],) if in_group else (where, *OF_OPTIMIZER)
        values: list[Any] = [numbers.get(where) for numbers in alone[1:]]
        if not (in_group or where.isidentifier()) or values != [numbers.get(where) for numbers in together[1:]]:
            continue
        if all(type(value) in (int, float) for value in values):
            first, second, third = values
            if second != first and third - second == second - first:
                counts[path] = second - first, first
    return counts


def without(group: Mapping[str, Any], counts: Counts) -> Mapping[str, Any]:
    """Return the group without the numbers that count steps."""
    return {name: value for name, value in group.items() if (name,) not in counts}


def advance(optimizer: torch.optim.Optimizer, of_groups: Mapping[int, Counts]) -> None:
    """Advance the numbers as one step of the optimizer does.

    Args:
        of_groups: the numbers, by number of the group; those of the optimizer itself may be in several.
    """
    done: set[str] = set()
    for index, counts in of_groups.items():
        for path, (change, first) in counts.items():
            mapping, (name,) = place(optimizer, optimizer.param_groups[index], path)
            if mapping is vars(optimizer) and name in done:
                continue
            done |= {name} if mapping is vars(optimizer) else set()
            mapping[name] = mapping[name] + change if name in mapping else first  # type: ignore[index]
