"""A step through the front door of a framework beside the step of a ``ZeroGraph`` with the same model and batch."""

from __future__ import annotations

import functools
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import zerograph as zg
from benchmarks.front_doors.door import missing
from benchmarks.front_doors.loops import LENGTH, ROWS, VOCABULARY, Native, gpt, loss_of
from tests.integrations.frameworks import on_ranks
from tests.pool import Pool

HEADER = [
    "front door",
    "stage",
    "ZeroGraph, ms",
    "front door, ms",
    "ratio",
    "without zerograph, ms more",
    "ours, ms more",
]
_WARM_UP = 5


class Loss(nn.Module):
    """The GPT with its loss, as models of transformers return it."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss by its name."""
        return {"loss": loss_of(self.gpt, input_ids, labels)}


class Beside:
    """Runs a native step after each step of a front door, and takes the time of both.

    The time of a front door is that from the end of one native step to the beginning of the next, so all that the
    framework does between steps counts, loading batches too.

    Args:
        stage: the stage of the native step. None: the native step is plain PyTorch's.
    """

    def __init__(self, stage: int | None) -> None:
        tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
        native = _plain_step() if stage is None else Native(gpt(), stage, clips=False)
        self._native: Callable[[], Any] = lambda: native(tokens, tokens)
        self._began = 0.0
        self.pairs: list[tuple[float, float]] = []

    def tick(self) -> None:
        """Take the time of the step that has ended, and run a native one."""
        _barrier()
        ended = time.perf_counter()
        self._native()
        _barrier()
        began = time.perf_counter()
        self.pairs.append((began - ended, ended - self._began))
        self._began = began


def _plain_step() -> Callable[[Tensor, Tensor], None]:
    model = Loss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> None:
        model(x, y)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_loop(beside: Beside, stage: int | None, steps: int) -> None:
    """Step through ``zg.prepare``; without a stage in a plain loop."""
    model: Any = Loss()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = _loader(steps, _ranks())
    if stage is not None:
        model, optimizer, loader = zg.prepare(model, optimizer, loader, stage=stage)
    for batch in loader:
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        beside.tick()


def trainer(beside: Beside, stage: int | None, steps: int) -> None:
    """Step through the ``Trainer`` of transformers."""
    import transformers
    from transformers import PrinterCallback, TrainerCallback, TrainingArguments

    from zerograph.integrations.transformers import Trainer

    kind: Any = transformers.Trainer if stage is None else functools.partial(Trainer, zero=stage)

    class Tick(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            beside.tick()

    with tempfile.TemporaryDirectory() as folder:
        options = {"per_device_train_batch_size": ROWS, "max_steps": steps, "max_grad_norm": 0.0}
        shown = {"logging_strategy": "no", "save_strategy": "no", "report_to": [], "disable_tqdm": True}
        door = kind(
            model=Loss(),
            args=TrainingArguments(folder, use_cpu=True, optim="adamw_torch", **options, **shown),
            train_dataset=_samples(steps, _ranks()),
            callbacks=[Tick()],
        )
        door.remove_callback(PrinterCallback)
        door.train()


def accelerate_loop(beside: Beside, stage: int | None, steps: int) -> None:
    """Step through Accelerate's ``Accelerator``."""
    import accelerate

    from zerograph.integrations.accelerate import Accelerator

    accelerator: Any = accelerate.Accelerator(cpu=True) if stage is None else Accelerator(cpu=True, zero=stage)
    model = Loss()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        DataLoader(_samples(steps, _ranks()), batch_size=ROWS),
    )
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        beside.tick()


def lightning_trainer(beside: Beside, stage: int | None, steps: int) -> None:
    """Step through the ``Trainer`` of Lightning."""
    import lightning.pytorch as pl

    from zerograph.integrations.lightning import ZeroStrategy

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Loss()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_batch_end(self, *args: Any) -> None:
            beside.tick()

    shown = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(
        accelerator="cpu",
        devices=_ranks(),
        strategy="auto" if stage is None else ZeroStrategy(stage),
        max_steps=steps,
        enable_checkpointing=False,
        **shown,
    ).fit(Module(), DataLoader(_samples(steps, _ranks()), batch_size=ROWS))


def fsdp2_loop(beside: Beside, stage: int | None, steps: int) -> None:
    """Step through ``fully_shard`` around each block; stage 2 keeps parameters after forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Loss()
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "reshard_after_forward": stage == 3,
    }
    for block in model.gpt.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in _loader(steps, 1):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        beside.tick()


Door = Callable[[Beside, int | None, int], None]
DOORS: tuple[tuple[str, Door, tuple[str, ...]], ...] = (
    ("`zg.prepare`", plain_loop, ()),
    ("transformers `Trainer`", trainer, ("transformers", "accelerate")),
    ("Accelerate", accelerate_loop, ("accelerate",)),
    ("Lightning", lightning_trainer, ("lightning",)),
    ("FSDP2 in a plain loop", fsdp2_loop, ()),
)


def compare(ranks: int, rounds: int, stages: tuple[int, ...] = (2, 3)) -> list[list[str]]:
    """Return a row of cells for each front door and stage."""
    pool = Pool(hash_apart=False, patience=1200.0)
    rows = []
    try:
        for shown, door, needs in DOORS:
            if absent := missing(needs):
                rows.append([shown, "", f"not run: {', '.join(absent)} not installed"])
                continue
            more = None if door is fsdp2_loop else pool.run(1, _on_rank, door, None, rounds)[0].more
            for stage in stages:
                times = pool.run(ranks, _on_rank, door, stage, rounds)[0]
                cells = [f"{times.native * 1e3:.1f}", f"{times.door * 1e3:.1f}", f"{times.ratio:.3f}"]
                if more is not None:
                    cells += [f"{more * 1e3:.1f}", f"{(times.more - more) * 1e3:.1f}"]
                rows.append([shown, str(stage), *cells])
                print(rows[-1], flush=True)
    finally:
        pool.close()
    return rows


@dataclass(frozen=True)
class Times:
    """Medians over pairs of a native step and one of a front door: seconds, ratio, and seconds more."""

    native: float
    door: float
    ratio: float
    more: float


def _on_rank(door: Door, stage: int | None, rounds: int) -> Times:
    """Measure steps of a front door beside native ones. Without a stage, steps of the framework beside plain ones."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    beside = Beside(stage)
    on_ranks(door, beside, stage, rounds + _WARM_UP)
    pairs = beside.pairs[_WARM_UP:]
    if len(pairs) != rounds:
        raise RuntimeError(f"{door.__name__} ran {len(pairs)} steps instead of {rounds}")
    columns = (*zip(*pairs, strict=True), [after / before for before, after in pairs], [b - a for a, b in pairs])
    return Times(*map(statistics.median, columns))


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _samples(steps: int, ranks: int) -> list[dict[str, Tensor]]:
    tokens = torch.randint(0, VOCABULARY, (steps * ROWS * ranks, LENGTH))
    return [{"input_ids": one, "labels": one} for one in tokens]


def _loader(steps: int, ranks: int) -> DataLoader[Any]:
    return DataLoader(_samples(steps, ranks), batch_size=ROWS * ranks)  # type: ignore[arg-type]
