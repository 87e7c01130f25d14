"""Ranks that split the sequence: alone, beside data parallelism, in each form of attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import zerograph as zg
from tests.equivalence.families import FAMILIES, LossOf
from tests.equivalence.mesh_layouts import ROWS_AND_SEQUENCE, SEQUENCE, SEQUENCE_OF_FOUR, Arrangement
from tests.equivalence.training import STAGES, Result, Stage, equal, largest_deviation, train, train_plainly
from tests.harness import LossStep, Predict, sliced, told
from tests.models import update_by
from tests.pool import Pool
from zerograph.inspection.step import Prepared
from zerograph.ir.mesh import Mesh, line
from zerograph.ir.step_graph import output_nodes
from zerograph.loops import loaders

# Losses of transformers are computed in fp32.
CAUSAL, EXACT = 1e-6, 1e-10
BOUNDS = {"gpt2": CAUSAL, "llama": CAUSAL, "qwen3": CAUSAL, "mixtral": CAUSAL, "bert": EXACT, "t5": EXACT, "vit": EXACT}
FORMS = ("ulysses", "gather", "ring")
LAYOUTS = {
    "sequence": (2, SEQUENCE),
    "sequence-of-four": (4, SEQUENCE_OF_FOUR),
    "rows-and-sequence": (4, ROWS_AND_SEQUENCE),
}


def train_as_rank(name: str, arrangement: Arrangement, form: str, stages: Sequence[Stage]) -> dict[Stage, Result]:
    if name == "vit":
        # Ranks split the rows of its images. After the patches and the class token it is computed whole.
        rows = tuple(zg.sbp.split(2) if sbp == zg.sbp.split(1) else sbp for sbp in arrangement.input_sbp)
        arrangement = replace(arrangement, input_sbp=rows)
    arrangement = replace(arrangement, options=(("attention", form),))
    return train(FAMILIES[name], torch.float64, stages, arrangement=arrangement)[0]


# Bert has padding and a loss over masked positions; GPT-2 a causal mask, and labels that are shifted. Rows and
# sequences of four ranks, by rings: test_ranks_take_their_pieces_of_whole_sequences.
SHORT = {("gpt2", "ulysses", "sequence"): (3,), ("bert", "gather", "sequence"): (3,)}
LONG = {("gpt2", "ulysses", "sequence"): STAGES} | {
    (name, form, layout): ("off", 2)
    for name in BOUNDS
    for form in FORMS
    for layout in LAYOUTS
    if (name, form, layout) not in SHORT and (form == "ring" or layout != "sequence-of-four")
}


@sliced("case, stages", SHORT.items(), LONG.items())
def test_ranks_that_split_the_sequence_compute_what_one_device_computes(
    pool: Pool, case: tuple[str, str, str], stages: Sequence[Stage]
) -> None:
    name, form, layout = case
    ranks, arrangement = LAYOUTS[layout]
    everybody = pool.run(ranks, train_as_rank, name, arrangement, form, stages)
    wanted = train_plainly(FAMILIES[name], torch.float64)
    first = everybody[0][stages[0]]
    assert largest_deviation(first, wanted) <= BOUNDS[name]
    for results in everybody:
        assert all(equal(result, first) for result in results.values())


def llama(key_heads: int = 4, heads: int = 4) -> LossOf:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=8 * heads,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=8,
        intermediate_size=64,
    )
    return LossOf(transformers.LlamaForCausalLM(config), "input_ids", "labels")


def prepared(model: nn.Module, mesh: Mesh, input_sbp: Sequence[zg.sbp.Sbp], *batch: Tensor, **options: Any) -> Prepared:
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), input_sbp=tuple(input_sbp), **options)
    return step.prepare(mesh, *batch)


def activations(step: Prepared) -> list[tuple[str, str, int]]:
    """Phase, kind and bytes of the collectives that move activations or labels, along the last mesh dimension."""
    large = [one for one in step.collectives() if one.tensor_bytes > 16 and "gradient of" not in one.what]
    return [(one.phase, one.kind, one.tensor_bytes) for one in large]


ROWS, LENGTH = 4, 128
LABELS = ("forward", "all-gather", 8 * ROWS * LENGTH)
MESHES = {
    "sequence": (Mesh((2,), (0,), ("sequence",)), (zg.sbp.split(1),)),
    "rows-and-sequence": (Mesh((2, 2), (0, 0), ("rows", "sequence")), (zg.sbp.split(0), zg.sbp.split(1))),
}


def tokens(mesh: Mesh) -> tuple[Tensor, Tensor]:
    """This rank's part of tokens and labels: half of the rows if ranks split them, and half of the sequence."""
    ids = torch.randint(64, (ROWS * 2 // mesh.size, LENGTH // 2), generator=torch.Generator().manual_seed(0))
    return ids, ids.clone()


@sliced("layout", ["rows-and-sequence"], MESHES)
def test_ulysses_sends_queries_keys_and_values_in_one_all_to_all_and_results_in_another(layout: str) -> None:
    mesh, input_sbp = MESHES[layout]
    step = prepared(llama(), mesh, input_sbp, *tokens(mesh), context_parallel_method="ulysses")
    rows = ROWS * 2 // mesh.size
    one = 4 * rows * LENGTH * 32
    # Two layers, and gradients as in forward.
    wanted = [(phase, "all-to-all", sent) for phase in ("forward", "backward") for sent in (one, 3 * one) * 2]
    labels = ("forward", "all-gather", 8 * rows * LENGTH)
    assert sorted(activations(step)) == sorted([labels, *wanted])


def by_hand(layers: nn.ModuleList, x: Tensor) -> Tensor:
    query, value = (layer(x).unflatten(-1, (2, 2)).transpose(1, 2) for layer in layers[:2])
    attended = (query @ query.mT).softmax(-1) @ value
    out: Tensor = layers[2](attended.transpose(1, 2).reshape(x.shape))
    return out.square().mean()


def test_attention_by_hand_is_refused_in_micro_batches_of_split_sequences() -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    step = LossStep(layers, optimizer, 1, by_hand, context_parallel=2, gradient_accumulation_steps=2)
    with pytest.raises(zg.PlacementError, match=r"context_parallel\) cut attention into micro-batches where it is one"):
        step.prepare(line(2, 0, "ranks"), torch.randn(4, 6, 4))


class SlidingWindow(nn.Module):
    """FlexAttention over the last five positions, and a loss over rows and positions flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(64, 32), nn.Linear(32, 96)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        query, key, value = (
            x.unflatten(-1, (4, 8)).transpose(1, 2) for x in self.project(self.embed(ids)).chunk(3, -1)
        )
        length = ids.shape[1]
        mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 5), None, None, length, length, device="cpu")
        hidden = flex_attention(query, key, value, block_mask=mask).transpose(1, 2).flatten(2)
        return nn.functional.cross_entropy((hidden @ self.embed.weight.t()).flatten(0, 1), labels.flatten())


def test_sequences_stay_split_after_attention_without_a_form_with_queries() -> None:
    mesh, input_sbp = MESHES["rows-and-sequence"]
    step = prepared(SlidingWindow(), mesh, input_sbp, *tokens(mesh), gradient_accumulation_steps=2)
    kinds = [(one.phase, one.kind) for one in step.collectives() if one.kind == "all-to-all"]
    assert set(kinds) == {("forward", "all-to-all"), ("backward", "all-to-all")}


def test_gathered_attention_gathers_keys_and_values_in_each_pass_and_scatters_their_gradients() -> None:
    mesh, input_sbp = MESHES["sequence"]
    step = prepared(llama(key_heads=1), mesh, input_sbp, *tokens(mesh))
    one = 4 * ROWS * LENGTH * 8
    wanted = [(phase, "all-gather", one) for phase in ("forward", "backward")] * 4
    wanted += [("backward", "reduce-scatter", one)] * 4
    assert sorted(activations(step)) == sorted([LABELS, *wanted])


class Mean(nn.Module):
    """Attention of one head, then the masked mean of a feature over all positions, with one label per row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 6), nn.Linear(6, 6)

    def forward(self, ids: Tensor, mask: Tensor, label: Tensor) -> Tensor:
        hidden = self.head(self.embed(ids)).unsqueeze(1)
        hidden = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden).squeeze(1) * mask.unsqueeze(-1)
        return nn.functional.cross_entropy(hidden.sum(1) / mask.sum(1, keepdim=True), label)


