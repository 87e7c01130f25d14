"""Each pass, as the text of a small step before and after it: ``golden/<pass>.txt``.

A file is a diff with the whole graph around it: lines with ``-`` are before the pass only, those with ``+`` after it
only. Write the files anew with ``pytest tests/passes/test_golden.py --update-golden``, and read the difference.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep, mean_of_squares, prepare
from zerograph.compiler.compiled import PreparedStep
from zerograph.compiler.step_key import StepRequest
from zerograph.inspection.step import Inspection
from zerograph.ir.mesh import Mesh, line
from zerograph.passes.pipeline import PIPELINE
from zerograph.runtime.wire import collectives

GOLDEN = Path(__file__).parent / "golden"
# The traced graph differs between versions: decompositions, and so the operators and their numbers.
TORCH = "2.13"

pytestmark = [
    pytest.mark.skipif(not torch.__version__.startswith(f"{TORCH}."), reason=f"the texts are those of torch {TORCH}"),
    pytest.mark.filterwarnings("ignore:no rule says how aten._embedding_bag"),
]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


class TimeFirst(nn.Module):
    """Multiplies (time, batch, channels) by a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(0, 1)).tanh()


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 4, mode="sum")

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        return self.bag(indices, offsets)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in self.linear(x).chunk(3, -1))
        return F.scaled_dot_product_attention(query, key, value)


class FewKeys(nn.Module):
    """Six heads of queries, three of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        query, key = x.unflatten(-1, (6, 2)).transpose(1, 2), x[..., :6].unflatten(-1, (3, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(query, key, key, enable_gqa=True)


def mlp(*widths: int, device: str = "cpu") -> nn.Module:
    layers = [nn.Linear(*pair, device=device) for pair in itertools.pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))


def accelerator(width: int, **options: Any) -> LossStep:
    """Make a step on the meta device, which stands for an accelerator."""
    model = mlp(width, width, width, device="meta")
    return LossStep(model, fused(model), 3, mean_of_squares, bucket_size=4 * width**2, backend="eager", **options)


def prepared_for_accelerator(step: LossStep) -> PreparedStep:
    width = next(step.model.parameters()).shape[1]
    return step.prepare(line(2, 0, "ranks"), torch.empty(8, width, device="meta"), device="meta")


def with_optimizer_on_the_cpu() -> PreparedStep:
    step = accelerator(64)
    step.config.memory.offload = zg.Offload(optimizer="cpu")
    return prepared_for_accelerator(step)


def with_activations_on_the_cpu() -> PreparedStep:
    """With products so large that a copy hides behind one."""
    return prepared_for_accelerator(accelerator(2**16, offload=zg.Offload(activations=True)))


def step_of(
    model: nn.Module,
    *batch: Tensor,
    stage: int = 3,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    loss: Callable[..., Tensor] = mean_of_squares,
    **options: Any,
) -> PreparedStep:
    """Prepare for rank 0 of two."""
    options = {"shard_min_size": 1, "backend": "eager"} | options
    return prepare(LossStep(model, optimizer(model), stage, loss, **options), *batch)


def on_a_grid() -> PreparedStep:
    model = mlp(4, 2)
    step = LossStep(
        model, sgd(model), 2, mean_of_squares, backend="eager", input_sbp=(zg.sbp.split(0), zg.sbp.broadcast)
    )
    return step.prepare(Mesh((2, 2), (0, 0), ("data", "model")), torch.ones(4, 4))


def between_peers() -> PreparedStep:
    step = step_of(mlp(4, 2), torch.ones(4, 4), stage=2)
    exchanges = {"all-gather": collectives.gather_pieces, "reduce-scatter": collectives.exchange_pieces}
    backend = replace(step.context.backend, exchanges=exchanges)
    parts = {one.name: getattr(step, one.name) for one in fields(PreparedStep)}
    return PreparedStep(**{**parts, "context": replace(step.context, backend=backend)})


def offloaded() -> PreparedStep:
    model = mlp(4, 4, 2)
    step = LossStep(model, fused(model), 2, mean_of_squares, backend="eager", shard_min_size=1)
    step.config.memory.offload = zg.Offload(optimizer=zg.OffloadTo("nvme", tempfile.gettempdir()))
    return prepare(step, torch.ones(4, 4))


def read_early() -> PreparedStep:
    """With a loss that a loop reads before backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))
    step = LossStep(model, sgd(model), 3, mean_of_squares, backend="eager", shard_min_size=1)
    step._request = StepRequest(early_outputs=1)
    return prepare(step, torch.ones(4, 4))


