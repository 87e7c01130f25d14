"""``graph.config``: OneFlow's ``GraphConfig`` over zerograph's options, which can be set as well."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from zerograph.base.options import is_whole_number
from zerograph.base.source import warn_user
from zerograph.compat.notices import call_without_effect, without_effect
from zerograph.compat.oneflow.boxing import nccl
from zerograph.compat.oneflow.placements import placement
from zerograph.config import Config, MeshOptions, ZeroOptions
from zerograph.errors import ConfigError, UnknownOptionError, did_you_mean
from zerograph.ir.zero import DEFAULT_STAGE, options_of_mode
from zerograph.runtime.job.process_group import world_size

# OneFlow's own: elements of a shard.
_MIN_SHARD = 1024


# Calls that tune what is as it should be here, by the reason why they have no effect.
_WITHOUT_EFFECT = {
    "give the optimizer fused=True": ("allow_fuse_model_update_ops",),
    "the backend decides which operators are fused, see config.backend": (
        *("allow_fuse_add_to_output", "allow_fuse_cast_scale", "enable_fused_model_update_cast"),
    ),
    "a bucket is always updated at once": ("enable_multi_tensor_update",),
    "set torch.backends.cudnn.benchmark": ("enable_cudnn_conv_heuristic_search_algo",),
    "outputs are computed when the call returns": ("set_outputs_buffer_size",),
    "choose what compiles the step with config.backend": ("enable_xla_jit", "enable_tensorrt", "enable_openvino"),
    "operators are always ordered for least memory; see config.memory.memory_budget": (
        *("enable_straighten_algorithm", "disable_straighten_algorithm", "enable_compress_memory"),
    ),
    "torch allocates memory": ("enable_choose_best_memory_allocation",),
    "see config.memory.memory_budget and config.memory.activation_checkpointing": ("enable_auto_memory",),
    "placements are always inferred, and SBPs that you set are kept": (
        *("enable_auto_parallel", "enable_auto_parallel_ignore_user_sbp_config", "enable_auto_parallel_trunk_algo"),
        *("enable_auto_parallel_sbp_collector", "set_auto_parallel_computation_cost_ratio"),
        "set_auto_parallel_wait_time",
    ),
}


class _Zero(ZeroOptions):
    """ZeRO's options, of which the switches of ``flow.boxing.nccl`` may choose the stage."""

    # Whether they do, and their stage when the graph was constructed.
    by_switches = False
    switched: int | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "stage":
            object.__setattr__(self, "by_switches", False)

    def follow_switches(self) -> None:
        """Take the stage of the switches."""
        self.stage = 1 if self.switched is None else self.switched  # type: ignore[assignment]
        object.__setattr__(self, "by_switches", True)


