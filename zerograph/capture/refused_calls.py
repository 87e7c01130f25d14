"""Refuse calls in ``build()`` that would run once during the trace and never in a step, or with wrong numbers.

Updates and communication belong to the graph: tensors in ``build()`` are those of the global batch.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zerograph import _torch
from zerograph.base import source
from zerograph.base.contexts import replaced
from zerograph.errors import CaptureError


@contextlib.contextmanager
def refused_calls() -> Iterator[None]:
    """Make steps of optimizers and schedulers, and collectives, errors that name the user's line."""
    _refuse_anomaly_detection()
    layers = sys.modules.get("bitsandbytes.nn.modules")
    refusals = [
        *((kind, "step", _refuse_scheduler_step) for kind in _with_own_step(LRScheduler)),
        *((module, name, _refusing(name)) for module, name in _collectives()),
        *((getattr(layers, name), "forward", _refuse_quantized) for name in _QUANTIZED if hasattr(layers, name)),
        (logging.Handler, "handleError", _raising(logging.Handler.handleError)),
    ]
    hook = register_optimizer_step_pre_hook(_refuse_step)
    try:
        with replaced(refusals), _torch.replaced_object_collectives(_refusing("of Python objects")):
            yield
    finally:
        hook.remove()


def refused_output() -> contextlib.AbstractContextManager[None]:
    """Make texts and files of the user's own lines errors: what runs a graph would not write them."""
    tracing = threading.get_ident()

    def refuse(what: str) -> None:
        is_asked = is_asked_by_user(sys._getframe(2), lambda frame: source.is_standard(frame.f_code.co_filename))
        # Another thread may print what it likes.
        if threading.get_ident() == tracing and is_asked:
            raise CaptureError(f"a call {what}")

    def refusing(function: Callable[..., Any], what: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            refuse(what)
            return function(*args, **kwargs)

        return run

    output = [(owner, name, refusing(getattr(owner, name), what)) for owner, name, what in _OUTPUT]
    return replaced([*output, (sys, "stdout", _Stream(sys.stdout, refusing(sys.stdout.write, "prints")))])


def is_asked_by_user(frame: FrameType | None, is_between: Callable[[FrameType], bool]) -> bool:
    """Return whether the user's own code makes a call, be it through frames between."""
    while frame is not None and is_between(frame):
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    return source.is_users(file) and not source.is_installed(file)


class _Stream:
    def __init__(self, stream: Any, write: Callable[..., Any]) -> None:
        self._stream, self.write = stream, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_OUTPUT: tuple[tuple[Any, str, str], ...] = (
    (builtins, "print", "prints"),
    (builtins, "open", "opens a file"),
    (io, "open", "opens a file"),
    (logging.Logger, "handle", "logs"),
    # One that the filters show.
    (warnings, "_showwarnmsg", "warns"),
)


def _refuse_anomaly_detection() -> None:
    if not (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
        return
    raise source.refusal(
        "torch.autograd.detect_anomaly looks at values inside backward(), which a traced step cannot",
        "Set config.checks.on_nonfinite = 'raise' instead: the step then names the first gradient that is not finite.",
    )


def _refuse_step(optimizer: torch.optim.Optimizer, *_: object) -> NoReturn:
    raise source.refusal(
        f"build() calls {type(optimizer).__name__}.step()",
        "Leave it out, and register the optimizer with add_optimizer(): the graph makes the update itself, after "
        "build(). Parameters that another optimizer trains in turn belong to a graph of their own.",
    )


def _refuse_scheduler_step(scheduler: LRScheduler, *_: object, **__: object) -> NoReturn:
    raise source.refusal(
        f"build() calls {type(scheduler).__name__}.step(), which would run once, while the step is traced",
        "Leave it out: give the scheduler to add_optimizer(optimizer, lr_scheduler), and the graph steps it after each "
        "update; or step it outside build().",
    )


def _raising(handle: Callable[..., None]) -> Callable[..., None]:
    """Return a ``handleError()`` of logging that lets refusals through, where others are printed and forgotten."""

    def handle_error(handler: logging.Handler, record: logging.LogRecord) -> None:
        if isinstance(sys.exception(), CaptureError):
            raise
        handle(handler, record)

    return handle_error


# Layers of bitsandbytes, which replace the data of their weights as they run.
_QUANTIZED = ("Linear8bitLt", "Linear4bit", "Embedding8bit", "Embedding4bit")


def _refuse_quantized(layer: object, *_: object, **__: object) -> NoReturn:
    raise source.refusal(
        f"build() calls {type(layer).__name__} of bitsandbytes",
        "Replace linear layers of 8 bits with zerograph.integrations.bitsandbytes.use_plain_linears(model). Load "
        "layers of 4 bits, and embeddings, in 8 bits or 16 bits instead.",
    )


def _with_own_step(kind: type) -> Iterator[type]:
    """Yield the class and its subclasses that define a ``step()``."""
    kinds, seen = [kind], set()
    while kinds:
        kind = kinds.pop()
        if kind not in seen:
            seen.add(kind)
            kinds += kind.__subclasses__()
            if "step" in vars(kind):
                yield kind


def _collectives() -> Iterator[tuple[Any, str]]:
    """Yield every module and name by which user code reaches a collective."""
    modules = [dist, distributed_c10d, *map(sys.modules.get, _FURTHER_MODULES)]
    for module in filter(None, modules):
        yield from (
            (module, name) for name in vars(module) if _COLLECTIVES.match(name) and callable(vars(module)[name])
        )


# Loaded only by users of them.
_FURTHER_MODULES = (
    "torch.distributed.nn",
    "torch.distributed.nn.functional",
    "torch.distributed._functional_collectives",
)

# Their names, and those of variants.
_COLLECTIVES = re.compile(
    r"(all_(gather|reduce|to_all)|reduce|broadcast|gather|scatter|permute_tensor|(batch_)?i?send|i?recv"
    r"|(monitored_)?barrier)(_|$)"
)


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise collective_refused(name)

    return refuse


def collective_refused(name: str, traceback: TracebackType | None = None) -> CaptureError:
    """Return the error for a collective that ``build()`` calls.

    Args:
        name: its name in torch.
        traceback: traceback of torch's own error, if torch has raised one.
    """
    return source.refusal(
        f"build() calls the collective {name}",
        "Leave it out, and what divides by the number of ranks after it: tensors in build() are of the whole batch "
        "already, a mean is the mean over all ranks. What each rank is to compute by itself belongs into zg.local(), "
        "other communication outside build().",
        None if traceback is None else source.raising_line(traceback),
    )


COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
