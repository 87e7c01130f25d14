"""``flow.utils.global_view``: all tensors of a nesting, such as a graph's state, made global or local at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zerograph._torch import pytree
from zerograph.compat.oneflow import tensors
from zerograph.compat.oneflow.files import described, undescribed
from zerograph.compat.oneflow.placements import mesh_of, placement
from zerograph.errors import PlacementError
from zerograph.ir.sbp import Sbp
from zerograph.runtime.job.process_group import join, rank

# Seconds that ranks wait for the one whose values are described to the others.
_PATIENCE = 600.0


def to_global(
    input: Any,
    placement: placement | None = None,
    sbp: Sbp | Sequence[Sbp] | Callable[[Any, Tensor], Sbp | Sequence[Sbp]] | None = None,
) -> Any:
    """Return the nesting with every tensor global. A collective of all ranks.

    A 0-d tensor stays as it is where the placement leaves ranks out, and so does what is no tensor.

    Args:
        input: dicts, lists and tuples of tensors; None on ranks outside the placement: theirs are like the first's.
        placement: the ranks and the type of device.
        sbp: of all tensors, or a function of the nesting and a tensor.

    Raises:
        PlacementError: no placement or no SBP, or one that does not fit a tensor.
    """
    if placement is None or sbp is None:
        raise PlacementError("global_view.to_global() needs both placement= and sbp=")
    mesh = mesh_of(placement)
    first = int(mesh.mesh.flatten()[0])
    job = join(_PATIENCE)
    said: list[Any] = [pytree.tree_map(described, input) if rank() == first else None]
    dist.broadcast_object_list(said, src=first, group=job.control)
    given = pytree.tree_map(undescribed, said[0]) if input is None else input

    def placed(one: Any) -> Any:
        if not isinstance(one, Tensor) or (not one.dim() and mesh.size() < dist.get_world_size()):
            return one
        return tensors.to_global(one, mesh, sbp(given, one) if callable(sbp) and not isinstance(sbp, Sbp) else sbp)

    return pytree.tree_map(placed, given)


def to_local(input: Any, *, copy: bool = False) -> Any:
    """Return the nesting with this rank's part of every global tensor.

    Args:
        input: a nesting with global tensors.
        copy: the parts share no memory with the global tensors.
    """

    def part(one: Any) -> Any:
        if not isinstance(one, DTensor):
            return one
        local = one.to_local()
        return local.clone() if copy else local

    return pytree.tree_map(part, input)
