"""Modules, their hooks, and functions of ``torch.nn``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.nn.modules import module as _every_module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import clip_grad, parametrize
from torch.nn.utils.stateless import _reparametrize_module

from zerograph.base.contexts import replaced

F = TypeVar("F", bound=Callable[..., Any])

# The kernels of torch.nn.functional. They have no public module.
nn_kernels: Any = torch._C._nn
# The functions that modules of torch.nn.modules.rnn call: they look them up here.
recurrent_functions: Any = torch._VF


def caches_parametrizations() -> bool:
    """Return whether values of parametrized tensors are kept now, as ``parametrize.cached()`` notes it."""
    return parametrize._cache_enabled > 0


def is_norm_statistic(module: nn.Module, name: str) -> bool:
    """Return whether a buffer is a statistic of a norm, to which its kernel writes without counting it."""
    return isinstance(module, _NormBase) and name in ("running_mean", "running_var")


def with_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> contextlib.AbstractContextManager[None]:
    """Replace parameters and buffers of ``module`` by ``tensors``, by qualified name; restore them at exit.

    ``torch.func.functional_call`` does the same around ``forward`` only, and ``build()`` is not a ``forward``. A name
    that reaches the attribute of an earlier name, because a submodule has two places, is left out: torch would restore
    the replacement last.
    """
    places: dict[tuple[int, str], str] = {}
    owners: dict[str, nn.Module] = {}
    for name in tensors:
        path, _, attribute = name.rpartition(".")
        if path not in owners:
            owners[path] = module.get_submodule(path)
        places.setdefault((id(owners[path]), attribute), name)
    context: contextlib.AbstractContextManager[None] = _reparametrize_module(
        module, {name: tensors[name] for name in places.values()}
    )
    return context


def not_compiled(function: F) -> F:
    """Let ``torch.compile`` run a function, and all that it calls, as it is. Return the function."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def module_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks around the module's forward and backward; torch can only add and remove them."""
    return [hook for table in hook_tables(module) if table for hook in table.values()]


def module_tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the dicts that hold the module's parameters, buffers, submodules and :func:`module_hooks`."""
    return module._parameters, module._buffers, module._modules, *hook_tables(module)


def hook_tables(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """Return the dicts that hold the :func:`module_hooks`."""
    forward: tuple[Any, ...] = (module._forward_pre_hooks, module._forward_hooks)
    return *forward, module._backward_pre_hooks, module._backward_hooks


def global_hooks() -> list[Callable[..., Any]]:
    """Return the hooks around the forward and backward of all modules. Torch has no public list of them."""
    tables: tuple[dict[Any, Any], ...] = (
        *(_every_module._global_forward_pre_hooks, _every_module._global_forward_hooks),
        *(_every_module._global_backward_pre_hooks, _every_module._global_backward_hooks),
    )
    return [hook for table in tables for hook in table.values()]


def unsaved_buffers(root: nn.Module) -> set[str]:
    """Return the qualified names of buffers that were registered with ``persistent=False``."""
    return {
        f"{path}.{name}" if path else name
        for path, module in root.named_modules()
        for name in module._non_persistent_buffers_set
    }


def replaced_total_norm(
    function: Callable[[Sequence[Tensor], float, bool], Tensor | None],
) -> contextlib.AbstractContextManager[None]:
    """Make ``clip_grad_norm_`` and ``get_total_norm`` ask ``function(tensors, p, error_if_nonfinite)`` for the norm.

    They compute the norm themselves where the function returns None. ``clip_grad_norm_`` looks the norm up by a private
    name. A ``get_total_norm`` that was imported by name earlier keeps its own loop: correct, but many nodes.
    """
    original = clip_grad._get_total_norm

    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        with torch.no_grad():
            norm = function(gradients, float(norm_type), error_if_nonfinite)
        return original(gradients, norm_type, error_if_nonfinite, foreach) if norm is None else norm

    return replaced([(clip_grad, "_get_total_norm", total_norm), (nn.utils, "get_total_norm", total_norm)])


def replace_function(old: Callable[..., Any], new: Callable[..., Any], modules: Mapping[str, Any]) -> None:
    """Replace a function of torch in every module that has imported it by name."""
    for module in list(modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, name, new)


def unchecked_distributions() -> contextlib.AbstractContextManager[Any]:
    """Turn argument checks of ``torch.distributions`` off: they read values. The public setter cannot be undone."""
    return patch.object(torch.distributions.Distribution, "_validate_args", False)


def unchecked_values() -> contextlib.AbstractContextManager[None]:
    """Leave out torch's functions for checks of tensors: they read values."""
    checks = ("_assert", "_check_tensor_all_with")
    return replaced((torch, name, _of_numbers_only(getattr(torch, name))) for name in checks)


def _of_numbers_only(check: Any) -> Any:
    """Return a check that lets every tensor pass; a symbolic condition is no tensor."""
    return lambda *args, **kwargs: None if any(isinstance(one, Tensor) for one in args) else check(*args, **kwargs)


def trusted_causal_flags() -> contextlib.AbstractContextManager[Any]:
    """Make ``nn.Transformer`` trust ``is_causal``: to choose a kernel it would compare the mask's values."""
    return patch.object(
        torch.nn.modules.transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: bool(is_causal)
    )


def adaptive_output(output: Tensor, loss: Tensor) -> Any:
    """Return the result type of ``nn.AdaptiveLogSoftmaxWithLoss``, whose class is in a private module."""
    return torch.nn.modules.adaptive._ASMoutput(output, loss)
