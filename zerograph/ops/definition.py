"""Define the operators of the namespace ``zerograph``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerograph._torch import OpOverload

_library = torch.library.Library("zerograph", "FRAGMENT")


def define(name: str, schema: str, run: Callable[..., Any] | None, fake: Callable[..., Any]) -> OpOverload:
    """Define the operator ``zerograph::name``, and return it.

    Args:
        schema: ``(Tensor x) -> Tensor``.
        run: computes it on any device; None if :func:`implement` is called later.
        fake: computes it on fake tensors.
    """
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"zerograph::{name}", fake, lib=_library)
    operator: OpOverload = getattr(torch.ops.zerograph, name).default
    if run is not None:
        implement(operator, run)
    return operator


def implement(operator: OpOverload, run: Callable[..., Any], *keys: str) -> None:
    """Let ``run`` compute an operator on devices: ``"CPU"``, ``"CUDA"``; without ``keys`` on all."""
    for key in keys or ("CompositeExplicitAutograd",):
        _library.impl(operator, run, key)
