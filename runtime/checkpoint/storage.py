"""Write boxes of tensors to safetensors files, and read them."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from zerograph.errors import CheckpointError
from zerograph.runtime.checkpoint import index
from zerograph.runtime.checkpoint.boxes import Offsets, part_of
from zerograph.runtime.checkpoint.index import DTYPES, Chunk, Entry, Index
from zerograph.runtime.checkpoint.pieces import Pieces, Read
from zerograph.runtime.checkpoint.remote import Folder, RemotePath

# Bytes of tensors that are copied and written as one file, and that one request reads.
_FILE_BYTES = 2**28
# Of damaged files. safetensors raises KeyError or AttributeError for a dtype that this torch does not have.
_READ_ERRORS = (OSError, SafetensorError, ValueError, KeyError, AttributeError, RuntimeError, MemoryError)
# The name of a tensor and one of its boxes.
NamedChunk = tuple[str, Chunk]


@dataclass
class Writer:
    """Write a rank's boxes into ``folder/data``; the first rank then writes the index.

    Attributes:
        folder: the checkpoint.
        data: the name of the folder of this save's files.
        document: everything in the index that is no tensor.
        rank: this rank.
        check: called on the first rank before it writes the index; what it raises fails the save.
        written: called on the first rank after it has written the index, while the other ranks wait.
    """

    folder: Folder
    data: str
    document: Mapping[str, Any]
    rank: int
    check: Callable[[], None]
    written: Callable[[], None]

    def write(self, pieces: Mapping[str, Pieces]) -> list[NamedChunk]:
        """Write this rank's boxes, several to a file, sync the files to disk, and return what was written."""
        (self.folder / self.data).mkdir(parents=True, exist_ok=True)
        written: list[NamedChunk] = []
        pending: list[tuple[str, Offsets, Tensor]] = []
        for name, piece in pieces.items():
            for offsets in piece.parts:
                # A copy: the SHA-256 is that of the written bytes, and views of one tensor are written apart.
                pending.append((name, offsets, piece.tensor(offsets).to("cpu", piece.dtype, copy=True).contiguous()))
                if sum(tensor.nbytes for *_, tensor in pending) >= _FILE_BYTES:
                    written += self._write(pending, len(written))
                    pending = []
        if pending:
            written += self._write(pending, len(written))
        index.sync_folder(self.folder / self.data)
        return written

    def _write(self, boxes: Sequence[tuple[str, Offsets, Tensor]], number: int) -> Iterator[NamedChunk]:
        file = f"rank{self.rank:05d}-{number:06d}.safetensors"
        path = self.folder / self.data / file
        try:
            write_file({str(key): tensor for key, (*_, tensor) in enumerate(boxes)}, path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be written: {error}") from error
        for key, (name, offsets, tensor) in enumerate(boxes):
            yield name, Chunk(offsets, tuple(tensor.shape), file, str(key), sha256(tensor))

    def finish(self, pieces: Mapping[str, Pieces], written: Iterable[NamedChunk]) -> None:
        """Check that all ranks' boxes and files are there, then write the index. Runs on the first rank.

        Args:
            pieces: this rank's. All ranks name the same tensors.
            written: of all ranks.
        """
        contents = Index(self.data, entries_of(pieces, written), self.document)
        try:
            Reader(self.folder, contents).check_files()
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):
                raise
            raise CheckpointError(
                f"{error}\nIt was written just now: another process has removed it, or ranks see different folders."
            ) from error
        self.check()
        index.write(self.folder, contents)
        self.written()


