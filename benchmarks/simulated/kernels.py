"""Kernels of a step as the profiler saw them: how many, of which class, how long; and how often the host waited."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

# By a part of the name, the first that fits. Attention of CUTLASS has both names in it.
_CLASSES = {
    "Triton": r"^triton_",
    "attention": r"flash|fmha|sdpa|attention",
    "copies": r"memcpy|copy_kernel|copyfunctor|catarray|chunk_cat|split_with_sizes",
    "optimizer": r"multi_tensor_apply|adam",
    "products": r"gemm|nvjet|cutlass|cublas|xmma|splitk|gemv",
}
CLASSES = (*_CLASSES, "other")
# What the device does, in the words of the profiler; its other events on the device are annotations.
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def class_of(name: str) -> str:
    return next((what for what, pattern in _CLASSES.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def summary(trace: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return counts and milliseconds of a step out of a chrome trace of several.

    ``kernels`` counts copies and fills, too. ``idle`` is the time between the first and the last in which none ran.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ran = sorted((event for event in events if event.get("cat") in _ON_DEVICE), key=lambda event: event["ts"])
    counts, times = Counter[str](), Counter[str]()
    busy, end = 0.0, float("-inf")
    for event in ran:
        what = class_of(event["name"])
        counts[what] += 1
        times[what] += event["dur"]
        last = event["ts"] + event["dur"]
        busy += max(0.0, last - max(end, event["ts"]))
        end = max(end, last)
    waits = sum(event["name"] == "cudaStreamSynchronize" for event in events)
    names = Counter[str]()
    for event in ran:
        names[event["name"][:80]] += event["dur"]
    return {
        "kernels": len(ran) / steps,
        "kernels_of": {what: counts[what] / steps for what in CLASSES},
        "ms_of": {what: times[what] / 1000 / steps for what in CLASSES},
        "idle_ms": (end - ran[0]["ts"] - busy) / 1000 / steps if ran else 0.0,
        "waits": waits / steps,
        "longest_ms": {name: round(time / 1000 / steps, 3) for name, time in names.most_common(12)},
    }
