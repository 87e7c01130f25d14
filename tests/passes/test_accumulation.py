"""The loop over micro-batches in the emitted graph: what stands before it, in its body, and behind it."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import zerograph as zg
from tests.harness import LossStep, set_stage
from tests.models import Gpt, TrainStep, part
from tests.peak_memory import most_alive_bytes
from tests.pool import Pool
from zerograph.ir.loop import loops
from zerograph.ir.mesh import Mesh
from zerograph.ir.sbp import Split, broadcast
from zerograph.ir.step_graph import is_collective, output_nodes
from zerograph.passes.accumulation.time_boxing import route_with_time

SAMPLES = 16
STAGES = (0, 1, 2, 3)
Kinds = Counter[str]


@dataclass(frozen=True)
class Seen:
    """The graph and a run of one stage and number of micro-batches.

    Attributes:
        before, body, behind: kinds of the collectives of whole buckets there.
        listed: of all that ``collectives()`` lists.
        nodes: of the graph and its body.
        memory, live: what is predicted, and the bytes alive at the peak of a step that runs.
    """

    before: Kinds
    body: Kinds
    behind: Kinds
    listed: Kinds
    nodes: int
    memory: zg.Memory
    live: int


def see() -> dict[tuple[int, int], Seen]:
    torch.manual_seed(0)
    model = Gpt(tied=False, vocabulary=64, width=32, layers=1, context=16)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_size=16384)
    drawn = torch.randint(64, (SAMPLES, 17), generator=torch.Generator().manual_seed(1))
    x, y = part(drawn[:, :-1]).contiguous(), part(drawn[:, 1:]).contiguous()
    found = {}
    for stage, micro_batches in [(3, 1), *((stage, 2) for stage in STAGES), (3, 8)]:
        set_stage(step, stage)
        step.config.gradient_accumulation_steps = micro_batches
        step(x, y)
        graph = step.inspect.graph.graph
        inner = list(loops(graph))
        at = next((node for node in graph.nodes if node.op == "call_module"), graph.output_node())
        outer = list(filter(is_collective, graph.nodes))
        found[stage, micro_batches] = Seen(
            kinds([node for node in outer if node < at]),
            kinds([node for one in inner for node in one.body.graph.nodes if is_collective(node)]),
            kinds([node for node in outer if node > at]),
            Counter(one.kind for one in step.inspect.collectives() if one.tensors[0].startswith("model.")),
            step.inspect.passes[-1].nodes,
            step.inspect.memory,
            most_alive_bytes(step, x, y),
        )
    return found


def kinds(nodes: list[fx.Node]) -> Kinds:
    return Counter(node.meta["boxing"].kind for node in nodes if "bucket" in node.meta["boxing"].tensor.name)


@functools.cache
def seen(pool: Pool) -> dict[tuple[int, int], Seen]:
    found: dict[tuple[int, int], Seen] = pool.run(2, see)[0]
    return found


def test_stage_1_and_data_parallel_reduce_once_behind_the_loop(pool: Pool) -> None:
    for stage, kind in ((0, "all-reduce"), (1, "reduce-scatter")):
        one = seen(pool)[stage, 2]
        assert not one.body
        assert set(one.behind) == {kind}
        assert one.behind[kind] > 2


def test_stages_2_and_3_reduce_in_the_body_and_sum_shards(pool: Pool) -> None:
    for stage in (2, 3):
        one = seen(pool)[stage, 2]
        assert not one.behind
        assert one.body["reduce-scatter"] == seen(pool)[1, 2].behind["reduce-scatter"]


def test_only_stage_3_gathers_for_every_micro_batch(pool: Pool) -> None:
    buckets = seen(pool)[1, 2].behind["reduce-scatter"]
    for stage in (1, 2):
        assert seen(pool)[stage, 2].before == {"all-gather": buckets}
    three = seen(pool)[3, 2]
    # Forward and backward; embeddings and biases alone in a bucket have no use in backward.
    assert buckets < three.body["all-gather"] <= 2 * buckets
    # Embedded positions are the same for all micro-batches: better embedded again than gathered for before the loop.
    assert not three.before


def test_a_collective_in_the_body_is_listed_for_every_micro_batch(pool: Pool) -> None:
    for micro_batches in (2, 8):
        one = seen(pool)[3, micro_batches]
        inside = Counter({kind: micro_batches * count for kind, count in one.body.items()})
        assert one.listed == one.before + inside + one.behind


def test_the_graph_does_not_grow_with_the_micro_batches(pool: Pool) -> None:
    assert seen(pool)[3, 2].nodes == seen(pool)[3, 8].nodes


def test_activations_are_those_of_one_micro_batch(pool: Pool) -> None:
    whole = seen(pool)[3, 1].memory.kinds["activations"]
    for micro_batches in (2, 8):
        one = seen(pool)[3, micro_batches]
        # What no micro-batch differs in (embedded positions, ...) is little.
        assert one.memory.kinds["activations"] < 1.25 * whole / micro_batches
    assert seen(pool)[3, 1].live - seen(pool)[3, 8].live > 0.7 * whole


def test_the_predicted_peak_is_that_of_live_tensors(pool: Pool) -> None:
    for one in seen(pool).values():
        assert one.memory.peak == pytest.approx(one.live, rel=0.01)
        assert sum(one.memory.kinds.values()) == one.memory.peak


class Step(LossStep):
    """A step over two micro-batches on one rank, whose loss is given."""

    def __init__(self, loss: Callable[[nn.Module, Tensor, Tensor], Tensor], model: nn.Module | None = None) -> None:
        model = model or nn.Linear(3, 2)
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, gradient_accumulation_steps=2)


X, Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, -100, 1])


def test_rows_that_time_and_ranks_cut_are_joined_before_ranks_exchange_them() -> None:
    """A rank's part of a micro-batch is no slice of its part of the batch; one rank has all of it."""
    rows, change = Split(0), {"shape": (12, 4), "itemsize": 4, "first": 0, "ranks_first": False}
    one, two = (
        route_with_time((rows, rows), (broadcast, rows), mesh=Mesh((ranks, 3), (0, 0), ("ranks", "time")), **change)
        for ranks in (1, 2)
    )
    assert one == ((broadcast, rows),)
    assert two == ((rows, broadcast), (broadcast, broadcast), (broadcast, rows))


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def test_a_count_over_the_batch_is_made_before_the_loop() -> None:
    step = Step(cross_entropy)
    step.compile(X, Y)
    graph = step.inspect.graph.graph
    (loop,) = loops(graph)
    (called,) = graph.find_nodes(op="call_module")
    shapes = [node.meta["val"].shape for node in graph.nodes if node < called and "ne." in str(node.target)]
    assert shapes == [(4,)]
    # A graph of one micro-batch, which writes what it leaves and returns nothing.
    assert output_nodes(loop.body.graph) == []
    assert {tuple(node.meta["val"].shape) for node in loop.body.graph.find_nodes(op="placeholder")} >= {(2, 3), (2,)}
    assert "2 micro-batches" in str(step.inspect.graph)
    assert "accumulate" in str(step.inspect.graph)


