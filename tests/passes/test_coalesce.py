"""Small sums travel together where nobody waits for them, and no number changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import TrainStep, batches, make, part
from tests.pool import Pool
from zerograph import PassEdit


def trained(together: bool, stage: int, batch_norm: str, micro_batches: int) -> tuple[Any, list[str], list[int]]:
    """(losses and state, what was summed over the ranks apart from gradients, bytes sent by all of these)."""
    model = make("conv")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = TrainStep(model, optimizer, stage, backend="eager", batch_norm=batch_norm)
    step.config.set_gradient_accumulation_steps(micro_batches)
    if not together:
        step.config.passes = (PassEdit.disable("coalesce"),)
    losses: list[Tensor] = [step(part(x), part(y)) for x, y in batches("conv", 3, 12)]
    sums = [one for one in step.collectives() if one.kind == "all-reduce" and "gradient" not in one.what]
    return [losses, step.state_dict()], [one.what for one in sums], [one.bytes for one in sums]


@pytest.mark.parametrize(("stage", "micro_batches"), [(0, 1), (2, 1), (3, 1), (2, 3)])
def test_running_statistics_and_the_loss_travel_together(pool: Pool, stage: int, micro_batches: int) -> None:
    apart = pool.run(2, trained, False, stage, "local", micro_batches)
    together = pool.run(2, trained, True, stage, "local", micro_batches)
    for (numbers, many, sent), (same, few, sent_together) in zip(apart, together, strict=True):
        torch.testing.assert_close(same, numbers, rtol=0, atol=0)
        # Two norms' means and variances, and the loss; where gradients need how many samples there are, that, too.
        assert len(few) == len(many) - 4
        assert sum("and 4 more" in what for what in few) == 1
        assert abs(sum(sent_together) - sum(sent)) <= len(many)


def test_what_backward_needs_is_not_put_off(pool: Pool) -> None:
    apart, together = (pool.run(2, trained, on, 2, "global", 1)[0][1] for on in (False, True))
    # Of each norm the mean, and the mean square, which forward reads.
    assert [what for what in together if "more" not in what] == [what for what in apart if what in together]
    assert len(together) >= 4
