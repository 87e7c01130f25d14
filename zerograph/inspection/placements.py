"""What lies where between steps: SBPs, and owners of what is dealt out whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import nn

from zerograph.compiler.members import Members
from zerograph.ir.buckets import Bucket
from zerograph.ir.sbp import NdSbp, Sbp, all_broadcast
from zerograph.runtime.state import Store, store_of

if TYPE_CHECKING:
    from zerograph.compiler.layout import Planned


def placements(members: Members, mesh_dims: int) -> dict[str, Sbp | NdSbp]:
    """SBP of every parameter, optimizer state (``<parameter>.<state>``) and buffer between steps."""
    found: dict[str, NdSbp] = {}
    everywhere = all_broadcast(mesh_dims)
    for name, parameter in members.parameters.items():
        store = store_of(parameter)
        if store is None:
            found[name] = everywhere
        else:
            index = _slot(store, parameter)
            found |= _of_slot(name, index, store.layout, store.specs, store.layouts, everywhere)
    found |= dict.fromkeys(members.buffers, everywhere)
    found |= {alias: found[name] for alias, name in members.aliases.items()}
    return {name: sbp[0] if len(sbp) == 1 else sbp for name, sbp in found.items()}


def planned_placements(layout: Iterable[Planned], mesh_dims: int) -> dict[str, Sbp | NdSbp]:
    """As :func:`placements`, of what lies in buckets that are only planned."""
    found: dict[str, NdSbp] = {}
    for one in layout:
        for index, slot in enumerate(one.bucket.slots):
            found |= _of_slot(slot.name, index, one.bucket, one.specs, one.layouts, all_broadcast(mesh_dims))
    return {name: sbp[0] if len(sbp) == 1 else sbp for name, sbp in found.items()}


def _of_slot(
    name: str, index: int, bucket: Bucket, states: Iterable[str], layouts: Mapping[str, Bucket], everywhere: NdSbp
) -> dict[str, NdSbp]:
    found = {name: bucket.sbp_of(bucket.slots[index])}
    for state in states:
        layout = layouts.get(state)
        found[f"{name}.{state}"] = everywhere if layout is None else layout.sbp_of(layout.slots[index])
    return found


def owners(members: Members) -> dict[str, int]:
    """Which rank each parameter that is dealt out whole belongs to: its place along the dimension of ZeRO."""
    found: dict[str, int] = {}
    for name, parameter in members.parameters.items():
        store = store_of(parameter)
        if store is not None and store.layout.owners is not None:
            found[name] = store.layout.owners[_slot(store, parameter)]
    return found | {alias: found[name] for alias, name in members.aliases.items() if name in found}


def _slot(store: Store, parameter: nn.Parameter) -> int:
    return next(index for index, one in enumerate(store.parameters) if one is parameter)