def contrastive(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return (out @ out.T).logsumexp(1).mean()


def root_mean_square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).square().mean().sqrt()


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).square().mean()


def frozen() -> nn.Module:
    """Nothing before the batch norm is trained."""
    return nn.Sequential(nn.Linear(3, 2).requires_grad_(False), nn.BatchNorm1d(2))


@torch.library.custom_op("zerograph_tests::unruly", mutates_args=())
def unruly(x: Tensor) -> Tensor:
    """An operator that has no rule."""
    return x * 2


unruly.register_fake(torch.empty_like)
unruly.register_autograd(lambda ctx, gradient: unruly(gradient))


def without_rule(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return unruly(model(x)).square().mean()


def of_sorted_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    whole = x.sort(0).values
    return model(whole).square().mean()


@pytest.mark.parametrize(
    ("loss", "model", "words"),
    [
        (contrastive, None, ["aten.", "out @ out.T", "zg.local"]),
        (root_mean_square, None, ["needs the whole batch", "model(x).square().mean().sqrt()"]),
        (squares, nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), ["batch_norm = 'local'", "model(x).square()"]),
        (squares, frozen(), ["batch_norm = 'local'", "model(x).square()"]),
        (without_rule, None, ["unruly", "zg.register_rule"]),
        (of_sorted_rows, None, ["aten.addmm", "return model(whole)"]),
    ],
)
def test_what_needs_the_whole_batch_is_refused(loss: Any, model: nn.Module | None, words: list[str]) -> None:
    step = Step(loss, model)
    before = [parameter.clone() for parameter in step.model.parameters()]
    with pytest.raises(zg.PlacementError) as raised:
        step(X, Y)
    for word in [*words, "2 micro-batches", "gradient_accumulation_steps to 1"]:
        assert word in str(raised.value)
    assert all(map(torch.equal, before, step.model.parameters()))
    assert step.steps_done == 0
    # Nothing has been changed that would keep it from going on as one batch.
    step.config.gradient_accumulation_steps = 1
    with warnings.catch_warnings():
        # On one rank an operator without a rule is no matter.
        warnings.simplefilter("error")
        step(X, Y)


def test_what_nobody_trains_on_may_need_the_whole_batch() -> None:
    """Behind the loop everything is there: only what micro-batches wait for is refused."""

    class Watched(Step):
        def build(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            loss = cross_entropy(self.model, x, y)
            loss.backward()
            out = self.model(x)
            return {"perplexity": loss.exp(), "similar": out @ out.T, "shares": (out / out.sum()).exp(), "out": out}

    step = Watched(cross_entropy)
    before = nn.Linear(3, 2)
    before.load_state_dict({name: value.clone() for name, value in step.model.state_dict().items()})
    found = step(X, Y)
    out = before(X)
    wanted = {
        "perplexity": F.cross_entropy(out, Y).exp(),
        "similar": out @ out.T,
        # It reads a value that another node computes after the loop.
        "shares": (out / out.sum()).exp(),
        "out": out,
    }
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-6, atol=1e-6)


def test_what_a_count_over_the_batch_divides_stays_in_the_loop() -> None:
    """The count is there before the first micro-batch."""

    class Divided(Step):
        def build(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().build(x, y), self.model(x) / (y >= 0).sum()

    step = Divided(cross_entropy)
    step.compile(X, Y)
    graph = step.inspect.graph.graph
    (loop,) = loops(graph)
    divided = [[node for node in one.nodes if "div" in str(node.target)] for one in (loop.body.graph, graph)]
    assert (2, 2) in [node.meta["val"].shape for node in divided[0]]
    assert (4, 2) not in [node.meta["val"].shape for node in divided[1]]
