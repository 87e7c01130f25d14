"""Zerograph: a training step as one placed graph, with the Zero Redundancy Optimizer.

``ZeroGraph`` is the class to subclass; ``sbp``, ``placement``, ``to_global`` and ``to_local`` are for global tensors;
``register_rule`` says how an operator of your own may be split.
"""

from zerograph import sbp
from zerograph.annotate import annotate
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
from zerograph.local import local
from zerograph.memory import Memory
from zerograph.passes.rules.registry import Operands
from zerograph.passes.rules.users import register_rule
from zerograph.placement import placement, to_global, to_local
from zerograph.planner.front import plan
from zerograph.planner.plan import Plan
from zerograph.runtime.process_group import rank, world_size
from zerograph.sharded_init import sharded_init

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
    "annotate",
    "from_deepspeed",
    "local",
    "placement",
    "plan",
    "rank",
    "read_checkpoint",
    "register_rule",
    "sbp",
    "sharded_init",
    "to_global",
    "to_local",
    "world_size",
]
