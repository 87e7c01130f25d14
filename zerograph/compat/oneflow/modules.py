"""``to_global`` of modules, and state dicts with whole values for modules that are global or in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zerograph.compat.oneflow.placements import placement
from zerograph.compat.oneflow.tensors import cut, to_global, whole_of
from zerograph.errors import ConfigError
from zerograph.ir.annotate import own_tensors, replace_tensors
from zerograph.ir.sbp import Sbp, from_dtensor
from zerograph.runtime.state import Store, reshard, store_of, stores_of, unshard


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
        if not isinstance(tensor, nn.Parameter) or (store := store_of(tensor)) is None:
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
