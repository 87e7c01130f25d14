"""Small training scripts of transformers: with its ``Trainer``, or with zerograph's where ``zero`` is a stage."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from zerograph.runtime.state import stores_of

# What a log has that depends on the clock.
_CLOCK = ("runtime", "per_second", "time")


def trainer_class(zero: int | None) -> Any:
    if zero is None:
        from transformers import Trainer
    else:
        from zerograph.integrations.transformers import Trainer
    return Trainer


def sentences(count: int) -> list[dict[str, Any]]:
    """Draw sentences of different lengths, each with a class."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 20, (count,), generator=generator).tolist()
    ids = [torch.randint(1, 32, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": one, "labels": sum(one) % 3} for one in ids]


def pad(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(one["input_ids"]) for one in samples)
    ids = torch.tensor([one["input_ids"] + [0] * (longest - len(one["input_ids"])) for one in samples])
    labels = torch.tensor([one["labels"] for one in samples])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def texts(count: int) -> list[dict[str, Tensor]]:
    """Draw texts for a language model, whose first tokens are not trained."""
    generator = torch.Generator().manual_seed(2)
    samples = []
    for _ in range(count):
        ids = torch.randint(0, 32, (12,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(0, 9, (1,), generator=generator))] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def tokenizer() -> Any:
    """Return a tokenizer of 32 words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"w{number}" for number in range(29))]
    words_of = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    words_of.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words_of, **special)


def word_texts(seed: int) -> Iterator[str]:
    """Draw texts of different lengths, as words."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        length = int(torch.randint(4, 12, (1,), generator=generator))
        yield " ".join(f"w{int(word)}" for word in torch.randint(0, 29, (length,), generator=generator))


def metrics(prediction: Any) -> dict[str, float]:
    rows = prediction.predictions.astype(np.float64)
    return {
        "accuracy": float((rows.argmax(-1) == prediction.label_ids).mean()),
        "count": float(len(rows)),
        "weighted": float((rows * np.arange(rows.size).reshape(rows.shape)).mean()),
    }


def arguments(folder: Path, ranks: int, kind: str = "TrainingArguments", **options: Any) -> Any:
    import transformers

    return getattr(transformers, kind)(
        output_dir=str(folder),
        per_device_eval_batch_size=8 // ranks,
        learning_rate=5e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"per_device_train_batch_size": 8 // ranks, "save_strategy": "no", "num_train_epochs": 2} | options,
    )


def classifier(folder: Path, ranks: int, zero: int | None, **options: Any) -> list[dict[str, float]]:
    """Train BERT on padded sentences with class weights, and evaluate metrics."""
    from transformers import BertConfig, BertForSequenceClassification

    class Weighted(trainer_class(zero)):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(**{key: value for key, value in inputs.items() if key != "labels"})
            loss = F.cross_entropy(outputs.logits, inputs["labels"], torch.tensor([1.0, 2.0, 0.5]))
            return (loss, outputs) if return_outputs else loss

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=32, max_position_embeddings=32, num_labels=3, **sizes, **dropout)
    )
    data = sentences(37)
    trainer = Weighted(
        model=model,
        args=arguments(folder, ranks, eval_strategy="epoch", **options),
        train_dataset=data,
        eval_dataset=data[:13],
        data_collator=pad,
        compute_metrics=metrics,
        **({} if zero is None else {"zero": zero}),
    )
    trainer.train()
    return logged(trainer)


def language_model(
    folder: Path, ranks: int, zero: int | None, resume: str | None = None, kind: str = "", **options: Any
) -> list[dict[str, float]]:
    """Train GPT-2 on texts, resume, and save it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    trainer = (special(zero, kind) if kind else trainer_class(zero))(
        model=model,
        args=arguments(folder, ranks, **options),
        train_dataset=texts(37),
        **({} if zero is None else {"zero": zero}),
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "saved"))
    return logged(trainer)


def watched(
    folder: Path, ranks: int, zero: Any, kind: str, **options: Any
) -> tuple[list[dict[str, float]], list[Any], dict[str, Tensor]]:
    """Train a model in fp64 with clipping, evaluate, predict; return its numbers, calls, and state."""
    from transformers import BertConfig, BertForSequenceClassification, TrainerCallback

    calls: list[Any] = []
    losses: list[float] = []

    class Watched(trainer_class(zero)):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(model, inputs, *args, **kwargs)
            loss = result[0] if isinstance(result, tuple) else result
            calls.append(("loss", len(inputs["input_ids"])))
            losses.append(loss.item())
            return result

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("step")
            return super().training_step(*args, **kwargs)

    class Events(TrainerCallback):
        pass

    def event(name: str) -> Any:
        return lambda self, args, state, control, **kwargs: calls.append((name, state.global_step))

    for name in vars(TrainerCallback):
        if name.startswith("on_"):
            setattr(Events, name, event(name))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bert = BertConfig(vocab_size=32, max_position_embeddings=32, num_labels=3, **sizes, **dropout)
    model = BertForSequenceClassification(bert) if kind == "bert" else llama()
    data: Any = sentences(37) if kind == "bert" else texts(37)
    trainer = Watched(
        model=model.double(),
        args=arguments(folder, ranks, max_grad_norm=0.2, eval_strategy="epoch", **options),
        train_dataset=data,
        eval_dataset=data[:13],
        compute_metrics=lambda seen: {"sum": float(seen.predictions.sum()), "rows": len(seen.label_ids)},
        callbacks=[Events()],
        **({"data_collator": pad} if kind == "bert" else {}),
        **({} if zero is None else {"zero": zero}),
    )
    trainer.evaluate()
    trainer.train()
    calls.append(("predicted", trainer.predict(data[:11]).predictions.shape))
    return [*logged(trainer), *({"computed": loss} for loss in losses)], calls, dict(trainer.model.state_dict())


def special(zero: int | None, kind: str) -> Any:
    """Return a trainer whose loss depends on the step, reads values, counts, keeps a tensor, or branches."""

    class Special(trainer_class(zero)):  # type: ignore[misc]
        seen = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.losses: list[float] = []

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            self.seen += 1
            if kind == "scheduled":
                loss = loss * (1 + 0.1 * self.state.global_step) + (0.1 if self.state.epoch >= 1 else 0.0)
                if self.state.global_step % 3 == 2:
                    self.losses.append(loss.item())
            if kind == "logging":
                self.log({"inner": loss.item()})
            if kind in ("logging", "numbers"):
                self.log({"number": 1.0})
            if kind == "reading":
                tokens = (args[1]["labels"] != -100).sum()
                self.losses.append(float(loss) + (1 / tokens.item() if tokens > 0 else 0.0))
            if kind == "keeping":
                self.last = loss.detach()
            if kind == "deciding" and loss.item() > 3:
                loss = 0.1 * loss
            return loss * loss.item() if kind == "multiplying" else loss

        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            super().log({**logs, "seen": self.seen, "read": sum(self.losses)}, *args, **kwargs)

    return Special


def logged(trainer: Any) -> list[dict[str, float]]:
    """Return the trainer's logs without what depends on the clock."""
    return [
        {name: value for name, value in log.items() if not any(part in name for part in _CLOCK)}
        for log in trainer.state.log_history
    ]


