"""The ``Trainer`` of transformers, zerograph's and its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as T

from tests.gpu.comparison import deviation, in_a_process

pytest.importorskip("accelerate", reason="the trainer needs accelerate")
WORDS = 199


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, WORDS, (64,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": words, "labels": words.clone()}


def losses(folder: Path, device: str, precision: str, steps: int, *, ours: bool) -> list[float]:
    torch.manual_seed(0)
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = T.LlamaForCausalLM(T.LlamaConfig(vocab_size=WORDS, **size, **heads))
    args = T.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=steps,
        logging_steps=1,
        learning_rate=1e-3,
        report_to=[],
        save_steps=max(2, steps // 2),
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        optim="adamw_torch_fused",
        disable_tqdm=True,
        use_cpu=device == "cpu",
    )
    if ours:
        from zerograph.integrations.transformers import Trainer

        trainer = Trainer(model=model, args=args, train_dataset=Words(), zero=3)
    else:
        trainer = T.Trainer(model=model, args=args, train_dataset=Words())
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def compared(folder: Path, device: str, precision: str, steps: int) -> float:
    own = losses(folder / "own", device, precision, steps, ours=False)
    return deviation(losses(folder / "zero", device, precision, steps, ours=True), own)


@pytest.mark.long
@pytest.mark.parametrize(
    ("precision", "limit"), [("bf16", 3e-4), ("fp32", 2e-6), ("fp16", 3e-4)], ids=["bf16", "fp32", "fp16"]
)
def test_the_trainer_trains_as_transformers_own(
    precision: str,
    limit: float,
    device: str,
    steps: int,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    if precision == "fp16" and device == "cpu":
        pytest.skip("fp16 is for accelerators")
    apart = in_a_process(compared, tmp_path, device, precision, 3 * steps)
    record_property("deviation", apart)
    assert apart < limit
