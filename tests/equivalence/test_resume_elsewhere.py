"""Training goes on from a checkpoint on other ranks, at another stage, in another layout or precision: same numbers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zerograph as zg
from tests.harness import sliced
from tests.models import TrainStep, adam_step, adamw, batches, make, part, train_plainly
from tests.pool import Pool

# Of each run: its last losses, and its parameters then.
End = tuple[list[float], dict[str, Tensor]]
SAVED, STEPS = 3, 6
# Of 3, 2 and 1 ranks the shards of 15x7 and 3x15 parameters are uneven, cut through rows, or whole.
DATA = batches("mlp", STEPS, 12)


def new_step(stage: int, options: dict[str, Any]) -> TrainStep:
    torch.manual_seed(0)
    model = make("mlp")
    options = dict(options)
    offloaded = options.pop("offloaded", None)
    step = TrainStep(model, adamw(model), stage, backend="eager", **options)
    if offloaded:
        files = zg.OffloadTo("nvme", offloaded)
        step.config.memory.offload = zg.Offload(optimizer=files, parameters=files if stage == 3 else None)
    return step


def trained(step: TrainStep, first: int, last: int) -> list[float]:
    return [float(step(part(x), part(y))) for x, y in DATA[first:last]]


def end_of(step: TrainStep) -> End:
    return trained(step, SAVED, STEPS), step.state_dict()["modules"]["model"]


def saved(folder: Path, stages: dict[int, dict[str, Any]]) -> list[End]:
    """At each stage save half-way, and go on undisturbed."""
    ends = []
    for stage, options in stages.items():
        step = new_step(stage, options)
        trained(step, 0, SAVED)
        step.save(folder / str(stage))
        ends.append(end_of(step))
    return ends


def gone_on(stage: int, options: dict[str, Any], paths: list[Path]) -> list[End]:
    """From each checkpoint in turn, in one graph."""
    step, ends = new_step(stage, options), []
    for path in paths:
        step.load(path)
        ends.append(end_of(step))
    return ends


def close(found: End, wanted: End, where: str = "", atol: float = 1e-6) -> None:
    assert found[0] == pytest.approx(wanted[0], abs=atol), where
    assert found[1].keys() == wanted[1].keys()
    for name, value in wanted[1].items():
        furthest = float((found[1][name] - value).abs().max())
        assert furthest <= atol, f"{where} {name} is off by {furthest}"


class Saved:
    """Checkpoints of runs, and how those went on; each is made when it is first asked for."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self.pool, self.folder, self.ends = pool, folder, dict[tuple[Any, ...], End]()

    def run(self, ranks: int, stage: int, **options: Any) -> tuple[Path, End]:
        key = (ranks, stage, *sorted(options))
        folder = self.folder / "-".join(map(str, (ranks, *sorted(options))))
        if key not in self.ends:
            self.ends[key] = self.pool.run(ranks, saved, folder, {stage: options})[0][0]
        return folder / str(stage), self.ends[key]

    def check(self, ranks: int, stage: int, options: dict[str, Any], sources: list[tuple[Path, End]]) -> None:
        """All of ``sources`` go on so as they would have where they were."""
        found = self.pool.run(ranks, gone_on, stage, options, [path for path, _ in sources])[0]
        for (path, wanted), end in zip(sources, found, strict=True):
            close(end, wanted, f"{path.parent.name}/{path.name} on {ranks} ranks at stage {stage}:")


@pytest.fixture(scope="module")
def runs(pool: Pool) -> Iterator[Saved]:
    # In memory where there is such a place: disks may take seconds to sync.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Saved(pool, Path(folder))


@sliced("ranks", [3], [1, 2, 4])
def test_from_one_to_four_ranks_to_as_many(runs: Saved, ranks: int) -> None:
    """Each number of ranks has another stage, and goes on at yet another."""
    runs.check(ranks, ranks % 4, {}, [runs.run(source, source - 1) for source in (1, 2, 3, 4) if source != ranks])


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_from_any_ranks_and_stage_to_any(runs: Saved, ranks: int, stage: int) -> None:
    runs.check(ranks, stage, {}, [runs.run(source, other) for source in (1, 2, 3, 4) for other in range(4)])


CHANGES: dict[str, dict[str, Any]] = {
    "smaller buckets": {"bucket_size": 256},
    "whole parameters dealt out": {"shard_by": "parameters"},
    "small parameters whole": {"shard_min_size": 20},
    "in files": {"offloaded": "the folder"},
}


