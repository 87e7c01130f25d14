"""Storage of ``torch.distributed.checkpoint``: write boxes of tensors to safetensors files, and read them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import json
import math
import os
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata as Stored,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from zerograph.errors import CheckpointError
from zerograph.runtime.checkpoint import index
from zerograph.runtime.checkpoint.index import DTYPES, Chunk, Entry, Index
from zerograph.runtime.checkpoint.remote import Folder, RemotePath
from zerograph.runtime.job.liveness import on_interrupt

# Bytes of tensors that are copied and written as one file, and that one request reads.
_FILE_BYTES = 2**28
# Of damaged files. safetensors raises KeyError or AttributeError for a dtype that this torch does not have.
_READ_ERRORS = (OSError, SafetensorError, ValueError, KeyError, AttributeError, RuntimeError, MemoryError)
T = TypeVar("T")
# The name of a tensor and one of its boxes.
Box = tuple[str, Chunk]


class _OfOneCheckpoint:
    """Methods of torch's protocols for an object that serves one checkpoint and changes no plan."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Return the plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: the folder was checked before."""
        return True


def _notes_interrupts(method: Callable[..., T]) -> Callable[..., T]:
    """Return the method of a :class:`Writer`, which notes an interrupt inside."""

    @functools.wraps(method)
    def noting(self: Writer, *args: Any, **kwargs: Any) -> T:
        with on_interrupt(functools.partial(setattr, self, "interrupted")):
            return method(self, *args, **kwargs)

    return noting


@dataclass
class Writer(_OfOneCheckpoint, StorageWriter):
    """Write a rank's boxes into ``folder/data``; the first rank then writes the index.

    Attributes:
        folder: the checkpoint.
        data: the name of the folder of this save's files.
        document: everything in the index that is no tensor.
        rank: this rank.
        check: called on the first rank before it writes the index; what it raises fails the save.
        written: called on the first rank after it has written the index, while the other ranks wait.
        interrupted: an interrupt that ended this rank's part. torch raises an error in its place.
    """

    folder: Folder
    data: str
    document: Mapping[str, Any]
    rank: int
    check: Callable[[], None]
    written: Callable[[], None]
    interrupted: BaseException | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Create the folder of this save's files."""
        (self.folder / self.data).mkdir(parents=True, exist_ok=True)

    @_notes_interrupts
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes, several to a file, and sync the files to disk."""
        results: list[WriteResult] = []
        items: list[tuple[WriteItem, Tensor]] = []
        for item in plan.items:
            # A copy: the SHA-256 is that of the written bytes, and views of one tensor are written apart.
            items.append((item, planner.resolve_data(item).detach().to("cpu", copy=True).contiguous()))  # type: ignore[union-attr]
            if sum(tensor.nbytes for _, tensor in items) >= _FILE_BYTES:
                results += self._write(items, len(results))
                items = []
        if items:
            results += self._write(items, len(results))
        index.sync_folder(self.folder / self.data)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, items: list[tuple[WriteItem, Tensor]], number: int) -> list[WriteResult]:
        name = f"rank{self.rank:05d}-{number:06d}.safetensors"
        path = self.folder / self.data / name
        try:
            write_file({str(key): tensor for key, (_, tensor) in enumerate(items)}, path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be written: {error}") from error
        results = []
        for key, (item, tensor) in enumerate(items):
            assert item.tensor_data is not None
            box = item.tensor_data.chunk
            chunk = Chunk(tuple(box.offsets), tuple(box.sizes), name, str(key), sha256(tensor))
            results.append(WriteResult(item.index, tensor.nbytes, chunk))
        return results

    @_notes_interrupts
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check that all files are there, then write the index. Runs on the first rank."""
        chunks: dict[str, list[Chunk]] = defaultdict(list)
        for result in itertools.chain.from_iterable(results):
            chunks[result.index.fqn].append(result.storage_data)
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, Stored)
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            tensors[name] = Entry(dtype, tuple(stored.size), tuple(chunks[name]))
        contents = Index(self.data, tensors, self.document)
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