def entries_of(pieces: Mapping[str, Pieces], written: Iterable[NamedChunk]) -> dict[str, Entry]:
    """Return the entries of tensors, of the boxes of which each was written by one rank.

    Raises:
        CheckpointError: the boxes of a tensor have more or fewer elements than the tensor.
    """
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    for name, chunk in written:
        chunks[name].append(chunk)
    for name, piece in pieces.items():
        count = sum(math.prod(chunk.sizes) for chunk in chunks[name])
        if count != math.prod(piece.shape):
            raise CheckpointError(f"the ranks hold {count} elements of {name}, whose shape is {piece.shape}")
    return {
        name: Entry(str(piece.dtype).removeprefix("torch."), tuple(piece.shape), tuple(chunks[name]))
        for name, piece in pieces.items()
    }


@dataclass
class Reader:
    """Read boxes of a checkpoint. Each chunk that is read must have the SHA-256 of the index.

    Attributes:
        folder: the checkpoint.
        index: its index.
    """

    folder: Folder
    index: Index
    _bytes: Counter[str] = field(default_factory=Counter)
    # Of a remote folder: the size of each file, and the end and contents of each header that was read.
    _sizes: dict[str, int] = field(default_factory=dict)
    _headers: dict[str, tuple[int, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for entry in self.index.tensors.values():
            for chunk in entry.chunks:
                self._bytes[chunk.file] += math.prod(chunk.sizes) * DTYPES[entry.dtype].itemsize

    def reads(self, pieces: Mapping[str, Pieces]) -> Iterator[Read]:
        """Yield what is to be read to fill pieces."""
        for name, piece in pieces.items():
            yield from piece.reads(name, self.index.tensors[name].chunks)

    def fill(self, pieces: Mapping[str, Pieces]) -> None:
        """Read each box once and copy its parts into the pieces."""
        reads: dict[NamedChunk, list[Read]] = defaultdict(list)
        for read in self.reads(pieces):
            reads[read.name, read.chunk].append(read)
        for (name, chunk), tensor in self.read(reads):
            for read in reads[name, chunk]:
                read.target().copy_(part_of(tensor, read.part, chunk.offsets))

    def read(self, boxes: Iterable[NamedChunk]) -> Iterator[tuple[NamedChunk, Tensor]]:
        """Read boxes, file by file; yield each with its elements.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        by_file: dict[str, list[NamedChunk]] = defaultdict(list)
        for box in boxes:
            by_file[box[1].file].append(box)
        for file_boxes in by_file.values():
            path = self._file(*file_boxes[0])
            tensors = self._download(path, file_boxes) if isinstance(path, RemotePath) else _open(path, file_boxes)
            for _ in file_boxes:
                try:
                    box, tensor = next(tensors)
                except _READ_ERRORS as error:
                    raise CheckpointError(f"{path} is damaged: {error}") from error
                self._check(path, box, tensor)
                yield box, tensor

    def verify(self, boxes: Iterable[NamedChunk]) -> None:
        """Read and check boxes, before anything is overwritten.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        for _ in self.read(boxes):
            pass

    def _check(self, path: Folder, box: NamedChunk, tensor: Tensor) -> None:
        name, chunk = box
        if tuple(tensor.shape) != chunk.sizes or tensor.dtype != self._dtype(name):
            raise CheckpointError(f"{path} is damaged: the part of {name} in it has another shape or dtype")
        if sha256(tensor) != chunk.sha256:
            raise CheckpointError(f"{path} is damaged: the part of {name} in it does not have the SHA-256 of the index")

    def _download(self, path: RemotePath, boxes: Sequence[NamedChunk]) -> Iterator[tuple[NamedChunk, Tensor]]:
        """Read the bytes of boxes from a remote safetensors file: one request for all that stand together in it."""
        file = boxes[0][1].file
        if file not in self._headers:
            length = int.from_bytes(path.read_bytes(0, 8), "little")
            if length > self._sizes[file]:
                raise ValueError("its header is longer than the file")
            self._headers[file] = (8 + length, json.loads(path.read_bytes(8, 8 + length)))
        start, header = self._headers[file]
        spans: list[tuple[int, int, NamedChunk]] = []
        for name, chunk in boxes:
            begin, end = (start + int(offset) for offset in header[chunk.key]["data_offsets"])
            if end - begin != math.prod(chunk.sizes) * self._dtype(name).itemsize:
                raise ValueError(f"{chunk.key} has another size in its header")
            spans.append((begin, end, (name, chunk)))
        for run in _runs(sorted(spans, key=lambda span: span[:2])):
            first, last = run[0][0], run[-1][1]
            content = torch.empty(0, dtype=torch.uint8)
            if first < last:
                content = torch.frombuffer(bytearray(path.read_bytes(first, last)), dtype=torch.uint8)
            for begin, end, (name, chunk) in run:
                yield (name, chunk), content[begin - first : end - first].view(self._dtype(name)).view(chunk.sizes)

    def _dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.index.tensors[name].dtype]

    def _file(self, name: str, chunk: Chunk) -> Folder:
        """Return the file of a box after checking that it is as large as its tensors in the index."""
        path = self.folder / self.index.data / chunk.file
        try:
            size = self._size(chunk.file)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: it holds a part of {name}") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if size < self._bytes[chunk.file]:
            raise CheckpointError(f"{path} is damaged: it has {size:,} bytes, its tensors {self._bytes[chunk.file]:,}")
        return path

    def _size(self, file: str) -> int:
        if isinstance(self.folder, RemotePath):
            # One listing, not a request for each file.
            self._sizes = self._sizes or (self.folder / self.index.data).sizes()
            if file not in self._sizes:
                raise FileNotFoundError(file)
            return self._sizes[file]
        return index.inside(self.folder, self.index.data, file).stat().st_size

    def check_files(self) -> None:
        """Check that every file exists and is as large as its tensors in the index.

        Raises:
            CheckpointError: a file is missing or too small; the message names it.
        """
        seen: set[str] = set()
        for name, entry in self.index.tensors.items():
            for chunk in entry.chunks:
                if chunk.file not in seen:
                    seen.add(chunk.file)
                    self._file(name, chunk)

    def whole(self, name: str) -> Tensor:
        """Read a whole tensor from its boxes.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        entry = self.index.tensors[name]
        for chunk in {chunk.file: chunk for chunk in entry.chunks}.values():
            # Before memory for the tensor is allocated.
            self._file(name, chunk)
        whole = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        for (_, chunk), tensor in self.read((name, chunk) for chunk in entry.chunks):
            part_of(whole, (chunk.offsets, chunk.sizes)).copy_(tensor)
        return whole


def _open(path: Path, boxes: Sequence[NamedChunk]) -> Iterator[tuple[NamedChunk, Tensor]]:
    """Read boxes of a safetensors file on disk."""
    with safe_open(path, framework="pt") as file:
        for box in boxes:
            yield box, file.get_tensor(box[1].key)


def _runs(spans: Sequence[tuple[int, int, NamedChunk]]) -> Iterator[list[tuple[int, int, NamedChunk]]]:
    """Yield spans of a file, which are in order, in groups without gaps that one request reads."""
    run: list[tuple[int, int, NamedChunk]] = []
    for span in spans:
        if run and (span[0] != run[-1][1] or span[1] - run[0][0] > _FILE_BYTES):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def write_file(tensors: dict[str, Tensor], path: Folder, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file. One on disk has the mode that the umask gives, and is synced.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    if isinstance(path, RemotePath):
        path.write_bytes(save(tensors, metadata))
        return
    # safetensors creates a file that only its owner may read; one of ours has the mode that it must have.
    with open(path, "wb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    save_file(tensors, path, metadata)
    os.chmod(path, mode)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sha256(tensor: Tensor) -> str:
    """Return the SHA-256 of the tensor's bytes, in hexadecimal."""
    contiguous = tensor.contiguous()
    # Without numpy, which torch does not require.
    return hashlib.sha256((ctypes.c_char * contiguous.nbytes).from_address(contiguous.data_ptr())).hexdigest()
