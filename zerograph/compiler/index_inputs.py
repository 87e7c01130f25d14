"""Inputs that hold positions: refuse those that count within one rank's part where the step counts the whole batch.

Offsets of bags, edges of graphs and labels of pairs often number the rows of the part that a data loader made. In the
step's graph the same operator reads the rows of the whole batch. Such inputs are recognised by the operator that reads
them, by the dimension that they index, and by the values that the ranks compared.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload, schema_arguments
from zerograph.capture.captured import Captured
from zerograph.compiler.batch import Batch
from zerograph.compiler.plain_inputs import Comparison, is_part
from zerograph.errors import InputError
from zerograph.ir.metadata import meta, origin
from zerograph.ir.region import local
from zerograph.ir.sbp import Split
from zerograph.ir.step_graph import placeholders
from zerograph.passes import rules
from zerograph.passes.normalize.offsets import BAGS, counts_from_whole

aten = torch.ops.aten

# A dimension of a tensor: the node, which of its outputs, and the dimension.
_Dim = tuple[fx.Node, int, int]


@dataclass(frozen=True)
class _Read:
    """An operator that reads an input as positions along a dimension of another tensor.

    Attributes:
        node: the operator.
        source: the tensor that is indexed.
        dim: its dimension.
        index: the node of the positions.
        values: the last operand, which is written or added there; None where nothing is.
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
    compared: Comparison,
    warn: Callable[[str], None],
) -> None:
    """Refuse inputs whose positions are those of one rank's part, or warn where few positions may be so by chance.

    Args:
        ranks: number of parts that plain inputs are split into.
        compared: what the ranks know of each other's inputs.

    Raises:
        InputError: naming the input, the operator that reads it, and what to do. The same on every rank.
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
            _check_boundaries(node, split, batch, micro_batches, compared)
    if ranks == 1:
        return
    for node, at in split.items():
        _check_rows(node, len(batch.tensors[at]), batch.names[at], ranks)
    integers = [at for at in split.values() if not batch.tensors[at].is_floating_point()]
    reads = [read for read in _reads(graph) if (found := _input_of(read.index)) and split.get(found[0]) in integers]
    problems = [(read, *problem) for read in reads if (problem := _problem(read, split, batch, ranks, compared))]
    # Dimensions are followed only where the values raise the question: that costs as much as many a pass.
    dims = _batch_dims(graph, list(split), ranks) if problems else set()
    of_batch = [(message, certain) for read, message, certain in problems if (read.source, 0, read.dim) in dims]
    for message, certain in of_batch:
        if certain:
            raise InputError(message)
    for message, _ in of_batch:
        warn(message)


def read_outside_regions(captured: Captured) -> set[int]:
    """Return the numbers of the inputs that the step computes with, or returns, outside of local regions."""
    return {
        int(meta(node)["role"].name)
        for node in placeholders(captured.graph.graph, "input")
        if any(user.target is not local for user in node.users)
    }


def _where(node: fx.Node) -> str:
    found = origin(node)
    return f"  {found.source}   {found.code}\n" if found.source else ""


_LOCAL = "What each rank computes with positions of its own part, compute in a region: zg.local(module) or zg.local(f)."


def _check_boundaries(
    node: fx.Node, split: Mapping[fx.Node, int], batch: Batch, micro_batches: int, compared: Comparison
) -> None:
    """Refuse boundaries of sequences or bags: those of the parts, end to end, are not those of the whole."""
    assert isinstance(node.target, OpOverload)
    if origin(node).phase != "forward":
        return
    arguments = rules.arguments(node)
    for schema in schema_arguments(node.target):
        index = arguments.get(schema.name)
        if schema.name not in _BOUNDARIES or not isinstance(index, fx.Node):
            continue
        found = _input_of(index)
        if found is None or found[0] not in split:
            continue
        at = split[found[0]]
        local = compared.ranks > 1 and all(row[at].lowest == 0 for row in compared.values)
        if node.target in BAGS:
            moved = counts_from_whole(node, batch.sbp)
            wrong = micro_batches > 1 or bool(arguments.get("include_last_offset")) or (local and not moved)
        else:
            wrong = schema.name != "offsets" or micro_batches > 1 or local
        if wrong:
            raise InputError(
                f"{batch.names[at]} of shape {tuple(batch.tensors[at].shape)} has boundaries, the {schema.name} of "
                f"{node.target}, within a part of the batch\n{_where(node)}"
                "A plain input is split along dimension 0: boundaries of all parts, one after another, are not those "
                f"of the whole.\n{_LOCAL} Or give one padded row for each sample."
            )


# The names by which operators call positions where one sequence ends and the next begins.
_BOUNDARIES = (
    "offsets",
    "cu_seqlens",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "cu_seq_q",
    "cu_seq_k",
    "cum_seq_q",
    "cum_seq_k",
)


def _check_rows(node: fx.Node, rows: int, name: str, ranks: int) -> None:
    """Refuse an input that ``build()`` reads row by row, as many rows as one rank gave: the others' never count."""
    read: set[Any] = set()
    for user in node.users:
        if user.target is not aten.select.int or user.args[1] != 0:
            return
        read.add(user.args[2])
    if read == set(range(rows)):
        user = next(iter(node.users))
        raise InputError(
            f"{name} has {rows} rows on this rank, and build() reads these by their number and no other\n{_where(user)}"
            f"A plain input is split along dimension 0: it has {rows * ranks} rows, and those of other ranks would not "
            "count. Give each row as an input of its own, or the tensor with the batch in dimension 0, or "
            f"zg.to_global({name}, placement=..., sbp=zg.sbp.split(d)) for the dimension d of the batch, or "
            f"zg.replicated({name}) if every rank holds all of it.\n{_LOCAL}"
        )


