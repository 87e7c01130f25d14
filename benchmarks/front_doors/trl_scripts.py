"""The examples of TRL, ``sft.py`` and ``dpo.py``, on generated data."""

from __future__ import annotations

import copy
from typing import Any

import datasets
import trl

from benchmarks.front_doors.door import Door
from benchmarks.front_doors.trainers import SAMPLES, arguments, llama, losses
from tests.integrations.trainers import tokenizer, word_texts

datasets.disable_progress_bars()


def trl_sft(door: Door) -> list[float]:
    """Fine-tune a Llama on texts."""
    trainer_class = door.trainer(trl.SFTTrainer)
    rows = datasets.Dataset.from_list([{"text": text} for text in _texts(1)])
    return losses(trainer_class(model=llama(), args=_options(door, trl.SFTConfig), **_data(rows)))


def trl_dpo(door: Door) -> list[float]:
    """Train a Llama on pairs of answers, beside a frozen reference."""
    trainer_class = door.trainer(trl.DPOTrainer)
    pairs = zip(_texts(1), _texts(2), strict=True)
    rows = datasets.Dataset.from_list([{"prompt": "w1 w2 ", "chosen": a, "rejected": b} for a, b in pairs])
    model = llama()
    trainer = trainer_class(
        model=model, ref_model=copy.deepcopy(model), args=_options(door, trl.DPOConfig), **_data(rows)
    )
    return losses(trainer)


def _options(door: Door, kind: Any) -> Any:
    return arguments(door, kind, bf16=False, gradient_checkpointing=False)


def _data(rows: Any) -> dict[str, Any]:
    return {"train_dataset": rows, "eval_dataset": rows.select(range(13)), "processing_class": tokenizer()}


def _texts(seed: int) -> list[str]:
    return [text for text, _ in zip(word_texts(seed), range(SAMPLES), strict=False)]
