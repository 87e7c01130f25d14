"""A script of Accelerate on two ranks prints what it does in one process on the whole batch, and resumes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.integrations.frameworks import Jittered, fp16_on_cpu, on_ranks, samples
from tests.pool import Pool

pytest.importorskip("accelerate", reason="needs accelerate: pip install 'zerograph[accelerate]'")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def script(folder: Path, ranks: int, zero: int | None, accumulation: int, resume: bool) -> list[float]:
    """Train, evaluate after each epoch, and save the state before the last; or resume the last epoch."""
    if zero is None:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    else:
        from zerograph.integrations.accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, zero=zero)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train: Any = DataLoader(Jittered(samples(44)), batch_size=8 // ranks, shuffle=True)
    val = DataLoader(samples(13), batch_size=8 // ranks)
    # Accelerate's schedules step once for each process, and so do not continue at another number of them.
    gamma = 0.9 if accumulation == 1 else 1.0
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=ranks, gamma=gamma)
    model, optimizer, train, val, scheduler = accelerator.prepare(model, optimizer, train, val, scheduler)
    criterion, printed = nn.CrossEntropyLoss(), []
    if resume:
        accelerator.load_state(str(folder))
    for epoch in range(2 if resume else 0, 3):
        if epoch == 2 and not resume:
            accelerator.save_state(str(folder))
        if hasattr(train, "set_epoch"):
            train.set_epoch(epoch)
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = criterion(model(x), y) * (1 + random.random())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                printed.append(loss.item())
        model.eval()
        right = []
        for x, y in val:
            with torch.no_grad():
                guess = model(x).argmax(-1)
            guess, y = accelerator.gather_for_metrics((guess, y))
            right.append(guess == y)
        printed += [float(torch.cat(right).sum()), float(len(torch.cat(right)))]
    state = accelerator.get_state_dict(model)
    return [*printed, *(float(value.double().sum()) for value in state.values())]


def run(folder: Path, ranks: int, zero: int | None, accumulation: int = 1, resume: bool = False) -> list[float]:
    torch.set_num_threads(1)
    torch.manual_seed(5)
    random.seed(5)
    printed: list[float] = on_ranks(script, folder, ranks, zero, accumulation, resume)
    return printed


@pytest.mark.filterwarnings("ignore:a value was read before")
@pytest.mark.parametrize(("stage", "accumulation"), [(3, 1), (2, 4)])
def test_two_ranks_print_what_one_process_does(pool: Pool, tmp_path: Path, stage: int, accumulation: int) -> None:
    expected = run(tmp_path / "plain", 1, None, accumulation)
    for printed in pool.run(2, run, tmp_path / "zero", 2, stage, accumulation):
        assert printed == pytest.approx(expected, abs=1e-5)
    if accumulation == 1:
        return
    resumed: list[Any] = run(tmp_path / "zero", 1, 1, accumulation, resume=True)
    assert resumed == pytest.approx(expected[-len(resumed) :], abs=1e-5)
    run(tmp_path / "one", 1, 1, accumulation)
    for resumed in pool.run(2, run, tmp_path / "one", 2, stage, accumulation, True):
        assert resumed == pytest.approx(expected[-len(resumed) :], abs=1e-5)


def test_a_loss_that_is_repeated_for_the_last_batch_of_an_iterable_dataset_counts_its_samples() -> None:
    import accelerate

    from zerograph.integrations.accelerate import Accelerator

    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(6))

    for accelerator in (accelerate.Accelerator(cpu=True), Accelerator(cpu=True)):
        loader, val = accelerator.prepare(DataLoader(Numbers(), batch_size=4), DataLoader(Numbers(), batch_size=5))
        # An evaluation in each step.
        repeated = [
            accelerator.gather_for_metrics(batch.float().mean().repeat(4)) for batch in loader if len(list(val)) == 2
        ]
        assert [len(one) for one in repeated] == [4, 2]
        later = accelerator.skip_first_batches(loader, 1)
        assert [len(accelerator.gather_for_metrics(batch.float().mean().repeat(4))) for batch in later] == [2]


def test_fp16_on_a_cpu_is_an_error() -> None:
    from zerograph.errors import ConfigError
    from zerograph.integrations.accelerate import Accelerator

    def make() -> Any:
        return Accelerator(cpu=True, mixed_precision="fp16")

    with pytest.raises(ConfigError, match=r"fp16 on a CPU: .*fp32.*'bf16'"):
        on_ranks(make)


def half_script(ranks: int, zero: int | None, accumulation: int, folder: Path, resume: bool = False) -> list[float]:
    """Train in fp16; in one step a row of the last rank overflows. Or resume the last steps."""
    import accelerate

    from zerograph.integrations.accelerate import Accelerator

    with fp16_on_cpu(accelerate.Accelerator):
        options: dict[str, Any] = {
            "cpu": True,
            "mixed_precision": "fp16",
            "gradient_accumulation_steps": accumulation,
            "kwargs_handlers": [accelerate.utils.GradScalerKwargs(init_scale=1024.0, growth_interval=3)],
        }
        accelerator = accelerate.Accelerator(**options) if zero is None else Accelerator(**options, zero=zero)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=ranks, gamma=0.9)
    data = samples(80)
    # More than fp16 holds, in the fifth batch: 8 rows in one process, two times 4 rows.
    data.tensors[0][39] = 1e5
    loader = DataLoader(data, batch_size=8 // ranks)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    criterion, printed = nn.CrossEntropyLoss(), []
    if resume:
        accelerator.load_state(str(folder))
    for number, (x, y) in enumerate(loader):
        if resume and number < 8:
            continue
        if number == 8 and not resume and zero is not None:
            accelerator.save_state(str(folder))
        with accelerator.accumulate(model):
            loss = criterion(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            skipped = float(accelerator.optimizer_step_was_skipped)
            shown = loss.item() if math.isfinite(loss.item()) else -1.0
            printed += [shown, skipped, accelerator.scaler.get_scale(), scheduler.get_last_lr()[0]]
    state = accelerator.get_state_dict(model)
    return [*printed, *(float(value.double().sum()) for value in state.values())]


def run_half(*args: Any) -> list[float]:
    torch.set_num_threads(1)
    printed: list[float] = on_ranks(half_script, *args)
    return printed


@pytest.mark.filterwarnings("ignore:a value was read before")
@pytest.mark.parametrize(("stage", "accumulation"), [(2, 1), (3, 2)])
def test_fp16_on_two_ranks_is_that_of_one_process(pool: Pool, tmp_path: Path, stage: int, accumulation: int) -> None:
    expected = run_half(1, None, accumulation, tmp_path)
    steps = 10 // accumulation
    assert expected[1 : 4 * steps : 4] == [float(number == 4 // accumulation) for number in range(steps)]
    for printed in pool.run(2, run_half, 2, stage, accumulation, tmp_path):
        assert printed == pytest.approx(expected, abs=2e-3)
        for at in (1, 2, 3):
            assert printed[at : 4 * steps : 4] == pytest.approx(expected[at : 4 * steps : 4], abs=1e-12)
    if accumulation == 1:
        resumed = run_half(1, 1, accumulation, tmp_path, True)
        assert resumed == pytest.approx(expected[-len(resumed) :], abs=2e-3)


def without_optimizer() -> str:
    """Return the error of a loop that prepares its model alone."""
    from zerograph.errors import InputError
    from zerograph.integrations.accelerate import Accelerator

    def train() -> str:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        with pytest.raises(InputError) as raised:
            accelerator.backward(model(torch.ones(3, 2)).sum())
        return str(raised.value)

    return on_ranks(train)


def test_a_model_that_is_prepared_without_its_optimizer_is_an_error(pool: Pool) -> None:
    for error in pool.run(2, without_optimizer):
        assert "Pass the model's optimizer to accelerator.prepare()" in error


def habits(folder: Path, ranks: int, zero: int | None) -> list[Any]:
    """Repeat losses for a process's rows, stop when one process says so, save in hooks, share inputs unequally."""
    from accelerate.utils import gather_object

    if zero is None:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
    else:
        from zerograph.integrations.accelerate import Accelerator

        accelerator = Accelerator(cpu=True, zero=zero)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train, val = (DataLoader(samples(count), batch_size=8 // ranks) for count in (24, 13))
    model, optimizer, train, val = accelerator.prepare(model, optimizer, train, val)
    hooked: list[Any] = []

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        hooked.append(sorted(weights[0]))
        if accelerator.is_main_process:
            torch.save([float(one.detach().sum()) for one in models[0].parameters()], folder / "hooked.pt")

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(lambda models, input_dir: hooked.append(len(models)))
    printed = []
    for number, (x, y) in enumerate(train):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        printed.append(loss.item())
        if number == 1 and accelerator.is_main_process:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    losses = []
    for x, y in val:
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(x), y)
        losses.append(accelerator.gather_for_metrics(loss.repeat(8 // ranks)))
    accelerator.save_state(str(folder / "state"))
    accelerator.load_state(str(folder / "state"))
    saved = torch.load(folder / "hooked.pt")
    with accelerator.split_between_processes([1.0, 2.0, 3.0]) as parts:
        own = [model(torch.full((1, 6), one)).sum().item() for one in parts]
    printed += gather_object(own)
    if ranks > 1:
        with pytest.raises(RuntimeError, match=r"divided by the number of processes.*\nLeave the factor out"):
            loss * accelerator.num_processes
        assert json.loads(json.dumps(accelerator.num_processes)) == torch.tensor(4) // accelerator.num_processes
    return [*printed, float(torch.cat(losses).mean()), len(torch.cat(losses)), *saved, hooked]


def run_habits(*args: Any) -> list[Any]:
    torch.set_num_threads(1)
    printed: list[Any] = on_ranks(habits, *args)
    return printed


@pytest.mark.filterwarnings("ignore:a value was read before")
def test_repeated_losses_triggers_hooks_and_shared_inputs_are_those_of_one_process(pool: Pool, tmp_path: Path) -> None:
    *expected, hooked = run_habits(tmp_path, 1, None)
    for *printed, names in pool.run(2, run_habits, tmp_path, 2, 3):
        assert printed == pytest.approx(expected, abs=1e-5)
        assert names == hooked
