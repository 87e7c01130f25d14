"""Whatever is trained, and however: the numbers of one device, or a clear error, and never anything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

from tests.faults.outcomes import tried
from tests.faults.random_steps import LAYERS, LOSSES, SCHEDULERS, Drawn
from tests.faults.survival_table import Tally
from tests.pool import Pool

# Rank by rank what an example does is the same; what differs is only how long it takes.
CALM = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}

lr = st.sampled_from([0.1, 0.01])
decay = st.sampled_from([0.0, 0.0, 0.1])
flag = st.booleans()
betas = st.sampled_from([(0.9, 0.999), (0.5, 0.9)])

HYPERPARAMETERS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "SGD": {"lr": lr, "momentum": st.sampled_from([0.0, 0.9]), "weight_decay": decay, "maximize": flag},
    "Adam": {"lr": lr, "betas": betas, "weight_decay": decay, "amsgrad": flag, "fused": flag, "eps": st.just(1e-4)},
    "AdamW": {"lr": lr, "betas": betas, "weight_decay": decay, "amsgrad": flag, "maximize": flag, "fused": flag},
    "NAdam": {"lr": lr, "betas": betas, "weight_decay": decay, "decoupled_weight_decay": flag},
    "RAdam": {"lr": lr, "betas": betas, "weight_decay": decay},
    "Adamax": {"lr": lr, "betas": betas, "weight_decay": decay},
    "ASGD": {"lr": lr, "weight_decay": decay, "t0": st.sampled_from([1.0, 1e6])},
    "Adagrad": {"lr": lr, "lr_decay": st.sampled_from([0.0, 0.1]), "weight_decay": decay},
    "Adadelta": {"lr": lr, "rho": st.sampled_from([0.9, 0.5]), "weight_decay": decay},
    "RMSprop": {"lr": lr, "momentum": st.sampled_from([0.0, 0.9]), "centered": flag, "weight_decay": decay},
    "Rprop": {"lr": lr, "etas": st.just((0.5, 1.2))},
    "Adafactor": {"lr": lr, "weight_decay": decay},
    "Muon": {"lr": lr, "nesterov": flag, "weight_decay": decay},
    "LBFGS": {"lr": lr},
    "SparseAdam": {"lr": lr},
}
# Their updates are smooth enough that rounding in fp32 stays rounding.
SMOOTH = ("SGD", "ASGD", "Adam")


@st.composite
def optimizers(draw: st.DrawFn, smooth: bool, low: bool) -> tuple[str, tuple[dict[str, Any], ...]]:
    names = SMOOTH if smooth else [*list(HYPERPARAMETERS)[:13] * 4, "LBFGS", "SparseAdam"]
    name = draw(st.sampled_from(names))
    groups = st.fixed_dictionaries(HYPERPARAMETERS[name])
    if low and name == "Adam":
        # Divided by its own size, a gradient that is nothing but rounding would be a whole step.
        groups = st.fixed_dictionaries({**HYPERPARAMETERS[name], "eps": st.just(0.1)})
    return name, tuple(draw(st.lists(groups, min_size=1, max_size=1 if name == "LBFGS" else 3)))


def rarely(draw: st.DrawFn) -> bool:
    """Draw True rarely: for options with which almost every step is refused."""
    return draw(st.integers(0, 15)) == 7


@st.composite
def options(draw: st.DrawFn, dtype: torch.dtype) -> dict[str, Any]:
    every: dict[str, st.SearchStrategy[Any]] = {
        "shard_min_size": st.sampled_from([0, 4, 10**6]),
        "bucket_size": st.sampled_from([1, 100, 1000, 10**9]),
        "clip_grad_norm": st.sampled_from([1e-3, 0.5, 100.0]),
        "memory_budget": st.sampled_from(["1MiB", "1GiB", 20000]),
        "activation_checkpointing": st.sampled_from(["blocks", "auto"]),
        "gradient_accumulation_steps": st.sampled_from([2, 3]),
        "accumulation_outputs": st.sampled_from(["packed", "packed", "whole"]),
        "batch_norm": st.sampled_from(["local", "local", "global"]),
        "on_missing_rule": st.sampled_from(["gather", "error"]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "shard_dims": st.just(0),
    }
    if dtype is torch.float32:
        every["amp_dtype"] = st.sampled_from([torch.bfloat16, torch.float16])
        every["reduce_dtype"] = st.sampled_from([torch.float32, torch.bfloat16])
    picked = draw(st.lists(st.sampled_from(sorted(every)), unique=True, max_size=4))
    if "accumulation_outputs" in picked:
        picked.append("gradient_accumulation_steps")
    found = {name: draw(every[name]) for name in sorted(set(picked))}
    if rarely(draw):
        found |= draw(st.sampled_from([{"shard_dims": 1}, {"memory_budget": 1}, {"amp_dtype": torch.bfloat16}]))
    found["shard_by"] = draw(st.sampled_from(["elements", "elements", "parameters"]))
    return {**found, "stage": draw(st.sampled_from([0, 1, 2, 3, 3])), "backend": "eager", "timeout": 120}


OPTIMIZER = [
    {"device": "nvme", "nvme_path": "folder"},
    {"device": "nvme", "nvme_path": "folder", "fast_init": False},
    {"device": "cpu"},
]
PARAMETERS = [
    {"device": "nvme", "nvme_path": "folder"},
    {"device": "nvme", "nvme_path": "folder", "max_in_cpu": 200},
]


# Kinds of layers with something to train.
TRAINED = ["linear", "no bias", "tied", "layer norm", "residual", "0-d", "batch norm"]


@st.composite
def steps(draw: st.DrawFn) -> Drawn:
    source = draw(st.sampled_from(["vectors", "vectors", "tokens", "images"]))
    dtype = draw(st.sampled_from([torch.float64] * 4 + [torch.float32] * 2 + [torch.bfloat16]))
    widths = st.integers(1, 9)
    kinds = [kind for kind in LAYERS if kind != "batch norm"]
    layers = draw(st.lists(st.tuples(st.sampled_from(kinds), widths), min_size=1, max_size=5))
    if source != "tokens" and draw(st.booleans()):
        # Not behind a bias, whose gradient would be rounding noise and nothing else.
        layers = [("batch norm", 1), *layers] if source == "vectors" else [("no bias", 4), ("batch norm", 1), *layers]
    if source == "vectors" and not any(kind in TRAINED for kind, _ in layers):
        layers.append((draw(st.sampled_from(TRAINED)), draw(widths)))
    chosen = draw(options(dtype))
    micro = chosen.get("gradient_accumulation_steps", 1)
    samples = [(draw(st.sampled_from([1, 2, 2, 3, 4, 5])) * micro,)] * 2
    for number in range(2):
        if rarely(draw):
            samples[number] = draw(st.sampled_from([(0,), (1, 2), (3,), (5,), (0, 1)]))
    offload = {}
    if draw(st.integers(0, 4)) == 2:
        offload["optimizer"] = draw(st.sampled_from(OPTIMIZER))
    if draw(st.integers(0, 4)) == 2 and (chosen["stage"] == 3 or rarely(draw)):
        offload["parameters"] = draw(st.sampled_from(PARAMETERS))
    amp = chosen.get("amp_dtype")
    low = amp is not None or torch.bfloat16 in (dtype, chosen.get("reduce_dtype"))
    # Behind batch norm gradients may cancel altogether; what divides by their size makes whole steps of the rounding.
    smooth = dtype is not torch.float64 or any(kind == "batch norm" for kind, _ in layers)
    trained = draw(st.lists(optimizers(smooth, low), min_size=1, max_size=2))
    if any(name == "Muon" for name, _ in trained):
        # It takes matrices, and nothing else.
        layers = [("no bias", out) for _, out in layers]
        source = draw(st.sampled_from(["vectors", "tokens"]))
    grid = draw(st.sampled_from([(1, 2), (2, 1), (2, 2)])) if draw(st.integers(0, 7)) == 5 else None
    return Drawn(
        source,
        draw(widths),
        tuple(layers),
        draw(st.sampled_from(sorted(LOSSES))),
        dtype,
        tuple(samples),
        tuple(trained),
        chosen,
        offload,
        draw(st.sampled_from([1, 2, 2, 2, 3])) if grid is None else grid[0] * grid[1],
        tuple(draw(st.sampled_from(["", "", *SCHEDULERS])) for _ in trained),
        # None overflows: what one device rounds to infinity, several may not.
        draw(st.sampled_from([1.0, 8.0])) if amp is torch.float16 else 0.0,
        "int" if rarely(draw) else draw(st.sampled_from(["", "", "tensor"])),
        grid,
        grid is not None and draw(flag),
    )


def check(pool: Pool, folder: Path, drawn: Drawn, numbers: Tally, refusals: Tally) -> None:
    outcomes = pool.run(drawn.ranks, tried, drawn, str(folder))
    kinds = {one.kind for one in outcomes}
    good = len(kinds) == 1 and "wrong" not in kinds
    (refusals if "refused" in kinds else numbers).add(good)
    assert good, "\n".join(f"rank {rank}, {one.kind}: {one.said}" for rank, one in enumerate(outcomes))


def fuzzed(pool: Pool, folder: Path, examples: int, number: int, tally: Callable[[str], Tally]) -> None:
    numbers, refusals = tally("a drawn training step: numbers of one device"), tally("a drawn training step: refused")

    @seed(number)
    @settings(max_examples=examples, phases=(Phase.generate, Phase.shrink), **CALM)
    @given(steps())
    def run(drawn: Drawn) -> None:
        check(pool, folder, drawn, numbers, refusals)

    run()


def test_a_drawn_step_is_right_or_refused(pool: Pool, tmp_path: Path, tally: Callable[[str], Tally]) -> None:
    fuzzed(pool, tmp_path, 3, 1, tally)


def test_an_update_within_another_ones_turn_waits_for_its_own_file(pool: Pool, tmp_path: Path) -> None:
    # Found so: of one bucket that was gathered for the update too, the second was put back in the middle of the first.
    groups = ({"lr": 0.01, "t0": 1e6}, {"lr": 0.1, "t0": 1e6}, {"lr": 0.01, "t0": 1e6, "weight_decay": 0.1})
    drawn = Drawn(
        "vectors",
        9,
        (("dropout 0", 5), ("residual", 7), ("residual", 1), ("unused", 3)),
        "sum",
        torch.float32,
        ((4,), (4,)),
        (("ASGD", groups), ("SGD", ({"lr": 0.1, "momentum": 0.9}, {"lr": 0.1}))),
        {"bucket_size": 10**9, "stage": 3, "backend": "eager"},
        {"parameters": {"device": "nvme", "nvme_path": "folder", "max_in_cpu": 200}},
    )
    assert [one.kind for one in pool.run(2, tried, drawn, str(tmp_path))] == ["equal", "equal"]


@pytest.mark.long
@pytest.mark.parametrize("number", range(1, 21))
def test_many_drawn_steps_are(pool: Pool, tmp_path: Path, tally: Callable[[str], Tally], number: int) -> None:
    fuzzed(pool, tmp_path, 40, number, tally)
