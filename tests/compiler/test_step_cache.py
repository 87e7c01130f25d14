"""The cache of compiled steps: a step is used where a fresh trace would yield the same graph, and nowhere else."""

from __future__ import annotations

import datetime
import functools
import importlib
import itertools
import logging
import os
import random
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.artifact.test_artifacts import damaged
from tests.compiler.changes_of_a_step import CHANGES, Step, cached_factor
from tests.equivalence.families import FAMILIES
from tests.equivalence.training import batches, make, optimizer
from tests.harness import LossStep, forget_steps, sliced
from tests.models import part
from tests.pool import Pool
from zerograph.base import cache
from zerograph.capture.trace import Capture
from zerograph.compiler import step_cache
from zerograph.compiler.compiled import graph_lines
from zerograph.compiler.dependencies import Dependencies

X = torch.linspace(-1, 1, 24).view(6, 4)


class TracedError(Exception):
    """Raised in place of a trace."""


class Cache:
    """Turns the cache on, in a folder, and follows what it says and what is traced.

    Attributes:
        said: what the log says.
        traces: number of traces so far.
        traces_allowed: a trace is an error otherwise.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        patch.setenv(step_cache.VARIABLE, "1GiB")
        patch.setenv("ZEROGRAPH_CACHE", str(folder))
        self.said: list[str] = []
        self.traces, self.traces_allowed = 0, True
        self._folder = folder
        patch.setattr(step_cache, "_tell", lambda job, text: self.said.append(text))
        run = Capture.run

        def counted(capture: Capture) -> object:
            if not self.traces_allowed:
                raise TracedError
            self.traces += 1
            return run(capture)

        patch.setattr(Capture, "run", counted)

    def files(self) -> list[Path]:
        """Return the files of the cache."""
        return sorted((self._folder / "steps").glob("*.zg"))

    def is_used(self, step: zg.ZeroGraph, *batch: Tensor) -> bool:
        """Compile a step; return whether it was in the cache."""
        before = self.traces
        try:
            step.compile(*batch)
        except TracedError:
            return False
        return self.traces == before


@contextmanager
def cache_in(folder: str) -> Iterator[Cache]:
    # An earlier test in this process may have called it: a step that reads a result from before is not kept.
    cached_factor.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        yield Cache(patch, Path(folder))


def test_a_folder_or_a_limit_turns_the_cache_on() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for folder, most, wanted in (
            (None, None, 0),
            ("/somewhere", None, 4 * 2**30),
            ("/somewhere", "0", 0),
            ("/somewhere", "1GiB", 2**30),
            (None, "1GiB", 2**30),
            # No folder of that name is meant.
            ("0", None, 0),
            ("1", None, 4 * 2**30),
        ):
            for name, value in (("ZEROGRAPH_CACHE", folder), (step_cache.VARIABLE, most)):
                patch.delenv(name, raising=False)
                if value is not None:
                    patch.setenv(name, value)
            assert step_cache.limit() == wanted
            assert cache.folder("steps").parent.name in ("somewhere", "zerograph")


def lines_of(step: zg.ZeroGraph) -> list[str]:
    """Return the graphs of a step as text."""
    compiled = step._compiled()
    constants = [str(value) for value in compiled.captured.graph.buffers()]
    return [*graph_lines(compiled.captured.graph.graph), *graph_lines(compiled.prepared.emitted), *constants]


def fresh_lines(step: zg.ZeroGraph) -> list[str]:
    """Return :func:`lines_of` a step after it is traced and rewritten anew."""
    forget_steps(step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(step_cache.VARIABLE, "0")
        step.compile(X)
    return lines_of(step)


def fuzz(folder: str, rounds: int) -> tuple[list[str], list[str]]:
    """Return the changes for which a step of the cache was used, and those for which it should not have been."""
    used, stale = [], []
    with cache_in(folder) as cache:
        assert not cache.is_used(Step(), X), cache.said
        assert cache.files(), cache.said
        for number in range(rounds):
            draws = random.Random(number)
            for name, change in CHANGES.items():
                cache.traces_allowed = False
                with pytest.MonkeyPatch.context() as changes:
                    step = change(changes, draws.choice([0.375, 1.625, 2.5, 3.125]))
                    if cache.is_used(step, X):
                        used.append(name)
                        cache.traces_allowed = True
                        if lines_of(step) != fresh_lines(step):
                            stale.append(name)
    return used, stale


@sliced("rounds", [1], [12])
def test_a_stale_step_is_never_used(pool: Pool, tmp_path: Path, rounds: int) -> None:
    used, stale = pool.run(1, fuzz, str(tmp_path), rounds)[0]
    assert stale == []
    assert set(used) == {"nothing"}


def in_turn(folder: str) -> list[bool]:
    """Return whether steps are in the cache whose attribute has two values in turn."""
    used = []
    with cache_in(folder) as cache:
        for factor in (1.5, 2.5, 1.5, 2.5):
            step = TwoRanks()
            step.factor = factor  # type: ignore[attr-defined]
            used.append(cache.is_used(step, X))
    return used


def test_jobs_that_differ_in_a_value_keep_a_step_each(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(1, in_turn, str(tmp_path)) == [[False, False, True, True]]


class Doubtful(zg.ZeroGraph):
    """A step whose ``build()`` reads what some functions return, too."""

    def __init__(self, *doubts: Callable[[], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.doubts = nn.Linear(4, 2), doubts
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build(self, x: Tensor) -> Tensor:
        loss = (
            self.model(x).square().mean() + sum(one() for one in self.doubts) + sum(getattr(self, "num" + "bers", ()))
        )
        loss.backward()
        return loss


LOGGER = logging.getLogger(__name__)
LOGGER.level_of_loss = lambda: 1.0  # type: ignore[attr-defined]


def text_of_file() -> float:
    with open(__file__) as file:
        return float(len(file.read()))


def length_of_module() -> float:
    return float(len(vars(sys.modules["os"])["sep"]))


def threads() -> float:
    return float(torch.get_num_threads())


def with_generator() -> float:
    """Stand for an attribute of the step."""
    return 0.0


def of_two_files() -> float:
    return scaled() + TWIN()


def scaled() -> float:
    return FACTORS["factor"]


# Python compares neither the files of two functions nor their modules.
TWIN = types.FunctionType(
    scaled.__code__.replace(co_filename="/a/copy/of/this.py"), {"FACTORS": {"factor": 2.0}, "__name__": "a_copy"}
)
TIMER = functools.partial(time.time)
FACTORS = {"factor": 1.0}


class FailureError(ValueError):
    """Keeps its arguments in C, and does not save them."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return FailureError, ()


