"""``config.batch_norm = "local"``: each rank's part of the batch is normalised by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep
from tests.models import part
from tests.pool import Pool

SAMPLES, STEPS = 8, 2


class Normed(nn.Module):
    """Batch norm of vectors, of images and of volumes, with running statistics, and a norm of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors, self.images = nn.BatchNorm1d(3), nn.BatchNorm2d(4, affine=False)
        self.volumes, self.convolution = nn.BatchNorm3d(2, momentum=0.3), nn.Conv2d(3, 4, 3, bias=False)
        self.instances = nn.InstanceNorm2d(4, affine=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.images(self.convolution(self.vectors(x.flatten(2)).view(x.shape)))
        volumes = self.volumes(hidden.view(len(x), 2, 2, *hidden.shape[2:])).view(hidden.shape)
        out = self.head((F.gelu(volumes) + self.instances(hidden).sin()).mean((2, 3))).squeeze(1)
        return F.mse_loss(out, target)


def _made() -> tuple[Normed, list[Tensor]]:
    torch.manual_seed(0)
    return Normed().double(), [torch.randn(SAMPLES, 3, 4, 4).double(), torch.randn(SAMPLES).double()]


def local_step(model: nn.Module) -> LossStep:
    return LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), batch_norm="local")


def train() -> tuple[list[Tensor], dict[str, Tensor], list[Any], Tensor, int]:
    model, batch = _made()
    step = local_step(model)
    losses = [step(*map(part, batch)) for _ in range(STEPS)]
    forward = [one for one in step.inspect.collectives() if one.phase == "forward" and one.kind != "slice"]
    state = step.state_dict()["modules"]["model"]
    model.eval()
    evaluated = step(*map(part, batch))
    captures = len(step._compiler._captures)
    step.config.batch_norm = "global"
    model.train()
    step(*map(part, batch))
    return losses, state, [one.bytes for one in forward], evaluated, len(step._compiler._captures) - captures


@pytest.fixture(scope="module")
def trained(pool: Pool) -> Any:
    return pool.run(2, train)[0]


def _plainly() -> tuple[list[Tensor], Normed, list[Tensor]]:
    """Each half of the batch by itself; running statistics are the mean of what the halves would make of them."""
    model, batch = _made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        after = []
        halves = []
        for half in range(2):
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            loss = model(*(one.chunk(2)[half] for one in batch))
            (loss / 2).backward()
            halves.append(loss.detach())
            after.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        for name, buffer in model.named_buffers():
            buffer.copy_((after[0][name] + after[1][name]) / 2)
        optimizer.step()
        losses.append((halves[0] + halves[1]) / 2)
    return losses, model, batch


def test_each_rank_normalises_its_part(trained: Any) -> None:
    losses, model, batch = _plainly()
    torch.testing.assert_close(trained[0], losses, rtol=1e-10, atol=1e-12)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[1][name], value, rtol=1e-10, atol=1e-12, msg=name)
    model.eval()
    torch.testing.assert_close(trained[3], model(*batch).detach(), rtol=1e-10, atol=1e-12)


def test_forward_exchanges_running_statistics_and_the_loss_only(trained: Any) -> None:
    # Of 3, 4 and 2 channels a mean and a variance each, and the loss, in fp64.
    assert sum(trained[2]) == 8 * (2 * (3 + 4 + 2) + 1)


def test_the_option_makes_another_capture(trained: Any) -> None:
    assert trained[4] == 1


class Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).square().mean()


def test_one_value_per_channel_is_refused_as_by_torch() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        Vectors()(torch.randn(1, 3))
    step = local_step(Vectors())
    step.config.gradient_accumulation_steps = 2
    with pytest.raises(zg.CaptureError, match=r"batch norm of 2 samples in 2 parts.*no variance"):
        step(torch.randn(2, 3))
