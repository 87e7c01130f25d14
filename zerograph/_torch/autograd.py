"""Backward, checkpointing and hooks on gradients."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._functorch import pyfunctorch
from torch.autograd import grad_mode, graph as autograd_graph
from torch.utils import checkpoint as checkpointing

from zerograph._torch.tensors import plain_tensors

Hooks = list[Callable[..., Any]]


def forward_sequence_number() -> int:
    """Return the number of the autograd node that the running forward operator created last."""
    return int(torch._C._autograd._get_sequence_nr()) - 1


def backward_sequence_number() -> int | None:
    """Return the number of the autograd node whose backward is running (its forward operator's), or None in forward."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def replaced_backward(run: Callable[..., None]) -> contextlib.AbstractContextManager[Any]:
    """Make ``Tensor.backward`` and ``torch.autograd.backward`` call ``run(original, tensors, ...)``.

    ``Tensor.backward`` looks ``torch.autograd.backward`` up at each call. Torch has no hook around a whole backward.
    """
    original = torch.autograd.backward
    running = False

    def replaced(tensors: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal running
        if running:
            # The original passes itself, by name, to modes and subclasses, which call it again.
            original(tensors, *args, **kwargs)
            return
        running = True
        try:
            run(original, tensors, *args, **kwargs)
        finally:
            running = False

    return patch.object(torch.autograd, "backward", replaced)


def eager_checkpoint_policies() -> contextlib.AbstractContextManager[Any]:
    """Make selective contexts of ``torch.utils.checkpoint`` follow their policy under a tracer, as in eager mode.

    Otherwise they would save everything and leave the policy to torch's own partitioner, which reads it off nodes.
    """
    return patch.object(checkpointing, "_is_compiling", lambda *_: False)


def recomputing_modules() -> list[nn.Module] | None:
    """Return the modules that ``torch.utils.checkpoint`` is recomputing for the running backward, innermost first.

    Only the stack shows this: one of checkpoint's frames is inside the frame that runs autograd's engine. Module hooks
    do not fire when checkpoint stops early.

    Returns:
        An empty list if checkpoint recomputes plain functions; None if nothing is being recomputed.
    """
    modules: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _ENGINE:
        if frame.f_code is _CALL:
            modules.append(frame.f_locals["self"])
        if frame.f_code.co_filename == checkpointing.__file__:
            return modules
        frame = frame.f_back
    return None


_CALL = nn.Module._call_impl.__code__
_ENGINE = autograd_graph._engine_run_backward.__code__


_GRADIENT_HOOKS = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


def gradient_hooks(leaves: Iterable[Tensor]) -> list[tuple[Hooks, Hooks]]:
    """Return each leaf's hooks on its gradient and its hooks after accumulation, which have no public name.

    Parameters without data are allowed.
    """
    with plain_tensors():
        tables = [*map(_GRADIENT_HOOKS, leaves)]
    return [(list((before or {}).values()), list((after or {}).values())) for before, after in tables]


def has_gradient_hooks(leaves: Iterable[Tensor]) -> bool:
    """Return True if any leaf has :func:`gradient_hooks`."""
    with plain_tensors():
        return any(chain.from_iterable(map(_GRADIENT_HOOKS, leaves)))


def trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that require a gradient; those without data, too."""
    with plain_tensors():
        return [*filter(operator.attrgetter("requires_grad"), parameters)]


def reaches_all_leaves(*, deeply: bool = True) -> bool:
    """Return whether the running backward accumulates the gradients of all leaves below the running node.

    ``torch.autograd.grad`` and ``backward(inputs=...)`` do not. Torch says so of single nodes only.

    Args:
        deeply: look at all nodes below, not only at the next ones.
    """
    nodes: list[Any] = [torch._C._current_autograd_node()]
    seen: set[Any] = {None}
    while nodes:
        below: set[Any] = {node for node, _ in nodes.pop().next_functions} - seen
        seen |= below
        leaves = [node for node in below if hasattr(node, "variable")]
        try:
            if not all(map(torch._C._will_engine_execute_node, leaves)):
                return False
        except RuntimeError:
            # One is an input of torch.autograd.grad().
            return False
        if deeply:
            nodes += below.difference(leaves)
    return True


def same_versions(tensors: Iterable[Tensor]) -> contextlib.AbstractContextManager[None]:
    """Return a block whose writes to tensors count as none, as those of batch norm to its statistics do."""
    counted = tuple(one for one in tensors if not one.is_inference())
    return grad_mode._unsafe_preserve_version_counter(counted)


def ambient_autocast() -> tuple[str, torch.dtype] | None:
    """Return the device type and dtype of the autocast block around, or None."""
    kinds = ["cpu"]
    if torch.accelerator.is_available():
        kinds.append(torch.accelerator.current_accelerator().type)  # type: ignore[union-attr]
    kind = next((one for one in kinds if torch.is_autocast_enabled(one)), None)
    return None if kind is None else (kind, torch.get_autocast_dtype(kind))


def is_transforming() -> bool:
    """Return whether a transform of ``torch.func`` runs, such as ``grad`` or ``vmap``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Return a block that the transforms of ``torch.func`` that run do not see."""
    return pyfunctorch.temporarily_clear_interpreter_stack()
