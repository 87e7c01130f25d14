"""Cache on disk what zerograph has measured or discovered on this machine."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

FOLDER = "ZEROGRAPH_CACHE"


def folder(kind: str) -> Path:
    """Return ``$ZEROGRAPH_CACHE/<kind>``, or ``zerograph/<kind>`` in the user's cache folder."""
    own = os.environ.get(FOLDER)
    if own:
        return Path(own) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerograph" / kind


def write(file: Path, text: str) -> None:
    """Replace ``file`` atomically. Failures are ignored: the content is computed again the next time."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Not a file of tempfile, which only its owner can read: a cache may be shared, as the umask allows.
        beside = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
        beside.write_text(text)
        os.replace(beside, file)
