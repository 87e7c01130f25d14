"""Zerograph: a training step as one placed graph, with the Zero Redundancy Optimizer.

``ZeroGraph`` is the class to subclass; ``sbp``, ``placement``, ``to_global`` and ``to_local`` are for global tensors;
``register_rule`` says how an operator of your own may be split.

Names are imported when they are first asked for: ``import zerograph`` and commands that need no graph load no torch.

The packages, lowest layer first (``tests/test_layers.py`` holds the order):

``base``         options, disk cache, progress, source locations
``ir``           the graph dialect: SBP, mesh, buckets, metadata, rewriting helpers, memory estimate
``passes``       the pipeline, its passes and rules
``runtime``      process groups, transports, backends, sharded state, executor
``capture``      ``build()`` to one graph
``eager``        global tensors outside of graphs
``optim``        optimizer updates as graphs
``compiler``     the driver
``state``        state dicts, checkpoints, sharded construction
``inspection``   views of a step: text, diffs, report
``planner``      predicted memory and time
``graph``        the front door, :class:`ZeroGraph`
``data``         batches until all ranks are done, outputs of all ranks
``loops``        training loops as users write them
``compat``       the front doors of OneFlow, ColossalAI and DeepSpeed
``integrations`` the front doors of transformers' Trainer, Accelerate and Lightning
``cli``          the commands
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# In a checkout without symbolic links, passes/ and runtime/ are found beside this folder.
if not os.path.isdir(os.path.join(os.path.dirname(__file__), "passes")):
    __path__.append(os.path.dirname(os.path.dirname(__file__)))

if TYPE_CHECKING:  # "as" offers a name to users
    from zerograph import sbp as sbp
    from zerograph.capture.local import local as local
    from zerograph.compat.deepspeed import from_deepspeed as from_deepspeed
    from zerograph.compat.settings import Settings as Settings
    from zerograph.compiler.placement import placement as placement, to_global as to_global, to_local as to_local
    from zerograph.config import Config as Config
    from zerograph.data import batches as batches, gather as gather
    from zerograph.eager.tensor import GlobalTensor as GlobalTensor, global_tensor as global_tensor
    from zerograph.errors import (
        ArtifactError as ArtifactError,
        CaptureError as CaptureError,
        CheckpointError as CheckpointError,
        CommunicationError as CommunicationError,
        ConfigError as ConfigError,
        InputError as InputError,
        MemoryBudgetError as MemoryBudgetError,
        NonFiniteError as NonFiniteError,
        OffloadError as OffloadError,
        OperatorError as OperatorError,
        PlacementError as PlacementError,
        RankMismatchError as RankMismatchError,
        ReplicaError as ReplicaError,
        SplitParameterError as SplitParameterError,
        VerificationError as VerificationError,
        ZeroGraphError as ZeroGraphError,
        ZeroGraphWarning as ZeroGraphWarning,
    )
    from zerograph.graph import ZeroGraph as ZeroGraph
    from zerograph.inspection import Collective as Collective
    from zerograph.ir.annotate import annotate as annotate, replicated as replicated
    from zerograph.ir.grad_scaler import GradScaler as GradScaler, StaticGradScaler as StaticGradScaler
    from zerograph.ir.marks import mark_dynamic as mark_dynamic
    from zerograph.ir.memory import Memory as Memory
    from zerograph.ir.offload import Offload as Offload, OffloadTo as OffloadTo
    from zerograph.ir.pass_edits import PassEdit as PassEdit
    from zerograph.ir.wire import WireFormat as WireFormat, wire as wire
    from zerograph.loops.elastic import elastic as elastic
    from zerograph.loops.prepare import full_parameters as full_parameters, prepare as prepare, step_of as step_of
    from zerograph.passes.rules.check_rule import check_rule as check_rule
    from zerograph.passes.rules.register_rule import register_rule as register_rule
    from zerograph.passes.rules.registry import Operands as Operands
    from zerograph.planner.front.plan import plan as plan
    from zerograph.planner.plan_data import Plan as Plan
    from zerograph.runtime.checkpoint.file_tensor import open_safetensors as open_safetensors
    from zerograph.runtime.job.process_group import rank as rank, world_size as world_size
    from zerograph.state.checkpoint.export import read_checkpoint as read_checkpoint
    from zerograph.state.from_pretrained import from_pretrained as from_pretrained
    from zerograph.state.sharded_init import sharded_init as sharded_init

# The module of each name, for when it is asked for; the same as above, where type checkers and editors read it.
_NAMES: dict[str, tuple[str, ...]] = {
    "ir.annotate": ("annotate", "replicated"),
    "ir.marks": ("mark_dynamic",),
    "state.checkpoint.export": ("read_checkpoint",),
    "compat.deepspeed": ("from_deepspeed",),
    "compat.settings": ("Settings",),
    "config": ("Config",),
    "data": ("batches", "gather"),
    "eager.tensor": ("GlobalTensor", "global_tensor"),
    "errors": (
        "ArtifactError",
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
        "ZeroGraphWarning",
    ),
    "ir.grad_scaler": ("GradScaler", "StaticGradScaler"),
    "graph": ("ZeroGraph",),
    "inspection": ("Collective",),
    "ir.offload": ("Offload", "OffloadTo"),
    "ir.pass_edits": ("PassEdit",),
    "ir.wire": ("WireFormat", "wire"),
    "capture.local": ("local",),
    "ir.memory": ("Memory",),
    "passes.rules.registry": ("Operands",),
    "passes.rules.check_rule": ("check_rule",),
    "passes.rules.register_rule": ("register_rule",),
    "compiler.placement": ("placement", "to_global", "to_local"),
    "planner.front.plan": ("plan",),
    "loops.elastic": ("elastic",),
    "loops.prepare": ("full_parameters", "prepare", "step_of"),
    "planner.plan_data": ("Plan",),
    "runtime.job.process_group": ("rank", "world_size"),
    "runtime.checkpoint.file_tensor": ("open_safetensors",),
    "state.from_pretrained": ("from_pretrained",),
    "state.sharded_init": ("sharded_init",),
}
_HOMES = {name: f"zerograph.{module}" for module, names in _NAMES.items() for name in names}

__all__ = sorted([*_HOMES, "__version__", "sbp"])


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
