"""This version reads the files of each release, or refuses a compiled step and names what differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zerograph as zg
from tests.pool import Pool
from tests.releases.steps import FOLDER, STEPS, Step, losses

RELEASES = sorted(path.parent for path in FOLDER.glob("*/losses.json"))


def test_this_version_has_files() -> None:
    assert zg.__version__ in [path.name for path in RELEASES]


def resumed(folder: Path) -> list[float]:
    step = Step()
    step.load(folder / "checkpoint")
    return losses(step, STEPS)


@pytest.mark.parametrize("folder", RELEASES, ids=lambda path: path.name)
def test_training_goes_on_from_the_checkpoint_of_a_release(pool: Pool, folder: Path) -> None:
    expected = json.loads((folder / "losses.json").read_text())
    (found,) = pool.run(1, resumed, folder)
    assert found == pytest.approx(expected, rel=1e-9)


def loaded(folder: Path) -> list[float] | str:
    step = Step()
    try:
        step.load_compiled(folder / "step.zg")
        return losses(step, 0)
    except zg.ArtifactError as error:
        return str(error)


@pytest.mark.parametrize("folder", RELEASES, ids=lambda path: path.name)
def test_a_compiled_step_of_a_release_runs_or_is_refused_with_what_differs(pool: Pool, folder: Path) -> None:
    (found,) = pool.run(1, loaded, folder)
    if isinstance(found, str):
        assert "is of another step than this one\n  the " in found
    else:
        assert found == losses(Step(), 0)
