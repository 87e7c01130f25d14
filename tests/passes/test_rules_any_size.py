"""Rules and boxings of symbolic steps: ranks hold unequal parts of a split dimension, and some hold nothing of it.

Where a rule may split another dimension too, that one has a symbolic size as well.
Each signature that splits a dimension is lowered as a symbolic step lowers it, and run on ranks that this process runs
side by side. The parts must be those of the whole operator's result.
"""

from __future__ import annotations

import math
import operator as python
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.harness import sliced
from tests.passes.samples import Zeros
from tests.passes.test_rules import SAMPLES, _floating, graph_of, joined, pieces, real
from zerograph._torch import fake_mode, graph_module, pytree, raw_sizes, size_env
from zerograph.capture.decompositions import symbolic_table, table
from zerograph.ir.dims import Dim
from zerograph.ir.mesh import line
from zerograph.ir.metadata import Role, meta
from zerograph.ir.sbp import Sbp, Signature, Split, broadcast, partial_sum
from zerograph.ir.sizes import Sizes
from zerograph.ir.zero import OFF
from zerograph.ops.dispatch import COMBINE, DISPATCH
from zerograph.ops.experts import FIRST
from zerograph.ops.random import uniform
from zerograph.ops.rows import exchange_rows, gather_rows
from zerograph.passes import rules
from zerograph.passes.context import BatchLayout, Context
from zerograph.passes.lower import localize as lowering
from zerograph.passes.lower.bind_sizes import bind_sizes
from zerograph.passes.placement.box import box

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
RANKS = 3

# Torch computes no symbolic shapes for these: a step that has one is compiled for each size by itself.
STATIC_ONLY = {
    aten._fft_c2c.default,
    aten._fft_c2r.default,
    aten._fft_r2c.default,
    aten.linalg_solve_triangular.default,
}


# Operators that occur in no symbolic step.
DECOMPOSED = table() | symbolic_table()


def split_signatures(operator: Any, args: Any, kwargs: Any) -> Iterator[Signature]:
    """Yield the signatures of a sample that split a dimension."""
    _, node, _ = graph_of(operator, args, kwargs)
    for signature in rules.signatures_of(node, 2) or ():
        split = any(isinstance(sbp, Split) for sbp in (*signature.inputs, *signature.outputs))
        if split and _floating(node, signature):
            yield signature


