"""``flow.boxing.nccl``: the two switches that choose the stage of OneFlow's ZeRO, and functions that tune its runtime.

The switches are global to the process. A graph reads them at the end of its construction, so they may be called in its
``__init__``; later calls do not affect it. ``False`` turns a switch off. They choose the stage of
``config.set_zero_redundancy_optimizer_mode``; ``config.enable_zero(stage=)`` ignores them.
"""

from __future__ import annotations

from zerograph.compat.notices import without_effect
from zerograph.errors import ConfigError

_switches = {"use_compute_stream": False, "disable_group_boxing": False}


def enable_use_compute_stream(val: bool = False) -> None:
    """Choose stage 2 for graphs with a ZeRO mode.

    Raises:
        ConfigError: the argument is not a bool.
    """
    _switch("use_compute_stream", "enable_use_compute_stream", val)


def disable_group_boxing_by_dst_parallel(val: bool = False) -> None:
    """Choose stage 3 for graphs with a ZeRO mode, together with ``enable_use_compute_stream(True)``.

    Raises:
        ConfigError: the argument is not a bool.
    """
    _switch("disable_group_boxing", "disable_group_boxing_by_dst_parallel", val)


def stage() -> int:
    """Return the stage that the switches choose now: 1, 2 or 3."""
    return 1 + _switches["use_compute_stream"] + all(_switches.values())


def one_without_the_other() -> bool:
    """Return whether the switch for stage 3 is on, but that for stage 2 is off."""
    return _switches["disable_group_boxing"] and not _switches["use_compute_stream"]


def _switch(name: str, call: str, val: object) -> None:
    if not isinstance(val, bool):
        raise ConfigError(f"flow.boxing.nccl.{call}({val!r}): give True or False")
    _switches[name] = val


_TUNING = (
    *("set_fusion_threshold_mbytes", "set_fusion_max_ops_num", "allow_fuse_all_reduce", "allow_fuse_reduce_scatter"),
    *("allow_fuse_all_gather", "allow_fuse_reduce", "allow_fuse_broadcast", "allow_fuse_mixed_ops"),
    *("enable_use_buffer_to_fuse_all_reduce", "set_stream_num", "enable_all_to_all"),
)
_REASON = "it tunes OneFlow's runtime; see config.zero.bucket_size"
globals().update({name: without_effect("flow.boxing.nccl", name, _REASON) for name in _TUNING})
