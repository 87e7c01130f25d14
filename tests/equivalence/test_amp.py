"""Mixed precision: stages agree bitwise, ranks compute what autocast does on one device, overflows are skipped."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import zerograph as zg
from tests.harness import LossStep, deviation, each_stage, set_stage, sliced
from tests.models import Gpt, TokenLoss, TrainStep, adamw, batches, make, part, train_on
from tests.passes.test_traffic import sent
from tests.pool import Pool
from zerograph.ir.memory import profile
from zerograph.runtime.wire import collectives, selection

RANKS, STEPS = 2, 6


class CastTables(nn.Module):
    """A GPT whose tables are cast before rows are picked, as a compute copy is."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, tokens: Tensor) -> Tensor:
        original = F.embedding

        def cast(indices: Tensor, weight: Tensor, *args: Any) -> Tensor:
            copy = weight + (weight.to(self.dtype).to(weight.dtype) - weight).detach()
            return original(indices, copy, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "embedding", cast)
            return self.model(tokens)


def sgd(model: nn.Module) -> torch.optim.SGD:
    """Its update is exactly that of plain PyTorch: one rounding apart, bf16 weights would flip to their neighbours."""
    return torch.optim.SGD(model.parameters(), lr=0.05)


def plainly(name: str, dtype: torch.dtype, reduce_dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Plain PyTorch: each rank's gradients under autocast, cast to ``reduce_dtype``, added there, one fp32 update."""
    model = make(name)
    update = sgd(model)
    scale = 2.0**16 if dtype is torch.float16 else 1.0
    losses = []
    for x, y in batches(name, STEPS):
        total: dict[str, Tensor] = {}
        loss = torch.zeros(())
        for own_x, own_y in zip(x.chunk(RANKS), y.chunk(RANKS), strict=True):
            model.zero_grad()
            with torch.autocast("cpu", dtype):
                own = TokenLoss()(CastTables(model, dtype)(own_x), own_y) / RANKS
            (own * scale).backward()
            loss = loss + own.detach()
            for key, parameter in model.named_parameters():
                wide = "norm" in key
                gradient = parameter.grad if wide else parameter.grad.to(reduce_dtype)
                total[key] = total[key] + gradient if key in total else gradient
        for key, parameter in model.named_parameters():
            parameter.grad = total[key].float() / scale
        update.step()
        losses.append(loss)
    return losses, model.state_dict()


def train(name: str, dtype: torch.dtype, stages: list[int], options: dict[str, Any]) -> list[Any]:
    """(losses, state of the model) of each stage, as the rank that this is."""
    model = make(name)
    step = TrainStep(model, sgd(model), **options)
    step.config.enable_amp(dtype=dtype)
    return [train_on(step, batches(name, STEPS)) for _ in each_stage(step, stages)]


@sliced(
    "name, dtype, reduce_dtype, stages",
    [
        ("gpt_of_one_block", torch.bfloat16, None, [0, 2]),
        ("gpt_tied_of_one_block", torch.float16, torch.float32, [3]),
    ],
    [
        ("gpt_of_one_block", torch.bfloat16, None, [0, 1, 2, 3]),
        ("gpt_tied_of_one_block", torch.float16, torch.float32, [0, 1, 2]),
    ],
)
def test_stages_and_plain_autocast_agree_bitwise(
    pool: Pool, name: str, dtype: torch.dtype, reduce_dtype: torch.dtype | None, stages: list[int]
) -> None:
    results = pool.run(RANKS, train, name, dtype, stages, {"reduce_dtype": reduce_dtype, "bucket_size": 32768})[0]
    wanted = plainly(name, dtype, reduce_dtype or dtype)
    for stage, (losses, state) in zip(stages, results, strict=True):
        assert all(map(torch.equal, losses, results[0][0])), f"the losses of stage {stage} are not those of the first"
        assert max(map(deviation, losses, wanted[0])) < 1e-6
        for key, value in state.items():
            assert torch.equal(value, wanted[1][key]), f"stage {stage} has another {key} than plain PyTorch"


def scaled(model: nn.Module, x: Tensor, factor: Tensor) -> Tensor:
    """Return a loss that is multiplied sample by sample, so that a sample may make it infinite."""
    return (model(x).square().mean(1) * factor).mean()


OPTIMIZERS: dict[str, Any] = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, fused=True),
    # Its first update is another program than the later ones, and is skipped here.
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "dealt": lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01),
}
# Which ranks overflow, step by step: all, none, some, in turn.
SCRIPT = ((0, 1), (), (), (1,), (), (0,), (1,), (), (), (), (0, 1), ())
OPTIONS = {"init_scale": 2.0**10, "growth_interval": 2}