class SymbolicSample:
    """A sample whose dimensions that a signature splits have a symbolic size, and those that another one splits too.

    Attributes:
        rows: the size in the sample that becomes the symbol; split dimensions are multiples of it.
        columns: the same for the other signature; 0 without one.
        guards: conditions that the operator's shape function relied on.
        signatures: those that the rule yields for symbolic sizes.
    """

    def __init__(
        self, operator: Any, args: Any, kwargs: Any, signature: Signature, other: Signature | None = None
    ) -> None:
        _, static, self._tensors = graph_of(operator, args, kwargs)
        self._signature = signature
        values = (*(one.meta["val"] for one in rules.tensor_arguments(static)), *rules.output_values(static))
        self.rows, self.columns = split_size(values, signature), 0 if other is None else split_size(values, other)
        self._graph, mode = fx.Graph(), fake_mode()
        dims = [Dim("s0", 11 * RANKS, rows=True, pieces=RANKS, along=(0,)), Dim("s1", 17)]
        sizes = Sizes(size_env(mode), dims)
        self._symbol, self._column_symbol = sizes.all("s0"), sizes.all("s1")
        others = [None] * len(values) if other is None else [*other.inputs, *other.outputs]
        sbps = iter(list(zip(signature.inputs, others, strict=False)))
        with mode, raw_sizes():
            args, kwargs = pytree.tree_map(lambda value: self._enter(value, sbps), (args, kwargs))
            outputs = zip(rules.output_values(static), signature.outputs, others[len(signature.inputs) :], strict=True)
            args = _resized(operator, list(args), [self._shape(*output) for output in outputs])
            self.node = self._graph.call_function(operator, tuple(args), kwargs)
            fakes = fx.map_arg((self.node.args, self.node.kwargs), lambda node: node.meta["val"])
            self.node.meta["val"] = operator(*fakes[0], **fakes[1])
            sizes.close()
            self.guards, self.signatures = sizes.guards, rules.signatures_of(self.node, RANKS)

    def _shape(self, value: Any, sbp: Sbp, other: Sbp | None) -> list[Any]:
        shape: list[Any] = list(value.shape)
        if isinstance(other, Split):
            shape[other.dim] = shape[other.dim] // self.columns * self._column_symbol
        if isinstance(sbp, Split):
            shape[sbp.dim] = shape[sbp.dim] // self.rows * self._symbol
        return shape

    def _enter(self, value: Any, sbps: Iterator[tuple[Sbp, Sbp | None]]) -> Any:
        if not isinstance(value, (Tensor, Zeros)):
            return value
        sbp, other = next(sbps)
        shape = self._shape(value, sbp, other)
        if isinstance(value, Zeros):
            node = self._graph.call_function(aten.full.default, (shape, 0), {"dtype": torch.float64})
            node.meta |= {"val": torch.zeros(shape, dtype=torch.float64), "sbp": (sbp,)}
        else:
            node = self._graph.placeholder("x")
            fake = torch.empty(shape, dtype=value.dtype, device=value.device)
            node.meta |= {"val": fake, "role": Role("input", "x"), "sbp": (sbp,)}
        return node

    def lower(self) -> None:
        """Make the graph that of one rank."""
        node, value = self.node, self.node.meta["val"]
        node.meta["signature"] = (self._signature,)
        results, placed = [], [(sbp,) for sbp in self._signature.outputs]
        if isinstance(value, Tensor):
            node.meta["sbp"], results = placed[0], [node]
        else:
            node.meta["sbp"] = tuple(placed)
            for index in (index for index, one in enumerate(value) if isinstance(one, Tensor)):
                results.append(self._graph.call_function(python.getitem, (node, index)))
                results[-1].meta |= {"val": value[index], "sbp": placed[len(results) - 1]}
        self._graph.output(tuple(results)).meta["needs"] = placed
        lower(self._graph)

    def run(self, rows: Sequence[int]) -> list[Tensor]:
        """Return the outputs, joined; ``rows`` are those of each rank."""
        torch.default_generator.manual_seed(0)
        tensors = iter(self._tensors)
        each = run_together(
            self._graph,
            rows,
            lambda node: parts(next(tensors), meta(node)["sbp"][0], rows, self.rows),
            {"s1": self.columns},
        )
        results = zip(zip(*each, strict=True), self._signature.outputs, strict=True)
        return [joined(list(parts), sbp) for parts, sbp in results]


def split_size(values: Sequence[Any], signature: Signature) -> int:
    """Return the number that all dimensions that a signature splits are multiples of."""
    split = zip(values, (*signature.inputs, *signature.outputs), strict=True)
    return math.gcd(*(value.shape[sbp.dim] for value, sbp in split if isinstance(sbp, Split)))


def beside(signature: Signature, others: Sequence[Signature]) -> Signature | None:
    """Return one of the signatures that splits other dimensions only, or None."""

    def apart(other: Signature) -> bool:
        pairs = zip((*signature.inputs, *signature.outputs), (*other.inputs, *other.outputs), strict=True)
        return all(a != b or not isinstance(a, Split) for a, b in pairs)

    return next(filter(apart, others), None)


def _resized(operator: Any, args: list[Any], outputs: Sequence[list[Any]]) -> list[Any]:
    """Return the arguments with the sizes that ``build()`` would have computed from those of its inputs."""
    if operator in lowering._SIZE_ARGUMENT:
        at = lowering._SIZE_ARGUMENT[operator]
        args[at] = [-1 if old == -1 else new for old, new in zip(args[at], outputs[0], strict=True)]
    elif operator in lowering._BATCH_ARGUMENT:
        args[lowering._BATCH_ARGUMENT[operator]] = args[0].meta["val"].shape[0]
    elif operator is aten.affine_grid_generator.default:
        args[1] = [outputs[0][0], *args[1][1:]]
    elif operator is uniform:
        args[2], args[4] = outputs[0], outputs[0]
    elif operator is aten.slice.Tensor and not isinstance(outputs[0][args[1]], int):
        args[3] = outputs[0][args[1]]
    return args


