"""Where the buckets of a step rest, in bytes on a rank: known from their layout, before any pass has run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zerograph.buckets import Bucket
from zerograph.layout import Planned
from zerograph.mesh import Mesh, local_shape


@dataclass(frozen=True)
class Resting:
    """Bytes of parameters and optimizer state between steps.

    Attributes:
        device: in the memory of the device that computes.
        host: in that of the CPU, of an accelerator's step.
        files: in files.
        largest: of one bucket that is gathered, in the dtype that it is computed with; 0 where none is.
        gathered: of all of them.
        updated: what updates read and write outside of the device's memory: parameters, gradients and state once, and
            parameters and state again.
    """

    device: int
    host: int
    files: int
    largest: int
    gathered: int
    updated: int


def resting(layout: Sequence[Planned], mesh: Mesh) -> Resting:
    """Of all buckets of a step."""
    found = {"device": 0, "host": 0, "files": 0}
    gathered: list[int] = []
    updated = 0
    for one in layout:
        bucket, rest = one.bucket, one.bucket.rest
        place = "host" if bucket.home != bucket.device else "device"
        own = _bytes(bucket, mesh)
        state = sum(_bytes(entry, mesh) for entry in one.layouts.values())
        found["files" if rest.parameters is not None else place] += own
        found["files" if rest.state is not None else place] += state
        if one.updates and place == "host":
            updated += 3 * own + 2 * state
        if bucket.sbp != bucket.gathered:
            width = (bucket.compute_dtype or bucket.dtype).itemsize
            gathered.append(math.prod(local_shape(bucket.shape, bucket.gathered, mesh)) * width)
    return Resting(**found, largest=max(gathered, default=0), gathered=sum(gathered), updated=updated)


def _bytes(bucket: Bucket, mesh: Mesh) -> int:
    return math.prod(local_shape(bucket.shape, bucket.sbp, mesh)) * bucket.dtype.itemsize
