"""Counter-based random numbers: each number is a function of the step's seed and its position only.

A number is a hash of the seed of the step, the number of the random operator in the graph, and the linear index of the
element in the global tensor. So every device, backend and split over ranks draws the same numbers: a mask on a shard is
the shard of the mask that one device would draw.

The hash is the finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA
2014; its constants are David Stafford's Mix13) with a second key in its middle, so that the streams of two operators
are never shifted copies of each other. It is no cryptographic hash.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zerograph.ops.definition import define

_GAMMA, _M1, _M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# Bits of the significand: every value is exact, and none rounds up to 1.
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}

# Elements hashed at a time: on the CPU they stay in its cache.
_BLOCK_ON_CPU, _BLOCK = 2**17, 2**24


def _uniform(
    seed: Tensor,
    number: int,
    size: Sequence[int],
    start: Sequence[int],
    whole: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    micro_batch: Tensor | None = None,
    dim: int = 0,
) -> Tensor:
    """Return random numbers in [0, 1): a slice of a global tensor.

    Args:
        seed: seed of the step, 0-d int64.
        number: number of the random operator in the graph.
        size: shape of the slice.
        start: index of its first element in the global tensor.
        whole: shape of the global tensor.
        dtype: dtype of the numbers.
        device: device of the numbers.
        micro_batch: shift the slice by this number of slices along ``dim``; 0-d int64.
        dim: the dimension that micro-batches split.
    """
    if micro_batch is not None:
        start = [index + int(micro_batch) * size[dim] * (axis == dim) for axis, index in enumerate(start)]
    first = _mix(int(seed) + number * _GAMMA)
    second = _signed(_mix(first ^ _M1))
    result = torch.empty(size, dtype=dtype, device=device)
    rows, run = _rows(size, start, whole, result.device)
    starts = rows.mul_(_signed(_GAMMA)).add_(_signed(first)).unsqueeze(1)
    block = _BLOCK_ON_CPU if result.device.type == "cpu" else _BLOCK
    columns = torch.arange(min(run, block), device=device).mul_(_signed(_GAMMA))
    height = max(1, block // max(run, 1))
    flat = result.view(len(rows), run)
    for row in range(0, len(rows), height):
        for column in range(0, run, block):
            part = flat[row : row + height, column : column + block]
            bits = starts[row : row + height] + columns[: part.shape[1]].add(_signed(column * _GAMMA))
            _mix_in_place(bits, second)
            part.copy_(_shifted(bits, 64 - _BITS[dtype])).mul_(2.0 ** -_BITS[dtype])
    return result


def _rows(size: Sequence[int], start: Sequence[int], whole: Sequence[int], device: torch.device) -> tuple[Tensor, int]:
    """Return the linear index of the first element of each contiguous run of the slice, and the length of the runs."""
    inner = len(size)
    while inner > 0 and size[inner - 1] == whole[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for dim in range(len(size)):
        steps = torch.arange(size[dim] if dim < inner else 1, device=device)
        rows = (rows.unsqueeze(1) * whole[dim] + start[dim] + steps).flatten()
    return rows, math.prod(size[inner:])


def _mix_in_place(bits: Tensor, second: int) -> None:
    """Apply the finalizer to every element; products of two's complement wrap around as unsigned ones do."""
    bits ^= _shifted(bits, 30)
    bits *= _signed(_M1)
    bits ^= _shifted(bits, 27)
    bits ^= second
    bits *= _signed(_M2)
    bits ^= _shifted(bits, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Return ``bits`` shifted right as unsigned numbers: the copies of the sign bit are masked out."""
    return (bits >> count).bitwise_and_(2 ** (64 - count) - 1)


def _mix(value: int) -> int:
    value %= 2**64
    value = (value ^ value >> 30) * _M1 % 2**64
    value = (value ^ value >> 27) * _M2 % 2**64
    return value ^ value >> 31


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _uniform_fake(
    seed: Tensor,
    number: int,
    size: Sequence[int],
    start: Sequence[int],
    whole: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    micro_batch: Tensor | None = None,
    dim: int = 0,
) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


uniform = define(
    "uniform",
    "(Tensor seed, int number, SymInt[] size, SymInt[] start, SymInt[] whole, ScalarType dtype, Device device, "
    "Tensor? micro_batch=None, int dim=0) -> Tensor",
    _uniform,
    _uniform_fake,
)
