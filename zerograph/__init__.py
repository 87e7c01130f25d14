"""Zerograph: a training step as one placed graph, with the Zero Redundancy Optimizer.

``ZeroGraph`` is the class to subclass; ``sbp``, ``placement``, ``to_global`` and ``to_local`` are for global tensors;
``register_rule`` says how an operator of your own may be split.

Names are imported when they are first asked for: ``import zerograph`` and commands that need no graph load no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from zerograph import sbp
    from zerograph.annotate import annotate, replicated
    from zerograph.checkpoint.export import read_checkpoint
    from zerograph.compat.deepspeed import from_deepspeed
    from zerograph.compat.settings import Settings
    from zerograph.config import Config
    from zerograph.errors import (
        CaptureError,
        CheckpointError,
        CommunicationError,
        ConfigError,
        InputError,
        MemoryBudgetError,
        NonFiniteError,
        OffloadError,
        OperatorError,
        PlacementError,
        RankMismatchError,
        ReplicaError,
        SplitParameterError,
        VerificationError,
        ZeroGraphError,
    )
    from zerograph.grad_scaler import GradScaler, StaticGradScaler
    from zerograph.graph import ZeroGraph
    from zerograph.inspection import Collective
    from zerograph.ir.pass_edits import PassEdit
    from zerograph.local import local
    from zerograph.memory import Memory
    from zerograph.passes.rules.registry import Operands
    from zerograph.passes.rules.users import register_rule
    from zerograph.placement import placement, to_global, to_local
    from zerograph.planner.front import plan
    from zerograph.planner.plan import Plan
    from zerograph.runtime.process_group import rank, world_size
    from zerograph.sharded_init import sharded_init

# The module of each name, for when it is asked for; the same as above, where type checkers and editors read it.
_NAMES: dict[str, tuple[str, ...]] = {
    "annotate": ("annotate", "replicated"),
    "checkpoint.export": ("read_checkpoint",),
    "compat.deepspeed": ("from_deepspeed",),
    "compat.settings": ("Settings",),
    "config": ("Config",),
    "errors": (
        "CaptureError",
        "CheckpointError",
        "CommunicationError",
        "ConfigError",
        "InputError",
        "MemoryBudgetError",
        "NonFiniteError",
        "OffloadError",
        "OperatorError",
        "PlacementError",
        "RankMismatchError",
        "ReplicaError",
        "SplitParameterError",
        "VerificationError",
        "ZeroGraphError",
    ),
    "grad_scaler": (
        "GradScaler",
        "StaticGradScaler",
    ),
    "graph": ("ZeroGraph",),
    "inspection": ("Collective",),
    "ir.pass_edits": ("PassEdit",),
    "local": ("local",),
    "memory": ("Memory",),
    "passes.rules.registry": ("Operands",),
    "passes.rules.users": ("register_rule",),
    "placement": (
        "placement",
        "to_global",
        "to_local",
    ),
    "planner.front": ("plan",),
    "planner.plan": ("Plan",),
    "runtime.process_group": (
        "rank",
        "world_size",
    ),
    "sharded_init": ("sharded_init",),
}
_HOMES = {name: f"zerograph.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "CaptureError",
    "CheckpointError",
    "Collective",
    "CommunicationError",
    "Config",
    "ConfigError",
    "GradScaler",
    "InputError",
    "Memory",
    "MemoryBudgetError",
    "NonFiniteError",
    "OffloadError",
    "Operands",
    "OperatorError",
    "PassEdit",
    "PlacementError",
    "Plan",
    "RankMismatchError",
    "ReplicaError",
    "Settings",
    "SplitParameterError",
    "StaticGradScaler",
    "VerificationError",
    "ZeroGraph",
    "ZeroGraphError",
    "__version__",
    "annotate",
    "from_deepspeed",
    "local",
    "placement",
    "plan",
    "rank",
    "read_checkpoint",
    "register_rule",
    "replicated",
    "sbp",
    "sharded_init",
    "to_global",
    "to_local",
    "world_size",
]


class _Package(ModuleType):
    """This package: some public functions have the name of the module that they are in.

    The import system binds a submodule to its package whenever it is imported first. What is bound under such a name
    is the function.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _HOMES.get(name) == value.__name__:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

if not TYPE_CHECKING:  # type checkers tell of names that do not exist, unless they see this

    def __getattr__(name: str) -> Any:
        """Import a public name, or a submodule, and bind it here."""
        if name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
        elif not name.startswith("__") and importlib.util.find_spec(f"zerograph.{name}") is not None:
            value = importlib.import_module(f"zerograph.{name}")
        else:
            raise AttributeError(f"module 'zerograph' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
