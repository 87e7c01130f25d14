"""Deferred tensors: results of recorded calls, which the step computes.

Operators on them are recorded on a tape. Reading a value computes it at once, see :mod:`.tape`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base import source
from zerograph.errors import CaptureError
from zerograph.loops.words import Words, speak, words
from zerograph.runtime.parameters import METADATA

P = ParamSpec("P")
R = TypeVar("R")

# How a tensor without a batch dimension was computed from a tensor with one.
Reduction = Literal["sum", "mean"] | None


@dataclass(frozen=True)
class Meta:
    """Shape, dtype and other metadata of a tensor.

    Attributes:
        shape: the shape of this rank's part, in one recorded forward.
        whole: the shape of the global tensor in the step, of all ranks and all calls of the update.
        dtype: the dtype.
        device: the device.
        requires_grad: whether it depends on a trained parameter.
        reduction: ``"sum"`` or ``"mean"`` over the batch; None: neither, or unknown.
        counts: possible counts of this rank's samples, of a tensor without a batch dimension.
        divided: it was divided by a number or tensor from outside the step, which may be a count of samples.
    """

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False
    reduction: Reduction = None
    counts: frozenset[int] = frozenset()
    divided: bool = False

    @property
    def batch_dim(self) -> int | None:
        """The batch dimension; None if there is none, or if one part is the whole batch."""
        return next((dim for dim, size in enumerate(self.shape) if self.whole[dim] != size), None)

    def parted(self, parts: int) -> bool:
        """Return whether the global tensor is ``parts`` times as large in one dimension, or has the same shape."""
        if len(self.shape) != len(self.whole):
            return False
        other = [dim for dim, size in enumerate(self.shape) if self.whole[dim] != size]
        return not other or (len(other) == 1 and self.whole[other[0]] == self.shape[other[0]] * parts)


@dataclass(frozen=True, order=True)
class Result:
    """A result on the tape: leaf number ``leaf`` of call number ``call``."""

    call: int
    leaf: int


class Recorder(Protocol):
    """The part of a tape's interface that a deferred tensor uses."""

    words: Words

    takes_backward: bool

    def is_over(self, deferred: Deferred) -> bool:
        """Return whether operators on the tensor compute with its value, because the step is over."""

    def backward(self, loss: Deferred, *args: Any, **kwargs: Any) -> None:
        """Record ``loss.backward()``."""

    @property
    def finished(self) -> bool:
        """True if the step has computed all values."""

    @property
    def closed(self) -> bool:
        """True if nothing more is recorded."""

    def value(self, deferred: Deferred) -> Tensor:
        """Return the value, computing it if necessary."""

    def call(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Record a call."""


class Deferred(Tensor):
    """A tensor without data, whose value the step computes. The step turns it into an ordinary tensor, in place.

    Before that it has a shape, a dtype and a device, and records operators on it.

    Attributes:
        result: its place on the tape.
        tape: the tape.
        meta: its metadata.
        value: its value once it is computed.
        freed: a step has run ``backward()`` through it.
    """

    result: Result
    tape: Recorder
    meta: Meta
    value: Tensor | None
    freed: bool

    @staticmethod
    def __new__(cls, meta: Meta, tape: Recorder, result: Result) -> Deferred:
        """Create a tensor without data."""
        new: Deferred = _torch.tensor_without_data(
            cls, meta.shape, meta.dtype, meta.device, requires_grad=meta.requires_grad
        )
        new.meta, new.tape, new.result, new.value, new.freed = meta, tape, result, None, False
        return new

    def __init__(self, meta: Meta, tape: Recorder, result: Result) -> None:
        """Accept the arguments of ``__new__``, which torch's own ``__init__`` does not."""

    def as_output(self) -> Tensor:
        """Return the value. A collective; other results of the same calls may be ordinary tensors then."""
        return self.tape.value(self).detach()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS:
            with _torch.without_torch_function():
                return func(*args, **kwargs)
        deferred = list(deferred_in((args, kwargs)))
        if deferred:
            speak(_tape_of(deferred).words)
        if (why := _refused(func)) is not None and not (func is Tensor.backward and deferred[0].tape.takes_backward):
            _refuse(f"{name_of(func)} {why}")
        if not deferred:
            _refuse(f"{name_of(func)} has a deferred tensor inside a slice or another object that hides it")
        if func is Tensor.backward and (recorder := _tape_of(deferred)).takes_backward:
            return recorder.backward(*args, **kwargs)
        if func in _READS or all(tensor.tape.is_over(tensor) for tensor in deferred):
            return read(func, args, kwargs)
        if func is Tensor.__iter__:
            return iter(args[0].unbind(0))
        return _tape_of(deferred).call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        _refuse(f"{func} runs on a tensor that {words().step} has yet to compute, by a way that cannot be recorded")


def outside_inference_mode(method: Callable[P, R]) -> Callable[P, R]:
    """Return a method that leaves ``torch.inference_mode``: tensors made in it could not be used outside of it."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return run


_replaying: ContextVar[bool] = ContextVar("replaying", default=False)


@contextlib.contextmanager
def replaying() -> Iterator[None]:
    """Run calls that were recorded: modules compute inside the block, and record nothing."""
    token = _replaying.set(True)
    try:
        yield
    finally:
        _replaying.reset(token)


def is_replaying() -> bool:
    """Return whether recorded calls are being run."""
    return _replaying.get()


def values_of(tree: Any) -> Any:
    """Return the same nesting with every deferred tensor replaced by its value. A collective."""
    return pytree.tree_map_only(Deferred, lambda tensor: tensor.tape.value(tensor), tree)


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


def _tape_of(tensors: list[Deferred]) -> Recorder:
    """Return the arguments' tape that is still being recorded, else the first argument's."""
    return next((tensor.tape for tensor in tensors if not tensor.tape.closed), tensors[0].tape)


def _refuse(what: str) -> NoReturn:
    line, code = source.running_line()
    raise CaptureError(
        f"{what}\n  {line}   {code}\n"
        f"Between {words().call} and {words().step} only operators on tensors are recorded; after {words().step} the "
        "tensor is an ordinary one."
    )


def _refused(function: Any) -> str | None:
    name = getattr(function, "__name__", "")
    if name in ("__set__", "__delete__"):
        return f"is set on a tensor that {words().step} has yet to compute"
    if (getattr(function, "__module__", None) or "").startswith("torch.distributed"):
        return "exchanges values that are not computed yet: losses are those of the whole batch anyway"
    if name == "backward":
        return f"was called on a result of {words().model}: call {words().backward}, and {words().step} makes the step"
    return _REFUSED.get(name)


_LOOKS: set[Any] = {
    *(
        function
        for function in METADATA
        if getattr(function, "__name__", "") not in ("__set__", "__delete__", "requires_grad_")
    ),
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

_IN_BUILD = (
    "A penalty on gradients, such as WGAN-GP's, is computed in the build() of a zg.ZeroGraph: "
    "torch.autograd.grad(create_graph=True) works there"
)
_REFUSED = {
    "grad": f"asks for gradients, which exist inside the step only. {_IN_BUILD}",
    "register_hook": "waits for a gradient, which exists inside the step only",
    "retain_grad": "asks for a gradient that the step does not keep",
    "requires_grad_": f"changes what gets a gradient. {_IN_BUILD}",
    "data_ptr": "asks for the memory of values that are not computed yet",
    "untyped_storage": "asks for the memory of values that are not computed yet",
}


_torch.not_compiled(vars(Deferred)["__torch_function__"].__func__)
