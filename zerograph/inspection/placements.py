"""Placements between steps: SBPs, and owners of whole parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import nn

from zerograph.compiler.members import Members
from zerograph.ir.buckets import Bucket
from zerograph.ir.sbp import NdSbp, Sbp, all_broadcast
from zerograph.runtime.state import Store, store_of

if TYPE_CHECKING:
    from zerograph.compiler.layout import PlannedBucket


def placements(members: Members, mesh_dims: int) -> dict[str, Sbp | NdSbp]:
    """Return the SBP of every parameter, optimizer state (``<parameter>.<state>``) and buffer between steps."""
    by_name: dict[str, NdSbp] = {}
    everywhere = all_broadcast(mesh_dims)
    for name, parameter in members.parameters.items():
        store = store_of(parameter)
        if store is None:
            by_name[name] = everywhere
        else:
            index = _slot(store, parameter)
            by_name |= _of_slot(name, index, store.layout, store.specs, store.layouts, everywhere)
    by_name |= dict.fromkeys(members.buffers, everywhere)
    by_name |= {alias: by_name[name] for alias, name in members.aliases.items()}
    return {name: sbp[0] if len(sbp) == 1 else sbp for name, sbp in by_name.items()}


def planned_placements(layout: Iterable[PlannedBucket], mesh_dims: int) -> dict[str, Sbp | NdSbp]:
    """Return the placements of parameters and states in planned buckets, as :func:`placements` does."""
    by_name: dict[str, NdSbp] = {}
    for planned in layout:
        for index, slot in enumerate(planned.layout.slots):
            by_name |= _of_slot(
                slot.name, index, planned.layout, planned.specs, planned.layouts, all_broadcast(mesh_dims)
            )
    return {name: sbp[0] if len(sbp) == 1 else sbp for name, sbp in by_name.items()}


def _of_slot(
    name: str, index: int, bucket: Bucket, states: Iterable[str], layouts: Mapping[str, Bucket], everywhere: NdSbp
) -> dict[str, NdSbp]:
    by_name = {name: bucket.sbp_of(bucket.slots[index])}
    for state in states:
        layout = layouts.get(state)
        by_name[f"{name}.{state}"] = everywhere if layout is None else layout.sbp_of(layout.slots[index])
    return by_name


def owners(members: Members) -> dict[str, int]:
    """Return the owner of each parameter that one rank stores whole: its index along the ZeRO dimension."""
    ranks: dict[str, int] = {}
    for name, parameter in members.parameters.items():
        store = store_of(parameter)
        if store is not None and store.layout.owners is not None:
            ranks[name] = store.layout.owners[_slot(store, parameter)]
    return ranks | {alias: ranks[name] for alias, name in members.aliases.items() if name in ranks}


def _slot(store: Store, parameter: nn.Parameter) -> int:
    return next(index for index, own in enumerate(store.parameters) if own is parameter)