def whole_sequences() -> tuple[list[Tensor], dict[str, Tensor], list[str]]:
    """Train on whole sequences that four ranks split in rows of two; messages for inputs that do not fit."""
    torch.manual_seed(0)
    model = Mean().double()
    step = LossStep(
        model, torch.optim.SGD(model.parameters(), lr=0.5), 2, context_parallel=2, context_parallel_method="ring"
    )
    row, losses = zg.rank() // 2, []
    for ids, mask, label in mean_batches():
        losses.append(step(*(tensor.chunk(2)[row] for tensor in (ids, mask, label))))
    state = step.state_dict()["modules"]["model"]
    # Of the sizes of the steps before: the step is compiled.
    ids, mask, label = (tensor[:2] for tensor in mean_batches()[0])
    messages = []
    for bad in (ids[:, :7], mask[:, :7], label), (ids.roll(zg.rank()), mask, label), (label, label, label):
        messages.append(told(lambda bad=bad: step(*bad))[1])  # type: ignore[misc]
    return losses, state, messages


def mean_batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randint(16, (4, 8), generator=generator),
            (torch.arange(8) < torch.randint(1, 9, (4, 1), generator=generator)).long(),
            torch.randint(6, (4,), generator=generator),
        )
        for _ in range(3)
    ]


