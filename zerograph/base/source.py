"""Which line of the user's code is running: for node origins and for messages."""

from __future__ import annotations

import functools
import linecache
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import FrameType, TracebackType

import torch

_PACKAGE = Path(__file__).parent.parent
# Not the user's: torch, ourselves (also through the links passes/ and runtime/) and the standard library.
_NOT_USER = tuple(
    str(path) + os.sep
    for path in (
        Path(torch.__file__).parent,
        _PACKAGE,
        (_PACKAGE / "passes").resolve(),
        (_PACKAGE / "runtime").resolve(),
    )
)
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)


@functools.cache
def is_users(filename: str) -> bool:
    """Whether a file is neither torch's, nor ours, nor the standard library's; installed models are the user's."""
    # The last wraps functions that torch has deprecated.
    if filename.startswith("<") or filename.startswith(_NOT_USER) or filename.endswith(os.sep + "typing_extensions.py"):
        return False
    return not filename.startswith(_STDLIB) or any(part in filename for part in _PACKAGES)


_OPTIMIZERS = str(Path(torch.__file__).parent / "optim") + os.sep
# Optimizers of ours under OneFlow's names: what they compare hyperparameters with counts as what torch's do.
_OUR_OPTIMIZERS = str(_PACKAGE / "compat" / "oneflow" / "optim") + os.sep


def is_optimizers(filename: str) -> bool:
    """Tell whether a file may hold an optimizer: the user's, one of ``torch.optim``, or one of OneFlow's names."""
    return is_users(filename) or filename.startswith((_OPTIMIZERS, _OUR_OPTIMIZERS))


def running_line(*, optimizers: bool = False) -> tuple[str, str]:
    """(``train.py:31``, the code on that line) of the innermost user's frame, or two empty strings.

    Args:
        optimizers: lines of ``torch.optim`` and of OneFlow's optimizers count too.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if is_users(filename) or (optimizers and is_optimizers(filename)):
            return described(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return "", ""


def relative_to_package(source: str) -> str:
    """Shorten ``/.../site-packages/transformers/loss.py:42`` to ``transformers/loss.py:42``.

    A file outside of site-packages is named from its outermost package on; what is relative already stays as it is.
    """
    for part in _PACKAGES:
        if part in source:
            return source.rpartition(part)[2]
    if not os.path.isabs(source):
        return source
    return os.path.relpath(source, _above_packages(os.path.dirname(source)))


@functools.cache
def _above_packages(folder: str) -> str:
    """Return the innermost folder around ``folder`` that is no package."""
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder = os.path.dirname(folder)
    return folder


def commit(folder: str | os.PathLike[str] = ".") -> str:
    """Return the short commit of the git repository around a folder, ``+`` after it if files differ; empty if none."""
    command = ["git", "-C", os.fspath(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""


def levels_to_user() -> int:
    """``stacklevel`` for ``warnings.warn()`` in the caller, so that the warning points to the user's line."""
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, count = frame.f_back, count + 1
    return count


def raising_line(traceback: TracebackType | None) -> tuple[str, str]:
    """As :func:`running_line`, of the innermost user's frame that an exception passed through."""
    found = ("", "")
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if is_users(filename):
            found = described(filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


@functools.cache
def described(filename: str, line: int) -> tuple[str, str]:
    """Return (``train.py:31``, the code on that line)."""
    if filename.startswith(_OUR_OPTIMIZERS):
        return f"flow/optim/{filename.removeprefix(_OUR_OPTIMIZERS)}:{line}", linecache.getline(filename, line).strip()
    if filename.startswith(_OPTIMIZERS):
        return f"torch/optim/{filename.removeprefix(_OPTIMIZERS)}:{line}", linecache.getline(filename, line).strip()
    relative = os.path.relpath(filename) if filename.startswith(os.getcwd() + os.sep) else filename
    return f"{relative}:{line}", linecache.getline(filename, line).strip()
