"""The page of a run between two hosts, from measurements made by hand, and two hosts made on this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import benchmarks.hosts as bench
from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.measure.hosts import two_hosts, unavailable
from benchmarks.report.hosts import Setting, page, verdicts
from benchmarks.report.rows import rows
from tests.benchmarks import run_script
from tests.benchmarks.test_report import timed

ONE, TWO = Setting("mid", 1, "1gbit", 168_000_000), Setting("mid", 2, "1gbit", 168_000_000)
needs_hosts = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


def table(setting: Setting, ours: float, sent: int = 0) -> dict:
    measured = [timed("alone-2", 1.0), timed("ddp", 3.0), timed("zerograph-off", ours)]
    for one in measured:
        one["task"] = setting.name
        one["ranks"] = [rank | {"wire": sent} for rank in one["ranks"]]
    return rows(measured, setting.name)


def test_a_step_is_compared_with_the_slower_of_compute_and_wire() -> None:
    # Half of the gradients and half of the parameters leave a host: 168 MB, 1.344 seconds at 1 Gbit/s.
    assert ONE.wire("2") == pytest.approx(1.344)
    assert ONE.wire("3") == pytest.approx(2.016)
    met, missed = (next(iter(verdicts(ONE, table(ONE, ours)))) for ours in (1.5, 1.6))
    assert met.value == pytest.approx(1.5 / 1.344)
    assert (met.met, missed.met) == (True, False)


def test_two_ranks_of_a_host_send_half_of_the_flat_exchange() -> None:
    assert TWO.flat_sent("off") == 2 * TWO.least_sent("off")
    by_goal = {verdict.goal: verdict for verdict in verdicts(TWO, table(TWO, 1.5, sent=252_000_000))}
    assert by_goal["off: bytes that leave a host / of the flat exchange"].value == pytest.approx(0.75)


def test_the_page_names_goals_settings_and_bytes() -> None:
    text = page({"load": "0.1"}, {"mid": "GPT"}, {ONE: table(ONE, 1.5, sent=170_000_000)}, [])
    assert "## mid, 2 hosts of 1 rank, 1 Gbit/s" in text
    assert "| zerograph off, eager | off | 1500 | 1500 to 1500 |  |  | 1344 | 1.12 | 0.50 | 170.0 |  | 1.01 |" in text


def test_a_prediction_is_judged_both_ways() -> None:
    for predicted, met in ((1.4, True), (1.25, False), (1.8, False)):
        goals = verdicts(ONE, table(ONE, 1.5), {"zerograph-off": predicted})
        verdict = next(goal for goal in goals if "predicted" in goal.goal)
        assert verdict.value == pytest.approx(max(predicted / 1.5, 1.5 / predicted))
        assert verdict.met is met


def test_a_machine_that_does_other_work_judges_no_time() -> None:
    loaded = list(verdicts(TWO, table(TWO, 1.5, sent=1), quiet=False))
    assert [verdict.goal for verdict in loaded] == ["off: bytes that leave a host / of the flat exchange"]
    assert "its times say nothing" in page({}, {"mid": "GPT"}, {TWO: table(TWO, 1.5)}, [], quiet=False)


def test_a_run_that_was_cut_off_goes_on_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def measure(setting: Setting, contender: Contender, *rest: object) -> dict:
        started.append(contender.name)
        if contender.name == "ddp":
            return {"failed": "lost"}
        return {"ranks": [{"seconds": [1.0], "wire": 0, "losses": [1.0], "first_step": 1.0, "weight": 1}]}

    monkeypatch.setattr(bench, "_measured", measure)
    chosen = [CONTENDERS[name] for name in ("alone-2", "ddp", "zerograph-2", "zerograph-3-hpz")]
    run = {"measurements": [], "predicted": {}}
    plan = bench.Plan([ONE], chosen, chosen, 1, 3, predicts=True)
    for _ in bench.measured(run, plan, 1.0, deadline=-1.0):
        assert not started
    titles = [*(CONTENDERS[name].title for name in ("alone-2", "ddp", "zerograph-2")), "predictions"]
    assert run["missing"] == [f"{ONE.name}: {title}" for title in titles]
    monkeypatch.setattr(bench, "predictions", lambda *_: {"zerograph-2": 1.0})
    next(bench.measured(run, plan, 1.0, deadline=float("inf")))
    for _ in bench.measured(run, plan, 1.0, deadline=float("inf")):
        pass
    # hpZ is for several ranks on a host.
    assert started == ["alone-2", "ddp", "zerograph-2"]
    assert run["predicted"] == {ONE.name: {"zerograph-2": 1.0}}
    assert run["missing"] == []


def test_codes_are_judged_by_the_bytes_that_they_send() -> None:
    measured = [timed("alone-2", 1.0), timed("ddp", 3.0), timed("zerograph-3", 2.4), timed("zerograph-3-int8", 1.0)]
    for one in measured:
        one["task"] = ONE.name
    measured[-1]["ranks"] = [rank | {"listed": 63_000_000} for rank in measured[-1]["ranks"]]
    text = page({}, {"mid": "GPT"}, {ONE: rows(measured, ONE.name)}, [])
    # 63 MB take 504 ms, so computing is the limit; exact gathers and sums take 2016 ms.
    assert "| zerograph 3, int8 wire | 3 | 1000 | 1000 to 1000 |  |  | 504 | 1.00 |" in text
    assert "stage 3, int8 wire: times as fast as zerograph 3, eager | at least 2.20 | 2.400 | met" in text


@needs_hosts
def test_hosts_have_names_processes_and_a_wire_of_their_own_and_leave_nothing() -> None:
    with two_hosts("1gbit") as hosts:
        for host in hosts:
            script = "hostname; ip -o addr show eth0; tc qdisc show dev eth0"
            result = subprocess.run([*host.enter(), "sh", "-c", script], capture_output=True, text=True)
            assert result.stdout.startswith(f"{host.name}\n")
            assert f"{host.address}/24" in result.stdout
            assert "tbf" in result.stdout
            assert host.processes() == []
    assert not any(Path(f"/proc/{host.first}").exists() for host in hosts)


def test_who_may_not_make_hosts_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda program: program)
    assert not run_script.run("hosts.py", "--quick")
    assert "skipped: only root may make network namespaces" in capsys.readouterr().out


@pytest.mark.long
@needs_hosts
def test_the_bench_runs_between_two_hosts(tmp_path: Path) -> None:
    asked = ["--quick", "--settings", "2xnone", "--contenders", "alone-2", "--contenders", "zerograph-2"]
    assert not run_script.run("hosts.py", *asked, "--out", str(tmp_path / "run"))
    text = (tmp_path / "run.md").read_text()
    assert "zerograph 2, eager" in text
    assert "All losses agree" in text
    listed = next(line for line in text.splitlines() if "collectives() lists" in line)
    assert "| met |" in listed
