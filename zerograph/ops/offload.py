"""Operators that move tensors between a device, the CPU and files.

``fetch`` reads from a file, ``write_back`` writes to one, and ``transfer`` copies to another device and dtype. They
only start a transfer: ``wait_transfer`` waits for it. A placeholder whose values are in a file is a *handle*, a 0-d
int64 tensor that names a part of the file. Their kernels are in ``zerograph.runtime.offload``. ``pack`` copies 0-d
tensors of the CPU to an accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerograph.ops.definition import define


def _fetch(handle: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device=handle.device)


def _transfer(value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(value.shape, dtype=dtype, device=device)


def _pack(scalars: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the numbers as one tensor [len(scalars)] on the device, without waiting for it."""
    packed = torch.stack([scalar.to(dtype) for scalar in scalars])
    # Pinned memory is used again only after the copy from it: torch's allocator records an event.
    return packed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else packed.to(device)


def _pack_fake(scalars: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(len(scalars), dtype=dtype, device=device)


def _write(*_: Tensor) -> None:
    return None


# Two schemas declare a write, so that no pass moves the node past a reader or takes it for dead code. ``write_back``
# changes the file behind its handle. Before ``wait_transfer`` its argument is empty, or a thread still writes its
# memory to the disk.
FETCH = define("fetch", "(Tensor handle, int[] size, ScalarType dtype) -> Tensor", None, _fetch)
WRITE_BACK = define("write_back", "(Tensor(a!) handle, Tensor value) -> ()", None, _write)
TRANSFER = define("transfer", "(Tensor value, ScalarType dtype, Device device) -> Tensor", None, _transfer)
WAIT_TRANSFER = define("wait_transfer", "(Tensor(a!) value) -> ()", None, _write)
PACK = define("pack", "(Tensor[] scalars, ScalarType dtype, Device device) -> Tensor", _pack, _pack_fake)
