"""Commands that need no graph start at once: names of ``zerograph`` are imported when they are asked for."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import zerograph as zg
from zerograph.__main__ import app

ROOT = Path(zg.__file__).parent
# Of torchrun, srun and sbatch, and of a script in an example.
OTHERS_OPTIONS = {
    *("--standalone", "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port"),
    *("--ntasks-per-node", "--kill-on-bad-exit", "--quit-on-interrupt", "--requeue", "--epochs"),
}


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["plan", "--help"], ["inspect", "--help"], ["plan", "--params", "7.5e9"]],
    ids=" ".join,
)
def test_it_starts_without_torch(arguments: list[str]) -> None:
    found = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "zerograph", *arguments], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert not re.search(r"\| +(torch|numpy|yaml|networkx)\b", found.stderr)


def test_importing_zerograph_loads_next_to_nothing() -> None:
    code = "import json, sys, zerograph; print(json.dumps([*sys.modules]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(found.stdout))
    assert {name for name in loaded if name.startswith("zerograph")} == {"zerograph"}
    assert not loaded & {"torch", "rich", "yaml", "networkx", "numpy"}


def test_a_graph_loads_no_planner_no_report_and_nothing_for_the_terminal() -> None:
    """Nor does a module that is imported first hide the function of its name."""
    code = """
import importlib, json, sys, zerograph as zg
zg.ZeroGraph
print(json.dumps([*sys.modules]))
for name in ("compiler.placement", "capture.local", "ir.annotate", "state.sharded_init"):
    module = importlib.import_module(f"zerograph.{name}")
    name = name.partition(".")[2]
    assert getattr(zg, name) is getattr(module, name), name
assert zg.mesh.line(2, 0, "ranks").size == 2
assert not hasattr(zg, "nothing")
assert "ZeroGraph" in dir(zg)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(found.stdout))
    packages = {".".join(name.split(".")[:3]) for name in loaded}
    assert "zerograph.graph" in loaded
    assert not packages & {"rich", "yaml", "zerograph.planner", "zerograph.inspection.report", "zerograph.compat"}
    assert not packages & {"networkx", "torch.distributed.tensor", "torch.distributed.checkpoint"}


def test_names_are_the_same_for_python_and_for_type_checkers() -> None:
    tree = ast.parse((ROOT / "__init__.pyi").read_text())
    checked = {
        alias.asname: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert checked.keys() == set(zg.__all__) - {"__version__"}
    for name, module in checked.items():
        home = importlib.import_module(f"zerograph.{name}" if module == "zerograph" else str(module))
        assert getattr(zg, str(name)) is (home if module == "zerograph" else getattr(home, str(name))), name
    assert (ROOT / "py.typed").exists()


def test_options_that_messages_name_exist() -> None:
    """Advice to use an option that a command does not have sends its reader in circles."""
    from typer.main import get_command

    from zerograph.__main__ import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    options = {name for command in commands.values() for one in command.params for name in one.opts} | {"--version"}
    for path in (ROOT / "cli").glob("*.py"):
        said = {
            option
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", node.value)
        }
        assert said - options - OTHERS_OPTIONS == set(), path.name
    # Those that loading a script may ask for, whichever command loads it.
    for command in ("plan", "inspect", "diff"):
        names = {name for one in commands[command].params for name in one.opts}
        assert {"--inputs", "--precision"} <= names, command


def test_options_of_an_elastic_job_are_refused_without_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    for options in (["--shared", str(tmp_path)], ["--patience", "5"]):
        result = CliRunner().invoke(app, ["launch", "--dry-run", *options, str(script)])
        assert result.exit_code == 2
        assert "give --elastic MIN:MAX" in " ".join(result.output.replace("│", "").split())


def test_a_dry_run_that_stands_after_the_script_starts_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    result = CliRunner().invoke(app, ["launch", str(script), "--dry-run"])
    assert result.exit_code == 2
    assert "put options of launch before" in " ".join(result.output.replace("│", "").split())
    result = CliRunner().invoke(app, ["launch", "--dry-run", str(script), "--", "--dry-run"])
    assert result.exit_code == 0
    assert not (tmp_path / "ran").exists()
