"""Checkpoints: training goes on from them as if nothing had been, anywhere, and what is damaged is refused whole."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import sliced
from tests.models import TrainStep, adam_step, adamw, batches, make, part, train_plainly
from tests.peak_memory import most_allocated
from tests.pool import Pool
from zerograph.runtime.checkpoint import index, storage
from zerograph.runtime.checkpoint.boxes import boxes
from zerograph.runtime.checkpoint.index import Chunk, Entry, Index
from zerograph.runtime.checkpoint.pieces import Pieces, flat_of
from zerograph.runtime.checkpoint.storage import Reader, entries_of
from zerograph.runtime.parameters import SplitParameter
from zerograph.state.checkpoint import state_of
from zerograph.state.checkpoint.snapshot import SnapshotReader, packed, snapshot_reader
from zerograph.state.whole_values import loaded_facts

State = dict[str, Tensor]


def step_of(stage: int, name: str = "mlp", **options: Any) -> TrainStep:
    return adam_step(name, stage, backend="eager", **options)


def lines_run(function: Callable[[], Any]) -> tuple[Any, int]:
    """Call a function; its result, and how many lines of Python it runs. Unlike seconds, no load changes them."""
    count = 0

    def trace(*_: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = function()
    finally:
        sys.settrace(before)
    return result, count


def go(step: TrainStep, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    return [float(step(part(x), part(y))) for x, y in data]


def saved_and_gone_on(path: Path, stages: list[int]) -> list[tuple[list[float], State]]:
    """Train 2 steps, save, train 2 more; for each stage the last losses and parameters."""
    found = []
    for stage in stages:
        step = step_of(stage)
        data = batches("mlp", 4)
        go(step, data[:2])
        step.save(path / str(stage))
        found.append((go(step, data[2:]), step.state_dict()["modules"]["model"]))
    return found


def gone_on_from(path: Path, stages: list[int], compiled: bool) -> list[tuple[list[float], State]]:
    """Load what each stage has left into a graph of another, and go on."""
    found = []
    for stage in stages:
        step = step_of((stage + 1) % 4 if compiled else stage)
        data = batches("mlp", 4)
        if compiled:
            step.compile(*map(part, data[0]))
        else:
            with torch.no_grad():
                for parameter in step.model.parameters():
                    parameter.zero_()
        step.load(path / str(stage))
        found.append((go(step, data[2:]), step.state_dict()["modules"]["model"]))
    return found


@pytest.fixture(scope="module")
def checkpoints(
    pool: Pool, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[int, tuple[list[float], State]]]:
    """Return the folder of checkpoints, and for each stage the losses and the parameters after its own."""
    path = tmp_path_factory.mktemp("checkpoints")
    stages = [0, 1, 2, 3] if request.config.getoption("--long") else [0, 2, 3]
    return path, dict(zip(stages, pool.run(2, saved_and_gone_on, path, stages)[0], strict=True))


# Into a new graph, or into a compiled one of another stage.
@sliced("compiled, stages", [(False, [3]), (True, [0, 2])], [(False, [0, 1, 2])])
def test_training_goes_on_bitwise(pool: Pool, checkpoints: Any, compiled: bool, stages: list[int]) -> None:
    path, expected = checkpoints
    for stage, (more, parameters) in zip(stages, pool.run(2, gone_on_from, path, stages, compiled)[0], strict=True):
        losses, state = expected[stage]
        assert more == losses
        assert all(torch.equal(parameters[name], value) for name, value in state.items())


def test_a_checkpoint_is_the_plain_state_of_model_and_optimizer(checkpoints: Any) -> None:
    state = zg.read_checkpoint(checkpoints[0] / "2")
    model = make("mlp")
    optimizer = adamw(model)
    model.load_state_dict(state["modules"]["model"])
    optimizer.load_state_dict(state["optimizers"][0])
    losses = [float(loss) for loss in train_plainly(model, optimizer, batches("mlp", 4)[2:])]
    assert losses == pytest.approx(checkpoints[1][2][0], abs=1e-5)


def test_what_a_checkpoint_reads_as_loads_into_a_graph(checkpoints: Any) -> None:
    state = zg.read_checkpoint(checkpoints[0] / "2")
    step = step_of(2)
    # Its loss function has no tensors, and no place in a file.
    step.load_state_dict(state)
    assert step.steps_done == 2
    found = step.state_dict()["modules"]["model"]
    assert all(torch.equal(found[name], one) for name, one in state["modules"]["model"].items())


def made_in_some_way(way: str) -> TrainStep:
    torch.manual_seed(0)
    if way == "made split":
        with zg.sharded_init():
            model = make("gpt_of_one_block")
    else:
        model = make("gpt_of_one_block")
    if way == "a layer split by the user":
        zg.to_global(model.head, placement=zg.placement("cpu", ranks=[0, 1]), sbp=zg.sbp.split(1))
    return TrainStep(model, adamw(model), 3, backend="eager")


def resumed_however_made(path: Path, way: str) -> tuple[list[float], list[float]]:
    data = batches("gpt_of_one_block", 4)
    first = made_in_some_way(way)
    go(first, data[:2])
    first.save(path)
    second = made_in_some_way(way)
    second.load(path)
    return go(first, data[2:]), go(second, data[2:])


@sliced("way", ["a layer split by the user"], ["made split"])
def test_training_goes_on_however_parameters_are_placed(pool: Pool, tmp_path: Path, way: str) -> None:
    expected, found = pool.run(2, resumed_however_made, tmp_path, way)[0]
    assert found == expected


def saved_in_the_background(path: Path) -> tuple[list[float], list[float], list[str], str]:
    step, data = step_of(2), batches("mlp", 6)
    go(step, data[:2])
    step.save(path, asynchronous=True, keep=2)
    expected = go(step, data[2:4])
    for at in (4, 5):
        step.save(path, asynchronous=True, keep=2)
        go(step, data[at : at + 1])
    step.save(path, keep=2)
    first = sorted(one.name for one in path.iterdir())
    again = step_of(2)
    again.load(path)
    return expected, [again.steps_done], first, (path / "latest").read_text()


def test_a_save_in_the_background_is_of_its_moment_and_only_the_newest_are_kept(pool: Pool, tmp_path: Path) -> None:
    _, steps, names, latest = pool.run(2, saved_in_the_background, tmp_path)[0]
    assert names == ["latest", "step-00000005", "step-00000006"]
    assert latest == "step-00000006"
    assert steps == [6]


def broken_off_in_the_background(path: Path, way: str) -> str:
    step, printed = step_of(2), io.StringIO()
    go(step, batches("mlp", 1))
    begins = threading.Event()

    def fail(*_: Any) -> None:
        begins.wait()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(printed):
        patch.setattr(storage, "write_file", fail)
        step.save(path, asynchronous=True)
        if way == "destroyed":
            torch.distributed.destroy_process_group()
        begins.set()
        assert step._saver is not None
        assert step._saver._thread is not None
        # As the end of a program does.
        step._saver._thread.join()
    return printed.getvalue()


@pytest.mark.parametrize(
    ("way", "told"), [("full", "No space left on device"), ("destroyed", "call wait_for_save() of the graph first")]
)
def test_a_save_in_the_background_that_fails_says_so_though_nobody_waits(
    pool: Pool, tmp_path: Path, way: str, told: str
) -> None:
    for rank, text in enumerate(pool.run_afresh(2, broken_off_in_the_background, tmp_path / way, way)):
        assert text.startswith(f"zerograph: rank {rank}: a save in the background has failed: ")
        assert told in text


def loaded_from_elsewhere(path: Path) -> str:
    with pytest.raises(zg.ZeroGraphError) as caught:
        step_of(3).load(path if zg.rank() == 0 else path / "nothing")
    return str(caught.value)


def test_what_one_rank_cannot_read_is_an_error_on_all(pool: Pool, checkpoints: Any) -> None:
    there, missing = pool.run(2, loaded_from_elsewhere, checkpoints[0] / "3")
    assert "there is no checkpoint in" in missing
    assert "rank 1 failed before loading a checkpoint" in there


def test_what_fails_after_a_checkpoint_is_whole_does_not_take_it_away(tmp_path: Path) -> None:
    step = step_of(0, "mlp")
    (tmp_path / "latest").mkdir()
    with pytest.raises(zg.CheckpointError, match=r"step-00000000 is whole, but .*latest"):
        step.save(tmp_path, keep=1)
    assert zg.read_checkpoint(tmp_path / "step-00000000")["steps_done"] == 0


def saved_in_both_ways(path: Path, first: int | None) -> tuple[str, list[str], int]:
    """The error of the second save, what is in the folder by then, and the steps of what it is read as."""
    step = step_of(2, "mlp")
    step.save(path, keep=first)
    step.steps_done = 1
    with pytest.raises(zg.CheckpointError) as caught:
        step.save(path, keep=2 if first is None else None)
    again = step_of(2, "mlp")
    again.load(path)
    return str(caught.value), sorted(one.name.split("-")[0] for one in path.iterdir()), again.steps_done


@pytest.mark.parametrize(
    ("first", "said", "there"),
    [
        (None, "is a checkpoint, saved without keep", ["data", "index.json"]),
        (2, "holds checkpoints", ["latest", "step"]),
    ],
)
def test_a_folder_is_a_checkpoint_or_holds_some(
    pool: Pool, tmp_path: Path, first: int | None, said: str, there: list[str]
) -> None:
    for error, names, steps in pool.run(2, saved_in_both_ways, tmp_path, first):
        assert said in error
        assert (names, steps) == (there, 0)


def test_a_job_that_went_back_keeps_what_it_writes_from_there(tmp_path: Path) -> None:
    step = step_of(0, "mlp")
    for step.steps_done in (10, 20, 30):
        step.save(tmp_path, keep=3)
    step.load(tmp_path / "step-00000010")
    step.steps_done = 15
    (tmp_path / "step-00000017" / "data-interrupted").mkdir(parents=True)
    (tmp_path / "step-notes").mkdir()
    step.save(tmp_path, keep=2)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["latest", "step-00000015", "step-00000030", "step-notes"]
    assert zg.read_checkpoint(tmp_path)["steps_done"] == 15


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (4, 1, 3)])
def test_every_stretch_of_a_flat_tensor_is_boxes_in_their_order(shape: tuple[int, ...]) -> None:
    numel = torch.Size(shape).numel()
    tensor = torch.arange(numel).view(shape)
    for start in range(numel + 1):
        for end in range(start, numel + 1):
            found = [
                tensor[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].reshape(-1)
                for box in boxes(shape, start, end)
            ]
            assert torch.equal(torch.cat([*found, torch.empty(0, dtype=torch.int64)]), torch.arange(start, end))


def test_a_number_that_the_optimizer_itself_would_round_goes_on_bitwise(tmp_path: Path) -> None:
    # NAdam keeps a product of all steps in fp32.
    steps = []
    for _ in range(2):
        model = make("mlp", torch.float64)
        steps.append(TrainStep(model, torch.optim.NAdam(model.parameters()), 0))
    data = batches("mlp", 6, dtype=torch.float64)
    go(steps[0], data[:3])
    steps[0].save(tmp_path)
    steps[1].load(tmp_path)
    assert go(steps[0], data[3:]) == go(steps[1], data[3:])


def test_a_name_that_is_no_unicode_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    step = zg.ZeroGraph()
    step.model = nn.Sequential()
    step.model.add_module("\ud800", nn.Linear(2, 2))
    step.add_optimizer(adamw(step.model))
    with pytest.raises(zg.ConfigError, match=r"cannot hold .* no Unicode"):
        step.save(tmp_path)
    assert not os.listdir(tmp_path)
    # What Unicode has is no matter.
    step.model = nn.Sequential()
    step.model.add_module("\U0001f600", nn.Linear(2, 2))
    other = zg.ZeroGraph()
    other.model = step.model
    other.add_optimizer(adamw(other.model))
    other.save(tmp_path)
    assert "\U0001f600.weight" in zg.read_checkpoint(tmp_path)["modules"]["model"]


def test_what_a_checkpoint_cannot_hold_is_named(tmp_path: Path) -> None:
    class Odd(torch.optim.lr_scheduler.LRScheduler):
        def get_lr(self) -> list[float | Tensor]:
            self.odd = object()
            return [0.1 for _ in self.base_lrs]

    step = zg.ZeroGraph()
    step.model = make("mlp")
    optimizer = adamw(step.model)
    step.add_optimizer(optimizer, Odd(optimizer))
    with pytest.raises(zg.ConfigError, match=r"the state of Odd\['odd'\]"):
        step.save(tmp_path)
    assert not os.listdir(tmp_path)


def test_rank_0_lists_what_thousands_of_ranks_wrote() -> None:
    ranks, names = 2816, ["weight", "exp_avg"]
    pieces = {name: Pieces((ranks, 3), torch.float32) for name in names}

    def written(rank: int, held: int) -> list[tuple[str, Chunk]]:
        return [(name, Chunk((rank, 0), (1, held), f"rank{rank:05d}.safetensors", name, "")) for name in names]

    chunks = [chunk for rank in range(ranks) for chunk in written(rank, 3)]
    entries, lines = lines_run(lambda: entries_of(pieces, chunks))
    assert lines < 100 * ranks
    assert {name: (one.dtype, one.shape) for name, one in entries.items()} == dict.fromkeys(
        names, ("float32", (ranks, 3))
    )
    assert [(name, chunk) for name in names for chunk in entries[name].chunks] == [*chunks[::2], *chunks[1::2]]
    with pytest.raises(zg.CheckpointError, match=r"the ranks hold 8447 elements of weight, whose shape is \(2816, 3\)"):
        entries_of(pieces, [*chunks[:-2], *written(ranks - 1, 2)])


def test_a_process_plans_a_load_of_what_thousands_of_ranks_saved(tmp_path: Path) -> None:
    ranks, names = 2816, ["weight", "bias"]
    tensors = {
        name: Entry(
            "float32",
            (ranks, 3),
            tuple(Chunk((rank, 0), (1, 3), f"rank{rank:05d}.safetensors", name, "") for rank in range(ranks)),
        )
        for name in names
    }

    def plan() -> list[tuple[str, Chunk]]:
        index.write(tmp_path, Index("data", tensors, {}))
        reader = Reader(tmp_path, index.read(tmp_path))
        assert reader.index.tensors == tensors
        pieces = {name: Pieces((ranks, 3), torch.float32) for name in names}
        for piece in pieces.values():
            piece.add(0, ranks * 3, flat_of(torch.zeros(ranks * 3)), 0)
        return [(read.name, read.chunk) for read in reader.reads(pieces)]

    boxes_read, lines = lines_run(plan)
    assert lines < 1000 * ranks * len(names)
    assert boxes_read == [(name, chunk) for name in names for chunk in tensors[name].chunks]


def whole_bytes(step: TrainStep) -> int:
    """Bytes of all parameters and of AdamW's state."""
    return 3 * sum(parameter.nbytes for parameter in step.model.parameters())