def any_batch() -> PreparedStep:
    """With a dimension 0 of any size on each rank."""
    x = torch.ones(4, 3, 4)
    zg.mark_dynamic(x, 0)
    model = mlp(4, 2)
    return LossStep(model, sgd(model), 2, mean_of_squares, backend="eager").prepare(line(2, 0, "ranks"), x)


# A step in which each pass changes something.
STEPS: dict[str, tuple[Callable[[], PreparedStep], tuple[str, ...]]] = {
    "stage 3": (
        lambda: step_of(mlp(4, 4, 2), torch.ones(4, 4)),
        ("flatten", "place", "box", "reshard_after_forward", "localize", "schedule", "reinplace", "reuse_temporaries"),
    ),
    "fused optimizer": (
        lambda: step_of(mlp(4, 2), torch.ones(4, 4), stage=2, optimizer=fused),
        ("fuse", "gather_in_place"),
    ),
    "fused optimizer of an accelerator": (
        lambda: prepared_for_accelerator(accelerator(4, clip_grad_norm=1.0)),
        ("merge_updates", "pack_scalars"),
    ),
    "bags": (
        lambda: step_of(Bag(), torch.zeros(8, dtype=torch.long), torch.arange(0, 4, 2).repeat(2)),
        ("offsets",),
    ),
    "grid": (on_a_grid, ("unfuse",)),
    "time first": (lambda: step_of(TimeFirst(), torch.ones(4, 3, 4)), ("batch_first",)),
    "loss scale": (
        lambda: step_of(mlp(4, 2), torch.ones(4, 4), grad_scaler=zg.GradScaler()),
        ("skip_overflowed_update",),
    ),
    "micro-batches": (
        lambda: step_of(
            mlp(4, 3),
            torch.ones(8, 4),
            torch.zeros(8, dtype=torch.long),
            loss=cross_entropy,
            gradient_accumulation_steps=2,
        ),
        ("split_micro_batches", "hoist_batch_statistics", "loop"),
    ),
    "table": (
        lambda: step_of(nn.Embedding(4096, 4), torch.zeros(4, 2, dtype=torch.long), bucket_size=2**16),
        ("shard_embeddings",),
    ),
    "cheap": (
        lambda: step_of(nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)), torch.zeros(2**10, 512)),
        ("recompute_cheap",),
    ),
    "classes": (
        lambda: step_of(
            mlp(4, 4), torch.ones(4, 4), torch.zeros(4, dtype=torch.long), loss=cross_entropy, backend="inductor"
        ),
        ("mark_fused",),
    ),
    "blocks": (
        lambda: step_of(
            nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))),
            torch.ones(4, 4),
            activation_checkpointing="blocks",
        ),
        ("recompute",),
    ),
    "batch norm": (
        lambda: step_of(
            nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), torch.ones(4, 4), stage=2, batch_norm="local"
        ),
        ("simplify", "coalesce"),
    ),
    "head": (
        lambda: step_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, bias=False)), torch.ones(4, 3, 4)),
        ("release",),
    ),
    "read early": (read_early, ("pause_before_backward",)),
    "peers": (between_peers, ("lower_to_p2p",)),
    "slices": (lambda: step_of(mlp(4, 2), torch.ones(4, 4), stage=2, virtual_ranks=2), ("add_in_tree",)),
    "wire": (lambda: step_of(mlp(4, 4), torch.ones(4, 4), wire={"reduce": "int8"}), ("assign_wire_formats",)),
    "feedback": (
        lambda: step_of(mlp(4, 4), torch.ones(4, 4), wire={"reduce": zg.wire("int8", feedback=True)}),
        ("fuse_feedback",),
    ),
    "optimizer on the CPU": (with_optimizer_on_the_cpu, ("prefetch_offloaded",)),
    "activations on the CPU": (with_activations_on_the_cpu, ("offload_activations",)),
    "files": (offloaded, ("offload",)),
    "any batch": (any_batch, ("bind_sizes",)),
    "split sequence": (
        lambda: step_of(
            Attention(), torch.ones(2, 4, 4), input_sbp=(zg.sbp.split(1),), context_parallel_method="ulysses"
        ),
        ("merge_exchanges",),
    ),
    "gathered keys": (
        lambda: step_of(
            Attention(), torch.ones(2, 4, 4), input_sbp=(zg.sbp.split(1),), context_parallel_method="gather"
        ),
        ("gather_keys_again",),
    ),
    "few heads of keys": (
        lambda: step_of(
            FewKeys(), torch.ones(2, 4, 12), input_sbp=(zg.sbp.split(1),), context_parallel_method="ulysses"
        ),
        ("repeat_key_heads",),
    ),
    "budget": (
        lambda: step_of(mlp(8, 8, 8), torch.ones(4, 8), bucket_size=300, memory_budget="1GiB"),
        ("fit_memory_budget",),
    ),
}
CASES = [(name, one) for one, (_, names) in STEPS.items() for name in names]


