"""A tensor's bits as one number, worked out where the tensor is: equal for equal bits, whatever they mean."""

from __future__ import annotations

import torch
from torch import Tensor

# So many words at a time: what is computed with is a few times as large.
_WORDS = 1 << 20


@torch.no_grad()
def hashed(tensor: Tensor) -> Tensor:
    """A 0-d int64 tensor on the device of ``tensor``, of any dtype and shape.

    Each eight bytes and their place go through the finalizer of splitmix64 (Steele et al., 2014), and what comes out is
    summed modulo 2^64: one change is always seen, and several are missed once in 2^64 times.
    """
    words = _words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _WORDS):
        part = words[start : start + _WORDS]
        places = torch.arange(start + 1, start + 1 + len(part), dtype=torch.int64, device=tensor.device)
        total += _mixed(part + places * _signed(0x9E3779B97F4A7C15)).sum()
    return total


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes, in order: 1-D, of memory of its own only where it is not contiguous."""
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return flat.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bytes in words of eight, filled up with zeros."""
    found = bytes_of(tensor)
    rest = -len(found) % 8
    if rest:
        found = torch.cat([found, found.new_zeros(rest)])
    elif found.storage_offset() % 8:
        found = found.clone()
    return found.view(torch.int64)


def _mixed(words: Tensor) -> Tensor:
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, by: int) -> Tensor:
    """To the right, zeros from the left: torch's own shift fills up with the sign."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
