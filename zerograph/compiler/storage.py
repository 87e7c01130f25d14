"""The storage of each bucket between steps, as the configuration says, and the space that it takes in files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from zerograph.compiler.layout import PlannedBucket
from zerograph.config import Config
from zerograph.errors import ConfigError
from zerograph.ir.buckets import Bucket, Folder, ShardStorage
from zerograph.ir.mesh import Mesh, local_shape
from zerograph.ir.metadata import meta
from zerograph.ir.offload import OffloadTo
from zerograph.ir.step_graph import placeholders
from zerograph.runtime.offload.files import Extent, open_file, reserve
from zerograph.runtime.state import Extents


def assign_storage(layout: Sequence[PlannedBucket], config: Config, mesh: Mesh) -> tuple[PlannedBucket, ...]:
    """Return the layout with the storage of each bucket that the step updates; other buckets keep theirs.

    :func:`keep_gather_buffers` assigns the gather buffers, once the graph is emitted.

    Raises:
        ConfigError: the offload options do not fit the ZeRO stage or each other.
    """
    _check_options(layout, config)
    # A bucket that is freed after its use has no gather buffer. A bucket that another graph updates is left as it is.
    reshards = config.policy.reshard_after_forward or config.memory.memory_budget is not None
    frees = any(planned.updates for planned in layout) and reshards
    bytes_left = 0 if config.memory.offload.parameters is None else config.memory.offload.parameters.max_in_cpu
    assigned = []
    for planned in layout:
        if planned.updates:
            bucket, storage = planned.layout, planned.layout.storage
            shard_bytes = math.prod(local_shape(bucket.shape, bucket.sbp, mesh)) * bucket.dtype.itemsize
            stays = bucket.is_whole or shard_bytes <= bytes_left
            parameters = None if stays else _folder(config.memory.offload.parameters)
            bytes_left -= 0 if bucket.is_whole or parameters is not None else shard_bytes
            # Whole buckets of an accelerator are updated there.
            state = _folder(config.memory.offload.optimizer) if bucket.storage_device.type == "cpu" else None
            storage = replace(storage, parameters=parameters, state=state)
            planned = replace(planned, layout=replace(bucket, storage=storage))
        if frees and (planned.updates or planned.optimizer is None):
            storage = replace(planned.layout.storage, gather_buffer=False)
            planned = replace(planned, layout=replace(planned.layout, storage=storage))
        assigned.append(planned)
    return tuple(assigned)


def keep_gather_buffers(layout: Sequence[PlannedBucket], graph: fx.Graph) -> tuple[PlannedBucket, ...]:
    """Return the layout with a gather buffer for each bucket that the emitted graph gathers into one."""
    names = {meta(node)["role"].bucket for node in placeholders(graph, "gather_buffer")}
    kept = []
    for planned in layout:
        storage = planned.layout.storage
        # A buffer that exists stays: two steps, of which one uses it, would free and allocate it in turn.
        storage = replace(storage, gather_buffer=storage.gather_buffer or planned.layout.name in names)
        kept.append(replace(planned, layout=replace(planned.layout, storage=storage)))
    return tuple(kept)


def _check_options(layout: Sequence[PlannedBucket], config: Config) -> None:
    offload, policy = config.memory.offload, config.policy
    if offload.parameters is not None and not (policy.split and policy.reshard_after_forward):
        raise ConfigError(
            "config.memory.offload: parameters need ZeRO stage 3: below it they are gathered throughout the step\n"
            "Set config.zero.stage = 3, or choose zg.Offload without parameters."
        )
    if all(planned.layout.device.type == "cpu" for planned in layout if planned.updates):
        return
    if offload.parameters is not None and offload.optimizer is None:
        raise ConfigError(
            "config.memory.offload: parameters of an accelerator need the optimizer: shards are updated where they are "
            "stored\nGive zg.Offload(optimizer='cpu', parameters=...) or another place for it."
        )
    if offload.optimizer is not None and not policy.split:
        raise ConfigError(
            "config.memory.offload: the optimizer of a model on an accelerator needs ZeRO: only shards are offloaded\n"
            "Set config.zero.stage = 1, which works on a single rank too."
        )


def _folder(option: OffloadTo | None) -> Folder | None:
    return None if option is None else option.folder


def reserve_files(layout: Sequence[PlannedBucket], mesh: Mesh, rank: int) -> dict[str, Extents]:
    """Reserve space in this rank's files for all state that moves there.

    Space that is not used is freed when the result is deleted.

    Returns:
        The reserved extents: by bucket name, then by entry of the optimizer state; ``""`` for the parameters.

    Raises:
        OffloadError: the directory does not exist or cannot be written, or the disk is too full.
    """
    extents: dict[str, Extents] = {}
    for planned in layout:
        storage = planned.layout.storage
        before = ShardStorage() if planned.store is None else planned.store.layout.storage
        moved: dict[str, tuple[Bucket, Folder]] = {}
        if storage.parameters is not None and storage.parameters != before.parameters:
            moved[""] = planned.layout, storage.parameters
        if storage.state is not None and storage.state != before.state:
            moved |= {name: (entry, storage.state) for name, entry in planned.layouts.items()}
        extents[planned.layout.name] = _reserved(moved, mesh, rank)
    return extents


def _reserved(moved: Mapping[str, tuple[Bucket, Folder]], mesh: Mesh, rank: int) -> dict[str, Extent]:
    return {
        name: reserve(
            open_file(folder.path, rank, keep=folder.keep), local_shape(entry.shape, entry.sbp, mesh), entry.dtype
        )
        for name, (entry, folder) in moved.items()
    }
