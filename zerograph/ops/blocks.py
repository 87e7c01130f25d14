"""Tensors coded in few bits: bf16, or integers with one scale for each block of elements.

A block is ``block`` consecutive elements along the last dimension. Its code is a run of bytes: the integers, then the
scale. So the code of a slice that begins and ends between blocks is a slice of the code, and one collective moves
integers and scales together. Buckets lay every parameter at the begin of a block (:mod:`zerograph.ir.buckets`), so a
code depends on the values of one parameter alone: not on the number of ranks, the stage or the bucket size.

Codes are rounded to the nearest, halves to even. An infinite or NaN element makes its whole block so.

The codes that are roots serve optimizer state. Their operators, roots included, are rounded to the nearest, so that a
compiled kernel yields the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy
import torch
from torch import Tensor

from zerograph.ops.definition import define

Code = Literal["bf16", "int8", "int4", "root", "fourth_root"]

# Largest integer of a code.
_LIMITS = {"int8": 127, "int4": 7, "root": 127, "fourth_root": 255}
# Two codes with equal layout: an integer of 8 bits for each element.
_INTEGERS = {"root": torch.int8, "fourth_root": torch.uint8}
# Elements that the CPU codes at once: few operators start, and temporaries stay in a cache.
_CHUNK = 2**18


@dataclass(frozen=True)
class Codec:
    """How a tensor is coded.

    Attributes:
        code: ``"bf16"``; ``"int8"`` and ``"int4"``: integers that the scale multiplies; ``"root"``: 8 bits for the
            root of a magnitude, with its sign; ``"fourth_root"``: 8 bits for the fourth root, a scale for the root.
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
    if code in _INTEGERS:
        for part, new in zip(root_parts(into, code), encode_roots(values, code), strict=False):
            part.copy_(new)
    else:
        _encode_integers(values, into, code, scales)


def _encode_integers(values: Tensor, into: Tensor, code: Code, scales: torch.dtype) -> tuple[Tensor, Tensor]:
    """Code blocks as integers that a scale multiplies; return both in fp32."""
    block, limit = values.shape[1], _LIMITS[code]
    integers, scale = into.split([_code_bytes(code, block), scales.itemsize], 1)
    stored = scale.view(scales)
    magnitudes = values.abs()
    stored.copy_(magnitudes.amax(1, keepdim=True).div_(limit))
    factor = stored.float()
    # At most the limit and a few thousandths, which round to the limit: nothing is to be clamped.
    rounded = torch.mul(values, _inverse(factor), out=magnitudes).round_()
    if code == "int8":
        integers.view(torch.int8).copy_(rounded)
    else:
        # The first half of a block is in the low bits, the second half in the high bits; each is offset by 8.
        low, high = rounded.chunk(2, 1)
        # Through int8, to which torch's kernels convert eight times as fast: 128 less, which is the highest bit.
        integers.view(torch.int8).copy_(torch.add(low, high, alpha=16).add_(8))
        integers.bitwise_xor_(128)
    return rounded, factor


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
    if code in _INTEGERS:
        into.copy_(decode_roots(*root_parts(coded, code), code))
        return
    integers, scale = coded.split([_code_bytes(code, into.shape[1]), scales.itemsize], 1)
    if code == "int8":
        into.copy_(integers.view(torch.int8))
    else:
        low, high = into.chunk(2, 1)
        low.copy_(integers & 15).sub_(8)
        high.copy_(integers >> 4).sub_(8)
    into.mul_(scale.view(scales).float())


def root_parts(coded: Tensor, code: str) -> tuple[Tensor, Tensor]:
    """Return views of the integers ``[blocks, block]`` and scales ``[blocks, 1]`` of ``[blocks, block_bytes]``."""
    size = torch.float32.itemsize
    return coded[:, :-size].view(_INTEGERS[code]), coded[:, -size:].view(torch.float32)


def exact_root(x: Tensor) -> Tensor:
    """Return the square root rounded to the nearest, as compiled code does; ``torch.sqrt`` on the CPU is not exact."""
    if x.device.type != "cpu" or x.dtype is not torch.float32:
        return x.sqrt()
    with numpy.errstate(invalid="ignore"):
        return torch.from_numpy(numpy.sqrt(x.numpy()))