@functools.cache
def texts_of(step: str) -> dict[str, list[str]]:
    """Return the graph after every pass; ``"capture"`` is before the first."""
    prepared = STEPS[step][0]()
    names = [record.name for record in prepared.passes]
    return dict(zip(names, Inspection(prepared).texts(*names), strict=True))


def compared(name: str, step: str) -> str:
    """Show the graph before and after a pass, without source lines."""
    graphs = texts_of(step)
    before = list(graphs)[list(graphs).index(name) - 1]
    old, new = ([re.sub(r"(  # \w+( \(\w+\))*) \S+:\d+$", r"\1", one) for one in graphs[at]] for at in (before, name))
    shown = [one.rstrip() for one in difflib.unified_diff(old, new, n=len(old) + len(new), lineterm="")][3:]
    return "\n".join([f"{name}, in the step {step!r}", "", *shown, ""])


@pytest.mark.parametrize(("name", "step"), CASES, ids=[name for name, _ in CASES])
def test_a_pass_does_to_a_small_step_what_its_text_shows(name: str, step: str, pytestconfig: pytest.Config) -> None:
    file, text = GOLDEN / f"{name}.txt", compared(name, step)
    assert re.search(r"(?m)^[+-]", text), f"{name} changes nothing in the step {step!r}"
    if pytestconfig.getoption("--update-golden"):
        file.write_text(text)
    assert text.splitlines() == file.read_text().splitlines(), "see --update-golden"


def test_an_update_that_is_alone_stays_as_it_is() -> None:
    prepared = prepared_for_accelerator(accelerator(4))
    names = [record.name for record in prepared.passes]
    before = names[names.index("merge_updates") - 1]
    graphs = Inspection(prepared).texts(before, "merge_updates")
    old, new = ({line for line in graph if "= _fused_adamw_" in line} for graph in graphs)
    # Two of the four are one, without a collective between them.
    assert (len(old), len(new), len(old & new)) == (4, 3, 2)


def test_every_pass_has_a_text() -> None:
    assert sorted(name for name, _ in CASES) == sorted(one.name for one in PIPELINE)
    assert {file.stem for file in GOLDEN.glob("*.txt")} == {one.name for one in PIPELINE}
