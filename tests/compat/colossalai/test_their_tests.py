"""ColossalAI's own tests of its engine and ZeRO, on our engine; docs/colossalai.md counts them by file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerograph as zg
from tests.compat.colossalai.loops import gradients_of
from tests.harness import sliced
from tests.models import ConvNet, part
from tests.pool import Pool
from zerograph.compat import colossalai
from zerograph.compat.colossalai.configuration import read

STEPS = 3
V2_MODEL = {
    "reduce_scatter_bucket_size_mb": 25,
    "fp32_reduce_scatter": False,
    "offload_config": None,
    "gradient_predivide_factor": 1.0,
    "use_memory_tracer": False,
    "shard_strategy": object(),
    "reuse_fp16_shard": False,
}
V2_OPTIMIZER = {
    "cpu_offload": False,
    "initial_scale": 2**5,
    "min_scale": 1,
    "growth_factor": 2,
    "backoff_factor": 0.5,
    "growth_interval": 1000,
    "hysteresis": 2,
    "max_scale": 2**32,
}
V2 = {"fp16": {"mode": None}, "zero": {"model_config": V2_MODEL, "optimizer_config": V2_OPTIMIZER}}
ON_CPU = {
    "fp16": {"mode": None},
    "zero": {
        "model_config": V2_MODEL | {"offload_config": {"device": "cpu"}},
        "optimizer_config": V2_OPTIMIZER | {"cpu_offload": True},
    },
}


class Repeated(nn.Module):
    """Layers that forward uses several times, one of them recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.first, self.second):
            x = checkpoint(layer, x, use_reentrant=False)
        found: Tensor = self.last(x)
        return found