def encode_roots(
    values: Tensor, code: str, root_of: Callable[[Tensor], Tensor] = exact_root, *, checked: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the integers ``[blocks, block]`` and scales ``[blocks, 1]`` of blocks of fp32, and the scales' inverses.

    The inverses are returned because Inductor then computes them once for each block.

    Args:
        values: the blocks.
        code: ``"root"`` or ``"fourth_root"``.
        root_of: the square root, rounded to the nearest.
        checked: let a block of fourth roots with a negative entry become NaN. Without it, no entry may be negative.
    """
    if code == "root":
        magnitudes = values.abs()
        scale = magnitudes.amax(1, keepdim=True)
        inverse = _inverse(scale)
        root = (root_of(magnitudes * inverse) * 127).round()
        return torch.where(values < 0, -root, root).to(torch.int8), scale, inverse
    # An optimizer has computed this root. That of a negative entry is NaN, and so is its block then.
    root = root_of(values)
    scale = root_of(values.amax(1, keepdim=True))
    if checked:
        scale = torch.where(values.amin(1, keepdim=True) < 0, torch.nan, scale)
    inverse = _inverse(scale)
    # Not 0: an optimizer divides by the root of such an entry.
    return (root_of(root * inverse) * 255).round().clamp_min(1).to(torch.uint8), scale, inverse


def _inverse(scale: Tensor) -> Tensor:
    """Return reciprocals of scales; 0, which codes zeros, for one that is too small."""
    return torch.where(scale >= torch.finfo(torch.float32).tiny, scale.reciprocal(), 0.0)


def decode_roots(integers: Tensor, scale: Tensor, code: str) -> Tensor:
    """Return the values of blocks of fp32 from their integers and scales."""
    # The largest integer becomes 1, so that decoding and coding again changes no scale.
    root = integers.float() * (1 / _LIMITS[code])
    if code == "root":
        return root.abs() * root * scale
    root = root * root * scale
    return root * root


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


def _coding_error(x: Tensor, coded: Tensor, code: Code, block: int, scales: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Return what a code lacks of its tensor ``[..., n]``, in ``dtype``; 0 in blocks that are not finite."""
    if code == "bf16":
        return x.float().sub(coded).nan_to_num_(0.0, 0.0, 0.0).to(dtype)
    codec = Codec(code, block, scales)
    error = torch.empty_like(x, dtype=dtype)
    for (values, source), (into, _) in zip(_chunks(x, coded, codec), _chunks(error, coded, codec), strict=True):
        decoded = _decoded_blocks(source, code, block, scales)
        into.copy_(_finite(torch.sub(values, decoded, out=decoded)))
    return error


def _finite(error: Tensor) -> Tensor:
    """Replace what is not finite by 0, in place."""
    # A sum takes less time, and is finite only if its terms are. An accelerator would have to be waited for.
    if error.device.type != "cpu" or not error.sum().isfinite():
        error.nan_to_num_(0.0, 0.0, 0.0)
    return error


def _coding_error_fake(
    x: Tensor, coded: Tensor, code: Code, block: int, scales: torch.dtype, dtype: torch.dtype
) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _encode_sum(
    x: Tensor, residual: Tensor, code: Code, block: int, scales: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the code of a sum of fp32, and what it lacks, with the bits of :func:`encode` and :func:`coding_error`."""
    codec = Codec(code, block, scales)
    if code == "bf16" or code in _INTEGERS:
        total = x + residual
        coded = _encode(total, code, block, scales)
        return coded, _coding_error(total, coded, code, block, scales, dtype)
    coded, error = _encode_sum_fake(x, residual, code, block, scales, dtype)
    parts = (_chunks(one, coded, codec) for one in (x, residual, error))
    for (values, into), (owed, _), (lacking, _) in zip(*parts, strict=True):
        total = values + owed
        rounded, factor = _encode_integers(total, into, code, scales)
        lacking.copy_(_finite(total.sub_(rounded.mul_(factor))))
    return coded, error


def _encode_sum_fake(
    x: Tensor, residual: Tensor, code: Code, block: int, scales: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return _encode_fake(x, code, block, scales), torch.empty_like(x, dtype=dtype)


def _difference(x: Tensor, received: Tensor, start: int) -> Tensor:
    """Return ``x`` less its part of ``received``, which begins at ``start`` along the last dimension, in fp32."""
    return x.float() - received.narrow(-1, start, x.shape[-1])


def _difference_fake(x: Tensor, received: Tensor, start: int) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32)


def _chunks(x: Tensor, coded: Tensor, codec: Codec) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield values [blocks, block] with their code [blocks, block_bytes], both contiguous, in parts for a cache."""
    values, blocks = x.view(-1, codec.block), coded.view(-1, codec.block_bytes)
    size = max(1, _CHUNK // codec.block) if x.device.type == "cpu" else max(1, len(blocks))
    return zip(values.split(size), blocks.split(size), strict=True)


CODEC = "str code, int block, ScalarType scales"
encode = define("encode", f"(Tensor x, {CODEC}) -> Tensor", _encode, _encode_fake)
decode = define("decode", f"(Tensor coded, {CODEC}, ScalarType dtype) -> Tensor", _decode, _decode_fake)
sum_decoded = define(
    "sum_decoded", f"(Tensor coded, {CODEC}, ScalarType dtype) -> Tensor", _sum_decoded, _sum_decoded_fake
)
coding_error = define(
    "coding_error", f"(Tensor x, Tensor coded, {CODEC}, ScalarType dtype) -> Tensor", _coding_error, _coding_error_fake
)
encode_sum = define(
    "encode_sum",
    f"(Tensor x, Tensor residual, {CODEC}, ScalarType dtype) -> (Tensor, Tensor)",
    _encode_sum,
    _encode_sum_fake,
)
difference = define("difference", "(Tensor x, Tensor received, int start) -> Tensor", _difference, _difference_fake)