@sliced("change", ["small parameters whole", "in files"], CHANGES)
def test_with_another_layout_and_back(runs: Saved, tmp_path: Path, change: str) -> None:
    options = {key: tmp_path if value == "the folder" else value for key, value in CHANGES[change].items()}
    runs.check(2, 3, options, [runs.run(2, 1)])
    runs.check(2, 1, {}, [runs.run(2, 3, **options)])


def from_plain_state(stage: int, options: dict[str, Any], state: dict[str, Any]) -> End:
    """As a run that starts from this state of the plain module and optimizer."""
    model = make("mlp")
    optimizer = adamw(model)
    model.load_state_dict(state["modules"]["model"])
    optimizer.load_state_dict(state["optimizers"][0])
    step = TrainStep(model, optimizer, stage, backend="eager", **options)
    return end_of(step)


BF16 = {"amp_dtype": torch.bfloat16}


def test_in_bf16_what_was_fp32(runs: Saved, pool: Pool) -> None:
    path, _ = runs.run(2, 1)
    wanted = pool.run(2, from_plain_state, 2, BF16, zg.read_checkpoint(path))[0]
    close(pool.run(2, gone_on, 3, BF16, [path])[0][0], wanted)


def trained_before(how: str, state: dict[str, Any]) -> End:
    """A plain state comes into a graph before its first call, or after it."""
    model = make("mlp")
    optimizer = adamw(model)
    step = TrainStep(model, optimizer, 3, backend="eager")
    if how == "before":
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    else:
        trained(step, 0, 1)
        given: dict[str, Any] = {"modules": {"model": state["model"]}, "optimizers": [state["optimizer"]]}
        if how == "module, then optimizer":
            step.load_state_dict({"modules": given["modules"]})
            step.load_state_dict({"optimizers": given["optimizers"]})
        elif how == "inside full_parameters()":
            with step.full_parameters():
                model.load_state_dict(state["model"])
            step.load_state_dict({"optimizers": given["optimizers"]})
        else:
            step.load_state_dict(given)
    return end_of(step)


HOW: list[str] = ["before", "together", "module, then optimizer", "inside full_parameters()"]
Trained = Callable[[str, dict[str, Any]], End]


@pytest.mark.parametrize("how", HOW)
def test_a_state_that_torch_saved_goes_on_as_in_plain_pytorch(pool: Pool, tmp_path: Path, how: str) -> None:
    model = make("mlp")
    optimizer = adamw(model)
    train_plainly(model, optimizer, DATA[:SAVED])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "plain.pt")
    losses = [float(loss) for loss in train_plainly(model, optimizer, DATA[SAVED:])]
    found = pool.run(2, trained_before, how, torch.load(tmp_path / "plain.pt"))[0]
    close(found, (losses, dict(model.state_dict())))


def test_plain_states_that_do_not_fit_say_so() -> None:
    step = adam_step("mlp", 2, backend="eager")
    trained(step, 0, 1)
    before = step.state_dict()
    turned = make("mlp")
    turned[0].weight.data = turned[0].weight.data.t().contiguous()
    other = adamw(turned)
    for parameter in turned.parameters():
        parameter.grad = torch.zeros_like(parameter)
    other.step()
    for state, said in (
        (make("mlp").state_dict(), r"it has '0\.weight'.*\n.*{\"modules\": {\"model\": state}}"),
        ({"modules": make("mlp").state_dict()}, r"modules\['0.weight'\] is .*, not a dict"),
        (
            {"optimizers": adamw(make("mlp")).state_dict()},
            r"optimizers is .*, not a list\nGive .* of a plain optimizer {\"optimizers\": \[state\]}",
        ),
        ({"optimizers": [make("mlp").state_dict()]}, r"optimizers\[0\] lacks param_groups"),
        (
            {"optimizers": [other.state_dict()]},
            r"exp_avg of parameter 0 .* \(15, 7\), the loaded state has one of \(7, 15\)",
        ),
    ):
        with pytest.raises(zg.ConfigError, match=said):
            step.load_state_dict(state)
    assert step.state_dict()["optimizers"][0]["param_groups"] == before["optimizers"][0]["param_groups"]
    for name, value in step.state_dict()["modules"]["model"].items():
        assert torch.equal(value, before["modules"]["model"][name])
