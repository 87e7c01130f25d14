"""A file system of fsspec, ``objects://``, that behaves as an object store, over a local folder that processes share.

It puts an object as a whole or not at all, creates one only once if asked to, and lists by prefix. It has no folders,
no rename, no append and no locks.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec


class ObjectStore(fsspec.AbstractFileSystem):
    protocol = "objects"
    cachable = False
    # The "server": a folder with one file for each object, named by its whole key.
    root = Path()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("objects://").strip("/")

    def _object(self, path: str) -> Path:
        return self.root / quote(self._strip_protocol(path), safe="")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        part = self.root / f"%{uuid.uuid4().hex}"
        part.write_bytes(value)
        try:
            if mode == "create":
                os.link(part, self._object(path))
            else:
                os.replace(part, self._object(path))
        finally:
            part.unlink(missing_ok=True)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self._object(path).read_bytes()[start:end]

    def rm_file(self, path: str) -> None:
        self._object(path).unlink()

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        for key in self._keys(self._strip_protocol(path) + "/"):
            self.rm_file(key)

    def _keys(self, prefix: str) -> list[str]:
        names = (unquote(name) for name in os.listdir(self.root) if not (name[0] == "%" and "%2F" not in name))
        return sorted(name for name in names if name.startswith(prefix))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        folder = self._strip_protocol(path)
        entries = {}
        for key in self._keys(folder + "/"):
            name, _, deeper = key[len(folder) + 1 :].partition("/")
            kind = "directory" if deeper else "file"
            size = 0 if deeper else self._object(key).stat().st_size
            entries[name] = {"name": f"{folder}/{name}", "size": size, "type": kind}
        return list(entries.values()) if detail else [entry["name"] for entry in entries.values()]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        key = self._strip_protocol(path)
        if self._object(path).exists():
            return {"name": key, "size": self._object(path).stat().st_size, "type": "file"}
        if self._keys(key + "/"):
            return {"name": key, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def _open(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("objects are put and read as wholes")

    def mkdir(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("there are no folders")

    def mv(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("objects cannot be renamed")


def use(root: Path) -> None:
    """Serve ``objects://`` of this process from the folder."""
    ObjectStore.root = root
    fsspec.register_implementation("objects", ObjectStore, clobber=True)