def _input_of(node: fx.Node) -> tuple[fx.Node, bool] | None:
    """Return the input whose values the node holds, and whether only some of its rows; None for any other node."""
    rows: bool = False
    while node.op == "call_function":
        if node.target is operator.getitem or node.target in _KEEP_VALUES:
            place = 0
        elif node.target in (aten.where.self, aten.where.ScalarOther):
            place = 1
        else:
            return None
        if node.target is aten.select.int and node.args[1] == 0:
            rows = True
        source = node.args[place]
        if not isinstance(source, fx.Node):
            return None
        node = source
    return (node, rows) if node.op == "placeholder" else None


_KEEP_VALUES: set[Any] = {
    aten._to_copy.default,
    aten._unsafe_view.default,
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.reshape.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unsqueeze.default,
    aten.view.default,
}


def _reads(graph: fx.Graph) -> Iterator[_Read]:
    """Yield the operators of the forward pass that look up, or write, at positions."""
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
            source, indices = node.args[:2]
            assert isinstance(source, fx.Node)
            assert isinstance(indices, Sequence)
            for dim, index in enumerate(indices):
                if isinstance(index, fx.Node) and meta(index)["val"].dtype is not torch.bool:
                    yield _Read(node, source, dim, index)
                elif isinstance(index, fx.Node):
                    # A mask covers several dimensions; those after it have other numbers.
                    break
        elif node.target is aten.embedding.default:
            source, index = node.args[:2]
            assert isinstance(source, fx.Node)
            assert isinstance(index, fx.Node)
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


