"""Placements and global tensors of the public API: a placement is a device mesh, a global tensor is a DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zerograph.errors import PlacementError
from zerograph.ir.annotate import replace_tensors
from zerograph.ir.sbp import NdSbp, Sbp, Split, broadcast, is_dtensor, nd_sbp, partial_sum, to_dtensor
from zerograph.runtime.job.process_group import initialise, mesh_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def placement(device_type: str, ranks: Sequence[Any]) -> DeviceMesh:
    """Return a device mesh over ``ranks``, in that order. A collective of all ranks.

    ``zg.placement("cpu", ranks=[0, 1])`` has one dimension, ``ranks=[[0, 1], [2, 3]]`` two. Equal arguments return the
    same mesh. The process group is initialised if it is not yet.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        ranks: distinct ranks of this job, as a list or a rectangular nested list.

    Raises:
        PlacementError: ``ranks`` are not such ranks, or this machine has no such device.
    """
    initialise()
    size = dist.get_world_size()
    try:
        grid = torch.tensor(ranks, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        grid = torch.empty(0)
    if not grid.dim() or not grid.numel() or grid.dtype != torch.int64:
        raise PlacementError(
            f"ranks={ranks!r}: give the ranks as a list of whole numbers, such as [0, 1], or as a rectangle of lists"
        )
    if len(grid.unique()) != grid.numel() or grid.min() < 0 or grid.max() >= size:
        raise PlacementError(f"ranks={ranks!r}: this job has the ranks 0 to {size - 1}, each at most once")
    if (
        not isinstance(device_type, str)
        or device_type not in ("cpu", "cuda")
        or (device_type == "cuda" and not torch.cuda.is_available())
    ):
        raise PlacementError(
            f"there is no device {device_type!r} here; choose 'cpu' or, on a machine that has it, 'cuda'"
        )
    return mesh_of(device_type, grid)


@overload
def to_global(x: Tensor, *, placement: DeviceMesh, sbp: Sbp | Sequence[Sbp]) -> DTensor: ...
@overload
def to_global(x: nn.Module, *, placement: DeviceMesh, sbp: Sbp | Sequence[Sbp]) -> nn.Module: ...


def to_global(x: Tensor | nn.Module, *, placement: DeviceMesh, sbp: Sbp | Sequence[Sbp]) -> DTensor | nn.Module:
    """Return a global tensor of this rank's part, or a module with all parameters and buffers made global.

    Args:
        x: a plain tensor, a DTensor or a module. With ``split(d)`` the global tensor concatenates the ranks' tensors
            along d; with ``partial_sum`` it is their sum; with ``broadcast`` it is the first rank's tensor. A DTensor
            is redistributed. A module, of which every rank has the whole, is changed in place: each rank keeps its part
            of the first rank's values.
        placement: the device mesh, from :func:`placement`.
        sbp: one SBP, or one for each dimension of the placement.

    Raises:
        PlacementError: the SBP does not fit the tensor or the placement, or the ranks' tensors differ in shape or
            dtype.
    """
    if not isinstance(placement, DeviceMesh):
        raise PlacementError(
            f"to_global(placement={placement!r:.60}): pass a placement, such as zg.placement('cpu', ranks=[0, 1])"
        )
    sbps = nd_sbp(sbp, placement.ndim)
    if isinstance(x, nn.Module):
        if partial_sum in sbps:
            raise PlacementError("a module's parameters cannot be partial sums: use broadcast or split(d)")
        return _module_to_global(x, placement, sbps)
    if not isinstance(x, Tensor):
        raise PlacementError(f"to_global() takes a tensor or a module, not {type(x).__name__}")
    _check_dims("a tensor", x, sbps)
    if is_dtensor(x):
        return x.redistribute(placement, to_dtensor(sbps))
    _check_equal_parts(x, placement)
    return from_parts(x, placement, sbps)


def from_parts(x: Tensor, placement: DeviceMesh, sbp: NdSbp) -> DTensor:
    """Return :func:`to_global` of a tensor, without its checks of shape and dtype."""
    from torch.distributed.tensor import DTensor

    part = x.contiguous()
    # DTensor.from_local(run_check=True) would involve all ranks of the job, also those outside of the placement.
    for dim, entry in enumerate(sbp):
        if entry == broadcast and placement.size(dim) > 1:
            dist.broadcast(part.detach(), group=placement.get_group(dim), group_src=0)
    return DTensor.from_local(part, placement, to_dtensor(sbp), run_check=False)


def to_local(x: Tensor) -> Tensor:
    """Return this rank's part of a global tensor; return a plain tensor unchanged.

    Raises:
        PlacementError: ``x`` is not a tensor.
    """
    if not isinstance(x, Tensor):
        raise PlacementError(f"to_local() takes a tensor, not {type(x).__name__}")
    local = x.to_local() if is_dtensor(x) else x
    # Wait for a collective in flight here, not at the first use.
    wait: Any = getattr(local, "wait", None)
    waited: Tensor = wait() if callable(wait) else local
    return waited


def _module_to_global(module: nn.Module, placement: DeviceMesh, sbp: NdSbp) -> nn.Module:
    from torch.distributed.tensor import distribute_tensor

    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        _check_dims(name, tensor, sbp)
    placements = to_dtensor(sbp)

    def distributed(value: Tensor) -> Tensor:
        distribute = value.redistribute if is_dtensor(value) else partial(distribute_tensor, value)
        return distribute(placement, placements)

    replace_tensors(module, distributed)
    return module


def _check_dims(name: str, x: Tensor, sbp: NdSbp) -> None:
    if any(isinstance(entry, Split) and entry.dim >= x.dim() for entry in sbp):
        shown = ", ".join(map(str, sbp))
        raise PlacementError(f"{name} of shape {tuple(x.shape)} has no dimension to be {shown}")


def _check_equal_parts(x: Tensor, placement: DeviceMesh) -> None:
    """Check that the parts of all ranks have the same shape and dtype. A collective."""
    own = (tuple(x.shape), str(x.dtype))
    for dim in range(placement.ndim):
        group = placement.get_group(dim)
        if group.size() == 1:
            continue
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, own, group=group)
        if any(part != own for part in parts):
            shown = ", ".join(f"{shape} {dtype}" for shape, dtype in parts)
            raise PlacementError(
                f"the parts of a global tensor must have the same shape and dtype on all ranks; they are {shown}"
            )
