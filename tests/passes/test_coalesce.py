"""Small sums travel together where nobody waits for them, and no number changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.harness import prepare, sliced
from tests.models import LossStep, TrainStep, batches, make, part
from tests.pool import Pool
from zerograph import Collective, PassEdit


def step_of(together: bool, stage: int, batch_norm: str, micro_batches: int) -> TrainStep:
    model = make("conv")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = TrainStep(model, optimizer, stage, backend="eager", batch_norm=batch_norm)
    step.config.gradient_accumulation_steps = micro_batches
    if not together:
        step.config.passes = (PassEdit.disable("coalesce"),)
    return step


def trained(together: bool, stage: int, micro_batches: int) -> list[Any]:
    """Train; return losses and state."""
    step = step_of(together, stage, "local", micro_batches)
    losses: list[Tensor] = [step(part(x), part(y)) for x, y in batches("conv", 3, 12)]
    return [losses, step.state_dict()]


def prepared_sums(together: bool, stage: int, batch_norm: str, micro_batches: int) -> list[Collective]:
    """List the sums over the ranks that are not gradients."""
    prepared = prepare(step_of(together, stage, batch_norm, micro_batches), *batches("conv", 1, 12)[0])
    return [one for one in prepared.collectives() if one.kind == "all-reduce" and "gradient" not in one.what]


CASES = [(0, 1), (2, 1), (3, 1), (2, 3)]


@sliced("stage, micro_batches", [(0, 1), (2, 3)], CASES)
def test_running_statistics_and_the_loss_travel_together(stage: int, micro_batches: int) -> None:
    many, few = (prepared_sums(together, stage, "local", micro_batches) for together in (False, True))
    # Two norms' means and variances, and the loss; where gradients need how many samples there are, that, too.
    assert len(few) == len(many) - 4
    assert sum("and 4 more" in one.what for one in few) == 1
    assert abs(sum(one.bytes for one in few) - sum(one.bytes for one in many)) <= len(many)


# The sums are the same at every stage.
@sliced("stage, micro_batches", [(2, 3)], CASES)
def test_travelling_together_changes_no_number(pool: Pool, stage: int, micro_batches: int) -> None:
    apart = pool.run(2, trained, False, stage, micro_batches)
    together = pool.run(2, trained, True, stage, micro_batches)
    torch.testing.assert_close(together, apart, rtol=0, atol=0)


def test_what_backward_needs_is_not_put_off() -> None:
    apart, together = ([one.what for one in prepared_sums(on, 2, "global", 1)] for on in (False, True))
    # Of each norm the mean, and the mean square, which forward reads.
    assert [what for what in together if "more" not in what] == [what for what in apart if what in together]
    assert len(together) >= 4


def metrics_of_scaled(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Train a layer whose owner updates it in place; return sums that are added to its bias as it was."""
    y = model(x)
    y.square().mean().backward()
    return [y.detach().abs().mean() + model.bias.detach(), y.detach().square().mean()]


def scaled(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 2.0)
    return model, torch.optim.Adafactor(model.parameters(), lr=0.5)


class Metrics(LossStep):
    def build(self, *batch: Tensor) -> Any:
        return metrics_of_scaled(self.model, *batch)


def returned_beside_owners() -> Any:
    return Metrics(*scaled(nn.Linear(3, 1)))(part(torch.arange(12.0).view(4, 3)))


def test_sums_that_are_put_off_meet_parameters_before_their_update(pool: Pool) -> None:
    model, _ = scaled(nn.Linear(3, 1))
    expected = metrics_of_scaled(model, torch.arange(12.0).view(4, 3))
    for returned in pool.run(2, returned_beside_owners):
        torch.testing.assert_close(returned, expected)
