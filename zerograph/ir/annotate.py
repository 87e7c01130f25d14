"""Annotations: the placement of a parameter or an input that the user asks for. ``place`` infers the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from zerograph.errors import PlacementError
from zerograph.ir.marks import copy_marks
from zerograph.ir.mesh import Mesh, size_along
from zerograph.ir.sbp import NdSbp, PartialSum, Sbp, Split, all_broadcast, from_dtensor, is_dtensor, nd_sbp, show

_ATTRIBUTE = "_zerograph_sbp"
_REPLICATED = "_zerograph_replicated"


def annotate(parameter: nn.Parameter, *, sbp: Sbp | Sequence[Sbp]) -> None:
    """Place a parameter, for instance for tensor parallelism; every rank must do the same.

    ``zg.annotate(model.up.weight, sbp=(zg.sbp.broadcast, zg.sbp.split(0)))`` splits the rows of a weight along the
    second dimension of the graph's placement. Along that dimension it is stored split at every stage, and the step
    computes with it as is cheapest. ZeRO splits it further along its own dimension (``config.zero.shard_dims``) if that
    is another one. A later annotation replaces an earlier one.

    Args:
        parameter: a parameter of a module.
        sbp: one SBP per mesh dimension.

    Raises:
        PlacementError: ``parameter`` is none, ``sbp`` is none or a partial sum, or the parameter lacks the dimension.
    """
    if not isinstance(parameter, nn.Parameter):
        raise PlacementError(f"annotate() takes a parameter of a module, not {type(parameter).__name__}")
    if not isinstance(sbp, Sbp) and (not isinstance(sbp, Sequence) or not sbp):
        raise PlacementError(f"annotate(sbp={sbp!r:.60}): give sbp.split(d) or sbp.broadcast, one per mesh dimension")
    per_dim = nd_sbp(sbp, 1 if isinstance(sbp, Sbp) else len(sbp))
    for dim_sbp in per_dim:
        if isinstance(dim_sbp, PartialSum):
            raise PlacementError("a parameter cannot be a partial sum between steps: use broadcast or split(d)")
        if isinstance(dim_sbp, Split) and dim_sbp.dim >= parameter.dim():
            raise PlacementError(f"a parameter of shape {tuple(parameter.shape)} has no dimension to be {dim_sbp}")
    setattr(parameter, _ATTRIBUTE, per_dim)


def annotation(parameter: nn.Parameter) -> NdSbp | None:
    """Return the SBP from :func:`annotate`, or that of a split global tensor; None without either."""
    if is_dtensor(parameter) and any(placement.is_shard() for placement in parameter.placements):
        return from_dtensor(parameter.placements)
    sbp: NdSbp | None = getattr(parameter, _ATTRIBUTE, None)
    return sbp


def copy_annotation(old: nn.Parameter, new: nn.Parameter) -> None:
    """Copy the annotation of a parameter to the one that replaces it."""
    if hasattr(old, _ATTRIBUTE):
        setattr(new, _ATTRIBUTE, getattr(old, _ATTRIBUTE))


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a module itself, by all their names."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]


def replace_tensors(module: nn.Module, replacement: Callable[[Tensor], Tensor]) -> None:
    """Replace all parameters and buffers of a module. Tied ones stay one tensor, and parameters keep their annotation.

    Args:
        replacement: returns the new values of a tensor.
    """
    tensors = [(owner, name, tensor) for owner in module.modules() for name, tensor in own_tensors(owner)]
    new_tensors: dict[Tensor, Tensor] = {}
    for _, _, tensor in tensors:
        if tensor not in new_tensors:
            new_tensors[tensor] = value = replacement(tensor.detach())
            if isinstance(tensor, nn.Parameter):
                new_tensors[tensor] = parameter = nn.Parameter(value, tensor.requires_grad)
                copy_annotation(tensor, parameter)
    for owner, name, tensor in tensors:
        setattr(owner, name, new_tensors[tensor])


def annotated_sbp(name: str, parameter: nn.Parameter, mesh: Mesh) -> NdSbp:
    """Return the user's SBP of the parameter on this mesh; broadcast without an annotation.

    Raises:
        PlacementError: the annotation does not fit the mesh, or the ranks do not divide a split dimension.
    """
    sbp = annotation(parameter)
    if sbp is None:
        return all_broadcast(mesh.dims)
    if len(sbp) != mesh.dims:
        raise PlacementError(
            f"{name} is annotated {show(sbp)}, but the graph's placement has {mesh.dims} dimension(s)\n"
            "Give one SBP for each, and set config.mesh.placement."
        )
    for split in filter(lambda entry: isinstance(entry, Split), dict.fromkeys(sbp)):
        assert isinstance(split, Split)
        ranks = size_along(mesh, [dim for dim, entry in enumerate(sbp) if entry == split])
        if parameter.shape[split.dim] % ranks:
            raise PlacementError(
                f"{name} of shape {tuple(parameter.shape)} is annotated {split} over {ranks} ranks\n"
                "They must divide that dimension."
            )
    return sbp


def replicated(x: Tensor) -> Tensor:
    """Mark an input of a graph or a prepared model as whole on every rank: class weights, prototypes, an anchor grid.

    ``step(x, y, zg.replicated(weights))``. If all inputs have the mark, every rank computes the whole batch. A plain
    input without the mark is this rank's part of the batch. Ranks compare the values when a step is compiled, not in
    every step.

    Returns:
        A view of ``x`` with the mark. Operators on it return tensors without the mark.

    Raises:
        PlacementError: ``x`` is no tensor, or a DTensor, which has a placement of its own.
    """
    if not isinstance(x, Tensor):
        raise PlacementError(f"replicated() takes a tensor, not {type(x).__name__}")
    if is_dtensor(x):
        raise PlacementError("replicated() takes a plain tensor: a DTensor has a placement, change it with to_global()")
    # Dimensions that are marked as dynamic stay so: the graph refuses them.
    marked = copy_marks(x, x.view_as(x))
    setattr(marked, _REPLICATED, True)
    return marked


def is_replicated(x: Tensor) -> bool:
    """Return True for a tensor with the mark of :func:`replicated`."""
    return bool(getattr(x, _REPLICATED, False))
