"""Captures on a GPU: attention with dropout, recurrent layers, devices of inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.capture.test_recurrent import LAYERS, X, loss_of as recurrent_loss
from tests.models import LossStep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Step(LossStep):
    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], stage: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        super().__init__(model, optimizer, stage, loss, backend="eager", seed=3)


def losses(name: str, device: str, stage: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = LAYERS[name]().to(device)
    step = Step(model, recurrent_loss, stage)
    return [step(X.to(device)).cpu() for _ in range(3)]


@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_whose_weights_cudnn_has_packed_train_as_on_the_cpu(name: str) -> None:
    torch.testing.assert_close(losses(name, "cuda", 3), losses(name, "cpu", 3), rtol=1e-4, atol=1e-6)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*heads.unbind(0), dropout_p=0.25, is_causal=True).square().mean()


def test_attention_drops_the_same_weights_as_on_the_cpu() -> None:
    x = torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(0))
    steps = {device: Step(Attention().to(device), lambda model, x: model(x), 2) for device in ("cpu", "cuda")}
    on_cpu, on_gpu = ([step(x.to(device)).cpu() for _ in range(3)] for device, step in steps.items())
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-4, atol=1e-6)


def test_an_input_on_the_cpu_names_both_devices() -> None:
    step = Step(Attention().cuda(), lambda model, x: model(x), 2)
    with pytest.raises(zg.InputError, match=r"args\[0\] is on cpu, and model.project.weight on cuda:0"):
        step(torch.randn(4, 32, 16))