def scripted() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    steps = []
    for ranks in SCRIPT:
        factor = torch.ones(8)
        for rank in ranks:
            factor[rank * 4 + 1] = float("inf")
        steps.append((torch.randn(8, 7, generator=generator), factor))
    return steps


def made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 16, bias=False), nn.GELU(), nn.Linear(16, 3, bias=False))
    optimizer = OPTIMIZERS[kind](model.parameters())
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def skip(kind: str, stages: list[int], dtype: torch.dtype | None, shard_by: str = "elements") -> list[Any]:
    model, optimizer, scheduler = made(kind)
    step = LossStep(model, optimizer, 0, scaled, scheduler)
    step.config.precision.amp_dtype, step.config.zero.shard_by = dtype, shard_by
    step.config.precision.grad_scaler = zg.GradScaler(**OPTIONS)
    results = []
    for _ in each_stage(step, stages):
        seen = []
        for x, factor in scripted():
            step(part(x), part(factor))
            seen.append(
                (step.config.precision.grad_scaler.get_scale(), optimizer.param_groups[0]["lr"], step.steps_done)
            )
        results.append((seen, step.state_dict()))
    return results


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_overflow_is_skipped_as_grad_scaler_skips_it(pool: Pool, kind: str) -> None:
    model, optimizer, scheduler = made(kind)
    scaler = torch.amp.GradScaler("cpu", **OPTIONS)
    wanted, steps = [], 0
    for x, factor in scripted():
        optimizer.zero_grad()
        scaler.scale((model(x).square().mean(1) * factor).mean()).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
            steps += 1
        wanted.append((scaler.get_scale(), optimizer.param_groups[0]["lr"], steps))
    stages, shard_by = [0, 3] if kind == "momentum" else [2], "parameters" if kind == "fused" else "elements"
    for seen, state in pool.run(RANKS, skip, kind, stages, None, shard_by)[0]:
        assert seen == wanted
        for key, value in model.state_dict().items():
            assert deviation(state["modules"]["model"][key], value) < 1e-6, key
        for number, plain in optimizer.state_dict()["state"].items():
            for key, value in plain.items():
                assert deviation(state["optimizers"][0]["state"][number][key], torch.as_tensor(value)) < 1e-6, key
        assert state["grad_scaler"]["_growth_tracker"] == scaler.state_dict()["_growth_tracker"]


