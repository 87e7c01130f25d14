"""Random numbers: those of one device whatever the number of ranks, anew at each step, again from the same seed."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerograph as zg
from tests.harness import Function, LossStep, needs_compiler
from tests.models import TrainStep, batches, part
from tests.pool import Pool
from zerograph.ir.mesh import Mesh, local_part, local_shape, local_start
from zerograph.ir.sbp import Split, broadcast
from zerograph.ops.random import uniform

CPU = torch.device("cpu")


def draw(seed: int, number: int, whole: list[int], dtype: torch.dtype = torch.float64) -> Tensor:
    return uniform(torch.tensor(seed), number, whole, [0] * len(whole), whole, dtype, CPU)


def test_the_numbers_are_uniform_and_independent() -> None:
    n = 2**16
    # Neighbouring seeds, operators and elements: what a poor hash would show.
    streams = {(seed, number): draw(seed, number, [n]) for seed in (0, 1, -1, 2**40) for number in (0, 1, 2)}
    sigma = 1 / math.sqrt(12)
    for values in streams.values():
        assert 0 <= float(values.min()) < 10 / n
        assert 1 - 10 / n < float(values.max()) < 1
        assert abs(float(values.mean()) - 0.5) < 5 * sigma / math.sqrt(n)
        # The variance of (u - 1/2)^2 is 1/180.
        assert abs(float(values.var()) - 1 / 12) < 5 / math.sqrt(180 * n)
        for lag in (1, 2, 3, 64, 4096):
            assert abs(correlation(values[:-lag], values[lag:])) < 5 / math.sqrt(n)
        # Each of the first 32 bits is as often 1 as 0; neighbouring bits agree as often as not.
        bits = (values * 2**32).long().unsqueeze(1) >> torch.arange(32) & 1
        assert float((bits.double().mean(0) - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(n)
        assert float(((bits[:, 1:] == bits[:, :-1]).double().mean(0) - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(n)
        counts = torch.bincount((values * 256).long(), minlength=256).double()
        chi_square = float(((counts - n / 256) ** 2).sum() / (n / 256))
        assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)
    for one, other in itertools.combinations(streams.values(), 2):
        for shift in (0, 1, 17):
            assert abs(correlation(one[: n - shift], other[shift:])) < 5 / math.sqrt(n)


def correlation(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_no_number_is_one(dtype: torch.dtype) -> None:
    values = draw(3, 0, [2**16], dtype)
    assert float(values.max()) < 1
    # The same numbers with fewer bits.
    assert float((draw(3, 0, [2**16]) - values.double()).abs().max()) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("whole", [[8], [4, 6, 8], [2, 4, 1, 6], [4, 300_000], [2, 2, 140_000]])
def test_a_piece_holds_the_numbers_of_its_place(whole: list[int]) -> None:
    everything = draw(5, 7, whole, torch.float32)
    for dim, size in enumerate(whole):
        for ranks in (ranks for ranks in (2, 4) if size % ranks == 0):
            shape, start = list(whole), [0] * len(whole)
            shape[dim] = size // ranks
            for rank in range(ranks):
                start[dim] = rank * shape[dim]
                piece = uniform(torch.tensor(5), 7, shape, start, whole, torch.float32, CPU)
                assert torch.equal(piece, everything.narrow(dim, start[dim], shape[dim]))


def test_a_piece_on_a_mesh_holds_the_numbers_of_its_place() -> None:
    whole = [8, 4, 6]
    everything = draw(5, 7, whole, torch.float32)
    for sbp in ((Split(0), Split(0)), (Split(1), Split(0)), (Split(2), broadcast), (broadcast, Split(1))):
        for position in itertools.product(range(2), range(2)):
            mesh = Mesh((2, 2), position, ("", ""))
            size, start = local_shape(whole, sbp, mesh), local_start(whole, sbp, mesh)
            piece = uniform(torch.tensor(5), 7, size, start, whole, torch.float32, CPU)
            assert torch.equal(piece, everything[local_part(whole, sbp, mesh)])


N = 40_000


def many_kinds(x: Tensor) -> dict[str, Tensor]:
    weights = torch.tensor([0.1, 0.0, 0.6, 0.3]).expand(N, 4)
    return {
        "dropout": F.dropout(x, 0.25),
        "rand": torch.rand(N, dtype=torch.float64),
        "randn": torch.randn_like(x),
        "normal": torch.normal(x * 3, 2.0),
        "uniform": torch.empty(N).uniform_(2, 4),
        "exponential": torch.empty(N).exponential_(2.0),
        "geometric": torch.empty(N).geometric_(0.25),
        "bernoulli": torch.bernoulli(x * 0.3),
        "randint": torch.randint(3, 7, (N,)),
        "log_normal": torch.empty(N).log_normal_(0.0, 0.5),
        "one of four": torch.multinomial(weights, 1),
        "again": torch.multinomial(weights, 2, replacement=True),
        "two of four": torch.multinomial(weights, 2),
        "randperm": torch.randperm(N),
        "cauchy": torch.empty(N).cauchy_().atan(),
    }


# What is drawn there, and its mean and variance by the textbook.
MOMENTS = {
    "dropout": (1, 0.25 / 0.75),
    "rand": (0.5, 1 / 12),
    "randn": (0, 1),
    "normal": (3, 4),
    "uniform": (3, 4 / 12),
    "exponential": (0.5, 0.25),
    "geometric": (4, 0.75 / 0.25**2),
    "bernoulli": (0.3, 0.21),
    "randint": (4.5, 15 / 12),
    "log_normal": (math.exp(0.125), (math.exp(0.25) - 1) * math.exp(0.25)),
    "one of four": (2.1, 0.69),
    "again": (2.1, 0.69),
    "cauchy": (0, math.pi**2 / 12),
}


def test_every_kind_of_draw_has_its_distribution() -> None:
    graph = Function(many_kinds, seed=1)
    drawn, again = graph(torch.ones(N)), graph(torch.ones(N))
    for name, (mean, variance) in MOMENTS.items():
        values = drawn[name].double().flatten()
        assert abs(float(values.mean()) - mean) < 6 * math.sqrt(variance / len(values)), name
        assert abs(float(values.var()) / variance - 1) < 0.06, name
        assert not torch.equal(values, again[name].double().flatten())
    assert torch.equal(drawn["randperm"].sort().values, torch.arange(N))
    assert set(drawn["geometric"].tolist()) >= {1.0, 2.0, 3.0}
    assert drawn["randint"].unique().tolist() == [3, 4, 5, 6]
    for name in ("one of four", "again", "two of four"):
        assert 1 not in drawn[name]
    assert bool((drawn["two of four"][:, 0] != drawn["two of four"][:, 1]).all())


def noisy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 15), nn.GELU(), nn.Dropout(0.4), nn.LayerNorm(15), nn.Linear(15, 3))


def train_noisily(stages: list[int]) -> list[list[Tensor]]:
    """Losses of each stage; every rank seeds differently, and rank 0's seed counts."""
    found = []
    for stage in stages:
        model = noisy()
        torch.manual_seed(10 + zg.rank())
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.3), stage)
        found.append([step(part(x), part(y)) for x, y in batches("mlp", 4)])
    return found


