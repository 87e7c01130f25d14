"""OneFlow's methods of global tensors and modules: ``to_global``, ``to_local``, ``sbp``, ``placement``.

A global tensor is a ``DTensor``, or a parameter that a graph has taken over. While ``build()`` is traced, all tensors
are global, and the compiler chooses their placements later. State dicts of modules that are global or in a graph have
whole values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from zerograph.base.source import refusal
from zerograph.capture.trace import original_of
from zerograph.compat.notices import call_without_effect
from zerograph.compat.oneflow.placements import mesh_of, placement, placement_of
from zerograph.compiler.members import was_global
from zerograph.compiler.placement import from_parts, to_global as checked, to_local as own_part
from zerograph.errors import ConfigError, InputError, PlacementError, SplitParameterError
from zerograph.graph import building
from zerograph.ir.annotate import own_tensors, replace_tensors
from zerograph.ir.sbp import NdSbp, PartialSum, Sbp, Split, all_broadcast, broadcast, from_dtensor, nd_sbp, to_dtensor
from zerograph.runtime.parameters import SplitParameter
from zerograph.runtime.state import Store, plain_parameters, reshard, store_of, stores_of, unshard


def to_global(
    x: Tensor,
    placement: placement | DeviceMesh | None = None,
    sbp: Sbp | Sequence[Sbp] | None = None,
    *,
    grad_sbp: Any = None,
    check_meta: bool = True,
    copy: bool = False,
) -> Tensor:
    """Create a global tensor from this rank's part, or change the placement of a global tensor. A collective.

    A local tensor needs both arguments. With ``split(d)`` and ``partial_sum`` it is this rank's part. With
    ``broadcast`` all ranks take the first rank's values, *in place* unless ``copy``. A global tensor keeps its
    placement or its SBP if the argument is left out. It may move to other ranks and devices, but without a gradient.
    Inside ``build()`` this does nothing, because the compiler places tensors and numbers do not depend on it.

    Args:
        x: a local or a global tensor.
        placement: the ranks and the type of device.
        sbp: the SBP, or one for each dimension of the placement.
        grad_sbp: no effect: the compiler chooses the cheapest placement of gradients.
        check_meta: compare the shapes and dtypes of the ranks' parts, which costs an exchange.
        copy: copy the first rank's values instead of writing in place.

    Returns:
        The global tensor; inside ``build()`` the tensor itself.

    Raises:
        PlacementError: an argument is missing or does not fit the tensor, or parts differ in shape or dtype.
        InputError: the tensor requires a gradient and would move to other ranks.
    """
    if grad_sbp is not None:
        call_without_effect("to_global(grad_sbp=)", "the compiler chooses the cheapest placement of gradients")
    mesh = None if placement is None else mesh_of(placement)
    if building():
        if sbp is not None:
            nd_sbp(sbp, mesh.ndim if mesh is not None else 1 if isinstance(sbp, Sbp) else len(sbp))
        return x
    store = store_of(x)
    if store is None and not isinstance(x, DTensor):
        if mesh is None or sbp is None:
            raise PlacementError("to_global() of a local tensor needs both placement= and sbp=")
        _check_number(x, mesh)
        target_sbp = nd_sbp(sbp, mesh.ndim)
        _check_dims(x, target_sbp)
        if mesh.get_coordinate() is None:
            return _elsewhere(x, mesh, target_sbp)
        here = x.to(mesh.device_type)
        here = here.clone() if copy and here is x else here
        return checked(here, placement=mesh, sbp=target_sbp) if check_meta else from_parts(here, mesh, target_sbp)
    if mesh is None and sbp is None:
        raise PlacementError("to_global() of a global tensor needs placement=, sbp= or both")
    if store is None and isinstance(x, DTensor):
        return _placed(x, mesh, sbp)
    mesh = placement_of_tensor(x).mesh if mesh is None else mesh
    return cut(whole_of(x), mesh, sbp_of(x) if sbp is None else sbp)


def to_local(x: Tensor) -> Tensor:
    """Return this rank's part of a global tensor, or a local tensor itself.

    Raises:
        SplitParameterError: the tensor is a sharded parameter, whose slices are stored in buckets.
        CaptureError: the call is inside ``build()``, where tensors are global.
    """
    if building():
        raise refusal(
            "build() calls to_local()",
            "build() sees the whole batch; for a rank's own part use zg.local (import zerograph as zg), and call "
            "to_local() on what the graph returns.",
        )
    if isinstance(x, SplitParameter):
        raise SplitParameterError(
            "to_local() on a sharded parameter: this rank's slice is stored in a bucket, and has no shape\n"
            "Every rank may call parameter.to_global(sbp=flow.sbp.broadcast).to_local(), or module.state_dict()."
        )
    return own_part(x)


def is_global(x: Tensor) -> bool:
    """Return whether the tensor is global. Inside ``build()`` all tensors are."""
    return building() or _where(x) is not None


def sbp_of(x: Tensor) -> NdSbp:
    """Return the tensor's SBP, one for each dimension of the placement.

    For a parameter that a graph has taken over, the SBP that it has between steps.

    Raises:
        AttributeError: the tensor is local, or, inside ``build()``, not a parameter or buffer.
    """
    return _located(x, "sbp")[1]


def placement_of_tensor(x: Tensor) -> placement:
    """Return the ranks and the type of device that the tensor is on.

    Raises:
        AttributeError: the tensor is local, or, inside ``build()``, not a parameter or buffer.
    """
    location, _ = _located(x, "placement")
    return location if isinstance(location, placement) else placement_of(location)


def _located(x: Tensor, attribute: str) -> tuple[placement | DeviceMesh, NdSbp]:
    if (location := _where(x)) is not None:
        return location
    missing = f"a local tensor has no {attribute}: make it global with to_global(placement=, sbp=)"
    raise AttributeError(_MISSING_IN_BUILD if building() else missing)


_MISSING_IN_BUILD = (
    "inside build() only parameters and buffers have .sbp and .placement: the compiler places all other tensors after "
    "it has traced build(); graph.inspect.placements() and print(graph) show its choice"
)


def _where(x: Tensor) -> tuple[placement | DeviceMesh, NdSbp] | None:
    """Return ranks and SBP of a global tensor, or None for a local one."""
    original = original_of(x)
    if isinstance(original, DTensor):
        return original.device_mesh, from_dtensor(original.placements)
    if (store := store_of(original)) is not None:
        return placement(original.device.type, store.job.grid), store.layout.sbp_of(
            store.layout.slots[_place(original, store)]
        )
    return was_global(original)


def whole_of(x: Tensor) -> Tensor:
    """Return the whole tensor on every rank, plain and without gradient. A collective for global tensors."""
    if (store := store_of(x)) is not None:
        return plain_parameters(store)[_place(x, store)].detach()
    if not isinstance(x, DTensor):
        return x.detach()
    mesh = x.device_mesh
    if mesh.size() == dist.get_world_size():
        return x.full_tensor().detach()
    inside = mesh.get_coordinate() is not None
    value = x.full_tensor().detach() if inside else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dist.broadcast(value.contiguous(), src=int(mesh.mesh.flatten()[0]))
    return value


def cut(value: Tensor, mesh: DeviceMesh, sbp: Sbp | Sequence[Sbp]) -> DTensor:
    """Return the global tensor whose whole value every rank passes. Nothing is sent.

    Raises:
        PlacementError: the SBP does not fit the tensor or the placement.
    """
    target_sbp = nd_sbp(sbp, mesh.ndim)
    _check_dims(value, target_sbp)
    _check_number(value, mesh)
    value = value.to(mesh.device_type).contiguous()
    position = mesh.get_coordinate()
    if position is None:
        local = value.new_empty(0)
    else:
        same = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
        split = tuple(broadcast if isinstance(s, PartialSum) else s for s in target_sbp)
        local = same.redistribute(mesh, to_dtensor(split)).to_local()
        # For a partial sum the first rank has the value, the others zeros.
        if any(isinstance(s, PartialSum) and at for s, at in zip(target_sbp, position, strict=True)):
            local = torch.zeros_like(local)
    return DTensor.from_local(
        local, mesh, to_dtensor(target_sbp), run_check=False, shape=value.shape, stride=value.stride()
    )


def _check_dims(x: Tensor, sbp: NdSbp) -> None:
    for s in sbp:
        if isinstance(s, Split) and s.dim >= x.dim():
            raise PlacementError(f"a tensor of shape {tuple(x.shape)} has no dimension for {s}")


def _check_number(x: Tensor, mesh: DeviceMesh) -> None:
    if x.dim() == 0 and mesh.size() < dist.get_world_size():
        raise PlacementError(
            "torch has no 0-d global tensor on some of the ranks: use a placement of all, or shape (1,)"
        )


def _elsewhere(x: Tensor, mesh: DeviceMesh, sbp: NdSbp) -> DTensor:
    """Return, on a rank outside the placement, a global tensor whose parts on other ranks have the shape of ``x``."""
    shape = list(x.shape)
    for s, ranks in zip(sbp, mesh.shape, strict=True):
        if isinstance(s, Split):
            shape[s.dim] *= ranks
    like = torch.empty(shape, device="meta")
    nothing = x.new_empty(0, device=mesh.device_type)
    return DTensor.from_local(nothing, mesh, to_dtensor(sbp), run_check=False, shape=like.shape, stride=like.stride())


def _placed(x: DTensor, mesh: DeviceMesh | None, sbp: Sbp | Sequence[Sbp] | None) -> Tensor:
    mesh = x.device_mesh if mesh is None else mesh
    if sbp is None and mesh.ndim != x.device_mesh.ndim:
        raise PlacementError(f"to_global() from {x.device_mesh.ndim} to {mesh.ndim} mesh dimension(s) needs sbp=")
    target_sbp = from_dtensor(x.placements) if sbp is None else sbp
    if mesh == x.device_mesh:
        return checked(x, placement=mesh, sbp=target_sbp)
    if x.requires_grad and torch.is_grad_enabled() and not isinstance(x, torch.nn.Parameter):
        raise InputError(
            "a tensor that requires a gradient cannot move to other ranks: call detach() before to_global()"
        )
    return cut(whole_of(x), mesh, target_sbp)


def _place(x: Tensor, store: Store) -> int:
    return next(number for number, parameter in enumerate(store.parameters) if parameter is x)


def replicated(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a plain tensor that is equal on all ranks as a global one."""
    return DTensor.from_local(x, mesh, to_dtensor(all_broadcast(mesh.ndim)), run_check=False)