@dataclass
class Reader(_OfOneCheckpoint, StorageReader):
    """Read boxes of a checkpoint. Each chunk that is read must have the SHA-256 of the index.

    Attributes:
        folder: the checkpoint.
        index: its index.
    """

    folder: Folder
    index: Index
    _bytes: Counter[str] = field(default_factory=Counter)
    _stored: dict[str, Stored] = field(default_factory=dict)
    # Of a remote folder: the size of each file, and the end and contents of each header that was read.
    _sizes: dict[str, int] = field(default_factory=dict)
    _headers: dict[str, tuple[int, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for entry in self.index.tensors.values():
            for chunk in entry.chunks:
                self._bytes[chunk.file] += math.prod(chunk.sizes) * DTYPES[entry.dtype].itemsize

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return no metadata: the planner asks for those of the tensors that it loads."""
        return Metadata({})

    def stored(self, name: str) -> Stored:
        """Return a tensor of the index as torch describes it; its boxes are in the order of the index."""
        if name not in self._stored:
            entry = self.index.tensors[name]
            boxes = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in entry.chunks]
            self._stored[name] = Stored(TensorProperties(DTYPES[entry.dtype]), torch.Size(entry.shape), boxes)
        return self._stored[name]

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the index has been read."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each box once and copy its parts to where the planner puts them."""
        items_by_box: dict[Box, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            items_by_box[self.box_at(item.storage_index)].append(item)
        for box, tensor in self.read(items_by_box):
            for item in items_by_box[box]:
                part = tensor[_slices(item.storage_offsets, item.lengths)]
                planner.resolve_tensor(item).copy_(part)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def box_at(self, position: MetadataIndex) -> Box:
        """Return a box by its place in :meth:`stored`."""
        assert position.index is not None
        return position.fqn, self.index.tensors[position.fqn].chunks[position.index]

    def read(self, boxes: Iterable[Box]) -> Iterator[tuple[Box, Tensor]]:
        """Read boxes, file by file; yield each with its elements.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        by_file: dict[str, list[Box]] = defaultdict(list)
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

    def verify(self, boxes: Iterable[Box]) -> None:
        """Read and check boxes, before anything is overwritten.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        for _ in self.read(boxes):
            pass

    def _check(self, path: Folder, box: Box, tensor: Tensor) -> None:
        name, chunk = box
        if tuple(tensor.shape) != chunk.sizes or tensor.dtype != self._dtype(name):
            raise CheckpointError(f"{path} is damaged: the part of {name} in it has another shape or dtype")
        if sha256(tensor) != chunk.sha256:
            raise CheckpointError(f"{path} is damaged: the part of {name} in it does not have the SHA-256 of the index")

    def _download(self, path: RemotePath, boxes: Sequence[Box]) -> Iterator[tuple[Box, Tensor]]:
        """Read the bytes of boxes from a remote safetensors file: one request for all that stand together in it."""
        file = boxes[0][1].file
        if file not in self._headers:
            length = int.from_bytes(path.read_bytes(0, 8), "little")
            if length > self._sizes[file]:
                raise ValueError("its header is longer than the file")
            self._headers[file] = (8 + length, json.loads(path.read_bytes(8, 8 + length)))
        start, header = self._headers[file]
        spans: list[tuple[int, int, Box]] = []
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
            whole[_slices(chunk.offsets, chunk.sizes)] = tensor
        return whole


def _open(path: Path, boxes: Sequence[Box]) -> Iterator[tuple[Box, Tensor]]:
    """Read boxes of a safetensors file on disk."""
    with safe_open(path, framework="pt") as file:
        for box in boxes:
            yield box, file.get_tensor(box[1].key)


def _runs(spans: Sequence[tuple[int, int, Box]]) -> Iterator[list[tuple[int, int, Box]]]:
    """Yield spans of a file, which are in order, in groups without gaps that one request reads."""
    run: list[tuple[int, int, Box]] = []
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


def _slices(offsets: Any, sizes: Any) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def sha256(tensor: Tensor) -> str:
    """Return the SHA-256 of the tensor's bytes, in hexadecimal."""
    contiguous = tensor.contiguous()
    # Without numpy, which torch does not require.
    return hashlib.sha256((ctypes.c_char * contiguous.nbytes).from_address(contiguous.data_ptr())).hexdigest()
