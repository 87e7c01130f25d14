"""The cache of compiled steps and what surrounds it: functions of torch.optim, settings of Python, odd files."""

from __future__ import annotations

import decimal
import functools
import os
import sys
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
