"""Guard an optimizer's ``step()``: refuse direct calls and hooks before it, and run the hooks after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from zerograph import _torch
from zerograph.errors import CaptureError, ConfigError, SplitParameterError
from zerograph.runtime.state import holds_state_of


@dataclass(frozen=True)
class Guard:
    """Zerograph's own hook before ``step()``, which refuses direct calls."""

    refuse: Callable[[], object]

    def __call__(self, *_: object) -> None:
        """Refuse the call."""
        self.refuse()


def guard(optimizer: torch.optim.Optimizer, building: Callable[[], bool]) -> None:
    """Make the optimizer refuse ``step()`` and state dicts while a graph stores its state.

    Args:
        optimizer: the optimizer.
        building: returns whether a ``build()`` is being traced.
    """

    def refuse(what: str) -> None:
        if building():
            raise CaptureError(
                f"build() calls {type(optimizer).__name__}.{what}: leave it out, the graph makes the update itself"
            )
        if holds_state_of(optimizer):
            raise SplitParameterError(
                f"{type(optimizer).__name__}.{what}: the optimizer's state is stored in the graph now\n"
                "Call the graph to update; save with its state_dict(), load a plain state with its "
                'load_state_dict({"optimizers": [state]}).'
            )

    optimizer.register_step_pre_hook(Guard(lambda: refuse("step()")))
    optimizer.register_state_dict_pre_hook(lambda *_: refuse("state_dict()"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: refuse("load_state_dict()"))


def refuse_hooks_before(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise if a user has registered a hook before ``step()``: gradients exist only inside the graph.

    Raises:
        ConfigError: there is such a hook, of one optimizer or of all.
    """
    for optimizer in optimizers:
        before, _ = _torch.step_hooks(optimizer)
        for hook in before:
            if not isinstance(hook, Guard):
                raise ConfigError(
                    f"{getattr(hook, '__qualname__', hook)} is to run before {type(optimizer).__name__}.step(), which "
                    "graphs do not call\nMove what it does with gradients into build(), after backward() "
                    "(config.clip_grad_norm clips them), and remove() its handle. Hooks after step() do run."
                )


def run_hooks_after(optimizer: torch.optim.Optimizer) -> None:
    """Run the hooks that were registered to run after ``step()``, as a call without arguments does."""
    _, hooks = _torch.step_hooks(optimizer)
    for hook in hooks:
        hook(optimizer, (optimizer,), {})