def parts(value: Tensor, sbp: Sbp, rows: Sequence[int], total: int) -> list[Tensor]:
    """Return what each rank holds, of ``total`` rows together."""
    if not isinstance(sbp, Split):
        return pieces(value, sbp, len(rows))
    times = value.shape[sbp.dim] // total
    return [part.contiguous() for part in value.split([count * times for count in rows], sbp.dim)]


def lower(graph: fx.Graph) -> None:
    """Lower a placed graph as a symbolic step is lowered."""
    inputs = tuple(node.meta["sbp"] for node in graph.find_nodes(op="placeholder"))
    context = Context(line(RANKS, 0, "none"), OFF, (), {}, BatchLayout(inputs))
    module = graph_module(torch.nn.Module(), graph)
    with raw_sizes():
        for run in (box, lowering.localize, bind_sizes):
            run(module, context)


def run_together(
    graph: fx.Graph,
    rows: Sequence[int],
    feed: Callable[[fx.Node], list[Any]],
    others: Mapping[str, int] | None = None,
) -> list[list[Tensor]]:
    """Run a graph on several ranks, node by node, and return the outputs of each rank.

    Args:
        feed: returns the tensors of the ranks for an input.
        others: the sizes of further dynamic dimensions, by name.
    """
    values: list[dict[fx.Node, Any]] = [{} for _ in rows]
    for node in graph.nodes:
        calls = [fx.map_arg((node.args, node.kwargs), own.__getitem__) for own in values]
        if node.op == "placeholder" and meta(node)["role"].kind == "size":
            size = meta(node)["size"]
            each = [others[size.dim]] if others and size.dim in others else rows
            results = [size.value(each, (len(rows),), (rank,)) for rank in range(len(rows))]
        elif node.op == "placeholder":
            results = feed(node)
        elif node.op == "output":
            return [list(args[0]) for args, _ in calls]
        elif node.target in TOGETHER:
            results = TOGETHER[node.target]([args for args, _ in calls])
        else:
            results = [node.target(*args, **kwargs) for args, kwargs in calls]
        for own, result in zip(values, results, strict=True):
            own[node] = result
    raise AssertionError("a graph without output")


def _gather(calls: Sequence[Any]) -> list[Tensor]:
    own = [args[0] for args in calls]
    for args in calls:
        assert list(args[1]) == [len(part) for part in own]
        assert args[2] == sum(args[1])
    return [torch.cat(own) for _ in calls]


def _exchange(calls: Sequence[Any]) -> list[Tensor]:
    sent = [args[0].reshape(-1).split(list(args[1])) for args in calls]
    results = []
    for rank, (_, _, received, shape, _) in enumerate(calls):
        result = torch.empty(shape, dtype=calls[0][0].dtype)
        for piece, source in zip(result.split(list(received)), sent, strict=True):
            piece.copy_(source[rank].view(piece.shape))
        results.append(result)
    return results


TOGETHER: dict[Any, Callable[[Sequence[Any]], list[Any]]] = {
    gather_rows: _gather,
    exchange_rows: _exchange,
    c10d.all_gather_into_tensor.default: lambda calls: [torch.cat([args[0] for args in calls])] * len(calls),
    c10d.all_reduce.default: lambda calls: [sum(args[0] for args in calls)] * len(calls),
    c10d.wait_tensor.default: lambda calls: [args[0] for args in calls],
}


DYNAMIC = sorted(SAMPLES.keys() - DECOMPOSED.keys() - STATIC_ONLY, key=str)