def masks(x: Tensor) -> Any:
    ones = torch.ones(4, 6)
    return F.dropout(x, 0.5), F.dropout(x, 0.5), F.dropout(ones, 0.5), torch.randn(4, 6), F.dropout(x.t(), 0.5).t()


def on_two_ranks() -> dict[str, Any]:
    graph = Function(masks, seed=3)
    return {
        "trained": train_noisily([0, 2]),
        "masks": [graph(part(torch.ones(8, 6))) for _ in range(2)],
        "resumed": resumed(),
    }


def resumed() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Losses of four steps at once, of the last two after a restart, and of these with another seed."""
    data = batches("mlp", 4)

    def start(manual_seed: int, **options: Any) -> TrainStep:
        model = noisy()
        torch.manual_seed(manual_seed)
        return TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.3), 3, **options)

    step = start(1)
    losses = [step(part(x), part(y)) for x, y in data[:2]]
    state = step.state_dict()
    losses += [step(part(x), part(y)) for x, y in data[2:]]
    found = []
    for other in (start(2), start(2, seed=99)):
        other.load_state_dict(state)
        found.append([other(part(x), part(y)) for x, y in data[2:]])
    return losses, found[0], found[1]


def test_two_ranks_draw_what_one_device_draws(pool: Pool) -> None:
    first, second = pool.run(2, on_two_ranks)
    alone = train_noisily([0])[0]
    for losses in (*first["trained"], *second["trained"]):
        torch.testing.assert_close(losses, alone, rtol=1e-6, atol=0)
        assert all(map(torch.equal, losses, first["trained"][0])), "a stage or a rank has losses of its own"
    graph = Function(masks, seed=3)
    for one, other in zip(first["masks"], second["masks"], strict=True):
        alone = graph(torch.ones(8, 6))
        for index, split in enumerate((True, True, False, False, True)):
            found = torch.cat([one[index], other[index]]) if split else one[index]
            assert torch.equal(found, alone[index])
            assert split or torch.equal(one[index], other[index])
        assert not torch.equal(alone[0], alone[1]), "two operators draw the same"
    once, again = first["masks"]
    assert not any(map(torch.equal, once, again)), "two steps draw the same"
    losses, after_restart, other_seed = first["resumed"]
    assert all(map(torch.equal, after_restart, losses[2:]))
    assert not any(map(torch.equal, other_seed, losses[2:]))


def test_the_seed_decides() -> None:
    x = torch.ones(4, 8)

    def drawn(manual_seed: int, **options: Any) -> list[Tensor]:
        graph = Function(lambda x: F.dropout(x, 0.5), **options)
        torch.manual_seed(manual_seed)
        found = [graph(x)]
        # What is drawn outside, or another shape of the batch, changes nothing.
        torch.manual_seed(77)
        graph.compile(torch.ones(2, 8))
        return [*found, graph(x)]

    first = drawn(1)
    assert not torch.equal(first[0], first[1])
    assert all(map(torch.equal, first, drawn(1)))
    assert not any(map(torch.equal, first, drawn(2)))
    assert all(map(torch.equal, drawn(1, seed=5), drawn(2, seed=5)))
    graph = Function(lambda x: F.dropout(x, 0.5), seed=5)
    graph(x)
    graph.config.seed = 6
    assert not torch.equal(graph(x), drawn(1, seed=5)[1])


def test_a_state_without_random_numbers_still_loads() -> None:
    graph = Function(lambda x: F.dropout(x, 0.5), seed=5)
    state = graph.state_dict()
    del state["random"]
    x = torch.ones(4, 8)
    first = graph(x)
    graph.load_state_dict(state)
    assert not torch.equal(graph(x), first), "the calls go on being counted"


def test_evaluation_draws_nothing() -> None:
    model = noisy().eval()
    graph = Function(model)
    graph.model = model
    x = batches("mlp", 1)[0][0]
    assert torch.equal(graph(x), graph(x))
    assert "seed" not in {node.meta["role"].kind for node in graph.inspect.graph.graph.find_nodes(op="placeholder")}


@needs_compiler
def test_backends_draw_the_same_numbers_anew_at_each_step() -> None:
    def function(x: Tensor) -> Tensor:
        return F.dropout(x * 2, 0.25) + torch.rand_like(x)

    x = torch.ones(6, 8)
    found = {}
    for backend in ("eager", "inductor"):
        graph = Function(function, seed=1, backend=backend)
        with warnings.catch_warnings(action="ignore"):
            found[backend] = [graph(x), graph(x)]
    torch.testing.assert_close(found["inductor"], found["eager"])
    for one, other in found.values():
        assert not torch.equal(one == 0, other == 0) or not torch.allclose(one, other)


def checkpointed(recompute: bool) -> LossStep:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
        return F.dropout(y, 0.5).square().mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
    return LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)


def test_what_a_checkpoint_computes_again_has_the_same_mask() -> None:
    x = torch.arange(24.0).view(4, 6) / 24
    kept, again = checkpointed(False), checkpointed(True)
    assert [float(kept(x)) for _ in range(3)] == [float(again(x)) for _ in range(3)]
    drawn = again.inspect.graph_after("capture").graph.find_nodes(op="call_function", target=uniform)
    assert [node.args[1] for node in drawn] == [0, 1, 0]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: torch.poisson(x), ["aten.poisson", "torch.poisson(x)", "outside build()"]),
        (lambda x: torch.rand(3, generator=torch.Generator()), ["generator=", "torch.Generator()"]),
        (lambda x: x.clone().bernoulli_(0.5, generator=torch.Generator()), ["generator=", "bernoulli_"]),
        (lambda x: (torch.manual_seed(0), torch.rand(3))[1], ["config.seed", "torch.manual_seed(0)"]),
        (lambda x: torch.randn(3, dtype=torch.complex64), ["complex64", "cast"]),
        (lambda x: torch.empty(3).random_(), ["aten.random", "random_()"]),
    ],
)
def test_draws_that_no_graph_can_repeat(function: Callable[[Tensor], Tensor], words: list[str]) -> None:
    before = torch.get_rng_state(), torch.get_rng_state
    with pytest.raises(zg.CaptureError) as error:
        Function(function)(torch.ones(4))
    for word in words:
        assert word in str(error.value)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_rng_state is before[1]
