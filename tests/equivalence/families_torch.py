"""Families of plain PyTorch: recurrent, encoder-decoder, convolutional up and down, graph and mixing networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.equivalence.family import Family

_CLASSES = 5


class Recurrent(nn.Module):
    """Layers of ``kind`` in both directions, and a class from the last step."""

    def __init__(self, kind: type[nn.RNNBase], *, batch_first: bool, layers: int) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.body = kind(6, 8, num_layers=layers, batch_first=batch_first, bidirectional=True)
        self.head = nn.Linear(16, _CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        if self.batch_first:
            return F.cross_entropy(self.head(self.body(x)[0][:, -1]), target)
        return F.cross_entropy(self.head(self.body(x.transpose(0, 1))[0][-1]), target)


def _sequences(generator: torch.Generator, size: int) -> tuple[Tensor, ...]:
    return torch.randn(size, 2, 6, generator=generator), torch.randint(_CLASSES, (size,), generator=generator)


class Translator(nn.Module):
    """``nn.Transformer`` over tokens, time first; 0 is padding, which neither attends nor counts."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8, padding_idx=0), nn.Embedding(6, 8)
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0)
        self.head = nn.Linear(8, 11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        given, wanted = target[:, :-1], target[:, 1:]
        causal = nn.Transformer.generate_square_subsequent_mask(given.shape[1]) < 0
        x, y = (self.tokens(t) + self.positions(torch.arange(t.shape[1])) for t in (source, given))
        padding = source == 0
        out = self.body(
            x.transpose(0, 1),
            y.transpose(0, 1),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            tgt_key_padding_mask=given == 0,
            memory_key_padding_mask=padding,
        )
        logits = self.head(out.transpose(0, 1))
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=0)


def _translations(generator: torch.Generator, size: int) -> tuple[Tensor, ...]:
    found = []
    for length in (6, 6):
        tokens = torch.randint(1, 11, (size, length), generator=generator)
        used = torch.randint(3, length + 1, (size, 1), generator=generator)
        found.append(torch.where(torch.arange(length) < used, tokens, 0))
    return tuple(found)


class UNet(nn.Module):
    """Down by a strided convolution, up by a transposed one, across by concatenation; group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.GroupNorm(4, 8), nn.SiLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.leave = nn.Conv2d(8, 3, 3, padding=1, padding_mode="reflect")

    def forward(self, x: Tensor, clean: Tensor) -> Tensor:
        fine = self.enter(x)
        return F.mse_loss(self.leave(torch.cat([self.up(self.down(fine)), fine], 1)), clean)


def _pictures(generator: torch.Generator, size: int) -> tuple[Tensor, ...]:
    return torch.randn(size, 3, 6, 6, generator=generator), torch.randn(size, 3, 6, 6, generator=generator)


class GraphNet(nn.Module):
    """Messages along the edges of several graphs in one batch; every sample brings nodes, edges and a label.

    Edges name nodes of the whole batch, so that graphs may have any sizes: what a rank's nodes receive may come
    from anywhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.message = nn.Linear(6, 8), nn.Linear(16, 8)
        self.update, self.head = nn.GRUCell(8, 8), nn.Linear(8, _CLASSES)

    def forward(self, nodes: Tensor, sources: Tensor, targets: Tensor, graph: Tensor, label: Tensor) -> Tensor:
        hidden = torch.tanh(self.enter(nodes.flatten(0, 1)))
        sources, targets, graph = sources.flatten(), targets.flatten(), graph.flatten()
        for _ in range(2):
            edges = torch.cat([hidden[sources], hidden.index_select(0, targets)], 1)
            sent = F.leaky_relu(self.message(edges))
            received = torch.zeros_like(hidden).index_add(0, targets, sent)
            received = received.scatter_add(0, targets[:, None].expand_as(sent), sent.square())
            hidden = self.update(received, hidden)
        pooled = hidden.new_zeros(label.shape[0], 8).index_add(0, graph, hidden)
        return F.cross_entropy(self.head(pooled), label)


def _graphs(generator: torch.Generator, size: int) -> tuple[Tensor, ...]:
    nodes = 3
    return (
        torch.randn(size, nodes, 6, generator=generator),
        torch.randint(size * nodes, (size, 4), generator=generator),
        torch.randint(size * nodes, (size, 4), generator=generator),
        torch.randint(size, (size, nodes), generator=generator),
        torch.randint(_CLASSES, (size,), generator=generator),
    )


class Mixer(nn.Module):
    """Patches mixed across positions and across channels, between pooling and upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Sequential(nn.Conv2d(3, 8, 2, stride=2, bias=False), nn.BatchNorm2d(8), nn.Hardswish())
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.positions = nn.Sequential(nn.Linear(9, 12), nn.GELU(), nn.Linear(12, 9))
        self.channels = nn.Sequential(nn.Linear(8, 16), nn.GLU(), nn.Linear(8, 8), nn.PReLU(8))
        self.head = nn.Linear(8, _CLASSES)

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        x = self.patches(F.interpolate(F.avg_pool2d(images, 2), size=(6, 6), mode="bilinear")).flatten(2)
        x = x.transpose(1, 2)
        x = x + self.positions(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x).flatten(0, 1)).view(x.shape)
        return F.cross_entropy(self.head(F.adaptive_max_pool1d(x.transpose(1, 2), 1).flatten(1)), target)


def _photographs(generator: torch.Generator, size: int) -> tuple[Tensor, ...]:
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(_CLASSES, (size,), generator=generator)


def _recurrent(kind: type[nn.RNNBase], *, batch_first: bool, layers: int) -> Callable[[], Any]:
    return lambda: Recurrent(kind, batch_first=batch_first, layers=layers)


FAMILIES = (
    Family("lstm", _recurrent(nn.LSTM, batch_first=True, layers=2), _sequences),
    Family("gru_time_first", _recurrent(nn.GRU, batch_first=False, layers=1), _sequences),
    Family("transformer", Translator, _translations),
    Family("unet", UNet, _pictures),
    Family("graph", GraphNet, _graphs, samples_meet=True),
    Family("mixer", Mixer, _photographs),
)
