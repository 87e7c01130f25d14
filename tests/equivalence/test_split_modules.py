"""Modules made global, one layer whole and one split: ZeRO takes the whole one, and leaves the split one as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

import zerograph as zg
from tests.harness import LossStep, Predict, sliced, told
from tests.models import update_by
from tests.pool import Pool
from zerograph.compiler.input_layout import zero_dims_on
from zerograph.ir.mesh import Mesh

LINE, GRID = [0, 1], [[0, 1], [2, 3]]
STEPS, SAMPLES, INPUTS, HIDDEN, OUTPUTS = 3, 8, 8, 6, 4
S0, S1, B = zg.sbp.split(0), zg.sbp.split(1), zg.sbp.broadcast

# The mesh, the SBP of the first layer, that of the second, that of the batch.
LAYOUTS: dict[str, tuple[Any, Any, Any, Any]] = {
    "line": (LINE, B, S0, S0),
    "grid": (GRID, (B, B), (B, S0), (S0, B)),
    "rows of the grid": (GRID, (B, B), (S0, B), (S0, B)),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole, self.split = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.split(F.gelu(self.whole(x)))


def distance(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


class Both(LossStep):
    """Returns what it predicts as well, as tutorials do."""

    def build(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        predicted = self.model(x)
        loss = F.mse_loss(predicted, y)
        loss.backward()
        return predicted, loss


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((SAMPLES, INPUTS), (SAMPLES, OUTPUTS))
    return [tuple(torch.randn(*one, generator=generator).double() for one in shapes) for _ in range(STEPS)]  # type: ignore[misc]


def plain(clip: float | None = None) -> tuple[list[Tensor], nn.Module, torch.optim.Optimizer]:
    """One device, whole batches."""
    model = net()
    optimizer, losses = adamw(model), []
    for x, y in data():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.detach())
    return losses, model, optimizer


def placed(layout: str) -> tuple[Net, Any, Callable[[Tensor], Tensor]]:
    """The model on its mesh, the mesh, and what makes a whole batch global."""
    ranks, first, second, batch = LAYOUTS[layout]
    mesh, model = zg.placement("cpu", ranks=ranks), net()
    zg.to_global(model.whole, placement=mesh, sbp=first)
    zg.to_global(model.split, placement=mesh, sbp=second)
    everybody = zg.sbp.broadcast if ranks == LINE else (B, B)

    def given(x: Tensor) -> Tensor:
        return zg.to_global(zg.to_global(x, placement=mesh, sbp=everybody), placement=mesh, sbp=batch)

    return model, mesh, given


def trained(layout: str, stage: int, **options: Any) -> tuple[LossStep, list[Tensor]]:
    model, mesh, given = placed(layout)
    step = LossStep(model, adamw(model), stage, distance)
    step.config.mesh.placement = mesh
    step.config.set(**options)
    return step, [step(given(x), given(y)) for x, y in data()]


def at_stages(layout: str, stages: tuple[int, ...]) -> list[Any]:
    found = []
    for stage in stages:
        step, losses = trained(layout, stage)
        sbps = {name: str(sbp) for name, sbp in step.inspect.placements().items()}
        with step.full_parameters():
            opened = step.model.split.weight.detach().clone()
        found.append((losses, step.state_dict(), sbps, step.state_bytes(), opened, step.inspect.collectives()))
    return found


@pytest.fixture(scope="module")
def line(pool: Pool) -> list[list[Any]]:
    return pool.run(2, at_stages, "line", (0, 1, 2, 3))


def check(found: list[list[Any]]) -> None:
    losses, model, optimizer = plain()
    wanted = optimizer.state_dict()["state"]
    for rank in found:
        for own, state, _, _, opened, _ in rank:
            torch.testing.assert_close(own, losses, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(state["modules"]["model"], dict(model.state_dict()), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(opened, model.split.weight.detach(), rtol=1e-12, atol=1e-12)
            for number, entries in state["optimizers"][0]["state"].items():
                torch.testing.assert_close(entries, wanted[number], rtol=1e-12, atol=1e-12)


def test_a_whole_and_a_split_layer_on_a_line_train_as_on_one_device(line: list[list[Any]]) -> None:
    check(line)


@sliced(
    "layout, stages",
    [("grid", (0,)), ("rows of the grid", (3,))],
    [("grid", (0, 1, 2, 3)), ("rows of the grid", (0, 1, 2, 3))],
)
def test_a_whole_and_a_split_layer_on_a_grid_train_as_on_one_device(
    pool: Pool, layout: str, stages: tuple[int, ...]
) -> None:
    found = pool.run(4, at_stages, layout, stages)
    check(found)
    for stage, (_, _, sbps, *_) in zip(stages, found[0], strict=True):
        split = "(S(0), B)" if layout != "grid" else "(S(0), S(0))" if stage else "(B, S(0))"
        assert sbps["model.split.weight"] == split
        # The second layer takes nothing from the first: ZeRO goes along the batch's dimension.
        assert sbps["model.whole.weight"] == ("(S(0), B)" if stage else "(B, B)")


def test_the_stages_agree_bitwise_with_a_split_layer(line: list[list[Any]]) -> None:
    for losses, state, *_ in line[0][1:]:
        assert all(map(torch.equal, losses, line[0][0][0]))
        for name, value in line[0][0][1]["modules"]["model"].items():
            assert torch.equal(state["modules"]["model"][name], value), name


def test_a_split_layer_and_its_optimizer_state_rest_split_at_every_stage(line: list[list[Any]]) -> None:
    for stage, (_, _, sbps, *_) in enumerate(line[0]):
        for name in ("model.split.weight", "model.split.weight.exp_avg", "model.split.bias.exp_avg_sq"):
            assert sbps[name] == "S(0)"
        assert sbps["model.whole.weight"] == ("S(0)" if stage else "B")
    elements = sum(parameter.numel() for parameter in Net().parameters())
    split = sum(parameter.numel() for parameter in Net().split.parameters())
    # Parameters and two moments in fp64, a step count of 8 bytes for each bucket; buckets are padded to even lengths.
    for stage, nbytes in enumerate(one[3] for one in line[0]):
        held = elements / 2 if stage else elements - split / 2
        # What ZeRO splits lies in room for the whole of it at stages 1 and 2; what the user has split is never whole.
        others = (elements - split) / 2 if stage in (1, 2) else 0
        assert nbytes == pytest.approx(3 * 8 * held + 8 * others + 16, abs=3 * 8)


def test_what_the_step_gathers_of_a_split_layer_is_freed_after_forward_at_stage_3(line: list[list[Any]]) -> None:
    for stage, times in ((2, 1), (3, 2)):
        gathered = [one for one in line[0][stage][5] if one.kind == "all-gather" and one.tensor_bytes == 8 * 6 * 4]
        assert len(gathered) == times


def columns() -> tuple[str, Tensor, list[int]]:
    """A bias cannot be split along dimension 1: weights by themselves."""
    mesh, model = zg.placement("cpu", ranks=LINE), nn.Sequential(nn.Linear(INPUTS, 6, bias=False)).double()
    torch.manual_seed(0)
    nn.init.normal_(model[0].weight)
    zg.to_global(model, placement=mesh, sbp=S1)
    held = zg.to_local(model[0].weight).shape
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), 1, distance)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(4, INPUTS, generator=generator).double(), torch.randn(4, 6, generator=generator).double()
    step(x.chunk(2)[zg.rank()], y.chunk(2)[zg.rank()])
    return (
        str(step.inspect.placements()["model.0.weight"]),
        step.state_dict()["modules"]["model"]["0.weight"],
        list(held),
    )


def test_a_weight_split_by_columns_says_so(pool: Pool) -> None:
    sbp, weight, held = pool.run(2, columns)[0]
    assert sbp == "S(1)"
    assert held == [6, INPUTS // 2]
    torch.manual_seed(0)
    model = nn.Linear(INPUTS, 6, bias=False).double()
    torch.manual_seed(0)
    nn.init.normal_(model.weight)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(4, INPUTS, generator=generator).double(), torch.randn(4, 6, generator=generator).double()
    F.mse_loss(model(x), y).backward()
    torch.testing.assert_close(weight, (model.weight - 0.1 * model.weight.grad).detach(), rtol=1e-12, atol=1e-12)


def before_and_after() -> dict[str, Any]:
    """Use a module that is split before it has trained, and the state of another one."""
    model, _, given = placed("line")
    (x, y), *_ = data()
    predict = Predict(model)
    step = LossStep(model, adamw(model), 2, distance)
    start = step.state_dict()["modules"]["model"]
    hidden = type(model.split.weight).__name__
    first = zg.to_local(predict(given(x)))
    kept = predict.inspect.placements()["model.split.weight"]
    step(given(x), given(y))
    fresh, _, _ = placed("line")
    again = LossStep(fresh, adamw(fresh), 3, distance)
    again.load_state_dict(step.state_dict())
    # Loaded into the pieces: nobody holds the whole of it.
    assert type(fresh.split.weight).__name__ == hidden
    losses = [again(given(x), given(y)) for x, y in data()[1:]]
    return {"start": start, "hidden": hidden, "first": first, "kept": kept, "losses": losses}


def test_a_split_module_predicts_saves_and_loads(pool: Pool) -> None:
    found = pool.run(2, before_and_after)
    losses, _, _ = plain()
    for rank, one in enumerate(found):
        for name, value in net().state_dict().items():
            assert type(one["start"][name]) is Tensor
            assert torch.equal(one["start"][name], value), name
        assert one["hidden"] == "SplitParameter"
        assert one["kept"] == S0
        torch.testing.assert_close(one["first"], net()(data()[0][0]).chunk(2)[rank].detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(one["losses"], losses[1:], rtol=1e-12, atol=1e-12)


def trained_losses(stage: int, options: dict[str, Any]) -> list[Tensor]:
    return trained("line", stage, **options)[1]


@pytest.mark.parametrize(
    ("options", "clip", "stages"),
    [({"clip_grad_norm": 0.1}, 0.1, (0, 3)), ({"gradient_accumulation_steps": 2}, None, (1, 3))],
)
def test_clipping_and_micro_batches_see_whole_and_split_layers_together(
    pool: Pool, options: dict[str, Any], clip: float | None, stages: tuple[int, ...]
) -> None:
    for stage in stages:
        losses = pool.run(2, trained_losses, stage, options)[0]
        torch.testing.assert_close(losses, plain(clip)[0], rtol=1e-12, atol=1e-12)


def eager_first() -> tuple[Tensor, Tensor]:
    """Momentum that the optimizer made while the module was trained eagerly as global tensors."""
    model, _, given = placed("line")
    optimizer = adamw(model)
    (x, y), (x2, y2), *_ = data()
    update_by(optimizer, (model(given(x)) - given(y)).square().mean().full_tensor())
    step = LossStep(model, optimizer, 2, distance)
    saved = step.state_dict()["optimizers"][0]["state"][2]["exp_avg"]
    step(given(x2), given(y2))
    return saved, step.state_dict()["modules"]["model"]["split.weight"]


def test_momentum_of_eager_global_training_goes_on_in_the_graph(pool: Pool) -> None:
    saved, weight = pool.run(2, eager_first)[0]
    model = net()
    optimizer, moments = adamw(model), []
    for x, y in data()[:2]:
        update_by(optimizer, F.mse_loss(model(x), y))
        moments.append(optimizer.state[model.split.weight]["exp_avg"].clone())
    assert type(saved) is Tensor
    torch.testing.assert_close(saved, moments[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weight, model.split.weight.detach(), rtol=1e-12, atol=1e-12)


def half_precision() -> list[tuple[Any, Any, Any]]:
    found = []
    for stage in (0, 3):
        model, mesh, given = placed("line")
        model.float()
        step = Both(model, adamw(model), stage)
        step.config.mesh.placement = mesh
        step.config.enable_amp(dtype=torch.float16)
        outputs = [step(given(x.float()), given(y.float())) for x, y in data()]
        found.append(([loss for _, loss in outputs], step.state_dict(), [str(one.placements) for one, _ in outputs]))
    return found


def test_the_stages_agree_bitwise_in_half_precision_and_what_is_returned_lies_as_the_batch(pool: Pool) -> None:
    (losses, state, _), (losses3, state3, placements) = pool.run(2, half_precision)[0]
    assert all(map(torch.equal, losses, losses3))
    for name, value in state["modules"]["model"].items():
        assert torch.equal(state3["modules"]["model"][name], value), name
    assert set(placements) == {str((Shard(0),))}


def tied() -> tuple[bool, bool, Tensor]:
    model = nn.ModuleDict({"tokens": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["tokens"].weight
    zg.to_global(model, placement=zg.placement("cpu", ranks=LINE), sbp=S0)
    one = model["head"].weight is model["tokens"].weight
    zg.to_global(model, placement=zg.placement("cpu", ranks=LINE), sbp=S1)
    return one, model["tokens"].weight.placements == (Shard(1),), zg.to_local(model["head"].weight.detach())


def test_tied_weights_stay_one_in_a_global_module(pool: Pool) -> None:
    for one, moved, held in pool.run(2, tied):
        assert one
        assert moved
        assert held.shape == (6, 2)


def split_and_whole_again() -> bool:
    line = zg.placement("cpu", ranks=LINE)
    model = zg.to_global(nn.Linear(4, 4), placement=line, sbp=S0)
    predict = Predict(zg.to_global(model, placement=line, sbp=B))
    predict(torch.ones(2, 4))
    return type(model.weight) is nn.Parameter


def test_a_module_made_whole_again_is_whole_in_the_graph(pool: Pool) -> None:
    assert all(pool.run(2, split_and_whole_again))


def refusals() -> list[str]:
    found = []
    line = zg.placement("cpu", ranks=LINE)

    def attempt(module: nn.Module) -> None:
        predict = Predict(module)
        before = {name: type(one) for name, one in [*module.named_parameters(), *module.named_buffers()]}
        x = torch.ones(2, 3 if isinstance(module, nn.BatchNorm1d) else 4)
        found.append(told(lambda: predict(x))[1])
        assert before == {name: type(one) for name, one in [*module.named_parameters(), *module.named_buffers()]}

    attempt(zg.to_global(nn.Linear(4, 3), placement=line, sbp=S0))
    summed = nn.Linear(4, 4)
    summed.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), line, [Partial()]))
    attempt(summed)
    norm = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    norm.register_buffer("scale", torch.ones(4))
    attempt(zg.to_global(norm, placement=line, sbp=S0))
    square = zg.placement("cpu", ranks=[[0, 1]])
    attempt(zg.to_global(nn.Linear(4, 4), placement=square, sbp=(B, S0)))
    muon = zg.to_global(nn.Linear(4, 4, bias=False), placement=line, sbp=S0)
    step = LossStep(muon, torch.optim.Muon(muon.parameters()), 2, distance)
    return [*found, told(lambda: step(torch.ones(2, 4), torch.ones(2, 4)))[1]]


def test_what_a_graph_cannot_keep_split_is_refused_and_left_alone(pool: Pool) -> None:
    words = [
        "model.weight of shape (3, 4)",
        "is a global tensor placed P: between steps no tensor may be a partial sum",
        "model.scale of shape (4,) is a global tensor placed S(0), but every rank must hold the whole of a buffer",
        "on the ranks [[0, 1]], the graph runs on [0, 1]",
        "model.weight is split S(0), but its update needs it whole: Muon",
    ]
    found = pool.run(2, refusals)[0]
    assert len(found) == len(words), found
    for message, wanted in zip(found, words, strict=True):
        assert wanted in message


def test_zero_goes_where_the_batch_is_split_and_no_parameter_is() -> None:
    config, grid = zg.Config(), Mesh((2, 2), (0, 0), ("", ""))
    assert zero_dims_on(config, grid, [(S0, S0)]) == (1,)
    assert zero_dims_on(config, grid, [(S0, S0)], [(B, S0)]) == (0,)
    assert zero_dims_on(config, grid, [(S0, B), (B, B)], [(B, S0)]) == (0,)
    # None is left: what is split there already stays, ZeRO splits the others.
    assert zero_dims_on(config, grid, [(S0, B)], [(S0, B)]) == (0,)
    assert zero_dims_on(config, Mesh((2,), (0,), ("",)), [(S0,)], [(S1,)]) == (0,)
    # No input is split: as plain ones would be.
    assert zero_dims_on(config, grid, [(B, B)]) == (1,)
    config.zero.shard_dims = 1
    assert zero_dims_on(config, grid, [(S0, B)], [(B, S0)]) == (1,)
