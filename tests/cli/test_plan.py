"""``zerograph plan``: what it prints for people and for machines, and what it ends with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

import zerograph as zg
from tests.pool import Pool
from zerograph.__main__ import app
from zerograph.base.sizes import in_bytes, show_seconds

SCRIPT = """
import torch
import zerograph as zg

class Step(zg.ZeroGraph):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(64, 64)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

def planned():
    return Step(), torch.zeros(8, 64)

def low():
    step = Step()
    step.config.enable_amp(dtype=torch.bfloat16)
    return step, torch.zeros(8, 64)

def offloaded():
    step, x = planned()
    step.config.memory.offload = zg.Offload(activations=True)
    return step, x

def narrow():
    step = Step()
    step.model.bfloat16()
    return step, torch.zeros(8, 64, dtype=torch.bfloat16)

def tokens():
    step = Step()
    step.model = torch.nn.Sequential(torch.nn.Embedding(50, 64), step.model)
    return step, torch.zeros(8, 16, dtype=torch.int64)

def a_part():
    return torch.zeros(8, 64)

a_step = Step()

def misshapen():
    return Step(), torch.zeros(8, 63)

def listed():
    return Step(), [torch.zeros(8, 64)]

def broken(graph, context):
    raise KeyError("none")

def with_a_pass():
    step = Step()
    step.config.passes = (zg.PassEdit.after("simplify", broken),)
    return step, torch.zeros(8, 64)

def wrong():
    return 7

if __name__ == "__main__":
    raise AssertionError("run")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script_of_a_plan.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output


def test_a_plan_of_a_script(script: str, tmp_path: Path) -> None:
    code, shown = run(f"{script}:planned", "--world-size", "4", "--stage", "3", "--plot", str(tmp_path / "p.png"))
    assert code == 0, shown
    assert "4,160 parameters on 4 ranks" in shown
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_for_machines(script: str) -> None:
    code, shown = run(f"{script}:planned", "--world-size", "2,4", "--stage", "2", "--json")
    plans = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
    assert code == 0
    assert [plan["world_size"] for plan in plans] == [2, 4]


def test_what_does_not_fit_ends_with_1(script: str) -> None:
    assert run(f"{script}:planned", "--stage", "auto", "--fit", "1KiB")[0] == 1
    assert run("--params", "7.5e9", "--fit", "1GiB")[0] == 1


def test_what_does_not_fit_says_what_would_help_as_a_budget_does(script: str) -> None:
    shown = " ".join(run(f"{script}:planned", "--stage", "2", "--fit", "1KiB", "--headroom", "0")[1].split())
    assert "What would help: a smaller batch" in shown or "more ranks, which share them (parameters" in shown, shown
    assert "ZeRO stage 3, which gathers them layer by layer" in shown
    assert "What would help" not in run(f"{script}:planned", "--stage", "2")[1]


def numbers(*arguments: str) -> dict[str, Any]:
    code, shown = run(*arguments, "--world-size", "2", "--stage", "2", "--json")
    assert code == 0, shown
    plan: dict[str, Any] = json.loads(next(line for line in shown.splitlines() if line.startswith("{")))
    return plan


def test_one_script_has_one_precision(script: str) -> None:
    """Commands and ``zg.plan`` take that of the script, say it, and give the same answer for the same step."""
    plain, low = numbers(f"{script}:planned"), numbers(f"{script}:low")
    assert (plain["precision"], low["precision"]) == ("fp32", "bf16 with fp32 masters")
    names: dict[str, Any] = {"__name__": "script"}
    exec(SCRIPT, names)
    for name, by_command in (("planned", plain), ("low", low)):
        by_call = zg.plan(*names[name](), world_size=2, stage=2)
        assert by_call.time.seconds == by_command["seconds"]["step"]
        assert by_call.precision == by_command["precision"]
    asked = CliRunner().invoke(app, ["inspect", f"{script}:low", "--json"])
    assert json.loads(asked.stdout)["precision"] == "bf16 with fp32 masters"
    assert "in fp32: stage=" in CliRunner().invoke(app, ["inspect", f"{script}:planned"]).stdout
    assert "each on h100, in fp32" in run(f"{script}:planned", "--stage", "2")[1]


def test_a_precision_may_be_another_than_the_scripts(script: str) -> None:
    low = numbers(f"{script}:low")["seconds"]["step"]
    assert numbers(f"{script}:planned", "--precision", "bf16")["seconds"]["step"] == low
    assert numbers(f"{script}:low", "--precision", "fp32")["precision"] == "fp32"
    assert numbers(f"{script}:planned", "--precision", "fp16")["precision"] == "fp16 with fp32 masters"
    text = CliRunner().invoke(app, ["inspect", f"{script}:planned", "--precision", "bf16", "--text"]).stdout
    assert "bf16" in text
    differ = CliRunner().invoke(app, ["diff", f"{script}:planned", "--stages", "2,2", "--precision", "fp16"])
    assert differ.exit_code == 0
    code, shown = run(f"{script}:narrow", "--precision", "fp32")
    assert code == 2
    assert "has parameters in torch.bfloat16" in shown


