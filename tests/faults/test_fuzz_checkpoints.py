"""Checkpoints that somebody has damaged, or made on purpose: an error, and never code, a crash or other values."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

import zerograph as zg
from tests.faults.survival_table import Tally
from tests.harness import difference
from tests.models import TrainStep, adamw, batches, make
from tests.pool import Pool
from zerograph.runtime.checkpoint import index

CALM = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}
Body = dict[str, Any]


class Step(TrainStep):
    """Everything that a document has something to say of."""

    def __init__(self) -> None:
        model = make("mlp")
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5)
        scaler = zg.GradScaler(init_scale=4.0)
        super().__init__(model, optimizer, 3, scheduler=scheduler, backend="eager", grad_scaler=scaler)


def trained() -> Step:
    made = Step()
    for batch in batches("mlp", 2):
        made(*batch)
    return made


@pytest.fixture
def step() -> Step:
    """A new one for each test: a hyperparameter that a hostile index has added stays."""
    return trained()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "runs"
    trained().save(path, keep=1)
    return path


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Nothing may be unpickled inside, and little more memory be asked for than the process has."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was unpickled")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load", "loads", "Unpickler"):
            patch.setattr(pickle, name, refuse)
        patch.setattr(torch, "load", refuse)
        resource.setrlimit(resource.RLIMIT_AS, (size + 2**29, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)


def files(path: Path) -> list[Path]:
    return sorted(one for one in path.rglob("*") if one.is_file())


# What can be done to the bytes of a file. It still says what it says, or it is refused.
def flip(data: bytearray, at: int, value: int) -> None:
    if data:
        data[at % len(data)] ^= value


def cut(data: bytearray, at: int, value: int) -> None:
    del data[at % (len(data) + 1) :]


def insert(data: bytearray, at: int, value: int) -> None:
    data[at % (len(data) + 1) : at % (len(data) + 1)] = bytes([value]) * (value + 1)


def remove(data: bytearray, at: int, value: int) -> None:
    del data[at % (len(data) + 1) : at % (len(data) + 1) + value]


def a_pickle(data: bytearray, at: int, value: int) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os._exit, (3,)

    data[:] = pickle.dumps(Evil())


def a_header(data: bytearray, at: int, value: int) -> None:
    """A header of a safetensors file with other offsets, and the rest as it was."""
    numbers = [0, -1, 2**63, 2**64 - 1, 10**30, 10**9, 1]
    low, high = numbers[at % 7], numbers[value % 7]
    header = json.dumps({"0": {"dtype": "F32", "shape": [high, value], "data_offsets": [low, high]}}).encode()
    data[:] = len(header).to_bytes(8, "little") + header + bytes(data)
    if at % 3 == 0:
        data[:8] = (2**64 - 1 - value).to_bytes(8, "little")


# Where the file that is changed is the one that names the latest.
pytestmark = pytest.mark.filterwarnings("ignore:.*the newest whole checkpoint is loaded instead")

BYTES = [flip, flip, cut, insert, remove, a_pickle, a_header]


def check(path: Path, step: Step, expected: Any, *, values: bool, tally: Tally) -> None:
    """It is refused, or (``values``) says what it said before; a graph that refuses it is as it was."""
    good = False
    try:
        with guarded():
            found = zg.read_checkpoint(path)
        good = not values or not difference(found, expected)
        assert good, "other values were read"
    except zg.CheckpointError:
        good = True
    finally:
        tally.add(good)
    before = step.state_dict()
    try:
        with guarded():
            step.load(path)
    # An index that is whole may be of another model.
    except (zg.CheckpointError, zg.ConfigError):
        assert not difference(step.state_dict(), before)
    else:
        loaded = step.state_dict()
        del loaded["modules"]["loss_fn"]
        assert not values or not difference(loaded, expected)


Bytes = st.lists(
    st.tuples(st.sampled_from(BYTES), st.integers(0, 2**31), st.integers(0, 2**20), st.integers(1, 255)),
    min_size=1,
    max_size=3,
)


def fuzz_bytes(checkpoint: Path, step: Step, folder: Path, examples: int, number: int, tally: Tally) -> None:
    step.load(checkpoint)
    # That of a module without tensors, which no file has.
    expected = step.state_dict()
    del expected["modules"]["loss_fn"]
    assert not difference(zg.read_checkpoint(checkpoint), expected)

    @seed(number)
    @settings(max_examples=examples, phases=(Phase.generate, Phase.shrink), **CALM)
    @given(Bytes)
    def run(changes: Any) -> None:
        path = folder / "copy"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(checkpoint, path)
        for change, which, at, value in changes:
            target = files(path)[which % 3]
            data = bytearray(target.read_bytes())
            change(data, at, value)
            target.write_bytes(data)
        check(path, step, expected, values=True, tally=tally)

    run()


NUMBERS = [0, 1, -1, 2**31, 2**62, 2**63, 2**64, 10**400, 1.5, 1e308, float("nan"), float("inf"), -0.0]
TEXTS = ["", "..", "../x", "/etc/passwd", "a/b", "\0", "\ud800", "data", "index.json", "latest", "float64", "x" * 300]
NESTED: list[Any] = [[], {}, None, True, [[]], {"tuple": 3}, {"dict": [[1]]}, {"tensor": ["float32", [2**40], []]}]
NESTED += [{"tensor": ["float32", [0, 2**62, 2**62], []]}, {"dtype": "os.system"}, {"counter": [["a", 1], ["a", 2]]}]
DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]
ANYTHING = [*NUMBERS, *TEXTS, *NESTED, DEEP, {"dict": [["step", 1], ["optimizer", None]]}, {"tuple": [0.9, 0.9]}]


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(one for key, held in inside for one in places(held, (*at, key)))]


def put(body: Body, at: tuple[Any, ...], action: int, value: Any) -> None:
    """Replace, remove, or double what is at a place; a value may be one from elsewhere in the index."""
    *way, last = at
    holder: Any = body
    for key in way:
        holder = holder[key]
    if action % 4 == 0:
        del holder[last]
    elif action % 4 == 1 and isinstance(holder, list):
        holder.insert(last, copy.deepcopy(holder[last]))
    elif action % 4 == 1:
        holder[f"{last}.more"] = copy.deepcopy(holder[last])
    else:
        holder[last] = copy.deepcopy(value)


def sign(body: Body) -> str:
    """As somebody writes it who knows the format: the SHA-256 is right."""
    body.pop("sha256", None)
    with contextlib.suppress(ValueError, RecursionError):
        body["sha256"] = index._digest(body)
    return json.dumps(body)


Edits = st.lists(
    st.tuples(
        st.integers(0, 2**31), st.integers(0, 3), st.sampled_from(ANYTHING), st.booleans(), st.integers(0, 2**31)
    ),
    min_size=1,
    max_size=3,
)


def fuzz_index(checkpoint: Path, step: Step, folder: Path, examples: int, number: int, tally: Tally) -> None:
    step.load(checkpoint)
    original = json.loads(next(checkpoint.glob("*/index.json")).read_text())
    path = folder / "copy"
    shutil.copytree(checkpoint, path)
    target = next(path.glob("*/index.json"))

    @seed(number)
    @settings(max_examples=examples, phases=(Phase.generate, Phase.shrink), **CALM)
    @given(Edits)
    def run(edits: Any) -> None:
        body = copy.deepcopy(original)
        for at, action, value, elsewhere, other in edits:
            there = places(body)[1:]
            if not there:
                continue
            if elsewhere:
                value = body
                for key in there[other % len(there)]:
                    value = value[key]
            put(body, there[at % len(there)], action, value)
        target.write_text(sign(body))
        step.load(checkpoint)
        check(path, step, None, values=False, tally=tally)

    run()


def test_changed_bytes_are_refused(checkpoint: Path, step: Step, tmp_path: Path, tally: Callable[[str], Tally]) -> None:
    fuzz_bytes(checkpoint, step, tmp_path, 30, 0, tally("a checkpoint with changed bytes"))


def test_a_hostile_index_is_refused(
    checkpoint: Path, step: Step, tmp_path: Path, tally: Callable[[str], Tally]
) -> None:
    fuzz_index(checkpoint, step, tmp_path, 30, 0, tally("a checkpoint with a hostile index"))


def link_a_shard(path: Path, elsewhere: Path) -> None:
    shard = next(path.glob("*/data-*/*"))
    shutil.copy(shard, elsewhere / "shard")
    shard.unlink()
    shard.symlink_to(elsewhere / "shard")


def moved(file: Path, elsewhere: Path) -> None:
    shutil.move(file, elsewhere / "moved")
    file.symlink_to(elsewhere / "moved")


def a_pipe(path: Path, _: Path) -> None:
    shard = next(path.glob("*/data-*/*"))
    shard.unlink()
    os.mkfifo(shard)


def latest_elsewhere(path: Path, elsewhere: Path) -> None:
    (path / "latest").write_text(f"../{elsewhere.name}")


@contextlib.contextmanager
def edited(path: Path) -> Iterator[Body]:
    """Yield the index of a checkpoint; what has become of it is written."""
    file = next(path.glob("*/index.json"))
    body = json.loads(file.read_text())
    yield body
    file.write_text(sign(body))


def overlapping(path: Path, _: Path) -> None:
    """Rows twice, and others never: they would have been what memory held."""
    with edited(path) as body:
        one = body["tensors"]["modules.model.0.weight"]
        (rows, columns), chunk = one["shape"], one["chunks"][0]
        most = {**chunk, "sizes": [rows - 1, columns]}
        one["chunks"] = [most, {**most, "key": "none", "sizes": [1, columns]}]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (link_a_shard, "leads out of its folder"),
        (lambda path, elsewhere: moved(next(path.glob("*/data-*")), elsewhere), "leads out of its folder"),
        (lambda path, elsewhere: moved(next(path.glob("*/index.json")), elsewhere), "leads out of its folder"),
        (lambda path, elsewhere: moved(next(path.glob("step-*")), elsewhere), "leads out of its folder"),
        (a_pipe, "no file"),
        (latest_elsewhere, "it names no checkpoint"),
        (overlapping, "overlap"),
    ],
)
def test_what_leads_elsewhere_is_refused(
    checkpoint: Path, tmp_path: Path, change: Callable[[Path, Path], None], words: str
) -> None:
    path, elsewhere = tmp_path / "copy", tmp_path / "elsewhere"
    shutil.copytree(checkpoint, path)
    elsewhere.mkdir()
    change(path, elsewhere)
    with guarded(), pytest.raises(zg.CheckpointError, match=words):
        zg.read_checkpoint(path)


PARAMS = [("params", value) for value in ([0.0, 1.0, 2.0, 3.0], [{"tensor": ["float32", [2], [0.0, 1.0]]}] * 4)]
VALUES = [("fused", "data"), ("foreach", 1e308), ("lr", None), ("betas", [0.9]), *PARAMS]


@pytest.mark.parametrize(("key", "value"), VALUES)
def test_a_hyperparameter_that_could_not_be_one_is_refused(
    checkpoint: Path, step: Step, tmp_path: Path, key: str, value: Any
) -> None:
    path = tmp_path / "copy"
    shutil.copytree(checkpoint, path)
    with edited(path) as body:
        (group,) = body["document"]["optimizers"][0]
        next(pair for pair in group["dict"] if pair[0] == key)[1] = value
    with pytest.raises(zg.CheckpointError, match=f"says {key} = .* of AdamW, .*: no such value|have the numbers"):
        step.load(path)


@pytest.mark.parametrize("raw", [b'"\\ud800"', b'"\xed\xa0\x80"'])
def test_a_name_that_is_no_unicode_is_refused(checkpoint: Path, tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "copy"
    shutil.copytree(checkpoint, path)
    with edited(path) as body:
        body["tensors"]["modules.model.\ud800"] = body["tensors"].pop("modules.model.0.weight")
    file = next(path.glob("*/index.json"))
    file.write_bytes(file.read_bytes().replace(b"\\ud800", raw.strip(b'"')))
    with pytest.raises(zg.CheckpointError, match=r"is damaged: .* no Unicode, near") as caught:
        zg.read_checkpoint(path)
    str(caught.value).encode()


def loaded_guarded(path: str) -> int:
    step = Step()
    with guarded():
        step.load(path)
    return step.steps_done


def test_nothing_is_unpickled_over_several_ranks(checkpoint: Path, pool: Pool) -> None:
    # What ranks of one job send each other is trusted, and torch does pickle it; files are not.
    assert pool.run(2, loaded_guarded, str(checkpoint)) == [2, 2]


@pytest.mark.long
@pytest.mark.parametrize("number", range(1, 11))
def test_many_damaged_checkpoints_are_refused(
    checkpoint: Path, step: Step, tmp_path: Path, tally: Callable[[str], Tally], number: int
) -> None:
    (tmp_path / "a").mkdir()
    fuzz_bytes(checkpoint, step, tmp_path, 500, number, tally("a checkpoint with changed bytes"))
    fuzz_index(checkpoint, step, tmp_path / "a", 500, number, tally("a checkpoint with a hostile index"))