def loaded_first(path: Path, stage: int) -> tuple[dict[str, str], dict[str, str], int, int]:
    """Load into a graph that has not run; its texts before and after a save and a load, and bytes."""
    step = step_of(stage)
    step.load(path / str(stage))
    assert all(isinstance(parameter, SplitParameter) for parameter in step.model.parameters())
    with pytest.raises(zg.SplitParameterError, match="no step has run yet"):
        step.model.state_dict()["2.weight"].sum()
    before = step.fingerprint()
    step.save(path / f"again {stage}")
    step.load(path / f"again {stage}")
    return before, step.fingerprint(), step.state_bytes(), whole_bytes(step)


@sliced("stage", [3], [1])
def test_a_load_before_the_first_call_gives_each_rank_its_shards(pool: Pool, checkpoints: Any, stage: int) -> None:
    expected = loaded_facts({**zg.read_checkpoint(checkpoints[0] / str(stage)), "grad_scaler": None})
    for before, after, kept, whole in pool.run(2, loaded_first, checkpoints[0], stage):
        names = [name for name in expected if "parameter" in name or name.startswith("model.")]
        assert [before[name] for name in names] == [after[name] for name in names] == [expected[name] for name in names]
        # Every rank has the numbers of steps.
        # And what fills up a shard of few numbers.
        assert kept < 0.54 * whole


