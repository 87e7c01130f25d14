"""Tensors that are not computed yet: what the model returns in training, until ``engine.step()`` makes the step.

Operators on them are noted on a tape; a value that is asked for is computed, see :mod:`.tape`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

import torch
from torch import Tensor

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base import source
from zerograph.errors import CaptureError
from zerograph.runtime.parameters import METADATA

# How a tensor without a batch dimension was made of one with it.
Comes = Literal["sum", "mean"] | None


@dataclass(frozen=True)
class Meta:
    """What a tensor looks like.

    Attributes:
        shape: that of this rank's part, for one call of the engine.
        whole: that of the global tensor in the step, which all ranks' parts of all its calls make up together.
        comes: it is a sum, or a mean, over the batch; None: neither, or unknown.
        divided: by a number or tensor from outside, which may be a count of samples.
    """

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False
    comes: Comes = None
    divided: bool = False

    @property
    def batch_dim(self) -> int | None:
        """Batch dimension; None if there is none, or if one part is the whole batch."""
        return next((dim for dim, size in enumerate(self.shape) if self.whole[dim] != size), None)

    def parted(self, parts: int) -> bool:
        """Return whether the global tensor is ``parts`` of these along one dimension, or has the same shape."""
        if len(self.shape) != len(self.whole):
            return False
        other = [dim for dim, size in enumerate(self.shape) if self.whole[dim] != size]
        return not other or (len(other) == 1 and self.whole[other[0]] == self.shape[other[0]] * parts)


@dataclass(frozen=True, order=True)
class Made:
    """Number ``leaf`` of what call number ``call`` returned."""

    call: int
    leaf: int


class Recorder(Protocol):
    """What a deferred tensor asks of the tape that it is on."""

    @property
    def finished(self) -> bool:
        """Whether the step has computed all values."""

    @property
    def closed(self) -> bool:
        """Whether nothing more is recorded."""

    def value(self, deferred: Deferred) -> Tensor:
        """Compute a value now."""

    def call(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Record a call."""


class Deferred(Tensor):
    """A tensor whose values are computed with the step; it becomes an ordinary one then, in place.

    Until then it has a shape, a dtype and a device, and remembers what is done to it.
    """

    made: Made
    tape: Recorder
    meta: Meta
    known: Tensor | None

    @staticmethod
    def __new__(cls, meta: Meta, tape: Recorder, made: Made) -> Deferred:
        """Make a tensor without data."""
        new: Deferred = _torch.tensor_without_data(
            cls, meta.shape, meta.dtype, meta.device, requires_grad=meta.requires_grad
        )
        new.meta, new.tape, new.made, new.known = meta, tape, made, None
        return new

    def __init__(self, meta: Meta, tape: Recorder, made: Made) -> None:
        """Accept the arguments of ``__new__``, which torch's own ``__init__`` does not."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS:
            with _torch.without_torch_function():
                return func(*args, **kwargs)
        if (why := _refused(func)) is not None:
            _refuse(f"{name_of(func)} {why}")
        given = list(deferred_in((args, kwargs)))
        if not given:
            _refuse(f"{name_of(func)} takes a tensor out of a slice, or of something else that hides it")
        if func in _READS or all(one.known is not None and one.tape.finished for one in given):
            return read(func, args, kwargs)
        if func is Tensor.__iter__:
            return iter(args[0].unbind(0))
        return _tape_of(given).call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        _refuse(f"{func} reaches a tensor that engine.step() has yet to compute, past all that could note it down")


def values_of(tree: Any) -> Any:
    """Return the same nesting with every deferred tensor replaced by its value. A collective."""
    return pytree.tree_map_only(Deferred, lambda one: one.tape.value(one), tree)


def deferred_in(tree: Any) -> Iterator[Deferred]:
    """Iterate over the deferred tensors in a nesting."""
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Deferred))


def read(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call ``function`` on values."""
    args, kwargs = values_of((args, dict(kwargs)))
    return function(*args, **kwargs)


def name_of(function: Any) -> str:
    """Return a name for messages: ``cross_entropy()``, ``.T`` for an attribute, ``Linear()`` for a module."""
    name = getattr(function, "__name__", type(function).__name__)
    return f".{function.__self__.__name__}" if name in ("__get__", "__set__", "__delete__") else f"{name}()"


def _tape_of(given: list[Deferred]) -> Recorder:
    """Return the arguments' tape that is still being recorded, else the first argument's."""
    return next((one.tape for one in given if not one.tape.closed), given[0].tape)


def _refuse(what: str) -> NoReturn:
    line, code = source.running_line()
    raise CaptureError(
        f"{what}\n  {line}   {code}\n"
        "Between engine(...) and engine.step() only operators on tensors are noted; after engine.step() the tensor is "
        "an ordinary one."
    )


def _refused(function: Any) -> str | None:
    name = getattr(function, "__name__", "")
    if name in ("__set__", "__delete__"):
        return "is set on a tensor that engine.step() has yet to compute"
    if (getattr(function, "__module__", None) or "").startswith("torch.distributed"):
        return "exchanges values that are not there yet: losses are those of the whole batch anyway"
    return _REFUSED.get(name)


_LOOKS: set[Any] = {
    *(one for one in METADATA if getattr(one, "__name__", "") not in ("__set__", "__delete__", "requires_grad_")),
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.get_device,
}

_READS: set[Any] = {
    *(getattr(Tensor, name) for name in ("item", "tolist", "numpy", "is_nonzero", "equal", "allclose")),
    *(getattr(Tensor, f"__{name}__") for name in ("bool", "int", "float", "complex", "index", "repr", "format")),
    *(getattr(Tensor, f"__{name}__") for name in ("array", "contains", "deepcopy", "reduce_ex", "dlpack")),
    torch.equal,
    torch.allclose,
    torch.is_nonzero,
}

_BACKWARD = "was called on what the engine returned: call engine.backward(loss), and engine.step() makes the step"
_REFUSED = {
    "backward": _BACKWARD,
    "grad": "asks for gradients, which exist inside the step only: engine.backward(loss) is all that it takes",
    "register_hook": "waits for a gradient, which exists inside the step only",
    "retain_grad": "asks for a gradient that the step does not keep",
    "requires_grad_": "changes what gets a gradient: use detach()",
    "data_ptr": "asks where values lie that are not there yet",
    "untyped_storage": "asks where values lie that are not there yet",
}
