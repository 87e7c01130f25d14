"""The index of a checkpoint: one JSON file that makes the checkpoint valid once it exists. Reading checks all of it.

The index lists every tensor with its shape, dtype and boxes, and for each box its file and SHA-256. Everything else is
plain JSON in it. Nothing in a checkpoint is unpickled or run, and nothing outside of its folder is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zerograph.base import cache
from zerograph.base.contexts import collection_paused
from zerograph.errors import CheckpointError
from zerograph.runtime.checkpoint.boxes import disjoint
from zerograph.runtime.checkpoint.file_tensor import DTYPES as IN_FILES
from zerograph.runtime.checkpoint.remote import Folder, RemotePath

NAME = "index.json"
VERSION = 1
# Signs of invalid Unicode: half of a surrogate pair, as a JSON escape or as the three bytes that Python accepts.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
# Limits of a shape: torch has no larger tensors.
_MOST_ELEMENTS, _MOST_DIMS = 2**60, 64
DTYPES: Mapping[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in IN_FILES.values()}


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor.

    Attributes:
        offsets, sizes: of the box in the tensor.
        file, key: the safetensors file, and the tensor's name in it.
        sha256: of the box's bytes, in hexadecimal.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str
    sha256: str


@dataclass(frozen=True)
class Entry:
    """A tensor: its dtype, shape and boxes, which cover each element once."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Index:
    """The contents of an index.

    Attributes:
        data: the name of the folder, beside the index, that has the safetensors files.
        tensors: by name.
        document: everything else.
    """

    data: str
    tensors: Mapping[str, Entry]
    document: Mapping[str, Any]


def write(folder: Folder, index: Index) -> None:
    """Replace the index in ``folder`` atomically."""
    # Through JSON and back: keys are strings, as they will be when it is read.
    document = json.loads(json.dumps(index.document))
    body = {"format": "zerograph checkpoint", "version": VERSION, **vars(index), "document": document}
    body["sha256"] = _digest(body)
    replace(folder, NAME, json.dumps(body, default=vars))


def replace(folder: Folder, name: str, text: str) -> None:
    """Replace a file in the folder atomically, and sync it to disk. A temporary file is named ``.{name}.*``."""
    if isinstance(folder, RemotePath):
        (folder / name).write_bytes(text.encode())
        return
    with cache.replacing(folder / name) as beside, open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


@collection_paused()
def read(folder: Folder) -> Index:
    """Read and check the index of the checkpoint in ``folder``.

    Raises:
        CheckpointError: there is no index, or it is damaged, or of an unknown version.
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
    """Check that all strings in a JSON document are valid Unicode, without halves of surrogate pairs.

    Raises:
        ValueError: a string is not; it is in the message.
    """
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 30) : error.end]
        raise ValueError(f"a text in it is no Unicode, near {near!a}") from error


def inside(folder: Folder, *names: str) -> Folder:
    """Return the path of a file or folder in the checkpoint, after checking that no link leads out of it.

    Raises:
        CheckpointError: it is elsewhere, or neither a file nor a folder.
        FileNotFoundError: it does not exist.
    """
    path = folder.joinpath(*names)
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        # Opening a pipe would wait forever.
        raise CheckpointError(f"{path} is damaged: no file")
    if isinstance(path, RemotePath) or isinstance(folder, RemotePath):
        # There are no links in it.
        return path
    resolved = path.resolve()
    if not resolved.is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"{path} leads out of its folder, to {resolved}: a checkpoint is read from one folder only"
        )
    return path


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, which must not have a key twice."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key stands twice")
    return members


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, default=vars).encode()).hexdigest()


def _checked(body: Mapping[str, Any]) -> Index:
    tensors = {name: _entry(name, entry) for name, entry in body["tensors"].items()}
    places = [(chunk.file, chunk.key) for entry in tensors.values() for chunk in entry.chunks]
    # Else an index could read one small file any number of times.
    if len(set(places)) != len(places):
        raise ValueError("one place of a file is used twice")
    if not isinstance(body["document"], dict):
        raise ValueError("no document")
    return Index(plain_name(body["data"]), tensors, body["document"])


def _entry(name: str, body: Mapping[str, Any]) -> Entry:
    """Return a tensor after checking that each of its elements is in exactly one box."""
    shape, chunks = _sizes(body["shape"]), []
    for chunk in body["chunks"]:
        offsets, sizes = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"a part of {name} has another number of dimensions")
        if any(map(operator.gt, map(operator.add, offsets, sizes), shape)):
            raise ValueError(f"a part of {name} lies outside of it")
        chunks.append(Chunk(offsets, sizes, plain_name(chunk["file"]), _text(chunk["key"]), _text(chunk["sha256"])))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"parts of {name} are missing")
    if not disjoint([(chunk.offsets, chunk.sizes) for chunk in chunks]):
        raise ValueError(f"parts of {name} overlap")
    if _text(body["dtype"]) not in DTYPES:
        raise ValueError(f"{name} has an unknown dtype")
    return Entry(body["dtype"], shape, tuple(chunks))


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > _MOST_DIMS or not {int}.issuperset(map(type, values)):
        raise ValueError("a shape that is none")
    if min(values, default=0) < 0 or math.prod(filter(None, values)) > _MOST_ELEMENTS:
        raise ValueError("a shape that no tensor has")
    return tuple(values)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no text")
    return value


def plain_name(name: Any) -> str:
    """Return ``name`` after checking that it is a plain file name, without a path.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(name, str) or not name or name != os.path.basename(name) or name in (".", "..") or "\0" in name:
        raise ValueError(f"{name!r:.60} is no name of a file")
    return name


def sync_folder(folder: Folder) -> None:
    """Sync the folder's entries to disk: files that were created or renamed in it."""
    if isinstance(folder, RemotePath):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
