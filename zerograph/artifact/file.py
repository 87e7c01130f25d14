"""The file of an artifact: a line that names the format, a digest, JSON, and tensors as safetensors."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from zerograph.base.cache import read, replacing
from zerograph.errors import ArtifactError

_MAGIC = b"zerograph artifact 1\n"


def file_content(document: Any, tensors: Mapping[str, Tensor]) -> bytes:
    """Return the content of the file that has a document and tensors."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    content = b"%d\n" % len(text) + text + safetensors.torch.save(dict(tensors))
    return _MAGIC + hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def write_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace the file at ``path`` atomically. Only its owner can read it.

    Raises:
        ArtifactError: it cannot be written.
    """
    try:
        with replacing(Path(path)) as beside:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(content)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be written: {error.strerror or error}") from error


def read_file(path: str | os.PathLike[str]) -> tuple[Any, dict[str, Tensor]]:
    """Return the document and the tensors of a file.

    Raises:
        ArtifactError: there is no such file, it is none of zerograph's, or it is damaged.
    """
    try:
        data = read(path)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
    return parse_file(path, data)


def parse_file(path: str | os.PathLike[str], data: bytes) -> tuple[Any, dict[str, Tensor]]:
    """Return the document and the tensors of a file that has been read.

    Args:
        path: names it in messages.
        data: its content.

    Raises:
        ArtifactError: it is none of zerograph's, or it is damaged.
    """
    if not data.startswith(_MAGIC):
        raise ArtifactError(f"{path} is no artifact of this version of zerograph\nExport the step again.")
    digest, _, content = data.removeprefix(_MAGIC).partition(b"\n")
    if digest != hashlib.sha256(content).hexdigest().encode():
        raise ArtifactError(f"{path} is damaged: its content does not have the digest that it was written with")
    try:
        length, _, rest = content.partition(b"\n")
        document = json.loads(rest[: int(length)])
        return document, safetensors.torch.load(rest[int(length) :])
    except Exception as error:
        raise ArtifactError(f"{path} is damaged: {type(error).__name__}: {error}") from error
