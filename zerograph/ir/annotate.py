"""Annotations: how the user wants a parameter or an input placed; the rest of the placement is inferred from them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from zerograph.errors import PlacementError
from zerograph.ir.mesh import Mesh
from zerograph.ir.sbp import NdSbp, PartialSum, Sbp, Split, all_broadcast, from_dtensor, nd_sbp, show

_ATTRIBUTE = "_zerograph_sbp"
_REPLICATED = "_zerograph_replicated"


def annotate(parameter: nn.Parameter, *, sbp: Sbp | Sequence[Sbp]) -> None:
    """Place a parameter, for instance for tensor parallelism; every rank must do the same.

    ``zg.annotate(model.up.weight, sbp=(zg.sbp.broadcast, zg.sbp.split(0)))`` splits the rows of a weight along the
    second dimension of the graph's placement. Along that dimension it rests split and is computed with as is cheapest,
    at every stage; ZeRO splits it further along its own dimension, if that is another one (``config.zero_dim`` tells
    which). A later annotation replaces an earlier one.

    Raises:
        PlacementError: not a parameter, not SBPs, a partial sum, or a dimension that the parameter lacks.
    """
    if not isinstance(parameter, nn.Parameter):
        raise PlacementError(f"annotate() takes a parameter of a module, not {type(parameter).__name__}")
    if not isinstance(sbp, Sbp) and (not isinstance(sbp, Sequence) or not sbp):
        raise PlacementError(f"annotate(sbp={sbp!r:.60}): give sbp.split(d) or sbp.broadcast, one per mesh dimension")
    wanted = nd_sbp(sbp, 1 if isinstance(sbp, Sbp) else len(sbp))
    for one in wanted:
        if isinstance(one, PartialSum):
            raise PlacementError("a parameter cannot be a partial sum between steps: use broadcast or split(d)")
        if isinstance(one, Split) and one.dim >= parameter.dim():
            raise PlacementError(f"a parameter of shape {tuple(parameter.shape)} has no dimension to be {one}")
    setattr(parameter, _ATTRIBUTE, wanted)


def annotation(parameter: nn.Parameter) -> NdSbp | None:
    """What :func:`annotate` said of the parameter, or, of a global tensor that is split, how that is placed."""
    if isinstance(parameter, DTensor) and any(map(Placement.is_shard, parameter.placements)):
        return from_dtensor(parameter.placements)
    found: NdSbp | None = getattr(parameter, _ATTRIBUTE, None)
    return found


def copy_annotation(old: nn.Parameter, new: nn.Parameter) -> None:
    """Annotate the parameter that takes another's place as that one was."""
    if hasattr(old, _ATTRIBUTE):
        setattr(new, _ATTRIBUTE, getattr(old, _ATTRIBUTE))


def annotated_sbp(name: str, parameter: nn.Parameter, mesh: Mesh) -> NdSbp:
    """How the user placed the parameter on this mesh; broadcast where nothing was said.

    Raises:
        PlacementError: the annotation does not fit the mesh, or splits what does not divide.
    """
    found = annotation(parameter)
    if found is None:
        return all_broadcast(mesh.dims)
    if len(found) != mesh.dims:
        raise PlacementError(
            f"{name} is annotated {show(found)}, but the graph's placement has {mesh.dims} dimension(s)\n"
            "Give one SBP for each, and set config.placement."
        )
    split = [(dim, one) for dim, one in enumerate(found) if isinstance(one, Split)]
    if len(split) > 1:
        raise PlacementError(
            f"{name} is annotated {show(found)}: this version splits a parameter along one mesh dimension\n"
            "Leave it broadcast along the other; ZeRO can split it there."
        )
    for dim, one in split:
        if parameter.shape[one.dim] % mesh.shape[dim]:
            raise PlacementError(
                f"{name} of shape {tuple(parameter.shape)} is annotated {one} over {mesh.shape[dim]} ranks\n"
                "They must divide that dimension."
            )
    return found


def replicated(x: Tensor) -> Tensor:
    """Mark an input of a graph as whole on every rank: class weights, prototypes, an anchor grid.

    ``step(x, y, zg.replicated(weights))``. A plain input is otherwise this rank's part of the batch. Nothing is sent:
    ranks compare the values when a step is compiled, not in every step.

    Returns:
        A view of ``x`` that carries the mark. An operator on it returns a tensor without the mark.

    Raises:
        PlacementError: not a tensor, or a DTensor, which has a placement of its own.
    """
    if not isinstance(x, Tensor):
        raise PlacementError(f"replicated() takes a tensor, not {type(x).__name__}")
    if isinstance(x, DTensor):
        raise PlacementError("replicated() takes a plain tensor: a DTensor has a placement, change it with to_global()")
    marked = x.view_as(x)
    setattr(marked, _REPLICATED, True)
    return marked


def is_replicated(x: Tensor) -> bool:
    """Return whether :func:`replicated` made the tensor."""
    return bool(getattr(x, _REPLICATED, False))
