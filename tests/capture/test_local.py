"""Local regions: every rank computes on its own part, and gradients are those of the sum over the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep
from tests.models import part, update_by
from tests.pool import Pool
from zerograph.ir.region import local

RANKS = 2


class Routed(nn.Module):
    """Sends each token to its best expert, which takes the first few and drops the rest: places are per rank."""

    def __init__(self, width: int = 6, experts: int = 3, capacity: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 8) / 3)
        self.down = nn.Parameter(torch.randn(experts, 8, width) / 3)
        self.capacity = capacity
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        shares = self.router(tokens).softmax(-1)
        best = F.one_hot(shares.argmax(-1), shares.shape[-1])
        place = best.cumsum(0) * best - 1
        taken = (place.unsqueeze(-1) == torch.arange(self.capacity)).to(x.dtype)
        inside = F.gelu(torch.einsum("tec,tw->ecw", taken, tokens) @ self.up) @ self.down
        out = torch.einsum("tec,ecw,te->tw", taken, inside, shares) * self.scale
        # How full the experts are, weighted by the router's shares: summed over all tokens of all ranks.
        return out.view(x.shape), (shares * best).sum()


class Model(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda module: module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.routed = wrap(Routed())
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, load = self.routed(self.first(x))
        return self.last(x + out).square().mean() + 0.01 * load


def as_region(module: nn.Module) -> nn.Module:
    return zg.local(module, outputs=[zg.sbp.split(0), zg.sbp.partial_sum])


def data(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 5, 6, generator=generator) for _ in range(count)]


class Forward(zg.ZeroGraph):
    """A forward graph whose build() is given."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self._function = function
        for name, value in members.items():
            setattr(self, name, value)

    def build(self, *args: Tensor, **kwargs: Tensor) -> Any:
        return self._function(*args, **kwargs)


def nothing_gathered(step: zg.ZeroGraph, parameters: set[str]) -> bool:
    """Return True if all collectives are of parameters, of their gradients, or of a few scalars."""
    return all(one.tensor_bytes <= 8 or set(one.tensors) <= parameters for one in step.inspect.collectives())


def on_two_ranks() -> dict[str, Any]:
    trained = []
    for stage in (0, 3):
        model = Model(as_region)
        step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.5), stage)
        losses = [step(part(x)) for x in data()]
        names = {name for name, _ in step.model.named_parameters()}
        state = step.state_dict()["modules"]["model"]
        trained.append((losses, state, nothing_gathered(step, {f"model.{name}" for name in names})))
    ones = torch.ones(8, 6)
    noise = Forward(lambda x: (zg.local(lambda x: F.dropout(x, 0.5))(x), F.dropout(x, 0.5)))
    noise.config.seed = 3
    means = Forward(
        lambda x, weight, offset: zg.local(
            lambda x, weight, *, offset: {"y": (x @ weight + offset, "name"), "n": x.mean(0) / RANKS},
            inputs=[zg.sbp.split(0), zg.sbp.broadcast, zg.sbp.broadcast],
            outputs=[zg.sbp.split(0), zg.sbp.partial_sum],
        )(x, weight, offset=offset)
    )
    weight = zg.to_global(torch.eye(6), placement=zg.placement("cpu", ranks=[0, 1]), sbp=zg.sbp.broadcast)
    x = zg.to_global(part(ones), placement=zg.placement("cpu", ranks=[0, 1]), sbp=zg.sbp.split(0))
    nested = means(x, weight, torch.tensor(2.0))
    with pytest.raises(zg.CaptureError, match=r"\(3, 6\) as S\(0\), which 2 ranks cannot part"):
        Forward(lambda x: zg.local(torch.relu)(torch.zeros(3, 6)) + x.sum())(part(ones))
    return {
        "trained": trained,
        "noise": noise(part(ones)),
        "nested": (nested["y"][0].to_local(), nested["y"][1], nested["n"].to_local(), str(nested["n"].placements)),
    }


def parts_trained(ranks: int = RANKS) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Plain PyTorch: each part of the batch is routed for itself, in one backward."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for x in data():
        optimizer.zero_grad()
        parts = [model.routed(own) for own in model.first(x).chunk(ranks)]
        out = torch.cat([one for one, _ in parts])
        loss = model.last(x + out).square().mean() + 0.01 * sum(load for _, load in parts)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, model.state_dict()


def test_ranks_route_their_own_tokens(pool: Pool) -> None:
    first, second = pool.run(RANKS, on_two_ranks)
    losses, state = parts_trained()
    model = Model()
    whole = model(data()[0]).detach()
    assert not torch.allclose(whole, losses[0], rtol=1e-4), "routing the whole batch at once is something else"
    for found, parameters, clean in first["trained"]:
        torch.testing.assert_close(found, losses, rtol=1e-6, atol=0)
        renamed = {name.replace("routed.", "routed.inner."): value for name, value in state.items()}
        torch.testing.assert_close(dict(parameters), renamed, rtol=1e-5, atol=1e-6)
        assert clean
    assert all(map(torch.equal, first["trained"][0][0], first["trained"][1][0])), "stages differ"
    # Where a region draws, ranks draw differently: here what one device would draw on the whole batch.
    alone = Forward(lambda x: F.dropout(x, 0.5))
    alone.config.seed = 3
    assert torch.equal(torch.cat([first["noise"][0], second["noise"][0]]), alone(torch.ones(8, 6)))
    assert not torch.equal(first["noise"][0], first["noise"][1])
    y, name, mean, placements = first["nested"]
    assert torch.equal(y, torch.full((4, 6), 3.0))
    assert name == "name"
    assert torch.equal(mean, torch.ones(6))
    assert "Replicate" in placements


