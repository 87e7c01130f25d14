"""Check by running that an optimizer updates each parameter as it would alone: so the graph does.

The graph's update was traced for a parameter without attributes, the only one of its group. Here, steps of a twin with
a small parameter for each of the optimizer's, with its attributes and its place in groups and tables, are compared with
steps of twins that have one parameter.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph.errors import CaptureError
from zerograph.optim.surroundings import (
    constructed_for,
    copied,
    leaf_of,
    own_attributes,
    restored,
    single_process,
    state_like,
    twin_of,
)

_STEPS = 2
# Sizes are cut to this one, if the optimizer can be run so; such parameters are fp64.
_SMALL = 4
_TOLERANCE = 1e-4
_FACTORS = (1e3, float("nan"))


class _Rehearsal:
    """Steps of twins of an optimizer, on the CPU.

    Args:
        optimizer: the optimizer.
        small: cut sizes, and compute in fp64.

    Attributes:
        parameters: the optimizer's.
        starts: their values before the steps.
        after: their values after steps with all of them.
        after_alone: their values after steps of an optimizer that has no other.
    """

    def __init__(self, optimizer: Any, *, small: bool) -> None:
        self._optimizer = optimizer
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        generator = torch.Generator().manual_seed(0)
        self.starts, self._gradients = list[Tensor](), list[list[Tensor]]()
        for parameter in self.parameters:
            shape = [min(size, _SMALL) if small else size for size in parameter.shape]
            dtype = torch.float64 if small and parameter.dtype.is_floating_point else parameter.dtype
            start, *gradients = (
                torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(_STEPS + 1)
            )
            self.starts.append(start)
            self._gradients.append(gradients)
        self.after, self.after_alone = self.together([1.0] * len(self.parameters)), self._alone()

    def together(self, factors: Sequence[float]) -> list[Tensor]:
        """Return all parameters after steps with all of them, with their gradients scaled by these factors."""
        leaves = [leaf_of(start.clone(), start) for start in self.starts]
        for leaf, parameter in zip(leaves, self.parameters, strict=True):
            vars(leaf).update(own_attributes(parameter))
        of_parameters = {id(parameter): leaf for parameter, leaf in zip(self.parameters, leaves, strict=True)}
        groups = [copied(group, of_parameters) for group in self._optimizer.param_groups]
        return self._run(of_parameters, groups, self.parameters, leaves, self._gradients, factors)

    def _alone(self) -> list[Tensor]:
        results, number = [], 0
        # The optimizer may hold its parameters: a step must neither change them, nor find the leaf there.
        others = {id(parameter): start.clone() for parameter, start in zip(self.parameters, self.starts, strict=True)}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                leaf = leaf_of(self.starts[number].clone(), self.starts[number])
                own = [{**copied({**group, "params": ()}, others), "params": [leaf]}]
                results += self._run(others, own, [parameter], [leaf], [self._gradients[number]], [1.0])
                number += 1
        return results

    def _run(
        self,
        of_parameters: Mapping[int, Tensor],
        groups: list[dict[str, Any]],
        parameters: Sequence[Tensor],
        leaves: Sequence[nn.Parameter],
        gradients: Sequence[Sequence[Tensor]],
        factors: Sequence[float],
    ) -> list[Tensor]:
        twin = twin_of(self._optimizer, of_parameters)
        twin.param_groups, twin.state = groups, defaultdict(dict)
        for group in groups:
            # In a warm-up it may be 0.
            if (rate := group.get("lr", 0.0)) is not None:
                group["lr"] = torch.full_like(rate, 0.1) if isinstance(rate, Tensor) else 0.1
        for parameter, leaf in zip(parameters, leaves, strict=True):
            entries = _torch.initial_state(twin, leaf) or state_like(constructed_for(self._optimizer, parameter), leaf)
            if entries:
                twin.state[leaf] = entries
        step = _torch.unhooked_step(type(twin))
        with torch.no_grad(), _torch.compiling(), single_process():
            for at in range(_STEPS):
                for leaf, own, factor in zip(leaves, gradients, factors, strict=True):
                    leaf.grad = own[at] * factor
                step(twin)
        return [leaf.detach() for leaf in leaves]


def check_alone(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Check that the optimizer updates each parameter as it would alone.

    Args:
        optimizer: the optimizer.
        names: of its parameters, by ``id``.

    Raises:
        CaptureError: it updates one otherwise; names it.
    """
    one = _rehearsed(optimizer)
    for parameter, start, after, alone in zip(one.parameters, one.starts, one.after, one.after_alone, strict=True):
        if not _close(after, alone, start):
            raise CaptureError(
                f"{type(optimizer).__name__}.step() updates {names[id(parameter)]} in another way than a parameter "
                "alone in its group: by attributes of the parameter, by its place among the others, or by what the "
                "optimizer knows of it\nThe graph updates each parameter by itself. Make a group for each way, with "
                "hyperparameters of its own."
            )


def is_separate(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether no parameter's update changes with the other gradients, NaN included.

    Data flow cannot tell where an optimizer stacks parameters, and computes with each part of the stack. A step that
    fails with such gradients cannot tell either.
    """
    try:
        rehearsal = _rehearsed(optimizer)
        with restored(optimizer):
            return _is_separate(rehearsal)
    except Exception:
        return False


def _is_separate(rehearsal: _Rehearsal) -> bool:
    numbers = range(len(rehearsal.parameters))
    # Of any two parameters, one is among the changed ones and the other is not in some round.
    for bit, changed, factor in itertools.product(range(len(numbers).bit_length()), (0, 1), _FACTORS):
        results = rehearsal.together([factor if number >> bit & 1 == changed else 1.0 for number in numbers])
        for number in numbers:
            unchanged = number >> bit & 1 != changed
            if unchanged and not _close(results[number], rehearsal.after[number], rehearsal.starts[number]):
                return False
    return True


def _rehearsed(optimizer: torch.optim.Optimizer) -> _Rehearsal:
    # Where small ones fail, shapes or dtypes matter.
    for small in (True, False):
        try:
            with restored(optimizer):
                return _Rehearsal(optimizer, small=small)
        except Exception as error:
            problem = error
    raise CaptureError(
        f"{type(optimizer).__name__}.step() cannot be run for a copy of its parameters, nor for one of them alone: "
        f"{type(problem).__name__}: {problem}\nUse another optimizer."
    )


def _close(first: Tensor, second: Tensor, start: Tensor) -> bool:
    first, second, start = first.double(), second.double(), start.double()
    return bool((first - second).norm() <= _TOLERANCE * (second - start).norm())
