"""Optimizers, their hooks, and learning rate schedulers."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def initial_state(optimizer: Any, parameter: Tensor) -> dict[str, Tensor]:
    """Return the state that the optimizer's constructor creates for a parameter: torch 2.11's Adagrad only."""
    if not isinstance(optimizer, torch.optim.Adagrad) or not torch.__version__.startswith("2.11."):
        return {}
    total = torch.full_like(parameter, optimizer.defaults["initial_accumulator_value"])
    return {"step": torch.tensor(0.0), "sum": total}


def mark_step_called(optimizer: torch.optim.Optimizer) -> None:
    """Mark ``step()`` as called: schedulers warn if they are stepped before the optimizer."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def mark_devices_checked(optimizer: Any) -> None:
    """Skip the check of devices and dtypes that the first ``step()`` of a fused optimizer makes."""
    optimizer._need_device_dtype_check_for_fused = False


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return the hooks before and after ``step()``, global ones included, which have no public name."""
    before_all, before = step_pre_hook_tables(optimizer)
    after_all = _global_tables()["_global_optimizer_post_hooks"]
    after = vars(optimizer)["_optimizer_step_post_hooks"]
    return [*before_all.values(), *before.values()], [*after.values(), *after_all.values()]


def step_pre_hook_tables(optimizer: torch.optim.Optimizer) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the dicts of the hooks before ``step()``: of all optimizers, and of this one."""
    return _global_tables()["_global_optimizer_pre_hooks"], vars(optimizer)["_optimizer_step_pre_hooks"]


def _global_tables() -> dict[str, Any]:
    return vars(sys.modules[torch.optim.Optimizer.__module__])


def unhooked_step(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """Return the class's ``step()`` without the wrappers that torch adds itself.

    They run hooks, a profiler range and ``set_grad_enabled``. A decorator of the user's around or inside of them stays:
    it may copy their marks, so they are known by their code.
    """
    step: Any = kind.step
    while _is_torchs_wrapper(step):
        step = step.__wrapped__
    plain: Callable[[torch.optim.Optimizer], Any] = step
    return plain


def wrapped_with_hooks(kind: type[torch.optim.Optimizer]) -> Callable[..., Any] | None:
    """Return a function of another around torch's wrapper of ``step()``, or None."""
    outer = unhooked_step(kind)
    step: Any = outer
    while step is not None:
        step = getattr(step, "__wrapped__", None)
        if _is_torchs_wrapper(step) and step.__code__.co_name == "wrapper":
            return outer
    return None


def _is_torchs_wrapper(step: Any) -> bool:
    file = sys.modules[torch.optim.Optimizer.__module__].__file__
    return hasattr(step, "__wrapped__") and getattr(getattr(step, "__code__", None), "co_filename", "") == file


def functions_of_instance_step(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return what was assigned to ``optimizer.step``, and what this wraps, outermost first; [] if nothing was.

    The ``step()`` of its class, which learning rate schedulers wrap, and what that wraps, do not count.
    """
    own = set(_with_wrapped(type(optimizer).step))
    functions = _with_wrapped(vars(optimizer).get("step"))
    return list(itertools.takewhile(lambda function: function not in own, functions))


def _with_wrapped(step: Any) -> list[Callable[..., Any]]:
    """Return a function and what it wraps, outermost first."""
    functions = []
    while step is not None:
        step = getattr(step, "__func__", step)
        functions.append(step)
        step = getattr(step, "__wrapped__", None) or getattr(step, "_torchdynamo_orig_callable", None)
    return functions


def replace_unscaling(unscale: Callable[[torch.optim.Optimizer, Tensor], Tensor | None]) -> None:
    """Let ``GradScaler`` unscale gradients by ``unscale(optimizer, inverse_scale)``, where that returns a flag.

    ``unscale_()`` and ``step()`` share this method. Its public callers read every gradient, whole, on every rank.
    """
    original = torch.amp.GradScaler._unscale_grads_

    def unscale_grads(self: Any, optimizer: Any, inverse: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        flag = unscale(optimizer, inverse)
        return original(self, optimizer, inverse, found_inf, allow_fp16) if flag is None else {flag.device: flag}

    torch.amp.GradScaler._unscale_grads_ = unscale_grads  # type: ignore[assignment, method-assign]


def has_closed_form_rates(scheduler: torch.optim.lr_scheduler.LRScheduler) -> bool:
    """Return True if :func:`closed_form_rates` supports the scheduler."""
    return isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR) or hasattr(scheduler, "_get_closed_form_lr")


def closed_form_rates(scheduler: torch.optim.lr_scheduler.LRScheduler) -> list[Any]:
    """Return the learning rates that follow from ``base_lrs`` and ``last_epoch`` alone.

    The public ``get_lr()`` computes them from the previous rates.
    """
    if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        rates = [f(scheduler.last_epoch) for f in scheduler.lr_lambdas]
        return [base * rate for base, rate in zip(scheduler.base_lrs, rates, strict=True)]
    return list(scheduler._get_closed_form_lr())  # type: ignore[attr-defined]
