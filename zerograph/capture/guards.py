"""Guards: values of attributes that Python code in ``build()`` may branch on or compute with.

A captured graph is valid while its guards are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zerograph._torch import module_hooks
from zerograph.capture.wrappers import is_seen_through

Guards = tuple[tuple[str, Any], ...]

_NUMBERS = (bool, int, float, str)


class Identity:
    """A guard on an object's identity: equal to guards on the same object, which it keeps alive.

    Its text is the same on all ranks.
    """

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)

    def __repr__(self) -> str:
        if isinstance(self._value, Tensor):
            return f"tensor of shape {tuple(self._value.shape)} and {self._value.dtype}"
        return str(getattr(self._value, "__qualname__", type(self._value).__qualname__))


def module_guards(root: nn.Module) -> tuple[Any, ...]:
    """Return the guards of a module and its submodules: class, mode, numbers, flags, tensors, functions and hooks."""
    return tuple(
        (name, type(module).__qualname__, (*_attributes_of(module), *map(Identity, module_hooks(module))))
        for name, module in root.named_modules()
    )


def build_guards(build: Callable[..., Any], root: nn.Module) -> tuple[Any, ...]:
    """Return the guards of the modules, and of the graph that ``build`` is a method of."""
    owner = getattr(build, "__self__", None)
    return module_guards(root), () if owner is None else attribute_guards(vars(owner))


def _attributes_of(module: nn.Module) -> Guards:
    """Return a module's guards; none of a wrapper that tracing sees through, whose attributes differ between ranks."""
    return () if is_seen_through(module) else attribute_guards(vars(module), private=True)


def attribute_guards(attributes: Mapping[str, Any], *, private: bool = False) -> Guards:
    """Return the guards of attributes: numbers, flags, tuples of them, and the identity of tensors and functions.

    The contents of lists, dicts and other objects are no guards: they may grow with every step.

    Args:
        attributes: values by name.
        private: include numbers and flags in attributes that begin with an underscore.
    """
    return tuple(_guards(attributes, private=private))


def _guards(attributes: Mapping[str, Any], *, private: bool) -> Iterator[tuple[str, Any]]:
    for name, value in attributes.items():
        if isinstance(value, _NUMBERS):
            if private or name[0] != "_":
                yield name, value
        elif name[0] == "_" or isinstance(value, (nn.Module, type, list, dict)):
            continue
        elif value is None or isinstance(value, (torch.dtype, torch.device)) or _is_plain(value):
            yield name, value
        elif isinstance(value, Tensor) or callable(value):
            yield name, Identity(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        entry is None or isinstance(entry, _NUMBERS) or _is_plain(entry) for entry in value
    )
