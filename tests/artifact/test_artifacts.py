"""Compiled steps in files: they run as a fresh compilation does, and files that do not fit are refused."""

from __future__ import annotations

import gc
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.mutation_guard import install_generation_tagging_init

import zerograph as zg
from tests.equivalence.families import FAMILIES
from tests.equivalence.training import STAGES, batches, make, optimizer
from tests.harness import LossStep, sliced
from tests.inspection import models
from tests.models import part
from tests.pool import Pool
from tests.scripts import run_apart, run_by_torchruns_agent
from zerograph import _torch
from zerograph.__main__ import app
from zerograph.artifact.code import recorded
from zerograph.artifact.digest import Digest
from zerograph.artifact.file import file_content, read_file, write_file
from zerograph.base.recording import followed
from zerograph.capture.trace import Capture
from zerograph.compiler import preparation
from zerograph.ir.mesh import line


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Fail if ``build()`` is traced, or a pass runs, inside the block."""
    error = AssertionError("the step was compiled")
    with patch.object(preparation, "run_pipeline", side_effect=error), patch.object(Capture, "run", side_effect=error):
        yield


def train(name: str, stage: int, path: str, micro_batches: int, load: bool) -> tuple[Any, ...]:
    """Compile a step and write it, or load it; return losses, state and views."""
    family = FAMILIES[name]
    model = make(family, torch.float32)
    step = LossStep(model, optimizer(model), stage, gradient_accumulation_steps=micro_batches)
    own = [tuple(map(part, batch)) for batch in batches(family, torch.float32)[:3]]
    if load:
        step.load_compiled(path)
        with nothing_compiled():
            step.compile(*own[0])
    else:
        step.compile(*own[0])
        if zg.rank() == 0:
            step.export_compiled(path)
    losses = [step(*batch) for batch in own]
    state = step.state_dict()["modules"]["model"]
    views = (
        step.inspect.text(),
        step.inspect.text("box"),
        step.inspect.collectives(),
        str(step.inspect.explain("input0")),
        step.inspect.memory.peak,
    )
    return losses, state, views


REST = [(name, 0 if stage == "off" else stage, 1) for name in FAMILIES for stage in STAGES]


@sliced("name, stage, micro_batches", [("gpt2", 3, 2)], [("gru_time_first", 3, 2), *REST])
def test_a_loaded_step_computes_and_shows_what_the_compiled_one_does(
    pool: Pool, tmp_path: Path, name: str, stage: int, micro_batches: int
) -> None:
    path = str(tmp_path / "step.zg")
    wanted = pool.run(2, train, name, stage, path, micro_batches, False)
    loaded = pool.run(2, train, name, stage, path, micro_batches, True)
    for (losses, state, views), (others, other_state, other_views) in zip(wanted, loaded, strict=True):
        assert all(map(torch.equal, losses, others))
        assert all(torch.equal(value, other_state[name]) for name, value in state.items())
        assert views == other_views


SCALE = 2.0


def scaled(x: Tensor, by: float = 1.0) -> Tensor:
    return x * by * SCALE


class Step(zg.ZeroGraph):
    """A step of a function, of a constant in it, and of an attribute that is no module."""

    def __init__(self, stage: int = 2, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.options = nn.Linear(4, width), {"power": 2}
        self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
        self.config.zero.stage = stage

    def build(self, x: Tensor) -> Tensor:
        loss = scaled(self.model(x)).pow(self.options["power"]).mean()
        loss.backward()
        return loss


def exported(path: Path) -> Step:
    step = Step()
    step.export_compiled(path, step.prepare(line(1, 0, "ranks"), torch.zeros(6, 4)))
    return step


def other_scale(monkeypatch: pytest.MonkeyPatch) -> Step:
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    return Step()


def other_default(monkeypatch: pytest.MonkeyPatch) -> Step:
    monkeypatch.setattr(scaled, "__defaults__", (2.0,))
    return Step()


def other_function(monkeypatch: pytest.MonkeyPatch) -> Step:
    monkeypatch.setitem(globals(), "scaled", lambda x: x)
    return Step()


def other_function_of_torch(monkeypatch: pytest.MonkeyPatch) -> Step:
    original = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *args: original(*args) + 1)
    return Step()


def other_attribute(monkeypatch: pytest.MonkeyPatch) -> Step:
    step = Step()
    step.options["power"] = 4
    return step


def other_version(monkeypatch: pytest.MonkeyPatch) -> Step:
    monkeypatch.setattr(torch, "__version__", "1.0")
    return Step()


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Step]] = {
    "the value of tests.artifact.test_artifacts.SCALE": other_scale,
    "the value of tests.artifact.test_artifacts.scaled": other_default,
    "the code or the value of tests.artifact.test_artifacts.scaled": other_function,
    "the functions of torch that were replaced": other_function_of_torch,
    "the attribute self.options": other_attribute,
    "the version of torch": other_version,
    "config.zero.stage: 2 in the file, 3 here": lambda _: Step(stage=3),
    "parameters: model.weight: (torch.Size([8, 4])": lambda _: Step(width=9),
}


def refusals(path: str) -> dict[str, str]:
    """Return what each change is refused with, and what a call with other inputs is."""
    exported(Path(path))
    messages = {}
    for expected, change in CHANGES.items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            step = change(monkeypatch)
            with pytest.raises(zg.ArtifactError) as caught:
                step.load_compiled(path)
        messages[expected] = str(caught.value)
    step = Step()
    step.load_compiled(path)
    with pytest.raises(zg.ArtifactError) as caught:
        step(torch.zeros(5, 4))
    messages["input args[0]: (6, 4)"] = str(caught.value)
    with nothing_compiled():
        step(torch.zeros(6, 4))
    # Once it has been used, other inputs compile as usual.
    step(torch.zeros(5, 4))
    return messages


def test_a_file_of_another_step_is_refused_and_the_difference_named(pool: Pool, tmp_path: Path) -> None:
    for expected, message in pool.run(1, refusals, str(tmp_path / "step.zg"))[0].items():
        assert expected in message


def tampered(path: Path) -> Iterator[Path]:
    """Yield files that were changed on purpose; their digest is right."""
    for name, change in {
        "a function of Python": lambda nodes: _call(nodes).update(target="os.system"),
        "a file is opened": lambda nodes: _call(nodes).update(target="aten.from_file.default"),
        "code as a name": lambda nodes: nodes[0].update(name="x=print('run')", target="x=print('run')"),
        "code as a keyword": lambda nodes: _call(nodes).update(kwargs={"d": [["a=print('run'), b", 1]]}),
        "a class": lambda nodes: nodes[0].update(meta={"val": {"Popen": ["true"]}}),
        "another key": lambda nodes: nodes[0].update(meta={"__class__": 1}),
        "a node that is missing": lambda nodes: _call(nodes).update(args=[{"n": 10**6}]),
        "no name": lambda nodes: nodes[0].pop("name"),
    }.items():
        document, tensors = read_file(path)
        change(document["captured"]["graph"])
        other = path.with_name(f"{name}.zg")
        write_file(other, file_content(document, tensors))
        yield other


def _call(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    return next(node for node in nodes if node["op"] == "call_function")


def damaged(data: bytes, number: int) -> bytes:
    """Return the data cut, with a bit that is another, or with bytes of another place."""
    random_numbers = random.Random(number)
    at = random_numbers.randrange(len(data))
    if number % 3 == 0:
        return data[:at]
    if number % 3 == 1:
        return data[:at] + bytes([data[at] ^ 1 << random_numbers.randrange(8)]) + data[at + 1 :]
    other = random_numbers.randrange(len(data))
    return data[:at] + data[other : other + 9] + data[at + 9 :] + b"!"


def run_file(path: Path) -> None:
    step = Step()
    step.load_compiled(path)
    step(torch.zeros(6, 4))


def load_harmful(path: str, count: int) -> None:
    """Every changed file is refused, at the latest by the first call."""
    file = Path(path)
    exported(file)
    for changed in tampered(file):
        with pytest.raises(zg.ArtifactError):
            run_file(changed)
    data = file.read_bytes()
    for number in range(count):
        file.write_bytes(damaged(data, number))
        with pytest.raises(zg.ArtifactError):
            Step().load_compiled(file)


@sliced("count", [30], [500])
def test_damaged_and_tampered_files_are_refused(
    pool: Pool, tmp_path: Path, capfd: pytest.CaptureFixture[str], count: int
) -> None:
    pool.run(1, load_harmful, str(tmp_path / "step.zg"), count)
    assert "run" not in capfd.readouterr().out


class Left:
    """In a cycle, which only a collection finds."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        self.read = time.monotonic()


