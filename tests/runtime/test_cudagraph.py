"""The backend cudagraph: what the CPU computes, what is captured, and which steps are refused. Replays: tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zerograph as zg
from tests.harness import LossStep, sum_of_squares
from zerograph.errors import ConfigError
from zerograph.ir.mesh import line
from zerograph.runtime.backends.cudagraph import _split

ACCELERATOR = torch.device("meta")


def parts(optimizer: type[torch.optim.Optimizer], *layers: nn.Module, **config: Any) -> tuple[fx.GraphModule, ...]:
    options = config.pop("optimizer_options", {"fused": True})
    model = nn.Sequential(nn.Linear(8, 8, device="meta"), *layers, nn.Linear(8, 8, device="meta"))
    step = LossStep(model, optimizer(model.parameters(), lr=0.1, **options), 2, sum_of_squares, **config)
    prepared = step.prepare(line(1, 0, "ranks"), torch.empty(4, 8, device="meta"), device="meta")
    return (*_split(prepared.graph, ACCELERATOR), prepared.graph)


def on_cpu(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.device.type == "cpu"


def test_counts_and_rates_are_the_cpu_s_and_cross_to_the_device() -> None:
    host, device, whole = parts(torch.optim.AdamW)
    called = {str(node.target) for node in host.graph.nodes if node.op == "call_function"}
    assert called == {"aten._foreach_add_.Scalar", "zerograph.pack.default", "aten.select.int"}
    # Step counts in one transfer, the rate in another.
    crossing = host.graph.output_node().args[0]
    assert isinstance(crossing, tuple)
    assert len(crossing) == 2
    computed = [node for node in device.graph.nodes if node.op == "call_function"]
    assert not any(on_cpu(source) for node in computed for source in node.all_input_nodes)
    inputs = sum(node.op == "placeholder" for node in whole.graph.nodes)
    assert sum(node.op == "placeholder" for node in device.graph.nodes) == inputs + len(crossing)


@pytest.mark.parametrize(
    ("layers", "config", "message"),
    [
        ((), {"optimizer_options": {}}, "takes a number from the CPU"),
        ((nn.Dropout(),), {}, r"uniform\.default in the forward of model\.1"),
        ((), {"grad_scaler": zg.GradScaler()}, "the CPU reads a value of the device"),
    ],
)
def test_a_number_that_a_graph_would_keep_is_refused(layers: Any, config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parts(torch.optim.AdamW, *layers, **config)


def test_a_model_on_the_cpu_is_refused_before_anything_changes() -> None:
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    step = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, sum_of_squares, backend="cudagraph")
    with pytest.raises(ConfigError, match="needs a model on a CUDA device"):
        step(torch.ones(2, 4))
    assert torch.equal(model.weight, before)
