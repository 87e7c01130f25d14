"""Annotations: how the user wants a parameter placed, from which the rest of the step's placement is inferred."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zerograph.errors import PlacementError
from zerograph.mesh import Mesh
from zerograph.sbp import NdSbp, PartialSum, Sbp, Split, broadcast, nd, show, whole

_ATTRIBUTE = "_zerograph_sbp"


def annotate(parameter: nn.Parameter, *, sbp: Sbp | Sequence[Sbp]) -> None:
    """Place a parameter, for instance for tensor parallelism; every rank must do the same.

    ``zg.annotate(model.up.weight, sbp=(zg.sbp.broadcast, zg.sbp.split(0)))`` splits the rows of a weight along the
    second dimension of the graph's placement. Along ZeRO's own dimension it must be broadcast: the stage decides
    there. A later annotation replaces an earlier one.

    Raises:
        PlacementError: not a parameter, not SBPs, a partial sum, or a dimension that the parameter lacks.
    """
    if not isinstance(parameter, nn.Parameter):
        raise PlacementError(f"annotate() takes a parameter of a module, not {type(parameter).__name__}")
    wanted = nd(sbp, 1 if isinstance(sbp, Sbp) else len(sbp))
    for one in wanted:
        if isinstance(one, PartialSum):
            raise PlacementError("a parameter cannot be a partial sum between steps: use broadcast or split(d)")
        if isinstance(one, Split) and one.dim >= parameter.dim():
            raise PlacementError(f"a parameter of shape {tuple(parameter.shape)} has no dimension to be {one}")
    setattr(parameter, _ATTRIBUTE, wanted)


def annotation(parameter: nn.Parameter) -> NdSbp | None:
    """What :func:`annotate` said of the parameter."""
    found: NdSbp | None = getattr(parameter, _ATTRIBUTE, None)
    return found


def annotated_sbp(name: str, parameter: nn.Parameter, mesh: Mesh, zero_dim: int) -> NdSbp:
    """How the user placed the parameter on this mesh; broadcast where nothing was said.

    Raises:
        PlacementError: the annotation does not fit the mesh, or splits what does not divide.
    """
    found = annotation(parameter)
    if found is None:
        return whole(mesh.dims)
    if len(found) != mesh.dims:
        raise PlacementError(
            f"{name} is annotated {show(found)}, but the graph's placement has {mesh.dims} dimension(s)\n"
            "Give one SBP for each, and set config.placement."
        )
    if found[zero_dim] != broadcast:
        raise PlacementError(
            f"{name} is annotated {show(found)}, but mesh dimension {zero_dim} is the one that ZeRO splits along\n"
            "Annotate it broadcast there, or choose another dimension with config.zero_dim."
        )
    split = [(dim, one) for dim, one in enumerate(found) if isinstance(one, Split)]
    if len(split) > 1:
        raise PlacementError(
            f"{name} is annotated {show(found)}: this version splits a parameter along one mesh dimension"
        )
    for dim, one in split:
        if parameter.shape[one.dim] % mesh.shape[dim]:
            raise PlacementError(
                f"{name} of shape {tuple(parameter.shape)} is annotated {one} over {mesh.shape[dim]} ranks\n"
                "They must divide that dimension."
            )
    return found
