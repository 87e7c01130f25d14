"""A loop in the step graph: one node, whose body is the graph of one micro-batch.

The graph is as large for many micro-batches as for two: the body is there once, and the node's module runs it as often
as there are micro-batches. What the body leaves behind it writes into tensors that the loop gives it, one for each
result, with the two operators below: a sum holds what all micro-batches add up to, and the first one writes it, so that
nothing is filled with zeros before; parts are laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

_library = torch.library.Library("zerograph", "FRAGMENT")
_library.define("accumulate(Tensor(a!) sum, Tensor part, Tensor turn) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    "collect(Tensor(a!) whole, Tensor part, Tensor turn, int along) -> ()", tags=(torch.Tag.pt2_compliant_tag,)
)
accumulate = torch.ops.zerograph.accumulate.default
collect = torch.ops.zerograph.collect.default


def _accumulate(sum: Tensor, part: Tensor, turn: Tensor) -> None:
    """Add a micro-batch's part to the sum; that of the first, number 0, is the sum so far."""
    if int(turn):
        sum.add_(part)
    else:
        sum.copy_(part)


def _collect(whole: Tensor, part: Tensor, turn: Tensor, along: int) -> None:
    """Lay a micro-batch's part behind those of the micro-batches before it."""
    size = part.shape[along]
    whole.narrow(along, int(turn) * size, size).copy_(part)


for _name, _run in (("accumulate", _accumulate), ("collect", _collect)):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zerograph::{_name}", lambda *_: None, lib=_library)


@dataclass(frozen=True)
class Result:
    """What a loop yields: a sum over the micro-batches, or their parts end to end along a dimension.

    Attributes:
        along: that dimension; None for a sum.
        gradient: the bucket whose gradient it is; None for anything else.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    along: int | None
    gradient: str | None = None


class Loop(nn.Module):
    """Runs a body once for each micro-batch, one after another.

    Attributes:
        body: takes the loop's operands, then its results, to be written, then the number of the micro-batch (0-d).
        micro_batches: how often it runs.
        cuts: for each operand the dimension along which each run is given its part of it; None: all of it.
        results: what the loop yields.
    """

    def __init__(
        self,
        body: fx.GraphModule,
        micro_batches: int,
        cuts: Sequence[int | None],
        results: Sequence[Result],
        function: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.body = body
        self.micro_batches = micro_batches
        self.cuts = tuple(cuts)
        self.results = tuple(results)
        self._function = function

    def with_body(self, body: fx.GraphModule, function: Callable[..., Any] | None = None) -> Loop:
        """The same loop around another form of its body, or around what a backend made of it."""
        return Loop(body, self.micro_batches, self.cuts, self.results, function)

    def forward(self, *operands: Tensor) -> tuple[Tensor, ...]:
        results = self.make_results()
        turn = torch.zeros((), dtype=torch.int64, device="cpu")
        # Not body(): GraphModule's __call__ drops the traceback that tells which node failed.
        run = self._function or self.body.forward
        for number in range(self.micro_batches):
            run(*self.parts(operands, number), *results, turn.fill_(number))
        return results

    def make_results(self) -> tuple[Tensor, ...]:
        """Tensors for the results, with nothing in them yet."""
        return tuple(torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in self.results)

    def parts(self, operands: Sequence[Tensor], number: int) -> list[Tensor]:
        """What the body is given of the operands in the micro-batch of this number."""
        return [
            operand if cut is None else self._part(operand, cut, number)
            for operand, cut in zip(operands, self.cuts, strict=True)
        ]

    def extra_repr(self) -> str:
        return f"{self.micro_batches} micro-batches\n{self.body.code}"

    def _part(self, operand: Tensor, cut: int, number: int) -> Tensor:
        size = operand.shape[cut] // self.micro_batches
        return operand.narrow(cut, number * size, size)


def loop_of(node: fx.Node) -> Loop | None:
    """The loop that the node runs, if it is one's."""
    found: Loop | None = node.meta.get("loop")
    return found


def loops(graph: fx.Graph) -> Iterator[Loop]:
    """The loops of a graph, in order."""
    return (found for node in graph.find_nodes(op="call_module") if (found := loop_of(node)) is not None)