def on_a_grid() -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    grid, model = zg.placement("cpu", ranks=[[0, 1], [2, 3]]), Model(as_region)
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.5), 3, placement=grid)
    losses = [step(part(x)) for x in data()]
    noise = Forward(lambda x: zg.local(lambda x: F.dropout(x, 0.5))(x))
    noise.config.seed, noise.config.mesh.placement = 3, grid
    same_rows = Forward(lambda x: zg.local(torch.relu)(x))
    same_rows.config.mesh.placement, same_rows.config.mesh.input_sbp = grid, (zg.sbp.split(0), zg.sbp.broadcast)
    with pytest.raises(zg.PlacementError, match="along a dimension of the placement ranks have the same rows"):
        same_rows(torch.ones(4, 6))
    return losses, step.state_dict()["modules"]["model"], noise(part(torch.ones(8, 6)))


def test_ranks_of_a_grid_route_their_own_tokens(pool: Pool) -> None:
    everybody = pool.run(4, on_a_grid)
    losses, state = parts_trained(4)
    for found, parameters, _ in everybody:
        torch.testing.assert_close(found, losses, rtol=1e-6, atol=0)
        renamed = {name.replace("routed.", "routed.inner."): value for name, value in state.items()}
        torch.testing.assert_close(dict(parameters), renamed, rtol=1e-5, atol=1e-6)
    alone = Forward(lambda x: F.dropout(x, 0.5))
    alone.config.seed = 3
    assert torch.equal(torch.cat([noise for _, _, noise in everybody]), alone(torch.ones(8, 6)))


def test_one_rank_computes_what_the_module_computes() -> None:
    model, plain = Model(as_region), Model()
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.5), 2)
    for x in data(1):
        torch.testing.assert_close(step(x), plain(x).detach())
    assert step.inspect.graph_after("capture").graph.find_nodes(op="call_function", target=local)
    assert not step.inspect.graph.graph.find_nodes(op="call_function", target=local)


def test_outside_a_graph_a_region_is_what_it_was() -> None:
    module = Routed()
    wrapped = as_region(module)
    x = data(1)[0]
    assert torch.equal(wrapped(x)[0], module(x)[0])
    assert [name for name, _ in wrapped.named_parameters()] == [
        f"inner.{name}" for name, _ in module.named_parameters()
    ]
    assert zg.local(torch.relu)(torch.tensor(-1.0)) == 0


def test_a_region_without_gradients_saves_nothing() -> None:
    graph = Forward(lambda x: zg.local(graph.model)(x).sum(), model=nn.Sequential(nn.Linear(6, 6), nn.GELU()))
    with torch.no_grad():
        wanted = graph.model(torch.ones(4, 6)).sum()
    torch.testing.assert_close(graph(torch.ones(4, 6)), wanted.detach())


def reads_another_tensor(x: Tensor) -> Tensor:
    y = x * 2
    return zg.local(lambda x: x + y)(x)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (reads_another_tensor, ["(4, 6)", "not among its arguments", "zg.local(lambda x: x + y)(x)"]),
        (lambda x: zg.local(lambda x: x.sum())(x), ["shape ()", "declared S(0)", "partial_sum"]),
        (lambda x: zg.local(torch.add, inputs=[zg.sbp.split(0)])(x, x), ["1 SBPs for 2 tensors", "torch.add"]),
        (lambda x: zg.local(COUNTING)(x), ["buffer", "in place"]),
        (lambda x: zg.local(lambda x: x[x > 0])(x), ["depends on values", "x[x > 0]"]),
        (lambda x: zg.local(torch.poisson)(x), ["aten.poisson"]),
    ],
)
def test_regions_that_cannot_be(function: Callable[[Tensor], Tensor], words: list[str]) -> None:
    with pytest.raises(zg.CaptureError) as error:
        Forward(function, counting=COUNTING)(torch.ones(4, 6))
    for word in words:
        assert word in str(error.value)


COUNTING = Counting()


def routed_mixtral() -> LossStep:
    model = mixtral()
    for layer in model.model.layers:
        layer.mlp = zg.local(layer.mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    return LossStep(model, optimizer, 2, lambda model, tokens: model(input_ids=tokens, labels=tokens).loss)


def mixtral() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**sizes, **heads, **experts, use_cache=False)
    # The loop over the experts that got tokens has a shape that depends on values.
    config._experts_implementation = "batched_mm"
    return transformers.MixtralForCausalLM(config).train()


def tokens() -> Tensor:
    return torch.randint(61, (4, 12), generator=torch.Generator().manual_seed(1))


def train_mixtral() -> tuple[list[Tensor], list[zg.Collective]]:
    with warnings.catch_warnings(action="ignore"):
        step = routed_mixtral()
        losses = [step(part(tokens())) for _ in range(3)]
    return losses, [one for one in step.inspect.collectives() if "mlp" in str(one.tensors) and len(one.tensors) == 1]


def test_mixtral_routes_without_gathering_tokens(pool: Pool) -> None:
    pytest.importorskip("transformers")
    model = mixtral()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    wanted = [update_by(optimizer, model(input_ids=tokens(), labels=tokens()).loss) for _ in range(3)]
    routed, gathered = pool.run(RANKS, train_mixtral)[0]
    torch.testing.assert_close(routed, wanted, rtol=2e-6, atol=0)
    assert gathered == []