def test_ranks_take_their_pieces_of_whole_sequences(pool: Pool) -> None:
    losses, state, messages = pool.run(4, whole_sequences)[0]
    torch.manual_seed(0)
    model = Mean().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    wanted = [update_by(optimizer, model(*b)) for b in mean_batches()]
    torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-12, atol=1e-12)
    words = [
        "has 7 positions in dimension 1, which config.mesh.context_parallel = 2 does not divide",
        "is (S(0), B), but differs between ranks 0, 1",
        "no input is a sequence: tokens [batch, length]",
    ]
    assert len(messages) == len(words), messages
    for message, word in zip(messages, words, strict=True):
        assert word in message


def test_a_loop_does_not_split_sequences() -> None:
    with pytest.raises(zg.ConfigError, match=r"context_parallel=2: it is for steps that are one graph"):
        zg.prepare(Mean(), config=zg.Config(context_parallel=2))


def test_a_sampler_of_a_prepared_loader_has_the_parts_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8))
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=4, rank=1)
    job = SimpleNamespace(size=4, mesh=Mesh((2, 2), (0, 1), ("rows", "sequence")))
    monkeypatch.setattr(loaders, "join", lambda *_: job)
    split = loaders.SplitLoader(torch.utils.data.DataLoader(data, sampler=sampler), zg.Config(context_parallel=2))
    with pytest.raises(zg.InputError, match="Give it num_replicas=2, rank=0"):
        next(iter(split))


