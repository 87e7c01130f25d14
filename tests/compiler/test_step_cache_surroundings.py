"""The cache of compiled steps and what surrounds it: functions of torch.optim, settings of Python, odd files."""

from __future__ import annotations

import decimal
import functools
import importlib.util
import os
import sys
import textwrap
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.compiler.changes_of_a_step import Step, cached_factor
from tests.compiler.test_step_cache import Doubtful, X, cache_in, fresh_lines, lines_of
from tests.pool import Pool
from zerograph.artifact.file import file_content, read_file
from zerograph.artifact.process import process_texts

# The package hides the module behind a name of its own.
ADAM = sys.modules["torch.optim.adam"]


def slowed(by: float) -> Callable[..., object]:
    """Return a function in the place of ``torch.optim.adam.adam``, with a smaller rate."""
    original = ADAM.adam

    @functools.wraps(original)
    def adam(*args: object, **options: object) -> object:
        return original(*args, **{**options, "lr": options["lr"] * by})  # type: ignore[operator]

    return adam


def patched_updates(folder: str) -> None:
    # A result that another test has left would keep the step out of the cache.
    cached_factor.cache_clear()
    with cache_in(folder) as cache:
        assert not cache.is_used(Step(), X)
        assert cache.is_used(Step(), X), cache.said
        cache.traces_allowed = False
        for by in (0.5, 0.25):
            for other in (slowed(by), functools.partial(ADAM.adam, lr=by)):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(ADAM, "adam", other)
                    assert not cache.is_used(Step(), X), cache.said
                assert "torch.optim" in cache.said[-1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.Optimizer.__init__, "__defaults__", (1,))
            assert not cache.is_used(Step(), X)
        assert cache.is_used(Step(), X), cache.said


def test_a_step_is_not_used_where_a_function_of_torch_optim_was_replaced(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, patched_updates, str(tmp_path))


def test_settings_of_pythons_modules_are_compared() -> None:
    before = process_texts()
    with decimal.localcontext(prec=7):
        assert process_texts() != before
    with warnings.catch_warnings(action="error"):
        assert process_texts() != before
    assert process_texts() == before


def odd(folder: str) -> None:
    with cache_in(folder) as cache:
        cache.is_used(Doubtful(float), X)
        (file,) = cache.files()
        document, tensors = read_file(file)
        for name, value in (("candidate", [1]), ("candidate", ["a", 0, False]), ("emitted", [{}]), ("warnings", 3)):
            file.write_bytes(file_content({**document, name: value}, tensors))
            step = Doubtful(float)
            step.compile(X)
            assert lines_of(step) == fresh_lines(step)
        file.unlink()
        os.mkfifo(file, 0o600)
        assert not cache.is_used(Doubtful(float), X)


def test_a_file_with_odd_parts_and_a_pipe_are_as_no_file(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, odd, str(tmp_path))


SOURCE = textwrap.dedent(
    """
    import torch
    import zerograph as zg


    class Edited(zg.ZeroGraph):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = torch.nn.Linear(4, 2)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        def build(self, x):
            loss = self.model(x).square().mean() * FACTOR
            loss.backward()
            return loss
    """
)


def imported(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def edited(folder: str) -> list[tuple[bool, float]]:
    """Import a file, edit it before the first step, and import it again; return whether the steps were in the cache."""
    path, steps = Path(folder, "edited_while_a_job_starts.py"), []
    with cache_in(folder) as cache, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        for now, then in (("1.5", "2.50"), ("2.50", "2.50"), ("2.50", "2.50")):
            path.write_text(SOURCE.replace("FACTOR", now))
            module = imported(path)
            path.write_text(SOURCE.replace("FACTOR", then))
            step = module.Edited()
            steps.append((cache.is_used(step, X), step(X).item()))
    return steps


def test_a_file_that_is_edited_while_a_job_starts_makes_no_stale_step(pool: Pool, tmp_path: Path) -> None:
    (first, second, third) = pool.run(1, edited, str(tmp_path))[0]
    assert [first[0], second[0], third[0]] == [False, False, True]
    assert second[1] == third[1] == pytest.approx(first[1] * 2.5 / 1.5)
