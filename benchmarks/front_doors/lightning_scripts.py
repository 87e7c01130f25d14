"""Lightning's ``BoringModel`` and its image classifier, on generated data."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.front_doors.door import Door

_SHOWN = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


class Losses(pl.Callback):  # type: ignore[misc]
    """Keeps the loss of each step, and the metrics of each validation."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the loss of the last micro-batch of a step."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.values.append(float(outputs["loss"]))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        """Keep what validation has logged."""
        self.values += [float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")]


def fit(door: Door, strategy: Any, model: Any, *loaders: Any, **options: Any) -> list[float]:
    """Fit a model, and return its losses."""
    losses = Losses()
    pl.Trainer(
        accelerator="cpu",
        devices=door.ranks,
        strategy=strategy,
        max_steps=door.steps,
        max_epochs=-1,
        accumulate_grad_batches=door.accumulation,
        num_sanity_val_steps=0,
        callbacks=[losses],
        **_SHOWN,
        **options,
    ).fit(model, *loaders)
    return losses.values


def boring_model(door: Door) -> list[float]:
    """Fit Lightning's own ``BoringModel``."""
    strategy = door.strategy()
    loader = DataLoader(RandomDataset(32, 64), batch_size=door.batch_size)
    return fit(door, strategy, BoringModel(), loader, limit_val_batches=0)


class LitClassifier(pl.LightningModule):  # type: ignore[misc]
    """A network for pictures that logs its loss and its accuracy."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 8 * 8, 4)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss and the accuracy."""
        x, y = batch
        logits = self.model(x)
        self.log("val_loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return Adam with a schedule."""
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)]


def image_classifier(door: Door) -> list[float]:
    """Fit a classifier of pictures, with clipping, a schedule and validation."""
    strategy = door.strategy()
    pictures = TensorDataset(torch.randn(61, 3, 16, 16), torch.randint(0, 4, (61,)))
    train = DataLoader(pictures, batch_size=door.batch_size, shuffle=True)
    val = DataLoader(TensorDataset(*pictures[:13]), batch_size=door.batch_size)
    return fit(door, strategy, LitClassifier(), train, val, gradient_clip_val=1.0)
