"""A release agrees with its documentation and its workflows: versions, make targets, tiers of names."""

from __future__ import annotations

import configparser
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import zerograph as zg

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def metadata() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser()
    parsed.read(ROOT / "setup.cfg")
    return parsed


@pytest.fixture(scope="module")
def matrix() -> dict[str, list[str]]:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    return dict(workflow["jobs"]["tests"]["strategy"]["matrix"])


def test_every_torch_that_is_allowed_is_tested(metadata: configparser.ConfigParser, matrix: dict[str, Any]) -> None:
    bounds = re.search(r"torch>=2\.(\d+),<2\.(\d+)", metadata["options"]["install_requires"])
    assert bounds is not None
    assert matrix["torch"] == [f"2.{minor}.0" for minor in range(int(bounds[1]), int(bounds[2]))]


def test_every_python_that_is_claimed_is_tested(metadata: configparser.ConfigParser, matrix: dict[str, Any]) -> None:
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)", metadata["metadata"]["classifiers"])
    assert metadata["options"]["python_requires"] == f">={matrix['python'][0]}"


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_that_exist(workflow: Path) -> None:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"\bmake ([\w-]+)", "\n".join(commands))) <= set(targets)


def test_a_version_is_tagged_once_the_changelog_gives_it_a_date(tmp_path: Path) -> None:
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())["jobs"]["tag"]
    script, origin, checkout = job["steps"][-1]["run"], tmp_path / "origin.git", tmp_path / "checkout"

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout

    def tags(changelog: str) -> list[str]:
        (checkout / "CHANGELOG.md").write_text(changelog)
        git("-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "A change")
        subprocess.run(["bash", "-e", "-c", script], cwd=checkout, check=True, capture_output=True)
        return git("-C", str(origin), "tag").split()

    git("init", "-q", "--bare", str(origin))
    git("clone", "-q", str(origin), str(checkout))
    (checkout / "zerograph").mkdir()
    (checkout / "zerograph" / "__init__.py").write_text((ROOT / "zerograph" / "__init__.py").read_text())
    (checkout / "CHANGELOG.md").write_text("")
    git("-C", str(checkout), "add", "--all")
    dated = f"## {zg.__version__}, 2026-11-30\n"
    assert tags(f"## {zg.__version__}, unreleased\n") == []
    assert tags(dated) == tags(f"{dated}More\n") == [f"v{zg.__version__}"]


def test_every_public_name_has_one_tier() -> None:
    page = (ROOT / "docs" / "stability.md").read_text()
    tiers = page[page.index("**Stable.**") : page.index("**Internal.**")]
    listed = [
        name for item in re.findall(r"^- (.+?)(?=^- |^$)", tiers, re.M | re.S) for name in re.findall(r"`(\w+)`", item)
    ]
    assert sorted(listed) == sorted(name for name in zg.__all__ if name != "__version__")
