"""Trainers and accelerators on two ranks do what they do in one process, call by call."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pool

pytest.importorskip("accelerate", reason="needs accelerate: pip install 'zerograph[transformers]'")

from tests.integrations import test_accelerate, trainers
from tests.integrations.frameworks import on_ranks
from tests.integrations.test_transformers import assert_equal, run
from zerograph.integrations.state import last_complete


def on_stages(name: str, folder: Path, stages: list[int], options: dict[str, Any]) -> list[Any]:
    return [run(name, folder / str(stage), 2, stage, options) for stage in stages]


@pytest.mark.parametrize(
    ("options", "at"), [({"kind": "bert"}, [0, 2]), ({"kind": "llama", "gradient_accumulation_steps": 2}, [1, 3])]
)
def test_each_stage_makes_the_calls_and_numbers_of_one_process(
    pool: Pool, tmp_path: Path, options: dict[str, Any], at: list[int]
) -> None:
    logs, calls, state = run("watched", tmp_path / "plain", 1, None, options)
    stages = pool.run(2, on_stages, "watched", tmp_path / "zero", at, options)[0]
    for seen in stages:
        assert_equal(seen[0], logs, within=1e-5)
        assert seen[1] == calls
        torch.testing.assert_close(seen[2], state, rtol=0, atol=1e-9)
        assert seen[0] == stages[0][0]
        torch.testing.assert_close(seen[2], stages[0][2], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["logging", "reading", "keeping", "deciding", "multiplying"])
def test_a_loss_reads_values_and_decides_by_them(pool: Pool, tmp_path: Path, kind: str) -> None:
    options = {"kind": kind, "num_train_epochs": 1}
    expected = run("language_model", tmp_path / "plain", 1, None, options)
    for logs in pool.run(2, run, "language_model", tmp_path / "zero", 2, 2, options):
        assert_equal(logs, expected)


def test_bf16_is_that_of_one_process(pool: Pool, tmp_path: Path) -> None:
    options = {"bf16": True, "optim": "sgd", "num_train_epochs": 1}
    expected = run("classifier", tmp_path / "plain", 1, None, options)
    for logs in pool.run(2, run, "classifier", tmp_path / "zero", 2, 3, options):
        assert_equal(logs, expected, within=1e-2)


def test_a_run_resumes_at_another_number_of_ranks_and_loads_plainly(pool: Pool, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "dataloader_drop_last": True}
    expected = run("language_model", tmp_path / "plain", 1, None, options)
    pool.run(2, run, "language_model", tmp_path / "zero", 2, 3, options)
    plain = GPT2LMHeadModel.from_pretrained(tmp_path / "plain" / "saved").state_dict()
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "zero" / "saved").state_dict()
    torch.testing.assert_close(saved, plain, rtol=0, atol=1e-5)
    options["resume"] = str(tmp_path / "zero" / "checkpoint-3")
    assert_equal(run("language_model", tmp_path / "one", 1, 1, options)[:-1], expected[:-1])
    for logs in pool.run(2, run, "language_model", tmp_path / "two", 2, 2, options):
        assert_equal(logs[:-1], expected[:-1])


def gathered() -> tuple[Any, str]:
    """Gather results, and a tensor that differs between the ranks."""
    import zerograph as zg
    from zerograph.integrations.accelerate import Accelerator

    def gather() -> tuple[Any, str]:
        accelerator = Accelerator(cpu=True, zero=2)
        model = torch.nn.Linear(6, 4)
        loader = torch.utils.data.DataLoader(test_accelerate.samples(13), batch_size=4)
        model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        labels = torch.cat([accelerator.gather_for_metrics((model(x), y))[1] for x, y in loader])
        with pytest.raises(zg.RankMismatchError) as raised:
            accelerator.gather(torch.tensor([zg.rank()]))
        return labels.tolist(), str(raised.value)

    return on_ranks(gather)


def test_gathered_values_have_each_sample_once_and_are_equal_on_all_ranks(pool: Pool) -> None:
    for labels, error in pool.run(2, gathered):
        assert labels == test_accelerate.samples(13).tensors[1].tolist()
        assert "accelerator.gather()" in error


def terminated(folder: Path) -> int:
    """Train until rank 1 gets SIGTERM in its second step; return the number of steps."""

    def terminate() -> int:
        from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

        class Terminating(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == 1 and args.process_index == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                elif state.global_step > 1:
                    time.sleep(0.2)

        tokens = {"bos_token_id": 0, "eos_token_id": 0}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, **tokens))
        trainer = trainers.trainer_class(2)(
            model=model,
            args=trainers.arguments(folder, 2, enable_jit_checkpoint=True, num_train_epochs=20),
            train_dataset=trainers.texts(37),
            callbacks=[Terminating()],
            zero={"stage": 2, "timeout": 20},
        )
        trainer._saves_on_signal.kill_wait = 0.0
        trainer.train()
        return int(trainer.state.global_step)

    return on_ranks(terminate)  # type: ignore[no-any-return]


def test_sigterm_of_one_rank_saves_a_checkpoint_on_all_after_the_same_step(pool: Pool, tmp_path: Path) -> None:
    steps, other = pool.run(2, terminated, tmp_path)
    assert steps == other < 10
    assert last_complete(tmp_path) == str(tmp_path / f"checkpoint-{steps - 1}")