class Pair(zg.ZeroGraph):
    """Two modules with an optimizer each; ``factors`` of a sample may make either's gradients infinite."""

    def __init__(self, second: str, together: bool = False) -> None:
        super().__init__()
        self.together = together
        self.modules = [made("momentum"), made(second)]
        self.first, self.second = (module for module, _, _ in self.modules)
        for _, optimizer, scheduler in self.modules:
            self.add_optimizer(optimizer, scheduler)

    def build(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        losses = [
            (module(x).square().mean(1) * factor).mean()
            for module, factor in ((self.first, first), (self.second, second))
        ]
        torch.autograd.backward(losses)
        if self.together:
            nn.utils.clip_grad_norm_([*self.first.parameters(), *self.second.parameters()], 0.5)
        return losses[0].detach()


# Which of the two overflows on some rank, step by step.
IN_TURN = ((1,), (), (0,), (0, 1), (), (), (0,), ())


def in_turn() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(4)
    steps = []
    for which in IN_TURN:
        factors = torch.ones(2, 8)
        for number in which:
            factors[number, 5] = float("inf")
        steps.append([torch.randn(8, 7, generator=generator), *factors])
    return steps


def paired(second: str, stages: list[int], together: bool = False) -> list[Any]:
    step = Pair(second, together)
    step.config.precision.grad_scaler = zg.GradScaler(**OPTIONS)
    results = []
    for _ in each_stage(step, stages):
        seen = []
        for tensors in in_turn():
            step(*map(part, tensors))
            rates = [optimizer.param_groups[0]["lr"] for _, optimizer, _ in step.modules]
            seen.append((step.config.precision.grad_scaler.get_scale(), rates, step.steps_done))
        results.append((seen, step.state_dict()))
    return results


@sliced("second, stages", [("fused", [3]), ("dealt", [2])], [("fused", [0, 1])])
def test_each_of_two_optimizers_skips_its_own_overflows_as_with_grad_scaler(
    pool: Pool, second: str, stages: list[int]
) -> None:
    modules = [made("momentum"), made(second)]
    scaler = torch.amp.GradScaler("cpu", **OPTIONS)
    wanted, done = [], 0
    for (x, *factors), overflowing in zip(in_turn(), IN_TURN, strict=True):
        losses = [(m(x).square().mean(1) * f).mean() for (m, _, _), f in zip(modules, factors, strict=True)]
        for _, optimizer, _ in modules:
            optimizer.zero_grad()
        torch.autograd.backward([scaler.scale(loss) for loss in losses])
        for number, (_, optimizer, scheduler) in enumerate(modules):
            scaler.step(optimizer)
            if number not in overflowing:
                scheduler.step()
        scaler.update()
        done += len(overflowing) < 2
        wanted.append((scaler.get_scale(), [one.param_groups[0]["lr"] for _, one, _ in modules], done))
    results = pool.run(RANKS, paired, second, stages)[0]
    for seen, state in results:
        assert seen == wanted
        for number, (model, optimizer, _) in enumerate(modules):
            for key, value in model.state_dict().items():
                mine = state["modules"][("first", "second")[number]][key]
                assert torch.equal(mine, results[0][1]["modules"][("first", "second")[number]][key])
                assert deviation(mine, value) < 1e-6, key
            for entry, plain in optimizer.state_dict()["state"].items():
                for key, value in plain.items():
                    mine = state["optimizers"][number]["state"][entry][key]
                    assert deviation(mine, torch.as_tensor(value)) < 1e-6, key


def test_optimizers_whose_gradients_are_clipped_together_skip_together() -> None:
    """The norm of both is infinite or not a number: what it scales may not be written."""
    ((seen, state),) = paired("momentum", [0], together=True)
    assert [steps for _, _, steps in seen] == [0, 1, 1, 1, 2, 3, 3, 4]
    assert all(value.isfinite().all() for module in state["modules"].values() for value in module.values())


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_overflows_of_one_optimizer_are_none_of_the_checks_business(on_nonfinite: str) -> None:
    step = Pair("momentum")
    step.config.precision.grad_scaler, step.config.checks.on_nonfinite = zg.GradScaler(2.0**16), on_nonfinite
    x = torch.ones(8, 7)
    # Its loss is finite, its scaled gradients are not.
    step(x, torch.full((8,), 1e37), torch.ones(8))
    assert (step.steps_done, step.steps_skipped, step.config.precision.grad_scaler.get_scale()) == (1, 0, 2.0**15)


def test_fp16_skips_on_all_ranks_what_overflows_on_one(pool: Pool) -> None:
    first, second = pool.run(RANKS, skip, "fused", [1, 3], torch.float16)
    assert first[0][0] == first[1][0] == second[0][0] == second[1][0]
    assert [steps for _, _, steps in first[0][0]] == [0, 1, 2, 2, 3, 3, 3, 4, 5, 6, 6, 7]
    for key, value in first[0][1]["modules"]["model"].items():
        assert value.isfinite().all()
        assert torch.equal(value, first[1][1]["modules"]["model"][key])


def scales(scaler: zg.GradScaler, overflows: list[bool]) -> list[float]:
    model = nn.Linear(3, 1)
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, scaled)
    step.config.enable_amp(dtype=torch.float16)
    step.config.precision.grad_scaler = scaler
    found = []
    for overflow in overflows:
        step(torch.ones(2, 3), torch.full((2,), float("nan") if overflow else 1.0))
        found.append(scaler.get_scale())
    return found


