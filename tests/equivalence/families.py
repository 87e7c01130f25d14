"""Model families of ``transformers``, tiny, with the weights that their own initialisation gives: no download."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn

from tests.equivalence import families_torch
from tests.equivalence.family import Family

# One layer: GPT-2 has two, for what happens between layers is the same in all of them.
VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 61, 32, 1, 4, 12

# One text model's sizes, as most configurations call them.
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": 32,
}


class LossOf(nn.Module):
    """A model of ``transformers`` whose ``forward`` takes what ``names`` says and returns its loss."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *batch: Tensor) -> Tensor:
        loss: Tensor = self.model(**dict(zip(self.names, batch, strict=True))).loss
        return loss


def _tokens(generator: torch.Generator, *shape: int) -> Tensor:
    """Real tokens: 0 is for padding, 1 starts a decoder, 2 is the mask."""
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def _text(generator: torch.Generator, size: int) -> tuple[Tensor, ...]:
    tokens = _tokens(generator, size, LENGTH)
    return tokens, tokens.clone()


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=WIDTH,
        n_layer=2,
        n_head=HEADS,
        bos_token_id=1,
        eos_token_id=2,
        **_no_dropout("GPT2Config"),
    )
    return LossOf(transformers.GPT2LMHeadModel(config), "input_ids", "labels")


def llama() -> nn.Module:
    return LossOf(transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TEXT)), "input_ids", "labels")


def qwen3() -> nn.Module:
    """Two heads of keys and values for four of queries, tied embeddings, norms of queries and keys."""
    config = transformers.Qwen3Config(**_TEXT, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
    return LossOf(transformers.Qwen3ForCausalLM(config), "input_ids", "labels")


def mixtral() -> nn.Module:
    """Two of four experts for each token, with the router's own loss, which is over the whole batch."""
    config = transformers.MixtralConfig(
        **_TEXT,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )
    # The others gather tokens by expert: as many as the values say, or all tokens of the batch in one order.
    config._experts_implementation = "batched_mm"
    return LossOf(transformers.MixtralForCausalLM(config), "input_ids", "labels")


def bert() -> nn.Module:
    config = transformers.BertConfig(**_TEXT, **_no_dropout("BertConfig"))
    return LossOf(transformers.BertForMaskedLM(config), "input_ids", "attention_mask", "labels")


def _masked_text(generator: torch.Generator, size: int) -> tuple[Tensor, ...]:
    """Sentences of different lengths; a quarter of their words is masked, and only those have labels."""
    lengths = torch.randint(LENGTH // 3, LENGTH + 1, (size, 1), generator=generator)
    attended = torch.arange(LENGTH) < lengths
    tokens = _tokens(generator, size, LENGTH).where(attended, 0)
    masked = (torch.rand(size, LENGTH, generator=generator) < 0.25) & attended
    return tokens.where(~masked, 2), attended.long(), tokens.where(masked, -100)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=2 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        decoder_start_token_id=1,
        **_no_dropout("T5Config"),
    )
    return LossOf(transformers.T5ForConditionalGeneration(config), "input_ids", "attention_mask", "labels")


def _translated(generator: torch.Generator, size: int) -> tuple[Tensor, ...]:
    """Sentences of different lengths, and others of different lengths: labels of -100 behind their ends."""
    lengths = torch.randint(LENGTH // 3, LENGTH + 1, (2, size, 1), generator=generator)
    source, target = torch.arange(LENGTH) < lengths
    tokens = _tokens(generator, 2, size, LENGTH)
    return tokens[0].where(source, 0), source.long(), tokens[1].where(target, -100)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        max_source_positions=10,
        max_target_positions=16,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return LossOf(transformers.WhisperForConditionalGeneration(config), "input_features", "labels")


def _speech(generator: torch.Generator, size: int) -> tuple[Tensor, ...]:
    lengths = torch.randint(4, 9, (size, 1), generator=generator)
    return _numbers(generator, size, 8, 20), _tokens(generator, size, 8).where(torch.arange(8) < lengths, -100)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        num_labels=5,
        **_no_dropout("ViTConfig"),
    )
    return LossOf(transformers.ViTForImageClassification(config), "pixel_values", "labels")


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=5
    )
    return LossOf(transformers.ResNetForImageClassification(config), "pixel_values", "labels")


def convnext() -> nn.Module:
    config = transformers.ConvNextConfig(
        num_stages=2, patch_size=2, hidden_sizes=[16, 32], depths=[1, 1], image_size=16, num_labels=5
    )
    return LossOf(transformers.ConvNextForImageClassification(config), "pixel_values", "labels")


def _images(side: int) -> Callable[[torch.Generator, int], tuple[Tensor, ...]]:
    def batch(generator: torch.Generator, size: int) -> tuple[Tensor, ...]:
        return _numbers(generator, size, 3, side, side), torch.randint(5, (size,), generator=generator)

    return batch


def _numbers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def _no_dropout(config: str) -> dict[str, float]:
    """Every probability of dropout that the configuration has, as zero."""
    default = getattr(transformers, config)()
    known = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate", "dropout")
    known += ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "activation_dropout")
    return {name: 0.0 for name in known if hasattr(default, name)}


_ALL = (
    Family("gpt2", gpt2, _text),
    Family("llama", llama, _text),
    Family("qwen3", qwen3, _text),
    Family("mixtral", mixtral, _text),
    Family("bert", bert, _masked_text),
    Family("t5", t5, _translated),
    Family("whisper", whisper, _speech),
    Family("vit", vit, _images(8)),
    Family("resnet", resnet, _images(32)),
    Family("convnext", convnext, _images(16)),
)

FAMILIES = {family.name: family for family in (*_ALL, *families_torch.FAMILIES)}
