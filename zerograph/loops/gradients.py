"""Answer ``parameter.grad`` between ``backward()`` and the step: a copy of the whole gradient, which may be changed.

The ranks keep split sums of gradients, see :mod:`.accumulation`. A gradient is gathered when the loop reads it. What
the loop writes to it, in place or by setting ``parameter.grad``, each rank writes to its part of the sum.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.base import source
from zerograph.errors import CaptureError, InputError
from zerograph.loops.words import Words, speak, words
from zerograph.runtime.parameters import read_gradient_by


class Owner(Protocol):
    """The loop whose gradients are read."""

    words: Words

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a new tensor with the whole gradient of the losses since the last update. A collective."""

    def check_writable(self, what: str) -> None:
        """Raise if the loop cannot change gradients before the step.

        Args:
            what: the beginning of the message.

        Raises:
            CaptureError: with the user's line.
        """

    def set_gradient(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Replace a gradient before the step; None: the step leaves the parameter out."""

    def waits_for_step(self) -> bool:
        """Return whether there is a loss that no update has used yet."""

    def zeroed_by(self, owner: object) -> bool:
        """Discard all losses if ``owner``, whose ``zero_grad()`` runs, is the loop's model or optimizer.

        Returns:
            Whether that is done; if not, ``owner`` sets each gradient.

        Raises:
            CaptureError: the loop cannot change gradients before the step.
        """

    def discarded(self, parameter: nn.Parameter) -> None:
        """Note that ``parameter.grad`` was set to None where no loss waits for a step."""

    def warn_of_reading_late(self) -> None:
        """Warn that gradients were read after the last update has used them."""


@dataclass(eq=False)
class _Home:
    """A gradient that was read.

    Attributes:
        owner: the loop.
        parameter: the parameter.
        whole: the whole gradient.
        stale: it is not the gradient that the next step uses any more.
    """

    owner: Owner
    parameter: nn.Parameter
    whole: Tensor
    stale: bool = False


class Reader:
    """Answer ``parameter.grad`` for the parameters of a loop."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        # The gradients that the loop has read and still refers to.
        self._homes: weakref.WeakValueDictionary[int, _Home] = weakref.WeakValueDictionary()
        # Parameters with a gradient in PyTorch that no step computes, by id.
        self._refused: dict[int, nn.Parameter] = {}

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Answer for these parameters from now on.

        Raises:
            CaptureError: one of them has a gradient in PyTorch that no step has computed.
        """
        for parameter in parameters:
            if id(parameter) in self._refused:
                _refuse(
                    f"a parameter of shape {tuple(parameter.shape)} gets an optimizer, and has a gradient already",
                    "Clear it first, by model.zero_grad() for instance.",
                )
        for parameter in parameters:
            read_gradient_by(parameter, self)

    def refuse(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make reading the gradient of these parameters an error until it is cleared.

        No prepared optimizer trains them. One that is not prepared would leave them as they are, without a word.
        """
        self.watch([one for one in parameters if id(one) not in self._refused])
        self._refused |= {id(one): one for one in parameters}

    def settle(self, parameter: nn.Parameter) -> None:
        """Do nothing: a gradient that is stored is whole."""

    def clear(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that the gradients of these parameters were cleared."""
        for parameter in parameters if self._refused else ():
            self._refused.pop(id(parameter), None)

    def forget(self) -> None:
        """Note that gradients which were read are not those of the next step any more."""
        for home in self._homes.values():
            home.stale = True
        self._homes.clear()

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of the whole batch, equal on all ranks. A collective."""
        frame = _reader_frame()
        if frame is None or _is_ours(frame) or frame.f_code in _MOVING:
            return None
        speak(self._owner.words)
        if id(parameter) in self._refused:
            if frame.f_code not in _ZEROING:
                _refuse(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} that no prepared optimizer trains",
                    "Pass its optimizer to the same zg.prepare(), or freeze it with requires_grad_(False).",
                )
            self.clear([parameter])
            return None
        if not self._owner.waits_for_step():
            if frame.f_code not in _ZEROING:
                self._owner.warn_of_reading_late()
            return None
        if frame.f_code in _ZEROING and self._owner.zeroed_by(frame.f_locals.get("self")):
            return None
        gradient = self._owner.gradient(parameter)
        home = self._homes.get(id(parameter))
        if gradient is None or home is None:
            if gradient is None:
                return None
            home = self._homes[id(parameter)] = _Home(self._owner, parameter, gradient)
        return _guarded(home.whole, home)

    def write(self, parameter: nn.Parameter, value: Tensor | None) -> bool:
        """Set or delete a gradient; return whether the loop has it now.

        Raises:
            CaptureError: the loop cannot change gradients.
            InputError: the gradient has another shape than its parameter.
        """
        frame = _reader_frame()
        if frame is None or _is_ours(frame):
            return False
        self.clear([parameter])
        speak(self._owner.words)
        if not self._owner.waits_for_step():
            if value is None:
                self._owner.discarded(parameter)
            return False
        self._owner.check_writable("parameter.grad is set or deleted")
        if value is not None and value.shape != parameter.shape:
            raise InputError(
                f"parameter.grad is set to a tensor of shape {tuple(value.shape)}; the parameter has the shape "
                f"{tuple(parameter.shape)}"
            )
        home = self._homes.get(id(parameter))
        if home is None or not isinstance(value, Gradient) or value.home is not home:
            if home is not None:
                home.stale = True
                del self._homes[id(parameter)]
            with _torch.without_torch_function():
                self._owner.set_gradient(parameter, value)
        return True


class Gradient(Tensor):
    """A gradient that was read before the step, or a view of one. Writing to it changes the gradient of the step.

    Attributes:
        home: the gradient.
    """

    home: _Home

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        targets = [kwargs["out"]] if "out" in kwargs else []
        if _writes(name) and args:
            targets.append(args[0])
        written = [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, Gradient)]
        homes = {id(leaf.home): leaf.home for leaf in written}
        for home in homes.values():
            home.owner.check_writable(f"{name}() writes to a gradient that was read")
            if home.stale:
                _refuse(
                    f"{name}() writes to a gradient that was read before another {words().backward}",
                    "Read parameter.grad again.",
                )
        with _torch.without_torch_function():
            result = func(*args, **kwargs)
            for home in homes.values():
                home.owner.set_gradient(home.parameter, home.whole)
        if func in (Tensor.numpy, Tensor.__array__):
            result.flags.writeable = False
            return result
        places = {_place(leaf): leaf.home for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Gradient)}

        def guarded(value: Tensor) -> Tensor:
            home = places.get(_place(value))
            return value if home is None or isinstance(value, Gradient) else _guarded(value, home)

        return pytree.tree_map_only(Tensor, guarded, result)


def _guarded(value: Tensor, home: _Home) -> Gradient:
    gradient = value.as_subclass(Gradient)
    gradient.home = home
    return gradient


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


def refuse_writing(what: str) -> NoReturn:
    """Raise a CaptureError: the loop's steps compute and use gradients in one graph."""
    _refuse(
        f"{what} before {words().step}",
        "The step computes and uses gradients inside one graph: changes of parameter.grad would have no effect. "
        f"Clip by {words().clip}, change the loss, or write the step as a zg.ZeroGraph, whose build() may change "
        "gradients after loss.backward().",
    )


def refuse_clearing_some() -> NoReturn:
    """Raise a CaptureError: the loop's steps use all gradients, or none."""
    _refuse(
        f"zero_grad() of some of the parameters of {words().model}, before {words().step}",
        f"Call {words().zero_grad}, which discards all losses since the last {words().step}.",
    )


def _refuse(what: str, advice: str) -> NoReturn:
    line, code = source.running_line()
    raise CaptureError(f"{what}\n  {line}   {code}\n{advice}")
