"""Find initial state from which a later update computes the first one, so that one compiled step does both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from zerograph.ir.metadata import meta
from zerograph.ir.step_graph import placeholders
from zerograph.optim.sampling import width

# Adding -0.0, or -0.0 times a positive number, changes no bit of a number, not even the sign of a zero.
# Adding 0.0 does: -0.0 + 0.0 is 0.0.
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
    """Return initial values of the state with which ``steady`` computes what ``first`` does, or None.

    Both graphs are run on many kinds of numbers, and must agree in every bit. SGD's momentum, which the first update
    sets to the gradient, starts as -0.0.

    Args:
        first: the traced graph of the first update.
        steady: the traced graph of later updates.
        initial: the constant that the first update creates each entry from; None for an entry that is computed.
        state: the entries after the first update.
        numbers: hyperparameters that are inputs, by name.
        shape: the shape that the graphs were traced for; None for any.
        dtype: the parameter's dtype.
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
        # The graph has operators of another device.
        return None
    return begin if agreeing else None


def _agree(
    first: fx.GraphModule,
    steady: fx.GraphModule,
    starts: Mapping[str, float],
    state: Mapping[str, Tensor],
    numbers: Mapping[str, float],
    values: Mapping[str, Tensor],
    trial: int,
) -> bool:
    """Run both graphs on the same values, and compare the parameter and the state after them."""
    scale = 1.0 + trial / 4
    sources: dict[str, Callable[[], Tensor]] = {name: value.clone for name, value in values.items()}
    sources["lr"] = lambda: torch.tensor(0.1 * scale, dtype=torch.float64)
    sources |= {name: _constant(value / scale, ()) for name, value in numbers.items()}
    for name, value in state.items():
        size = value.shape if values["param"].dim() != 1 or not value.dim() else values["param"].shape
        sources[name] = _constant(starts[name], size, width(value))
    results = []
    for graph in (first, steady):
        inputs = {
            meta(node)["update_input"]: sources[meta(node)["update_input"]]() for node in placeholders(graph.graph)
        }
        returned = graph(*inputs.values())
        left = dict(zip(state, returned, strict=True)) if graph is first else {name: inputs[name] for name in state}
        results.append({"param": inputs["param"], **left})
    return all(same_bits(results[0][name], results[1][name]) for name in results[0])


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal in every bit, except for the payload of NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    same = (first == second) & (first.signbit() == second.signbit()) if first.is_floating_point() else first == second
    return bool((same | (first.isnan() & second.isnan())).all())


def _constant(value: float, size: Sequence[int], dtype: torch.dtype = torch.float64) -> Callable[[], Tensor]:
    return lambda: torch.full(tuple(size), value, dtype=dtype)


def _values(size: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw a parameter and a gradient over many orders of magnitude, with special numbers if the shape is free."""
    values = {}
    for place, name in enumerate(("param", "grad")):
        value = torch.randn(size, generator=generator, dtype=torch.float64)
        value *= 10 ** torch.empty(size, dtype=torch.float64).uniform_(-6, 3, generator=generator)
        if tuple(size) == (_ELEMENTS,):
            pairs = torch.tensor(list(itertools.product(_SPECIAL, _SPECIAL)), dtype=torch.float64)
            value[: len(pairs)] = pairs[:, place]
        values[name] = value.to(dtype)
    return values
