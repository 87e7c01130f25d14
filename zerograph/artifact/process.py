"""Texts of what a trace reads besides the user's code: versions, settings and functions of torch, environment."""

from __future__ import annotations

import decimal
import functools
import hashlib
import locale
import os
import platform
import sys
import types
import warnings
from typing import Any

import torch

import zerograph
from zerograph import _torch
from zerograph.artifact.digest import ADDED, Digest, short
from zerograph.base import source

# Variables that torch reads in C, or when it is imported.
_READ_BY_TORCH = ("TORCH", "PYTORCH", "ATEN_", "DISABLE_ADDMM", "CUBLAS_WORKSPACE")
# They differ between jobs, and say where to work, not what.
_NOT_READ = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR", "TORCH_HOME", "TORCH_LOGS", "TORCH_TRACE")
_SEARCHED = ("torch", "zerograph", "builtins")
# No trace runs them: they compile graphs, or test torch.
_NOT_SEARCHED = ("torch._inductor", "torch.testing", "torch.onnx", "torch.ao", "torch.utils.benchmark")
# Modules and classes that have the functions which users and torch call most.
_NAMESPACES = (
    *("torch", "torch.nn.functional", "torch._C._nn", "torch.linalg", "torch.fft", "torch.special", "torch.nn.init"),
    *("torch.utils.checkpoint", "torch.optim", "torch.autograd", "torch.amp"),
)


def process_texts() -> dict[str, str]:
    """Return what must be equal in two processes that trace the same code to the same graph, as text by name."""
    return {
        "the version of Python": platform.python_version(),
        "the version of torch": torch.__version__,
        "the version of zerograph": f"{zerograph.__version__} ({_own_digest()})",
        "the settings of torch": str(_torch.trace_settings()),
        "the environment variables of torch": _environment(),
        "the functions of torch that were replaced": ", ".join(_replaced(Digest())) or "none",
        "the settings of Python's modules": _ambient(),
        "the functions of torch by name": short("\n".join(_by_name())),
        "the kernels of torch's operators": short("\n".join(_torch.python_kernels())),
    }


@functools.cache
def _own_digest() -> str:
    """Return a digest of zerograph's own source files."""
    digest = hashlib.sha256()
    for folder in source.OWN_FOLDERS:
        for path in sorted(folder.resolve().rglob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _environment() -> str:
    names = [name for name in sorted(os.environ) if name.startswith(_READ_BY_TORCH) and not name.startswith(_NOT_READ)]
    return " ".join(f"{name}={os.environ[name]}" for name in names) or "none"


def doubts() -> list[str]:
    """Return which functions of torch were replaced by others that no text of :func:`process_texts` tells whole."""
    digest = Digest()
    _replaced(digest)
    return [f"a function of torch was replaced: {doubt}" for doubt in digest.doubts]


def _ambient() -> str:
    """Return the settings that functions of Python's library read, which a trace may call."""
    context = decimal.getcontext()
    of_decimal = [context.prec, context.rounding, context.Emin, context.Emax, context.capitals, context.clamp]
    traps = sorted(signal.__name__ for signal, is_set in context.traps.items() if is_set)
    errors = [entry[1:] for entry in warnings.filters if entry[0] == "error"]
    precision = getattr(getattr(sys.modules.get("mpmath"), "mp", None), "prec", None)
    return f"{of_decimal} {traps} {locale.setlocale(locale.LC_ALL)} {errors} {precision} {sys.flags.optimize}"


def _replaced(digest: Digest) -> list[str]:
    """Return functions of other files in torch's and zerograph's modules and classes, with their digests."""
    replaced = []
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in _SEARCHED or name.startswith(_NOT_SEARCHED):
            continue
        for key, value in list(vars(module).items()):
            if type(value) is types.FunctionType:
                # Torch and zerograph import functions of installed packages themselves.
                if _is_foreign(value) and not source.is_installed(value.__code__.co_filename):
                    replaced.append(_place(f"{name}.{key}", value, digest))
            elif issubclass(type(value), type) and value.__module__ == name:
                replaced += [
                    _place(f"{name}.{key}.{entry}", function, digest)
                    for entry, function in list(vars(value).items())
                    if type(function) is types.FunctionType and _is_foreign(function) and entry not in ADDED
                ]
    return replaced


def _is_foreign(function: types.FunctionType) -> bool:
    return source.is_users(function.__code__.co_filename)


def _place(path: str, function: types.FunctionType, digest: Digest) -> str:
    code = function.__code__
    if path.startswith("torch.") and not source.is_installed(code.co_filename):
        return f"{path} ({digest.everything_of(function)})"
    return f"{path} ({short(f'{code.co_code!r} {code.co_consts!r}'.partition(' at 0x')[0])})"


def _by_name() -> list[str]:
    """Return what the names of torch's main modules and of its tensors stand for."""
    lines = []
    spaces: dict[str, Any] = {name: vars(sys.modules[name]) for name in _NAMESPACES if name in sys.modules}
    spaces |= {"Tensor": vars(torch.Tensor), "TensorBase": vars(torch._C.TensorBase)}
    for space, entries in spaces.items():
        for name, value in sorted(entries.items()):
            # Modules that torch loads later, and values.
            if callable(value) and not isinstance(value, types.ModuleType):
                lines.append(f"{space}.{name} {getattr(value, '__module__', '')} {getattr(value, '__qualname__', '')}")
    return lines