class Convolved(nn.Module):
    """A convolution over positions between layers that keep the sequence split."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(64, 8), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.mix(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        return self.head(hidden).square().mean()


def test_a_line_that_gathers_the_sequence_is_named_once_with_its_bytes() -> None:
    mesh, input_sbp = MESHES["sequence"]
    row = [tensor[:1] for tensor in tokens(mesh)]
    with pytest.warns(UserWarning, match="may be split along the sequence") as messages:
        prepared(Convolved(), mesh, input_sbp, *row)
    (message,) = [str(one.message) for one in messages if "along the sequence" in str(one.message)]
    # Half of the input, and half of the gradient of the result: what reads it keeps the sequence split.
    assert f" {2 * LENGTH * 8 * 4 // 2:,} bytes" in message
    assert "self.mix(" in message
    with pytest.raises(zg.CaptureError, match=r"aten\.convolution\.default"):
        prepared(Convolved(), mesh, input_sbp, *row, on_missing_rule="error")


def convolved(ranks: int = 1) -> dict[Stage, tuple[list[Tensor], dict[str, Tensor]]]:
    """Train on one sequence that ranks split, or plainly; losses and state by stage."""
    results: dict[Stage, tuple[list[Tensor], dict[str, Tensor]]] = {}
    ids = torch.randint(64, (3, 1, 16), generator=torch.Generator().manual_seed(3))
    for stage in STAGES if ranks > 1 else ("off",):
        torch.manual_seed(0)
        model = Convolved().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=0.1)
        if ranks == 1:
            losses = [update_by(optimizer, model(x, x)) for x in ids]
            results[stage] = losses, dict(model.state_dict())
            continue
        step = LossStep(model, optimizer, 0 if stage == "off" else int(stage), input_sbp=(zg.sbp.split(1),))
        pieces = [x.chunk(ranks, 1)[zg.rank()] for x in ids]
        results[stage] = [step(piece, piece) for piece in pieces], step.state_dict()["modules"]["model"]
    return results


@pytest.mark.long
def test_convolutions_over_a_split_sequence_compute_what_one_device_computes(pool: Pool) -> None:
    wanted = convolved()["off"]
    for results in pool.run(2, convolved, 2):
        for result in results.values():
            torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(result, results["off"], rtol=0, atol=0)


class FewKeys(nn.Module):
    """Attention of six heads of queries and three of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(64, 12), nn.Linear(12, 24)

    def forward(self, ids: Tensor) -> Tensor:
        heads = self.project(self.embed(ids)).unflatten(-1, (-1, 2)).transpose(1, 2).split([6, 3, 3], 1)
        hidden = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        loss: Tensor = (hidden.square() * torch.arange(6).view(6, 1, 1)).mean()
        return loss


def with_few_keys(ranks: int = 1) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = FewKeys().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = torch.randint(64, (3, 2, 8), generator=torch.Generator().manual_seed(3))
    if ranks == 1:
        losses = [update_by(optimizer, model(x)) for x in batches]
        return losses, dict(model.state_dict())
    step = LossStep(model, optimizer, 2, input_sbp=(zg.sbp.split(1),), context_parallel_method="ulysses")
    return [step(x.chunk(ranks, 1)[zg.rank()]) for x in batches], step.state_dict()["modules"]["model"]


def test_heads_of_keys_that_ranks_do_not_divide_are_repeated(pool: Pool) -> None:
    for result in pool.run(2, with_few_keys, 2):
        torch.testing.assert_close(result, with_few_keys(), rtol=1e-12, atol=1e-12)


def test_a_form_that_attention_does_not_have_is_refused() -> None:
    mesh, input_sbp = MESHES["sequence"]
    with pytest.raises(zg.ConfigError, match="the attention has 3 heads, which 2 ranks do not divide"):
        prepared(llama(key_heads=3, heads=3), mesh, input_sbp, *tokens(mesh), context_parallel_method="ulysses")
    with pytest.raises(zg.ConfigError, match=r"'ring': FlexAttention splits heads only\n.*flex_attention\("):
        prepared(SlidingWindow(), mesh, input_sbp, *tokens(mesh), context_parallel_method="ring")