def test_scale_waits_for_hysteresis_and_has_a_minimum() -> None:
    patient = zg.GradScaler(8.0, growth_interval=2, hysteresis=2, min_scale=4.0)
    assert scales(patient, [True, True, True, False, False, True, True]) == [8, 4, 4, 4, 8, 8, 4]
    assert scales(zg.StaticGradScaler(8.0), [True, False, True]) == [8, 8, 8]


def as_deepspeed(overflows: list[bool], scale: float, window: int, hysteresis: int) -> list[float]:
    """Return the scale after each step by the rule of DeepSpeed's ``DynamicLossScaler.update_scale``."""
    last, left, found = -1, hysteresis, []
    for step, overflow in enumerate(overflows):
        stable = step - last - 1
        if overflow:
            scale, left, last = (scale / 2, left, step) if left == 1 else (scale, left - 1, step)
        elif stable > 0 and stable % window == 0:
            scale, left = scale * 2, hysteresis
        found.append(scale)
    return found


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_the_scale_of_a_deepspeed_configuration_grows_as_deepspeeds(hysteresis: int) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": hysteresis}
    scaler = zg.from_deepspeed({"fp16": fp16}).options["grad_scaler"]
    steps = [bool(number in (5, 6, 12)) for number in range(18)]
    assert scales(scaler, steps) == as_deepspeed(steps, 256.0, 2, hysteresis)
    assert as_deepspeed(steps[:5], 256.0, 2, hysteresis) == [256, 256, 512, 512, 1024]


def test_bf16_after_fp16_scales_no_loss_unless_a_scaler_was_set() -> None:
    config = zg.Config()
    config.enable_amp(dtype=torch.float16)
    assert config.precision.grad_scaler is not None
    config.enable_amp(dtype=torch.bfloat16)
    assert config.precision.grad_scaler is None
    config.enable_amp(dtype=torch.float16)
    config.precision.grad_scaler = mine = zg.StaticGradScaler(8.0)
    config.enable_amp(dtype=torch.bfloat16)
    assert config.precision.grad_scaler is mine


