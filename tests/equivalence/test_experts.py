"""Ranks that split the experts of a mixture of experts: alone, and beside data parallelism and ZeRO."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import zerograph as zg
from tests.equivalence.families import LossOf
from tests.equivalence.family import Family
from tests.equivalence.mesh_layouts import Arrangement
from tests.equivalence.training import (
    STAGES,
    Stage,
    batches,
    equal,
    largest_deviation,
    make,
    optimizer,
    train,
    train_plainly,
)
from tests.harness import LossStep, Predict, sliced
from tests.models import part
from tests.peak_memory import most_allocated
from tests.pool import Pool
from zerograph.inspection.step import Prepared
from zerograph.ir.memory import temporary_bytes
from zerograph.ir.mesh import line
from zerograph.ir.step_graph import nbytes
from zerograph.ops import dispatch, experts

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}


def text(generator: torch.Generator, size: int) -> tuple[Tensor, ...]:
    tokens = torch.randint(3, 61, (size, 12), generator=generator)
    return tokens, tokens.clone()


def mixtral() -> nn.Module:
    """With the loop over experts: torch's grouped product has no fp64."""
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    config._experts_implementation = "eager"
    return LossOf(transformers.MixtralForCausalLM(config), "input_ids", "labels")


def qwen3_moe() -> nn.Module:
    """Eight experts, and as transformers runs them by default."""
    config = transformers.Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=48, head_dim=8)
    return LossOf(transformers.Qwen3MoeForCausalLM(config), "input_ids", "labels")


