# The public names: each is listed here and nowhere else. Type checkers read this file, and so does __init__.py, which
# imports a name when it is first asked for. "as" offers a name to users.

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

__all__: list[str]
__version__: str
