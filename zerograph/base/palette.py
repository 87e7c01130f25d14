"""Colours of a step, for its report and for pictures of plans: one list, on a white and on a black ground.

The palette of Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping

# (on white, on black)
Shades = tuple[str, str]

ACTIVITIES: Mapping[str, Shades] = {
    "forward": ("#66b89c", "#4fa78a"),
    "backward": ("#2f8c6d", "#2a8263"),
    "update": ("#b9709a", "#a9658d"),
    "recompute": ("#a3b8c9", "#5f7d96"),
    "carrying collectives": ("#e8d9a8", "#6d5f2c"),
    "waiting": ("#c9ced6", "#3b4452"),
    "all-gather": ("#56b4e9", "#56b4e9"),
    "reduce-scatter": ("#e69f00", "#e69f00"),
    "all-reduce": ("#d9823b", "#d9823b"),
    "all-to-all": ("#b6a12c", "#b6a12c"),
    "shift": ("#0e7c86", "#2aa0ab"),
    "slice": ("#b9c1cc", "#596474"),
    "transfer": ("#8f9bb0", "#7a869a"),
}
MEMORY: Mapping[str, Shades] = {
    "parameters": ("#0072b2", "#2d84bf"),
    "optimizer state": ("#4a5a78", "#6a7c9e"),
    "buffers": ("#8f9bb0", "#8592a8"),
    "inputs": ("#b9c1cc", "#596474"),
    "gathered": ("#56b4e9", "#6cc0ee"),
    "gradients": ("#e69f00", "#e8a51a"),
    "activations": ("#009e73", "#1aa67e"),
    "update": ("#cc79a7", "#d089b2"),
    "temporary": ("#d55e00", "#e0702a"),
}


def style_sheet() -> str:
    """Return the colours as CSS variables, such as ``--all-gather`` and ``--memory-gradients``, for both grounds."""
    light, dark = (
        " ".join(
            f"--{prefix}{name.replace(' ', '-')}: {shades[ground]};"
            for prefix, colours in (("", ACTIVITIES), ("memory-", MEMORY))
            for name, shades in colours.items()
        )
        for ground in range(2)
    )
    return (
        f":root {{ {light} }}\n"
        f':root[data-theme="dark"] {{ {dark} }}\n'
        f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {dark} }} }}\n'
    )
