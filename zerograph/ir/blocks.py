"""Tensors coded in few bits: bf16, or integers with one scale for each block of elements.

A block is ``block`` consecutive elements along the last dimension. Its code is a run of bytes: the integers, then the
scale. So the code of a slice that begins and ends between blocks is a slice of the code, and one collective moves
integers and scales together. Buckets lay every parameter at the begin of a block (:mod:`zerograph.ir.buckets`), so a
code depends on the values of one parameter alone: not on the number of ranks, the stage or the bucket size.

Codes are rounded to the nearest, halves to even. An infinite or NaN element makes its whole block so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Code = Literal["bf16", "int8", "int4", "root", "fourth_root"]

# Largest integer of a code.
_LIMITS = {"int8": 127, "int4": 7, "root": 127, "fourth_root": 255}
# Elements that the CPU codes at once: they and their temporaries stay in a core's cache.
_CHUNK = 2**17


@dataclass(frozen=True)
class Codec:
    """How a tensor is coded.

    Attributes:
        code: ``"bf16"``; ``"int8"`` and ``"int4"``: integers that the scale multiplies; ``"root"`` and
            ``"fourth_root"``: 8 bits for the root of a magnitude with its sign, or for the fourth root.
        block: number of elements with one scale; 1 for bf16, which has none.
        scales: dtype of the scales.
    """

    code: Code
    block: int = 1
    scales: torch.dtype = torch.float32

    @property
    def arguments(self) -> tuple[str, int, torch.dtype]:
        """Arguments of the operators below."""
        return self.code, self.block, self.scales

    @property
    def block_bytes(self) -> int:
        """Bytes of a coded block."""
        return _code_bytes(self.code, self.block) + (0 if self.code == "bf16" else self.scales.itemsize)

    def coded_bytes(self, numel: int) -> int:
        """Return the bytes that code ``numel`` elements, a multiple of ``block``."""
        return numel // self.block * self.block_bytes

    def __str__(self) -> str:
        if self.code == "bf16":
            return "bf16"
        return f"{self.code} in blocks of {self.block}, {str(self.scales).removeprefix('torch.')} scales"


def _code_bytes(code: str, block: int) -> int:
    return {"bf16": 2 * block, "int4": block // 2}.get(code, block)


def _encode(x: Tensor, code: Code, block: int, scales: torch.dtype) -> Tensor:
    """Code a tensor ``[..., n]``: to ``[..., n]`` of bf16, or to bytes ``[..., n / block * block_bytes]``."""
    if code == "bf16":
        return x.to(torch.bfloat16, copy=True)
    coded = _encode_fake(x, code, block, scales)
    for values, into in _chunks(x, coded, Codec(code, block, scales)):
        _encode_blocks(values.float(), into, code, scales)
    return coded


def _encode_fake(x: Tensor, code: Code, block: int, scales: torch.dtype) -> Tensor:
    if code == "bf16":
        return torch.empty_like(x, dtype=torch.bfloat16)
    size = Codec(code, block, scales).coded_bytes(x.shape[-1])
    return x.new_empty((*x.shape[:-1], size), dtype=torch.uint8)


def _encode_blocks(values: Tensor, into: Tensor, code: Code, scales: torch.dtype) -> None:
    """Code blocks ``[blocks, block]`` of fp32 into ``[blocks, block_bytes]``."""
    block, limit = values.shape[1], _LIMITS[code]
    integers, scale = into.split([_code_bytes(code, block), scales.itemsize], 1)
    stored = scale.view(scales)
    magnitudes = values if code == "fourth_root" else values.abs()
    largest = magnitudes.amax(1, keepdim=True)
    stored.copy_(largest if "root" in code else largest.div_(limit))
    wide = stored.float()
    # A scale too small for a reciprocal codes zeros.
    inverse = torch.where(wide >= torch.finfo(torch.float32).tiny, wide.reciprocal(), 0.0)
    if code == "fourth_root":
        # Not 0: an optimizer divides by the root of such an entry.
        integers.copy_(torch.mul(values, inverse).sqrt_().sqrt_().mul_(limit).round_().clamp_min_(1))
    elif code == "root":
        integers.view(torch.int8).copy_(magnitudes.mul_(inverse).sqrt_().mul_(limit).copysign_(values).round_())
    elif code == "int8":
        integers.view(torch.int8).copy_(torch.mul(values, inverse).round_().clamp_(-limit, limit))
    else:
        rounded = torch.mul(values, inverse).round_().clamp_(-limit, limit)
        # The first half of a block is in the low bits, the second half in the high bits; each is offset by 8.
        low, high = rounded.chunk(2, 1)
        integers.copy_(torch.add(low, high, alpha=16).add_(8 + 8 * 16))


def _decode(coded: Tensor, code: Code, block: int, scales: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Return the values of a code, in ``dtype``."""
    if code == "bf16":
        return coded.to(dtype)
    x = _decode_fake(coded, code, block, scales, dtype)
    for values, source in _chunks(x, coded, Codec(code, block, scales)):
        if dtype is torch.float32:
            _decode_blocks(source, values, code, scales)
        else:
            values.copy_(_decoded_blocks(source, code, block, scales))
    return x


