"""The training step whose files each release keeps. A release writes its own by:

python -c "from tests.releases.steps import write; write()"
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

import zerograph as zg

FOLDER = Path(__file__).parent
STEPS = 3


class Step(zg.ZeroGraph):
    """A perceptron with batch norm and dropout under AdamW, in fp64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)
        self.model = nn.Sequential(*layers).double()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.add_optimizer(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))
        self.set_zero_mode("distributed_split", stage=2)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss


def losses(step: Step, first: int) -> list[float]:
    """Train on drawn batches, beginning with a number; return the losses."""
    found = []
    for number in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        found.append(float(step(x, torch.randint(0, 3, (8,), generator=generator))))
    return found


def write() -> None:
    """Write a checkpoint after some steps, the losses of the next ones, and the compiled step."""
    folder = FOLDER / zg.__version__
    folder.mkdir(exist_ok=True)
    step = Step()
    losses(step, 0)
    step.save(folder / "checkpoint")
    step.export_compiled(folder / "step.zg")
    (folder / "losses.json").write_text(f"{json.dumps(losses(step, STEPS))}\n")