def seq2seq(folder: Path, ranks: int, zero: int | None) -> list[dict[str, float]]:
    """Train T5, and evaluate the tokens that it generates."""
    from transformers import T5Config, T5ForConditionalGeneration

    if zero is None:
        from transformers import Seq2SeqTrainer
    else:
        from zerograph.integrations.transformers import Seq2SeqTrainer
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    model = T5ForConditionalGeneration(T5Config(vocab_size=40, dropout_rate=0.0, **sizes, **tokens))
    generator = torch.Generator().manual_seed(3)
    data = [
        {name: torch.randint(2, 40, (6,), generator=generator) for name in ("input_ids", "labels")} for _ in range(21)
    ]
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments(
            folder,
            ranks,
            "Seq2SeqTrainingArguments",
            num_train_epochs=1,
            eval_strategy="epoch",
            predict_with_generate=True,
            generation_max_length=8,
        ),
        train_dataset=data,
        eval_dataset=data[:13],
        compute_metrics=lambda seen: {"tokens": float(seen.predictions.clip(0).sum()), "rows": len(seen.predictions)},
        **({} if zero is None else {"zero": zero}),
    )
    trainer.train()
    return logged(trainer)


def adapters(folder: Path, ranks: int, zero: int | None, kinds: list[str]) -> dict[str, list[dict[str, float]]]:
    """Train adapters of PEFT on a frozen Llama, and save them alone."""
    return {kind: adapter(folder / kind, ranks, zero, kind) for kind in kinds}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=32, **sizes, **tokens))


def llama_in_8_bits() -> Any:
    """Load the Llama as bitsandbytes quantizes it."""
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        # Of several ranks transformers lets one save.
        llama().config.save_pretrained(folder)
        save_file(llama().state_dict(), Path(folder) / "model.safetensors", {"format": "pt"})
        config = BitsAndBytesConfig(load_in_8bit=True)
        # The model keeps its path, which must be the same on all ranks.
        with contextlib.chdir(folder):
            return LlamaForCausalLM.from_pretrained(".", quantization_config=config, dtype=torch.float32)


def adapter(folder: Path, ranks: int, zero: int | None, kind: str) -> list[dict[str, float]]:
    import peft

    layers = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
    config = {
        "lora": lambda: peft.LoraConfig(r=2, **layers),
        "lora in 8 bits": lambda: peft.LoraConfig(r=2, **layers),
        "dora": lambda: peft.LoraConfig(r=2, use_dora=True, **layers),
        "lora and a layer": lambda: peft.LoraConfig(r=2, modules_to_save=["lm_head"], **layers),
        "ia3": lambda: peft.IA3Config(feedforward_modules=[], **layers),
        "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    }[kind]()
    base = llama_in_8_bits() if kind == "lora in 8 bits" else llama()
    model = peft.get_peft_model(base, config)
    trainer = trainer_class(zero)(
        model=model,
        args=arguments(folder, ranks, num_train_epochs=1),
        train_dataset=texts(29),
        **({} if zero is None else {"zero": zero}),
    )
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    if zero is not None:
        stores = stores_of(model.parameters())
        frozen = [one for one in stores if not any(parameter.requires_grad for parameter in one.parameters)]
        # At stage 3 a rank holds its part of a frozen model.
        whole = sum(parameter.numel() for one in frozen for parameter in one.parameters)
        assert whole > 0.85 * sum(one.numel() for one in model.parameters())
        assert sum(one.flat.numel() for one in frozen) <= whole / ranks + 64
    return logged(trainer)
