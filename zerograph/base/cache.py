"""Name the folder of caches on this machine; read files, and replace them atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

FOLDER = "ZEROGRAPH_CACHE"


def setting() -> str:
    """Return ``$ZEROGRAPH_CACHE``; empty without it, and for a word that turns off what is no folder."""
    text = os.environ.get(FOLDER, "").strip()
    return "" if text.lower() in ("0", "off", "false", "no") else text


def folder(kind: str) -> Path:
    """Return ``$ZEROGRAPH_CACHE/<kind>``; ``zerograph/<kind>`` in the user's cache folder if that names no folder."""
    own = setting()
    if own and own.lower() not in ("1", "on", "true", "yes"):
        return Path(own) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerograph" / kind


@contextlib.contextmanager
def opened(file: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for the block, to be read.

    Raises:
        OSError: there is none, or it is a pipe, a socket or a device, which could block or have no end.
    """
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | getattr(os, "O_NONBLOCK", 0))) as made:
        if not stat.S_ISREG(os.fstat(made.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no file", os.fspath(file))
        yield made


def read(file: str | os.PathLike[str]) -> bytes:
    """Return the content of a file that :func:`opened` opens."""
    with opened(file) as made:
        return made.read()


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; rename it to ``file`` after the block. An error deletes it."""
    # Two jobs may write the same file. No file of tempfile, which only its owner can read.
    beside = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        yield beside
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)
