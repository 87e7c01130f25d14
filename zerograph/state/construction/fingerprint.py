"""Describe a construction in lines of text, equal on all ranks that construct the same model."""

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
    """Return one line for each entry of the program, for its initial state, and for what is kept.

    The lines do not contain device indices: ranks of one machine have different GPUs.

    Args:
        generators: initial state of each generator.
        parameters: the parameters that are sharded.
        whole: numbers of the memories that every rank keeps whole.
    """
    lines = [f"generator {number}: {digest_of(state.untyped_storage())}" for number, state in enumerate(generators)]
    lines += [
        f"memory {memory.number}: from outside of the construction, {memory.nbytes} bytes {digest_of(memory.storage)}"
        for memory in program.memories
        if memory.outside
    ]
    for entry in program.entries:
        if isinstance(entry, Reseed):
            state = f"its state after entry {entry.after}"
            if entry.state is not None:
                state = f"a state of the user's, {digest_of(entry.state.untyped_storage())}"
            lines.append(f"generator {entry.generator} is set to {state}")
        else:
            arguments = pytree.tree_map(_shown, (list(entry.args), entry.kwargs))
            draw = "" if entry.generator is None else f", from generator {entry.generator}"
            lines.append(f"{entry.operator} {arguments}, default dtype {entry.default_dtype}{draw}")
    return [*lines, *(f"parameter {_shown(parameter)}" for parameter in parameters), f"kept whole: {list(whole)}"]


def digest_of(storage: torch.UntypedStorage) -> str:
    """Return a digest of the storage's bytes."""
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return hashlib.blake2b(data.cpu().numpy().data, digest_size=8).hexdigest()


def _shown(value: Any) -> Any:
    if isinstance(value, Ref):
        return f"{value.dtype} {value.shape} of memory {value.memory} at {value.offset} by {value.stride}"
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} of the meta device by {value.stride()}"
    if isinstance(value, torch.device):
        return value.type
    return "a generator" if isinstance(value, torch.Generator) else value
