"""Plain inputs that are no part of one batch: refused with the choices, and what a rank counts within its own part."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep, Predict, batch_on, sliced
from tests.models import part, update_by
from tests.pool import Pool
from zerograph.compiler.index_inputs import check_indices
from zerograph.compiler.plain_inputs import Comparison, Values
from zerograph.ir import mesh


def step_of(model: nn.Module, loss: Callable[..., Tensor]) -> LossStep:
    return LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, loss)


@dataclass(frozen=True)
class Case:
    """A loss, its inputs on one device, and what a rank gives: by mistake, and as the choices have it."""

    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    whole: Callable[[], tuple[Tensor, ...]]
    mistaken: Callable[..., tuple[Tensor, ...]]
    right: Callable[..., tuple[Tensor, ...]]
    words: tuple[str, ...]


def linear() -> nn.Module:
    return nn.Linear(8, 4)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(rows: int) -> Tensor:
    return torch.randint(0, 4, (rows,), generator=torch.Generator().manual_seed(9))


def with_weight(model: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=weight)


def with_prototypes(model: nn.Module, x: Tensor, y: Tensor, prototypes: Tensor) -> Tensor:
    return F.cross_entropy(model(x) @ prototypes.t(), y)


def scaled(model: nn.Module, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return (F.cross_entropy(model(x), y) * scale).sum()


def last_replicated(*batch: Tensor) -> tuple[Tensor, ...]:
    return (*map(part, batch[:-1]), zg.replicated(batch[-1]))


def last_whole(*batch: Tensor) -> tuple[Tensor, ...]:
    return (*map(part, batch[:-1]), batch[-1])


def of_graph(model: nn.Module, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
    hidden = model(x)
    return F.cross_entropy(hidden.index_add(0, edges[:, 1], hidden[edges[:, 0]]), y)


def of_edge_index(model: nn.Module, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
    hidden = model(x)
    return F.cross_entropy(hidden.index_add(0, edges[1], hidden[edges[0]]), y)


def of_pairs(model: nn.Module, x: Tensor, z: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x) @ model(z).t(), labels)


def pooled(model: nn.Module, x: Tensor, graph: Tensor, y: Tensor) -> Tensor:
    hidden = model(x)
    return F.cross_entropy(hidden.new_zeros(len(y), 4).index_add(0, graph, hidden), y)


def local_edges() -> Tensor:
    """Edges of two graphs of six nodes each, counted within the graph."""
    return torch.randint(0, 6, (24, 2), generator=torch.Generator().manual_seed(5))


def edges_of_both() -> Tensor:
    return local_edges() + torch.arange(2).repeat_interleave(12)[:, None] * 6


GRAPH_OF_NODE = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3])

CASES = {
    "class weights": Case(
        linear,
        with_weight,
        lambda: (numbers(0, 16, 8), classes(16), numbers(1, 4).abs()),
        last_whole,
        last_replicated,
        ("args[2] of shape (4,)", "bitwise equal on all 2 ranks", "zg.replicated(args[2])", "zg.sbp.broadcast"),
    ),
    "prototypes": Case(
        lambda: nn.Linear(8, 8),
        with_prototypes,
        lambda: (numbers(0, 16, 8), classes(16), numbers(1, 4, 8)),
        last_whole,
        last_replicated,
        ("args[2] of shape (4, 8)", "a tensor of shape (8, 8)", "zg.replicated(args[2])"),
    ),
    "edges": Case(
        linear,
        of_graph,
        lambda: (numbers(0, 12, 8), edges_of_both(), classes(12)),
        lambda x, edges, y: (part(x), part(local_edges()), part(y)),
        lambda *batch: tuple(map(part, batch)),
        ("args[1] of shape (12, 2)", "test_plain_inputs.py", "zg.local", "begin at r * 6", "zg.sbp.split(0)"),
    ),
    "edge_index": Case(
        linear,
        of_edge_index,
        lambda: (numbers(0, 12, 8), edges_of_both().t().contiguous(), classes(12)),
        lambda x, edges, y: (part(x), part(local_edges()).t().contiguous(), part(y)),
        lambda x, edges, y: (part(x), zg.replicated(edges), part(y)),
        ("args[1] has 2 rows on this rank", "test_plain_inputs.py", "zg.local", "zg.replicated(args[1])"),
    ),
    "labels of pairs": Case(
        linear,
        of_pairs,
        lambda: (numbers(0, 12, 8), numbers(1, 12, 8), torch.arange(12)),
        lambda x, z, labels: (part(x), part(z), torch.arange(6)),
        lambda *batch: tuple(map(part, batch)),
        ("args[2] of shape (6,)", "below 6", "the 12 rows of all 2 parts"),
    ),
    "graph of a node": Case(
        linear,
        pooled,
        lambda: (numbers(0, 24, 8), torch.cat([GRAPH_OF_NODE, GRAPH_OF_NODE + 4]), classes(8)),
        lambda x, graph, y: (part(x), GRAPH_OF_NODE, part(y)),
        lambda *batch: tuple(map(part, batch)),
        ("args[1] of shape (12,)", "begin at r * 4"),
    ),
}


# Positions may be few, or meant: they are warned of.
WARNED_OF = ("edges", "labels of pairs", "graph of a node")


def mistaken_and_right() -> dict[str, tuple[str, bool, float, float]]:
    """For each case: the message, if it is an error, the loss after one of the choices, and that of one device."""
    results = {}
    for title, case in CASES.items():
        torch.manual_seed(0)
        model = case.model()
        expected = case.loss(model, *case.whole()).item()
        mistaken, right = step_of(case.model(), case.loss), step_of(model, case.loss)
        with warnings.catch_warnings(record=True, action="always") as warned:
            try:
                mistaken(*case.mistaken(*case.whole()))
                message = "\n".join(str(warning.message) for warning in warned)
            except zg.InputError as error:
                message = str(error)
        results[title] = message, mistaken.steps_done == 0, right(*case.right(*case.whole())).item(), expected
    return results


def test_inputs_that_are_no_part_of_one_batch_are_refused_or_warned_of_with_the_choices(pool: Pool) -> None:
    for results in pool.run(2, mistaken_and_right):
        for title, (message, refused, loss, expected) in results.items():
            for word in CASES[title].words:
                assert word in message, title
            assert refused == (title not in WARNED_OF), title
            assert loss == pytest.approx(expected, rel=1e-5), title


def accepted() -> dict[str, tuple[float, float]]:
    """Losses of a step and of one device, for inputs whose dimension 0 is not the batch's, or equal on all ranks."""
    x, y, weight = numbers(0, 16, 8), classes(16), numbers(1, 4).abs()
    tokens = torch.randint(0, 4, (4, 6), generator=torch.Generator().manual_seed(2))

    def of_tokens(model: nn.Module, rows: Tensor, flat: Tensor) -> Tensor:
        return F.cross_entropy(model(F.one_hot(rows, 8).float()).flatten(0, 1), flat)

    def own_weight(model: nn.Module, rows: Tensor, target: Tensor, own: Tensor) -> Tensor:
        each = zg.local(lambda *given: F.cross_entropy(*given[:2], weight=given[2], reduction="none"))
        return each(model(rows), target, own).mean()

    plain: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], tuple[Tensor, ...]]] = {
        "a target for every position": (of_tokens, (tokens, tokens.flatten()), (part(tokens), part(tokens.flatten()))),
        "equal targets": (
            of_tokens,
            (tokens, torch.ones(24, dtype=torch.int64)),
            (part(tokens), torch.ones(12, dtype=torch.int64)),
        ),
        "in a local region": (own_weight, (x, y, weight), (part(x), part(y), weight)),
    }
    losses = {}
    for title, (loss, whole, own) in plain.items():
        torch.manual_seed(0)
        model = linear()
        expected = loss(model, *whole).item()
        losses[title] = step_of(model, loss)(*own).item(), expected
    return losses


