"""OneFlow's own graph tests of clipping, reused variables, random numbers, saving and ZeRO, on CPUs.

Their files: test_graph_clip_grad_norm.py, _reuse_var.py, _random_seed.py, _save_load.py, _zero.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zerograph as zg
import zerograph.compat.oneflow as flow
from tests.compat.oneflow.samples import LossGraph
from tests.harness import sliced
from tests.pool import Pool
from zerograph.compat.oneflow import nn
from zerograph.compat.oneflow.nn.graph import GraphModule, GraphTensor

B, S0 = flow.sbp.broadcast, flow.sbp.split(0)
INF = float("inf")


class First(nn.Module):
    def __init__(self, param: Tensor) -> None:
        super().__init__()
        self.param = nn.Parameter(param)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x @ self.param.t())


class Second(nn.Module):
    def __init__(self, param: Tensor) -> None:
        super().__init__()
        self.param = nn.Parameter(param)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(x @ self.param, y)


class Clips(nn.Graph):
    def __init__(self, first: Any, second: Any, optimizer: Any, micro_batches: int) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.add_optimizer(optimizer)
        self.config.backend = "eager"
        self.config.set_gradient_accumulation_steps(micro_batches)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.second(self.first(x), y)
        loss.backward()
        return loss


def clipping(first: Any, second: Any, norm_type: float, max_norm: float) -> Any:
    clip = {"clip_grad_max_norm": max_norm, "clip_grad_norm_type": norm_type}
    return flow.optim.SGD([{"params": [first.param, second.param], "lr": 1.0, "momentum": 0.0, **clip}])


def clipping_data() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, one, other = (torch.randn(8, 10, generator=generator, dtype=torch.float64) for _ in range(3))
    return x, torch.randint(0, 10, (8,), generator=generator), one, other


def clipped_eagerly(norm_type: float, max_norm: float) -> list[Tensor]:
    x, y, one, other = clipping_data()
    first, second = First(one), Second(other)
    optimizer = clipping(first, second, norm_type, max_norm)
    loss = second(first(x), y)
    loss.backward()
    optimizer.clip_grad()
    optimizer.step()
    return [loss.detach(), first.param.detach(), second.param.detach()]


def clipped_in_graph(norm_type: float, max_norm: float, micro_batches: int, batch: Any, weights: Any) -> list[Tensor]:
    grid = isinstance(batch, list)
    everywhere = flow.placement("cpu", ranks=[[0, 1], [2, 3]]) if grid else flow.placement.all("cpu")
    whole = [B, B] if grid else B

    def placed(value: Tensor, sbp: Any) -> Any:
        return value.clone().to_global(placement=everywhere, sbp=whole).to_global(sbp=sbp)  # type: ignore[attr-defined]

    x, y, one, other = clipping_data()
    first, second = First(placed(one, weights)), Second(placed(other, weights))
    graph = Clips(first, second, clipping(first, second, norm_type, max_norm), micro_batches)
    loss = graph(placed(x, batch), placed(y, batch))
    values = (loss, graph.first.to(nn.Module).param, graph.second.to(nn.Module).param)
    return [one.to_global(placement=everywhere, sbp=whole).to_local().detach() for one in values]


# As OneFlow's names them: ranks, norm, largest norm, micro-batches, the batch's SBP, the weights'.
CLIPPED = {
    "local": (1, 2.0, 0.1, 1, B, B),
    "acc": (1, 2.0, 0.1, 8, B, B),
    "dp": (2, 2.0, 0.1, 1, S0, B),
    "mp": (2, 2.0, 0.1, 1, B, S0),
    "dp_acc": (2, 2.0, 0.1, 4, S0, B),
    "inf local": (1, INF, 0.01, 1, B, B),
    "inf acc": (1, -INF, 1e-6, 8, B, B),
    "inf dp_acc": (2, -INF, 1e-6, 4, S0, B),
    "inf dp": (2, INF, 0.01, 1, S0, B),
    "inf mp": (2, -INF, 1e-6, 1, B, S0),
    "inf dp_mp": (4, INF, 0.01, 1, [S0, B], [B, S0]),
}


@sliced("name", ["dp_acc", "mp", "inf local", "inf dp"], CLIPPED)
def test_a_graph_clips_as_a_step_outside_it(pool: Pool, name: str) -> None:
    ranks, norm_type, max_norm, *case = CLIPPED[name]
    eager = clipped_eagerly(norm_type, max_norm)
    clipped = pool.run(ranks, clipped_in_graph, norm_type, max_norm, *case)[-1]
    torch.testing.assert_close(clipped, eager, rtol=1e-10, atol=1e-12)
    # The clip takes part: without it the weights are others.
    assert not torch.allclose(clipped_eagerly(norm_type, 1e9)[1], eager[1])


class Reuses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(2, 2), nn.Linear(2, 2)
        self.linear2.weight = self.linear1.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.linear1(x))


def sums(model: Any) -> LossGraph:
    optimizer = flow.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    return LossGraph(model, optimizer, loss=lambda model, x: model(x).sum())


def reused() -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = Reuses()
    everywhere = flow.placement.all("cpu")
    model.to_global(placement=everywhere, sbp=B)
    graph = sums(model)
    graph(flow.ones(2, 2, placement=everywhere, sbp=B))
    return {
        "same": model.linear1.weight is model.linear2.weight,
        "tensors": len(list(graph._state())),
        "momenta": len(graph.state_dict()["zerograph"]["optimizers"][0]["state"]),
        "state": model.state_dict(),
    }


def test_a_reused_variable_is_updated_once(pool: Pool) -> None:
    torch.manual_seed(0)
    model: Any = Reuses()
    model(torch.ones(2, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9).step()
    for found in pool.run(2, reused):
        assert (found["same"], found["tensors"], found["momenta"]) == (True, 3, 3)
        torch.testing.assert_close(dict(found["state"]), dict(model.state_dict()))


class Draws(nn.Graph):
    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.config.backend = "eager"

    def build(self, x: Tensor) -> Any:
        return tuple(layer(x) for layer in self.layers)


class Masked(nn.Module):
    """The gradient of ``y = dropout(x) * (param - weight)`` is the drawn mask times ``weight``."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.dropout = weight, nn.Dropout(0.5)
        self.param = nn.Parameter(torch.zeros_like(weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x) * (self.param - self.weight)


class Checkpointed(nn.Graph):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.model.to(GraphModule).activation_checkpointing = True
        self.add_optimizer(flow.optim.SGD(model.parameters(), lr=1.0))
        self.config.backend = "eager"

    def build(self, x: Tensor) -> Tensor:
        y = self.model(x)
        (y * self.model.weight).sum().backward()
        return y


def test_two_layers_of_a_graph_draw_different_numbers() -> None:
    first, second = Draws(nn.Dropout(0.5), nn.Dropout(0.5))(flow.rand(2, 8))
    assert not torch.allclose(first, second)


def test_a_checkpointed_layer_draws_in_backward_what_it_drew_in_forward() -> None:
    x, weight = flow.rand(2, 4), flow.rand(2, 4)
    model: Any = Masked(weight)
    y = Checkpointed(model)(x)
    torch.testing.assert_close(y.detach(), torch.from_numpy(model.param.numpy()))


def drawn() -> tuple[Tensor, Tensor]:
    everywhere = flow.placement.all("cpu")
    generator = torch.Generator().manual_seed(0)
    x: Any = torch.rand(2, 4, generator=generator)
    whole = x.to_global(placement=everywhere, sbp=B)
    doubled = torch.cat([x, x]).to_global(placement=everywhere, sbp=B).to_global(sbp=S0)  # type: ignore[attr-defined]
    split = Draws(nn.Dropout(0.5))(doubled)[0].full_tensor()
    return split, Draws(nn.Dropout(0.5))(whole)[0].to_local()


def test_ranks_draw_different_numbers_for_what_is_split_and_the_same_for_what_is_whole(pool: Pool) -> None:
    (split, whole), (again, other) = pool.run(2, drawn)
    assert not torch.allclose(split[:2], split[2:])
    assert torch.equal(split, again)
    assert torch.equal(whole, other)


def linear() -> Any:
    model = nn.Linear(3, 8)
    nn.init.constant_(model.weight, 2.068758)
    nn.init.constant_(model.bias, 0.23)
    return model


def saved(folder: str, everywhere: Any) -> list[Any]:
    """A state saved after two steps, loaded into a new graph that makes the third; and the third without loading."""
    x: Any = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    if everywhere:
        x = x.to_global(placement=flow.placement.all("cpu"), sbp=B).to_global(sbp=S0)
    file, states = Path(folder) / "graph", []
    for load in (False, True):
        model = linear()
        if everywhere:
            model.to_global(placement=flow.placement.all("cpu"), sbp=B)
        graph = sums(model)
        if load:
            state = flow.load(file, global_src_rank=0)
            graph.load_state_dict(state)
            weight = state["model"]["weight"].to_global(placement=flow.placement.all("cpu"), sbp=B).to_local()
            states.append((weight, graph.state_dict()["model"]["weight"]))
        else:
            graph(x)
            graph(x)
            flow.save(graph.state_dict(), file, global_dst_rank=0)
        graph(x)
        after = graph.state_dict()
        momenta = [one["momentum_buffer"] for one in after["zerograph"]["optimizers"][0]["state"].values()]
        states.append((graph.steps_done, after["model"]["weight"], after["model"]["bias"], momenta))
    return states


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loaded_graph_goes_on_as_the_saved_one(pool: Pool, tmp_path: Path, ranks: int) -> None:
    for plain, (given, held), again in pool.run(ranks, saved, str(tmp_path), ranks > 1):
        assert plain[0] == again[0] == 3
        assert torch.equal(given, held)
        torch.testing.assert_close(again, plain, rtol=0, atol=0)


def saved_through_global_view(folder: str) -> list[Any]:
    """As :func:`saved`, but the state travels to rank 0 and back as global tensors."""
    everywhere, first = flow.placement.all("cpu"), flow.placement("cpu", ranks=[0])
    x: Any = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    x = x.to_global(placement=everywhere, sbp=B).to_global(sbp=S0)
    file, states = Path(folder) / "graph", []
    for load in (False, True):
        graph = sums(linear().to_global(placement=everywhere, sbp=B))
        if load:
            state = flow.load(file) if flow.env.get_rank() == 0 else None
            graph.load_state_dict(flow.utils.global_view.to_global(state, placement=first, sbp=lambda state, one: B))
        else:
            graph(x)
            graph(x)
            state = flow.utils.global_view.to_global(graph.state_dict(), placement=first, sbp=B)
            if flow.env.get_rank() == 0:
                flow.save(flow.utils.global_view.to_local(state, copy=True), file)
        graph(x)
        states.append((graph.steps_done, dict(graph.state_dict()["model"])))
    return states


def test_a_state_goes_to_some_ranks_and_back_through_the_global_view(pool: Pool, tmp_path: Path) -> None:
    for plain, again in pool.run(2, saved_through_global_view, str(tmp_path)):
        assert plain[0] == again[0] == 3
        torch.testing.assert_close(again, plain, rtol=0, atol=0)


def test_the_global_view_needs_to_be_told_where() -> None:
    with pytest.raises(zg.PlacementError, match="needs both"):
        flow.utils.global_view.to_global({}, sbp=B)
    assert flow.utils.data is torch.utils.data


def test_a_tensor_of_a_graph_gives_itself_for_its_classes_only() -> None:
    (weight, _) = sums(linear())._state()
    assert weight.to(GraphTensor) is weight
    assert isinstance(weight.to(flow.Tensor), nn.Parameter)
    with pytest.raises(zg.ConfigError, match=r"give flow\.Tensor"):
        weight.to(int)


def test_a_parameter_gives_its_values_and_itself() -> None:
    weight = linear().weight
    assert weight.to(flow.Tensor) is weight
    assert weight.numpy().shape == (8, 3)
    assert weight.to(torch.float64).dtype is torch.float64
