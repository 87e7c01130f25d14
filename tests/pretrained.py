"""Tiny models of transformers, in folders as ``save_pretrained`` writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61}
_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=61, n_positions=64, **_TOKENS)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_GROUPED, **_TOKENS))


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_GROUPED, **_TOKENS, tie_word_embeddings=True))


def opt() -> nn.Module:
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.OPTConfig(
        **sizes, word_embed_proj_dim=32, vocab_size=61, max_position_embeddings=64, **_TOKENS
    )
    return transformers.OPTForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=32, d_ff=48, num_layers=1, num_heads=4, d_kv=8, vocab_size=61, decoder_start_token_id=0, **_TOKENS
    )
    return transformers.T5ForConditionalGeneration(config)


def mixtral(**sizes: int) -> nn.Module:
    """Return a model whose files hold each expert apart: transformers joins them as it loads them."""
    config = transformers.MixtralConfig(**{**_GROUPED, **sizes}, **_TOKENS, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


FAMILIES: dict[str, Callable[[], Any]] = {
    function.__name__: function for function in (gpt2, llama, qwen3, opt, t5, mixtral)
}


def bert() -> nn.Module:
    """Return an encoder without a head."""
    return transformers.BertModel(transformers.BertConfig(**_SIZES, vocab_size=61, max_position_embeddings=64))


def make(name: str) -> Any:
    """Return a family's model with the same values at each call, far from zero so that no two logits are close."""
    torch.manual_seed(0)
    model = FAMILIES[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model


def save(model: Any, folder: Path, shards: bool = True) -> Path:
    """Write a model into a folder, in several files unless ``shards`` is False."""
    model.save_pretrained(folder, **({"max_shard_size": "20KB"} if shards else {}))
    return folder