def module_to_global(
    module: nn.Module, placement: placement | DeviceMesh | None = None, sbp: Sbp | Sequence[Sbp] | None = None
) -> nn.Module:
    """Make every parameter and buffer of a module global in place, as ``tensor.to_global`` does. A collective.

    With ``split(d)`` a local module's parameters are the rank's *parts*, as in OneFlow: the global parameters are N
    times as large. To split a whole module, make it global with ``broadcast`` first.

    Args:
        module: the module.
        placement: the ranks and the type of device.
        sbp: the SBP, or one for each dimension of the placement.

    Returns:
        The module.

    Raises:
        ConfigError: a graph has taken over the module, or ``sharded_init()`` has sharded it.
        PlacementError: an argument is missing or does not fit a tensor.
    """
    for name, tensor in (one for owner in module.modules() for one in own_tensors(owner)):
        if (store := store_of(tensor)) is None:
            continue
        if store.is_provisional:
            raise ConfigError(
                f"to_global() on a module whose parameter {name!r} of shape {tuple(tensor.shape)} is split already\n"
                "Give the module to a graph as it is; a parameter's values: "
                "parameter.to_global(sbp=flow.sbp.broadcast)."
            )
        raise ConfigError(
            f"to_global() on a module whose parameter {name!r} of shape {tuple(tensor.shape)} a graph keeps\n"
            "The graph places it. To use the module eagerly: 'with graph.full_parameters():', on plain tensors "
            "(x.to_local()); a parameter's values: parameter.to_global(sbp=flow.sbp.broadcast)."
        )
    replace_tensors(module, lambda value: to_global(value, placement, sbp))
    keep_state_whole(module)
    return module