def unbalanced(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Without the load-balancing loss, which is not a sum over micro-batches."""

    def made() -> nn.Module:
        model = kind()
        model.model.config.output_router_logits = False  # type: ignore[union-attr]
        return model

    return made


class Routed(nn.Module):
    """Experts of Mixtral after a router in the model's own precision, with its load-balancing loss and z-loss."""

    def __init__(
        self,
        implementation: str = "eager",
        kind: type[nn.Module] = MixtralExperts,
        prefers: float = 0.0,
        balances: bool = True,
    ) -> None:
        super().__init__()
        self.prefers, self.balances = prefers, balances
        config_of = transformers.MixtralConfig if kind is MixtralExperts else transformers.GptOssConfig
        config = config_of(hidden_size=8, intermediate_size=12, num_local_experts=4)
        config._experts_implementation = implementation
        self.router, self.experts = nn.Linear(8, 4, bias=False), kind(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        # With a preference all tokens go to the last two experts.
        logits = self.router(x) + self.prefers * torch.arange(4)
        shares = logits.softmax(-1)
        chosen, experts = shares.topk(2, -1)
        y = self.experts(x, experts, chosen / chosen.sum(-1, keepdim=True))
        loss: Tensor = (y - x.roll(1, -1)).square().mean() + 0.01 * logits.logsumexp(-1).square().mean()
        if self.balances:
            load = F.one_hot(experts, 4).to(x.dtype).mean((0, 1))
            loss = loss + 0.1 * (load * shares.mean(0)).sum()
        return loss


class LowRank(nn.Module):
    """Add a product of two narrow matrices to the weight of each expert, as adapters do."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        experts, rows, columns = weight.shape
        self.left = nn.Parameter(torch.randn(experts, rows, 2) / 4)
        self.right = nn.Parameter(torch.randn(experts, 2, columns) / 4)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.left @ self.right


def adapted() -> nn.Module:
    """Frozen experts with trained adapters, as parametrizations of their weights; one weight is a buffer."""
    model = Routed()
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(model.experts, name).requires_grad_(False)
        parametrize.register_parametrization(model.experts, name, LowRank(weight))
    of_down = model.experts.parametrizations.down_proj  # type: ignore[union-attr]
    original = of_down.original.data
    del of_down.original
    of_down.register_buffer("original", original)
    return model


def rows(generator: torch.Generator, size: int) -> tuple[Tensor, ...]:
    return (torch.randn(3 * size, 8, generator=generator),)


FAMILIES = {
    one.name: one
    for one in (
        Family("mixtral", mixtral, text),
        Family("qwen3-moe", qwen3_moe, text),
        Family("routed", Routed, rows),
        Family("adapted", adapted, rows),
        Family("biased", lambda: Routed(kind=GptOssExperts), rows),
        Family("preferred", lambda: Routed(prefers=50.0), rows),
        Family("batched", lambda: Routed("batched_mm"), rows),
        Family("unbalanced", lambda: Routed(balances=False), rows),
        Family("mixtral-unbalanced", unbalanced(mixtral), text),
        Family("qwen3-moe-unbalanced", unbalanced(qwen3_moe), text),
    )
}
SPLIT = zg.sbp.split(0)
OPTIONS = (("expert_parallel", 2),)
EXPERTS = Arrangement("2 ranks, experts", (SPLIT,), ranks=(0, 1), options=OPTIONS)
ROWS_AND_EXPERTS = Arrangement("2x2, rows and experts", (SPLIT, SPLIT), options=OPTIONS)
# Tokens by all-to-all, most of them in the second round.
LITTLE = ("expert_capacity", 0.25)
EXCHANGED = Arrangement("4 ranks, exchanged", (SPLIT,), ranks=(0, 1, 2, 3), options=(("expert_parallel", 4), LITTLE))
ROWS_AND_EXCHANGED = replace(ROWS_AND_EXPERTS, title="2x2, rows and exchanged", options=(*OPTIONS, LITTLE))
EXPERTS_OF_FOUR = replace(EXCHANGED, title="4 ranks, experts", options=(("expert_parallel", 4),))
IN_TWO, IN_FOUR = ("gradient_accumulation_steps", 2), ("gradient_accumulation_steps", 4)
CUT = replace(EXPERTS, title="2 ranks, experts, 2 micro-batches", options=(*OPTIONS, IN_TWO))
CUT_IN_FOUR = replace(EXPERTS, title="2 ranks, experts, 4 micro-batches", options=(*OPTIONS, IN_FOUR))
ROWS_AND_CUT = replace(ROWS_AND_EXPERTS, title="2x2, rows, experts, 2 micro-batches", options=(*OPTIONS, IN_TWO))
CUT_OF_FOUR = replace(EXCHANGED, title="4 ranks, exchanged, 2 micro-batches", options=(*EXCHANGED.options, IN_TWO))
# The losses and routers of transformers compute in fp32.
EXACT, ROUNDED = 1e-10, 1e-6


def train_as_rank(name: str, dtype: torch.dtype, arrangement: Arrangement, stages: Sequence[Stage]) -> Any:
    return train(FAMILIES[name], dtype, stages, arrangement=arrangement)[0]


@sliced(
    "name, dtype, arrangement, stages, bound",
    [
        ("routed", torch.float64, EXPERTS, ("off", 3), EXACT),
        ("preferred", torch.float64, EXCHANGED, (1,), EXACT),
        ("batched", torch.float64, EXPERTS, (2,), EXACT),
        ("adapted", torch.float64, EXPERTS, (2,), EXACT),
        ("biased", torch.float64, EXPERTS, (2,), EXACT),
        ("unbalanced", torch.float64, ROWS_AND_CUT, (3,), EXACT),
    ],
    # That grid, exchange and micro-batches depend neither on the model nor on the stage. Mixtral has these experts.
    [
        ("routed", torch.float64, EXPERTS, STAGES, EXACT),
        ("qwen3-moe", torch.float32, EXPERTS, (2,), ROUNDED),
        ("routed", torch.float64, ROWS_AND_EXCHANGED, (2,), EXACT),
        ("routed", torch.float64, EXCHANGED, (1, 3), EXACT),
        ("biased", torch.float64, ROWS_AND_EXPERTS, (2,), EXACT),
        ("unbalanced", torch.float64, CUT_OF_FOUR, (2,), EXACT),
        ("routed", torch.float64, ROWS_AND_EXPERTS, STAGES, EXACT),
        ("mixtral", torch.float64, EXPERTS_OF_FOUR, (2,), ROUNDED),
        ("mixtral", torch.float64, EXPERTS, STAGES, ROUNDED),
        ("mixtral", torch.float64, ROWS_AND_EXPERTS, STAGES, ROUNDED),
        ("qwen3-moe", torch.float32, ROWS_AND_EXPERTS, STAGES, ROUNDED),
        *(
            (f"{name}-unbalanced", dtype, where, (stage,), ROUNDED)
            for name, dtype in (("mixtral", torch.float64), ("qwen3-moe", torch.float32))
            for where in (CUT, CUT_IN_FOUR, ROWS_AND_CUT)
            for stage in STAGES
        ),
    ],
)
def test_ranks_that_split_experts_compute_what_one_device_computes(
    pool: Pool, name: str, dtype: torch.dtype, arrangement: Arrangement, stages: Sequence[Stage], bound: float
) -> None:
    everybody = pool.run(torch.tensor(arrangement.ranks).numel(), train_as_rank, name, dtype, arrangement, stages)
    first = everybody[0][stages[0]]
    assert largest_deviation(first, train_plainly(FAMILIES[name], dtype)) <= bound
    for results in everybody:
        assert all(equal(result, first) for result in results.values())


def step_of(name: str, stage: int, **options: Any) -> LossStep:
    model = make(FAMILIES[name], options.pop("dtype", torch.float64))
    return LossStep(model, optimizer(model), stage, **options)


@functools.cache
def prepared(name: str, ranks: int, stage: int, **options: Any) -> Prepared:
    (batch, *_) = batches(FAMILIES[name], options.get("dtype", torch.float64))
    return step_of(name, stage, **options).prepare(line(ranks, 0, "ranks"), *(x.chunk(ranks)[0] for x in batch))


def activations(step: Prepared, sums: int = 64) -> list[tuple[str, str, int]]:
    """Phase, kind and sent bytes of collectives that move more than sums over the batch, beside those of buckets."""
    large = [one for one in step.collectives() if (one.bytes > sums or not sums) and "bucket" not in one.what]
    return [(one.phase, one.kind, one.bytes) for one in large]


def test_tokens_travel_once_to_the_experts_and_once_back_in_forward_and_in_backward() -> None:
    tokens, width, choices = 8 * 12, 32, 2
    # Each of two ranks sends half.
    whole, shares = tokens * width * 4 // 2, tokens * choices * 4 // 2
    # The gradient of the shares that the router gave is summed over ranks too.
    assert activations(prepared("mixtral", 2, 2, expert_parallel=2, dtype=torch.float32)) == [
        ("forward", "all-gather", whole),
        ("forward", "reduce-scatter", whole),
        ("backward", "all-gather", whole),
        ("backward", "reduce-scatter", shares),
        ("backward", "reduce-scatter", whole),
    ]


def test_tokens_are_exchanged_in_two_rounds_where_that_sends_fewer_bytes() -> None:
    tokens, width, choices, ranks = 2 * 12, 32, 2, 4
    options = {"expert_parallel": ranks, "dtype": torch.float32}
    exchanges = [one for one in activations(prepared("mixtral", ranks, 2, **options), 0) if one[1] == "all-to-all"]
    # One rank has the experts of half of the tokens, if routing is even.
    first = math.ceil(1.25 * tokens / 2) * width * 4 * (ranks - 1)
    assert exchanges == [(phase, "all-to-all", n) for phase in ("forward", "backward") for n in (first, 0, first, 0)]
    gathers = activations(prepared("mixtral", ranks, 2, **options, expert_capacity=None), 2 * first // 3)
    assert [sent for _, _, sent in gathers] == [tokens * width * 4 * (ranks - 1)] * 4
    assert sum(n for *_, n in exchanges) + 5 * tokens * choices * 8 < 4 * gathers[0][2]


def test_in_micro_batches_each_token_travels_once_to_the_experts_and_once_back() -> None:
    tokens, width, choices, count = 2 * 12, 32, 2, 2  # of a rank in a micro-batch
    whole, shares, ids = (tokens * size for size in (width * 4, choices * 4, choices * 8))
    step = prepared("mixtral-unbalanced", 2, 2, expert_parallel=2, gradient_accumulation_steps=2, dtype=torch.float32)
    assert Counter(activations(step)) == {
        ("forward", "all-gather", ids): count,
        ("forward", "all-gather", shares): count,
        ("forward", "all-gather", whole): count,
        ("forward", "reduce-scatter", whole): count,
        ("backward", "all-gather", whole): count,
        ("backward", "reduce-scatter", shares): count,
        ("backward", "reduce-scatter", whole): count,
    }


@sliced("name", ["adapted"], ["mixtral", "qwen3-moe"])
def test_without_expert_parallelism_no_token_travels(name: str) -> None:
    assert activations(prepared(name, 2, 2)) == []


def test_each_rank_stores_and_computes_with_its_experts_only() -> None:
    experts = sum(p.numel() * p.element_size() for p in Routed().experts.parameters()) * 2
    router = 4 * 8 * 8
    for ranks, parts in ((2, 2), (4, 4)):
        kinds = prepared("routed", ranks, 3, expert_parallel=2).memory.kinds
        assert kinds["parameters"] == experts // parts + router // 2
    in_two, in_one = (prepared("routed", 2, 3, expert_parallel=number).memory.kinds for number in (2, 1))
    assert in_one["gathered"] >= experts
    assert in_two.get("gathered", 0) <= 2 * router


def saved(folder: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Save half-way with experts split over two ranks, and go on undisturbed; gradients are clipped."""
    step = step_of("routed", 2, expert_parallel=2, clip_grad_norm=0.05)
    first, last = BATCHES[:2], BATCHES[2:]
    for batch in first:
        step(*map(part, batch))
    step.save(folder)
    return [step(*map(part, batch)) for batch in last], step.state_dict()["modules"]["model"]


def gone_on(folder: Path, stage: int, experts: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    step = step_of("routed", stage, expert_parallel=experts, clip_grad_norm=0.05)
    step.load(folder)
    return [step(*map(part, batch)) for batch in BATCHES[2:]], step.state_dict()["modules"]["model"]


BATCHES = batches(FAMILIES["routed"], torch.float64)


def clipped_plainly() -> tuple[list[Tensor], dict[str, Tensor]]:
    model = make(FAMILIES["routed"], torch.float64)
    update, losses = optimizer(model), []
    for batch in BATCHES:
        update.zero_grad()
        loss = model(*batch)
        loss.backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.05
        update.step()
        losses.append(loss.detach())
    return losses[2:], model.state_dict()


# Ranks, stage, ranks that split the experts.
@sliced("layouts", [((4, 2, 2),)], [((1, 0, 1), (2, 3, 1))])
def test_a_checkpoint_of_split_experts_goes_on_in_any_other_layout(pool: Pool, tmp_path: Path, layouts: Any) -> None:
    wanted = clipped_plainly()
    ends = [pool.run(2, saved, tmp_path)[0], *(pool.run(n, gone_on, tmp_path, *rest)[0] for n, *rest in layouts)]
    for end in ends:
        torch.testing.assert_close(end, wanted, rtol=1e-10, atol=1e-12)


def switched() -> tuple[list[int], list[Tensor]]:
    """Train with whole experts, then with split ones, then with whole ones again."""
    step, sizes, losses = step_of("routed", 0), [], []
    for number, batch in zip((1, 2, 1), BATCHES, strict=False):
        step.config.mesh.expert_parallel = number
        losses.append(step(*map(part, batch)))
        sizes.append(step.state_bytes())
    return sizes, losses


def test_experts_are_split_and_joined_between_two_steps(pool: Pool) -> None:
    sizes, losses = pool.run(2, switched)[0]
    wanted = train_plainly(FAMILIES["routed"], torch.float64).losses[:3]
    torch.testing.assert_close(losses, wanted, rtol=1e-10, atol=1e-12)
    assert sizes[0] == pytest.approx(sizes[2], rel=0.01)
    assert sizes[1] < 0.55 * sizes[0]


@pytest.mark.parametrize(
    ("name", "ranks", "options", "message"),
    [
        (
            "routed",
            3,
            {"expert_parallel": 3},
            "config.mesh.expert_parallel = 3 does not divide the 4 experts of model.exp",
        ),
        ("routed", 3, {"expert_parallel": 2}, "config.mesh.expert_parallel = 2 does not divide the 3 ranks"),
        ("linear", 2, {"expert_parallel": 2}, "no module of experts"),
        ("annotated", 2, {"expert_parallel": 2}, "is placed by zg.annotate"),
        (
            "routed",
            2,
            {"expert_parallel": 2, "input_sbp": (zg.sbp.split(1),), "gradient_accumulation_steps": 2},
            "require that experts and the rows of inputs are split along the last mesh dimension, and that "
            "no norm follows the experts",
        ),
        (
            "routed",
            2,
            {"expert_parallel": 2, "gradient_accumulation_steps": 2},
            "needs the whole batch at once",  # the load-balancing loss
        ),
        ("routed", 2, {"expert_parallel": 2, "context_parallel": 4}, "both are the ranks of a row"),
    ],
)
def test_experts_that_cannot_be_split_are_an_error(
    name: str, ranks: int, options: dict[str, Any], message: str
) -> None:
    model = nn.Linear(8, 1) if name == "linear" else Routed()
    if isinstance(model, Routed) and name == "annotated":
        zg.annotate(model.experts.down_proj, sbp=SPLIT)
    step = LossStep(model, torch.optim.SGD(model.parameters()), loss=lambda model, x: model(x).sum(), **options)
    with pytest.raises(zg.ZeroGraphError, match=message):
        step.prepare(line(ranks, 0, "ranks"), torch.randn(4, 8))


def test_micro_batches_of_a_step_that_only_predicts_do_not_matter() -> None:
    step = Predict(Routed())
    step.config.mesh.expert_parallel, step.config.gradient_accumulation_steps = 2, 2
    assert step.prepare(line(2, 0, "ranks"), torch.randn(4, 8)).context.batch.micro_batches == 1


def test_the_planner_splits_experts_over_rows_of_ranks() -> None:
    model = make(FAMILIES["mixtral"], torch.float32)
    whole, split = (
        zg.plan(model, text(torch.Generator(), 2), torch.optim.SGD, world_size=4, stage=0, expert_parallel=experts)
        for experts in (1, 2)
    )
    stacked = sum(p.numel() * 4 for name, p in model.named_parameters() if "experts" in name)
    assert whole.memory.kinds["parameters"] - split.memory.kinds["parameters"] == stacked // 2


def test_experts_that_each_see_all_tokens_send_by_all_to_all() -> None:
    """Llama 4 multiplies tokens [experts, tokens, width], weighted by zero or one."""
    sizes = {**SIZES, "num_attention_heads": 4, "head_dim": 8, "intermediate_size_mlp": 64}
    config = transformers.Llama4TextConfig(**sizes, num_local_experts=4)
    model = LossOf(transformers.Llama4ForCausalLM(config), "input_ids", "labels")
    step = LossStep(model, torch.optim.SGD(model.parameters()), expert_parallel=2)
    prepared = step.prepare(line(2, 0, "ranks"), *text(torch.Generator(), 4))
    assert {kind for phase, kind, _ in activations(prepared) if phase == "forward"} == {"all-to-all"}


@pytest.mark.parametrize("groups", [1, 2])
def test_torchs_grouped_product_computes_what_the_loop_over_experts_computes(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerators run it. Here are experts 4 to 7 of 8, one of them without tokens."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((16, 8), (groups, 4 // groups, 8, 16)))
    ids = torch.randint(7, (16, 2), generator=generator)
    arguments = (8, groups)  # these groups begin after as many others

    def results() -> list[Tensor]:
        hidden = experts.expert_mm(x, weight, ids, *arguments)
        back = experts.expert_mm(hidden, weight.transpose(2, 3), ids, *arguments)
        gradients = [experts.expert_weight_gradient(y, hidden, ids, 4 // groups, *arguments) for y in (x, back)]
        return [hidden, back, *gradients, experts.expert_mm_summed(hidden, weight.transpose(2, 3), ids, *arguments)]

    wanted = results()
    monkeypatch.setattr(experts, "_grouped_mm", lambda left, right: F.grouped_mm)
    torch.testing.assert_close(results(), wanted, rtol=1e-5, atol=1e-5)
    assert all(bool(one.any()) for one in wanted)


@pytest.mark.parametrize("target", experts.FIRST)
@pytest.mark.parametrize("width", [16, 96])
def test_the_memory_inside_of_products_by_expert_is_predicted(target: Any, width: int) -> None:
    x, ids = torch.randn(512, width), torch.randint(4, (512, 2))
    if target is not experts.EXPERT_MM:
        x = torch.randn(1, 512, 2, width)
    other = torch.randn((1, 512, 2, 48) if target is experts.EXPERT_WEIGHT_GRADIENT else (1, 4, width, 48))
    sizes = (4, 4, 0) if target is experts.EXPERT_WEIGHT_GRADIENT else (4, 0)
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in ("x", "other", "ids")]
    for node, value in zip(inputs, (x, other, ids), strict=True):
        node.meta["val"] = value
    node = graph.call_function(target, (*inputs, *sizes))
    node.meta["val"] = target(x, other, ids, *sizes)
    seen = most_allocated(lambda: target(x, other, ids, *sizes), before=lambda: target(x, other, ids, *sizes))
    assert nbytes(node.meta["val"]) + temporary_bytes(node) == pytest.approx(seen, rel=0.02)


def test_the_memory_of_an_exchange_is_predicted_and_its_routes_are_computed_once() -> None:
    step = prepared("mixtral", 4, 2, expert_parallel=4, dtype=torch.float32)
    nodes = [node for node in step.emitted.nodes if node.target is dispatch.ROUTES]
    assert len(nodes) == 1
    unpacked = [node for node in step.emitted.nodes if node.target is dispatch.UNPACK[dispatch.COMBINE]]
    assert {node.args[1].meta["val"].shape[1] for node in unpacked} == {96}
    assert all(temporary_bytes(node) == 96 * 10 + nbytes(node.meta["val"]) for node in unpacked)
    pairs, tokens, width = 2, 4096, 64
    ids = torch.stack([torch.randperm(8)[:pairs] for _ in range(tokens)])
    routes = dispatch.ROUTES(ids, 4, 8)
    x, rows = torch.randn(tokens // 4, width), torch.randn(1, tokens, width)
    received = torch.randn(tokens, width)
    for run, wanted in (
        (lambda: dispatch.ROUTES(ids, 4, 8), 3 * tokens * 4 * 4),
        (lambda: dispatch.PACK[dispatch.COMBINE](rows, routes, 0, tokens // 4), tokens * 16),
        (lambda: dispatch.UNPACK[dispatch.DISPATCH](received, x, routes, 0, tokens // 4, ""), tokens * 10),
        (lambda: dispatch.UNPACK[dispatch.COMBINE](received, rows, routes, 0, tokens // 4, ""), tokens * 10 + x.nbytes),
    ):
        assert most_allocated(run, before=run) - nbytes(run()) == pytest.approx(wanted, rel=0.1)


def test_experts_of_versions_without_a_norm_after_them() -> None:
    torch.manual_seed(0)
    model, ids = mixtral(), text(torch.Generator().manual_seed(0), 2)
    expected = model(*ids).detach()
    for module in model.modules():
        vars(module).pop("has_post_expert_norm", None)
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.testing.assert_close(step(*ids), expected, rtol=1e-6, atol=0)
