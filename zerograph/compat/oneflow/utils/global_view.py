"""``flow.utils.global_view``: make all tensors of a nesting, such as a graph's state, global or local."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zerograph._torch import pytree
from zerograph.compat.oneflow import tensors
from zerograph.compat.oneflow.files import shared
from zerograph.compat.oneflow.placements import mesh_of, placement
from zerograph.errors import PlacementError
from zerograph.ir.sbp import Sbp


def to_global(
    input: Any,
    placement: placement | None = None,
    sbp: Sbp | Sequence[Sbp] | Callable[[Any, Tensor], Sbp | Sequence[Sbp]] | None = None,
) -> Any:
    """Return the nesting with every tensor global. A collective of all ranks.

    Values that are not tensors stay unchanged. So do 0-d tensors if the placement leaves out ranks.

    Args:
        input: dicts, lists and tuples of tensors; None on ranks outside the placement, which use the first rank's.
        placement: the ranks and the type of device.
        sbp: the SBP of all tensors, or a function of the nesting and a tensor that returns it.

    Raises:
        PlacementError: the placement or the SBP is missing, or does not fit a tensor.
    """
    if placement is None or sbp is None:
        raise PlacementError("global_view.to_global() needs both placement= and sbp=")
    mesh = mesh_of(placement)
    first = int(mesh.mesh.flatten()[0])
    like = shared(input, first)
    tree = like if input is None else input

    def placed(leaf: Tensor) -> Tensor:
        if not leaf.dim() and mesh.size() < dist.get_world_size():
            return leaf
        return tensors.to_global(leaf, mesh, sbp(tree, leaf) if callable(sbp) and not isinstance(sbp, Sbp) else sbp)

    return pytree.tree_map_only(Tensor, placed, tree)


def to_local(input: Any, *, copy: bool = False) -> Any:
    """Return the nesting with this rank's part of every global tensor.

    Args:
        input: a nesting with global tensors.
        copy: copy the parts, so that they share no memory with the global tensors.
    """
    return pytree.tree_map_only(DTensor, lambda leaf: leaf.to_local().clone() if copy else leaf.to_local(), input)