def test_an_option_may_have_another_value_than_the_scripts(script: str) -> None:
    by_set = ("--set", "gradient_accumulation_steps=2", "--set", "reduce_dtype=torch.bfloat16")
    options = numbers(f"{script}:planned", *by_set)["options"]
    assert options.endswith("reduce_dtype=torch.bfloat16, gradient_accumulation_steps=2, backend=inductor")
    assert numbers(f"{script}:planned", "--micro-batches", "2", "--compress")["options"] == options
    # A part of offload: the script's other parts stay.
    for given in (("--offload",), ("--set", "memory.offload.optimizer=cpu")):
        options = numbers(f"{script}:offloaded", *given)["options"]
        assert re.search(r"optimizer=OffloadTo\(device='cpu'.*activations=True", options)


@pytest.mark.parametrize(
    ("command", "text", "said"),
    [
        ("plan", "bucket_sice=1", "there is no option 'bucket_sice'; did you mean 'bucket_size'"),
        ("inspect", "bucket_size=no", "bucket_size = 'no': "),
        ("plan", "bucket_size", "--set bucket_size: give OPTION=VALUE, such as seed=1"),
        ("inspect", "offload.gradients=cpu", "offload has optimizer, parameters, activations"),
        ("diff", "offload.optimizer=gpu", "offload to 'gpu': unknown device"),
        ("plan", "zero.seed=1", "--set zero.seed=1: the option is config.seed"),
        ("plan", "zero.offload.optimizer=cpu", "the option is config.memory.offload"),
        ("plan", "offload=cpu", "offload has optimizer, parameters, activations"),
        ("plan", "backend=torch.save", "unknown backend"),
        ("plan", "seed={[]: 1}", "seed = '{[]: 1}': give a whole number"),
    ],
)
def test_an_option_that_cannot_be_set_is_told(script: str, command: str, text: str, said: str) -> None:
    more = ("--stages", "2,3") if command == "diff" else ()
    found = CliRunner().invoke(app, [command, f"{script}:planned", "--set", text, *more])
    assert (found.exit_code, said in found.stderr) == (2, True), found.stderr


def test_a_graph_of_the_script_takes_inputs_by_name(script: str) -> None:
    code, shown = run(f"{script}:a_step", "--stage", "2")
    assert code == 2
    assert "--inputs NAME" in shown
    assert numbers(f"{script}:a_step", "--inputs", "a_part") == numbers(f"{script}:planned") | {"compile_seconds": ANY}


def test_a_plan_leaves_headroom_and_says_so(script: str) -> None:
    """Context, NCCL and fragmentation take 8 % of an accelerator's memory, and at least 2 GiB."""
    for fit, left in (("80GiB", 80 * 0.08), ("10GiB", 2)):
        plan = numbers(f"{script}:planned", "--fit", fit)
        assert plan["headroom"] == pytest.approx(left * 2**30, abs=1)
    assert "fits into 73.6 GiB (80.0 GiB less a headroom of 6.4 GiB)" in run(f"{script}:planned", "--fit", "80GiB")[1]
    assert numbers(f"{script}:planned", "--device", "cpu")["headroom"] == 0
    peak = numbers(f"{script}:planned")["peak"]["bytes"]
    needed = peak + 2 * 2**30
    options = (f"{script}:planned", "--world-size", "2", "--stage", "2", "--fit")
    assert run(*options, str(needed))[0] == 0
    assert run(*options, str(needed - 1))[0] == 1
    assert run(*options, f"{peak}B", "--headroom", "0")[0] == 0
    assert run(*options, f"{peak - 1}B", "--headroom", "0")[0] == 1


def test_a_plan_says_how_fast_a_device_is(script: str) -> None:
    plan = numbers(f"{script}:tokens")
    step = plan["seconds"]["step"]
    assert (plan["samples"], plan["tokens"]) == (8, 8 * 16)
    assert plan["tokens_per_second"] == 128 / step
    # One product forward and one for the weight's gradient: the table is not trained.
    assert plan["mfu"] == pytest.approx(2 * 2 * 128 * 64 * 64 / step / 67e12)
    assert numbers(f"{script}:planned")["tokens"] is None
    shown = run(f"{script}:tokens", "--stage", "2", "--world-size", "2")[1]
    assert re.search(r"each device: [\d,]+ tokens/s, [\d.e-]+ Tflop/s in products, MFU [\d.]+%", shown)
    assert re.search(r"together +[\d.]+ (us|ms)", shown)
    assert re.search(r"each device: [\d,]+ samples/s", run(f"{script}:planned", "--stage", "2")[1])


def test_plans_of_several_lengths_are_drawn_and_the_longest_one_is_said(script: str, tmp_path: Path) -> None:
    options = (f"{script}:tokens", "--world-size", "4", "--stage", "2", "--context-parallel", "2", "--headroom", "0")
    picture = tmp_path / "lengths.svg"
    code, shown = run(*options, "--length", "32,64", "--plot", str(picture), "--json")
    plans = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
    assert (code, [plan["length"] for plan in plans]) == (0, [32, 64])
    assert picture.exists()
    code, shown = run(*options, "--longest", "--fit", f"{plans[1]['peak']['bytes']}B")
    assert code == 0
    assert "sequences of 64 positions; 66 do not fit" in shown
    assert run(*options, "--longest", "--length", "32")[0] == 2
    assert run(*options, "--length", "many")[0] == 2


