"""Checks of inputs that hold positions: refuse positions in one rank's part where the step needs them in the batch.

Offsets of bags, edges of graphs and labels of pairs often number the rows of the part that a data loader returned. In
the step's graph the operator reads the rows of the whole batch. Such inputs are recognised by the operator that reads
them, by the dimension that they index, and by the values that the ranks compared.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerograph._torch import OpOverload, schema_arguments
from zerograph.capture.captured import Captured
from zerograph.compiler.batch import Batch
from zerograph.compiler.plain_inputs import Comparison, is_part
from zerograph.errors import InputError
from zerograph.ir.alias import is_view_or_copy
from zerograph.ir.metadata import meta, origin
from zerograph.ir.region import local
from zerograph.ir.rewrite import operand
from zerograph.ir.sizes import sizes_of
from zerograph.ir.step_graph import placeholders
from zerograph.passes import rules
from zerograph.passes.normalize.offsets import BAGS, counts_from_whole
from zerograph.passes.rules.batch_dims import batch_dims

aten = torch.ops.aten


@dataclass(frozen=True)
class _Read:
    """An operator that reads an input as positions along a dimension of another tensor.

    Attributes:
        node: the operator.
        source: the tensor that is indexed.
        dim: the dimension that is indexed.
        index: the positions.
    """

    node: fx.Node
    source: fx.Node
    dim: int
    index: fx.Node


def check_indices(
    captured: Captured,
    batch: Batch,
    ranks: int,
    micro_batches: int,
    comparison: Comparison,
    warn: Callable[[str], None],
) -> None:
    """Refuse inputs whose positions cannot be those in the whole batch; warn where they may be those in one part.

    Args:
        captured: the captured graph.
        batch: the inputs, on this rank.
        ranks: number of parts into which plain inputs are split.
        micro_batches: number of micro-batches.
        comparison: the plain inputs of all ranks.
        warn: shows a message to the user.

    Raises:
        InputError: an input has such positions; names it and the operator that reads it. Raised on every rank.
    """
    graph = captured.graph.graph
    split = {
        node: int(meta(node)["role"].name)
        for node in placeholders(graph, "input")
        if is_part(batch, int(meta(node)["role"].name))
    }
    if ranks * micro_batches == 1 or not split:
        return
    for node in graph.nodes:
        if isinstance(node.target, OpOverload):
            _check_boundaries(node, split, batch, micro_batches, comparison)
    if ranks == 1:
        return
    for node, number in split.items():
        _check_rows(node, len(batch.tensors[number]), batch.names[number], ranks)
    integers = [number for number in split.values() if not batch.tensors[number].is_floating_point()]
    reads = [read for read in _reads(graph) if _number_of_input(read.index, split) in integers]
    problems = [(read, *problem) for read in reads if (problem := _problem(read, split, batch, ranks, comparison))]
    # Following dimensions takes as long as a typical pass, so only suspicious values lead to it.
    dims = batch_dims(graph, list(split), ranks) if problems else set()
    of_batch = [(message, certain) for read, message, certain in problems if (read.source, 0, read.dim) in dims]
    for message, certain in sorted(of_batch, key=lambda problem: not problem[1]):
        if certain:
            raise InputError(message)
        warn(message)


def read_outside_regions(captured: Captured) -> set[int]:
    """Return the numbers of the inputs that the step computes with, or returns, outside of local regions."""
    return {
        int(meta(node)["role"].name)
        for node in placeholders(captured.graph.graph, "input")
        if any(user.target is not local for user in node.users)
    }


def _number_of_input(node: fx.Node, split: Mapping[fx.Node, int]) -> int | None:
    read_input = _input_of(node)
    return None if read_input is None else split.get(read_input[0])


def _source_line(node: fx.Node) -> str:
    return f"{origin(node).line}\n" if origin(node).source else ""


_LOCAL = "Compute with positions in each rank's own part in a local region: zg.local(module) or zg.local(f)."


def _check_boundaries(
    node: fx.Node, split: Mapping[fx.Node, int], batch: Batch, micro_batches: int, comparison: Comparison
) -> None:
    """Refuse boundaries of sequences or bags: the concatenated boundaries of the parts are not those of the batch."""
    assert isinstance(node.target, OpOverload)
    if origin(node).phase != "forward":
        return
    arguments = rules.arguments(node)
    for schema in schema_arguments(node.target):
        index = arguments.get(schema.name)
        if not _BOUNDARIES.fullmatch(schema.name) or not isinstance(index, fx.Node):
            continue
        if schema.name == "sorted_sequence" and meta(index)["val"].dim() > 1:
            continue  # one sequence for each row of the batch
        number = _number_of_input(index, split)
        if number is None:
            continue
        # The first boundary is 0 on every rank.
        starts_anew = comparison.ranks > 1 and all(row[number].lowest == 0 for row in comparison.values)
        if node.target in BAGS:
            shifted = counts_from_whole(node, batch.sbp)
            wrong = micro_batches > 1 or bool(arguments.get("include_last_offset")) or (starts_anew and not shifted)
        else:
            wrong = schema.name != "offsets" or micro_batches > 1 or starts_anew
        if wrong:
            raise InputError(
                f"{batch.names[number]} of shape {tuple(batch.tensors[number].shape)} has boundaries, the "
                f"{schema.name} of {node.target}, within a part of the batch\n{_source_line(node)}"
                "A plain input is split along dimension 0: the concatenated boundaries of all parts are not those of "
                f"the whole batch.\n{_LOCAL} Or pass one padded row for each sample. "
                f"If every rank holds all boundaries, pass zg.replicated({batch.names[number]})."
            )


# Names of operators' arguments that hold the positions where one sequence ends and the next begins.
_BOUNDARIES = re.compile(r"boundaries|offsets|sorted_sequence|cu_seqlens(_[qk])?|cum?_seq_[qk]")


def _check_rows(node: fx.Node, rows: int, name: str, ranks: int) -> None:
    """Refuse an input of which ``build()`` reads the rows of one rank one by one: rows of other ranks are never read.

    Args:
        node: the input.
        rows: its number of rows on this rank.
    """
    indices: set[Any] = set()
    for user in node.users:
        if user.target is not aten.select.int or user.args[1] != 0:
            return
        indices.add(user.args[2])
    if indices and indices == set(range(rows)):
        user = next(iter(node.users))
        raise InputError(
            f"{name} has {rows} rows on this rank, and build() reads exactly these, one by one\n{_source_line(user)}"
            f"A plain input is split along dimension 0: the whole has {rows * ranks} rows, and those of other ranks "
            "would be ignored. Pass each row as an input of its own, or the tensor with the batch in dimension 0, or "
            f"zg.to_global({name}, placement=..., sbp=zg.sbp.split(d)) for the dimension d of the batch, or "
            f"zg.replicated({name}) if every rank holds all of it.\n{_LOCAL}"
        )


def _input_of(node: fx.Node) -> tuple[fx.Node, bool] | None:
    """Return the input whose values the node has, and True if it has single rows only; None for any other node."""
    rows_only: bool = False
    while node.op == "call_function":
        if node.target is operator.getitem or is_view_or_copy(node) or node.target is aten._unsafe_view.default:
            position = 0
        elif node.target in (aten.where.self, aten.where.ScalarOther):
            position = 1
        else:
            return None
        if node.target is aten.select.int and node.args[1] == 0:
            rows_only = True
        source = node.args[position]
        if not isinstance(source, fx.Node):
            return None
        node = source
    return (node, rows_only) if node.op == "placeholder" else None


def _reads(graph: fx.Graph) -> Iterator[_Read]:
    """Yield the operators of the forward pass that read or write at positions."""
    for node in graph.nodes:
        if node.op != "call_function" or origin(node).phase != "forward" or not isinstance(node.target, OpOverload):
            continue
        packet = node.target.overloadpacket
        if packet in _ALONG_DIM:
            arguments = rules.arguments(node)
            source, index = arguments["self"], arguments["index"]
            dims = meta(source)["val"].dim()
            if dims:
                yield _Read(node, source, arguments["dim"] % dims, index)
        elif packet in _ADVANCED:
            source, indices = operand(node), node.args[1]
            assert isinstance(indices, Sequence)
            for dim, index in enumerate(indices):
                if isinstance(index, fx.Node) and meta(index)["val"].dtype is not torch.bool:
                    yield _Read(node, source, dim, index)
                elif isinstance(index, fx.Node):
                    # A mask covers several dimensions, so the later ones have other numbers.
                    break
        elif node.target is aten.embedding.default:
            source, index = operand(node), operand(node, 1)
            yield _Read(node, source, 0, index)


_ALONG_DIM = {
    aten.gather,
    aten.scatter,
    aten.scatter_add,
    aten.scatter_reduce,
    aten.index_select,
    aten.index_add,
    aten.index_copy,
    aten.index_fill,
}
_ADVANCED = {aten.index, aten._unsafe_index, aten.index_put, aten._unsafe_index_put}


def _problem(
    read: _Read, split: Mapping[fx.Node, int], batch: Batch, ranks: int, comparison: Comparison
) -> tuple[str, bool] | None:
    """Return the problem with the positions, if the dimension that they index is a batch dimension.

    Returns:
        The message, and True if the positions are certainly wrong; None if they are right.
    """
    read_input = _input_of(read.index)
    assert read_input is not None
    placeholder, rows_only = read_input
    number = split[placeholder]
    name, shape = batch.names[number], tuple(batch.tensors[number].shape)
    parts = _parts(meta(read.source)["val"].shape[read.dim], batch, ranks)
    equal = len(set(parts)) == 1
    begins = f"r * {parts[0]}" if equal else f"{list(itertools.accumulate(parts, initial=0))[:-1]}[r]"
    about = f"{name} of shape {shape} has positions of rows of the batch\n{_source_line(read.node)}"
    advice = (
        f"Pass positions in the whole batch (on rank r its own rows begin at {begins}), with one row for "
        f"each position. {_LOCAL}"
    )
    if rows_only:
        return (
            f"{about}build() uses single rows of it as positions, but a plain input is split along dimension 0: the "
            f"whole has the shape {batch.specs[number].shape}, and rows of other ranks would be ignored.\n{advice}"
        ), True
    # 0 for a dimension that is smaller than the number of ranks: no position is below it.
    smallest = min((part for part in parts if part), default=0)
    empty = not math.prod(shape[1:]) or not sum(_parts(meta(placeholder)["val"].shape[0], batch, ranks))
    if comparison.ranks < 2 or empty or not all(row[number].highest < smallest for row in comparison.values):
        return None
    return (
        f"{about}On every rank all of them are below {smallest}, the rows of one rank's part, but the step "
        f"computes with the {sum(parts)} rows of all {ranks} parts: if they number the rows of each rank's part, every "
        f"rank reads the first part's.\n{advice}\n"
        f"If you mean the first {parts[0]} rows of the whole batch, pass "
        f"zg.to_global({name}, placement=..., sbp=zg.sbp.split(0))."
    ), False


def _parts(size: Any, batch: Batch, ranks: int) -> list[int]:
    """Return the size of each rank's part, in this call, of a dimension of global size ``size``."""
    if isinstance(size, int):
        return [size // ranks] * ranks
    sizes, each = sizes_of(size), batch.sizes
    totals = {name: sum(rows) for name, rows in each.items()}
    dim = sizes.row_dim(size)
    if dim is None:
        return [sizes.at(size, totals) // ranks] * ranks
    return [sizes.at(size, {**totals, dim.name: rows}) for rows in each[dim.name]]