def parts_of(path: Path) -> dict[str, str]:
    """Write what each rank keeps of a snapshot at stage 3."""
    step = step_of(3, "gpt_of_one_block")
    go(step, batches("gpt_of_one_block", 1))
    torch.save(packed(*state_of(step._parts(), "", {})), path / f"part {zg.rank()}")
    return step.fingerprint()


def loaded_from_parts(path: Path) -> tuple[dict[str, str], int, int, int]:
    """Load the snapshot of two ranks on three, of which two hold a part."""
    step, received = step_of(3, "gpt_of_one_block"), []
    parts = {zg.rank(): torch.load(path / f"part {zg.rank()}")} if zg.rank() < 2 else {}
    reader = snapshot_reader(step._join(), parts, [[0], [1]])

    def exchange(ranges: Any) -> Any:
        for content in SnapshotReader._exchange(reader, ranges):
            received.append(content.nbytes)
            yield content

    reader._exchange = exchange  # type: ignore[method-assign]
    most = most_allocated(lambda: step.load(reader))
    return step.fingerprint(), sum(received), most, whole_bytes(step)


def test_ranks_send_each_other_only_their_shards_of_a_snapshot(pool: Pool, tmp_path: Path) -> None:
    expected = pool.run(2, parts_of, tmp_path)[0]
    for texts, received, most, whole in pool.run(3, loaded_from_parts, tmp_path):
        assert texts == expected
        assert received < 0.35 * whole
        assert most < 0.6 * whole


class Heads(zg.ZeroGraph):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.add_optimizer(torch.optim.AdamW([*self.body.parameters(), *self.head.parameters()]))
        self.config.set(stage=3, backend="eager")

    def build(self, x: Tensor, with_head: bool) -> Tensor:
        y = self.body(x)
        loss = (self.head(y) if with_head else y).square().mean()
        loss.backward()
        return loss


def head_not_trained(path: Path) -> None:
    """Load state of parameters that the compiled step does not train, then none of them."""
    x, step = torch.randn(4, 4, generator=torch.Generator().manual_seed(zg.rank())), Heads()
    step(x, with_head=False)
    step.save(path / "without")
    step(x, with_head=True)
    step.save(path / "with")
    other = Heads()
    other.compile(x, with_head=False)
    for name, count in (("with", 4), ("without", 2)):
        other.load(path / name)
        state = other.state_dict()["optimizers"][0]["state"]
        assert len(state) == count
    step.load(path / "with")
    other.load(path / "with")
    for one in (step, other):
        one(x, with_head=True)
    assert loaded_facts(step.state_dict()) == loaded_facts(other.state_dict())


def test_optimizer_state_of_parameters_that_the_compiled_step_does_not_train(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, head_not_trained, tmp_path)
