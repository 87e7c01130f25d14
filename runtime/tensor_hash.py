"""Hash the bits of a tensor on its own device."""

from __future__ import annotations

import torch
from torch import Tensor

# Words per chunk: the temporaries are a few times as large as a chunk.
_WORDS = 1 << 20


@torch.no_grad()
def hash_bits(tensor: Tensor) -> Tensor:
    """Return a hash of the tensor's bits: equal for equal bits, whatever the dtype and shape.

    Each word of eight bytes and its index go through the finalizer of splitmix64 (Steele et al., 2014). The results are
    summed modulo 2^64. A change of one word always changes the hash; changes of several words are missed with
    probability 2^-64.

    Args:
        tensor: of any dtype and shape.

    Returns:
        A 0-d int64 tensor on the device of ``tensor``.
    """
    words = _words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _WORDS):
        chunk = words[start : start + _WORDS]
        places = torch.arange(start + 1, start + 1 + len(chunk), dtype=torch.int64, device=tensor.device)
        total += _mix(chunk + places * _signed(0x9E3779B97F4A7C15)).sum()
    return total


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes in order, as a 1-D uint8 tensor: a view where the tensor is contiguous."""
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return flat.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _words(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes as int64 words, padded with zeros."""
    content = bytes_of(tensor)
    padding = -len(content) % 8
    if padding:
        content = torch.cat([content, content.new_zeros(padding)])
    elif content.storage_offset() % 8:
        content = content.clone()
    return content.view(torch.int64)


def _mix(words: Tensor) -> Tensor:
    words = (words ^ _shift_right(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shift_right(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shift_right(words, 31)


def _shift_right(words: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift fills with the sign."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
