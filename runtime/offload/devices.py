"""Copies between an accelerator and the memory of the CPU, on a stream of their own.

A copy begins when the accelerator has got as far as the graph had when it was started: what is copied is there by then,
and nothing that still runs uses the memory that is copied to. It then runs beside what comes next. A node that needs it
waits: the accelerator's own stream for what came up, the CPU for what came down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerograph.ir import offload_operators
from zerograph.runtime.offload.transfers import note

_streams: dict[torch.device, torch.Stream] = {}


@dataclass(frozen=True, eq=False)
class _Copy:
    """A copy under way, over when ``event`` is; None if it is over.

    torch's allocators, which know what its stream reads, keep that until then.

    Attributes:
        awaits: the device whose stream is to wait; None where the CPU is.
    """

    event: torch.Event | None
    awaits: torch.device | None

    def wait(self) -> None:
        if self.event is None:
            return
        if self.awaits is None:
            self.event.synchronize()
        else:
            torch.accelerator.current_stream(self.awaits).wait_event(self.event)


def _carry(value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Start copying ``value`` to another device; between two pools of the CPU's memory it is over when this returns."""
    up = value.device.type == "cpu"
    accelerator = device if up else value.device
    if accelerator.type == "cpu":
        found = value.to(dtype, copy=True)
        note(found, _Copy(None, None))
        return found
    # Cast where it is: the way carries the narrower dtype. Only pinned memory is copied from without the CPU.
    staged = value.to(dtype)
    staged = staged.pin_memory() if up and not staged.is_pinned() else staged
    found = torch.empty(value.shape, dtype=dtype, device=device, pin_memory=not up)
    stream = _stream(accelerator)
    stream.wait_stream(torch.accelerator.current_stream(accelerator))
    with stream:
        found.copy_(staged, non_blocking=True)
    for tensor in (staged, found):
        if tensor.device.type != "cpu":
            # Or it would be given to others before the copy is over. Of pinned memory ``copy_`` notes that itself.
            tensor.record_stream(stream)
    note(found, _Copy(stream.record_event(), accelerator if up else None))
    return found


def _stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.Stream(device)
    return _streams[device]


offload_operators.library.impl("transfer", _carry, "CompositeExplicitAutograd")