def test_rows_of_another_number_that_mean_something_are_taken(pool: Pool) -> None:
    for losses in pool.run(2, accepted):
        for title, (loss, expected) in losses.items():
            assert loss == pytest.approx(expected, rel=1e-5), title


def warned_of() -> list[str]:
    """Warnings of two steps whose weights have as many rows as a rank's part of the batch."""
    x, y, weight = numbers(0, 8, 8), classes(8), numbers(1, 4, 1)

    def loss(model: nn.Module, rows: Tensor, target: Tensor, factor: Tensor) -> Tensor:
        return (F.cross_entropy(model(rows), target, reduction="none")[:, None] * factor).mean()

    step = step_of(linear(), loss)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(2):
            step(part(x), part(y), weight)
    return [str(one.message) for one in caught]


def test_a_small_input_that_is_equal_on_all_ranks_is_warned_of_once(pool: Pool) -> None:
    for messages in pool.run(2, warned_of):
        (message,) = [one for one in messages if "bitwise equal" in one]
        assert "args[2] of shape (4, 1) is bitwise equal on all 2 ranks" in message
        assert "zg.replicated(args[2])" in message


def differing_wholes() -> list[str]:
    x, y = numbers(0, 16, 8), classes(16)
    messages = []
    for last in (torch.tensor(1.0 + zg.rank()), zg.replicated(torch.ones(1) * zg.rank())):
        with pytest.raises(zg.InputError) as refused:
            step_of(linear(), scaled)(part(x), part(y), last)
        messages.append(str(refused.value))
    return messages


