"""``flow.placement``: which ranks, on which type of device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.compiler.placement import placement as device_mesh
from zerograph.errors import PlacementError
from zerograph.runtime.job.process_group import world_size


class placement:  # noqa: N801 (OneFlow's name)
    """The ranks that hold a global tensor: ``flow.placement("cpu", ranks=[0, 1])``. A collective of all ranks.

    Nested ranks are a placement of several dimensions: ``ranks=[[0, 1], [2, 3]]``. Two placements are equal if their
    type and ranks are; equal ones share their process groups.

    Attributes:
        type: ``"cpu"`` or ``"cuda"``.
        ranks: as a nested list.

    Raises:
        PlacementError: not distinct ranks of this job in a rectangle, or a device that this machine lacks.
    """

    type: str
    ranks: list[Any]

    def __init__(self, type: str, ranks: Sequence[Any]) -> None:
        self.type, self.ranks = type, _lists(ranks)
        # Made here, where every rank is: groups are made together.
        _mesh_of(self)

    @staticmethod
    def all(type: str) -> placement:
        """Return the placement of all ranks of the job in a line."""
        return placement(type, list(range(world_size())))

    @property
    def mesh(self) -> DeviceMesh:
        """The same ranks as torch's device mesh, which zerograph's own interface takes."""
        return _mesh_of(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, placement) and (self.type, self.ranks) == (other.type, other.ranks)

    def __hash__(self) -> int:
        return hash((self.type, str(self.ranks)))

    def __repr__(self) -> str:
        return f'flow.placement(type="{self.type}", ranks={self.ranks})'


def placement_of(mesh: DeviceMesh) -> placement:
    """Return the placement for a device mesh. No collective."""
    # Code in build() may ask: what it is told are real numbers.
    with _torch.no_modes():
        ranks = mesh.mesh.tolist()
    _known().setdefault((mesh.device_type, str(ranks)), mesh)
    return placement(mesh.device_type, ranks)


def mesh_of(given: Any) -> DeviceMesh:
    """Return the device mesh of an argument ``placement=``.

    Raises:
        PlacementError: it is neither a placement nor a device mesh.
    """
    if isinstance(given, placement):
        return given.mesh
    if isinstance(given, DeviceMesh):
        return given
    raise PlacementError(f"placement={given!r:.60} is no placement: give one made by flow.placement(type, ranks=[...])")


# Each costs process groups. They are those of one world: with another one they are made anew.
_meshes: dict[tuple[str, str], DeviceMesh] = {}
_world: list[Any] = []


def _known() -> dict[tuple[str, str], DeviceMesh]:
    world_size()
    if not _world or _world[0] is not dist.group.WORLD:
        _meshes.clear()
        _world[:] = [dist.group.WORLD]
    return _meshes


def _mesh_of(one: placement) -> DeviceMesh:
    known, key = _known(), (one.type, str(one.ranks))
    if key not in known:
        with _torch.no_modes():
            known[key] = _made(one)
    return known[key]


def _made(one: placement) -> DeviceMesh:
    try:
        return device_mesh(one.type, ranks=one.ranks)
    except PlacementError as error:
        named = pytree.tree_leaves(one.ranks)
        if world_size() > 1 or not all(isinstance(rank, int) for rank in named) or len(set(named)) < 2:
            raise
        raise PlacementError(
            f"{error}\nThis is one process alone: start it with python -m zerograph.compat.oneflow.launch "
            f"--nproc_per_node {max(named) + 1}"
        ) from None


def _lists(ranks: Any) -> Any:
    """Return ranges, tuples and arrays as lists; anything else unchanged, for the check to refuse."""
    if hasattr(ranks, "tolist"):
        return ranks.tolist()
    return [_lists(one) for one in ranks] if isinstance(ranks, (list, tuple, range)) else ranks
