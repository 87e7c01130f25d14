"""Boxes of tensors to safetensors files and back, as the storage of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import os
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.metadata import TensorStorageMetadata as Stored
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from zerograph.errors import CheckpointError
from zerograph.runtime.checkpoint import index
from zerograph.runtime.checkpoint.index import DTYPES, Chunk, Entry, Index

# Of a rank's part so much is copied out of its place at a time.
_FILE_BYTES = 2**28


@dataclass
class Writer(StorageWriter):
    """Writes a rank's boxes into ``folder/data``; the first rank then writes the index, with ``document`` in it.

    ``written`` is called there when that is done, while the other ranks wait.
    """

    folder: Path
    data: str
    document: Mapping[str, Any]
    rank: int
    written: Callable[[], None]
    # What ended this rank's part if it is no error: torch would make one of it.
    interrupted: BaseException | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        (self.folder / self.data).mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @contextlib.contextmanager
    def _noting_interrupts(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            self.interrupted = error
            raise

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with self._noting_interrupts():
            return self._write_data(plan, planner)

    def _write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        items: list[tuple[WriteItem, Tensor]] = []
        for item in plan.items:
            # A copy: what is written is what the SHA-256 is of, and views of one tensor are one file's no more.
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
            write_file({str(at): tensor for at, (_, tensor) in enumerate(items)}, path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be written: {error}") from error
        found = []
        for at, (item, tensor) in enumerate(items):
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            kept = Chunk(tuple(chunk.offsets), tuple(chunk.sizes), name, str(at), sha256(tensor))
            found.append(WriteResult(item.index, tensor.nbytes, kept))
        return found

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self._noting_interrupts():
            self._finish(metadata, results)

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        chunks: dict[str, list[Chunk]] = defaultdict(list)
        for result in (one for rank in results for one in rank):
            chunks[result.index.fqn].append(result.storage_data)
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, Stored)
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            tensors[name] = Entry(dtype, tuple(stored.size), tuple(chunks[name]))
        found = Index(self.data, tensors, self.document)
        try:
            Reader(self.folder, found).check_files()
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}\nIt was written just now: another process has removed it, or ranks see different folders."
            ) from error
        index.write(self.folder, found)
        self.written()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


@dataclass
class Reader(StorageReader):
    """Reads boxes of a checkpoint; each chunk that it touches must have the SHA-256 that the index says."""

    folder: Path
    index: Index
    _bytes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for entry in self.index.tensors.values():
            for chunk in entry.chunks:
                self._bytes[chunk.file] += math.prod(chunk.sizes) * DTYPES[entry.dtype].itemsize

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: Stored(
                    TensorProperties(dtype=DTYPES[entry.dtype]),
                    torch.Size(entry.shape),
                    [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in entry.chunks],
                )
                for name, entry in self.index.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted = defaultdict(list)
        for item in plan.items:
            wanted[self._place(item.storage_index)].append(item)
        for (name, chunk), items in wanted.items():
            tensor = self.chunk(name, chunk)
            for item in items:
                part = tensor[_slices(item.storage_offsets, item.lengths)]
                planner.resolve_tensor(item).copy_(part)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, at: MetadataIndex) -> tuple[str, Chunk]:
        chunks = self.index.tensors[at.fqn].chunks
        return at.fqn, next(one for one in chunks if one.offsets == tuple(at.offset or ()))

    def chunk(self, name: str, chunk: Chunk) -> Tensor:
        """One box of a tensor.

        Raises:
            CheckpointError: its file is missing or damaged.
        """
        path, entry = self._file(name, chunk), self.index.tensors[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(chunk.key)
        # Of a dtype that this torch does not have safetensors says KeyError or AttributeError.
        except (OSError, SafetensorError, ValueError, KeyError, AttributeError, RuntimeError, MemoryError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        if tuple(tensor.shape) != chunk.sizes or tensor.dtype != DTYPES[entry.dtype]:
            raise CheckpointError(f"{path} is damaged: the part of {name} in it has another shape or dtype")
        if sha256(tensor) != chunk.sha256:
            raise CheckpointError(f"{path} is damaged: the part of {name} in it does not have the SHA-256 of the index")
        return tensor

    def _file(self, name: str, chunk: Chunk) -> Path:
        """The file of a box, which is there and as large as what the index says to be in it."""
        path = self.folder / self.index.data / chunk.file
        try:
            size = index.inside(self.folder, self.index.data, chunk.file).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: it holds a part of {name}") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if size < self._bytes[chunk.file]:
            raise CheckpointError(f"{path} is damaged: it has {size:,} bytes, its tensors {self._bytes[chunk.file]:,}")
        return path

    def check_files(self) -> None:
        """Raise if a file is not there, or smaller than what the index says to be in it.

        Raises:
            CheckpointError: naming the file.
        """
        seen: set[str] = set()
        for name, entry in self.index.tensors.items():
            for chunk in entry.chunks:
                if chunk.file not in seen:
                    seen.add(chunk.file)
                    self._file(name, chunk)

    def whole(self, name: str) -> Tensor:
        """A whole tensor, put together from its boxes.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        entry = self.index.tensors[name]
        for chunk in entry.chunks:
            # No memory is taken for what is not there.
            self._file(name, chunk)
        found = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        for chunk in entry.chunks:
            found[_slices(chunk.offsets, chunk.sizes)] = self.chunk(name, chunk)
        return found

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def write_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, on the disk for good, for whom the umask says.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    # Safetensors puts a file in its place that only its owner may read; a new one of ours shows the mode it must have.
    with open(path, "wb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    save_file(tensors, path, metadata)
    os.chmod(path, mode)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _slices(offsets: Any, sizes: Any) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


def sha256(tensor: Tensor) -> str:
    """Of the tensor's bytes."""
    held = tensor.contiguous()
    # No numpy, which torch does without.
    return hashlib.sha256((ctypes.c_char * held.nbytes).from_address(held.data_ptr())).hexdigest()
