"""Elementwise updates of buckets whose optimizer state is stored in coded form.

The graph of global tensors has one node for the update (``owner_updates.owner_update``), which ``localize`` replaces by
a module. The module decodes, updates and codes one part of the shard after the other. On the CPU a part and its decoded
state stay in a core's cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerograph.ir import blocks
from zerograph.ir.buckets import Bucket
from zerograph.ir.coded_state import SIGNED
from zerograph.ir.metadata import meta
from zerograph.ir.step_graph import placeholders
from zerograph.ir.update_program import StateSpec
from zerograph.passes.buckets.owner_updates import in_place_module, owner_update_module
from zerograph.passes.context import BucketUpdate

# Elements of a part on the CPU, a multiple of the block.
_PART = 2**17


def update_module(bucket: Bucket, update: BucketUpdate, rank: int, *, guarded: bool = False) -> nn.Module:
    """Return the module that updates a shard in place; see :func:`owner_update_module`."""
    if update.program.is_coded:
        return CodedUpdate(update, guarded=guarded)
    return owner_update_module(bucket, update, rank, guarded=guarded)


class CodedUpdate(nn.Module):
    """Update a shard and its state in place, part by part.

    The arguments are those of :func:`owner_update_module`: shard, gradient, hyperparameters, if ``guarded`` a number
    that is not 0 to skip the update, and the entries of the state.
    """

    # Keeps dead-code elimination from removing the call: its result need not be read.
    _is_impure = True

    def __init__(self, update: BucketUpdate, *, guarded: bool) -> None:
        super().__init__()
        program = update.program
        self.numbers, self.guarded = list(update.numbers), guarded
        self.specs: Mapping[str, StateSpec] = program.state
        fused = program.fused
        self.part: fx.GraphModule = in_place_module(program, first=update.first) if fused is None else fused
        names = [*("param", "grad"), *program.numbers, *program.state]
        # The order of the arguments of ``part``.
        self.order = names if fused is None else [meta(node)["update_input"] for node in placeholders(fused.graph)]

    def forward(self, flat: Tensor, gradient: Tensor, *rest: Tensor) -> Tensor:
        """Update the shard; return it."""
        numbers = dict(zip(self.numbers, rest, strict=False))
        skipped = rest[len(self.numbers)] != 0 if self.guarded else None
        state = dict(zip(self.specs, rest[len(self.numbers) + self.guarded :], strict=True))
        shard, gradient = flat.view(-1), gradient.reshape(-1)
        parts = max(1, -(-shard.numel() // _PART)) if flat.device.type == "cpu" else 1
        split = [_PART, SIGNED.coded_bytes(_PART)] if parts > 1 else [shard.numel(), -1]
        counts = {name: value for name, value in state.items() if self.specs[name].scalar}
        codes = {
            name: self._split(value, split[0 if self.specs[name].codec is None else 1])
            for name, value in state.items()
            if name not in counts
        }
        new_counts: dict[str, Tensor] = {}
        for index, (own, own_gradient) in enumerate(zip(shard.split(split[0]), gradient.split(split[0]), strict=True)):
            # Every part begins with the counts of the last step.
            new_counts = {name: value.clone() for name, value in counts.items()}
            decoded = {name: self._decode(name, parts[index]) for name, parts in codes.items()}
            new = own if skipped is None else own.clone()
            values = {"param": new, "grad": own_gradient, **numbers, **new_counts, **decoded}
            self.part(*(values[name] for name in self.order))
            _write(own, new, skipped)
            for name, value in decoded.items():
                _write(codes[name][index], self._encode(name, value), skipped)
        for name, value in new_counts.items():
            _write(counts[name], value, skipped)
        return flat

    def temporary(self, shard: Tensor) -> int:
        """Return the bytes that an update of the shard allocates and frees: of a part, its state and their codes."""
        part = min(shard.numel(), _PART) if shard.device.type == "cpu" else shard.numel()
        return part * 4 * (len(self.specs) + 4)

    def _split(self, value: Tensor, size: int) -> list[Tensor]:
        flat = value.view(-1)
        return list(flat.split(size)) if size > 0 else [flat]

    def _decode(self, name: str, coded: Tensor) -> Tensor:
        codec, dtype = self.specs[name].codec, self.specs[name].dtype
        return coded.clone() if codec is None else blocks.decode(coded, *codec.arguments, dtype)

    def _encode(self, name: str, value: Tensor) -> Tensor:
        codec = self.specs[name].codec
        return value if codec is None else blocks.encode(value, *codec.arguments)


def _write(target: Tensor, value: Tensor, skipped: Tensor | None) -> None:
    """Write a new value, unless the update is skipped."""
    if value is not target:
        kept: Any = value if skipped is None else torch.where(skipped.to(target.device), target, value)
        target.copy_(kept)
