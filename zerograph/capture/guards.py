"""What Python code in ``build()`` may branch on or compute with: attributes that a captured graph depends on."""

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
    """An object that equals itself alone, and is alive as long as this; reads alike on all ranks."""

    def __init__(self, one: object) -> None:
        self._one = one

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other._one is self._one

    def __hash__(self) -> int:
        return id(self._one)

    def __repr__(self) -> str:
        if isinstance(self._one, Tensor):
            return f"tensor of shape {tuple(self._one.shape)} and {self._one.dtype}"
        return str(getattr(self._one, "__qualname__", type(self._one).__qualname__))


def module_guards(root: nn.Module) -> tuple[Any, ...]:
    """Of a module and those inside: classes, modes, numbers and flags, plain tensors, functions, and hooks."""
    return tuple(
        (name, type(module).__qualname__, (*_own(module), *map(Identity, module_hooks(module))))
        for name, module in root.named_modules()
    )


def build_guards(build: Callable[..., Any], root: nn.Module) -> tuple[Any, ...]:
    """Return the facts of the modules, and of the graph whose ``build`` it is."""
    owner = getattr(build, "__self__", None)
    return module_guards(root), () if owner is None else attribute_guards(vars(owner))


def _own(module: nn.Module) -> Guards:
    """Return a module's own facts; of a wrapper that tracing sees through none, for they differ between ranks."""
    return () if is_seen_through(module) else attribute_guards(vars(module), private=True)


def attribute_guards(attributes: Mapping[str, Any], *, private: bool = False) -> Guards:
    """Numbers, flags and tuples of them; tensors and functions, which are others once they are replaced.

    What is in lists, dicts and other objects is left out: those may grow with every step. ``private``: numbers and
    flags in attributes that begin with an underscore count, too.
    """
    return tuple(_found(attributes, private=private))


def _found(attributes: Mapping[str, Any], *, private: bool) -> Iterator[tuple[str, Any]]:
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
    return isinstance(value, tuple) and all(one is None or isinstance(one, _NUMBERS) or _is_plain(one) for one in value)