def test_times_have_a_unit_that_is_read_easily() -> None:
    shown = {2.0: "2,000 ms", 0.0123: "12.3 ms", 4.56e-5: "45.6 us", 3.04e-8: "< 0.1 us", 0.0: "0 us"}
    assert {seconds: show_seconds(seconds) for seconds in shown} == shown


def inspected(script: Path) -> tuple[int, str]:
    """Return the exit code and what is said beside the answer."""
    dist.destroy_process_group()
    found = CliRunner().invoke(app, ["inspect", f"{script}:planned", "--json"])
    return found.exit_code, found.stderr


def test_a_script_whose_loop_ran_says_so(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "unguarded.py"
    path.write_text(SCRIPT.partition("if __name__")[0] + "for _ in range(3):\n    a_step(torch.zeros(8, 64))\n")
    ((code, said),) = pool.run_afresh(1, inspected, path)
    assert code == 0, said
    assert "unguarded.py: Step ran 3 times while the script was imported\nPut the loop under: if __name__" in said


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--params", "1e9", "--world-size", "eight"],
        ["--params", "1e9", "--fit", "much"],
        ["--params", "-1"],
        ["--params", "nan"],
        ["--params", "inf"],
        ["--params", "1e9", "--recompute", "blocks"],
        ["--params", "1e9", "--micro-batches", "4", "--offload"],
        ["nowhere.py:planned"],
    ],
)
def test_wrong_use_ends_with_2(arguments: list[str]) -> None:
    assert run(*arguments)[0] == 2


@pytest.mark.parametrize("command", ["plan", "inspect"])
@pytest.mark.parametrize(("step", "why"), [("misshapen", "RuntimeError: "), ("listed", "TypeError: linear()")])
def test_a_build_that_fails_is_told_with_its_line(script: str, command: str, step: str, why: str) -> None:
    found = CliRunner().invoke(app, [command, f"{script}:{step}"])
    assert found.exit_code == 2
    # Lines of progress are before it where a command takes long.
    told = found.stderr[found.stderr.index("Step failed") :]
    assert told.startswith(f"Step failed while it was traced: {why}")
    assert told.endswith("script_of_a_plan.py:12   loss = self.model(x).square().mean()\n")
    assert len(told.splitlines()) == 2


@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_a_pass_that_fails_is_named_with_its_graph(script: str, command: str) -> None:
    found = CliRunner().invoke(app, [command, f"{script}:with_a_pass", "--world-size", "2"])
    assert found.exit_code == 2
    assert 'raise KeyError("none")\n' in found.stderr
    assert "the pass broken failed, on the graph after simplify (" in found.stderr


def test_a_search_that_finds_nothing_says_why(script: str) -> None:
    arguments = [f"{script}:planned", "--world-size", "2", "--stage", "auto", "--fit", "1KiB", "--recompute", "blocks"]
    found = CliRunner().invoke(app, ["plan", *arguments])
    assert found.exit_code == 2
    assert (
        "can be compiled: cannot be compiled: config.memory.activation_checkpointing = 'blocks', but the"
        in found.stderr
    )


def test_a_bug_is_no_answer(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerograph.planner.plan.profile", None)
    found = CliRunner().invoke(app, ["plan", f"{script}:planned"])
    assert found.exit_code == 2
    assert "Traceback" in found.stderr


def test_a_name_that_is_no_step(script: str) -> None:
    code, shown = run(f"{script}:wrong")
    assert code == 2
    assert "(step, inputs)" in shown
    code, shown = run(f"{script}:plan")
    assert code == 2
    assert "planned" in shown


def test_the_closed_form() -> None:
    code, shown = run("--params", "7.5e9", "--world-size", "1,4,16,64,256,1024")
    row = next(line for line in shown.splitlines() if line.split()[:1] == ["64"])
    assert row.split() == ["64", "120", "31.4", "16.6", "1.88"]
    assert code == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [("80Gb", 80 * 10**9), ("80g", 80 * 10**9), ("40GiB", 40 * 2**30), ("40gi", 40 * 2**30), ("7", 7), ("80XB", None)],
)
def test_sizes_are_read_in_any_case(text: str, size: int | None) -> None:
    assert in_bytes(text) == size


def test_a_limit_without_a_unit_is_refused_and_counts_have_units() -> None:
    result = CliRunner().invoke(app, ["plan", "--params", "8b", "--fit", "80"])
    assert result.exit_code == 2
    assert "is 80 bytes: give a unit, 80GB" in " ".join(result.output.replace("│", "").split())
    result = CliRunner().invoke(app, ["plan", "--params", "8B", "--fit", "80gb", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.output)[0]["bytes"]["off"] == 128e9
