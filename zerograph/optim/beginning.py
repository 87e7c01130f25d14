"""State of which the first update is a later one: then one compiled step does for both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from zerograph.ir.metadata import meta
from zerograph.ir.step_graph import placeholders
from zerograph.optim.sampling import width

# Added to a number, or multiplied by a positive number and then added, it leaves every bit of it, the sign of a zero
# included. Zero does not: -0.0 + 0.0 is 0.0.
_NEUTRAL = -0.0
_SPECIAL = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-30, -3e-39, 1e30, 0.1)
_ELEMENTS = 4096
_TRIALS = 3


def beginning(
    first: fx.GraphModule,
    steady: fx.GraphModule,
    initial: Mapping[str, float | None],
    state: Mapping[str, Tensor],
    numbers: Mapping[str, float],
    shape: Sequence[int] | None,
    dtype: torch.dtype,
) -> dict[str, float] | None:
    """Return the value of each entry of state, from which ``steady`` computes what ``first`` does, or None.

    Both are run on numbers of all kinds, and must agree in every bit. SGD's momentum, the first gradient, begins
    as -0.0.

    Args:
        first, steady: the graphs of the first update and of later ones, as they were traced.
        initial: what the first update makes entries of, where that is a constant.
        state: the entries as the first update leaves them.
        numbers: hyperparameters that are inputs, by name.
        shape: of the parameter for which the graphs were traced; None for any.
    """
    begin = {name: _NEUTRAL if value is None else value for name, value in initial.items()}
    if any(initial[name] is None and not value.is_floating_point() for name, value in state.items()):
        return None
    size = (_ELEMENTS,) if shape is None else tuple(shape)
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            agreeing = all(
                _agree(first, steady, begin, state, numbers, _values(size, dtype, generator), trial)
                for trial in range(_TRIALS)
            )
    except (RuntimeError, NotImplementedError):
        # Operators of another device.
        return None
    return begin if agreeing else None


def _agree(
    first: fx.GraphModule,
    steady: fx.GraphModule,
    begin: Mapping[str, float],
    state: Mapping[str, Tensor],
    numbers: Mapping[str, float],
    values: Mapping[str, Tensor],
    trial: int,
) -> bool:
    """Run both graphs on the same values, and compare the parameter and all state that they leave."""
    scale = 1.0 + trial / 4
    given: dict[str, Callable[[], Tensor]] = {name: value.clone for name, value in values.items()}
    given["lr"] = lambda: torch.tensor(0.1 * scale, dtype=torch.float64)
    given |= {name: _constant(value / scale, ()) for name, value in numbers.items()}
    for name, value in state.items():
        size = value.shape if values["param"].dim() != 1 or not value.dim() else values["param"].shape
        given[name] = _constant(begin[name], size, width(value))
    results = []
    for graph in (first, steady):
        inputs = {meta(node)["update_input"]: given[meta(node)["update_input"]]() for node in placeholders(graph.graph)}
        returned = graph(*inputs.values())
        left = dict(zip(state, returned, strict=True)) if graph is first else {name: inputs[name] for name in state}
        results.append({"param": inputs["param"], **left})
    return all(same_bits(results[0][name], results[1][name]) for name in results[0])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal in every bit, up to what a nan says beside being one."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    same = (one == other) & (one.signbit() == other.signbit()) if one.is_floating_point() else one == other
    return bool((same | (one.isnan() & other.isnan())).all())


def _constant(value: float, size: Sequence[int], dtype: torch.dtype = torch.float64) -> Callable[[], Tensor]:
    return lambda: torch.full(tuple(size), value, dtype=dtype)


def _values(size: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw a parameter and a gradient over many orders of magnitude, with special numbers where any shape will do."""
    values = {}
    for place, name in enumerate(("param", "grad")):
        value = torch.randn(size, generator=generator, dtype=torch.float64)
        value *= 10 ** torch.empty(size, dtype=torch.float64).uniform_(-6, 3, generator=generator)
        if tuple(size) == (_ELEMENTS,):
            pairs = torch.tensor(list(itertools.product(_SPECIAL, _SPECIAL)), dtype=torch.float64)
            value[: len(pairs)] = pairs[:, place]
        values[name] = value.to(dtype)
    return values
