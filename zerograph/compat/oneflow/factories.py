"""``flow.randn(..., placement=P, sbp=S0)``: torch's factories, which also create global tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerograph.compat.oneflow.placements import mesh_of
from zerograph.compat.oneflow.tensors import cut, whole_of
from zerograph.compiler.placement import to_global
from zerograph.errors import PlacementError
from zerograph.graph import building
from zerograph.ir.sbp import all_broadcast, nd_sbp

NAMES = (
    *("arange", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "randperm", "tensor", "zeros"),
    *("rand", "randint", "randn", "rand_like", "randint_like", "randn_like", "ones_like", "zeros_like"),
)


def _factory(name: str) -> Callable[..., Tensor]:
    plain: Callable[..., Tensor] = getattr(torch, name)

    @functools.wraps(plain, assigned=("__name__", "__doc__"), updated=())
    def make(*args: Any, placement: Any = None, sbp: Any = None, requires_grad: bool = False, **options: Any) -> Tensor:
        if placement is None and sbp is None:
            return plain(*args, requires_grad=requires_grad, **options)
        if placement is None or sbp is None:
            raise PlacementError(f"flow.{name}() of a global tensor needs both placement= and sbp=")
        if "device" in options:
            raise PlacementError(f"flow.{name}() takes device= for a local tensor, or placement= and sbp=, not both")
        mesh = mesh_of(placement)
        target_sbp = nd_sbp(sbp, mesh.ndim)
        if building():
            # Inside build() every tensor is global, and the compiler chooses its placement later.
            return plain(*args, requires_grad=requires_grad, device=mesh.device_type, **options)
        # Each rank draws its own random numbers, so all ranks take the first rank's whole tensor.
        value = plain(*map(_plain, args), **options).to(mesh.device_type)
        same = to_global(value, placement=mesh, sbp=all_broadcast(mesh.ndim))
        return cut(same.to_local(), mesh, target_sbp).requires_grad_(requires_grad)

    return make


def _plain(argument: Any) -> Any:
    return whole_of(argument) if isinstance(argument, Tensor) else argument


FACTORIES: dict[str, Callable[..., Tensor]] = {name: _factory(name) for name in NAMES}
