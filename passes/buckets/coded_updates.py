"""Elementwise updates of buckets whose optimizer state is stored in coded form.

The graph of global tensors has one node for the update (``owner_updates.owner_update``), which ``localize`` replaces by
a module. The module decodes, updates and codes blocks of the shard. On the CPU one compiled kernel does so for the
whole shard, or operators for one part of it after the other, which stays in a core's cache. Both run the same products,
sums and roots, each rounded to the nearest, so both yield the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerograph.ir.buckets import Bucket
from zerograph.ir.coded_state import SIGNED, new_values
from zerograph.ir.metadata import meta
from zerograph.ir.operator_parts import PARTS, is_number
from zerograph.ir.step_graph import placeholders
from zerograph.ir.update_program import StateSpec, UpdateProgram
from zerograph.ops.blocks import decode_roots, encode_roots, exact_root, root_parts
from zerograph.passes.buckets.owner_updates import owner_update_module
from zerograph.passes.context import BucketUpdate

aten = torch.ops.aten

BLOCK = SIGNED.block
# Elements of a part on the CPU, a multiple of the block: about ten temporaries of it fit into a core's cache.
_PART = 2**16


def update_module(bucket: Bucket, update: BucketUpdate, rank: int, *, guarded: bool = False) -> nn.Module:
    """Return the module that updates a shard in place; see :func:`owner_update_module`."""
    if update.program.is_coded:
        return CodedUpdate(update, guarded=guarded)
    return owner_update_module(bucket, update, rank, guarded=guarded)


class CodedUpdate(nn.Module):
    """Update a shard and its state in place.

    The arguments are those of :func:`owner_update_module`: shard, gradient, hyperparameters, if ``guarded`` a number
    that is not 0 to skip the update, and the entries of the state.

    Attributes:
        key: equal for equal update programs.
        compiled: a compiled :meth:`blocks_kernel` for fp32 on the CPU, or None.
    """

    # Keeps dead-code elimination from removing the call: its result need not be read.
    _is_impure = True

    def __init__(self, update: BucketUpdate, *, guarded: bool) -> None:
        super().__init__()
        program = update.program
        self.first = update.first and program.first is not None
        source = program.first if self.first and program.first is not None else program.graph
        self.numbers, self.guarded = list(update.numbers), guarded
        self.specs: Mapping[str, StateSpec] = program.state
        self.counts = [name for name, spec in program.state.items() if spec.scalar]
        self.entries = [name for name, spec in program.state.items() if not spec.scalar]
        self.parts = _Parts(source, program)
        self.key = program.key
        self.compiled: Callable[..., Any] | None = None

    def forward(self, flat: Tensor, gradient: Tensor, *rest: Tensor) -> Tensor:
        """Update the shard; return it."""
        numbers = dict(zip(self.numbers, rest, strict=False))
        skipped = [rest[len(self.numbers)]] if self.guarded else []
        state = dict(zip(self.specs, rest[len(self.numbers) + self.guarded :], strict=True))
        counts = {name: state[name] for name in self.counts}
        new_counts, scalars = self.parts.compute_scalars(numbers | counts)
        blocks = [flat.view(-1, BLOCK), gradient.reshape(-1, BLOCK)]
        for name in self.entries:
            blocks += self._stored(name, state[name])
        compiled = self.compiled
        if compiled is not None and all(one.dtype is torch.float32 for one in blocks[:2]) and len(blocks[0]) > 1:
            compiled([len(blocks[0]), *skipped, *scalars, *blocks])
        else:
            kernel = self.blocks_kernel(exact_root, len(scalars))
            rows = _PART // BLOCK if flat.device.type == "cpu" else max(1, len(blocks[0]))
            for part in zip(*(one.split(rows) for one in blocks), strict=True):
                kernel(*skipped, *scalars, *part)
        for name, value in new_counts.items():
            _write(counts[name], value, skipped)
        return flat

    def blocks_kernel(self, root: Callable[[Tensor], Tensor], scalars: int) -> Callable[..., tuple[Tensor, ...]]:
        """Return a function that updates blocks in place, and returns the inverses of new scales.

        Its arguments are the number to skip the update if ``guarded``, the scalars that the update reads, then blocks
        [blocks, block]: of the parameter, its gradient, and for each entry its integers and scales [blocks, 1], or the
        entry as it is.

        Args:
            root: the square root, rounded to the nearest.
            scalars: the number of scalars.
        """

        def update_blocks(*arguments: Tensor) -> tuple[Tensor, ...]:
            skipped, rest = arguments[: self.guarded], iter(arguments[self.guarded :])
            values = [next(rest) for _ in range(scalars)]
            parameter, gradient = next(rest), next(rest)
            stored = [
                (next(rest), next(rest)) if self.specs[name].codec is not None else (next(rest),)
                for name in self.entries
            ]
            decoded = [self._decoded(name, parts) for name, parts in zip(self.entries, stored, strict=True)]
            new, *entries = self.parts.compute_blocks(root, [parameter, gradient, *decoded], values)
            _write(parameter, new, skipped)
            inverses: tuple[Tensor, ...] = ()
            for name, parts, entry in zip(self.entries, stored, entries, strict=True):
                codec = self.specs[name].codec
                # Entries that are coded by fourth roots are proved never to be negative.
                codes = (entry,) if codec is None else encode_roots(entry.float(), codec.code, root, checked=False)
                inverses += codes[2:]
                for part, code in zip(parts, codes, strict=False):
                    _write(part, code, skipped)
            return inverses

        return update_blocks

    def examples(self, rows: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Return numbers and blocks as :meth:`blocks_kernel` takes them, of a fp32 shard on the CPU, for tracing.

        Args:
            rows: number of blocks; may be symbolic.
        """
        inputs = {name: torch.zeros((), dtype=torch.float64, device="cpu") for name in self.numbers}
        inputs |= {name: torch.zeros((), dtype=self.specs[name].dtype, device="cpu") for name in self.counts}
        numbers = [torch.zeros((), device="cpu")] * self.guarded + self.parts.compute_scalars(inputs)[1]
        values = [torch.empty((rows, BLOCK), device="cpu") for _ in range(2)]
        for name in self.entries:
            codec, dtype = self.specs[name].codec, self.specs[name].dtype
            if codec is None:
                values.append(torch.empty((rows, BLOCK), dtype=dtype, device="cpu"))
                continue
            width = codec.block_bytes
            integers, scale = root_parts(torch.empty((1, width), dtype=torch.uint8, device="cpu"), codec.code)
            values.append(torch.empty_strided((rows, BLOCK), (width, 1), dtype=integers.dtype, device="cpu"))
            values.append(torch.empty_strided((rows, 1), (width // scale.itemsize, 1), dtype=scale.dtype, device="cpu"))
        return numbers, values

    @property
    def compiles_exactly(self) -> bool:
        """True if a compiled kernel yields the same bits: the entries are fp32, and all operators round to nearest."""
        dtypes = {self.specs[name].dtype for name in self.entries}
        return not self.first and dtypes == {torch.float32} and self.parts.rounds_to_nearest

    def temporary(self, shard: Tensor) -> int:
        """Return the bytes that an update of the shard allocates and frees: of a part, its state and their codes."""
        part = min(shard.numel(), _PART) if shard.device.type == "cpu" else shard.numel()
        return part * 4 * (len(self.specs) + 8)

    def _stored(self, name: str, value: Tensor) -> Sequence[Tensor]:
        codec = self.specs[name].codec
        if codec is None:
            return [value.view(-1, BLOCK)]
        return root_parts(value.view(-1, codec.block_bytes), codec.code)

    def _decoded(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        codec = self.specs[name].codec
        return parts[0] if codec is None else decode_roots(parts[0], parts[1], codec.code).to(self.specs[name].dtype)


def _write(target: Tensor, value: Tensor, skipped: Sequence[Tensor]) -> None:
    """Write a new value, unless the update is skipped."""
    for number in skipped:
        value = torch.where((number != 0).to(target.device), target, value)
    target.copy_(value)


class _Parts:
    """An update as two graphs: of 0-d tensors, and of blocks, which reads results of the first.

    Operators that round more than once, or otherwise than their parts, are written as their parts.
    """

    def __init__(self, source: fx.GraphModule, program: UpdateProgram) -> None:
        self._source, self._state = source, program.state
        new = new_values(source, program.state)
        self._counts = {name: new[name] for name, spec in program.state.items() if spec.scalar}
        self._new = [new[name] for name in ("param", *program.state) if name not in self._counts]
        nodes = [node for node in source.graph.nodes if node.op == "call_function"]
        self._scalar_nodes = [node for node in nodes if _is_scalar(node) and node.target is not aten.copy_.default]
        self._block_nodes = [node for node in nodes if not _is_scalar(node) and node.target is not aten.copy_.default]
        inputs = [node for node in placeholders(source.graph) if _is_scalar(node)]
        scalars = dict.fromkeys([*inputs, *self._scalar_nodes])
        self._read = [node for node in scalars if not set(self._block_nodes).isdisjoint(node.users)]
        numbers = [node for node in self._scalar_nodes if is_number(node)]
        # Numbers that stay 0-d tensors, which the parts of operators take as well.
        kept = {node for node in numbers if all(user.target in PARTS for user in node.users)}
        rounded = all(node.target in _ROUNDED or node.target in PARTS for node in self._block_nodes)
        self.rounds_to_nearest = rounded and kept.issuperset(numbers)
        self._input_names = [meta(node)["update_input"] for node in inputs]
        self._run_scalars = self._scalar_program(inputs, kept)

    def _scalar_program(self, inputs: Sequence[fx.Node], kept: Container[fx.Node]) -> Callable[..., list[Any]]:
        """Return a function of the 0-d inputs that returns new 0-d entries, then the scalars that blocks read."""
        graph = fx.Graph()
        copies: dict[fx.Node, Any] = {node: graph.placeholder(f"input{index}") for index, node in enumerate(inputs)}
        for node in self._scalar_nodes:
            if node in kept:
                copies[node] = copies[node.all_input_nodes[0]]
                continue
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
            copies[node] = graph.call_function(PARTS.get(node.target, node.target), args, kwargs)
        read = [graph.call_function(_narrow, (copies[node],)) for node in self._read]
        graph.output([*(copies[node] for node in self._counts.values()), *read])
        run: Callable[..., list[Any]] = fx.GraphModule({}, graph).forward
        return run

    def compute_scalars(self, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[Any]]:
        """Return new 0-d entries of the state, and the scalars that blocks are computed from.

        Args:
            inputs: hyperparameters and 0-d entries, by name.
        """
        results = self._run_scalars(*(inputs[name] for name in self._input_names))
        return dict(zip(self._counts, results, strict=False)), results[len(self._counts) :]

    def compute_blocks(
        self, root: Callable[[Tensor], Tensor], blocks: Sequence[Tensor], scalars: Sequence[Any]
    ) -> list[Tensor]:
        """Return the new parameter and entries.

        Args:
            root: the square root.
            blocks: the parameter, its gradient and entries.
            scalars: from :meth:`compute_scalars`.
        """
        names = ["param", "grad", *(name for name, spec in self._state.items() if not spec.scalar)]
        by_name = dict(zip(names, blocks, strict=True))
        values: dict[fx.Node, Any] = dict(zip(self._read, scalars, strict=True))
        for node in placeholders(self._source.graph):
            if not _is_scalar(node):
                values[node] = by_name[meta(node)["update_input"]]
        for node in self._block_nodes:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            if node.target is aten.sqrt.default:
                values[node] = root(*args)
            else:
                values[node] = PARTS.get(node.target, node.target)(*args, **kwargs)
        return [values[node] for node in self._new]


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.dim() == 0


def _narrow(scalar: Any) -> Any:
    """Return a scalar as operators on fp32 tensors take it."""
    return scalar.float() if isinstance(scalar, Tensor) and scalar.dtype is torch.float64 else scalar


# Operators that are exact or rounded to the nearest, compiled or not.
_ROUNDED = {
    aten.sqrt.default,
    aten.neg.default,
    aten.abs.default,
    aten.sign.default,
    aten.maximum.default,
    aten.minimum.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.where.self,
    aten.clone.default,
    aten.copy.default,
    aten.full_like.default,
}