class NoLeaf(nn.Module):
    """A parameter of a module that has children, too."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.weight = nn.Linear(5, 8), nn.Parameter(torch.randn(8, 2) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) @ self.weight


MODELS: dict[str, Any] = {"repeated": Repeated, "no leaf": NoLeaf, "conv": ConvNet}


def built(name: str) -> nn.Module:
    torch.manual_seed(42)
    made: nn.Module = MODELS[name]()
    return made


def data(name: str, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    shape = (8, 3, 8, 8) if name == "conv" else (8, 5)
    return [
        (torch.randn(shape, generator=generator), torch.randint(0, 2, (8,), generator=generator)) for _ in range(steps)
    ]


def engine_for(name: str, config: dict[str, Any], lr: float = 1e-2) -> colossalai.Engine:
    model = built(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    engine, *_ = colossalai.initialize(model, optimizer, nn.CrossEntropyLoss(), config=config, verbose=False)
    engine.train()
    return engine


def step(engine: colossalai.Engine, x: Tensor, y: Tensor) -> tuple[list[Tensor], bool]:
    """Gradients before the step, and whether it updated."""
    engine.zero_grad()
    engine.backward(engine.criterion(engine(part(x)), part(y)))
    return gradients_of(engine), engine.step()


def trained(name: str, config: dict[str, Any]) -> tuple[list[list[Tensor]], list[dict[str, Tensor]]]:
    engine = engine_for(name, config)
    gradients, states = [], []
    for x, y in data(name):
        gradients.append(step(engine, x, y)[0])
        states.append(engine.state_dict()["modules"]["model"])
    return gradients, states


@sliced(
    "name, config",
    [("repeated", ON_CPU), ("no leaf", V2), ("repeated", {"fp16": {"mode": "naive"}, "clip_grad_norm": 1.0})],
    [
        ("repeated", V2),
        ("repeated", {"clip_grad_norm": 1.0}),
        ("repeated", {"fp16": {"mode": "torch"}, "clip_grad_norm": 1.0}),
        ("no leaf", ON_CPU),
        ("conv", V2),
    ],
)
def test_parameters_and_gradients_follow_torchs(pool: Pool, name: str, config: dict[str, Any]) -> None:
    """test_zero_engine, test_sharded_optim_v2, test_shard_model_v2, test_engine: loosely, as they compare."""
    loose = {"atol": 2e-2, "rtol": 1e-2}
    model = built(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found = pool.run(2, trained, name, config)
    for number, (x, y) in enumerate(data(name)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for gradients, _ in found:
            for gradient, parameter in zip(gradients[number], model.parameters(), strict=True):
                torch.testing.assert_close(gradient, parameter.grad, **loose)
        if "clip_grad_norm" in config:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for _, states in found:
            assert all(value.isfinite().all() for value in states[number].values())
            for key, value in model.state_dict().items():
                torch.testing.assert_close(states[number][key], value, **loose)


def test_parameters_change_with_an_accumulations_last_call_only() -> None:
    """test_gradient_accumulation; a state between its calls is that of the last update."""
    engine = engine_for("repeated", {"gradient_accumulation": 4, "clip_grad_norm": 1.0})
    states = []
    for number, (x, y) in enumerate(data("repeated", 4)):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        if number == 0:
            with pytest.warns(UserWarning, match="is the state of the last update"):
                states.append(engine.state_dict()["modules"]["model"])
        else:
            states.append(engine.state_dict()["modules"]["model"])
    weights = [state["first.weight"] for state in states]
    assert torch.equal(weights[0], built("repeated").first.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])


def shared_state(config: dict[str, Any]) -> list[bool]:
    engine, copied = engine_for("repeated", config), engine_for("repeated", config)
    assert set(engine.state_dict()["modules"]["model"]) == set(built("repeated").state_dict())
    whole = engine.state_dict()["modules"]["model"]
    equal = [torch.equal(whole[name], value) for name, value in built("repeated").state_dict().items()]
    (x, y), (other_x, other_y) = data("repeated", 2)
    step(engine, x, y)
    state = engine.state_dict()
    copied.load_state_dict(state)
    loaded = copied.state_dict()["optimizers"][0]["state"]
    for number, entries in state["optimizers"][0]["state"].items():
        equal += [torch.equal(torch.as_tensor(value), loaded[number][key]) for key, value in entries.items()]
    gradients, updated = step(copied, other_x, other_y)
    return [*equal, updated, len(gradients) > 0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_are_the_models_and_go_on_in_a_copy(pool: Pool, ranks: int) -> None:
    """test_state_dict, test_sharded_optim_state_dict, test_zero_optim_state_dict."""
    assert all(all(found) for found in pool.run(ranks, shared_state, V2))


def overflowing() -> list[bool]:
    zero = {"model_config": V2_MODEL, "optimizer_config": V2_OPTIMIZER | {"initial_scale": 2**32, "hysteresis": 1}}
    engine = engine_for("repeated", {"zero": zero})
    found = []
    for x, y in data("repeated"):
        _, updated = step(engine, x, y)
        values = engine.state_dict()["modules"]["model"].values()
        found += [not updated, all(value.isfinite().all() for value in values)]
    return found


@pytest.mark.long
def test_an_overflow_leaves_parameters_finite(pool: Pool) -> None:
    """test_found_inf."""
    assert all(map(all, pool.run(2, overflowing)))


def predicted() -> Tensor:
    engine = engine_for("conv", {"zero": {"model_config": {"shard_strategy": object()}}})
    for x, y in data("conv"):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(part(x)), part(y)))
        engine.step()
    engine.eval()
    found: Tensor = engine(torch.ones(4, 3, 8, 8)).to_local()
    return found


@pytest.mark.long
def test_buffers_are_equal_on_all_ranks(pool: Pool) -> None:
    """test_sharded_optim_with_sync_bn: the same samples give the same outputs."""
    first, second = pool.run(2, predicted)
    assert torch.equal(first, second)


def made_split() -> list[tuple[str, torch.Size]]:
    torch.manual_seed(42)
    with colossalai.zero3_model_context():
        model = Repeated()
    return [(type(one).__name__, one.shape) for one in model.parameters()]


def test_parameters_are_split_from_their_construction(pool: Pool) -> None:
    """test_init_context."""
    wanted = [("SplitParameter", parameter.shape) for parameter in built("repeated").parameters()]
    assert pool.run(2, made_split) == [wanted, wanted]


def test_the_second_versions_options_are_ours() -> None:
    found = read(ON_CPU).options
    assert (found["stage"], found["amp_dtype"]) == (3, torch.float16)
    assert (found["offload"].optimizer.device, found["offload"].parameters.device) == ("cpu", "cpu")
    scaler = found["grad_scaler"]
    assert (scaler.init_scale, scaler.backoff_factor, scaler.hysteresis) == (32, 0.5, 2)
    policy = {"tensor_placement_policy": "cpu", "fp32_reduce_scatter": True, "reduce_scatter_bucket_size_mb": 1}
    found = read({"zero": {"model_config": policy}}).options
    assert (found["offload"].optimizer.device, found["offload"].parameters.device) == ("cpu", "cpu")
    assert found["reduce_dtype"] is torch.float32
    assert found["bucket_size"] == 2**21
    assert read({"zero": {"model_config": {}}, "bf16": True}).options["grad_scaler"] is None
    with pytest.warns(UserWarning, match="gpu_margin_mem_ratio"):
        read({"zero": {"optimizer_config": {"gpu_margin_mem_ratio": 0.7}}})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"zero": {"model_config": {"shard_strateggy": 1}}}, "did you mean 'shard_strategy'"),
        ({"zero": {"optimizer_config": {"cpu_offload": True}}}, "both are offloaded, or neither"),
        ({"zero": {"model_config": {"offload_config": {"device": "cpu"}}}}, "Set cpu_offload = True"),
        ({"zero": {"model_config": {"process_group": object()}}}, "runs on all ranks"),
        ({"zero": {"model_config": {}, "level": 2}}, "means level 3"),
        ({"zero": {"model_config": {"tensor_placement_policy": "disk"}}}, "choose 'cuda', 'cpu' or 'auto'"),
        ({"fp16": {"mode": "apex"}}, "Apex is not supported"),
        ({"parallel": {"tensor": {"size": 2, "mode": None}}}, "only data parallel"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(config: dict[str, Any], says: str) -> None:
    with pytest.raises(zg.ConfigError, match=says):
        read(config)
