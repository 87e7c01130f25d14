"""Bytes that the buckets of a step occupy on a rank, from their layout alone, before any pass runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerograph.compiler.layout import PlannedBucket
from zerograph.ir.buckets import Bucket
from zerograph.ir.mesh import Mesh, local_shape


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of parameters and optimizer state between steps, and memory that any step over them needs.

    Parameters count as shards; only the emitted graph tells which shards are part of a gather buffer.

    Attributes:
        device: in the memory of the device that computes.
        host: in the CPU's memory, for a step of an accelerator.
        files: in files.
        gradients: gradients on the device at the end of backward: whole if they are not split, else shards.
        largest: the largest gathered parameter, in its compute dtype.
        updated: bytes that the CPU reads and writes to update offloaded buckets: parameters, gradients and state, then
            parameters and state.
        trains: True if any bucket is updated.
    """

    device: int
    host: int
    files: int
    gradients: int
    largest: int
    updated: int
    trains: bool

    @property
    def lower_bound(self) -> int:
        """Return the lower bound of a step's device memory, in bytes."""
        return self.device + max(self.gradients, self.largest)


def stored_bytes(
    layout: Sequence[PlannedBucket], mesh: Mesh, *, early: bool = True, reduce_dtype: torch.dtype | None = None
) -> StoredBytes:
    """Count the bytes of all buckets of a step.

    Args:
        early: gradients are split as soon as they are reduced, not kept whole until the update.
        reduce_dtype: as in the configuration.
    """
    stored = {"device": 0, "host": 0, "files": 0}
    gradients = largest = updated = 0
    for planned in layout:
        bucket, offload = planned.layout, planned.layout.storage
        memory = "host" if bucket.storage_device != bucket.device else "device"
        parameters = _bytes(bucket, mesh)
        state = sum(_bytes(entry, mesh) for entry in planned.layouts.values())
        stored["files" if offload.parameters is not None else memory] += parameters
        stored["files" if offload.state is not None else memory] += state
        width = (bucket.compute_dtype or bucket.dtype).itemsize
        whole = math.prod(local_shape(bucket.shape, bucket.gathered, mesh))
        if bucket.sbp != bucket.gathered:
            share = whole / bucket.padded
            largest = max(largest, *(round(slot.numel * share) * width for slot in bucket.slots))
        if not planned.updates:
            continue
        if memory == "host":
            updated += 3 * parameters + 2 * state
        narrowest = width if reduce_dtype is None else min(width, reduce_dtype.itemsize)
        if not early:
            gradients += whole * narrowest
        elif memory == "device":
            gradients += math.prod(local_shape(bucket.shape, bucket.sbp, mesh)) * narrowest
    trains = any(planned.updates for planned in layout)
    return StoredBytes(**stored, gradients=gradients, largest=largest, updated=updated, trains=trains)


def _bytes(bucket: Bucket, mesh: Mesh) -> int:
    return math.prod(local_shape(bucket.shape, bucket.sbp, mesh)) * bucket.dtype.itemsize
