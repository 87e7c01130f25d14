"""The index of a checkpoint: one JSON file, whose appearance makes the checkpoint valid, and all that it says checked.

It names every tensor with its shape, dtype and boxes, where each box is written and its SHA-256, and holds what is no
tensor as plain JSON. Nothing in a checkpoint is ever unpickled or run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from zerograph.errors import CheckpointError

NAME = "index.json"
VERSION = 1
DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
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
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint in {folder}: it has no {NAME}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: no JSON") from error
    if not isinstance(body, dict) or body.get("format") != "zerograph checkpoint":
        raise CheckpointError(f"{path} is no index of a checkpoint of zerograph")
    if body.get("version") != VERSION:
        raise CheckpointError(f"{path} has the version {body.get('version')!r:.20}, this zerograph reads {VERSION}")
    if body.pop("sha256", None) != _digest(body):
        raise CheckpointError(f"{path} is damaged: its contents do not have the SHA-256 that it says")
    try:
        return _checked(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _checked(body: Mapping[str, Any]) -> Index:
    tensors = {}
    for name, one in body["tensors"].items():
        shape, chunks = _sizes(one["shape"]), []
        for chunk in one["chunks"]:
            offsets, sizes = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
            if any(at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)):
                raise ValueError(f"a part of {name} lies outside of it")
            chunks.append(Chunk(offsets, sizes, _plain(chunk["file"]), str(chunk["key"]), str(chunk["sha256"])))
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
            raise ValueError(f"parts of {name} are missing")
        if one["dtype"] not in DTYPES:
            raise ValueError(f"{name} has an unknown dtype")
        tensors[str(name)] = Entry(one["dtype"], shape, tuple(chunks))
    if not isinstance(body["document"], dict):
        raise ValueError("no document")
    return Index(_plain(body["data"]), tensors, body["document"])


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(one) is int and 0 <= one < 2**62 for one in values):
        raise ValueError("a shape that is none")
    return tuple(values)


def _plain(name: Any) -> str:
    """A name inside the checkpoint's own folder."""
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
