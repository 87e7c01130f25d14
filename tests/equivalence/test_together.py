"""Mixed precision, accumulation, recompute and offload go together: what changes no number alone changes none there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.equivalence.test_stages import deviation
from tests.models import TrainStep, adamw, batches, make, part, train_plainly
from tests.pool import Pool

STEPS, SIZE = 3, 16


def train(dtype: torch.dtype | None, spared: bool, folder: str) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """(losses, state of the model) at each stage, over two micro-batches; ``spared``: with everything that saves."""
    model = make("gpt_tied")
    step = TrainStep(model, adamw(model), bucket_size=16384)
    step.config.set_gradient_accumulation_steps(2)
    if dtype is not None:
        step.config.enable_amp(dtype=dtype)
        step.config.reduce_dtype = torch.float32
    initial = step.state_dict()
    results = []
    for stage in (1, 2, 3):
        step.set_zero_mode("distributed_split", stage=stage)
        if spared:
            step.config.recompute = "blocks"
            step.config.offload_optimizer("nvme", nvme_path=folder)
            if stage == 3:
                step.config.offload_parameters("nvme", nvme_path=folder)
        step.load_state_dict(initial)
        losses = [step(part(x), part(y)) for x, y in batches("gpt_tied", STEPS, SIZE)]
        results.append((losses, step.state_dict()["modules"]["model"]))
    return results


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_all_together_train_as_without_what_saves_memory(pool: Pool, tmp_path: Path, dtype: torch.dtype | None) -> None:
    plain: Any = pool.run(2, train, dtype, False, str(tmp_path))[0]
    spared = pool.run(2, train, dtype, True, str(tmp_path))[0]
    for losses, state in (*plain, *spared):
        assert all(map(torch.equal, losses, plain[0][0]))
        for name, value in state.items():
            assert torch.equal(value, plain[0][1][name]), name
    model = make("gpt_tied")
    wanted = train_plainly(model, adamw(model), batches("gpt_tied", STEPS, SIZE))
    assert max(map(deviation, plain[0][0], wanted)) < (1e-6 if dtype is None else 1e-3)
