"""Line: the placement problem along one mesh dimension, with what has been chosen so far."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import FakeTensor
from zerograph.ir.mesh import Mesh, local_shape
from zerograph.ir.metadata import meta
from zerograph.ir.sbp import NdSbp, PartialSum, Sbp, Signature, Split, broadcast
from zerograph.ir.step_graph import nbytes
from zerograph.passes import rules
from zerograph.passes.accumulation.in_time import follow_from_batch
from zerograph.passes.context import Context
from zerograph.passes.placement.boxing import boxing
from zerograph.passes.placement.cost import PACKET, boxing_cost, signature_cost

# A tensor of the graph: the node that makes it, and which of its tensors it is.
Made = tuple[fx.Node, int]


# Along time: to compute on the whole batch is no accumulation. Only what cannot be had otherwise, and not from the
# batch's beginning on.
_WHOLE = 1e6 * PACKET


@dataclass
class Line:
    """One mesh dimension's choices; the dimensions before it are settled, and their cuts are made.

    Attributes:
        sbp: SBP along this dimension of every tensor that a node yields.
        signature: chosen for every operator.
        zero_dim: the mesh dimension that ZeRO splits along.
        batch_is_split: whether the ranks along this dimension give different parts of the batch.
        is_time: the dimension is time, along which outputs and gradients are collected and summed without sending.
        given: SBP of what the graph returns as it follows from the batch's, where parameters that the user has split
            along this dimension may make another of it.
        ahead: along time, what can be had of the whole batch before the first micro-batch.
        values: of every node the tensors that it yields, as large as the ranks along this dimension hold them together.
    """

    graph: fx.Graph
    dim: int
    zero_dim: int
    batch_is_split: bool
    ranks: int
    values: dict[fx.Node, tuple[Tensor, ...]]
    is_time: bool = False
    ahead: frozenset[fx.Node] = frozenset()
    given: Mapping[Made, Sbp] = field(default_factory=dict)
    sbp: dict[fx.Node, tuple[Sbp, ...]] = field(default_factory=dict)
    signature: dict[fx.Node, Signature] = field(default_factory=dict)
    _inputs: dict[fx.Node, list[Made]] = field(default_factory=dict)
    _readers: dict[Made, list[fx.Node]] = field(default_factory=dict)
    _nbytes: dict[Made, int] = field(default_factory=dict)

    def returned(self, made: Made, have: Sbp) -> Sbp:
        """How the user gets back a tensor that is ``have``: never partial, and split only as the batch was given."""
        if self.is_time:
            return have
        if made in self.given:
            have = self.given[made]
        return have if isinstance(have, Split) and self.batch_is_split else broadcast

    def choose(self, node: fx.Node, signature: Signature) -> None:
        self.signature[node] = signature
        self.sbp[node] = signature.outputs

    def made(self, node: fx.Node) -> Made:
        """The tensor that a tensor-valued node is: of ``getitem`` that of the operator behind it."""
        if node.target is not operator.getitem:
            return node, 0
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        # What an operator was told not to compute has no SBP.
        return source, sum(isinstance(value, Tensor) for value in source.meta["val"][:index])

    def have(self, node: fx.Node) -> Sbp:
        """SBP of a tensor-valued node."""
        source, index = self.made(node)
        return self.sbp[source][index]

    def nbytes(self, made: Made) -> int:
        if made not in self._nbytes:
            self._nbytes[made] = nbytes(self.values[made[0]][made[1]])
        return self._nbytes[made]

    def inputs(self, node: fx.Node) -> list[Made]:
        if node not in self._inputs:
            self._inputs[node] = [self.made(given) for given in rules.tensor_arguments(node)]
        return self._inputs[node]

    def signatures(self, node: fx.Node) -> tuple[Signature, ...] | None:
        """What the rule of the node's operator allows along this dimension; None without a rule."""
        inputs = tuple(self.values[source][index] for source, index in self.inputs(node))
        return rules.of_node(node, self.ranks, inputs, self.values[node])

    def readers(self, made: Made) -> list[fx.Node]:
        """The nodes that read a tensor, looking through ``getitem``."""
        if made not in self._readers:
            found: dict[fx.Node, None] = {}
            for user in made[0].users:
                if user.target is not operator.getitem:
                    found[user] = None
                elif self.made(user) == made:
                    found.update(user.users)
            self._readers[made] = list(found)
        return self._readers[made]

    def needs(self, made: Made, have: Sbp, but: fx.Node | None = None) -> Iterator[Sbp]:
        """The SBPs in which the tensor is read if it is ``have``; the reader ``but`` left out."""
        for reader in self.readers(made):
            if reader is but:
                continue
            if reader.target is boxing:
                if meta(reader).get("by_user"):
                    yield meta(reader)["target_sbp"][self.dim]
                    continue
                # Along ZeRO's dimension a partial gradient is reduced, in whichever way the stage says, and placement
                # must not depend on the stage. Along any other it is one more all-reduce.
                summed = isinstance(have, PartialSum) and self.dim != self.zero_dim and not self.is_time
                if isinstance(have, Split) or summed:
                    yield broadcast
            elif reader.op == "output":
                yield self.returned(made, have)
            elif reader in self.signature:
                yield from self.needed_by(reader, self.signature[reader], made)

    def needed_by(self, reader: fx.Node, signature: Signature, made: Made) -> list[Sbp]:
        return [sbp for given, sbp in zip(self.inputs(reader), signature.inputs, strict=True) if given == made]

    def cost(self, made: Made, have: Sbp, needs: Iterable[Sbp]) -> float:
        """Of giving a tensor that is ``have`` to readers that need it so."""
        if not self.is_time:
            return boxing_cost(have, needs, self.nbytes(made), self.ranks)
        needs = frozenset(needs)
        total = boxing_cost(have, needs, self.nbytes(made), self.ranks)
        if have != broadcast and any(need != have and Split in (type(have), type(need)) for need in needs):
            total += _WHOLE * (_WHOLE if made[0] in self.ahead else 1)
        return total

    def tensor_cost(self, made: Made) -> float:
        """Of all boxing of one tensor."""
        have = self.sbp[made[0]][made[1]]
        return self.cost(made, have, self.needs(made, have))

    def entry_cost(self, node: fx.Node, signature: Signature, *, wary: bool) -> float:
        """Of running ``node`` under ``signature`` with its inputs as they are; see ``place`` for ``wary``."""
        inputs = self.inputs(node)
        haves = [self.sbp[source][index] for source, index in inputs]
        total = signature_cost(signature)
        for made, have, need in zip(inputs, haves, signature.inputs, strict=True):
            total += self.cost(made, have, (need,))
        if wary and not any(isinstance(have, Split) for have in haves):
            for index, sbp in enumerate(signature.outputs):
                if isinstance(sbp, Split):
                    total += self.cost((node, index), sbp, (broadcast,))
        return total

    def leaves(self, made: Made, need: Sbp) -> bool:
        """Along time: whether a tensor is needed in a form that it has only when the last micro-batch is done."""
        have = self.sbp[made[0]][made[1]]
        return have not in (broadcast, need)

    def total_cost(self) -> float:
        """Of all boxing in the graph."""
        return sum(self.tensor_cost((node, index)) for node in self.values for index in range(len(self.values[node])))


def open_line(graph: fx.Graph, context: Context, settled: Sequence[Line]) -> Line:
    """The problem along the mesh dimension behind those that are settled."""
    values = {}
    for node in graph.nodes:
        whole = rules.output_values(node)
        if not whole or node.target is operator.getitem:
            continue
        prefixes = [tuple(one.sbp[node][index] for one in settled) for index in range(len(whole))]
        values[node] = tuple(_cut(value, prefix, context.mesh) for value, prefix in zip(whole, prefixes, strict=True))
    dim = len(settled)
    batch_is_split = any(isinstance(sbp[dim], Split) for sbp in context.batch.inputs)
    is_time = dim == context.time_dim
    first = follow_from_batch(graph) if is_time else frozenset()
    return Line(graph, dim, context.policy.dim, batch_is_split, context.mesh.shape[dim], values, is_time, first)


def _cut(value: Any, prefix: NdSbp, mesh: Mesh) -> Tensor:
    shape = local_shape(value.shape, prefix, mesh)
    if shape == tuple(value.shape):
        return value  # type: ignore[no-any-return]
    assert isinstance(value, FakeTensor)
    with value.fake_mode:
        return torch.empty(shape, dtype=value.dtype, device=value.device)
