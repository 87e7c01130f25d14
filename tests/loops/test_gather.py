"""``zg.gather`` of a prepared model's results, before and after the step computes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zerograph as zg
from tests.models import part
from tests.pool import Pool

X = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).double()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        return y, y.t() * 2, y.mean(0)


def gathered() -> list[list[Tensor]]:
    model: nn.Module = Net()
    model, optimizer = zg.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), stage=2)
    before = model(part(X))
    results = [list(zg.gather(before))]
    loss = before[0].square().mean()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        results.append(list(zg.gather(model(part(X)))))
    return results


def test_gather_returns_the_rows_of_all_ranks_of_results_that_are_yet_to_be_computed(pool: Pool) -> None:
    with torch.no_grad():
        expected = list(Net()(X))
    for results in pool.run(2, gathered):
        for outputs in results:
            torch.testing.assert_close(outputs, expected)
