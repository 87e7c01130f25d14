"""Models that are trained, and the floating point operations of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from benchmarks.contenders.tasks import Task, gpt


@dataclass(frozen=True)
class Size:
    """A GPT and the batch of one rank.

    Attributes:
        reserved: the most bytes that torch's allocator took from an H100 for a contender, by the beginning of its
            name, at one rank and at eight; from them follows which ones may be on the card at a time.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    batch: int
    reserved: Mapping[str, tuple[float, float]] = field(default_factory=dict, compare=False)

    def task(self) -> Task:
        return gpt(self.layers, self.width, self.heads, self.vocabulary, self.context, self.batch)

    def bytes_on_card(self, contender: str, ranks: int) -> float:
        alone, split = next((both for name, both in self.reserved.items() if contender.startswith(name)), (0.0, 0.0))
        return alone if ranks == 1 else split

    @property
    def tokens(self) -> int:
        """Return the tokens of a rank in a step."""
        return self.batch * self.context

    def __str__(self) -> str:
        return (
            f"GPT, {self.layers} layers, width {self.width}, {self.heads} heads, vocabulary {self.vocabulary}, "
            f"{self.batch} x {self.context} tokens per rank"
        )


class Llama(nn.Module):
    """The Llama of transformers, called with tokens; it returns their logits."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=11 * size.width // 4,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads // 2,
            max_position_embeddings=2 * size.context,
            use_cache=False,
        )
        self.inner = LlamaForCausalLM(config)
        self.blocks = self.inner.model.layers

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids=tokens, use_cache=False).logits
        return logits


@dataclass(frozen=True)
class LlamaSize(Size):
    """A Llama with half as many key heads as heads."""

    def task(self) -> Task:
        def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
            tokens = torch.randint(self.vocabulary, (self.batch, self.context + 1), generator=generator)
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

        return Task(lambda: Llama(self), draw)

    def __str__(self) -> str:
        return f"Llama, {self.heads // 2} key heads, " + super().__str__().removeprefix("GPT, ")


SIZES = {
    "llama": LlamaSize(
        *(16, 2048, 16, 32000, 2048, 4),
        {"zerograph": (27.0e9, 17.0e9), "fsdp2": (27.0e9, 15.0e9), "plain": (25.0e9, 25.0e9)},
    ),
    "gpt": Size(
        *(24, 2048, 16, 50304, 1024, 8),
        {"zerograph": (35.0e9, 18.5e9), "fsdp2": (42.5e9, 23.0e9), "plain": (40.0e9, 40.0e9)},
    ),
    # Here it is launches that take the time.
    "small": Size(
        *(24, 1024, 16, 50304, 1024, 4),
        {"zerograph": (10.5e9, 6.0e9), "fsdp2": (13.5e9, 8.0e9), "plain": (12.0e9, 12.0e9)},
    ),
    "tiny": Size(2, 32, 2, 64, 16, 2),
    "tiny-llama": LlamaSize(2, 32, 4, 64, 16, 2),
}


def model_flops(size: Size, model: nn.Module) -> int:
    """Floating point operations that a step of one rank needs, whatever it does in fact (recomputes, say).

    6 for each token and each parameter of a product (PaLM, arXiv 2204.02311, appendix B): embeddings are looked up.
    Attention's two products are 12 * layers * width * context for each token, not halved for its being causal.
    """
    embeddings = sum(p.numel() for part in model.modules() if isinstance(part, nn.Embedding) for p in part.parameters())
    weights = sum(p.numel() for p in model.parameters()) - embeddings
    return size.tokens * (6 * weights + 12 * size.layers * size.width * size.context)


# Dense bf16 in 1e12 operations a second, from the makers' data sheets; by a part of the name, the first that fits.
_PEAKS = {
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "H200": 989,
    "B200": 2250,
    "A100": 312,
    "A10G": 70,
    "L40S": 362,
    "L4": 121,
    "RTX 4090": 165,
}


def peak_flops(device_name: str) -> float | None:
    """Floating point operations a second that the device's maker promises; None for one that is not known here."""
    return next((peak * 1e12 for part, peak in _PEAKS.items() if part in device_name), None)