FAILURE = FailureError(1.0)


@functools.cache
def factor() -> float:
    return FACTORS["factor"]


factor()


def of_a_missing_module() -> float:
    try:
        import a_module_of_nobody  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        return 1.0
    return 2.0


def in_c_of_another() -> float:
    return TIMER() * 0


def of_the_caller() -> float:
    return float(len(sys._getframe(1).f_code.co_name))


def of_globals() -> float:
    return float(len(threads.__globals__))


def in_c() -> float:
    return float(FAILURE.args[0])


def kept() -> float:
    return factor()


def seconds() -> float:
    return time.perf_counter() * 0


def torchs() -> float:
    return float(torch.backends.cudnn.benchmark)


DOUBTS: dict[str, Callable[[], float]] = {
    "calls time.time()": lambda: time.time() * 0,
    "io.open()": text_of_file,
    "calls builtins.eval()": lambda: float(eval("1.5")),
    "all environment variables": lambda: float(len(dict(os.environ))),
    "calls posix.listdir()": lambda: float(len(os.listdir("/"))),
    "calls datetime.datetime.now()": lambda: datetime.datetime.now().year,
    "calls importlib.import_module()": lambda: len(importlib.import_module("os").sep),
    "names sys.modules": length_of_module,
    "<lambda> ran, and no name leads to it": lambda: LOGGER.level_of_loss(),  # type: ignore[attr-defined]
    "calls torch._C.get_num_threads()": threads,
    "calls importlib._bootstrap._find_and_load()": of_a_missing_module,
    "names time.time": in_c_of_another,
    "calls sys._getframe()": of_the_caller,
    "reads __globals__": of_globals,
    "FailureError: its value cannot be compared": in_c,
    "factor keeps a result from before the trace": kept,
    "calls time.perf_counter()": seconds,
    "have the same scaled()": of_two_files,
    "calls torch.backends.__get__()": torchs,
    "generator: its value cannot be compared": with_generator,
    "memoryview: its value cannot be compared": functools.partial(len, memoryview(b"12")),
}


# So many of them a step reads together; the log shows the first three.
TOGETHER = 7


def doubts(folder: str) -> list[tuple[list[str], list[str], list[str]]]:
    """Return for each step what it should be refused for, the reasons that were found, and what the log says."""
    found, look, seen = list[str](), Dependencies.doubts, []
    for first in range(0, len(DOUBTS), TOGETHER):
        names = list(DOUBTS)[first : first + TOGETHER]
        with cache_in(folder) as cache, pytest.MonkeyPatch.context() as patch:
            patch.setattr(Dependencies, "doubts", lambda *args: found.extend(look(*args)) or found)
            found.clear()
            step = Doubtful(*(DOUBTS[name] for name in names))
            if with_generator in step.doubts:
                # An attribute that build() reads by a name that it makes.
                step.numbers = (1.0 for _ in range(1))
            assert not cache.is_used(step, X)
            assert not cache.files(), names
            seen.append((names, [*found], cache.said))
    return seen


def test_a_step_that_reads_what_cannot_be_compared_is_not_kept(pool: Pool, tmp_path: Path) -> None:
    for names, found, said in pool.run(1, doubts, str(tmp_path))[0]:
        assert [name for name in names if not any(name in reason for reason in found)] == []
        assert found[0] in said[-1]


