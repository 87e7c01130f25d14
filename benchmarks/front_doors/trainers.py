"""The examples of transformers and PEFT: ``run_clm.py``, ``run_glue.py`` and others, on generated data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from benchmarks.front_doors.door import Door
from tests.integrations.trainers import tokenizer, word_texts

SAMPLES = 61
# Sizes of all models.
WIDTH, HEADS, INSIDE, VOCABULARY = 32, 2, 64, 32
_BERT = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": INSIDE}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def arguments(door: Door, kind: Any = transformers.TrainingArguments, **options: Any) -> Any:
    """Return the training arguments that a user gives on the command line."""
    return kind(
        output_dir=str(door.folder),
        max_steps=door.steps,
        per_device_train_batch_size=door.batch_size,
        per_device_eval_batch_size=door.batch_size,
        gradient_accumulation_steps=door.accumulation,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"learning_rate": 1e-3} | options,
    )


def losses(trainer: Any) -> list[float]:
    """Train, evaluate, and return the loss of each step and the metrics of the evaluation."""
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    metrics = trainer.evaluate() if trainer.eval_dataset is not None else {}
    logged = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    clock = ("runtime", "per_second", "time", "epoch")
    return [*logged, *(value for name, value in metrics.items() if not any(part in name for part in clock))]


def sentences(count: int = SAMPLES) -> list[dict[str, Any]]:
    """Tokenize sentences of different lengths."""
    words = tokenizer()
    return [{"input_ids": words(text)["input_ids"]} for text, _ in zip(word_texts(1), range(count), strict=False)]


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def run_clm(door: Door) -> list[float]:
    """Train GPT-2 on texts that are concatenated and cut into blocks."""
    trainer_class = door.trainer(transformers.Trainer)
    block = 16
    ids = [token for one in sentences(400) for token in one["input_ids"]][: SAMPLES * block]
    blocks = [ids[begin : begin + block] for begin in range(0, len(ids), block)]
    dataset = [{"input_ids": one, "labels": one} for one in blocks]
    sizes = {"n_positions": block, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **sizes)
    trainer = trainer_class(
        model=transformers.GPT2LMHeadModel(config),
        args=arguments(door, warmup_steps=5, weight_decay=0.1),
        train_dataset=dataset,
        eval_dataset=dataset[:13],
        data_collator=transformers.default_data_collator,
    )
    return losses(trainer)


def bert() -> Any:
    """Return a small BERT that tells three kinds of sentences apart."""
    config = transformers.BertConfig(vocab_size=VOCABULARY, num_hidden_layers=2, num_labels=3, **_BERT, **_NO_DROPOUT)
    return transformers.BertForSequenceClassification(config)


def run_glue(door: Door) -> list[float]:
    """Train BERT to classify sentences, padded in each batch, and compute the accuracy."""
    trainer_class = door.trainer(transformers.Trainer)
    dataset = [{**one, "label": sum(one["input_ids"]) % 3} for one in sentences()]
    trainer = trainer_class(
        model=bert(),
        args=arguments(door),
        train_dataset=dataset,
        eval_dataset=dataset[:13],
        data_collator=transformers.DataCollatorWithPadding(tokenizer()),
        compute_metrics=accuracy,
    )
    return losses(trainer)


def run_summarization(door: Door) -> list[float]:
    """Train T5 on pairs of texts, both padded, and generate in the evaluation."""
    trainer_class = door.trainer(transformers.Seq2SeqTrainer)
    dataset = [{**one, "labels": one["input_ids"][:5]} for one in sentences()]
    sizes = {"d_model": WIDTH, "d_kv": 16, "d_ff": INSIDE, "num_layers": 2, "num_heads": HEADS}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, **sizes, **tokens)
    )
    trainer = trainer_class(
        model=model,
        args=arguments(
            door, transformers.Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=8
        ),
        train_dataset=dataset,
        eval_dataset=dataset[:13],
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer(), model=model),
        compute_metrics=lambda one: {"length": float((one.predictions > 0).sum()) / len(one.predictions)},
    )
    return losses(trainer)


def run_image_classification(door: Door) -> list[float]:
    """Train ViT on pictures, and compute the accuracy."""
    trainer_class = door.trainer(transformers.Trainer)
    pictures = torch.randn(SAMPLES, 3, 16, 16)
    dataset = [{"pixel_values": one, "label": number % 4} for number, one in enumerate(pictures)]

    def collate_fn(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        values = torch.stack([example["pixel_values"] for example in examples])
        return {"pixel_values": values, "labels": torch.tensor([example["label"] for example in examples])}

    sizes = {"image_size": 16, "patch_size": 4, "num_hidden_layers": 2, "num_labels": 4}
    trainer = trainer_class(
        model=transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **_BERT, **_NO_DROPOUT)),
        args=arguments(door, lr_scheduler_type="cosine"),
        train_dataset=dataset,
        eval_dataset=dataset[:13],
        data_collator=collate_fn,
        compute_metrics=accuracy,
    )
    return losses(trainer)


@dataclass
class DataCollatorCTCWithPadding:
    """Pad sounds with zeros and transcripts with -100, as the example's collator of this name does."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        sounds = [torch.as_tensor(one["input_values"]) for one in features]
        labels = [torch.as_tensor(one["labels"]) for one in features]
        padded = torch.nn.utils.rnn.pad_sequence
        return {
            "input_values": padded(sounds, batch_first=True),
            "attention_mask": padded([torch.ones(len(one), dtype=torch.long) for one in sounds], batch_first=True),
            "labels": padded(labels, batch_first=True, padding_value=-100),
        }


