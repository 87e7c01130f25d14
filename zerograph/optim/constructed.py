"""State that a user's optimizer creates in its constructor, and that its first ``step()`` needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.errors import CaptureError
from zerograph.optim.surroundings import is_known, leaf_of, restored, single_process, twin_of
from zerograph.runtime.state import own_state


@dataclass(frozen=True)
class _Form:
    """A tensor of the state. Its values are loaded into the step; a trace has one number in their place.

    Attributes:
        shape: None for the parameter's own shape.
        number: the value of all elements if they are equal, else 1.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    number: Any = field(compare=False, repr=False)

    @classmethod
    def of(cls, value: Tensor, parameter: Tensor) -> _Form:
        """Return the form of a tensor of a parameter's state."""
        first = value.flatten()[:1]
        number = first.item() if value.numel() and bool((value == first).all()) else 1
        return cls(None if value.shape == parameter.shape else tuple(value.shape), value.dtype, number)

    def like(self, leaf: Tensor) -> Tensor:
        """Return a tensor of this form for another parameter."""
        if self.shape is None:
            return torch.full_like(leaf, self.number, dtype=self.dtype)
        return torch.full(self.shape, self.number, dtype=self.dtype, device=leaf.device if self.shape else "cpu")


@dataclass(frozen=True)
class Constructed:
    """The state of a parameter as the optimizer's constructor has left it.

    Attributes:
        entries: it has forms in place of tensors.
    """

    entries: Mapping[str, Any]

    def like(self, leaf: Tensor) -> dict[str, Any]:
        """Return such state for another parameter."""
        entries: dict[str, Any] = pytree.tree_map_only(_Form, lambda form: form.like(leaf), dict(self.entries))
        return entries


_NONE = Constructed({})


def constructed_for(optimizer: Any, parameter: Tensor) -> Constructed:
    """Return the state that the constructor has made for a parameter; it is empty if ``step()`` can do without.

    It is noted on the optimizer, whose state moves into the graph.
    """
    if is_known(optimizer):
        return _NONE
    noted: dict[int, Constructed] = vars(optimizer).setdefault("_zerograph_constructed", {})
    entries = own_state(optimizer).get(parameter)
    if entries and id(parameter) not in noted:
        forms = pytree.tree_map_only(Tensor, lambda value: _Form.of(value, parameter), dict(entries))
        noted[id(parameter)] = _NONE if _begins_empty(optimizer, parameter) else Constructed(forms)
    return noted.get(id(parameter), _NONE)


def constructed_of(optimizer: Any, group: Mapping[str, Any], shape: torch.Size, dtype: torch.dtype) -> Constructed:
    """Return :func:`constructed_for` the parameters of a group with this shape; of its first one if there is none.

    Raises:
        CaptureError: it is not the same for all of them.
    """
    if is_known(optimizer) or not group["params"]:
        return _NONE
    alike = [one for one in group["params"] if (one.shape or (1,)) == shape and one.dtype == dtype]
    first, *others = [constructed_for(optimizer, one) for one in alike or group["params"][:1]]
    if any(one != first for one in others):
        raise CaptureError(
            f"{type(optimizer).__name__} has other state for some parameters of shape {tuple(shape)} than for others\n"
            "Create the same state for all parameters of a group, or make a group for each kind."
        )
    return first


def _begins_empty(optimizer: Any, parameter: Tensor) -> bool:
    """Return whether a first step of a twin creates its state."""
    group = next(one for one in optimizer.param_groups if any(parameter is other for other in one["params"]))
    value = torch.ones((1,) * max(parameter.dim(), 1), dtype=parameter.dtype)
    twin = twin_of(optimizer, {})
    twin.param_groups, twin.state = [{**group, "params": [leaf_of(value, value.clone())]}], defaultdict(dict)
    try:
        with restored(optimizer), torch.no_grad(), _torch.compiling(), single_process():
            _torch.unhooked_step(type(twin))(twin)
    except KeyError:
        return False
    except Exception:
        # The trace of the update reports it.
        return True
    return True
