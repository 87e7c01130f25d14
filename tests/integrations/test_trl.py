"""Trainers of TRL with the mixin on two ranks log what they do in one process, their metrics included."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.frameworks import on_ranks
from tests.integrations.test_transformers import assert_equal
from tests.integrations.trainers import llama, logged, tokenizer, word_texts
from tests.pool import Pool, RanksError

pytest.importorskip("trl", reason="needs trl: pip install trl")
pytest.importorskip("datasets", reason="needs datasets: pip install datasets")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def train(
    kind: str, folder: Path, ranks: int, zero: int | None, options: dict[str, Any], lora: bool = False
) -> list[dict[str, float]]:
    import datasets
    import trl
    from transformers import LlamaForSequenceClassification

    from zerograph.integrations.transformers import ZeroTrainerMixin

    datasets.disable_progress_bars()
    place = importlib.import_module(f"trl.experimental.{kind.lower()}") if kind in ("ORPO", "CPO") else trl
    config = getattr(place, f"{kind}Config")(
        output_dir=str(folder),
        per_device_train_batch_size=8 // ranks,
        per_device_eval_batch_size=8 // ranks,
        learning_rate=5e-3,
        logging_steps=1,
        eval_strategy="epoch",
        num_train_epochs=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        bf16=False,
        **{"gradient_checkpointing": False} | options,
    )
    more: dict[str, Any] = {}
    model: Any = llama()
    if kind == "SFT":
        rows = [{"text": text} for text, _ in zip(word_texts(1), range(21), strict=False)]
    else:
        rows = [{"chosen": a, "rejected": b} for a, b, _ in zip(word_texts(1), word_texts(2), range(21), strict=False)]
    if kind in ("DPO", "ORPO", "CPO"):
        rows = [{"prompt": "w1 w2 ", **row} for row in rows]
    if kind == "DPO":
        if lora:
            # The reference is the model without its adapters.
            from peft import LoraConfig

            torch.manual_seed(1)
            more["peft_config"] = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "up_proj"])
        else:
            more["ref_model"] = llama()
            with torch.no_grad():
                more["ref_model"].lm_head.weight.mul_(1.5)
    if kind == "Reward":
        rows = [{**row, "margin": 0.1 * number} for number, row in enumerate(rows)]
        torch.manual_seed(0)
        model.config.num_labels = 1
        model = LlamaForSequenceClassification(model.config)
    data = datasets.Dataset.from_list(rows)
    plain = getattr(place, f"{kind}Trainer")
    if zero is not None:
        more["zero"] = zero
    trainer = (plain if zero is None else type(plain.__name__, (ZeroTrainerMixin, plain), {}))(
        model=model,
        args=config,
        train_dataset=data,
        eval_dataset=data.select(range(10)),
        processing_class=tokenizer(),
        **more,
    )
    trainer.train()
    return logged(trainer)


def run(*args: Any) -> Any:
    torch.set_num_threads(1)
    return on_ranks(train, *args)


@pytest.mark.parametrize(
    ("kind", "stage", "options"),
    [
        ("SFT", 3, {}),
        ("DPO", 2, {"gradient_accumulation_steps": 2}),
        ("Reward", 3, {"dataloader_drop_last": True}),
        ("ORPO", 3, {}),
        ("CPO", 2, {}),
    ],
)
def test_two_ranks_log_what_one_process_does(
    pool: Pool, tmp_path: Path, kind: str, stage: int, options: dict[str, Any]
) -> None:
    expected = run(kind, tmp_path / "plain", 1, None, options)
    for logs in pool.run(2, run, kind, tmp_path / "zero", 2, stage, options):
        assert_equal(logs, expected)


def test_the_reference_may_be_the_model_without_its_adapters(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft: pip install peft")
    expected = run("DPO", tmp_path / "plain", 1, None, {}, True)
    for logs in pool.run(2, run, "DPO", tmp_path / "zero", 2, 3, {}, True):
        assert_equal(logs, expected)


def reward(prompts: list[str], completions: list[str], weight: list[float], **kwargs: Any) -> list[float]:
    """Reward distinct words, and more where a completion repeats one of its prompt."""
    return [
        factor * len(set(text.split())) + len(set(text.split()) & set(prompt.split()))
        for prompt, text, factor in zip(prompts, completions, weight, strict=True)
    ]


def generate_and_train(
    kind: str, folder: Path, ranks: int, zero: int | None, options: dict[str, Any], differing: float = 0.0
) -> tuple[list[dict[str, float]], list[Any], dict[str, torch.Tensor]]:
    """Train in fp64 on sampled texts; return the logs, the texts with their rewards, and the parameters.

    Args:
        differing: how much more a rank rewards than the one before.
    """
    import datasets
    import trl
    from transformers import AutoModelForCausalLM

    import zerograph as zg
    from zerograph.integrations.transformers import ZeroTrainerMixin

    datasets.disable_progress_bars()
    texts: list[Any] = []

    def noted(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        rewards = [one + differing * zg.rank() for one in reward(prompts, completions, **columns)]
        texts.append((prompts, completions, rewards))
        return rewards

    config = getattr(trl, f"{kind}Config")(
        output_dir=str(folder),
        per_device_train_batch_size=8 // ranks,
        per_device_eval_batch_size=8 // ranks,
        num_generations=4,
        max_completion_length=6,
        learning_rate=5e-2,
        logging_steps=1,
        max_steps=6,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        bf16=False,
        **{"gradient_checkpointing": False} | options,
    )
    rows = [{"prompt": text, "weight": 1.0 + 0.1 * n} for n, text in zip(range(12), word_texts(1), strict=False)]
    data = datasets.Dataset.from_list(rows)
    plain = getattr(trl, f"{kind}Trainer")
    trainer = (plain if zero is None else type(plain.__name__, (ZeroTrainerMixin, plain), {}))(
        # A reference model is loaded from where the model was.
        model=AutoModelForCausalLM.from_pretrained(folder.parent / "model", dtype=torch.float64),
        reward_funcs=noted,
        args=config,
        train_dataset=data,
        eval_dataset=data.select(range(2)),
        processing_class=tokenizer(),
        **({} if zero is None else {"zero": zero}),
    )
    trainer.train()
    return logged(trainer), texts, dict(trainer.model.state_dict())


def run_generating(*args: Any) -> Any:
    torch.set_num_threads(1)
    return on_ranks(generate_and_train, *args)


@pytest.mark.parametrize(
    ("kind", "stage", "options"),
    [
        ("GRPO", 2, {}),
        # Two micro-batches of each generated batch, twice, with a reference model.
        ("GRPO", 3, {"steps_per_generation": 2, "num_iterations": 2, "beta": 0.1, "eval_strategy": "epoch"}),
        ("RLOO", 3, {"gradient_accumulation_steps": 2, "pad_to_multiple_of": 8}),
    ],
)
def test_two_ranks_generate_and_learn_what_one_process_does(
    pool: Pool, tmp_path: Path, kind: str, stage: int, options: dict[str, Any]
) -> None:
    llama().save_pretrained(tmp_path / "model")
    logs, texts, parameters = run_generating(kind, tmp_path / "plain", 1, None, options)
    for seen in pool.run(2, run_generating, kind, tmp_path / "zero", 2, stage, options):
        assert_equal(seen[0], logs)
        assert seen[1] == texts
        # TRL computes log-probabilities in fp32.
        torch.testing.assert_close(seen[2], parameters, rtol=0, atol=1e-6)


def test_rewards_that_differ_between_the_ranks_are_an_error(pool: Pool, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    with pytest.raises(RanksError, match=r"RankMismatchError: .*generated texts and their rewards"):
        pool.run(2, run_generating, "GRPO", tmp_path / "zero", 2, 2, {}, 0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precompute_ref_log_probs": True}, "precompute_ref_log_probs: the reference model is part of the step"),
        ({"sync_ref_model": True}, "sync_ref_model"),
    ],
)
def test_an_argument_that_is_not_supported_is_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    from zerograph.errors import ConfigError

    with pytest.raises(ConfigError, match=message):
        run("DPO", tmp_path, 1, 3, options)


def test_a_trainer_that_is_not_supported_is_named(tmp_path: Path) -> None:
    from transformers import TrainingArguments
    from trl import SFTTrainer

    from zerograph.errors import ConfigError
    from zerograph.integrations.unsupported import refuse_unsupported

    class NewTrainer:
        __module__ = "trl.experimental.new"

    arguments = TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ConfigError, match=r"NewTrainer: .*zg\.prepare"):
        refuse_unsupported(type("Mine", (NewTrainer,), {}), arguments)
    refuse_unsupported(SFTTrainer, arguments)
