"""What a construction does, in lines that are the same on all ranks that make the same model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerograph._torch import pytree
from zerograph.state.construction.program import Program, Ref, Reseed


def fingerprint(
    program: Program, generators: Sequence[Tensor], parameters: Sequence[Ref], whole: Sequence[int]
) -> list[str]:
    """Every entry of the program, what it begins with, and what is kept. Which GPU of its machine a rank has is not.

    Args:
        generators: the state that each began in.
    """
    lines = [f"generator {number}: {digest_of(one.untyped_storage())}" for number, one in enumerate(generators)]
    lines += [
        f"memory {one.number}: from outside of the construction, {one.nbytes} bytes {digest_of(one.storage)}"
        for one in program.memories
        if one.outside
    ]
    for entry in program.entries:
        if isinstance(entry, Reseed):
            state = f"its state after entry {entry.after}"
            if entry.state is not None:
                state = f"a state of the user's, {digest_of(entry.state.untyped_storage())}"
            lines.append(f"generator {entry.generator} is set to {state}")
        else:
            given = pytree.tree_map(_shown, (list(entry.args), entry.kwargs))
            drawn = "" if entry.generator is None else f", from generator {entry.generator}"
            lines.append(f"{entry.operator} {given}, by default {entry.default_dtype}{drawn}")
    return [*lines, *(f"parameter {_shown(one)}" for one in parameters), f"kept whole: {list(whole)}"]


def digest_of(storage: torch.UntypedStorage) -> str:
    """Equal for equal bytes."""
    found = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return hashlib.blake2b(found.cpu().numpy().data, digest_size=8).hexdigest()


def _shown(value: Any) -> Any:
    if isinstance(value, Ref):
        return f"{value.dtype} {value.shape} of memory {value.memory} at {value.offset} by {value.stride}"
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} of the meta device by {value.stride()}"
    if isinstance(value, torch.device):
        return value.type
    return "a generator" if isinstance(value, torch.Generator) else value