class Accelerated(nn.Module):
    """Attention by a kernel of accelerators, which is traced but cannot run here, between projections."""

    def __init__(self, kernel: str, key_heads: int) -> None:
        super().__init__()
        self.kernel, self.embed = kernel, nn.Embedding(64, 32)
        self.query, self.key, self.value = (nn.Linear(32, 8 * heads) for heads in (4, key_heads, key_heads))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(ids)
        heads = [part(hidden).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        attend = getattr(torch.ops.aten, f"_scaled_dot_product_{self.kernel}_attention")
        options = (0.0, True) if self.kernel == "flash" else (None, True, 0.0, True)
        logits = attend(*heads, *options)[0].transpose(1, 2).flatten(2) @ self.embed.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@sliced("kernel, key_heads", [("flash", 2), ("efficient", 4), ("cudnn", 2)], [("flash", 4)])
def test_kernels_of_accelerators_split_heads_and_keep_the_sequence_split(kernel: str, key_heads: int) -> None:
    mesh, input_sbp = MESHES["sequence"]
    step = prepared(Accelerated(kernel, key_heads), mesh, input_sbp, *tokens(mesh), backend="eager")
    one = 4 * ROWS * LENGTH * 32
    # Queries, keys and values together; with fewer heads of keys, keys and values.
    sizes = [3 * one, one] if key_heads == 4 else [one, one, one]
    wanted = [(phase, "all-to-all", size) for phase in ("forward", "backward") for size in sizes]
    assert sorted(activations(step)) == sorted(wanted)
    with pytest.raises(zg.ConfigError, match="'gather': torch's kernels for accelerators split heads only"):
        prepared(Accelerated(kernel, key_heads), mesh, input_sbp, *tokens(mesh), context_parallel_method="gather")


class Products(nn.Module):
    """Attention that torch computes as two products: its mask has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bias = nn.Embedding(64, 32), nn.Parameter(torch.zeros(1, 4, 1, 1))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        heads = self.embed(ids).unflatten(-1, (4, 8)).transpose(1, 2)
        mask = self.bias * torch.arange(ids.shape[1], dtype=heads.dtype)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        logits = attended.transpose(1, 2).flatten(2) @ self.embed.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_a_form_that_no_attention_of_the_step_has_is_a_warning() -> None:
    mesh, input_sbp = MESHES["sequence"]
    with pytest.warns(UserWarning, match=r"config\.mesh\.context_parallel_method = 'ring' has no effect"):
        prepared(Products(), mesh, input_sbp, *tokens(mesh), context_parallel_method="ring")


def test_keys_and_values_travel_while_queries_attend_to_those_before() -> None:
    mesh, input_sbp = MESHES["sequence"]
    step = prepared(llama(key_heads=2), mesh, input_sbp, *tokens(mesh), context_parallel_method="ring")
    both = 4 * ROWS * LENGTH // 2 * 2 * 16 * 2
    wanted = [("forward", "shift", both)] * 2 + [("backward", "shift", both)] * 4
    assert sorted(activations(step)) == sorted([LABELS, *wanted])
    nodes = [str(node.target) for node in step.graph.graph.nodes]
    start = next(at for at, target in enumerate(nodes) if "shift_rows" in target)
    first = next(at for at, target in enumerate(nodes) if "ring_attention" in target)
    assert start < first < start + nodes[start:].index("_c10d_functional.wait_tensor.default")


def joined_rows(layer: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Join samples and positions of tensors whose positions are in other dimensions; then positions come first."""
    rows = layer(x.flatten(0, 1)) + y.flatten(0, 2)
    return rows.view(-1, 6, 5).transpose(0, 1).flatten(0, 1).square().sum(0), rows


def test_joined_rows_stay_split_along_the_batch_and_are_gathered_along_the_sequence() -> None:
    """Halves of each sequence are no half of all rows; samples stay together."""
    step = Predict(nn.Linear(3, 5), joined_rows, input_sbp=(zg.sbp.split(0), zg.sbp.split(1)))
    grid = Mesh((2, 2), (0, 0), ("rows", "sequence"))
    prepared = step.prepare(grid, torch.ones(2, 3, 3), torch.ones(2, 1, 3, 5))
    assert [node.meta["val"].shape for node in output_nodes(prepared.graph.graph)] == [(5,), (12, 5)]
    rows = 2 * 3 * 5 * 4  # bytes of a rank
    moved = Counter((one.kind, one.mesh_dim, one.bytes) for one in prepared.collectives())
    assert moved == {("all-gather", 1, rows): 2, ("all-reduce", 0, 5 * 4): 1}
