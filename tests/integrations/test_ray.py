"""Ray Train's ``TorchTrainer`` on a local cluster: a step finds its rank, and computes what one device computes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import plain_run

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("ray.train.torch", reason="Ray Train is not installed")

ROOT = Path(__file__).parents[2]
STEPS = 3


def train(config: dict[str, Any]) -> None:
    """Run on each worker: train, and report what plain PyTorch is compared with."""
    import ray.train
    import torch

    import zerograph as zg
    from tests.models import adam_step, batches, part

    torch.set_num_threads(1)
    step = adam_step("mlp", 3, dtype=torch.float64)
    losses = [float(step(part(x), part(y))) for x, y in batches("mlp", STEPS, 8, torch.float64)]
    context = ray.train.get_context()
    assert (zg.rank(), zg.world_size()) == (context.get_world_rank(), context.get_world_size())
    state = step.state_dict()["modules"]["model"]
    if zg.rank() == 0:
        torch.save({"losses": losses, "state": state, "ranks": zg.world_size()}, config["out"])
    ray.train.report({"loss": losses[-1]})


@pytest.mark.long
def test_a_trainer_of_two_workers_computes_what_one_device_computes(tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    out = tmp_path / "trained.pt"
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    try:
        TorchTrainer(
            train,
            train_loop_config={"out": str(out)},
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=str(tmp_path / "ray")),
        ).fit()
    finally:
        ray.shutdown()
    trained, plain = torch.load(out), plain_run("mlp", STEPS, 8, torch.float64)
    assert trained["ranks"] == 2
    torch.testing.assert_close(trained["losses"], [float(loss) for loss in plain.losses], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(trained["state"], plain.state, rtol=1e-10, atol=1e-10)
