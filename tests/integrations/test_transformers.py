"""zerograph's ``Trainer`` on two ranks logs and saves what the ``Trainer`` of transformers does in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pool

pytest.importorskip("accelerate", reason="needs accelerate: pip install 'zerograph[transformers]'")

from tests.integrations import trainers
from tests.integrations.frameworks import fp16_on_cpu, on_ranks


def run(name: str, folder: Path, ranks: int, zero: Any, options: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    return on_ranks(run_here, name, folder, ranks, zero, options)


def run_here(name: str, folder: Path, ranks: int, zero: Any, options: dict[str, Any]) -> Any:
    return getattr(trainers, name)(folder, ranks, zero, **options)


def run_half(name: str, folder: Path, ranks: int, zero: int | None, options: dict[str, Any]) -> Any:
    """Train in fp16 as on a GPU, at a scale that overflows in the first steps."""
    import accelerate

    with fp16_on_cpu(accelerate.Accelerator, init_scale=2.0**22):
        return run(name, folder, ranks, zero, {"fp16": True, "save_strategy": "epoch", **options})


def assert_equal(logs: list[dict[str, float]], expected: list[dict[str, float]], within: float = 1e-5) -> None:
    assert len(logs) == len(expected)
    for log, plain in zip(logs, expected, strict=True):
        # FLOPs are estimates per rank.
        names = plain.keys() - {"total_flos"}
        assert {name: log[name] for name in names} == pytest.approx({name: plain[name] for name in names}, abs=within)


@pytest.mark.parametrize(
    ("name", "stage", "options"),
    [
        ("classifier", 2, {"train_sampling_strategy": "group_by_length", "gradient_checkpointing": True}),
        ("language_model", 3, {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1}),
        ("seq2seq", 3, {}),
    ],
)
def test_two_ranks_log_what_one_process_does(
    pool: Pool, tmp_path: Path, name: str, stage: int, options: dict[str, Any]
) -> None:
    expected = run(name, tmp_path / "plain", 1, None, options)
    for logs in pool.run(2, run, name, tmp_path / "zero", 2, stage, options):
        assert_equal(logs, expected)


def test_with_virtual_ranks_three_ranks_log_the_bits_of_one(pool: Pool, tmp_path: Path) -> None:
    zero = {"stage": 3, "virtual_ranks": 4}
    expected = run("language_model", tmp_path / "one", 1, zero, {"per_device_train_batch_size": 12})
    for logs in pool.run(3, run, "language_model", tmp_path / "3", 3, zero, {"per_device_train_batch_size": 4}):
        assert_equal(logs, expected, within=0)


@pytest.mark.parametrize(("stage", "optim"), [(2, "adamw_torch"), (3, "adamw_torch_fused")])
def test_fp16_on_two_ranks_logs_what_one_process_does(pool: Pool, tmp_path: Path, stage: int, optim: str) -> None:
    options = {"optim": optim, "logging_nan_inf_filter": False}
    expected = run_half("language_model", tmp_path / "plain", 1, None, options)
    names = ("learning_rate", "loss", "step")
    plain = [[log[name] for name in names if name in log] for log in expected]
    # A skipped update holds the schedule; of fused optimizers Accelerate does not know it.
    assert (plain[0][0] == plain[1][0]) == (optim == "adamw_torch")
    for logs in pool.run(2, run_half, "language_model", tmp_path / "zero", 2, stage, options):
        seen = [[log[name] for name in names if name in log] for log in logs]
        for log, one in zip(seen, plain, strict=True):
            assert log == pytest.approx(one, abs=5e-3)
    (folder,) = tmp_path.glob("plain/checkpoint-10")
    scales = [torch.load(one / folder.name / "scaler.pt") for one in (tmp_path / "plain", tmp_path / "zero")]
    assert scales[0]["scale"] < 2.0**22
    assert scales[0] == scales[1]


@pytest.mark.long
def test_a_run_resumes_on_four_ranks_and_then_on_one(pool: Pool, tmp_path: Path) -> None:
    # In the middle of an epoch of 4 steps.
    options = {"save_strategy": "steps", "save_steps": 3, "dataloader_drop_last": True}
    expected = run("language_model", tmp_path / "1", 1, None, options)
    pool.run(2, run, "language_model", tmp_path / "2", 2, 3, options)
    options["resume"] = str(tmp_path / "2" / "checkpoint-3")
    logs, *_ = pool.run(4, run, "language_model", tmp_path / "4", 4, 2, options)
    assert_equal(logs[:-1], expected[:-1], within=1e-6)
    options["resume"] = str(tmp_path / "4" / "checkpoint-6")
    assert_equal(run("language_model", tmp_path / "one", 1, 1, options)[:-1], expected[:-1], within=1e-6)


def test_a_resumed_run_draws_the_order_of_samples_that_the_plain_trainer_draws(tmp_path: Path) -> None:
    # In the middle of an epoch of 5 steps; this order is drawn from torch's generator.
    options = {"save_strategy": "steps", "save_steps": 3, "train_sampling_strategy": "group_by_length"}
    logs = []
    for folder, zero in ((tmp_path / "plain", None), (tmp_path / "zero", 2)):
        run("language_model", folder, 1, zero, options | {"max_steps": 3})
        options_of_rest = options | {"max_steps": 6, "resume": str(folder / "checkpoint-3")}
        logs.append(run("language_model", folder / "rest", 1, zero, options_of_rest))
    assert_equal(logs[1][:-1], logs[0][:-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp16": True}, r"fp16 on a CPU: .*fp32.*\(bf16=True\)"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size: .*memory_budget"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance.*group_by_length"),
    ],
)
def test_an_argument_that_is_not_supported_is_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    from zerograph.errors import ConfigError

    with pytest.raises(ConfigError, match=message):
        run("language_model", tmp_path, 1, 1, options)


def test_a_loss_logs_once_for_each_call(tmp_path: Path) -> None:
    options = {"kind": "numbers", "num_train_epochs": 1, "gradient_accumulation_steps": 2, "neftune_noise_alpha": 0.0}
    expected = run("language_model", tmp_path / "plain", 1, None, options)
    assert_equal(run("language_model", tmp_path / "zero", 1, 1, options), expected)


def test_a_loss_reads_values_and_counts(pool: Pool, tmp_path: Path) -> None:
    options = {"kind": "reading", "num_train_epochs": 1, "gradient_accumulation_steps": 2}
    expected = run("language_model", tmp_path / "plain", 1, None, options)
    assert expected[-1]["seen"] == 5
    for logs in pool.run(2, run, "language_model", tmp_path / "zero", 2, 3, options):
        assert_equal(logs, expected)


def test_a_loss_depends_on_the_step(pool: Pool, tmp_path: Path) -> None:
    options = {"kind": "scheduled", "gradient_accumulation_steps": 2}
    expected = run("language_model", tmp_path / "plain", 1, None, options)
    assert expected[-1]["read"] > 3
    for logs in pool.run(2, run, "language_model", tmp_path / "zero", 2, 3, options):
        assert_equal(logs, expected)
