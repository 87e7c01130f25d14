"""Copy tensors between an accelerator and the memory of the CPU, on a stream of their own.

A copy begins after the work that was queued on the accelerator when it was started: its source has been computed by
then, and no running kernel uses its destination. It then overlaps later work. For a copy to the accelerator, the
accelerator's current stream waits; for a copy to the CPU, the CPU waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerograph.ir import offload_operators
from zerograph.runtime.offload.transfers import note_transfer

_streams: dict[torch.device, torch.Stream] = {}


@dataclass(frozen=True, eq=False)
class _Copy:
    """A copy in flight. torch's allocators keep the memory that its stream uses until it is complete.

    Attributes:
        event: recorded after the copy; None if the copy is complete.
        waiting_device: the device whose stream waits for it; None if the CPU waits.
    """

    event: torch.Event | None
    waiting_device: torch.device | None

    def wait(self) -> None:
        """Let the device, or the CPU, wait for the copy."""
        if self.event is None:
            return
        if self.waiting_device is None:
            self.event.synchronize()
        else:
            torch.accelerator.current_stream(self.waiting_device).wait_event(self.event)


def _transfer(value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Start copying ``value`` to another device. A copy within the CPU's memory is complete on return."""
    to_accelerator = value.device.type == "cpu"
    accelerator = device if to_accelerator else value.device
    if accelerator.type == "cpu":
        copy = value.to(dtype, copy=True)
        note_transfer(copy, _Copy(None, None))
        return copy
    # Cast before the copy: the narrower dtype travels. Only pinned memory is copied without the CPU.
    staged = value.to(dtype)
    staged = staged.pin_memory() if to_accelerator and not staged.is_pinned() else staged
    copy = torch.empty(value.shape, dtype=dtype, device=device, pin_memory=not to_accelerator)
    stream = _stream(accelerator)
    stream.wait_stream(torch.accelerator.current_stream(accelerator))
    with stream:
        copy.copy_(staged, non_blocking=True)
    for tensor in (staged, copy):
        if tensor.device.type != "cpu":
            # Else the allocator would reuse the memory before the copy is complete. ``copy_`` records pinned memory.
            tensor.record_stream(stream)
    note_transfer(copy, _Copy(stream.record_event(), accelerator if to_accelerator else None))
    return copy


def _stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.Stream(device)
    return _streams[device]


offload_operators.library.impl("transfer", _transfer, "CompositeExplicitAutograd")
