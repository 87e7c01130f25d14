"""Models of transformers compute attention as they do outside of traces: masks only where plain PyTorch has them."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, fx, nn

import zerograph as zg
from tests.harness import LossStep, Predict, covering, each_stage, sliced
from tests.models import update_by
from tests.pool import Pool
from zerograph.ir.mesh import line

# The length is the size of no other dimension.
VOCABULARY, LENGTH = 32, 20
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 2048,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 2048}
_WINDOW = {"num_hidden_layers": 2, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _TEXT),
    "llama without a cache": ("Llama", {**_TEXT, "use_cache": False}),
    "qwen3": ("Qwen3", _TEXT),
    "gpt2": ("GPT2", {**_GPT2, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)}),
    "mistral, window of 8": ("Mistral", {**_TEXT, "sliding_window": 8}),
    "mistral, window of 4096": ("Mistral", {**_TEXT, "sliding_window": 4096}),
    "gemma3": ("Gemma3Text", {**_TEXT, **_WINDOW}),
    "opt": ("OPT", {"vocab_size": VOCABULARY, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 1,
                    "num_attention_heads": 2, "word_embed_proj_dim": 16, "dropout": 0.0}),
    "bart": ("Bart", {"vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
                      "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
                      "decoder_ffn_dim": 16, "dropout": 0.0}),
}  # fmt: skip


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    family, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**options)
    kind = next(
        getattr(transformers, f"{prefix}{suffix}")
        for prefix in (family, family.removesuffix("Text"))
        for suffix in ("ForCausalLM", "LMHeadModel")
        if hasattr(transformers, f"{prefix}{suffix}")
    )
    model: nn.Module = kind(config)
    return model


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, ids: Tensor, **options: Any) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids, **options).loss
    return loss


def step_of(model: nn.Module, loss: Any = loss_of, stage: int = 0) -> LossStep:
    return LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), stage, loss)


@contextlib.contextmanager
def recorded_attention() -> Iterator[list[Any]]:
    """Yield a list of the calls of attention: sizes of keys and mask, and the flags."""
    plain, calls = F.scaled_dot_product_attention, []

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **kw: Any
    ) -> Any:
        mask = None if attn_mask is None else (attn_mask.shape[-2:], attn_mask.dtype)
        calls.append((key.shape[1:], mask, rest, kw.get("is_causal"), kw.get("enable_gqa", False)))
        return plain(query, key, value, attn_mask, *rest, **kw)

    with patch.object(F, "scaled_dot_product_attention", attend):
        yield calls


@sliced("name", ["llama", "gpt2", "gemma3", "opt"], MODELS)
def test_a_graph_calls_attention_as_plain_pytorch_does(name: str) -> None:
    model, ids = make(name), tokens(2, 16)
    with recorded_attention() as expected:
        plain = model(input_ids=ids).logits
    with recorded_attention() as calls:
        logits = Predict(model, lambda model, ids: model(input_ids=ids).logits)(ids)
    assert calls[: len(expected)] == expected
    assert torch.equal(logits, plain)


@sliced("name", ["llama"], ["llama without a cache", "gpt2"])
def test_a_loop_calls_attention_as_plain_pytorch_does(name: str) -> None:
    model, ids = make(name), tokens(2, 16)
    plain = copy.deepcopy(model)
    with recorded_attention() as expected:
        loss_of(plain, ids)
    with recorded_attention() as calls:
        prepared, optimizer = zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
        loss_of(prepared, ids).backward()
        optimizer.step()
    assert calls[-len(expected) :] == expected


def squares(graph: fx.Graph, length: int) -> list[fx.Node]:
    """Return the nodes whose last two dimensions have this size."""
    values = ((node, node.meta.get("val")) for node in graph.nodes)
    return [node for node, value in values if isinstance(value, Tensor) and value.shape[-2:] == (length, length)]


@sliced(
    "name, device",
    [("llama", "meta"), ("mistral, window of 4096", "cpu")],
    [("llama without a cache", "cpu"), ("gpt2", "meta")],
)
def test_no_tensor_of_a_step_has_the_length_squared(name: str, device: str) -> None:
    prepared = step_of(make(name), stage=3).prepare(line(2, 0, "ranks"), tokens(1, 2048), device=device)
    assert not squares(prepared.graph.graph, 2048)


def train_on_ranks() -> list[list[float]]:
    """Return the losses of each stage; one graph, so that it is captured once."""
    torch.set_num_threads(1)
    ids = tokens(4, 256).chunk(zg.world_size())[zg.rank()]
    step = step_of(make("llama"))
    return [[float(step(ids)) for _ in range(2)] for _ in each_stage(step, (0, 3))]


def test_two_ranks_train_as_plain_pytorch_and_stages_agree_bitwise(pool: Pool) -> None:
    model, ids = make("llama"), tokens(4, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = [update_by(optimizer, loss_of(model, ids)).item() for _ in range(2)]
    for stages in pool.run(2, train_on_ranks):
        assert stages[0] == pytest.approx(expected, rel=3e-7)
        assert stages[1] == stages[0]


def check_mask(name: str, masks: bool, arguments: Callable[..., dict[str, Any]], *batch: Tensor) -> None:
    """Compare with plain PyTorch, and the graph with whether a mask is to be in it."""

    def logits(model: nn.Module, ids: Tensor, *more: Tensor) -> Tensor:
        return model(input_ids=ids, **arguments(ids, *more)).logits.square().mean()  # type: ignore[no-any-return]

    step = step_of(make(name), logits)
    torch.testing.assert_close(step(*batch), logits(make(name), *batch).detach(), rtol=1e-6, atol=0)
    assert bool(squares(step.inspect.graph.graph, LENGTH)) == masks


def test_a_padding_mask_that_comes_in_masks() -> None:
    ids = tokens(2, LENGTH)
    mask = holed(torch.ones_like(ids))
    check_mask("llama without a cache", True, lambda ids, mask: {"attention_mask": mask}, ids, mask)


def written(positions: Tensor) -> Tensor:
    positions[0, 8:] -= 8
    return positions


POSITIONS: dict[str, tuple[Any, bool]] = {
    "a row of all": (lambda n: torch.arange(n).unsqueeze(0), False),
    "one row each": (lambda n: (torch.arange(n) + 3).view(1, n).expand(2, -1), False),
    "in steps of two": (lambda n: torch.arange(0, 2 * n, 2).unsqueeze(0), True),
    "two documents": (lambda n: torch.arange(n // 2).repeat(2).unsqueeze(0), True),
    "written later": (lambda n: written(torch.arange(n).unsqueeze(0)), True),
    "written through a view": (lambda n: written(torch.arange(n).view(1, -1)).expand(2, -1), True),
    "one number": (lambda n: torch.arange(1).unsqueeze(0).expand(1, n), True),
}


@sliced("name", ["one row each", "two documents", "written through a view"], POSITIONS)
def test_positions_that_are_known_to_follow_one_another_need_no_mask(name: str) -> None:
    positions, masks = POSITIONS[name]
    model = "llama without a cache"
    check_mask(model, masks, lambda ids: {"position_ids": positions(ids.shape[1])}, tokens(2, LENGTH))


def holed(mask: Tensor) -> Tensor:
    mask[0, 10:] = 0
    return mask


MASKS: dict[str, tuple[Any, bool]] = {
    "ones": (lambda ids: torch.ones_like(ids), False),
    "true": (lambda ids: torch.full((1, ids.shape[1]), True).expand(len(ids), -1), False),
    "ones of which some are overwritten": (lambda ids: holed(torch.ones_like(ids)), True),
    "what is no padding": (lambda ids: ids != 0, True),
}


@sliced("name, model_name", *covering(itertools.product(MASKS, ["bart", "llama"])))
def test_a_padding_mask_that_is_known_to_mask_nothing_is_none(name: str, model_name: str) -> None:
    mask, masks = MASKS[name]
    check_mask(model_name, masks, lambda ids: {"attention_mask": mask(ids)}, tokens(2, LENGTH))


# Each place of transformers that asks whether it is traced, by its code, and what a capture does there. "plain": as
# outside of traces. "known": as outside of traces where values are known, else as traced. "traced": the other path
# reads values, or computes the same.
_ASKS = re.compile(
    r"(is_torchdynamo_compiling|is_torchdynamo_exporting|(?<![\w.])is_tracing|is_fake_tensor|is_torch_fx_proxy"
    r"|compiler\.is_compiling)\("
)
DECISIONS = {
    r"masking_utils\.py:.*": "known",
    r"modeling_attn_mask_utils\.py:.*is_tracing_? = is_tracing": "known",
    r"modeling_attn_mask_utils\.py:.*torch\.all\(mask == 1\)": "traced",
    r"sdpa_attention\.py:.*q_length == 1": "plain",
    r"output_capturing\.py:": "plain",
    # Mamba: an associative scan, which is an operator on functions.
    r"modeling_\w+\.py:.*(is_torchdynamo_compiling\(\) and not|use_associative_scan)": "plain",
    # Never true in a capture.
    r".*(\bis_torchdynamo_exporting\(\)|is_new_implementation)": "plain",
    r".*pixio.*if not is_tracing\(\) and num_patches": "traced",
    # A mask of ones: without it there is no mask either.
    r".*attention_mask is None and not is_torchdynamo_compiling": "traced",
    # Marks for CUDA graphs of torch.compile, registrations, warnings, caches of functions.
    r".*(if not is_torchdynamo_compiling\(\)( and not self\.record_past)?:|generic\.py:|deprecation\.py:)": "traced",
    r"(pytorch_utils|activations|modeling_attn_mask_utils)\.py:.*if is_torchdynamo_compiling\(\):": "traced",
    r".*(hub_kernels|flex_attention)\.py:": "traced",
    # Capture has experts of its own.
    r"moe\.py:": "traced",
    # These read values.
    r"modeling_utils\.py:.*is_tracing\(input_ids\)": "traced",
    r"import_utils\.py:": "traced",
    r".*(legacy_processing|input_ids_are_first_codebook|torch\.is_tensor\(max_pos\))": "traced",
    r"modeling_flash_attention_utils\.py:": "traced",
    # The same for numbers, checks of them, what other libraries shard.
    r".*(is_deepspeed_zero3_enabled|position_ids is not None and not)": "traced",
    r".*nemotron3_diarization\.py:.*is_torchdynamo_compiling\(\) and \(": "traced",
    # Preparation of inputs, outside of steps.
    r"(image|video)_processing_\w+\.py:": "plain",
}


def test_each_place_that_asks_whether_it_is_traced_has_a_decision() -> None:
    root = Path(transformers.__file__).parent
    places = [
        f"{path.name}:{code.strip()}"
        for path in root.rglob("*.py")
        if not path.name.startswith("modular_") and "exporters" not in path.parts
        for code in path.read_text().splitlines()
        if _ASKS.search(code) and not code.lstrip().startswith(("#", "def ", "- "))
    ]
    assert len(places) > 20
    undecided = [place for place in places if not any(re.match(pattern, place) for pattern in DECISIONS)]
    assert not undecided
