"""Small sums travel together where nobody waits for them, and no number changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import prepare
from tests.models import TrainStep, batches, make, part
from tests.pool import Pool
from zerograph import Collective, PassEdit


def step_of(together: bool, stage: int, batch_norm: str, micro_batches: int) -> TrainStep:
    model = make("conv")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = TrainStep(model, optimizer, stage, backend="eager", batch_norm=batch_norm)
    step.config.set_gradient_accumulation_steps(micro_batches)
    if not together:
        step.config.passes = (PassEdit.disable("coalesce"),)
    return step


def trained(together: bool, stage: int, batch_norm: str, micro_batches: int) -> tuple[Any, list[Collective]]:
    """Train; return losses and state, and the sums over the ranks that are not gradients."""
    step = step_of(together, stage, batch_norm, micro_batches)
    losses: list[Tensor] = [step(part(x), part(y)) for x, y in batches("conv", 3, 12)]
    return [losses, step.state_dict()], sums(step.collectives())


def sums(collectives: list[Collective]) -> list[Collective]:
    return [one for one in collectives if one.kind == "all-reduce" and "gradient" not in one.what]


@pytest.mark.parametrize(("stage", "micro_batches"), [(0, 1), (2, 1), (3, 1), (2, 3)])
def test_running_statistics_and_the_loss_travel_together(pool: Pool, stage: int, micro_batches: int) -> None:
    apart = pool.run(2, trained, False, stage, "local", micro_batches)
    together = pool.run(2, trained, True, stage, "local", micro_batches)
    for (numbers, many), (same, few) in zip(apart, together, strict=True):
        torch.testing.assert_close(same, numbers, rtol=0, atol=0)
        # Two norms' means and variances, and the loss; where gradients need how many samples there are, that, too.
        assert len(few) == len(many) - 4
        assert sum("and 4 more" in one.what for one in few) == 1
        assert abs(sum(one.bytes for one in few) - sum(one.bytes for one in many)) <= len(many)


def test_what_backward_needs_is_not_put_off() -> None:
    batch = batches("conv", 1, 12)[0]
    apart, together = (
        [one.what for one in sums(prepare(step_of(on, 2, "global", 1), *batch).collectives())] for on in (False, True)
    )
    # Of each norm the mean, and the mean square, which forward reads.
    assert [what for what in together if "more" not in what] == [what for what in apart if what in together]
    assert len(together) >= 4