def test_what_a_garbage_collection_runs_is_no_part_of_a_trace() -> None:
    ran = []

    def callback(phase: str, info: dict[str, int]) -> None:
        ran.append(phase)

    def many() -> int:
        return len([[number] for number in range(10_000)])

    thresholds = gc.get_threshold()

    gc.callbacks.append(callback)
    gc.set_threshold(100, 10, 10)
    try:
        with recorded() as recording:
            ran.clear()
            Left()
            followed(many)()
            assert not ran
        gc.collect()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(callback)
    assert ran
    assert {code.co_name for code in recording.codes} <= {"many", "<listcomp>"}
    assert not recording.doubts


def test_a_method_of_modules_that_dynamo_replaces_has_the_digest_of_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(nn.Module, name, _torch.untagged(vars(nn.Module)[name]))
    before = Digest().of(nn.Module)
    # The first is of torch before 2.15, the second from then on.
    monkeypatch.setattr(nn.Module, "___needs_generation_tag_patch", True, raising=False)
    monkeypatch.setattr(nn.Module, "___has_generation_tag_patch", True, raising=False)
    monkeypatch.delattr(nn.Module, "___has_generation_tag_patch")
    install_generation_tagging_init()
    assert Digest().of(nn.Module) == before


def test_a_value_that_leads_to_another_on_two_paths_is_digested_once() -> None:
    """Two ways from each of 30 classes to the next are 2 ** 30 ways to the last."""
    kind: type = type("Kind", (), {})
    for _ in range(30):

        def first(self: object, other: type = kind) -> None:
            pass

        def second(self: object, other: type = kind) -> None:
            pass

        kind = type("Kind", (), {"first": first, "second": second})
    digest = Digest()
    assert digest.everything_of(kind)
    assert not digest.doubts


