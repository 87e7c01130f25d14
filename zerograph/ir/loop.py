"""A loop over micro-batches in the step graph: one node, whose body is the graph of one micro-batch.

The size of the graph does not depend on the number of micro-batches: the node's module runs the body once for each. The
body writes its results into tensors of the loop with two operators. ``accumulate`` adds to a sum, which the first
micro-batch initialises. ``collect`` concatenates. Sums in a fixed tree are those of :mod:`zerograph.ops.tree_sum`.

Sizes that differ between calls are inputs of the body. The loop computes those that also differ between micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerograph.ir.dims import Size, SizeInput
from zerograph.ops.definition import define


def _accumulate(sum: Tensor, part: Tensor, micro_batch: Tensor) -> None:
    """Add a micro-batch's part to the sum; copy it for micro-batch 0."""
    if int(micro_batch):
        sum.add_(part)
    else:
        sum.copy_(part)


def _collect(whole: Tensor, part: Tensor, micro_batch: Tensor, dim: int, start: int | None = None) -> None:
    """Copy a micro-batch's part to its slice of the whole tensor along ``dim``; without ``start`` all are equal."""
    size = part.shape[dim]
    whole.narrow(dim, int(micro_batch) * size if start is None else start, size).copy_(part)


accumulate = define(
    "accumulate", "(Tensor(a!) sum, Tensor part, Tensor micro_batch) -> ()", _accumulate, lambda *_: None
)
collect = define(
    "collect",
    "(Tensor(a!) whole, Tensor part, Tensor micro_batch, int dim, SymInt? start=None) -> ()",
    _collect,
    lambda *_: None,
)


@dataclass(frozen=True)
class Result:
    """One result of a loop: a sum over the micro-batches, or their parts concatenated.

    Attributes:
        shape: shape of the whole result on this rank; symbolic sizes are operands of the loop.
        dtype: its dtype.
        device: its device.
        along: the dimension of the concatenation; None for a sum.
        gradient: the bucket whose gradient it is; None for any other result.
        partial: shape of the partial sums besides the result, if it is added as :mod:`zerograph.ops.tree_sum` says;
            else None. They are inputs of the body, after the results.
    """

    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    along: int | None
    gradient: str | None = None
    partial: tuple[int, ...] | None = None


class Loop(nn.Module):
    """A module that runs its body once for each micro-batch.

    Attributes:
        body: takes the loop's operands, the results, to which it writes, the number of the micro-batch (0-d int64), and
            ``sizes``.
        micro_batches: number of runs.
        cuts: for each operand the dimension that is split over the runs; None for an operand that each run gets whole.
        results: the results of the loop.
        sizes: the symbolic sizes that the body reads. For each the loop has an operand after the tensors: its value, or
            for one that differs between micro-batches the rows that these divide. The symbolic sizes in the shapes of
            the results follow.
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
        self.sizes: tuple[SizeInput, ...] = ()
        self._function = function

    def with_body(self, body: fx.GraphModule, function: Callable[..., Any] | None = None) -> Loop:
        """Return the loop with another body, or with a function that a backend compiled from its body."""
        loop = Loop(body, self.micro_batches, self.cuts, self.results, function)
        loop.sizes = self.sizes
        return loop

    def forward(self, *operands: Any) -> tuple[Tensor, ...]:
        """Run all micro-batches; return the results."""
        results = self.make_results(operands)
        micro_batch = torch.zeros((), dtype=torch.int64, device="cpu")
        # Not body(): GraphModule's __call__ drops the traceback that names the node that failed.
        run = self._function or self.body.forward
        for number in range(self.micro_batches):
            run(*self.inputs(operands, results, micro_batch.fill_(number), number))
        return results[: len(self.results)]

    def make_results(self, operands: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return empty tensors for the results, then for the partial sums of those that are added in a tree."""
        sizes = iter(operands[len(self.cuts) + len(self.sizes) :])
        results = tuple(
            torch.empty(
                [size if isinstance(size, int) else next(sizes) for size in result.shape],
                dtype=result.dtype,
                device=result.device,
            )
            for result in self.results
        )
        partial = (
            total.new_empty(result.partial)
            for result, total in zip(self.results, results, strict=True)
            if result.partial is not None
        )
        return (*results, *partial)

    def inputs(self, operands: Sequence[Any], results: Sequence[Tensor], micro_batch: Tensor, number: int) -> list[Any]:
        """Return the inputs of the body in the micro-batch of this number, which ``micro_batch`` holds too."""
        tensors = [
            operand if cut is None else self._part(operand, cut, number)
            for operand, cut in zip(operands, self.cuts, strict=False)
        ]
        sizes = [
            size.value_in(number, operand) if size.micro_batches else operand
            for size, operand in zip(self.sizes, operands[len(self.cuts) :], strict=False)
        ]
        return [*tensors, *results, micro_batch, *sizes]

    def extra_repr(self) -> str:
        """Return the number of micro-batches and the code of the body."""
        return f"{self.micro_batches} micro-batches\n{self.body.code}"

    def _part(self, operand: Tensor, cut: int, number: int) -> Tensor:
        size = operand.shape[cut] // self.micro_batches
        return operand.narrow(cut, number * size, size)


def loop_of(node: fx.Node) -> Loop | None:
    """Return the loop that the node runs, or None."""
    loop: Loop | None = node.meta.get("loop")
    return loop


def loops(graph: fx.Graph) -> Iterator[Loop]:
    """Yield the loops of a graph in order."""
    return (loop for node in graph.find_nodes(op="call_module") if (loop := loop_of(node)) is not None)
