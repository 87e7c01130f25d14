"""Answer ``parameter.grad`` between ``backward()`` and the step: reading works, writing is an error.

The step computes, reduces and uses gradients in one graph. Code that reads them earlier gets the gradient of the whole
batch from a separate graph. Code that writes to them would have no effect, so it is an error with its line.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base import source
from zerograph.errors import CaptureError
from zerograph.loops.words import Words, speak, words
from zerograph.runtime.parameters import read_gradient_by


class Owner(Protocol):
    """The loop whose gradients are read."""

    words: Words

    def gradients(self) -> Mapping[nn.Parameter, Tensor] | None:
        """Compute the gradients of all losses since the last update; None if there is no loss."""

    def waits_for_step(self) -> bool:
        """Return whether there is a loss that no update has used yet."""

    def zeroed_by(self, owner: object) -> bool:
        """Discard all losses if ``owner``, whose ``zero_grad()`` runs, is the loop's model or optimizer."""

    def warn_of_reading_late(self) -> None:
        """Warn that gradients were read after the last update has used them."""


class Reader:
    """Answer ``parameter.grad`` for the parameters of a loop."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Answer for these parameters from now on."""
        for parameter in parameters:
            read_gradient_by(parameter, self)

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of the whole batch, equal on all ranks. A collective."""
        frame = _reader_frame()
        if frame is None or _is_ours(frame) or frame.f_code in _MOVING:
            return None
        speak(self._owner.words)
        if not self._owner.waits_for_step():
            if frame.f_code not in _ZEROING:
                self._owner.warn_of_reading_late()
            return None
        if frame.f_code in _ZEROING:
            if self._owner.zeroed_by(frame.f_locals.get("self")):
                return None
            _refuse(
                f"zero_grad() of some of the parameters of {words().model}, before {words().step}",
                f"Call {words().zero_grad}, which discards all losses since the last {words().step}.",
            )
        gradient = (self._owner.gradients() or {}).get(parameter)
        return None if gradient is None else gradient.as_subclass(Gradient)

    def write(self, parameter: nn.Parameter, value: Tensor | None) -> None:
        """Refuse to set or delete a gradient before the step has computed it.

        Raises:
            CaptureError: the step would not see it.
        """
        frame = _reader_frame()
        if frame is not None and not _is_ours(frame) and self._owner.waits_for_step():
            speak(self._owner.words)
            _refuse(f"parameter.grad is set or deleted before {words().step}", _advice())


class Gradient(Tensor):
    """A gradient that was read before the step: an ordinary tensor, except that writing to it is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        written = [kwargs["out"]] if "out" in kwargs else []
        if _writes(name) and args:
            written.append(args[0])
        if any(isinstance(leaf, Gradient) for leaf in pytree.tree_leaves(written)):
            _refuse(f"{name}() writes to a gradient that was read before {words().step}", _advice())
        with _torch.without_torch_function():
            result = func(*args, **kwargs)
        if func in (Tensor.numpy, Tensor.__array__):
            result.flags.writeable = False
            return result
        places = {_place(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Gradient)}

        def guarded(value: Tensor) -> Tensor:
            return value.as_subclass(cls) if _place(value) in places else value

        return pytree.tree_map_only(Tensor, guarded, result)


def _place(tensor: Tensor) -> int:
    with _torch.without_torch_function():
        return tensor.untyped_storage().data_ptr()


def _writes(name: str) -> bool:
    if name in ("__set__", "__delete__", "__setitem__"):
        return True
    if name.startswith("__"):
        # In-place operators such as __iadd__; __index__, __int__, __invert__ and __iter__ only read.
        return name.startswith("__i") and name not in ("__index__", "__int__", "__invert__", "__iter__")
    return name.endswith("_")


def _code(function: Callable[..., Any]) -> Any:
    return inspect.unwrap(function).__code__


_ZEROING = {_code(torch.optim.Optimizer.zero_grad), _code(nn.Module.zero_grad)}
# They copy or move a gradient if there is one.
_MOVING = {_code(nn.Module._apply), _code(Tensor.__deepcopy__)}


def _reader_frame() -> FrameType | None:
    """Return the frame that reads or sets ``grad``: the innermost one outside this module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "zerograph.runtime.parameters"):
        frame = frame.f_back
    return frame


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("zerograph.")


def _advice() -> str:
    return (
        "The step computes and uses gradients inside one graph: changes of parameter.grad would have no effect. "
        f"Clip by {words().clip}, change the loss, or write the step as a zg.ZeroGraph, whose build() may change "
        "gradients after loss.backward()."
    )


def _refuse(what: str, advice: str) -> NoReturn:
    line, code = source.running_line()
    raise CaptureError(f"{what}\n  {line}   {code}\n{advice}")
