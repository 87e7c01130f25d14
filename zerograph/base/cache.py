"""Where zerograph keeps on disk what it found out about this machine."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def folder(kind: str) -> Path:
    """``$ZEROGRAPH_CACHE/<kind>``, else ``zerograph/<kind>`` in the user's cache folder."""
    own = os.environ.get("ZEROGRAPH_CACHE")
    if own:
        return Path(own) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerograph" / kind


def write(file: Path, text: str) -> None:
    """Replace ``file`` whole, or leave it: a folder that cannot be written costs time again, never a step."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Not tempfile's, which nobody else may read: a cache may be shared, and the umask says with whom.
        beside = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
        beside.write_text(text)
        os.replace(beside, file)