class _Mesh(MeshOptions):
    """The options of the mesh; ``placement`` may be one of ``flow.placement``."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.mesh if name == "placement" and isinstance(value, placement) else value)


@dataclass(init=False, repr=False)
class GraphConfig(Config):
    """The options of a graph, under OneFlow's names and under those of :class:`zerograph.Config`.

    Attributes:
        training: whether the graph has an optimizer.
    """

    zero: _Zero = field(default_factory=_Zero)
    mesh: _Mesh = field(default_factory=_Mesh)
    training: ClassVar[bool] = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except UnknownOptionError:
            hint = did_you_mean(name, (attribute for attribute in dir(self) if attribute[0] != "_"))
            raise AttributeError(
                f"the configuration has no {name!r}{hint}\ndocs/oneflow.md and zerograph.Config list all options."
            ) from None

    def take_switches(self) -> None:
        """Take the stage from the switches of ``flow.boxing.nccl``, at the end of the graph's construction."""
        object.__setattr__(self.zero, "switched", nccl.stage())
        if self.zero.by_switches:
            self.zero.follow_switches()
            if nccl.one_without_the_other():
                warn_user(
                    "flow.boxing.nccl.disable_group_boxing_by_dst_parallel(True) means ZeRO stage 3 only together with "
                    "enable_use_compute_stream(True): this graph gets stage 1"
                )

    def set_zero_redundancy_optimizer_mode(self, mode: str = "distributed_split") -> None:
        """Enable ZeRO with the mode ``"distributed_split"`` or ``"non_distributed"``; ``"off"`` disables it.

        The first gives every rank a slice of each variable, the second assigns whole variables to ranks, balanced by
        size. The stage is 1, or that of ``flow.boxing.nccl``'s switches at the end of the graph's construction.

        Raises:
            ConfigError: the mode does not exist.
        """
        self.set(**options_of_mode(mode, DEFAULT_STAGE))
        if not self.zero.shard_min_size:
            self.set_zero_redundancy_optimizer_min_size_after_split(_MIN_SHARD)
        if self.zero.stage != 0:
            self.zero.follow_switches()

    def set_zero_redundancy_optimizer_min_size_after_split(self, value: int) -> None:
        """Keep variables whole if a rank's slice would have fewer than ``value`` elements. Default 1024.

        Raises:
            ConfigError: the value is not a whole number of at least 1.
        """
        self.zero.shard_min_size = (
            _whole_number(value, "set_zero_redundancy_optimizer_min_size_after_split") * world_size()
        )

    def enable_zero(
        self,
        mode: bool | str = True,
        *,
        stage: int | Literal["auto"] = DEFAULT_STAGE,
        shard_min_size: int = _MIN_SHARD,
        shard_restore_level: int = 1,
        min_shard_size: int | None = None,
    ) -> None:
        """Enable ZeRO with a stage, which overrides the switches of ``flow.boxing.nccl``.

        Args:
            mode: True, False, or a mode of :meth:`set_zero_redundancy_optimizer_mode`.
            stage: 1, 2 or 3, or ``"auto"``. Default 2, as OneFlow's.
            shard_min_size: the smallest number of elements of *one rank's slice*. This sets
                ``config.zero.shard_min_size``, which counts the elements of the whole variable.
            shard_restore_level: 0, 1 or 2. No effect: the stage decides when parameters are resharded.
            min_shard_size: an older name of ``shard_min_size``.

        Raises:
            ConfigError: the mode, stage or size does not exist; nothing has changed then.
        """
        if shard_restore_level not in (0, 1, 2):
            raise ConfigError(f"enable_zero(shard_restore_level={shard_restore_level!r}): give 0, 1 or 2")
        if shard_restore_level != 1:
            call_without_effect("enable_zero(shard_restore_level=)", "the stage decides when parameters are resharded")
        least = _whole_number(shard_min_size if min_shard_size is None else min_shard_size, "shard_min_size")
        self.set(**options_of_mode(mode, stage), shard_min_size=least * world_size())  # type: ignore[arg-type]

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Set ``gradient_accumulation_steps``."""
        self.gradient_accumulation_steps = steps

    def enable_amp(self, mode: bool = True, *, dtype: torch.dtype = torch.float16) -> None:
        """Enable mixed precision in fp16 (OneFlow's default) or bf16, with fp32 masters.

        Unlike zerograph's own method this does not enable loss scaling: call ``graph.set_grad_scaler``.

        Raises:
            ConfigError: ``mode`` is not a bool, or the dtype does not exist.
        """
        if not isinstance(mode, bool):
            raise ConfigError(f"enable_amp({mode!r}): give True or False, and the dtype as dtype=")
        self.precision.amp_dtype = dtype if mode else None


for _reason, _names in _WITHOUT_EFFECT.items():
    for _name in _names:
        setattr(GraphConfig, _name, without_effect("config", _name, _reason))


def _whole_number(value: Any, name: str) -> int:
    if not is_whole_number(value, 1):
        raise ConfigError(f"{name} = {value!r}: give a whole number of elements, 1 or more")
    return int(value)
