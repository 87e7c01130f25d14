"""The blocks of a model: the modules that it repeats, read off its module tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def repeated_blocks(module: nn.Module, path: str = "") -> Iterator[str]:
    """Qualified names of the blocks in ``module``, in order.

    A block is one of several children of a container that counts them, as ``nn.ModuleList`` and ``nn.Sequential`` do,
    with others of its class there, and made of modules itself. Where such children differ in their parameters and
    contain blocks, those are meant: the stages of a Swin transformer are none, its layers are.
    """
    counted = [child for name, child in module.named_children() if name.isdigit()]
    for name, child in module.named_children():
        inner = list(repeated_blocks(child, f"{path}.{name}" if path else name))
        alike = [one for one in counted if type(one) is type(child)] if name.isdigit() else []
        is_block = len(alike) > 1 and any(True for _ in child.children())
        if is_block and (not inner or len({_structure(one) for one in alike}) == 1):
            yield f"{path}.{name}" if path else name
        else:
            yield from inner


def _structure(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, parameter.shape) for name, parameter in module.named_parameters())
