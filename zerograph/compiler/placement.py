"""Global tensors at the API: placements are device meshes, global tensors are DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from zerograph.errors import PlacementError
from zerograph.ir.annotate import copy_annotation
from zerograph.ir.sbp import NdSbp, Sbp, Split, broadcast, nd_sbp, partial_sum, to_dtensor
from zerograph.runtime.job.process_group import initialise, mesh_of
from zerograph.runtime.job.process_group import mesh as mesh_of_all


def placement(device_type: str, ranks: Sequence[Any]) -> DeviceMesh:
    """A device mesh over ``ranks``, in that order: ``zg.placement("cpu", ranks=[0, 1])``. A collective of all ranks.

    A nested list is a mesh of several dimensions: ``ranks=[[0, 1], [2, 3]]``. Asking for the same again gives the
    same one. Initialises the process group if nobody has.

    Raises:
        PlacementError: not distinct ranks of this job in a rectangular list, or a device that this machine lacks.
    """
    initialise()
    size = dist.get_world_size()
    wanted = _flat(ranks)
    if wanted is None:
        raise PlacementError(
            f"ranks={ranks!r}: give the ranks as a list of whole numbers, such as [0, 1], or as a rectangle of lists"
        )
    if len(set(wanted)) != len(wanted) or not all(0 <= one < size for one in wanted):
        raise PlacementError(f"ranks={ranks!r}: this job has the ranks 0 to {size - 1}, each at most once")
    if (
        not isinstance(device_type, str)
        or device_type not in ("cpu", "cuda")
        or (device_type == "cuda" and not torch.cuda.is_available())
    ):
        raise PlacementError(
            f"there is no device {device_type!r} here; choose 'cpu' or, on a machine that has it, 'cuda'"
        )
    if ranks == list(range(size)):
        return mesh_of_all(device_type)
    return mesh_of(device_type, torch.tensor(ranks))


def _flat(ranks: Any) -> list[int] | None:
    """The ranks of a rectangular nested list one after another; None for anything else."""
    if not isinstance(ranks, Sequence) or not ranks or isinstance(ranks, str):
        return None
    if all(isinstance(one, int) and not isinstance(one, bool) for one in ranks):
        return list(ranks)
    rows = [_flat(one) for one in ranks]
    if any(row is None for row in rows) or len({_depths(one) for one in ranks}) != 1:
        return None
    return [rank for row in rows for rank in row or []]


def _depths(ranks: Any) -> tuple[int, ...]:
    return (len(ranks), *_depths(ranks[0])) if isinstance(ranks, Sequence) else ()


@overload
def to_global(x: Tensor, *, placement: DeviceMesh, sbp: Sbp | Sequence[Sbp]) -> DTensor: ...
@overload
def to_global(x: nn.Module, *, placement: DeviceMesh, sbp: Sbp | Sequence[Sbp]) -> nn.Module: ...


def to_global(x: Tensor | nn.Module, *, placement: DeviceMesh, sbp: Sbp | Sequence[Sbp]) -> DTensor | nn.Module:
    """A global tensor from what each rank holds, or a module whose parameters and buffers are all global tensors.

    With ``split(d)`` and ``partial_sum``, ``x`` is this rank's part: the global tensor is the parts end to end along
    d, or their sum. With ``broadcast`` every rank gets the values of the first. Of a module every rank holds the
    whole: it is cut in place, each rank keeps its part of the first rank's values. A DTensor is redistributed.

    Raises:
        PlacementError: an SBP that does not fit the tensor or the placement, or parts of different shape.
    """
    if not isinstance(placement, DeviceMesh):
        raise PlacementError(
            f"to_global(placement={placement!r:.60}): give a placement, as zg.placement('cpu', ranks=[0, 1]) makes one"
        )
    wanted = nd_sbp(sbp, placement.ndim)
    if isinstance(x, nn.Module):
        if partial_sum in wanted:
            raise PlacementError("a module's parameters cannot be partial sums: use broadcast or split(d)")
        return _module_to_global(x, placement, wanted)
    if not isinstance(x, Tensor):
        raise PlacementError(f"to_global() takes a tensor or a module, not {type(x).__name__}")
    if isinstance(x, DTensor):
        _check_dims(tuple(x.shape), wanted)
        return x.redistribute(placement, to_dtensor(wanted))
    _check_dims(tuple(x.shape), wanted)
    _check_equal_parts(x, placement)
    return from_parts(x, placement, wanted)


def from_parts(x: Tensor, placement: DeviceMesh, sbp: NdSbp) -> DTensor:
    """As :func:`to_global` of a tensor, whose parts are known to be alike on all ranks and to fit."""
    part = x.contiguous()
    # What is broadcast becomes the first rank's. (Torch's own run_check asks all ranks of the job, also those that the
    # placement leaves out.)
    for dim, one in enumerate(sbp):
        if one == broadcast and placement.size(dim) > 1:
            dist.broadcast(part.detach(), group=placement.get_group(dim), group_src=0)
    return DTensor.from_local(part, placement, to_dtensor(sbp), run_check=False)


def to_local(x: Tensor) -> Tensor:
    """What this rank holds of a global tensor; a plain tensor is returned as it is.

    Raises:
        PlacementError: not a tensor.
    """
    if not isinstance(x, Tensor):
        raise PlacementError(f"to_local() takes a tensor, not {type(x).__name__}")
    local = x.to_local() if isinstance(x, DTensor) else x
    # A collective in flight is waited for here, not at some later use.
    wait: Any = getattr(local, "wait", None)
    waited: Tensor = wait() if callable(wait) else local
    return waited


def _module_to_global(module: nn.Module, placement: DeviceMesh, sbp: NdSbp) -> nn.Module:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if any(isinstance(one, Split) and one.dim >= tensor.dim() for one in sbp):
            raise PlacementError(f"{name} of shape {tuple(tensor.shape)} has no dimension to be {_text(sbp)}")
    placements = to_dtensor(sbp)
    # Tied weights stay one tensor.
    made: dict[Tensor, Tensor] = {}

    def cut(tensor: Tensor) -> Tensor:
        if tensor not in made:
            value = tensor.detach()
            moves = value.redistribute if isinstance(value, DTensor) else partial(distribute_tensor, value)
            made[tensor] = moves(placement, placements)
            if isinstance(tensor, nn.Parameter):
                made[tensor] = new = nn.Parameter(made[tensor], requires_grad=tensor.requires_grad)
                copy_annotation(tensor, new)
        return made[tensor]

    for owner in module.modules():
        for key, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            owner.register_parameter(key, cut(parameter))  # type: ignore[arg-type]
        for key, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(owner, key, cut(buffer))
    return module


def _check_dims(shape: tuple[int, ...], sbp: NdSbp) -> None:
    if any(isinstance(one, Split) and one.dim >= len(shape) for one in sbp):
        raise PlacementError(f"a tensor of shape {shape} has no dimension to be {_text(sbp)}")


def _check_equal_parts(x: Tensor, placement: DeviceMesh) -> None:
    mine = (tuple(x.shape), str(x.dtype))
    for dim in range(placement.ndim):
        group = placement.get_group(dim)
        if group.size() == 1:
            continue
        reports: list[Any] = [None] * group.size()
        dist.all_gather_object(reports, mine, group=group)
        if any(report != mine for report in reports):
            shown = ", ".join(f"{shape} {dtype}" for shape, dtype in reports)
            raise PlacementError(f"the parts of a global tensor must be alike on all ranks; they are {shown}")


def _text(sbp: NdSbp) -> str:
    return ", ".join(map(str, sbp))