def _batch_dims(graph: fx.Graph, inputs: Sequence[fx.Node], ranks: int) -> set[_Dim]:
    """Return the dimensions of all tensors that run over the batch.

    A signature that splits one factor names the dimensions of an operator that run over the same index: where one of
    them is the batch's, all are.
    """
    groups: dict[_Dim, list[list[_Dim]]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or not isinstance(node.target, OpOverload):
            continue
        if origin(node).phase != "forward" or not rules.output_values(node):
            continue
        operands = [_output(given) for given in rules.tensor_arguments(node)]
        outputs = [(node, at) for at in range(len(rules.output_values(node)))]
        same = []
        for signature in rules.signatures_of(node, ranks) or ():
            sbps = zip((*operands, *outputs), (*signature.inputs, *signature.outputs), strict=True)
            same.append([(*tensor, sbp.dim) for tensor, sbp in sbps if isinstance(sbp, Split)])
        if node.target.overloadpacket in _LIKE_FIRST:
            same += [[(*operands[0], dim), (*outputs[0], dim)] for dim in range(meta(node)["val"].dim())]
        for group in same:
            for one in group:
                groups.setdefault(one, []).append(group)
    found: set[_Dim] = set()
    waiting: list[_Dim] = [(node, 0, 0) for node in inputs]
    while waiting:
        one = waiting.pop()
        if one not in found and _may_be_batch(one[0]):
            found.add(one)
            waiting += [other for group in groups.get(one, ()) for other in group]
    return found


# Operators whose result has the dimensions of the first operand, one of which no signature splits.
_LIKE_FIRST = {
    aten._log_softmax,
    aten._softmax,
    aten.cumsum,
    aten.index_add,
    aten.index_copy,
    aten.index_fill,
    aten.index_put,
    aten.logcumsumexp,
    aten.scatter,
    aten.scatter_add,
    aten.scatter_reduce,
}


def _output(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the node that makes the tensor, and the place among the tensors that it yields."""
    if node.target is not operator.getitem:
        return node, 0
    parts, at = node.args
    assert isinstance(parts, fx.Node)
    assert isinstance(at, int)
    return parts, sum(isinstance(value, Tensor) for value in meta(parts)["val"][:at])


def _may_be_batch(node: fx.Node) -> bool:
    """Return False for parameters and buffers, in which nothing numbers samples."""
    return node.op != "placeholder" or meta(node)["role"].kind == "input"


def _problem(
    read: _Read, split: Mapping[fx.Node, int], batch: Batch, ranks: int, compared: Comparison
) -> tuple[str, bool] | None:
    """Return what is wrong with the positions, if the dimension that they index is the batch's, and whether it is sure.

    None if nothing is.
    """
    found = _input_of(read.index)
    assert found is not None
    placeholder, rows_only = found
    at = split[placeholder]
    name, shape = batch.names[at], tuple(batch.tensors[at].shape)
    size = meta(read.source)["val"].shape[read.dim]
    about = f"{name} of shape {shape} has positions of rows of the batch\n{_where(read.node)}"
    advice = (
        f"Give positions in the whole batch (on rank r those of its own rows begin at r * {size // ranks}), with one "
        f"row for each position. {_LOCAL}"
    )
    if rows_only:
        return (
            f"{about}build() takes single rows of it as positions, but a plain input is split along dimension 0: its "
            f"whole has the shape {batch.specs[at].shape}, and rows of other ranks would not count.\n{advice}"
        ), True
    count = batch.tensors[at].numel() * (compared.ranks - 1)
    if compared.ranks < 2 or not count or not all(row[at].highest < size // ranks for row in compared.values):
        return None
    # Positions without any other rank's row are by chance those of the first rank only where there are few.
    certain = count * math.log2(ranks) >= _CERTAIN or len(compared.digests(at)) == 1
    reads = "every rank would read" if certain else "if they count the rows of each rank's part, every rank reads"
    return (
        f"{about}On every rank all of them are below {size // ranks}, the rows of one rank's part, but the step "
        f"computes with the {size} rows of all {ranks} parts: {reads} the first one's.\n{advice}\n"
        f"If the first {size // ranks} rows of the whole batch are meant, say so: "
        f"zg.to_global({name}, placement=..., sbp=zg.sbp.split(0))."
    ), certain


# As many bits of chance: one in a million.
_CERTAIN = 20
