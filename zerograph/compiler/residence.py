"""Where the buckets of a step rest between steps, as the configuration says, and the room for it on disk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from zerograph.compiler.layout import Planned
from zerograph.config import Config
from zerograph.errors import ConfigError
from zerograph.ir.buckets import Bucket, Folder, ShardStorage
from zerograph.ir.mesh import Mesh, local_shape
from zerograph.ir.metadata import meta
from zerograph.ir.offload import Offload
from zerograph.ir.step_graph import placeholders
from zerograph.runtime.offload.files import Extent, open_file, reserve
from zerograph.runtime.state import Extents


def assign(layout: Sequence[Planned], config: Config, mesh: Mesh) -> tuple[Planned, ...]:
    """The layout with the place of rest of each bucket that the step updates; others rest where they do.

    A bucket is given room for the whole of it once the graph has been made (:func:`with_rooms`).

    Raises:
        ConfigError: parameters that each rank holds whole are to rest elsewhere.
    """
    _check(layout, config)
    # What a stage or a budget frees has no room; what another graph updates is left alone.
    reshards = config.policy.reshard_after_forward or config.memory_budget is not None
    frees = any(one.updates for one in layout) and reshards
    found = []
    left = 0 if config.parameter_offload is None else config.parameter_offload.max_in_cpu
    for one in layout:
        if one.updates:
            bucket, rest = one.bucket, one.bucket.storage
            shard = math.prod(local_shape(bucket.shape, bucket.sbp, mesh)) * bucket.dtype.itemsize
            parameters = None if bucket.is_whole or shard <= left else _folder(config.parameter_offload)
            left -= 0 if bucket.is_whole or parameters is not None else shard
            # Whole buckets of an accelerator are updated there.
            state = _folder(config.optimizer_offload) if bucket.storage_device.type == "cpu" else None
            one = replace(one, bucket=replace(bucket, storage=replace(rest, parameters=parameters, state=state)))
        if frees and (one.updates or one.keeper is None):
            one = replace(one, bucket=replace(one.bucket, storage=replace(one.bucket.storage, gather_buffer=False)))
        found.append(one)
    return tuple(found)


def with_rooms(layout: Sequence[Planned], graph: fx.Graph) -> tuple[Planned, ...]:
    """The layout with each bucket resting in a room that the emitted graph has one for."""
    names = {meta(node)["role"].bucket for node in placeholders(graph, "gather_buffer")}
    found = []
    for one in layout:
        rest = one.bucket.storage
        # One that is there stays: steps that differ in what they can use would take it and give it back in turn.
        rest = replace(rest, gather_buffer=rest.gather_buffer or one.bucket.name in names)
        found.append(replace(one, bucket=replace(one.bucket, storage=rest)))
    return tuple(found)


def _check(layout: Sequence[Planned], config: Config) -> None:
    if config.parameter_offload is not None and not (config.policy.split and config.policy.reshard_after_forward):
        raise ConfigError(
            "config.offload_parameters needs ZeRO stage 3: below it the gathered parameters live throughout the step\n"
            "Choose config.enable_zero(True, stage=3), or config.offload_parameters(None)."
        )
    if all(one.bucket.device.type == "cpu" for one in layout if one.updates):
        return
    if config.parameter_offload is not None and config.optimizer_offload is None:
        raise ConfigError(
            "config.offload_parameters on an accelerator needs config.offload_optimizer: shards are updated where they "
            "rest\nCall config.offload_optimizer('cpu') or ('nvme', ...) too."
        )
    if config.optimizer_offload is not None and not config.policy.split:
        raise ConfigError(
            "config.offload_optimizer on an accelerator needs ZeRO: it is shards that rest elsewhere\n"
            "Choose config.enable_zero(True, stage=1), which a single rank may as well."
        )


def _folder(option: Offload | None) -> Folder | None:
    return None if option is None else option.folder


def make_room(layout: Sequence[Planned], mesh: Mesh, rank: int) -> dict[str, Extents]:
    """Room in this rank's files for all that is to rest there and does not yet, by bucket.

    What is not used after all comes back when the result is let go of.

    Raises:
        OffloadError: no such directory, it cannot be written to, or the disk is too full.
    """
    found: dict[str, Extents] = {}
    for one in layout:
        rest = one.bucket.storage
        before = ShardStorage() if one.store is None else one.store.layout.storage
        wanted: dict[str, tuple[Bucket, Folder]] = {}
        if rest.parameters is not None and rest.parameters != before.parameters:
            wanted[""] = one.bucket, rest.parameters
        if rest.state is not None and rest.state != before.state:
            wanted |= {name: (entry, rest.state) for name, entry in one.layouts.items()}
        found[one.bucket.name] = _reserved(wanted, mesh, rank)
    return found


def _reserved(wanted: Mapping[str, tuple[Bucket, Folder]], mesh: Mesh, rank: int) -> dict[str, Extent]:
    return {
        name: reserve(
            open_file(folder.path, rank, keep=folder.keep), local_shape(entry.shape, entry.sbp, mesh), entry.dtype
        )
        for name, (entry, folder) in wanted.items()
    }
