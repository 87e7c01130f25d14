"""The wheel and the sdist of a checkout without symbolic links, installed into a fresh environment without network."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BUILD_FILES = ("pyproject.toml", "setup.cfg", "setup.py", "MANIFEST.in", "README.md", "LICENSE")

STEP = """
import torch
import zerograph as zg


class Step(zg.ZeroGraph):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(4, 2)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build(self, x):
        loss = self.model(x).sum()
        loss.backward()
        return loss


step = Step()
step.config.backend = "eager"
step(torch.ones(2, 4))
step.inspect.report("report.html", machine="h100")
print(*zg.__path__, step.inspect.passes[0].name, step.inspect.text().count("train.py:"))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a build needs, with the links as git checks them out where there are none: as text."""
    folder = tmp_path_factory.mktemp("install") / "checkout"
    folder.mkdir()
    for file in BUILD_FILES:
        shutil.copy(ROOT / file, folder)
    for name in ("zerograph", "passes", "runtime"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for link in ("passes", "runtime"):
        (folder / "zerograph" / link).unlink()
        (folder / "zerograph" / link).write_text(f"../{link}")
    return folder


@pytest.fixture(scope="module")
def sdist(checkout: Path) -> Path:
    """The archive of the sources."""
    _run(checkout, sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('../dist')")
    (archive,) = (checkout.parent / "dist").iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """The wheel that pip builds from the sdist."""
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    _run(sdist.parent, *pip, "--wheel-dir", "../wheel", str(sdist))
    (file,) = (sdist.parents[1] / "wheel").iterdir()
    return file


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    def of(folder: str, package: str) -> set[str]:
        paths = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        return {f"{package}/{path.relative_to(ROOT / folder).as_posix()}" for path in paths}

    files = of("zerograph", "zerograph") | of("passes", "zerograph/passes") | of("runtime", "zerograph/runtime")
    built = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert built == {name for name in files if not name.endswith(".md")}


def test_the_sdist_has_each_module_once_and_no_tests(sdist: Path) -> None:
    with tarfile.open(sdist) as file:
        modules = {name.partition("/")[2] for name in file.getnames() if name.endswith(".py")}
    expected = [path for folder in ("zerograph", "passes", "runtime") for path in (ROOT / folder).rglob("*.py")]
    assert modules == {"setup.py", *(path.relative_to(ROOT).as_posix() for path in expected)}


def test_an_installed_wheel_runs_a_step_and_the_command(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    _run(tmp_path, sys.executable, "-m", "venv", "--without-pip", str(environment))
    python = str(environment / "bin" / "python")
    install = ("install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel))
    _run(tmp_path, sys.executable, "-m", "pip", "--python", python, *install)
    # What zerograph depends on is where this process has it. Links of editable installs there do not count.
    (packages,) = (environment / "lib").glob("python*/site-packages")
    needed = [str(Path(torch.__file__).parents[1]), *site.getsitepackages()]
    (packages / "dependencies.pth").write_text("\n".join(dict.fromkeys(needed)))
    (tmp_path / "train.py").write_text(STEP)
    package, _, lines = _run(tmp_path, python, "train.py").split()
    assert Path(package) == packages / "zerograph"
    assert int(lines) > 0
    assert "zerograph" in _run(tmp_path, str(environment / "bin" / "zerograph"), "--version")


@pytest.mark.long
def test_a_checkout_without_links_runs_as_it_is(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STEP)
    package, beside, _, lines = _run(tmp_path, sys.executable, "train.py", PYTHONPATH=str(checkout)).split()
    assert [Path(package), Path(beside)] == [checkout / "zerograph", checkout]
    assert int(lines) > 0


def _run(folder: Path, *command: str, **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        command,
        cwd=folder,
        env={**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


# What Python lacks on Windows, and on macOS: modules, functions and signals.
ELSEWHERE = """
import os, platform, signal, sys, torch.distributed.run  # has alternatives of its own
import torch
platform.system = lambda: "Windows"
for module in ("fcntl", "grp", "pwd", "resource", "termios", "syslog"):
    sys.modules[module] = None
functions = ("fork", "killpg", "pidfd_open", "posix_fallocate", "register_at_fork", "sched_getaffinity", "sched_yield")
for name in (*functions, "O_DIRECT"):
    vars(os).pop(name, None)
for name in ("SIGKILL", "SIGUSR1", "SIGSTOP", "SIGHUP"):
    vars(signal).pop(name, None)
import importlib, pkgutil, zerograph as zg
for name in zg.__all__:
    getattr(zg, name)
for module in pkgutil.walk_packages(zg.__path__, "zerograph."):
    if not any(part in module.name for part in ("integrations", "peer_memory", "cli.elastic", "__main__")):
        importlib.import_module(module.name)
"""


def test_other_systems_import_it_and_run_a_step_or_say_what_needs_linux(tmp_path: Path) -> None:
    launch = "\nfrom zerograph.__main__ import app\napp(['launch', '--elastic', '1:2', 'train.py'])\n"
    (tmp_path / "train.py").write_text(ELSEWHERE + STEP + launch)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "train.py"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    # The step has run, and printed where the package is.
    assert str(ROOT / "zerograph") in found.stdout, found.stderr
    assert found.returncode == 2
    assert "--elastic needs Linux" in found.stderr
