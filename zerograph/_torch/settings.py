"""Settings of torch in this process that change what a trace yields."""

from __future__ import annotations

from typing import Any

import torch
import torch.library
from torch.fx.experimental import _config as _shape_options
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def trace_settings() -> dict[str, Any]:
    """Return the settings that tracing reads, by name."""
    cuda = torch.backends.cuda
    settings: dict[str, Any] = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "filled": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "matmul precision": torch.get_float32_matmul_precision(),
        "inference mode": torch.is_inference_mode_enabled(),
        "attention": (
            *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()),
            *(cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        ),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic),
        "onednn": torch.backends.mkldnn.enabled,
        "anomaly": torch.is_anomaly_enabled(),
        "fast transformer layers": torch.backends.mha.get_fastpath_enabled(),
        "symbolic shapes": _shape_options.get_config_copy(),  # type: ignore[attr-defined]
        "autocast": autocast_dtypes(),
    }
    # Whether there is a GPU counts too: code may ask.
    if torch.cuda.is_available():
        settings["device"] = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return settings


def autocast_dtypes() -> tuple[tuple[str, torch.dtype], ...]:
    """Return the dtype of each kind of device for which ``torch.autocast`` is on."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))


def function_modes() -> list[Any]:
    """Return the modes that see functions of torch now; that of the default device is among them."""
    return [*_get_current_function_mode_stack()]


def active_modes() -> list[str]:
    """Return the names of the modes that see operators and functions of torch now, besides the default device's."""
    # The stacks are private; there is no other way to ask for them.
    modes = [*function_modes(), *_get_current_dispatch_mode_stack()]
    return [type(mode).__qualname__ for mode in modes if type(mode).__name__ not in ("DeviceContext", "CountedDraws")]


def python_kernels() -> list[str]:
    """Return names of the kernels of ATen's operators that Python has registered."""
    # Private: the list by which torch.library refuses a second registration.
    return sorted(name for name in torch.library._impls if name.startswith("aten/"))
