"""Families of models, small, as their libraries define them: called with a batch, each returns a loss."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import transformers as T
from torch import Tensor, nn

Batch = dict[str, Tensor]
WORDS = 211
_SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
_LM = {**_SIZE, "vocab_size": WORDS, "num_key_value_heads": 2, "max_position_embeddings": 256}


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _words(rows: int, length: int, seed: int) -> Tensor:
    return torch.randint(3, WORDS, (rows, length), generator=_seeded(seed))


def _text(rows: int, seed: int, length: int = 64) -> Batch:
    """Draw tokens; of each row's labels another number is left out."""
    words = _words(rows, length, seed)
    labels = words.clone()
    for row in range(rows):
        labels[row, : (row * 5) % 13] = -100
    return {"input_ids": words, "labels": labels}


def _padded(rows: int, seed: int, length: int = 64) -> Batch:
    """Draw tokens with a mask of another length in each row."""
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(1, rows):
        mask[row, length - (row * 7) % 20 :] = 0
    labels = torch.randint(0, 5, (rows,), generator=_seeded(seed))
    return {"input_ids": _words(rows, length, seed), "attention_mask": mask, "labels": labels}


def _images(rows: int, seed: int) -> Batch:
    pixels = torch.randn(rows, 3, 32, 32, generator=_seeded(seed))
    return {"pixel_values": pixels, "labels": torch.randint(0, 7, (rows,), generator=_seeded(seed))}


def _vectors(rows: int, seed: int) -> Batch:
    return {
        "input": torch.randn(rows, 15, generator=_seeded(seed)),
        "labels": torch.randint(0, 3, (rows,), generator=_seeded(seed)),
    }


def _tagged(rows: int, seed: int) -> Batch:
    return {"input": _words(rows, 12, seed), "labels": _words(rows, 12, seed + 7)}


def _sound(rows: int, seed: int) -> Batch:
    return {"input_features": torch.randn(rows, 8, 64, generator=_seeded(seed)), "labels": _words(rows, 20, seed)}


class _Classifier(nn.Module):
    """A module and the cross entropy of its outputs."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, labels: Tensor, **inputs: Tensor) -> SimpleNamespace:
        (x,) = inputs.values()
        return SimpleNamespace(loss=F.cross_entropy(self.layers(x).flatten(0, -2), labels.flatten()))


class _Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], dropout: float) -> None:
        super().__init__()
        self.layers = kind(32, 32, 2, batch_first=True, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)[0]
        return output


def _recurrent(kind: Callable[..., nn.Module]) -> Callable[[float], nn.Module]:
    return lambda dropout: _Classifier(nn.Embedding(WORDS, 32), _Recurrent(kind, dropout), nn.Linear(32, WORDS))


def _mlp(dropout: float) -> nn.Module:
    return _Classifier(nn.Linear(15, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 3))


def _conv(dropout: float) -> nn.Module:
    return _Classifier(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, stride=2), nn.GroupNorm(4, 32), nn.SiLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(32, 7)),
    )


def _gpt2(dropout: float) -> nn.Module:
    size = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": WORDS}
    return T.GPT2LMHeadModel(T.GPT2Config(**size, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout))


def _llama(dropout: float) -> nn.Module:
    return T.LlamaForCausalLM(T.LlamaConfig(**_LM, attention_dropout=dropout))


def _qwen3(dropout: float) -> nn.Module:
    return T.Qwen3ForCausalLM(T.Qwen3Config(**_LM, head_dim=16, attention_dropout=dropout))


def _mixtral(dropout: float) -> nn.Module:
    return T.MixtralForCausalLM(T.MixtralConfig(**_LM, num_local_experts=4, attention_dropout=dropout))


def _bert(dropout: float) -> nn.Module:
    size = {**_SIZE, "vocab_size": WORDS, "num_labels": 5, "max_position_embeddings": 64}
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return T.BertForSequenceClassification(T.BertConfig(**size, **drop))


def _t5(dropout: float) -> nn.Module:
    size: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    config = T.T5Config(**size, vocab_size=WORDS, dropout_rate=dropout, decoder_start_token_id=0)
    return T.T5ForConditionalGeneration(config)


def _vit(dropout: float) -> nn.Module:
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return T.ViTForImageClassification(T.ViTConfig(**_SIZE, **drop, image_size=32, patch_size=8, num_labels=7))


def _whisper(dropout: float) -> nn.Module:
    size = {"d_model": 64, "max_source_positions": 32, "max_target_positions": 64, "num_mel_bins": 8}
    for part in ("encoder", "decoder"):
        size |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 96}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return T.WhisperForConditionalGeneration(T.WhisperConfig(vocab_size=WORDS, **size, **tokens, dropout=dropout))


# How a model is made with a rate of dropout, and a batch of some rows drawn from a seed.
FAMILIES: dict[str, tuple[Callable[[float], nn.Module], Callable[[int, int], Batch]]] = {
    "llama": (_llama, _text),
    "gpt2": (_gpt2, _text),
    "mlp": (_mlp, _vectors),
    "bert": (_bert, _padded),
    "conv": (_conv, _images),
    "llama192": (_llama, lambda rows, seed: _text(rows, seed, 192)),
    "qwen3": (_qwen3, _text),
    "mixtral": (_mixtral, _text),
    "whisper": (_whisper, _sound),
    "lstm": (_recurrent(nn.LSTM), _tagged),
    "gru": (_recurrent(nn.GRU), _tagged),
    "t5": (_t5, _text),
    "vit": (_vit, _images),
}
