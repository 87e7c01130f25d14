"""Where the buckets of a step rest, in bytes on a rank: known from their layout, before any pass has run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerograph.compiler.layout import Planned
from zerograph.ir.buckets import Bucket
from zerograph.ir.mesh import Mesh, local_shape


@dataclass(frozen=True)
class Resting:
    """Bytes of parameters and optimizer state between steps, and what a step holds beside them whatever it does.

    Of parameters the shards: which of them rest in rooms for the whole only the emitted graph tells.

    Attributes:
        device: in the memory of the device that computes.
        host: in that of the CPU, of an accelerator's step.
        files: in files.
        gradients: on the device when backward ends: whole ones where they are not split, else shards.
        largest: the largest parameter that is gathered, as it is computed with.
        updated: what the CPU reads and writes as it updates what rests there: parameters, gradients and state, and
            parameters and state again.
        trains: anything is updated.
    """

    device: int
    host: int
    files: int
    gradients: int
    largest: int
    updated: int
    trains: bool

    @property
    def least(self) -> int:
        """Return the lower bound of a step's device memory, in bytes."""
        return self.device + max(self.gradients, self.largest)


def resting(
    layout: Sequence[Planned], mesh: Mesh, *, early: bool = True, reduce_dtype: torch.dtype | None = None
) -> Resting:
    """Of all buckets of a step.

    Args:
        early: a gradient is split as soon as it is there, else when backward has ended.
        reduce_dtype: as in the configuration.
    """
    found = {"device": 0, "host": 0, "files": 0}
    gradients = largest = updated = 0
    for one in layout:
        bucket, rest = one.bucket, one.bucket.storage
        place = "host" if bucket.storage_device != bucket.device else "device"
        own = _bytes(bucket, mesh)
        state = sum(_bytes(entry, mesh) for entry in one.layouts.values())
        found["files" if rest.parameters is not None else place] += own
        found["files" if rest.state is not None else place] += state
        width = (bucket.compute_dtype or bucket.dtype).itemsize
        whole = math.prod(local_shape(bucket.shape, bucket.gathered, mesh))
        if bucket.sbp != bucket.gathered:
            share = whole / bucket.padded
            largest = max(largest, *(round(slot.numel * share) * width for slot in bucket.slots))
        if not one.updates:
            continue
        if place == "host":
            updated += 3 * own + 2 * state
        narrowest = width if reduce_dtype is None else min(width, reduce_dtype.itemsize)
        if not early:
            gradients += whole * narrowest
        elif place == "device":
            gradients += math.prod(local_shape(bucket.shape, bucket.sbp, mesh)) * narrowest
    trains = any(one.updates for one in layout)
    return Resting(**found, gradients=gradients, largest=largest, updated=updated, trains=trains)


def _bytes(bucket: Bucket, mesh: Mesh) -> int:
    return math.prod(local_shape(bucket.shape, bucket.sbp, mesh)) * bucket.dtype.itemsize
