"""Documents packed into rows compute what separate documents do: masks, transformers, FlexAttention."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

import zerograph as zg
from tests.harness import Function, LossStep, compilations_of, needs_compiler, prepare, set_stage, sliced
from tests.models import update_by
from tests.pool import Pool

# For each step the documents' lengths in each row, and the rows of each of two ranks.
STEPS: list[tuple[list[list[int]], tuple[int, int]]] = [
    ([[3, 5, 4], [6, 1, 5], [12], [4, 4, 4]], (2, 2)),
    ([[2, 7], [9], [1, 1, 7]], (1, 2)),
    ([[4, 3], [1, 6], [7]], (3, 0)),
]
VOCABULARY = 19


def batch(lengths: list[list[int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, targets, positions that restart at each document, and the documents' numbers."""
    generator = torch.Generator().manual_seed(sum(map(len, lengths)))
    tokens, targets = torch.randint(VOCABULARY, (2, len(lengths), sum(lengths[0])), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    return tokens, targets, positions, documents


class Attention(nn.Module):
    """Token embeddings and one layer of causal attention, masked by one of three ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 8), nn.Embedding(16, 8)
        self.qkv, self.out = nn.Linear(8, 16), nn.Linear(8, VOCABULARY)
        # One slope per head, as in ALiBi.
        self.slopes = nn.Parameter(torch.tensor([0.5, 0.25, 0.125, 0.0625]))

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        rows, length = tokens.shape
        x = self.qkv(self.tokens(tokens) + self.positions(positions))
        q, k, v = (part.unflatten(2, (-1, 2)).transpose(1, 2) for part in x.split([8, 4, 4], 2))
        attended = (self.flex if self.kind == "flex" else self.sdpa)(q, k, v, documents)
        logits: Tensor = self.out(attended.transpose(1, 2).reshape(rows, length, 8))
        return logits

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        same = documents[:, None, :, None] == documents[:, None, None, :]
        places = torch.arange(q.shape[2])
        mask = same & (places[:, None] >= places)
        bias = self.slopes[:, None, None] * (places - places[:, None])
        if self.kind == "sdpa_bool":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias.masked_fill(~mask, -torch.inf).to(q.dtype), enable_gqa=True
        )

    def flex(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (documents[b, i] == documents[b, j]) & (i >= j)

        def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + self.slopes[h] * (j - i)

        mask = create_block_mask(allowed, q.shape[0], None, q.shape[2], q.shape[2], device="cpu")
        attended = flex_attention(q, k, v, score_mod=biased, block_mask=mask, enable_gqa=True)
        assert isinstance(attended, Tensor)
        return attended


def transformer(name: str) -> nn.Module:
    import transformers

    kind, implementation = name.split("-")
    options: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
    if kind == "gpt2":
        options |= {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
        options |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    else:
        options |= {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "head_dim": 4}
        options |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    family = {"gpt2": "GPT2", "llama": "Llama", "qwen3": "Qwen3"}[kind]
    config = getattr(transformers, f"{family}Config")(**options)
    config._attn_implementation = implementation
    model: nn.Module = getattr(transformers, f"{family}{'LMHeadModel' if kind == 'gpt2' else 'ForCausalLM'}")(config)
    return model


def make(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return (transformer(name) if "-" in name else Attention(name)).to(dtype)


def logits_of(model: nn.Module, tokens: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
    if isinstance(model, Attention):
        return model(tokens, positions, documents)  # type: ignore[no-any-return]
    logits: Tensor = model(tokens, position_ids=positions, use_cache=False).logits
    return logits


def packed_loss(model: nn.Module, tokens: Tensor, targets: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(model, tokens, positions, documents).flatten(0, 1), targets.flatten())


def trained(
    name: str, stages: Sequence[int], dtype: torch.dtype, dynamic: Any = "auto"
) -> list[tuple[list[Tensor], dict[str, Tensor], int]]:
    """Train on packed rows at each stage; one graph, so captured once.

    Args:
        dynamic: ``True`` compiles for all sizes at once, ``"auto"`` for the first sizes alone before that.

    Returns:
        For each stage: losses, parameters, and how many steps were compiled for it.
    """
    model = make(name, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = LossStep(model, optimizer, 0, packed_loss, dynamic_shapes=dynamic)
    initial, results = step.state_dict(), []
    for stage in stages:
        before = compilations_of(step)
        set_stage(step, stage)
        step.load_state_dict(initial)
        losses = []
        for lengths, rows in STEPS:
            own = rows if zg.world_size() == 2 else (sum(rows),)
            losses.append(step(*(tensor.split(list(own))[zg.rank()] for tensor in batch(lengths))))
        results.append((losses, step.state_dict()["modules"]["model"], compilations_of(step) - before))
    return results


def trained_on_documents(name: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the same of plain PyTorch, in which each document is a batch of its own."""
    # FlexAttention of plain PyTorch has no gradients on the CPU.
    plain = make(name.replace("flex", "sdpa"), dtype)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = []
    for lengths, _ in STEPS:
        tokens, targets, positions, documents = batch(lengths)
        logits = [
            logits_of(plain, *(part[None] for part in parts))[0]
            for row, document_lengths in enumerate(lengths)
            for parts in zip(
                *(tensor[row].split(document_lengths) for tensor in (tokens, positions, documents)), strict=True
            )
        ]
        losses.append(update_by(optimizer, F.cross_entropy(torch.cat(logits), targets.flatten())))
    return losses, dict(plain.state_dict())


# Llama's and Qwen3's norms compute in fp32.
@sliced(
    "name, dtype, within",
    [("sdpa_bool", torch.float32, 1e-6), ("gpt2-sdpa", torch.float64, 1e-12)],
    [
        ("sdpa", torch.float64, 1e-12),
        *((name, torch.float32, 1e-6) for name in ("qwen3-eager", "llama-flex_attention", "llama-sdpa")),
    ],
)
def test_packed_rows_train_as_separate_documents(pool: Pool, name: str, dtype: torch.dtype, within: float) -> None:
    reference = "llama-eager" if name == "llama-flex_attention" else name
    expected = trained_on_documents(reference, dtype)
    for ((losses, parameters, compilations),) in pool.run(2, trained, name, [3], dtype, True):
        torch.testing.assert_close(losses, expected[0], rtol=0, atol=within)
        torch.testing.assert_close(parameters, expected[1], rtol=0, atol=within)
        assert compilations == 1


def test_stages_train_packed_rows_by_flex_attention_as_separate_documents_and_agree_bitwise(pool: Pool) -> None:
    expected = trained_on_documents("flex", torch.float64)
    for first, *others in pool.run(2, trained, "flex", (0, 3), torch.float64):
        torch.testing.assert_close(first[:2], expected, rtol=0, atol=1e-12)
        for other in others:
            torch.testing.assert_close(other[:2], first[:2], rtol=0, atol=0)
        assert [compilations for _, _, compilations in (first, *others)] == [2, 2]


def heads(rows: int = 3) -> tuple[Tensor, Tensor]:
    """Return heads [rows, 2, 6, 4] of fp64 and the documents of each row [rows, 6]."""
    generator = torch.Generator().manual_seed(3)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 2, 2]])[:rows]
    return torch.randn(rows, 2, 6, 4, generator=generator, dtype=torch.float64), documents


