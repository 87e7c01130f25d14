"""``ZeroStrategy`` on two ranks logs what Lightning does in one process on the whole batch, and resumes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.integrations.frameworks import Jittered, on_ranks, samples
from tests.pool import Pool

pl = pytest.importorskip("lightning.pytorch", reason="needs lightning: pip install 'zerograph[lightning]'")
pytest.importorskip("accelerate", reason="needs accelerate, whose state the tests reset")


class Net(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        output = self.net(x)
        self.log("val_loss", F.cross_entropy(output, y), sync_dist=True)
        self.log("val_accuracy", (output.argmax(1) == y).float().mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().sum(1)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Scheduled(Net):
    """Its loss depends on the step and the epoch; it logs numbers, and reads and logs some values only."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * (1 + 0.1 * self.global_step)
        if self.current_epoch > 0:
            loss = loss + 0.1 * self(batch[0]).square().mean()
        if self.global_step % 3 == 2:
            self.log("some", loss)
            self.read += loss.item()
        self.log("number", self.global_step + self.read)
        return loss

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class KeepsATensor(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.loss = super().training_step(batch, batch_idx)
        return self.loss


class UsesIndex(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + batch_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x - x.mean(), y


class Contrasts(Net):
    """Compares outputs with those of all ranks. It may not scale a loss that is that of all ranks by their number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        own = F.normalize(self.net(batch[0]), dim=1)
        loss = F.cross_entropy(own @ self.all_gather(own, sync_grads=True).T / 0.5, torch.arange(len(own)))
        assert not self.all_gather(loss.detach()).requires_grad
        if self.trainer.world_size > 1:
            with pytest.raises(RuntimeError, match=r"by the number of processes.*\nLeave the factor out"):
                loss * self.trainer.world_size
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class ComputesAMetric(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = pytest.importorskip("torchmetrics", reason="needs torchmetrics").MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss)
        return loss / self.mean.compute()


class Adversarial(Net):
    """Manual optimization of a generator and a critic, each with the other frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.nets = nn.ModuleDict({"generator": nn.Linear(3, 6), "critic": nn.Linear(6, 1)})

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        generator, critic = self.optimizers()
        self.toggle_optimizer(generator)
        fake = self.nets["generator"](x[:, :3])
        loss = F.softplus(-self.nets["critic"](fake)).mean()
        generator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(generator, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        generator.step()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(critic)
        scores = self.nets["critic"](x), self.nets["critic"](self.nets["generator"](x[:, :3]).detach())
        loss_of_critic = F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean()
        critic.zero_grad()
        self.manual_backward(loss_of_critic)
        critic.step()
        self.untoggle_optimizer(critic)
        self.log_dict({"some": loss, "train_loss": loss_of_critic}, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(one.parameters(), lr=1e-2, eps=1e-3) for one in self.nets.values()]


class Measured(Net):
    """It calls, updates and logs metrics, and logs the value of one for a batch."""

    def __init__(self) -> None:
        super().__init__()
        torchmetrics = pytest.importorskip("torchmetrics", reason="needs torchmetrics")
        several = {"multiclass": torchmetrics.Accuracy("multiclass", num_classes=4)}
        self.accuracy, self.count = torchmetrics.MetricCollection(several), torchmetrics.SumMetric()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("some", self.mean(loss))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        output = self.net(x)
        self.accuracy(output, y)
        self.count.update(torch.ones_like(y))
        self.log("val_loss", self.count, on_step=False, on_epoch=True)
        self.log("val_accuracy", self.accuracy["multiclass"], on_step=False, on_epoch=True)


class Seen(pl.callbacks.BasePredictionWriter):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__("batch")
        self.numbers: list[float] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, *args: Any) -> None:
        self.numbers += [len(prediction), *batch_indices]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            names = [name for name in ("train_loss_step", "some", "number") if name in trainer.callback_metrics]
            self.numbers += [float(trainer.callback_metrics[name]) for name in names]

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.numbers += [float(trainer.callback_metrics[name]) for name in ("val_loss", "val_accuracy")]

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.numbers.append(float(trainer.callback_metrics["train_loss_epoch"]))


def fit(folder: Path, ranks: int, stage: Any, accumulation: int, resume: str | None, kind: Any) -> list[float]:
    strategy: Any = "auto"
    if stage is not None:
        from zerograph.integrations.lightning import ZeroStrategy

        strategy = ZeroStrategy(zero=stage)
    pl.seed_everything(0)
    module, seen = kind(), Seen()
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{epoch}")
    shown = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks if stage is not None else 1,
        strategy=strategy,
        max_epochs=2,
        callbacks=[seen, checkpoint],
        accumulate_grad_batches=accumulation,
        gradient_clip_val=0.5 if module.automatic_optimization else None,
        num_sanity_val_steps=0,
        **shown,
    )
    train = DataLoader(Jittered(samples(28)), batch_size=8 // ranks, shuffle=True)
    val = DataLoader(samples(13), batch_size=8 // ranks)
    trainer.fit(module, train, val, ckpt_path=resume)
    predicted = trainer.predict(module, val) if module.automatic_optimization else []
    return [*seen.numbers, *(float(one) for part in predicted for one in part)]


def run(
    folder: Path, ranks: int, stage: Any, accumulation: int = 1, resume: str | None = None, kind: Any = Net
) -> list[float]:
    torch.set_num_threads(1)
    numbers: list[float] = on_ranks(fit, folder, ranks, stage, accumulation, resume, kind)
    return numbers


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "stage", "accumulation"),
    [
        (Net, 0, 2),
        (Scheduled, 3, 1),
        (Measured, 2, 1),
        (UsesIndex, 1, 1),
        (KeepsATensor, 3, 1),
        (Contrasts, 2, 1),
        (ComputesAMetric, 2, 1),
        (Adversarial, 3, 1),
    ],
)
def test_the_steps_are_those_of_one_process(
    pool: Pool, tmp_path: Path, kind: Any, stage: int, accumulation: int
) -> None:
    expected = run(tmp_path / "plain", 1, None, accumulation, kind=kind)
    zero = {"stage": stage}
    for numbers in pool.run(2, run, tmp_path / "zero", 2, zero, accumulation, None, kind):
        assert numbers == pytest.approx(expected, abs=1e-5)
    checkpoint = str(tmp_path / "zero" / "epoch=0.ckpt")
    resumed = run(tmp_path / "one", 1, zero, accumulation, checkpoint, kind)
    assert resumed == pytest.approx(run(tmp_path / "again", 1, None, accumulation, checkpoint, kind), abs=1e-5)


class Terminated(Net):
    """One rank gets SIGTERM in its third step, as from a scheduler that ends one host first."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 2 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def terminate(folder: Path) -> int:
    from zerograph.integrations.lightning import ZeroStrategy

    callback = pl.callbacks.OnExceptionCheckpoint(folder)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ZeroStrategy(zero={"stage": 3, "timeout": 20}),
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(SystemExit):
        trainer.fit(Terminated(), DataLoader(samples(28), batch_size=2))
    return int(torch.load(callback.ckpt_path, weights_only=True)["global_step"])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_all_ranks_end_and_save_after_the_step_in_which_one_gets_sigterm(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, on_ranks, terminate, tmp_path) == [4, 4]