def train(folder: str, on: bool, apart: bool = False) -> tuple[list[Tensor], list[str], int]:
    """Run three steps on a rank; return losses and parameters, what the cache says, and the number of traces.

    Args:
        on: the cache is on.
        apart: rank 1 has another constant in a function that does not change the graph.
    """
    with cache_in(folder) as cache, pytest.MonkeyPatch.context() as patch:
        # Rank 0's value decides.
        patch.setenv(step_cache.VARIABLE, "1GiB" if on or zg.rank() else "0")
        if apart and zg.rank():
            patch.setattr(unread, "__defaults__", (2,))
        step = TwoRanks()
        values = [step(X + zg.rank()) for _ in range(3)]
        values += step.state_dict()["modules"]["model"].values()
        modes = [file.stat().st_mode & 0o777 for file in cache.files()]
        assert modes == [0o600] * len(modes)
        return values, cache.said, cache.traces


def unread(x: int = 1) -> None:
    """Change no graph."""


class TwoRanks(zg.ZeroGraph):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.1))
        self.config.zero.stage = 3

    def build(self, x: Tensor) -> Tensor:
        unread()
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def test_a_job_reads_what_another_job_has_compiled(pool: Pool, tmp_path: Path) -> None:
    off, cold, warm, apart = (
        pool.run(2, train, str(tmp_path), *arguments) for arguments in ((False,), (True,), (True,), (True, True))
    )
    assert [traces for _, _, traces in cold] == [1, 0]
    for (plain, _, _), (first, _, _), (second, said, traces), (last, _, last_traces) in zip(
        off, cold, warm, apart, strict=True
    ):
        assert (traces, last_traces > 0) == (0, True)
        assert any("is used" in line for line in said)
        assert all(map(torch.equal, plain, first))
        assert all(map(torch.equal, plain, second))
        assert all(map(torch.equal, plain, last))
    assert any("rank 1 has other code" in line for line in apart[0][1])
    assert any("unread" in line for line in apart[1][1])


def used_again(folder: str, name: str, stage: int) -> None:
    """The second step of a family is that of the cache, and computes what a step compiled without it does."""
    family = FAMILIES[name]
    own = [tuple(map(part, batch)) for batch in batches(family, torch.float32)[:2]]

    def run(used: bool | None) -> list[Tensor]:
        model = make(family, torch.float32)
        step = LossStep(model, optimizer(model), stage)
        if used is None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(step_cache.VARIABLE, "0")
                step.compile(*own[0])
        else:
            is_used = cache.is_used(step, *own[0])
            # Rank 0 may send the others what it has traced.
            assert is_used == used or (zg.rank() and not used), cache.said
        return [step(*batch) for batch in own] + list(step.state_dict()["modules"]["model"].values())

    with cache_in(folder) as cache:
        for values in (run(False), run(True)):
            assert all(map(torch.equal, run(None), values))


@sliced("name, stage", [], itertools.product(FAMILIES, range(4)))
def test_steps_of_models_are_kept(pool: Pool, tmp_path: Path, name: str, stage: int) -> None:
    pool.run(2, used_again, str(tmp_path), name, stage)


def different_graphs() -> str:
    with cache_in(tempfile.mkdtemp()):
        step = TwoRanks()
        if zg.rank():
            step.build = types.MethodType(other_build, step)  # type: ignore[method-assign]
        with pytest.raises(zg.RankMismatchError) as caught:
            step(X)
    return str(caught.value)


def other_build(self: TwoRanks, x: Tensor) -> Tensor:
    loss = self.model(x).abs().mean()
    loss.backward()
    return loss


def test_ranks_with_other_code_are_named(pool: Pool) -> None:
    for message in pool.run(2, different_graphs):
        assert "the code of" in message or "attributes of the graph" in message


def harmed(folder: str, count: int) -> int:
    """Return the number of damaged files that were used."""
    used = 0
    with cache_in(folder) as cache:
        cache.is_used(Doubtful(float), X)
        (file,) = cache.files()
        data = file.read_bytes()
        cache.traces_allowed = False
        assert cache.is_used(Doubtful(float), X), cache.said
        for number in range(count):
            file.write_bytes(damaged(data, number))
            used += cache.is_used(Doubtful(float), X)
        file.write_bytes(data)
        file.chmod(0o666)
        used += cache.is_used(Doubtful(float), X)
    return used


@sliced("count", [12], [500])
def test_damaged_files_are_compiled_again(pool: Pool, tmp_path: Path, count: int) -> None:
    assert pool.run(1, harmed, str(tmp_path), count) == [0]


def test_the_least_recently_used_files_are_removed(tmp_path: Path) -> None:
    for age, name in enumerate("abc"):
        file = tmp_path / f"{name}.zg"
        file.write_bytes(bytes(100))
        os.utime(file, (1000 - age, 1000 - age))
    step_cache._remove_oldest(tmp_path, 250)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.zg", "b.zg"]


def test_the_limit_is_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(step_cache.VARIABLE, "2MiB")
    assert step_cache.limit() == 2 * 2**20
    monkeypatch.setenv(step_cache.VARIABLE, "much")
    with pytest.raises(zg.ConfigError, match="give a size such as 4GiB, or 0"):
        step_cache.limit()
