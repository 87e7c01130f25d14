"""Placements that the user gives parameters: one by one, or by ``config.mesh.expert_parallel`` for all experts."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from zerograph.capture.experts import expert_count
from zerograph.compiler.input_layout import batch_on
from zerograph.compiler.members import Members
from zerograph.config import Config
from zerograph.errors import ConfigError, PlacementError
from zerograph.ir.annotate import annotated_sbp, annotation
from zerograph.ir.buckets import Bucket, free_dims
from zerograph.ir.mesh import Mesh
from zerograph.ir.sbp import NdSbp, Split, broadcast, dims_split
from zerograph.ir.slots import cuts

_EXPERTS = Split(0)


def expert_sbps(members: Members, mesh: Mesh, config: Config) -> dict[str, NdSbp]:
    """Return the SBP of the parameters that ``expert_parallel`` splits, by name.

    Raises:
        ConfigError: there are no experts to split, or the user places them too.
        PlacementError: the mesh has no dimension of so many ranks, or they do not divide the experts.
    """
    if config.mesh.expert_parallel == 1:
        return {}
    option = f"config.mesh.expert_parallel = {config.mesh.expert_parallel}"
    if mesh.shape[-1] != config.mesh.expert_parallel:
        raise PlacementError(
            f"{option}, but the last dimension of the placement has {mesh.shape[-1]} ranks\n"
            "Leave config.mesh.placement out, or give it that many ranks along its last dimension."
        )
    modules = filter(expert_count, members.root.modules())
    stacked = {name: parameter for module in modules for name, parameter in _stacked_in(module, members).items()}
    if not stacked:
        raise ConfigError(
            f"{option}, but the graph has no module of experts, as transformers has them\n"
            "Place the stacked weights of your own experts: zg.annotate(weight, sbp=zg.sbp.split(0))."
        )
    for name, parameter in stacked.items():
        if annotation(parameter) is not None:
            raise ConfigError(
                f"{option}, and {name} is placed by zg.annotate() or zg.to_global()\nLeave one of the two out."
            )
        if parameter.shape[0] % config.mesh.expert_parallel:
            raise PlacementError(
                f"{option} does not divide the {parameter.shape[0]} experts of {name}\n"
                "Choose a number that divides them."
            )
    return dict.fromkeys(stacked, (*(broadcast,) * (mesh.dims - 1), _EXPERTS))


def user_sbps(names: Iterable[str], members: Members, mesh: Mesh, config: Config) -> dict[str, NdSbp]:
    """Return the SBP of parameters on the mesh by name; broadcast unless the user or ``expert_parallel`` splits it.

    Raises:
        ZeroGraphError: as :func:`expert_sbps` and :func:`zerograph.ir.annotate.annotated_sbp`.
    """
    experts = expert_sbps(members, mesh, config)
    return {name: experts.get(name) or annotated_sbp(name, members.parameters[name], mesh) for name in names}


def is_placed_so(
    bucket: Bucket, zero_dims: tuple[int, ...], names: Iterable[str], members: Members, mesh: Mesh, config: Config
) -> bool:
    """Return whether a bucket of these parameters is split as :func:`user_sbps` and ZeRO's dimensions say."""
    wanted = {
        (cuts(sbp, mesh), frozenset(dims_split([sbp])), free_dims(zero_dims, sbp))
        for sbp in user_sbps(names, members, mesh, config).values()
    }
    return wanted == {(bucket.slots[0].split, frozenset(dims_split([bucket.gathered])), bucket.zero_dims)}


def expert_groups(members: Members, mesh: Mesh, config: Config, micro_batches: int) -> dict[int, int]:
    """Return the number of groups that ranks split experts into, by ``id`` of the module.

    Raises:
        ConfigError: experts in micro-batches are split in a way that is not supported.
        ZeroGraphError: as :func:`expert_sbps`.
    """
    sbps, groups = expert_sbps(members, mesh, config), {}
    for module in filter(expert_count, members.root.modules()):
        sbp_of = {
            name: sbps.get(name) or annotation(weight) or () for name, weight in _stacked_in(module, members).items()
        }
        split = {
            dim: name for name, sbp in sbp_of.items() for dim in range(mesh.dims) if sbp[dim : dim + 1] == (_EXPERTS,)
        }
        for dim, name in split.items() if micro_batches > 1 else ():
            rows, has_norm = batch_on(config, mesh)[dim], getattr(module, "has_post_expert_norm", False)
            if isinstance(rows, Split) and (rows.dim or dim < mesh.dims - 1 or has_norm):
                _refuse_micro_batches(name, micro_batches)
        size = max((mesh.shape[dim] for dim in split), default=1)
        groups[id(module)] = 1 if expert_count(module) % size else size
    return groups


def _refuse_micro_batches(name: str, micro_batches: int) -> None:
    raise ConfigError(
        f"{name} is split over ranks, and config.gradient_accumulation_steps is {micro_batches}\n"
        "Micro-batches require that experts and the rows of inputs are split along the last mesh dimension, and that "
        "no norm follows the experts.\n"
        "Pass all ranks of a row the same rows, zg.sbp.broadcast as that entry of config.mesh.input_sbp, or call "
        "backward() several times for a step in a loop of zg.prepare()."
    )


def _stacked_in(module: nn.Module, members: Members) -> dict[str, nn.Parameter]:
    """Return the parameters of a module of experts, and of its parametrizations, that have a dimension of experts."""
    names, count = members.names, expert_count(module)
    return {
        names[id(parameter)]: parameter
        for name, parameter in module.named_parameters()
        if (parameter.dim() == 3 or name.endswith("_proj_bias")) and parameter.shape[0] == count
    }
