"""A step on an accelerator never waits for the device: what does is known by operator and device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

import zerograph as zg
from tests.harness import LossStep, covering, sliced, sum_of_squares
from zerograph.ir.mesh import line

aten = torch.ops.aten


def device_of(node: fx.Node) -> str:
    value = node.meta.get("val")
    return value.device.type if isinstance(value, Tensor) else "none"


def waits(node: fx.Node) -> bool:
    """The host stops until the device is done: it reads a number of it, or copies from memory that may move."""
    sources = {device_of(source) for source in node.all_input_nodes}
    if node.target in (aten._local_scalar_dense.default, aten.nonzero.default, aten.item.default):
        return "meta" in sources
    return node.target in (aten._to_copy.default, aten.copy_.default) and {*sources, device_of(node)} >= {"cpu", "meta"}


def waiting(optimizer: type[torch.optim.Optimizer], ranks: int, options: Any, **config: Any) -> list[str]:
    model = nn.Sequential(nn.Linear(64, 64, device="meta"), nn.GELU(), nn.Linear(64, 64, device="meta"))
    step = LossStep(model, optimizer(model.parameters(), lr=0.1, **options), 2, sum_of_squares, bucket_size=1, **config)
    graph = step.prepare(line(ranks, 0, "ranks"), torch.empty(8, 64, device="meta"), device="meta").graph.graph
    assert {device_of(node) for node in graph.nodes} >= {"cpu", "meta"}
    return [str(node.target) for node in graph.nodes if waits(node)]


UPDATES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
]


@sliced(
    "optimizer, options, clip, ranks",
    *covering((*update, clip, ranks) for update in UPDATES for clip in (None, 1.0) for ranks in (1, 4)),
)
def test_no_operator_waits(
    optimizer: type[torch.optim.Optimizer], options: Any, clip: float | None, ranks: int
) -> None:
    assert not waiting(optimizer, ranks, options, clip_grad_norm=clip)


def test_a_scaled_step_reads_one_number() -> None:
    """Step counts are on the CPU, and an overflow keeps them."""
    assert waiting(torch.optim.AdamW, 1, {"fused": True}, grad_scaler=zg.GradScaler()) == [str(aten._to_copy.default)]