# Of each sample, every second signature, or all.
@sliced("operator, every", [(operator, 2) for operator in DYNAMIC], [(operator, 1) for operator in DYNAMIC])
def test_unequal_parts_compute_what_the_whole_operator_computes(operator: Any, every: int) -> None:
    for number, (args, kwargs) in enumerate(SAMPLES[operator]):
        given = pytree.tree_map(real, (args, kwargs))
        whole = [one for one in pytree.tree_leaves(operator(*given[0], **given[1])) if isinstance(one, Tensor)]
        signatures = list(split_signatures(operator, args, kwargs))
        for signature in signatures[number % min(every, len(signatures) or 1) :: every]:
            groups = dict.fromkeys(FIRST, signature.inputs[1:])
            groups |= {DISPATCH: signature.outputs, COMBINE: signature.inputs}
            if groups.get(operator, (broadcast,))[0] == Split(0):
                # Groups of experts are those of a parameter, whose sizes no input decides.
                continue
            sample = SymbolicSample(operator, args, kwargs, signature, beside(signature, signatures))
            assert all(guard.holds({"s0": sample.rows, "s1": sample.columns}) for guard in sample.guards)
            assert sample.signatures is not None
            if signature not in sample.signatures:
                # The kernel takes no empty tensor but an empty batch.
                rule = rules.rule_of(operator)
                assert rule is not None
                assert rule.batch is not None
                continue
            sample.lower()
            for rows in ((sample.rows - 1, 0, 1), (0, 0, sample.rows)):
                for one, other in zip(sample.run(rows), whole, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=f"{signature}, rows {rows}")


@pytest.mark.parametrize("operator", sorted(STATIC_ONLY, key=str), ids=str)
def test_what_torch_has_static_shapes_for_cannot_be_symbolic(operator: Any) -> None:
    args, kwargs = SAMPLES[operator][0]
    signature = next(split_signatures(operator, args, kwargs))
    try:
        sample = SymbolicSample(operator, args, kwargs, signature)
    except (AttributeError, RuntimeError):
        return
    assert not all(guard.holds({"s0": sample.rows}) for guard in sample.guards)


@pytest.mark.parametrize("operator", sorted(symbolic_table().keys() & SAMPLES.keys(), key=str), ids=str)
def test_a_decomposition_for_symbolic_sizes_computes_what_the_operator_computes(operator: Any) -> None:
    for args, kwargs in SAMPLES[operator]:
        args, kwargs = pytree.tree_map(real, (args, kwargs))
        torch.testing.assert_close(symbolic_table()[operator](*args, **kwargs), operator(*args, **kwargs))


@pytest.mark.parametrize("rows_dim", [0, 1])
@pytest.mark.parametrize("before", [broadcast, partial_sum, Split(0), Split(1)], ids=str)
def test_a_boxing_moves_unequal_parts(before: Sbp, rows_dim: int) -> None:
    value = torch.randn(6, 6, dtype=torch.float64)
    # Other boxings are those of a static step.
    for after in (broadcast, Split(rows_dim)):
        if Split(rows_dim) not in (before, after):
            continue
        graph, mode = fx.Graph(), fake_mode()
        sizes = Sizes(size_env(mode), [Dim("s0", 11 * RANKS, rows=True, pieces=RANKS, along=(0,))])
        shape: list[Any] = [6, 6]
        shape[rows_dim] = sizes.all("s0")
        source = graph.placeholder("x")
        with mode:
            fake = torch.empty(shape, dtype=torch.float64)
        source.meta |= {"val": fake, "role": Role("input", "x"), "sbp": (before,)}
        graph.output((source,)).meta["needs"] = [(after,)]
        sizes.close()
        lower(graph)
        for rows in ((5, 0, 1), (0, 0, 6)):

            def held(sbp: Sbp, rows: tuple[int, ...] = rows) -> list[Tensor]:
                return parts(value, sbp, rows if sbp == Split(rows_dim) else (2, 2, 2), 6)

            each = run_together(graph, rows, lambda node: held(before))
            for (found,), wanted in zip(each, held(after), strict=True):
                torch.testing.assert_close(found, wanted)
