"""The commands that look: inspect, diff, env."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from tests.inspection import models
from tests.inspection.test_report import packed
from zerograph.__main__ import app

SCRIPT = f"{models.__file__}:example"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_inspect_shows_a_step_of_any_number_of_ranks() -> None:
    found = run("inspect", SCRIPT, "--world-size", "8", "--rank", "3", "--json")
    assert found.exit_code == 0
    about = json.loads(found.stdout)
    assert (about["mesh"], about["position"]) == ([8], [3])
    # Two rows for each of eight ranks.
    assert about["inputs"][0]["shape"] == [16, 16]
    shown = run("inspect", SCRIPT, "--explain", "model.first.weight")
    assert shown.exit_code == 0
    assert "gather starts" in shown.stdout


LOOP = """
import torch, zerograph as zg

class Model(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()

def loop():
    model = Model(16, 16)
    model, optimizer = zg.prepare(model, torch.optim.Adam(model.parameters()), stage=3)
    return model, torch.zeros(2, 16)

class Step(zg.ZeroGraph):
    def __init__(self):
        super().__init__()
        self.model = Model(16, 16)
        self.add_optimizer(torch.optim.Adam(self.model.parameters()))
        self.config.zero.stage = 3

    def build(self, x):
        loss = self.model(x)
        loss.backward()
        return loss

def graph():
    return Step(), torch.zeros(2, 16)
"""


def test_a_step_of_a_loop_is_inspected_and_planned_as_the_graph_of_the_same_lines(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP)
    facts = []
    for name in ("loop", "graph"):
        about = json.loads(run("inspect", f"{script}:{name}", "--world-size", "4", "--json").stdout)
        plan = json.loads(run("plan", f"{script}:{name}", "--world-size", "4", "--device", "cpu", "--json").stdout)
        facts.append((about["memory"]["peak"], about["at_rest"], about["sent"], plan["peak"]))
    assert facts[0] == facts[1]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["inspect", "none.py:x"], "there is no script none.py"),
        (["inspect", models.__file__], "is not SCRIPT:STEP"),
        (["inspect", SCRIPT.replace("example", "exampel")], "did you mean 'example'"),
        (["inspect", f"{models.__file__}:nothing"], "has no 'nothing'; it has example"),
        (["inspect", SCRIPT, "--rank", "2"], "there is no rank 2 of 2"),
        (["inspect", SCRIPT, "--world-size", "99999999999"], "more than the 1,048,576"),
        (["inspect", SCRIPT.replace(":example", ":Step")], "is the class Step"),
        (["inspect", SCRIPT, "--beside-stage", "3"], "give --report PAGE.html too"),
        (["diff", SCRIPT], "two dumps, or a script and --stages"),
        (["diff", "none", "nothing"], "there is no dump none"),
        (["diff", SCRIPT, "--stages", "two"], "give two stages, such as 2,3"),
    ],
)
def test_wrong_use_ends_with_2_and_says_why(arguments: list[str], why: str) -> None:
    found = run(*arguments)
    assert found.exit_code == 2
    assert why in found.stderr


def test_diff_of_stages_ends_with_1_where_they_differ() -> None:
    found = run("diff", SCRIPT, "--stages", "2,3", "--json")
    assert found.exit_code == 1
    (about,) = json.loads(found.stdout)
    # Stage 3 gathers for backward again.
    again = [one["text"] for one in about["changes"] if one["kind"] == "+" and "all-gather" in one["text"]]
    assert again
    assert run("diff", SCRIPT, "--stages", "3,3").exit_code == 0


def test_inspect_writes_two_stages_on_one_page(tmp_path: Path) -> None:
    alone, both = tmp_path / "alone.html", tmp_path / "both.html"
    stages = ("--stage", "2", "--beside-stage", "3")
    assert run("inspect", SCRIPT, "--stage", "2", "--report", str(alone)).exit_code == 0
    assert run("inspect", SCRIPT, *stages, "--report", str(both)).exit_code == 0
    (one,), (first, second) = packed(alone), packed(both)
    assert first["facts"] == one["facts"]
    assert [each["facts"][0][1] for each in (first, second)] == ["ZeRO stage 2", "ZeRO stage 3"]


def test_the_page_of_a_step_on_a_machine_has_the_numbers_of_its_plan(tmp_path: Path) -> None:
    page = tmp_path / "step.html"
    step = (SCRIPT, "--world-size", "2", "--stage", "3")
    assert run("inspect", *step, "--machine", "h100", "--report", str(page)).exit_code == 0
    facts = {label: value for label, value, _ in packed(page)[0]["facts"]}
    plan = json.loads(run("plan", *step, "--json").stdout)
    assert facts["predicted step on h100"] == plan["seconds"]["step"]
    assert facts["predicted peak"] == plan["peak"]["bytes"]


def test_compare_names_the_first_step_and_tensor_that_differ(tmp_path: Path) -> None:
    logs = [tmp_path / name for name in ("one", "other", "short", "none")]
    for log, lines in zip(logs, ([[1, 2], [3, 4], [5, 6]], [[1, 2], [3, 5], [0, 0]], [[1, 2]]), strict=False):
        log.write_text("".join(json.dumps({"loss": loss, "weight": weight}) + "\n" for loss, weight in lines))
    one, other, short, none = map(str, logs)
    assert run("compare", one, one).exit_code == 0
    for pair, answer in (((one, other), "line 2: weight\n  4\n  5\n"), ((one, short), f"line 1, where {short} ends")):
        found = run("compare", *pair)
        assert found.exit_code == 1
        assert answer in found.stdout
    assert run("compare", one, none).exit_code == 2


def test_compare_takes_a_loss_that_is_nan_in_both_runs_for_equal_and_an_absent_one_not(tmp_path: Path) -> None:
    nan = '{"a": NaN, "b": null}\n'
    for name, lines in {"one": nan, "same": nan, "other": '{"a": 1, "b": null}\n', "lacks": '{"a": NaN}\n'}.items():
        (tmp_path / name).write_text(lines)
    found = [run("compare", str(tmp_path / "one"), str(tmp_path / name)) for name in ("same", "other", "lacks")]
    assert [one.exit_code for one in found] == [0, 1, 1]
    assert [one.stdout for one in found] == ["", "line 1: a\n  NaN\n  1\n", "line 1: b\n  None\n  (absent)\n"]


def test_diff_of_dumps_compares_pass_by_pass(tmp_path: Path) -> None:
    for name, line in (("one", "a"), ("other", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "00-capture.txt").write_text(f"# of {name}\nsame\n")
        (tmp_path / name / "01-place.txt").write_text(f"# of {name}\n{line}\n")
    folders = str(tmp_path / "one"), str(tmp_path / "other")
    found = run("diff", *folders)
    assert found.exit_code == 1
    assert [line for line in found.stdout.splitlines() if line[0] in "+-" and line[1] in "ab"] == ["-a", "+b"]
    assert run("diff", *folders, "--pass", "capture").exit_code == 0


def test_env_says_what_a_bug_report_needs() -> None:
    found = run("env", "--json")
    assert found.exit_code == 0
    about = json.loads(found.stdout)
    assert about["packages"]["torch"] == torch.__version__
    assert "gloo" in about["torch"]["distributed backends"]


@pytest.mark.parametrize("command", [command.callback.__name__ for command in app.registered_commands])
def test_help_fits_a_terminal(command: str) -> None:
    assert "…" not in CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).stdout


@pytest.mark.parametrize("command", ["inspect", "diff", "export", "env"])
def test_help_has_an_example(command: str) -> None:
    found = run(command, "--help")
    assert found.exit_code == 0
    assert "Example" in found.stdout


def test_a_budget_that_does_not_suffice_ends_with_1(tmp_path: Path) -> None:
    """The command was used well, and has an answer: the step does not fit."""
    script = tmp_path / "tight.py"
    script.write_text(
        "from tests.inspection.models import example as wide\n"
        "def example():\n"
        "    step, inputs = wide()\n"
        "    step.config.memory.memory_budget = 1000\n"
        "    return step, inputs\n"
    )
    for command in ("inspect", "plan"):
        found = run(command, f"{script}:example", *(["--stage", "3"] if command == "plan" else []))
        assert found.exit_code == 1
        assert "memory_budget" in found.stderr


def test_launch_prints_the_command_of_one_host_a_host_list_and_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    script = models.__file__
    dry = ("launch", "--dry-run", "--ranks", "2")

    def printed(*arguments: str) -> list[str]:
        return run(*dry, *arguments).stderr.splitlines()

    note, one = printed(script, "--ranks", "9")
    assert "--ranks after the script: an argument of the script" in note
    assert one.endswith(f"-m torch.distributed.run --standalone --nproc-per-node 2 {script} --ranks 9")
    first, second = printed("--hosts", "a,b", script)
    assert first.startswith("ssh -tt a 'cd ")
    assert "--nnodes 2 --node-rank 1 --master-addr a --master-port 29500 --nproc-per-node 2" in second
    (here,) = printed("--hosts", "a,b", "--host", "b", script)
    assert "ssh" not in here
    assert "--node-rank 1" in here
    (slurm,) = printed("--slurm", "--nodes", "4", script)
    assert slurm.startswith("srun --nodes 4 --ntasks-per-node 2 --kill-on-bad-exit=1 --quit-on-interrupt ")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert printed(script)[0].startswith("srun --ntasks-per-node 2 ")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["none.py"], "there is no script none.py"),
        (["--hosts", "a,a", models.__file__], "give each host once"),
        (["--hosts", "a,b", "--host", "c", models.__file__], "is not one of --hosts"),
        (["--nodes", "2", models.__file__], "not both"),
    ],
)
def test_wrong_use_of_launch_ends_with_2(arguments: list[str], why: str) -> None:
    found = run("launch", "--ranks", "1", *arguments)
    assert found.exit_code == 2
    assert why in " ".join(found.stderr.replace("│", " ").split())


@pytest.mark.parametrize(("arguments", "program"), [(["--slurm"], "srun"), (["--hosts", "a,b"], "ssh")])
def test_launch_without_the_program_that_starts_ranks_ends_with_2(
    arguments: list[str], program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = run("launch", "--ranks", "1", *arguments, models.__file__)
    assert found.exit_code == 2
    assert f"there is no {program} on PATH" in found.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_launch_ends_its_commands_if_it_is_told_to_stop(number: int) -> None:
    command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(300)"]
    program = f"import sys; from zerograph.cli.launch import _run; sys.exit(_run([{command!r}]))"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as launch:
        assert launch.stdout is not None
        child = int(launch.stdout.readline())
        launch.send_signal(number)
        assert launch.wait(60) == 128 + number
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_ranks_may_save_after_ctrl_c_in_a_terminal() -> None:
    rank = """
import time
try:
    print("runs", flush=True)
    time.sleep(300)
except KeyboardInterrupt:
    time.sleep(1)
    print("saved", flush=True)
"""
    program = f"""
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from zerograph.cli.launch import _run
_run([[{sys.executable!r}, "-c", {rank!r}]])
"""
    keyboard, terminal = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as launch:
        assert launch.stdout is not None
        assert launch.stdout.readline() == "runs\n"
        os.write(keyboard, b"\x03")
        printed, errors = launch.communicate(timeout=60)
    os.close(keyboard)
    os.close(terminal)
    assert printed == "saved\n"
    assert errors.endswith("KeyboardInterrupt\n")


def test_launch_ends_with_the_code_of_the_command_that_fails() -> None:
    from zerograph.cli.launch import _run

    began = time.monotonic()
    assert _run([[sys.executable, "-c", "raise SystemExit(3)"], ["sleep", "600"]]) == 3
    assert time.monotonic() - began < 500
    assert _run([["true"], ["true"]]) == 0


def test_a_shell_completes_commands_and_options() -> None:
    def completions(words: str) -> list[str]:
        variables = {"_ZEROGRAPH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return CliRunner().invoke(app, prog_name="zerograph", env=variables).stdout.split()

    assert completions("zerograph pl") == ["plan"]
    assert "--world-size" in completions("zerograph plan --w")
