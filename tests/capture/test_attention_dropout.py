"""Dropout of attention draws the counter-based masks of every dropout, on any number of ranks and every device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness import LossStep, each_stage, sliced
from tests.models import part
from tests.pool import Pool
from zerograph.capture.modes import FunctionMode
from zerograph.ops.random import uniform

P = 0.25


class Attention(nn.Module):
    """Attention with dropout, of four heads that share two of keys."""

    def __init__(self, options: dict[str, Any], *, recomputed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.options, self.recomputed = nn.Linear(8, 32), options, recomputed

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = self.project(x).unflatten(-1, (8, 4)).transpose(1, 2).split([4, 2, 2], 1)
        return tuple(parts)

    def forward(self, x: Tensor) -> Tensor:
        def attend(*heads: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*heads, dropout_p=P, enable_gqa=True, **self.options)

        heads = self.heads(x)
        attended = checkpoint(attend, *heads, use_reentrant=False) if self.recomputed else attend(*heads)
        assert isinstance(attended, Tensor)
        return attended.square().mean()


OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.7},
    "masked": {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril()},
}


def plainly(model: Attention, x: Tensor, seed: int) -> Tensor:
    """Compute the loss with the mask of the graph's first random operator."""
    query, key, value = model.heads(x)
    key, value = (each.repeat_interleave(2, 1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * model.options.get("scale", 1 / math.sqrt(4))
    if model.options.keys() & {"is_causal", "attn_mask"}:
        scores = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    shape = list(scores.shape)
    drawn = uniform(torch.tensor(seed), 0, shape, [0] * 4, shape, torch.float32, torch.device("cpu"))
    weights = scores.softmax(-1) * (drawn < 1 - P) / (1 - P)
    return (weights @ value).square().mean()


X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))


def step_of(model: nn.Module, stage: int = 0) -> LossStep:
    return LossStep(model, torch.optim.SGD(model.parameters(), lr=0.5), stage, seed=3)


@pytest.mark.parametrize("name", OPTIONS)
def test_attention_is_the_mathematical_form_with_the_counter_based_mask(name: str) -> None:
    model = Attention(OPTIONS[name])
    step = step_of(model)
    seed, before = step._seed_of_step(), {name: value.clone() for name, value in model.state_dict().items()}
    loss = step(X)
    again = Attention(OPTIONS[name])
    again.load_state_dict(before)
    expected = plainly(again, X, seed)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    gradient = again.project.weight.grad
    assert gradient is not None
    trained = step.state_dict()["modules"]["model"]["project.weight"]
    torch.testing.assert_close(trained, (again.project.weight - 0.5 * gradient).detach(), rtol=1e-5, atol=1e-7)


def test_what_is_recomputed_has_the_same_mask() -> None:
    kept, again = (step_of(Attention({"is_causal": True}, recomputed=recomputed)) for recomputed in (False, True))
    assert [float(kept(X)) for _ in range(3)] == [float(again(X)) for _ in range(3)]


class Noted(Tensor):
    """Notes which kernels attention may choose from when it is called."""

    enabled: tuple[bool, ...] | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            cuda = torch.backends.cuda
            Noted.enabled = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize(
    ("dropout", "fused"), [((None, 0.1), False), ((None, 0.0), True), ({"dropout_p": 0.1}, False), ({}, True)]
)
def test_no_fused_kernel_is_chosen_for_dropout(dropout: Any, fused: bool) -> None:
    x = torch.randn(1, 2, 4, 8).as_subclass(Noted)
    rest, options = (dropout, {}) if isinstance(dropout, tuple) else ((), dropout)
    with FunctionMode([]):
        F.scaled_dot_product_attention(x, x, x, *rest, **options)
    assert Noted.enabled == (fused,) * 3


_SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def family(name: str) -> nn.Module:
    """Return a model with the dropout of its default configuration."""
    torch.manual_seed(0)
    if name == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16)
        )
        assert model.config.attn_pdrop == 0.1
        return model
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**_SMALL, max_position_embeddings=16))
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def train_family(name: str, stages: Sequence[int]) -> list[list[float]]:
    """Return the losses of each stage; one graph, so that it is captured once."""
    ids = torch.randint(0, 32, (4, 12), generator=torch.Generator().manual_seed(1))
    own = part(ids)
    model = family(name).train()
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, loss_of, seed=3)
    return [[float(step(own)) for _ in range(2)] for _ in each_stage(step, stages)]


# That all stages agree does not depend on the family.
@sliced("name, stages", [("gpt2", (0, 3))], [("bert", (2,)), ("t5", (1,))])
def test_two_ranks_train_as_one_and_stages_agree_bitwise(pool: Pool, name: str, stages: Sequence[int]) -> None:
    (alone,) = train_family(name, (0,))
    for losses in pool.run(2, train_family, name, stages):
        assert losses == [losses[0]] * len(stages)
        assert losses[0] == pytest.approx(alone, rel=1e-6)
