"""A checkpoint in memory: each rank has its part as one tensor of bytes, which can be sent to another rank."""

from __future__ import annotations

import ctypes
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerograph.runtime.checkpoint.index import DTYPES, Chunk, Entry, Index
from zerograph.runtime.checkpoint.pieces import Pieces
from zerograph.runtime.checkpoint.storage import Box, Reader

# Boxes begin at multiples of this many bytes: of the size of every dtype.
_ALIGNMENT = 64


def packed(pieces: Mapping[str, Pieces], document: Mapping[str, Any]) -> Tensor:
    """Copy a rank's pieces of a checkpoint to CPU memory.

    Args:
        pieces: by name of the tensor.
        document: everything else in the checkpoint, as JSON.

    Returns:
        One tensor of bytes: the length of a header, the header, the boxes.
    """
    boxes, tensors, end = [], {}, 0
    for name, piece in pieces.items():
        tensors[name] = [str(piece.dtype).removeprefix("torch."), piece.shape]
        for offsets, (sizes, flat, start) in piece.parts.items():
            boxes.append((end, math.prod(sizes), piece.dtype, flat, start))
            tensors[name].append([offsets, sizes, end])
            end += -(-boxes[-1][1] * piece.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    header = json.dumps([tensors, document]).encode()
    begin = _begin(len(header))
    content = torch.empty(begin + end, dtype=torch.uint8)
    content[:8] = torch.tensor([len(header)]).view(torch.uint8)
    content[8 : 8 + len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for at, numel, dtype, flat, start in boxes:
        box = content[begin + at : begin + at + numel * dtype.itemsize].view(dtype)
        box.copy_(flat()[start : start + numel])
    return content


def _begin(length: int) -> int:
    """Return where the boxes begin after a header of this length."""
    return -(-(8 + length) // _ALIGNMENT) * _ALIGNMENT


@dataclass
class SnapshotReader(Reader):
    """Read the checkpoint whose parts are in memory.

    Attributes:
        parts: what :func:`packed` returned on each rank, by name.
    """

    parts: Mapping[str, Tensor] = field(default_factory=dict)

    def read(self, boxes: Iterable[Box]) -> Iterator[tuple[Box, Tensor]]:
        """Yield each box with its elements, which are a view of a part."""
        for name, chunk in boxes:
            dtype, start = DTYPES[self.index.tensors[name].dtype], int(chunk.key)
            box = self.parts[chunk.file][start : start + math.prod(chunk.sizes) * dtype.itemsize]
            yield (name, chunk), box.view(dtype).view(chunk.sizes)

    def _file(self, name: str, chunk: Chunk) -> Path:
        return Path(chunk.file)


def snapshot_reader(parts: Iterable[Tensor]) -> SnapshotReader:
    """Return a reader of the parts of all ranks, in order of the ranks."""
    by_name, chunks = {}, defaultdict[str, list[Chunk]](list)
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    document: Mapping[str, Any] = {}
    for rank, part in enumerate(parts):
        length = int(part[:8].view(torch.int64))
        tensors, document = json.loads(ctypes.string_at(part.data_ptr() + 8, length))
        by_name[str(rank)] = part
        for name, (dtype, shape, *boxes) in tensors.items():
            kinds[name] = dtype, tuple(shape)
            for offsets, sizes, at in boxes:
                place = str(_begin(length) + at)
                chunks[name].append(Chunk(tuple(offsets), tuple(sizes), str(rank), place, ""))
    entries = {name: Entry(*kind, tuple(chunks[name])) for name, kind in kinds.items()}
    return SnapshotReader(Path("a snapshot"), Index("memory", entries, document), parts=by_name)