def run_speech_recognition_ctc(door: Door) -> list[float]:
    """Train Wav2Vec2 with the CTC loss on sounds and transcripts of different lengths."""
    trainer_class = door.trainer(transformers.Trainer)
    lengths = torch.randint(300, 500, (SAMPLES,)).tolist()
    dataset = [
        {"input_values": torch.randn(length), "labels": torch.randint(1, 12, (3 + length % 3,))} for length in lengths
    ]
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 4}
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0}
    config = transformers.Wav2Vec2Config(
        vocab_size=12,
        num_hidden_layers=2,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer",
        apply_spec_augment=False,
        layerdrop=0.0,
        activation_dropout=0.0,
        ctc_loss_reduction="mean",
        pad_token_id=0,
        **_BERT,
        **convolutions,
        **dropout,
    )
    trainer = trainer_class(
        model=transformers.Wav2Vec2ForCTC(config),
        args=arguments(door),
        train_dataset=dataset,
        eval_dataset=dataset[:13],
        data_collator=DataCollatorCTCWithPadding(),
    )
    return losses(trainer)


def run_ner(door: Door) -> list[float]:
    """Train DistilBERT to classify tokens; padded labels are -100."""
    trainer_class = door.trainer(transformers.Trainer)
    dataset = [{**one, "labels": [token % 5 for token in one["input_ids"]]} for one in sentences()]
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=WIDTH, n_layers=2, n_heads=HEADS, hidden_dim=INSIDE, num_labels=5
    )
    config.dropout = config.attention_dropout = 0.0

    def compute_metrics(prediction: Any) -> dict[str, float]:
        real = prediction.label_ids != -100
        right = (prediction.predictions.argmax(-1) == prediction.label_ids) & real
        return {"accuracy": float(np.sum(right) / np.sum(real))}

    trainer = trainer_class(
        model=transformers.DistilBertForTokenClassification(config),
        args=arguments(door, label_smoothing_factor=0.1),
        train_dataset=dataset,
        eval_dataset=dataset[:13],
        data_collator=transformers.DataCollatorForTokenClassification(tokenizer()),
        compute_metrics=compute_metrics,
    )
    return losses(trainer)


def llama() -> Any:
    """Return a small Llama."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": INSIDE, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes, **tokens))


def peft_lora(door: Door) -> list[float]:
    """Train an adapter on a frozen Llama, on padded texts."""
    import peft

    trainer_class = door.trainer(transformers.Trainer)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    dataset: Any = sentences()
    trainer = trainer_class(
        model=peft.get_peft_model(llama(), config),
        args=arguments(door, learning_rate=1e-2),
        train_dataset=dataset,
        eval_dataset=dataset[:13],
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False),
    )
    return losses(trainer)