def _decode_fake(coded: Tensor, code: Code, block: int, scales: torch.dtype, dtype: torch.dtype) -> Tensor:
    if code == "bf16":
        return torch.empty_like(coded, dtype=dtype)
    numel = coded.shape[-1] // Codec(code, block, scales).block_bytes * block
    return coded.new_empty((*coded.shape[:-1], numel), dtype=dtype)


def _decode_blocks(coded: Tensor, into: Tensor, code: Code, scales: torch.dtype) -> None:
    """Write the values of blocks ``[blocks, block_bytes]`` to ``[blocks, block]`` of fp32."""
    integers, scale = coded.split([_code_bytes(code, into.shape[1]), scales.itemsize], 1)
    if code == "fourth_root":
        into.copy_(integers).div_(_LIMITS[code]).square_().square_()
    elif code == "root":
        into.copy_(integers.view(torch.int8)).div_(_LIMITS[code])
        into.mul_(into.abs())
    elif code == "int8":
        into.copy_(integers.view(torch.int8))
    else:
        low, high = into.chunk(2, 1)
        low.copy_(integers & 15).sub_(8)
        high.copy_(integers >> 4).sub_(8)
    into.mul_(scale.view(scales).float())


def _decoded_blocks(coded: Tensor, code: Code, block: int, scales: torch.dtype) -> Tensor:
    values = coded.new_empty((coded.shape[0], block), dtype=torch.float32)
    _decode_blocks(coded, values, code, scales)
    return values


def _sum_decoded(coded: Tensor, code: Code, block: int, scales: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Sum codes ``[ranks, ..., m]`` along dimension 0, in order and in fp32; return ``[..., n]`` in ``dtype``."""
    if code == "bf16":
        total = coded[0].float()
        for part in coded[1:]:
            total.add_(part)
        return total.to(dtype)
    total = _decode(coded[0], code, block, scales, torch.float32)
    codec = Codec(code, block, scales)
    for part in coded[1:]:
        for values, source in _chunks(total, part, codec):
            values.add_(_decoded_blocks(source, code, block, scales))
    return total.to(dtype)


def _sum_decoded_fake(coded: Tensor, code: Code, block: int, scales: torch.dtype, dtype: torch.dtype) -> Tensor:
    return _decode_fake(coded[0], code, block, scales, dtype)


def _chunks(x: Tensor, coded: Tensor, codec: Codec) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield values [blocks, block] with their code [blocks, block_bytes], both contiguous, in parts for a cache."""
    values, blocks = x.view(-1, codec.block), coded.view(-1, codec.block_bytes)
    size = max(1, _CHUNK // codec.block) if x.device.type == "cpu" else max(1, len(blocks))
    return zip(values.split(size), blocks.split(size), strict=True)


_library = torch.library.Library("zerograph", "FRAGMENT")
_CODEC = "str code, int block, ScalarType scales"


def _define(name: str, takes: str, run: Any, fake: Any) -> Any:
    """Register an operator of the ``zerograph`` namespace for all devices and return it."""
    _library.define(f"{name}({takes}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zerograph::{name}", fake, lib=_library)
    return getattr(torch.ops.zerograph, name).default


encode = _define("encode", f"Tensor x, {_CODEC}", _encode, _encode_fake)
decode = _define("decode", f"Tensor coded, {_CODEC}, ScalarType dtype", _decode, _decode_fake)
sum_decoded = _define("sum_decoded", f"Tensor coded, {_CODEC}, ScalarType dtype", _sum_decoded, _sum_decoded_fake)
