"""Mixed precision, accumulation, recompute and offload go together: what changes no number alone changes none there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zerograph as zg
from tests.harness import deviation, sliced
from tests.models import adam_step, adamw, batches, make, train_on, train_plainly
from tests.pool import Pool

STEPS, SIZE = 2, 16


def train(spared: bool, folder: str, stages: list[int]) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """(losses, state of the model) at each stage, over two micro-batches; ``spared``: with everything that saves."""
    step = adam_step("gpt_tied", bucket_size=16384)
    step.config.gradient_accumulation_steps = 2
    step.config.enable_amp(dtype=torch.float16)
    step.config.precision.reduce_dtype = torch.float32
    initial = step.state_dict()
    results = []
    for stage in stages:
        step.set_zero_mode("distributed_split", stage=stage)
        if spared:
            step.config.memory.activation_checkpointing = "blocks"
            files = zg.OffloadTo("nvme", folder)
            step.config.memory.offload = zg.Offload(optimizer=files, parameters=files if stage == 3 else None)
        step.load_state_dict(initial)
        results.append(train_on(step, batches("gpt_tied", STEPS, SIZE)))
    return results


@sliced("stages", [[3]], [[1, 2, 3]])
def test_all_together_train_as_without_what_saves_memory(pool: Pool, tmp_path: Path, stages: list[int]) -> None:
    plain: Any = pool.run(2, train, False, str(tmp_path), stages)[0]
    spared = pool.run(2, train, True, str(tmp_path), stages)[0]
    for wanted, found in zip(plain, spared, strict=True):
        assert all(map(torch.equal, found[0], wanted[0]))
        for name, value in found[1].items():
            assert torch.equal(value, wanted[1][name]), name
    model = make("gpt_tied")
    losses = train_plainly(model, adamw(model), batches("gpt_tied", STEPS, SIZE))
    for found in plain:
        assert max(map(deviation, found[0], losses)) < 1e-3