_JOB = """
import torch, zerograph as zg
from unittest.mock import patch
from script_of_a_job import Step
from zerograph.capture.trace import Capture

x = torch.ones(2, 16)
loaded, fresh = Step(layers=1, device="cpu"), Step(layers=1, device="cpu")
loaded.load_compiled("step.zg")
with patch.object(Capture, "run", side_effect=AssertionError("build() was traced")):
    loaded.compile(x)
print(f"rank {zg.rank()} of {zg.world_size()}: {torch.equal(loaded(x), fresh(x))}")
"""


def compile_by_command(folder: Path) -> None:
    os.chdir(folder)
    app(["compile", "script_of_a_job.py:example", "--world-size", "2", "-o", "step.zg"], standalone_mode=False)


def test_a_job_runs_what_the_command_has_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own: other tests add operators and replace functions."""
    path, job = tmp_path / "step.zg", tmp_path / "job.py"
    shutil.copy(models.__file__, tmp_path / "script_of_a_job.py")
    job.write_text(_JOB)
    assert run_apart(compile_by_command, tmp_path) == 0
    assert (path.stat().st_mode & 0o777) == 0o600
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    printed = run_by_torchruns_agent(tmp_path / "logs", [str(job)])
    assert sorted(printed["stdout"].split("\n")) == ["", "rank 0 of 2: True", "rank 1 of 2: True"], printed["stderr"]


def rows(count: int) -> Tensor:
    """Return so many rows, and one more on rank 1, of a dynamic dimension."""
    x = torch.ones(count + zg.rank(), 4)
    zg.mark_dynamic(x, 0)
    return x


def run_dynamic(path: str, load: bool) -> list[Tensor]:
    step = Step()
    if load:
        step.load_compiled(path)
        with nothing_compiled():
            return [step(rows(count)) for count in (6, 3, 5)]
    losses = [step(rows(count)) for count in (6, 3, 5)]
    if zg.rank() == 0:
        step.export_compiled(path)
    return losses


def test_a_file_serves_batches_of_any_size_and_unequal_ranks(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "step.zg")
    wanted, loaded = (pool.run(2, run_dynamic, path, load) for load in (False, True))
    assert all(torch.equal(*pair) for ranks in zip(wanted, loaded, strict=True) for pair in zip(*ranks, strict=True))
