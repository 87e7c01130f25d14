"""``flow.placement``: the ranks and the type of device of a global tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.compiler.placement import placement as device_mesh
from zerograph.errors import PlacementError
from zerograph.runtime.job.process_group import keep_mesh, world_size


class placement:  # noqa: N801 (OneFlow's name)
    """The ranks that store a global tensor: ``flow.placement("cpu", ranks=[0, 1])``. A collective of all ranks.

    Nested ranks give a placement of several dimensions: ``ranks=[[0, 1], [2, 3]]``. Two placements are equal if their
    type and ranks are equal; equal placements share their process groups.

    Attributes:
        type: ``"cpu"`` or ``"cuda"``.
        ranks: the ranks as a nested list.

    Raises:
        PlacementError: the ranks are not distinct, not of this job or not a rectangle, or this machine does not have
            the device.
    """

    type: str
    ranks: list[Any]

    def __init__(self, type: str, ranks: Sequence[Any]) -> None:
        self.type, self.ranks = type, _lists(ranks)
        # Process groups are created here, because all ranks must create them together.
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
    # Code in build() may call this: leave tracing modes, to get real numbers.
    with _torch.no_modes():
        keep_mesh(mesh)
        return placement(mesh.device_type, mesh.mesh.tolist())


def mesh_of(value: Any) -> DeviceMesh:
    """Return the device mesh of an argument ``placement=``.

    Raises:
        PlacementError: the value is neither a placement nor a device mesh.
    """
    if isinstance(value, placement):
        return value.mesh
    if isinstance(value, DeviceMesh):
        return value
    raise PlacementError(f"placement={value!r:.60} is no placement: pass flow.placement(type, ranks=[...])")


def _mesh_of(place: placement) -> DeviceMesh:
    try:
        with _torch.no_modes():
            return device_mesh(place.type, ranks=place.ranks)
    except PlacementError as error:
        named = pytree.tree_leaves(place.ranks)
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
    return [_lists(item) for item in ranks] if isinstance(ranks, (list, tuple, range)) else ranks
