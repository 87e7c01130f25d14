"""State in whole tensors, under the names of plain PyTorch, on any number of ranks."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import zerograph as zg
from tests.harness import LossStep, sliced
from tests.models import TrainStep, batches, make, part, train_plainly
from tests.pool import Pool

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


def trained(name: str, optimizer: str, stage: int, steps: int, state: dict[str, Any] | None) -> dict[str, Any]:
    """The state after ``steps`` more steps, from the beginning or from ``state``."""
    model = make(name)
    step = TrainStep(model, OPTIMIZERS[optimizer](model), stage)
    if state is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        step.load_state_dict(state)
    start = step.steps_done
    for x, y in batches(name, start + steps, 12)[start:]:
        step(part(x), part(y))
    return step.state_dict()


def plainly(name: str, optimizer: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make(name)
    made = OPTIMIZERS[optimizer](model)
    train_plainly(model, made, batches(name, steps, 12))
    return model, made


def same(found: Any, wanted: Any) -> None:
    """Equal names, nesting, types and, within fp32, values."""
    if isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            same(found[key], value)
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    else:
        assert found == wanted


@sliced(
    "name, optimizer",
    [("gpt_tied_of_one_block", "adamw")],
    [("conv", "sgd"), ("conv", "adamw"), ("gpt_tied", "sgd"), ("gpt_tied", "adamw")],
)
def test_the_state_is_what_the_plain_objects_would_save(pool: Pool, name: str, optimizer: str) -> None:
    state = pool.run(2, trained, name, optimizer, 2, 3, None)[0]
    model, plain = plainly(name, optimizer, 3)
    same(state["modules"]["model"], dict(model.state_dict()))
    same(state["optimizers"], [plain.state_dict()])
    assert state["steps_done"] == 3
    model.load_state_dict(state["modules"]["model"])
    plain.load_state_dict(state["optimizers"][0])


@sliced("optimizer", ["adamw"], OPTIMIZERS)
def test_training_goes_on_with_another_stage_and_number_of_ranks(pool: Pool, optimizer: str) -> None:
    saved = pool.run(2, trained, "mlp", optimizer, 3, 2, None)[0]
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    on_four = pool.run(4, trained, "mlp", optimizer, 1, 2, loaded)[0]
    alone = trained("mlp", optimizer, 2, 2, loaded)
    model, plain = plainly("mlp", optimizer, 4)
    for state in (on_four, alone):
        same(state["modules"]["model"], dict(model.state_dict()))
        same(state["optimizers"], [plain.state_dict()])
        assert state["steps_done"] == 4


def test_before_the_first_step_the_state_is_that_of_the_plain_objects() -> None:
    model = make("conv")
    optimizer = OPTIMIZERS["adamw"](model)
    step = TrainStep(model, optimizer, 2)
    state = step.state_dict()
    same(state["modules"]["model"], dict(model.state_dict()))
    same(state["optimizers"], [make_optimizer_state("conv")])
    (x, y), *_ = batches("conv", 1)
    step.compile(x, y)
    same(step.state_dict()["optimizers"], [make_optimizer_state("conv")])


def make_optimizer_state(name: str) -> dict[str, Any]:
    state: dict[str, Any] = OPTIMIZERS["adamw"](make(name)).state_dict()
    return state


def rank_dependent() -> nn.Module:
    model = nn.Linear(3, 2)
    # No backend sends numbers of these kinds.
    model.register_buffer("places", torch.randint(9, (2, 3)).to(torch.int16).t())
    model.register_buffer("turns", torch.randn(3, dtype=torch.complex64).conj())
    return model


def rank_dependent_start() -> dict[str, Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    model = rank_dependent()
    graph = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.0), 2, lambda model, x: model(x).mean())
    graph(torch.ones(1, 3))
    return {name: value.clone() for name, value in graph.state_dict()["modules"]["model"].items()}


def test_all_ranks_start_from_rank_0s_parameters_and_buffers(pool: Pool) -> None:
    torch.manual_seed(0)
    wanted = dict(rank_dependent().state_dict())
    for state in pool.run(2, rank_dependent_start):
        torch.testing.assert_close(dict(state), wanted, rtol=0, atol=0)


def full_parameters() -> None:
    model = make("conv")
    step = TrainStep(model, OPTIMIZERS["sgd"](model), 3)
    (x, y), *_ = batches("conv", 1)
    step(part(x), part(y))
    with step.full_parameters():
        state = {name: value.clone() for name, value in model.state_dict().items()}
        assert model(x).shape == (8, 5)
        with torch.no_grad():
            model.head.weight.mul_(2)
        with pytest.raises(zg.InputError, match="inside full_parameters"):
            step(part(x), part(y))
    found = step.state_dict()["modules"]["model"]
    assert torch.equal(found["head.weight"], state["head.weight"] * 2)
    assert torch.equal(found["features.0.weight"], state["features.0.weight"])
    step(part(x), part(y))


def test_full_parameters_can_be_used_and_changed(pool: Pool) -> None:
    pool.run(2, full_parameters)


def refused(wrong: dict[str, Any]) -> tuple[str, str, bool]:
    """The error of loading a state that is wrong on rank 1 only, and whether everything is as it was."""
    model = make("mlp")
    step = TrainStep(model, OPTIMIZERS["adamw"](model), 2)
    x, y = batches("mlp", 1)[0]
    step(part(x), part(y))
    before = step.state_dict()
    other = {**before, "modules": {"model": {name: value + 1 for name, value in before["modules"]["model"].items()}}}
    with pytest.raises(zg.ZeroGraphError) as caught:
        step.load_state_dict(other | (wrong if zg.rank() == 1 else {}))
    same(step.state_dict(), before)
    return type(caught.value).__name__, str(caught.value), step.steps_done == 1


@pytest.mark.parametrize(
    ("wrong", "first", "second", "words"),
    [
        ({"modules": {}}, "RankMismatchError", "ConfigError", "rank 1"),
        ({"optimizers": []}, "RankMismatchError", "ConfigError", "rank 1"),
        ({"steps_done": 7}, "RankMismatchError", "RankMismatchError", "steps_done"),
    ],
)
def test_a_state_that_is_wrong_on_one_rank_is_refused_on_all(
    pool: Pool, wrong: dict[str, Any], first: str, second: str, words: str
) -> None:
    everybody = pool.run(2, refused, wrong)
    assert [kind for kind, _, _ in everybody] == [first, second]
    assert words in everybody[0][1]
    assert all(unchanged for _, _, unchanged in everybody)


FULL = StateDictOptions(full_state_dict=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def by_torchs_functions(states: list[Any]) -> tuple[list[Any], Any, list[float]]:
    """Return an optimizer's own state, torch's form of it, and the losses after another was set in its flat form."""
    model = make("mlp")
    optimizer = OPTIMIZERS["adamw"](model)
    step = TrainStep(model, optimizer, 3)
    for x, y in batches("mlp", 2, 12):
        step(part(x), part(y))
    found = [optimizer.state_dict(), get_optimizer_state_dict(model, optimizer, options=FULL)]
    step.load_state_dict({"modules": {"model": states[0]}})
    set_optimizer_state_dict(model, optimizer, states[1], options=FLAT)
    losses = [float(step(part(x), part(y))) for x, y in batches("mlp", 5, 12)[3:]]
    optimizer.load_state_dict(found[0])
    return found, optimizer.state_dict(), losses


def test_an_optimizer_of_a_graph_returns_and_loads_its_state_as_a_plain_one(pool: Pool) -> None:
    model, optimizer = plainly("mlp", "adamw", 2)
    wanted = [optimizer.state_dict(), get_optimizer_state_dict(model, optimizer, options=FULL)]
    later, its = plainly("mlp", "adamw", 3)
    states = [later.state_dict(), get_optimizer_state_dict(later, its, options=FLAT)]
    for found, again, losses in pool.run(2, by_torchs_functions, states):
        same(found, wanted)
        same(again, wanted[0])
        torch.testing.assert_close(losses, [float(x) for x in losses_of_five()[3:]])


def losses_of_five() -> list[Tensor]:
    model = make("mlp")
    return train_plainly(model, OPTIMIZERS["adamw"](model), batches("mlp", 5, 12))


class Doubling(nn.Linear):
    """A layer that takes its bias from the memory that it has taken its weight from."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        memory = state_dict[f"{prefix}weight"].clone()
        with torch.no_grad():
            self.weight.copy_(memory)
            self.bias.copy_(memory.mul_(2)[:, 0])


def test_what_a_module_has_loaded_stays_though_its_source_is_written_to() -> None:
    model = Doubling(2, 2)
    graph = LossStep(model, torch.optim.SGD(model.parameters()), 0, lambda model, x: model(x).mean())
    graph.load_state_dict({"modules": {"model": {"weight": torch.ones(2, 2)}}})
    assert [*model.weight.flatten().tolist(), *model.bias.tolist()] == [1, 1, 1, 1, 2, 2]
