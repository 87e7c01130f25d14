"""Models that are not just drawn parameter by parameter: what constructors do that sharded_init() has to follow."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.models import Gpt


def tied() -> nn.Module:
    return Gpt(tied=True, layers=1)


def drawn_twice() -> nn.Module:
    """As transformers do: every module initialises itself, and the model all of them once more."""
    model = nn.Sequential(nn.Linear(7, 5), nn.Embedding(9, 4, padding_idx=2), nn.Conv2d(2, 3, 3), nn.LSTM(3, 4))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


def slices() -> nn.Module:
    """The parts of a fused weight are initialised one by one, in place, through views."""
    fused = nn.Linear(4, 12)
    query, key, value = fused.weight.data.chunk(3)
    nn.init.xavier_uniform_(query)
    key.copy_(query.flip(0) * 2)
    value.fill_(3)
    key.copy_(key)
    with torch.no_grad():
        fused.weight.narrow(0, 2, 3).mul_(2)
        fused.bias[2:5] = fused.weight[0, 0]
    return fused


def initialisers() -> nn.Module:
    """Return initialisers that compute, and those that draw again until all values are within bounds."""
    ways: list[Callable[[torch.Tensor], object]] = [
        nn.init.orthogonal_,
        nn.init.trunc_normal_,
        lambda weight: nn.init.trunc_normal_(weight, std=0.5, a=0.8, b=2),
        nn.init.kaiming_normal_,
        lambda weight: nn.init.sparse_(weight, 0.3),
        nn.init.eye_,
    ]
    layers = [nn.Linear(9, 7) for _ in ways]
    for way, layer in zip(ways, layers, strict=True):
        way(layer.weight)
    return nn.Sequential(*layers)


def generators() -> nn.Module:
    """Saves, restores and seeds generators, in between and last."""
    first = nn.Linear(3, 3)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        seeded = nn.Linear(3, 3)
    after_fork = nn.Linear(3, 3)
    state = torch.get_rng_state()
    before, own = nn.Linear(3, 3), nn.Linear(3, 3)
    torch.set_rng_state(state)
    again = nn.Linear(3, 3)
    nn.init.normal_(own.weight, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(11)
    return nn.Sequential(first, seeded, after_fork, before, own, again)


def looked_at() -> nn.Module:
    """Looks at values, random ones too, and builds what they say."""
    model = nn.Module()
    model.rates = torch.linspace(0, 0.3, 4).tolist()
    first = nn.Linear(4, 4)
    if first.weight.sum() > 0:
        first.weight.data.neg_()
    model.first = first
    model.second = nn.Linear(int(torch.randint(1, 5, ())), 2)
    model.register_buffer("positive", torch.nonzero(first.weight > 0))
    nn.init.constant_(model.second.bias, float(first.weight.detach().numpy().max()))
    return model


def numpys() -> nn.Module:
    """Takes values from outside of torch, as parameters and to change them."""
    first, second = nn.Embedding(5, 4), nn.Embedding(5, 4)
    first.weight = nn.Parameter(torch.from_numpy(np.arange(20, dtype=np.float32).reshape(5, 4)))
    second.weight.data = torch.from_numpy(np.ones((5, 4), dtype=np.float32))
    model = nn.Sequential(first, second, nn.Embedding.from_pretrained(torch.tensor([[1.0, 2.0], [3.0, 4.0]])))
    table = torch.from_numpy(np.zeros((6, 4), dtype=np.float32))
    table[:, 0::2] = torch.sin(torch.arange(6.0))[:, None]
    model.register_buffer("table", table)
    return model


def copies() -> nn.Module:
    """A teacher and its student, and layers that begin as copies of one."""
    student = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return nn.ModuleList([student, copy.deepcopy(student).requires_grad_(False), nn.TransformerEncoder(layer, 2)])


def dtypes() -> nn.Module:
    """Made in one dtype, by default or on purpose, and cast to another."""
    torch.set_default_dtype(torch.bfloat16)
    low = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    torch.set_default_dtype(torch.float32)
    cast = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
    other = nn.ParameterList([nn.Parameter(torch.randn(3, dtype=torch.complex64)), nn.Parameter(torch.tensor(2.5))])
    return nn.ModuleList([low, cast, other])


def shared_buffers() -> nn.Module:
    """Views of each other, not persistent, and plain attributes."""
    model = nn.Module()
    positions = torch.arange(5)
    model.register_buffer("positions", positions.expand(1, -1))
    model.register_buffer("some", positions[1:3], persistent=False)
    model.register_buffer("conjugate", torch.polar(torch.ones(3), torch.arange(3.0)).conj())
    model.register_buffer("noise", torch.rand(3))
    model.weight = nn.Parameter(torch.rand(8)[2:6].view(2, 2).t())
    model.empty = nn.Parameter(torch.empty(0, 3))
    return model


def reparametrized() -> nn.Module:
    weight, spectral = parametrizations.weight_norm(nn.Linear(4, 5)), parametrizations.spectral_norm(nn.Linear(4, 5))
    return nn.Sequential(weight, spectral, parametrizations.orthogonal(nn.Linear(5, 5)))


def from_meta() -> nn.Module:
    """Made without values first, and only then given memory."""
    with torch.device("meta"):
        late = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        shape = torch.empty(3, 2)
    late.to_empty(device="cpu")
    for layer in late:
        layer.reset_parameters()
    skipped = nn.utils.skip_init(nn.Linear, 3, 4)
    nn.init.normal_(skipped.weight)
    nn.init.ones_(skipped.bias)
    model = nn.ModuleList([late, skipped])
    model.drawn = nn.Parameter(torch.randn_like(shape, device="cpu"))
    model.filled = nn.Parameter(torch.full_like(shape, 3.0, device="cpu"))
    model.register_buffer("made", shape.new_ones((2, 2), device="cpu"))
    return model


def tied_by_address() -> nn.Module:
    """Ties what shares memory, and nothing else."""
    first, second, third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    third.weight.data = first.weight.data
    for one in (second, third):
        if one.weight.data_ptr() == first.weight.data_ptr():
            one.weight = first.weight
    return nn.Sequential(first, second, third)


CONSTRUCTIONS = {
    one.__name__: one
    for one in (
        tied,
        drawn_twice,
        slices,
        initialisers,
        generators,
        looked_at,
        numpys,
        copies,
        dtypes,
        shared_buffers,
        reparametrized,
        from_meta,
        tied_by_address,
    )
}
