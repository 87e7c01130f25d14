"""The boxes of named tensors that a rank holds, which it saves, or loads into."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from zerograph.runtime.checkpoint.boxes import Box, Offsets, boxes, overlap, part_of
from zerograph.runtime.checkpoint.index import Chunk


@dataclass(eq=False)
class Pieces:
    """Boxes of one tensor that this rank holds.

    Attributes:
        shape: of the whole tensor.
        dtype: of the tensor in the checkpoint.
        parts: by the offsets of each box its sizes, a function that returns a 1-D tensor with its elements, and the
            index of the first of them there.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: dict[Offsets, tuple[tuple[int, ...], Callable[[], Tensor], int]] = field(default_factory=dict)

    def add(self, start: int, end: int, flat: Callable[[], Tensor], at: int, within: Box | None = None) -> None:
        """Add the boxes of a range of the flattened tensor.

        Args:
            start, end: the range, in elements.
            flat: returns the 1-D tensor that holds the elements.
            at: the index of the first element in that tensor.
            within: the range is one of this box, flattened by itself, not of the whole tensor.
        """
        origin, shape = ((0,) * len(self.shape), self.shape) if within is None else within
        for offsets, sizes in boxes(shape, start, end):
            self.parts[tuple(map(add, offsets, origin))] = (sizes, flat, at)
            at += math.prod(sizes)

    def tensor(self, offsets: Offsets) -> Tensor:
        """Return a view of the box at these offsets."""
        sizes, flat, at = self.parts[offsets]
        return flat()[at : at + math.prod(sizes)].view(sizes)

    def reads(self, name: str, chunks: Sequence[Chunk]) -> Iterator[Read]:
        """Yield what to read of the chunks of a checkpoint's tensor."""
        for own, (sizes, _, _) in self.parts.items():
            for chunk in chunks:
                if (part := overlap((own, sizes), (chunk.offsets, chunk.sizes))) is not None:
                    yield Read(name, chunk, part, self, own)


class Read(NamedTuple):
    """A box of a tensor to read from a chunk of a checkpoint.

    Attributes:
        name: the tensor's name.
        chunk: the chunk that has it.
        part: the box.
        piece: what has its memory.
        own: the offsets of the part of ``piece`` that the box lies in.
    """

    name: str
    chunk: Chunk
    part: Box
    piece: Pieces
    own: Offsets

    def target(self) -> Tensor:
        """Return the memory of the box."""
        return part_of(self.piece.tensor(self.own), self.part, self.own)


def flat_of(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns the elements of a contiguous tensor."""
    flat = tensor.detach().view(-1)
    return lambda: flat
