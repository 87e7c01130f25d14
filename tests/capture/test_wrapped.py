"""Models and optimizers that libraries wrapped: seen through with a warning, or refused before anything changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import zerograph as zg
from tests.harness import LossStep
from tests.models import part, update_by
from tests.pool import Pool
from zerograph.ir import mesh

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def plain() -> nn.Module:
    """Batch norm has buffers, which a wrapper may exchange."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Here, as warnings name this line."""
    return model(x).square().mean()


class Step(LossStep):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        super().__init__(model, optimizer, 3, loss_of, shard_min_size=1)


WRAPPERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "DDP": (lambda: nn.parallel.DistributedDataParallel(plain()), "exchanges gradients itself"),
    "DataParallel": (lambda: nn.DataParallel(plain()), "exchanges gradients itself"),
    "torch.compile": (lambda: torch.compile(plain()), "compiled as a whole"),  # type: ignore[return-value]
    "torch.compile inside": (lambda: nn.Sequential(torch.compile(plain())), "compiled as a whole"),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm.convert_sync_batchnorm(plain()), ""),
    "torch.jit.script": (lambda: torch.jit.script(plain()), ""),
    "AveragedModel": (lambda: torch.optim.swa_utils.AveragedModel(plain()), ""),
}
REFUSED: dict[str, Callable[[], nn.Module]] = {
    "FullyShardedDataParallel": lambda: FullyShardedDataParallel(plain(), device_id=torch.device("cpu")),
    "FSDPModule": lambda: fully_shard(plain()),
}


def trained(model: nn.Module) -> tuple[list[float], list[str], list[Tensor]]:
    with warnings.catch_warnings(record=True, action="always") as seen:
        step = Step(model)
        losses = [step(part(X)).item() for _ in range(3)]
    values = list(step.state_dict()["modules"]["model"].values())
    return losses, [str(one.message) for one in seen if one.filename == __file__], values


def wrapped() -> dict[str, Any]:
    found: dict[str, Any] = {"plain": trained(plain())}
    found |= {name: trained(make()) for name, (make, _) in WRAPPERS.items()}
    for name, make in REFUSED.items():
        model = make()
        before = [type(one) for one in model.parameters()]
        with pytest.raises(zg.ConfigError, match=f"model is wrapped: {name}"):
            Step(model)(part(X))
        assert [type(one) for one in model.parameters()] == before
    model = nn.SyncBatchNorm.convert_sync_batchnorm(plain(), dist.new_subgroups(group_size=1)[0])
    with pytest.raises(zg.CaptureError, match="a process group of 1 of 2 ranks"):
        Step(model)(part(X))
    return found


def test_wrappers_train_as_what_they_wrap_or_are_refused(pool: Pool) -> None:
    for found in pool.run(2, wrapped):
        losses, _, values = found.pop("plain")
        for name, (others, messages, theirs) in found.items():
            assert others == losses, name
            kept = theirs[1:] if name == "AveragedModel" else theirs
            assert all(map(torch.equal, kept, values)), name
            wanted = WRAPPERS[name][1]
            assert bool(messages) == bool(wanted)
            assert all(wanted in message for message in messages)


class DeepSpeedEngine(nn.Module):
    """Stands for DeepSpeed's: the same class name, in a package of that name."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_deepspeeds_engine_is_refused_when_the_step_is_prepared() -> None:
    with pytest.raises(zg.ConfigError, match=r"model\.0 is wrapped: DeepSpeedEngine"):
        Step(nn.Sequential(DeepSpeedEngine(plain()))).prepare(mesh.line(2, 0, "ranks"), X)


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Stands for Accelerate's: it holds an optimizer, and does not call ``Optimizer.__init__``."""

    __module__ = "accelerate.optimizer"

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        self.optimizer, self.scaler = optimizer, scaler

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups


class LightningOptimizer:
    """Stands for Lightning's: it makes itself a subclass of what it holds."""

    __module__ = "lightning.pytorch.core.optimizer"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("LightningSGD", (self.__class__, type(optimizer)), {})

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer


class Lookahead(torch.optim.Optimizer):
    """A wrapper of nobody's, which computes something of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


@pytest.mark.parametrize("wrapper", [AcceleratedOptimizer, LightningOptimizer])
def test_a_prepared_optimizer_trains_as_the_one_inside(wrapper: Any) -> None:
    losses = []
    for wrap in (wrapper, lambda one: one):
        model = plain()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is not run by a graph")
            step = Step(model, wrap(torch.optim.SGD(model.parameters(), lr=0.1)))
        losses.append([step(X).item() for _ in range(3)])
    assert losses[0] == losses[1]


class AcceleratedScheduler:
    """Stand-in for Accelerate's: no LRScheduler, but it holds one."""

    def __init__(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
        self.scheduler = scheduler


def test_a_prepared_scheduler_is_refused_and_the_message_names_the_one_inside() -> None:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler: Any = AcceleratedScheduler(torch.optim.lr_scheduler.LinearLR(optimizer))
    with pytest.raises(zg.ConfigError, match=r"the LinearLR inside it \(.scheduler\)"):
        zg.ZeroGraph().add_optimizer(optimizer, scheduler)


def test_a_prepared_optimizer_is_warned_of_and_one_that_hides_another_refused() -> None:
    inner = torch.optim.SGD(plain().parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="the SGD inside is registered"):
        Step(plain(), AcceleratedOptimizer(inner))
    with pytest.raises(zg.ConfigError, match="enable_amp"):
        Step(plain(), AcceleratedOptimizer(inner, torch.amp.GradScaler("cpu")))
    with pytest.raises(zg.ConfigError, match="__init__ was never run"):
        Step(plain(), Lookahead(inner))


def torn_down() -> list[float]:
    """Do what a trainer does at its end, on a model that is split."""
    model = plain()
    step = Step(model)
    losses = [step(part(X)).item()]
    assert model.cpu().to("cpu").float().to(torch.float32) is model
    for move in (nn.Module.half, lambda one: one.to("meta"), lambda one: one.to(torch.float64)):
        with pytest.raises(zg.SplitParameterError):
            move(model)
    return [*losses, step(part(X)).item()]


def test_moving_a_split_model_to_where_it_is_changes_nothing(pool: Pool) -> None:
    step = Step(plain())
    wanted = [step(X).item() for _ in range(2)]
    for losses in pool.run(2, torn_down):
        assert losses == pytest.approx(wanted, rel=1e-6)


def doubling(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``nn.Module.__call__`` as profilers do, with an effect that shows."""

    def wrapped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = call(module, *args, **kwargs)
        return result * 2 if isinstance(module, nn.Linear) else result

    return wrapped


def losses(way: str) -> list[float]:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if way == "graph":
        step = Step(model, optimizer)
        return [step(X).item() for _ in range(3)]
    if way == "loop":
        model, optimizer = zg.prepare(model, optimizer)
    return [update_by(optimizer, model(X).square().mean()).item() for _ in range(3)]


@pytest.mark.parametrize("way", ["graph", "loop"])
def test_a_replaced_call_of_modules_counts(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "__call__", doubling(nn.Module.__call__))
    assert losses(way) == pytest.approx(losses("plain"))
