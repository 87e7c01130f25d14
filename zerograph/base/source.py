"""Find the running line of the user's code, for node origins and messages."""

from __future__ import annotations

import functools
import linecache
import os
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path
from types import FrameType, TracebackType

import torch

from zerograph.errors import CaptureError, ZeroGraphWarning

_PACKAGE = Path(__file__).parent.parent
# The folders of zerograph's code. In a checkout passes/ and runtime/ are links, or lie beside the package.
OWN_FOLDERS = (
    _PACKAGE,
    *(
        (folder if folder.is_dir() else _PACKAGE.parent / folder.name).resolve()
        for folder in (_PACKAGE / "passes", _PACKAGE / "runtime")
    ),
)
# Code that is not the user's.
_NOT_USER = tuple(str(path) + os.sep for path in (Path(torch.__file__).parent, *OWN_FOLDERS))
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
# A rewritten ``assert`` of a test refers to pytest, which keeps logs and the whole run: nothing of a step.
_PYTEST = os.sep + "_pytest" + os.sep


@functools.cache
def is_users(filename: str) -> bool:
    """Return whether a file is not torch's, zerograph's, pytest's or the standard library's.

    Installed models are the user's.
    """
    # typing_extensions wraps functions that torch has deprecated.
    if filename.startswith("<") or filename.startswith(_NOT_USER) or filename.endswith(os.sep + "typing_extensions.py"):
        return False
    if _PYTEST in filename:
        return False
    return not filename.startswith(_STDLIB) or any(part in filename for part in _PACKAGES)


@functools.cache
def is_standard(filename: str) -> bool:
    """Return whether a file is one of Python's standard library."""
    return filename.startswith(("<frozen", _STDLIB)) and not is_installed(filename)


@functools.cache
def is_installed(filename: str) -> bool:
    """Return whether a file belongs to an installed package."""
    return any(part in filename for part in _PACKAGES)


_OPTIMIZERS = str(Path(torch.__file__).parent / "optim") + os.sep
# The optimizers of flow.optim: their comparisons of hyperparameters count, as those of torch.optim do.
_OUR_OPTIMIZERS = str(_PACKAGE / "compat" / "oneflow" / "optim") + os.sep


def is_optimizers(filename: str) -> bool:
    """Return whether a file may define an optimizer: a user's file, or one of ``torch.optim`` or ``flow.optim``."""
    return is_users(filename) or filename.startswith((_OPTIMIZERS, _OUR_OPTIMIZERS))


def running_line(*, optimizers: bool = False, own: bool = False) -> tuple[str, str]:
    """Return ``train.py:31`` and the code on that line, for the innermost frame of the user; or two empty strings.

    Args:
        optimizers: lines of ``torch.optim`` and ``flow.optim`` count too.
        own: lines of installed packages do not count.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if (is_users(filename) and not (own and is_installed(filename))) or (optimizers and is_optimizers(filename)):
            return described(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return "", ""


def refusal(what: str, instead: str, place: tuple[str, str] | None = None) -> CaptureError:
    """Return the error for a line of the user's code that cannot be a part of a graph.

    Args:
        what: what the line does.
        instead: what to do instead.
        place: the line and its code; None: those that are running, of an installed package and of the user's own code.
    """
    places = [place] if place is not None else [running_line(), running_line(own=True)]
    lines = dict.fromkeys(f"  {line}   {code}" for line, code in places if line)
    return CaptureError("\n".join([what, *lines, instead]))


def relative_to_package(source: str) -> str:
    """Shorten ``/.../site-packages/transformers/loss.py:42`` to ``transformers/loss.py:42``.

    A file outside site-packages is named from its outermost package on. A relative path is returned unchanged.
    """
    for part in _PACKAGES:
        if part in source:
            return source.rpartition(part)[2]
    if not os.path.isabs(source):
        return source
    return os.path.relpath(source, _above_packages(os.path.dirname(source)))


@functools.cache
def _above_packages(folder: str) -> str:
    """Return the innermost folder that contains ``folder`` and is not a package."""
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder = os.path.dirname(folder)
    return folder


def commit(folder: str | os.PathLike[str] = ".") -> str:
    """Return the short commit of a folder's git repository, with ``+`` if files differ; empty without a repository."""
    command = ["git", "-C", os.fspath(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""


def warn_user(message: str) -> None:
    """Show a warning at the user's line."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, ZeroGraphWarning, stacklevel=level)


def raising_line(traceback: TracebackType | None, *, own: bool = False) -> tuple[str, str]:
    """Return :func:`running_line` of the innermost frame of the user that an exception passed through."""
    place = ("", "")
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if is_users(filename) and not (own and is_installed(filename)):
            place = described(filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return place


@functools.cache
def described(filename: str, line: int) -> tuple[str, str]:
    """Return (``train.py:31``, the code on that line)."""
    if filename.startswith(_OUR_OPTIMIZERS):
        return f"flow/optim/{filename.removeprefix(_OUR_OPTIMIZERS)}:{line}", linecache.getline(filename, line).strip()
    if filename.startswith(_OPTIMIZERS):
        return f"torch/optim/{filename.removeprefix(_OPTIMIZERS)}:{line}", linecache.getline(filename, line).strip()
    relative = os.path.relpath(filename) if filename.startswith(os.getcwd() + os.sep) else filename
    return f"{relative}:{line}", linecache.getline(filename, line).strip()
