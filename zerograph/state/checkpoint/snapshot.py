"""A checkpoint in memory: each rank has its part as one tensor of bytes, which can be sent to another rank.

A part begins with its *head*: the index of its boxes, and the boxes of tensors that ranks read at different times. All
ranks have the heads of all parts. The other boxes stay with the ranks that hold them, until another rank asks for them.
"""

from __future__ import annotations

import ctypes
import json
import math
import operator
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerograph.runtime.checkpoint.index import Chunk, Entry, Index
from zerograph.runtime.checkpoint.pieces import Pieces
from zerograph.runtime.checkpoint.storage import NamedChunk, Reader
from zerograph.runtime.job.process_group import Job, explaining_failures

# Boxes begin at multiples of this many bytes: of the size of every dtype.
_ALIGNMENT = 64
# The tag of the first range of bytes that a rank asks for, and how many are under way at a time.
_TAG, _IN_FLIGHT = 1 << 16, 4
# A range of bytes of a part: number of the part, start, end.
_Range = tuple[int, int, int]


def packed(pieces: Mapping[str, Pieces], document: Mapping[str, Any]) -> Tensor:
    """Copy a rank's pieces of a checkpoint to CPU memory.

    Args:
        pieces: by name of the tensor.
        document: everything else in the checkpoint, as JSON.

    Returns:
        One tensor of bytes: the lengths of a header and of the head, the header, the boxes.
    """
    boxes, tensors, end, shared = [], {}, 0, 0
    for name, piece in sorted(pieces.items(), key=lambda one: not _is_shared(*one)):
        tensors[name] = [str(piece.dtype).removeprefix("torch."), piece.shape]
        for offsets, (sizes, flat, start) in piece.parts.items():
            boxes.append((end, math.prod(sizes), piece.dtype, flat, start))
            tensors[name].append([offsets, sizes, end])
            end += _aligned(boxes[-1][1] * piece.dtype.itemsize)
        shared = end if _is_shared(name, piece) else shared
    header = json.dumps([tensors, document]).encode()
    begin = _aligned(16 + len(header))
    content = torch.empty(begin + end, dtype=torch.uint8)
    content[:16] = torch.tensor([len(header), begin + shared]).view(torch.uint8)
    content[16 : 16 + len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for at, numel, dtype, flat, start in boxes:
        box = content[begin + at : begin + at + numel * dtype.itemsize].view(dtype)
        box.copy_(flat()[start : start + numel])
    return content


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _is_shared(name: str, piece: Pieces) -> bool:
    """Return whether ranks read the tensor at different times: states of generators, and numbers."""
    return not piece.shape or name.startswith("generators.")


def head(part: Tensor) -> bytes:
    """Return the head of a part that :func:`packed` returned."""
    return ctypes.string_at(part.data_ptr(), int(part[8:16].view(torch.int64)))


@dataclass(kw_only=True)
class SnapshotReader(Reader):
    """Read the checkpoint whose parts are in the memory of the ranks. What is not in a head is read by all together.

    Attributes:
        job: the ranks.
        heads: of all parts.
        parts: those that this rank holds, by number.
        holders: of each part the ranks that hold it.
    """

    job: Job
    heads: Sequence[Tensor]
    parts: Mapping[int, Tensor]
    holders: Sequence[Sequence[int]]

    def verify(self, boxes: Iterable[NamedChunk]) -> None:
        """Do nothing: what is in memory is as it was copied."""

    def fill(self, pieces: Mapping[str, Pieces]) -> None:
        """Read what lies in this rank's pieces, and no more of a box. A collective."""
        reads = list(self.reads(pieces))
        ranges: list[_Range] = []
        for read in reads:
            chunk, (offsets, sizes), itemsize = read.chunk, read.part, self._dtype(read.name).itemsize
            strides = _strides(chunk.sizes)
            first = sum(map(operator.mul, map(operator.sub, offsets, chunk.offsets), strides))
            last = first + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
            start = int(chunk.key)
            ranges.append((int(chunk.file), start + first * itemsize, start + (last + 1) * itemsize))
        for read, content in zip(reads, self._exchange(ranges), strict=True):
            flat = content.view(self._dtype(read.name))
            read.target().copy_(flat.as_strided(read.part[1], _strides(read.chunk.sizes)))

    def read(self, boxes: Iterable[NamedChunk]) -> Iterator[tuple[NamedChunk, Tensor]]:
        """Yield each box with its elements. A collective, in which ranks may read different boxes of one tensor."""
        boxes = list(boxes)
        ranges = []
        for name, chunk in boxes:
            size = math.prod(chunk.sizes) * self._dtype(name).itemsize
            ranges.append((int(chunk.file), int(chunk.key), int(chunk.key) + size))
        in_heads = all(end <= len(self.heads[part]) for part, _, end in ranges)
        contents = (self.heads[part][start:end] for part, start, end in ranges) if in_heads else self._exchange(ranges)
        for (name, chunk), content in zip(boxes, contents, strict=True):
            yield (name, chunk), content.view(self._dtype(name)).view(chunk.sizes)

    def _exchange(self, ranges: Sequence[_Range]) -> Iterator[Tensor]:
        """Yield ranges of bytes, each from the nearest rank that holds its part. A collective, used to its end."""
        rank, group = self.job.rank, self.job.channel.group
        under_way: deque[tuple[Any, Tensor | None]] = deque()
        with explaining_failures(self.job, "exchanging snapshots"):
            everybody = self.job.channel.share(ranges)
            for number in range(max(map(len, everybody))):
                for reader, theirs in enumerate(everybody):
                    if number >= len(theirs):
                        continue
                    part, start, end = theirs[number]
                    holders = self.holders[part]
                    holder = reader if reader in holders else holders[reader % len(holders)]
                    if rank == holder:
                        content = self.parts[part][start:end]
                        work = None if rank == reader else group.send([content], reader, _TAG + number)
                    elif rank == reader:
                        content = torch.empty(end - start, dtype=torch.uint8)
                        work = group.recv([content], holder, _TAG + number)
                    else:
                        continue
                    under_way.append((work, content if rank == reader else None))
                    while len(under_way) > _IN_FLIGHT:
                        yield from _finished(*under_way.popleft())
            while under_way:
                yield from _finished(*under_way.popleft())

    def _file(self, name: str, chunk: Chunk) -> Path:
        return Path(chunk.file)


def _finished(work: Any, content: Tensor | None) -> Iterator[Tensor]:
    """Wait for the end of an exchange; yield what it has received."""
    if work is not None:
        work.wait()
    if content is not None:
        yield content


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def snapshot_reader(job: Job, parts: Mapping[int, Tensor], holders: Sequence[Sequence[int]]) -> SnapshotReader:
    """Return a reader of the parts that the ranks hold. A collective.

    Args:
        job: the ranks.
        parts: those that this rank holds, by number.
        holders: of each part the ranks that hold it.
    """
    own = {number: head(part) for number, part in parts.items() if holders[number][0] == job.rank}
    with explaining_failures(job, "exchanging snapshots"):
        shared: dict[int, bytes] = {number: one for heads in job.channel.share(own) for number, one in heads.items()}
    chunks = defaultdict[str, list[Chunk]](list)
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    document: Mapping[str, Any] = {}
    heads = [torch.frombuffer(bytearray(shared[number]), dtype=torch.uint8) for number in range(len(holders))]
    for number, one in enumerate(heads):
        length = int(one[:8].view(torch.int64))
        begin = _aligned(16 + length)
        tensors, document = json.loads(shared[number][16 : 16 + length])
        for name, (dtype, shape, *boxes) in tensors.items():
            kinds[name] = dtype, tuple(shape)
            for offsets, sizes, at in boxes:
                chunks[name].append(Chunk(tuple(offsets), tuple(sizes), str(number), str(begin + at), ""))
    entries = {name: Entry(*kind, tuple(chunks[name])) for name, kind in kinds.items()}
    return SnapshotReader(
        Path("a snapshot"), Index("memory", entries, document), job=job, heads=heads, parts=parts, holders=holders
    )
