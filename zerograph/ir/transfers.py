"""The nodes that move what rests elsewhere: all but ``landed`` start, and ``landed`` waits for what they started.

``fetch`` and ``put_back`` read and write files: a placeholder whose values rest in one is a *handle*, a 0-d int64
tensor that says which part of which file. ``carry`` copies to another device, in a dtype. What these operators do is in
``zerograph.runtime.offload``; passes and the memory forecast only need to know them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

library = torch.library.Library("zerograph", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
# Both change what others read, so nothing moves them past a reader and nothing takes them for dead code: ``put_back``
# what the handle stands for, ``landed`` a tensor that is empty until then, or whose memory is on its way to the disk.
library.define("fetch(Tensor handle, int[] size, ScalarType dtype) -> Tensor", tags=_TAGS)
library.define("put_back(Tensor(a!) handle, Tensor value) -> ()", tags=_TAGS)
library.define("carry(Tensor value, ScalarType dtype, Device device) -> Tensor", tags=_TAGS)
library.define("landed(Tensor(a!) value) -> ()", tags=_TAGS)

FETCH = torch.ops.zerograph.fetch.default
PUT_BACK = torch.ops.zerograph.put_back.default
CARRY = torch.ops.zerograph.carry.default
LANDED = torch.ops.zerograph.landed.default


def _fetch(handle: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device=handle.device)


def _carry(value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(value.shape, dtype=dtype, device=device)


def _nothing(*_: Tensor) -> None:
    return None


torch.library.register_fake("zerograph::fetch", _fetch, lib=library)
torch.library.register_fake("zerograph::carry", _carry, lib=library)
torch.library.register_fake("zerograph::put_back", _nothing, lib=library)
torch.library.register_fake("zerograph::landed", _nothing, lib=library)