class Clipped(TrainStep):
    """Two backwards, and clipping by the norm of the unscaled gradients."""

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.model(x)
        loss = self.loss_fn(logits, y)
        loss.backward(retain_graph=True)
        (1e-3 * logits.float().square().mean()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        return loss


def clipped(scaled: bool) -> Tensor:
    model = make("mlp")
    step = Clipped(model, sgd(model))
    step.config.precision.grad_scaler = zg.GradScaler() if scaled else None
    for x, y in batches("mlp", 3):
        step(x, y)
    return torch.cat([value.flatten() for value in step.state_dict()["modules"]["model"].values()])


def test_what_build_does_to_gradients_sees_them_unscaled() -> None:
    assert deviation(clipped(True), clipped(False)) < 1e-6


class ByHand(TrainStep):
    """Gradients that no backward() made."""

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss_fn(self.model(x), y)
        parameters = list(self.model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        return loss


def test_gradients_made_by_hand_are_not_taken_for_scaled() -> None:
    model = make("mlp")
    step = ByHand(model, sgd(model))
    step.config.precision.grad_scaler = zg.GradScaler()
    x, y = batches("mlp", 1)[0]
    with pytest.raises(zg.CaptureError, match=r"without calling backward\(\)"):
        step(x, y)
    step.config.precision.grad_scaler = None
    step(x, y)


def most_held(graph: fx.Graph) -> dict[str, int]:
    """The most bytes of gathered parameters, of gradients as backward makes them, and of those that were reduced."""
    found = profile(graph)
    changes = {kind: [0] * (len(found.nodes) + 1) for kind in ("gathered", "gradients", "reduced")}
    for one in found.storages:
        from_others = one.kind == "gradients" and "boxing" in found.nodes[one.born].meta
        if one.kind in changes:
            changed = changes["reduced" if from_others else one.kind]
            changed[one.born] += one.bytes
            changed[one.dies + 1] -= one.bytes
    return {kind: max(itertools.accumulate(changed)) for kind, changed in changes.items()}


def counted() -> list[dict[str, float]]:
    """Return for each stage bytes per parameter: between steps, the peak of each kind in a step, and on the wire."""
    torch.manual_seed(0)
    model = Gpt(False, 64, 96, 4)
    psi = sum(parameter.numel() for parameter in model.parameters())
    step = TrainStep(model, adamw(model), bucket_size=2**16)
    step.config.enable_amp()
    tokens = torch.arange(2 * 17).view(2, 17)
    every = {"all-gather": collectives.gather_pieces, "reduce-scatter": collectives.exchange_pieces}
    results = []
    for stage in range(4):
        set_stage(step, stage)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(selection, "select_exchanges", lambda job: every)
            step.compile(tokens[:, :-1], tokens[:, 1:])
        with sent() as bytes_sent:
            step(tokens[:, :-1], tokens[:, 1:])
        planned = {
            kind: sum(one.bytes for one in step.inspect.collectives() if one.kind == kind and one.bytes > 8)
            for kind in ("all-gather", "reduce-scatter", "all-reduce")
        }
        numbers = {
            "rest": step.state_bytes(),
            **most_held(step.inspect.graph.graph),
            **planned,
            "sent": sum(bytes_sent),
        }
        results.append({name: number / psi for name, number in numbers.items()})
    return results


def test_bytes_per_parameter_are_those_of_the_paper(pool: Pool) -> None:
    """ZeRO (arXiv 1910.02054), section 3.1 and figure 1, with K = 12, over N = 2 ranks.

    At rest 4 of master and 8 of moments; in a step 2 of the compute copy and 2 of the gradient, whole until stage 1,
    2 / N from stage 2 on. At stage 3 there is less of the copy than the paper's 2 / N: shards are cast when gathered.
    """
    for stage, bytes_of in enumerate(pool.run_afresh(RANKS, counted)[0]):
        gradients = bytes_of["gradients" if stage < 2 else "reduced"]
        total = bytes_of["rest"] + bytes_of["gathered"] + gradients
        paper = (16, 4 + 12 / RANKS, 2 + 14 / RANKS, 16 / RANKS)[stage]
        assert bytes_of["rest"] == pytest.approx(12 if stage == 0 else 12 / RANKS, rel=0.002)
        assert gradients == pytest.approx(2 if stage < 2 else 2 / RANKS, rel=0.05)
        assert total <= paper * 1.02
        assert total >= paper * (0.98 if stage < 3 else 0.9)
        # 2 bytes per parameter, of which a rank sends (N - 1) / N; a gather in forward and another in backward.
        half = (RANKS - 1) / RANKS
        wanted = {"all-gather": (0, 2, 2, 4)[stage] * half, "reduce-scatter": 2 * half if stage else 0}
        for kind, count in wanted.items():
            assert bytes_of[kind] == pytest.approx(count, rel=0.01), (stage, kind)
        if stage:
            assert bytes_of["sent"] == pytest.approx(sum(wanted.values()), rel=0.01)
        else:
            assert bytes_of["all-reduce"] == pytest.approx(4 * half, rel=0.01)


class ByTorch(TrainStep):
    """Goes backward by the function instead of the method."""

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss_fn(self.model(x), y)
        torch.autograd.backward([loss])
        return loss


def test_the_loss_is_scaled_once_however_backward_is_called() -> None:
    by_method, by_function = (
        kind(model := make("mlp"), sgd(model), amp_dtype=torch.float16, grad_scaler=zg.StaticGradScaler(2.0**12))
        for kind in (TrainStep, ByTorch)
    )
    for x, y in batches("mlp", 2):
        assert torch.equal(by_method(x, y), by_function(x, y))
    assert by_function.steps_done == 2
