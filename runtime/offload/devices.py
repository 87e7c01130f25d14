"""Copy tensors between an accelerator and the memory of the CPU, on a stream of their own for each direction.

A copy begins after the work that was queued on the accelerator when it was started: its source has been computed by
then, and no running kernel uses its destination. It then overlaps later work. For a copy to the accelerator, the
accelerator's current stream waits; for a copy to the CPU, the CPU waits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerograph.ops.definition import implement
from zerograph.ops.offload import TRANSFER
from zerograph.runtime.offload.transfers import note_transfer

# By the accelerator, and whether the copies go to it: the link carries both directions at a time.
_streams: dict[tuple[torch.device, bool], torch.Stream] = {}


def _transfer(value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Start copying ``value`` to another device. A copy within the CPU's memory is complete on return."""
    to_accelerator = value.device.type == "cpu"
    accelerator = device if to_accelerator else value.device
    if accelerator.type == "cpu":
        copy = value.to(dtype, copy=True)
        note_transfer(copy, lambda: None)
        return copy
    # Cast before the copy, as the CPU would be busy after it. Only pinned memory is copied without the CPU; torch keeps
    # what is freed of it, so later steps pin none.
    staged = value
    if value.dtype is not dtype or (to_accelerator and not value.is_pinned()):
        staged = torch.empty(value.shape, dtype=dtype, device=value.device, pin_memory=to_accelerator).copy_(value)
    copy = torch.empty(value.shape, dtype=dtype, device=device, pin_memory=not to_accelerator)
    stream = _stream(accelerator, to_accelerator)
    stream.wait_stream(torch.accelerator.current_stream(accelerator))
    with stream:
        copy.copy_(staged, non_blocking=True)
    for tensor in (staged, copy):
        if tensor.device.type != "cpu":
            # Else the allocator would reuse the memory before the copy is complete. ``copy_`` records pinned memory.
            tensor.record_stream(stream)
    event = stream.record_event()
    if to_accelerator:
        note_transfer(copy, lambda: torch.accelerator.current_stream(accelerator).wait_event(event))
    else:
        note_transfer(copy, event.synchronize)
    return copy


def _stream(device: torch.device, to_accelerator: bool) -> Any:
    key = device, to_accelerator
    if key not in _streams:
        _streams[key] = torch.Stream(device)
    return _streams[key]


implement(TRANSFER, _transfer)