def keep_state_whole(module: nn.Module) -> None:
    """Make state dicts of the module and its submodules consist of whole plain tensors.

    Saving and loading them are collectives then.
    """
    for submodule in module.modules():
        if "_zerograph_whole_state" not in vars(submodule):
            submodule._zerograph_whole_state = True  # type: ignore[assignment]
            submodule.register_state_dict_pre_hook(_before_saving)
            submodule.register_state_dict_post_hook(_after_saving)
            submodule.register_load_state_dict_pre_hook(_before_loading)
            submodule.register_load_state_dict_post_hook(_after_loading)


# The stores that each module has opened; the outermost module opens them for all its submodules.
_opened: dict[int, list[Store]] = {}


def _open(module: nn.Module) -> None:
    # An earlier call may have failed before it closed its stores.
    _close(module)
    stores = [store for store in stores_of(module.parameters()) if not store.is_unsharded]
    unshard(stores)
    _opened[id(module)] = stores


def _close(module: nn.Module) -> None:
    for store in _opened.pop(id(module), ()):
        if not store.is_released:
            reshard(store)


def _before_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:
        _open(module)


def _after_saving(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    if id(module) in _opened:
        for name, _ in own_tensors(module):
            value = state.get(prefix + name)
            if isinstance(value, DTensor):
                state[prefix + name] = whole_of(value)
    _close(module)


def _before_loading(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, *problems: Any
) -> None:
    _open(module)
    for name, tensor in own_tensors(module):
        value = state.get(prefix + name)
        # Torch reports wrong shapes.
        if isinstance(value, Tensor) and value.shape == tensor.shape:
            state[prefix + name] = _alike(value, tensor)


def _alike(value: Tensor, tensor: Tensor) -> Tensor:
    """Return the value placed like the tensor that it is loaded into: global or plain."""
    if not isinstance(tensor, DTensor):
        return whole_of(value)
    return cut(whole_of(value), tensor.device_mesh, from_dtensor(tensor.placements))


def _after_loading(module: nn.Module, problems: Any) -> None:
    _close(module)
