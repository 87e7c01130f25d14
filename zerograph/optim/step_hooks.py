"""What is left of an optimizer's ``step()``: calls by hand are refused, hooks behind it run, those before it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from zerograph import _torch
from zerograph.errors import CaptureError, ConfigError, SplitParameterError
from zerograph.runtime.state import holds_state_of


@dataclass(frozen=True)
class Guard:
    """A hook before ``step()`` that refuses calls by hand, and is none of the user's."""

    refuse: Callable[[], object]

    def __call__(self, *_: object) -> None:
        """Refuse the call."""
        self.refuse()


def guard(optimizer: torch.optim.Optimizer, building: Callable[[], bool]) -> None:
    """Make the optimizer refuse what would act on state that it no longer holds, or happen twice.

    Args:
        building: whether a ``build()`` is being traced.
    """

    def refuse(what: str) -> None:
        if building():
            raise CaptureError(
                f"build() calls {type(optimizer).__name__}.{what}: leave it out, the graph makes the update itself"
            )
        if holds_state_of(optimizer):
            raise SplitParameterError(
                f"{type(optimizer).__name__}.{what}: the optimizer's state lives in the graph now\n"
                "Call the graph to update; save with its state_dict(), load a plain state with its "
                'load_state_dict({"optimizers": [state]}).'
            )

    optimizer.register_step_pre_hook(Guard(lambda: refuse("step()")))
    optimizer.register_state_dict_pre_hook(lambda *_: refuse("state_dict()"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: refuse("load_state_dict()"))


def refuse_hooks_before(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise if a user's hook waits for ``step()`` to begin: what it would see, gradients, is in the graph only.

    Raises:
        ConfigError: there is one, of an optimizer or of all.
    """
    for optimizer in optimizers:
        before, _ = _torch.step_hooks(optimizer)
        for hook in before:
            if not isinstance(hook, Guard):
                raise ConfigError(
                    f"{getattr(hook, '__qualname__', hook)} is to run before {type(optimizer).__name__}.step(), which "
                    "graphs do not call\nDo in build(), behind backward(), what it does with gradients "
                    "(config.clip_grad_norm clips them), and remove() its handle. Hooks behind step() do run."
                )


def run_hooks_behind(optimizer: torch.optim.Optimizer) -> None:
    """Run what was registered to run behind ``step()``, as that does when it is called without arguments."""
    _, behind = _torch.step_hooks(optimizer)
    for hook in behind:
        hook(optimizer, (optimizer,), {})
