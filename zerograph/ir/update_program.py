"""The update of one parameter as a graph: the description of an optimizer for passes and runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerograph.ops.blocks import Codec

Path = tuple[Any, ...]
"""Keys from a parameter group to one of its numbers: ``("lr",)``, ``("betas", 0)``."""


@dataclass(frozen=True)
class StateSpec:
    """One entry of an optimizer's state: shaped as the parameter, or a 0-d tensor.

    Attributes:
        scalar: the entry is a 0-d tensor.
        dtype: the dtype that the compiled update keeps.
        initial: the value before the first update if that is a constant; None if the first update computes it
            (SGD's momentum is the first gradient).
        plain_dtype: the dtype that the optimizer itself would keep.
        codec: how the entry is stored; None: as it is.
        number: "int" or "float", if the optimizer itself keeps such a number; None: a tensor.
    """

    scalar: bool
    dtype: torch.dtype
    initial: float | None
    plain_dtype: torch.dtype
    codec: Codec | None = None
    number: str | None = None

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype that a store keeps."""
        return self.dtype if self.codec is None else torch.uint8


@dataclass(frozen=True, eq=False)
class UpdateProgram:
    """The update of one parameter as a functional graph.

    Its placeholders are the parameter, the gradient, the state and the lifted hyperparameters, by name; its results
    are written by ``copy_`` nodes.

    Attributes:
        optimizer: class name of the optimizer.
        key: equal for equal programs; it does not contain the shape of an elementwise one.
        graph: every update but the first.
        first: the first update if it differs from later ones, else None.
        fused: the update by the optimizer's own fused in-place operators, if its group has ``fused=True`` and they
            fit every update, else None.
        state: the entries of the state, by name.
        operators: number of operators in ``graph``.
        mixes: the operator that is not elementwise, and its source line; None if all are elementwise.
        any_shape: parameters of every shape have this program: it is elementwise and reads no size.
        shapes: shapes of the state's entries if ``mixes``.
        numbers: path of each lifted hyperparameter, by input name.
        thresholds: constants that the optimizer compares lifted hyperparameters with, by input name.
    """

    optimizer: str
    key: str
    graph: fx.GraphModule
    first: fx.GraphModule | None
    fused: fx.GraphModule | None
    state: Mapping[str, StateSpec]
    operators: int
    mixes: str | None
    any_shape: bool
    shapes: Mapping[str, tuple[int, ...]]
    numbers: Mapping[str, Path]
    thresholds: Mapping[str, set[float]]

    @property
    def is_coded(self) -> bool:
        """True if an entry of the state is stored in coded form."""
        return any(spec.codec is not None for spec in self.state.values())
