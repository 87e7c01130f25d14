"""Convert bytes and seconds to text and back. Torch is not imported, so that commands without it start fast.

Here is also the size up to which values that code reads are looked at.
"""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1} | {f"{unit}{end}": 1000**power for power, unit in enumerate("kmgt", 1) for end in ("", "b")}
_UNITS |= {f"{unit}i{end}": 1024**power for power, unit in enumerate("kmgt", 1) for end in ("", "b")}
# Bytes of an array or a tensor up to which its numbers are copied or hashed. A hash takes a second for some 2**30.
LARGE = 1 << 26


def in_bytes(size: int | str) -> int | None:
    """Return the bytes of a text like ``"40GiB"`` or ``"80gb"``, or of a number; None if it is not a size."""
    if isinstance(size, int) and not isinstance(size, bool):
        return size if size > 0 else None
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", size.lower()) if isinstance(size, str) else None
    count = float(matched[1]) * _UNITS.get(matched[2], 0) if matched else 0.0
    return int(count) or None if count < 2.0**63 else None


def show_bytes(count: float) -> str:
    """Format as ``12.3 MiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"


def show_seconds(seconds: float) -> str:
    """Format as ``12.3 ms``, below one millisecond as ``45.6 us``, and below a tenth of one as ``< 0.1 us``."""
    if 0 < abs(seconds) < 1e-7:
        return "< 0.1 us"
    value, unit = (seconds * 1e3, "ms") if abs(seconds) >= 1e-3 else (seconds * 1e6, "us")
    return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{value:.3g} {unit}"