def test_what_is_whole_on_every_rank_must_be_equal(pool: Pool) -> None:
    for of_no_dimension, replicated in pool.run(2, differing_wholes):
        assert "args[2] of shape () is B, but differs between ranks 0, 1" in of_no_dimension
        assert "args[2].reshape(1)" in of_no_dimension
        assert "args[2] of shape (1,) is B, but differs between ranks 0, 1" in replicated


def test_replicated_takes_plain_tensors_only() -> None:
    with pytest.raises(zg.PlacementError, match="takes a tensor, not list"):
        zg.replicated([1.0])  # type: ignore[arg-type]
    x = torch.ones(3)
    assert torch.equal(zg.replicated(x), x)
    assert not hasattr(x, "_zerograph_replicated")


class Bags(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(11, 6, mode=mode), nn.Linear(6, 4)

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        out: Tensor = self.head(self.bags(indices, offsets))
        return out


def of_bags(model: nn.Module, indices: Tensor, offsets: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(indices, offsets), y)


# Several dimensions: every rank has a part of its own, or the ranks of a row share one.
ARRANGED: dict[str, tuple[Any, Any]] = {
    "a line": ([0, 1], None),
    "all split": ([[0, 1], [2, 3]], (zg.sbp.split(0), zg.sbp.split(0))),
    "the first splits": ([[0, 1], [2, 3]], (zg.sbp.split(0), zg.sbp.broadcast)),
    "the second splits": ([[0, 1], [2, 3]], (zg.sbp.broadcast, zg.sbp.split(0))),
}


def bags_of_parts(mode: str, arranged: str) -> tuple[list[float], list[float], list[float]]:
    """Losses of two steps: with offsets of each rank's own, with offsets in the whole batch, and on one device."""
    indices = torch.randint(0, 11, (32,), generator=torch.Generator().manual_seed(3))
    grid, input_sbp = ARRANGED[arranged]
    own = torch.tensor([[0, 1, 6, 6], [0, 4, 9, 13]] if arranged != "all split" else [[0, 1], [0, 4], [0, 7], [0, 0]])
    parts = len(own)
    whole = torch.cat([row + at * 32 // parts for at, row in enumerate(own)])
    y = classes(8)
    rank = zg.rank()
    at = {"a line": rank, "all split": rank, "the first splits": rank // 2, "the second splits": rank % 2}[arranged]

    def losses(offsets: Tensor) -> list[float]:
        torch.manual_seed(0)
        step = step_of(Bags(mode), of_bags)
        step.config.mesh.placement = zg.placement("cpu", ranks=grid)
        step.config.mesh.input_sbp = input_sbp
        given = indices.chunk(parts)[at], offsets.chunk(parts)[at], y.chunk(parts)[at]
        return [step(*given).item() for _ in range(2)]

    torch.manual_seed(0)
    model = Bags(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = [update_by(optimizer, of_bags(model, indices, whole, y)).item() for _ in range(2)]
    return losses(own.view(-1)), losses(whole), expected


@sliced(
    "mode, arranged",
    [("mean", "a line"), ("sum", "the first splits")],
    [("sum", one) for one in ARRANGED],
)
def test_offsets_of_bags_may_count_within_a_part_or_the_whole(pool: Pool, mode: str, arranged: str) -> None:
    for own, whole, expected in pool.run(2 if arranged == "a line" else 4, bags_of_parts, mode, arranged):
        assert own == pytest.approx(expected, rel=1e-5)
        assert whole == pytest.approx(expected, rel=1e-5)


def test_offsets_within_a_part_of_indices_that_are_computed_are_refused() -> None:
    step = Predict(Bags("sum"), lambda model, indices, offsets: model(indices % 11, offsets))
    line, given = mesh.line(2, 0, "both"), (torch.arange(8), torch.tensor([0, 4]))
    batch = batch_on(step, line, *given)
    with pytest.warns(UserWarning, match="no rule says how aten._embedding_bag"):
        captured = step.prepare(line, *given).captured
    rows = [[Values(number, False, 0, 20), Values(number, False, 0, 4)] for number in range(2)]
    with pytest.raises(zg.InputError, match=r"args\[1\] of shape \(2,\) has boundaries, the offsets of"):
        check_indices(captured, batch, 2, 1, compared(*rows), warn_nothing)
    rows[1][1] = Values(1, False, 8, 12)
    check_indices(captured, batch, 2, 1, compared(*rows), warn_nothing)


def warn_nothing(message: str) -> None:
    raise AssertionError(message)


def test_offsets_that_end_with_the_last_bag_are_refused() -> None:
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.EmbeddingBag(11, 4, include_last_offset=True)

        def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
            out: Tensor = self.bags(indices, offsets)
            return out

    step = step_of(Ends(), lambda model, indices, offsets: model(indices, offsets).mean())
    given = torch.arange(6), torch.tensor([0, 3, 6])
    step.prepare(mesh.line(1, 0, "one"), *given)
    with pytest.raises(zg.InputError, match=r"args\[1\] of shape \(3,\) has boundaries, the offsets of") as refused:
        step.prepare(mesh.line(2, 0, "both"), *given)
    assert "zg.local" in str(refused.value)


def test_offsets_are_not_cut_into_micro_batches() -> None:
    step = step_of(Bags("sum"), of_bags)
    step.config.gradient_accumulation_steps = 2
    with pytest.raises(zg.InputError, match="has boundaries, the offsets of"):
        step.prepare(mesh.line(1, 0, "one"), torch.arange(8), torch.tensor([0, 2, 4, 6]), classes(4))


def compared(values: list[Values], *others: list[Values]) -> Comparison:
    return Comparison([values, *others], [0, 1])


def checked(
    loss: Callable[..., Tensor], given: tuple[Tensor, ...], highest: tuple[int, int]
) -> tuple[list[str], str | None]:
    """(warnings, refusal) of two ranks, whose last inputs are positions from 0 to these."""
    step = Predict(nn.Linear(8, 4), loss)
    line = mesh.line(2, 0, "both")
    batch = batch_on(step, line, *given)
    captured = step.prepare(line, *given).captured
    others = [Values(0, False, 0, 0)] * (len(given) - 1)
    ranks = [[*others, Values(number, False, 0, high)] for number, high in enumerate(highest)]
    warned: list[str] = []
    try:
        check_indices(captured, batch, 2, 1, compared(*ranks), warned.append)
    except zg.InputError as error:
        return warned, str(error)
    return warned, None


def sources(model: nn.Module, x: Tensor, edges: Tensor) -> Tensor:
    return torch.as_tensor(model(x)[edges[:, 0]])


@pytest.mark.parametrize(("highest", "warns"), [((5, 5), True), ((5, 11), False), ((11, 5), False)])
def test_positions_of_which_no_rank_has_one_of_another_are_warned_of(highest: tuple[int, int], warns: bool) -> None:
    warned, refusal = checked(sources, (numbers(0, 6, 8), local_edges()), highest)
    assert refusal is None
    assert len(warned) == warns
    for word in ("args[1] of shape (24, 2)", "if they number the rows of each rank's part", "zg.local", "zg.to_global"):
        assert all(word in message for message in warned)


def test_labels_of_classes_are_not_warned_of() -> None:
    warned, refusal = checked(lambda model, x, y: F.cross_entropy(model(x), y), (numbers(0, 4, 8), classes(4)), (3, 3))
    assert (warned, refusal) == ([], None)
    picked = checked(lambda model, x, y: model(x).gather(1, y[:, None]), (numbers(0, 4, 8), classes(4)), (3, 3))
    assert picked == ([], None)


def unequal_batch() -> list[str]:
    messages = []
    for x, y in ((numbers(0, 8, 8), classes(6)), (numbers(0, 8 - 2 * zg.rank(), 8), classes(8 - 2 * zg.rank()))):
        step = step_of(linear(), lambda model, x, y: F.cross_entropy(model(x), y))
        step.config.dynamic_shapes = False
        with pytest.raises(zg.ZeroGraphError) as refused:
            step(x, y)
        messages.append(f"{type(refused.value).__name__}: {refused.value}")
    return messages


def test_unequal_batches_are_told_with_the_inputs_and_what_to_do(pool: Pool) -> None:
    for on_a_rank, between_ranks in pool.run(2, unequal_batch):
        for word in ("InputError", "args[0]: (8, 8)", "args[1]: (6,)", "F.cross_entropy", "test_plain_inputs.py"):
            assert word in on_a_rank
        for word in ("InputError", "args[0] has 8 on rank 0, 6 on rank 1", "drop_last=True", "pad"):
            assert word in between_ranks


def on_rank_0_only(call: str) -> str:
    step = step_of(linear(), lambda model, x, y: F.cross_entropy(model(x), y))
    x, y = numbers(0, 8, 8), classes(8)
    step(part(x), part(y))

    def other() -> None:
        with step.full_parameters() if call == "full_parameters" else contextlib.nullcontext(step.state_dict()):
            pass

    with pytest.raises(zg.RankMismatchError) as refused:
        step(part(x), part(y)) if zg.rank() else other()
    step(part(x), part(y))
    return str(refused.value)


@pytest.mark.parametrize("call", ["full_parameters", "state_dict"])
def test_a_call_of_one_rank_only_is_an_error_at_once_and_training_may_go_on(pool: Pool, call: str) -> None:
    for message in pool.run(2, on_rank_0_only, call):
        for word in (f"{call}()", "rank 1: step 2", "if rank == 0"):
            assert word in message
