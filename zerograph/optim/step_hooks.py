"""Guard an optimizer's ``step()``: refuse direct calls and hooks before it, and run the hooks after it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from zerograph import _torch
from zerograph.errors import CaptureError, ConfigError, SplitParameterError
from zerograph.runtime.state import holds_state_of

# Their wrappers of step() count calls, or belong to frameworks whose integrations replace them.
_KNOWN = ("torch", "zerograph", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "transformers")

_UNSUPPORTED = {
    "LBFGS": "it evaluates the loss several times per step, each time depending on values\nUse another optimizer, or "
    "in a loop leave it out of zg.prepare(): every rank then runs it, on whole parameters.",
    "SparseAdam": "it needs sparse gradients, which have no placement\nUse another optimizer.",
}


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that is no graph, or whose ``step()`` was replaced: a graph runs that of the class.

    Raises:
        CaptureError: it cannot be traced to a graph: LBFGS, SparseAdam.
        ConfigError: its ``step()`` was replaced, by other code than torch's.
    """
    kind = type(optimizer)
    if (reason := _UNSUPPORTED.get(kind.__name__)) is not None:
        raise CaptureError(f"{kind.__name__} cannot be part of a step graph: {reason}")
    strange = [one for one in _torch.functions_of_instance_step(optimizer) if not _is_known(one)]
    if (wrapper := _torch.wrapped_with_hooks(kind)) is not None:
        strange.append(wrapper)
    if strange:
        code = getattr(strange[0], "__code__", None)
        where = "" if code is None else f", in {code.co_filename}:{code.co_firstlineno}"
        raise ConfigError(
            f"{kind.__name__}.step() was replaced or wrapped{where}, and the graph would run the update without that\n"
            f"Write a subclass of {kind.__name__} with its own step(), or edit gradients in build() or in the loop, "
            "between backward() and step()."
        )


def _is_known(function: Callable[..., object]) -> bool:
    module = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    return str(module).partition(".")[0] in _KNOWN


@dataclass(frozen=True)
class Guard:
    """Zerograph's own hook before ``step()``, which refuses direct calls."""

    refuse: Callable[[], object]

    def __call__(self, *_: object) -> None:
        """Refuse the call."""
        self.refuse()


class StateOwner(Protocol):
    """A graph that stores the state of optimizers."""

    _optimizers: list[torch.optim.Optimizer]

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state. A collective."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a whole state. A collective."""


def guard(optimizer: torch.optim.Optimizer, graph: StateOwner, building: Callable[[], bool]) -> None:
    """Make the optimizer refuse ``step()``, and return and load whole states, while a graph stores its state.

    Args:
        optimizer: the optimizer.
        graph: the graph.
        building: returns whether a ``build()`` is being traced.
    """
    plain: Any = type(optimizer)
    graphs = vars(optimizer).setdefault("_zerograph_graphs", [])
    is_guarded = bool(graphs)
    graphs[:] = [*(ref for ref in graphs if ref() is not None), weakref.ref(graph)]
    if is_guarded:
        return

    def storing(method: str) -> StateOwner | None:
        if building():
            raise CaptureError(
                f"build() calls {plain.__name__}.{method}: leave it out, the graph makes the update itself"
            )
        alive = (one for ref in reversed(graphs) if (one := ref()) is not None)
        return next(alive, None) if holds_state_of(optimizer) else None

    def refuse() -> None:
        if storing("step()") is not None:
            raise SplitParameterError(
                f"{plain.__name__}.step(): the optimizer's state is stored in the graph now\n"
                "Call the graph to update. The state is in state_dict(), of the graph and of the optimizer."
            )

    optimizer.register_step_pre_hook(Guard(refuse))
    for method in state_methods(optimizer, storing):
        # A loop has its own.
        vars(optimizer).setdefault(method.__name__, method)


def state_methods(
    optimizer: torch.optim.Optimizer, storing: Callable[[str], StateOwner | None]
) -> tuple[Callable[..., Any], ...]:
    """Return ``state_dict`` and ``load_state_dict`` of an optimizer whose state a graph may store.

    Args:
        optimizer: the optimizer.
        storing: returns for a call the graph that stores the state; None if the optimizer itself has it.
    """
    plain: Any = type(optimizer)

    def state_dict() -> dict[str, Any]:
        if (graph := storing("state_dict()")) is None:
            return dict(plain.state_dict(optimizer))
        state: dict[str, Any] = graph.state_dict()["optimizers"][graph._optimizers.index(optimizer)]
        return state

    # The parameter has torch's name.
    def load_state_dict(state_dict: dict[str, Any]) -> None:
        if (graph := storing("load_state_dict()")) is None:
            plain.load_state_dict(optimizer, state_dict)
        else:
            states = [state_dict] if len(graph._optimizers) == 1 else graph.state_dict()["optimizers"]
            states[graph._optimizers.index(optimizer)] = state_dict
            graph.load_state_dict({"optimizers": states})

    return state_dict, load_state_dict


def refuse_hooks_before(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise if a user has registered a hook before ``step()``: gradients exist only inside the graph.

    Raises:
        ConfigError: there is such a hook, of one optimizer or of all.
    """
    for optimizer in optimizers:
        for hook in _hooks_before(optimizer):
            raise ConfigError(
                f"{getattr(hook, '__qualname__', hook)} is to run before {type(optimizer).__name__}.step(), which "
                "graphs do not call\nMove what it does with gradients into build(), after backward() "
                "(config.clip_grad_norm clips them), and remove() its handle. Hooks after step() do run."
            )


def run_hooks_before(optimizer: torch.optim.Optimizer) -> None:
    """Run the hooks that a user has registered to run before ``step()``, as a call without arguments does."""
    for hook in _hooks_before(optimizer):
        hook(optimizer, (optimizer,), {})


def _hooks_before(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    before, _ = _torch.step_hooks(optimizer)
    return [hook for hook in before if not isinstance(hook, Guard)]


def run_hooks_after(optimizer: torch.optim.Optimizer) -> None:
    """Run the hooks that were registered to run after ``step()``, as a call without arguments does."""
    _, hooks = _torch.step_hooks(optimizer)
    for hook in hooks:
        hook(optimizer, (optimizer,), {})
