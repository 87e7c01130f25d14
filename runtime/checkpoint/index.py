"""The index of a checkpoint: one JSON file, whose appearance makes the checkpoint valid, and all that it says checked.

It names every tensor with its shape, dtype and boxes, where each box is written and its SHA-256, and holds what is no
tensor as plain JSON. Nothing in a checkpoint is ever unpickled or run, and nothing outside of its folder is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from zerograph.errors import CheckpointError
from zerograph.runtime.checkpoint.boxes import disjoint

NAME = "index.json"
VERSION = 1
# Where a text may be no Unicode: JSON can say half of a surrogate pair as an escape or, to Python, in three bytes.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
# No tensor of torch has as many elements, or dimensions.
_MOST_ELEMENTS, _MOST_DIMS = 2**60, 64
DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.uint64, torch.uint32, torch.uint16, torch.complex64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
}


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: where in it, where it is written, and the SHA-256 of its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str
    sha256: str


@dataclass(frozen=True)
class Entry:
    """A tensor."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Index:
    """A checkpoint: the folder of its data beside the index, its tensors by name, and everything else."""

    data: str
    tensors: Mapping[str, Entry]
    document: Mapping[str, Any]


def write(folder: Path, index: Index) -> None:
    """Put the index in the place of the one that is there, at once and for good."""
    # As it will be read: keys are strings then.
    body = json.loads(json.dumps({"format": "zerograph checkpoint", "version": VERSION, **asdict(index)}))
    body["sha256"] = _digest(body)
    beside = folder / f".{NAME}.{index.data}"
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(body, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, folder / NAME)
    sync_folder(folder)


def read(folder: Path) -> Index:
    """The index of the checkpoint in ``folder``.

    Raises:
        CheckpointError: there is none, or it is damaged, or of a version that this one does not know.
    """
    path = folder / NAME
    try:
        raw = inside(folder, NAME).read_bytes()
        body = json.loads(raw, object_pairs_hook=_object)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint in {folder}: it has no {NAME}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path} is damaged: no JSON that an index is written in") from error
    if not isinstance(body, dict) or body.get("format") != "zerograph checkpoint":
        raise CheckpointError(f"{path} is no index of a checkpoint of zerograph")
    if body.get("version") != VERSION:
        raise CheckpointError(f"{path} has the version {body.get('version')!r:.20}, this zerograph reads {VERSION}")
    try:
        if body.pop("sha256", None) != _digest(body):
            raise CheckpointError(f"{path} is damaged: its contents do not have the SHA-256 that it says")
        if _SURROGATE.search(raw):
            check_text(body)
        return _checked(body)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error!s:.200}") from error


def check_text(body: Any) -> None:
    """Raise if a string in what JSON has is no Unicode: half of a surrogate pair can be neither printed nor exported.

    Raises:
        ValueError: with the string.
    """
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 30) : error.end]
        raise ValueError(f"a text in it is no Unicode, near {near!a}") from error


def inside(folder: Path, *names: str) -> Path:
    """A file or folder of the checkpoint, once it is certain that no link leads out of it.

    Raises:
        CheckpointError: it lies elsewhere, or is neither a file nor a folder.
        FileNotFoundError: there is none.
    """
    path = folder.joinpath(*names)
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        # To open a pipe would wait for ever.
        raise CheckpointError(f"{path} is damaged: no file")
    found = path.resolve()
    if not found.is_relative_to(folder.resolve()):
        raise CheckpointError(f"{path} leads out of its folder, to {found}: a checkpoint is read from one folder only")
    return path


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _checked(body: Mapping[str, Any]) -> Index:
    tensors = {name: _entry(name, one) for name, one in body["tensors"].items()}
    places = [(chunk.file, chunk.key) for entry in tensors.values() for chunk in entry.chunks]
    # Else a small file could be asked for any number of times.
    if len(set(places)) != len(places):
        raise ValueError("one place of a file is used twice")
    if not isinstance(body["document"], dict):
        raise ValueError("no document")
    return Index(plain_name(body["data"]), tensors, body["document"])


def _entry(name: str, one: Mapping[str, Any]) -> Entry:
    """A tensor, of which every element lies in exactly one of its parts."""
    shape, chunks = _sizes(one["shape"]), []
    for chunk in one["chunks"]:
        offsets, sizes = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
        if any(at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a part of {name} lies outside of it")
        chunks.append(Chunk(offsets, sizes, plain_name(chunk["file"]), _text(chunk["key"]), _text(chunk["sha256"])))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"parts of {name} are missing")
    if not disjoint([(chunk.offsets, chunk.sizes) for chunk in chunks]):
        raise ValueError(f"parts of {name} overlap")
    if _text(one["dtype"]) not in DTYPES:
        raise ValueError(f"{name} has an unknown dtype")
    return Entry(one["dtype"], shape, tuple(chunks))


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > _MOST_DIMS or not all(type(one) is int for one in values):
        raise ValueError("a shape that is none")
    if any(one < 0 for one in values) or math.prod(max(one, 1) for one in values) > _MOST_ELEMENTS:
        raise ValueError("a shape that no tensor has")
    return tuple(values)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no text")
    return value


def plain_name(name: Any) -> str:
    """``name``, if it is that of something right inside a folder.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(name, str) or not name or name != os.path.basename(name) or name in (".", "..") or "\0" in name:
        raise ValueError(f"{name!r:.60} is no name of a file")
    return name


def sync_folder(folder: Path) -> None:
    """What was made or renamed in the folder is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