def attention(x: Tensor, mask: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Return attention of x to itself, written out."""
    scores = x @ x.transpose(2, 3) / 2 + bias
    return scores.masked_fill(~mask, -torch.inf).softmax(3).nan_to_num(0) @ x


def same_document(documents: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, i, j: documents[b, i] == documents[b, j]


def compiled_by_the_user(x: Tensor, documents: Tensor) -> Any:
    mask = torch.compile(create_block_mask)(same_document(documents), x.shape[0], None, 6, 6, device="cpu")
    return torch.compile(flex_attention)(x, x, x, block_mask=mask)


def rows_count(x: Tensor, documents: Tensor) -> Any:
    """Score by the number of the row in the whole batch and of the head, and mask by both."""
    mask = create_block_mask(lambda b, h, i, j: (i + b) >= (j - h), x.shape[0], 2, 6, 6, device="cpu")
    return flex_attention(x, x, x, score_mod=lambda score, b, h, i, j: score + b * 0.5 - h, block_mask=mask)


def blocks_alone(x: Tensor, documents: Tensor) -> Any:
    """Attend to a block of keys and, for the second block of queries, to none."""
    counts, columns = torch.tensor([[[1, 0]]]), torch.tensor([[[[1, 0], [0, 1]]]])
    mask = BlockMask.from_kv_blocks(counts.int(), columns.int(), BLOCK_SIZE=3, seq_lengths=(6, 6))
    return flex_attention(x, x, x, block_mask=mask)


def with_normalizer(x: Tensor, documents: Tensor) -> Any:
    mask = create_block_mask(same_document(documents), 3, None, 6, 6, device="cpu")
    return flex_attention(x, x, x, block_mask=mask, return_lse=True)[1]


@pytest.mark.parametrize("run", [compiled_by_the_user, rows_count, blocks_alone, with_normalizer])
def test_flex_attention_computes_what_is_written_out(run: Callable[..., Any]) -> None:
    x, documents = heads()
    b, h, i, j = torch.meshgrid(*map(torch.arange, (3, 2, 6, 6)), indexing="ij")
    same = documents[:, None, :, None] == documents[:, None, None, :]
    expected = {
        compiled_by_the_user: attention(x, same),
        rows_count: attention(x, (i + b) >= (j - h), b * 0.5 - h),
        blocks_alone: attention(x, (i < 3) & (j >= 3)),
        with_normalizer: (x @ x.transpose(2, 3) / 2).masked_fill(~same, -torch.inf).logsumexp(3),
    }[run]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "return_lse", FutureWarning)
        torch.testing.assert_close(Function(run)(x, documents), expected, rtol=1e-12, atol=1e-12)


def attend_to_rows(kind: str) -> tuple[int, Tensor]:
    x, documents = heads()
    own = [2, 1] if zg.world_size() == 2 else [3]
    run = {"numbered": rows_count, "documents": compiled_by_the_user}[kind]
    return zg.rank(), Function(run)(x.split(own)[zg.rank()], documents.split(own)[zg.rank()])


@sliced("kind", ["numbered"], ["documents"])
def test_rows_of_a_batch_index_are_those_of_the_whole_batch(pool: Pool, kind: str) -> None:
    _, whole = attend_to_rows(kind)
    parts = pool.run(2, attend_to_rows, kind)
    torch.testing.assert_close(torch.cat([part for _, part in sorted(parts, key=lambda one: one[0])]), whole)


def up_to_the_last(x: Tensor) -> Tensor:
    length = x.shape[2]
    mask = create_block_mask(lambda b, h, i, j: (j >= i) & (j < length - 1), None, None, length, length, device="cpu")
    attended = flex_attention(x, x, x, block_mask=mask)
    assert isinstance(attended, Tensor)
    return attended


def test_a_size_in_a_mask_function_is_that_of_the_call() -> None:
    step, (whole, _) = Function(up_to_the_last), heads()
    for length in (6, 5, 3, 4):
        x, places = whole[:, :, :length].contiguous(), torch.arange(length)
        expected = attention(x, (places >= places[:, None]) & (places < length - 1))
        torch.testing.assert_close(step(x), expected, rtol=1e-12, atol=1e-12)
    assert compilations_of(step) == 2


def numbered_loss(model: nn.Module, x: Tensor, documents: Tensor) -> Tensor:
    return (rows_count(model(x), documents) * x).mean()


@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 2}, pytest.param({"backend": "inductor"}, marks=needs_compiler)]
)
def test_micro_batches_and_backends_compute_the_same(options: dict[str, Any]) -> None:
    x, documents = (torch.cat([tensor, tensor[:1]]) for tensor in heads())
    trained = []
    for further in ({}, options):
        torch.manual_seed(0)
        model = nn.Linear(4, 4).double()
        step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, numbered_loss, **further)
        trained.append((step(x, documents), step.state_dict()["modules"]["model"]))
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-12, atol=1e-12)


def test_the_predicted_peak_has_the_scores() -> None:
    model = nn.Linear(4, 4).double()
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, numbered_loss)
    x, documents = heads()
    prepared = prepare(step, x, documents, ranks=1)
    assert prepared.memory.kinds["temporary"] == 5 * 3 * 2 * 6 * 6 * 8


def test_documents_stay_split_with_the_batch() -> None:
    x, documents = heads()
    both = torch.cat([x, x]), torch.cat([documents, documents])

    def run(x: Tensor, documents: Tensor) -> Any:
        mask = create_block_mask(same_document(documents), 6, None, 6, 6, device="cpu")
        return flex_attention(x, x, x, block_mask=mask)

    prepared = prepare(Function(run), *both)
    assert "zerograph.flex_attention" in prepared.text()
    assert not prepared.collectives()


def other_batch(x: Tensor, documents: Tensor) -> Any:
    return flex_attention(x, x, x, block_mask=create_block_mask(same_document(documents), 2, None, 6, 6, device="cpu"))


def drawing(x: Tensor, documents: Tensor) -> Any:
    return flex_attention(x, x, x, score_mod=lambda score, b, h, i, j: score * torch.rand_like(score))


def branching(x: Tensor, documents: Tensor) -> Any:
    return flex_attention(x, x, x, score_mod=lambda score, b, h, i, j: score if i > j else score * 2)


def varlen(x: Tensor, documents: Tensor) -> Any:
    packed = x.flatten(0, 1).half()
    return varlen_attn(packed, packed, packed, documents[0].int(), documents[0].int(), 6, 6)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (other_batch, "a block mask was made for a batch of 2, but the whole batch has 3 rows"),
        (drawing, "writes or draws random numbers"),
        (branching, "reads a value"),
        (varlen, "runs on accelerators only"),
    ],
)
def test_attention_that_no_step_computes_is_refused_with_the_line(run: Callable[..., Any], message: str) -> None:
    with pytest.raises(zg.CaptureError, match=message) as error:
        Function(run)(*heads())
    assert "test_packed.py" in str(error.value)


def test_a_block_mask_is_no_input() -> None:
    x, documents = heads()
    mask = create_block_mask(same_document(documents), 3, None, 6, 6, device="cpu")
    with pytest.raises(zg.InputError, match="create_block_mask"):
        Function(lambda x, mask: flex_attention(x, x, x, block_mask=mask))(x, mask)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_tensor_is_refused_with_what_to_pass_instead(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=layout)
    with pytest.raises(zg.InputError, match="pack them into rows of one length"):
        Function(lambda x: x * 2)(nested)


def test_a_cache_that_hides_documents_from_transformers_is_a_warning() -> None:
    model = make("llama-sdpa", torch.float32)
    tokens, _, positions, _ = batch(STEPS[0][0])
    step = Function(lambda tokens, positions: model(tokens, position_ids=positions).logits)
    step.model = model
    with pytest.warns(UserWarning, match="use_cache=False"):
        step(tokens, positions)
    silent = Function(lambda tokens: model(tokens).logits)
    silent.model = model
    with warnings.catch_warnings(action="error"):
        silent(tokens)
