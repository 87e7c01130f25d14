"""Models that are trained, and the floating point operations of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from benchmarks.contenders.tasks import Gpt, Task, gpt


@dataclass(frozen=True)
class Size:
    """A GPT and the batch of one rank."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    batch: int

    def task(self) -> Task:
        return gpt(self.layers, self.width, self.heads, self.vocabulary, self.context, self.batch)

    @property
    def tokens(self) -> int:
        """Return the floating point operations of a rank in a step."""
        return self.batch * self.context

    def with_batch(self, batch: int | None) -> Size:
        """The same model; ``batch`` sequences on each rank, unless None."""
        return self if batch is None else replace(self, batch=batch)

    def __str__(self) -> str:
        return (
            f"GPT, {self.layers} layers, d {self.width}, {self.heads} heads, vocabulary {self.vocabulary}, "
            f"{self.batch} x {self.context} tokens per rank"
        )


SIZES = {
    "1.3B": Size(layers=24, width=2048, heads=16, vocabulary=50304, context=1024, batch=8),
    "tiny": Size(layers=2, width=32, heads=2, vocabulary=64, context=16, batch=2),
}


def model_flops(size: Size, model: Gpt) -> int:
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
