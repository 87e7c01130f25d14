"""The benchmark's arithmetic, on measurements made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.contenders import CONTENDERS
from benchmarks.measure import pair
from benchmarks.readme import peers_table
from benchmarks.report.goals import Verdict, verdicts
from benchmarks.report.markdown import page
from benchmarks.report.rows import Row, best_peer, disagreements, floor, median, process_growth, ratio, rows


def timed(contender: str, *seconds: float, number: int = 1, first: float = 9.0, losses: Any = (2.0,)) -> dict[str, Any]:
    """A round of two ranks, each of which took ``seconds``."""
    rank = {"losses": list(losses), "first_step": first, "seconds": list(seconds)}
    return {"task": "mid", "contender": contender, "kind": "time", "round": number, "ranks": [rank, rank]}


def weighed(contender: str, growth: int) -> dict[str, Any]:
    rank = {"losses": [2.0], "first_step": 9.0, "process_growth": growth, "tensor_growth": 3, "state": 5, "sent": 7}
    return {"task": "mid", "contender": contender, "kind": "memory", "round": 1, "ranks": [rank, rank]}


def failed(contender: str) -> dict[str, Any]:
    return {"task": "mid", "contender": contender, "kind": "time", "round": 2, "failed": "rank 0 ended"}


def verdict(found: list[Verdict], goal: str) -> Verdict:
    return next(one for one in found if one.goal.startswith(goal))


def test_median_goes_over_all_rounds_and_ranks() -> None:
    table = rows([timed("ddp", 1.0, 2.0, 9.0), timed("ddp", 3.0, 3.0, 4.0, number=2)], "mid")
    assert table["ddp"].median == 3.0
    assert table["ddp"].quartiles == (2.0, 4.0)


def test_first_round_starts_cold_and_later_ones_warm() -> None:
    starts = {1: 50.0, 2: 8.0, 3: 10.0}
    row = rows([timed("ddp", 1.0, number=k, first=s) for k, s in starts.items()], "mid")["ddp"]
    assert (row.first_cold, row.first_warm) == (50.0, 9.0)


def test_memory_is_that_of_the_largest_rank() -> None:
    one = weighed("ddp", 10)
    one["ranks"][1] = one["ranks"][1] | {"process_growth": 30}
    assert rows([one], "mid")["ddp"].process_growth == 30


def test_losses_are_means_over_the_ranks() -> None:
    one = timed("ddp", 1.0)
    one["ranks"] = [one["ranks"][0] | {"losses": [1.0, 2.0]}, one["ranks"][1] | {"losses": [3.0, 2.0]}]
    assert rows([one], "mid")["ddp"].losses == (2.0, 2.0)


def test_floor_is_the_fastest_pair_never_a_single_process() -> None:
    measured = [timed("alone-1", 0.1), timed("alone-2", 1.0), timed("alone-2-compiled", 0.8), timed("ddp", 0.5)]
    found = floor(rows(measured, "mid"))
    assert found is not None
    assert found.contender.name == "alone-2-compiled"


def test_best_peer_is_of_the_stage_not_ours_and_without_a_problem() -> None:
    measured = [timed("fsdp2", 3.0), timed("deepspeed-3", 1.0), timed("zerograph-3", 2.0), timed("fsdp2-kept", 1.5)]
    found = best_peer(rows([*measured, failed("deepspeed-3")], "mid"), "3", median)
    assert found is not None
    assert found.contender.name == "fsdp2"


def test_lowest_peer_is_chosen_by_memory_and_not_by_time() -> None:
    measured = [timed("fsdp2", 1.0), weighed("fsdp2", 90), timed("deepspeed-3", 2.0), weighed("deepspeed-3", 80)]
    found = best_peer(rows(measured, "mid"), "3", process_growth)
    assert found is not None
    assert found.contender.name == "deepspeed-3"


@pytest.mark.parametrize(("value", "base", "expected"), [(3.0, 2.0, 1.5), (None, 2.0, None), (3.0, None, None)])
def test_ratio_needs_both_numbers(value: float | None, base: float | None, expected: float | None) -> None:
    assert ratio(value, base) == expected


def test_a_loss_further_than_the_tolerance_from_the_others_is_told() -> None:
    near, far, none = 2.00009, 2.0002, float("nan")
    measured = [timed(name, 1.0) for name in ("ddp", "fsdp2", "fsdp2-kept", "zerograph-2")]
    measured += [timed(name, 1.0, losses=(x,)) for name, x in (("ddp-static", near), ("fairscale", far))]
    measured += [timed("zerograph-3", 1.0, losses=(none,))]
    assert set(disagreements(rows(measured, "mid"))) == {"fairscale", "zerograph-3"}


def test_who_exchanges_nothing_needs_to_agree_on_the_first_loss_only() -> None:
    measured = [timed("ddp", 1.0, losses=(2.0, 1.0)), timed("fsdp2", 1.0, losses=(2.0, 1.0))]
    measured += [timed("alone-2", 1.0, losses=(2.0, 0.5)), timed("alone-1", 1.0, losses=(3.0, 0.5))]
    assert disagreements(rows(measured, "mid")) == {}
    assert list(disagreements(rows([*measured, timed("zerograph-2", 1.0, losses=(2.0, 0.5))], "mid"))) == [
        "zerograph-2"
    ]


def test_times_are_judged_by_the_better_backend() -> None:
    measured = [
        timed("alone-2", 1.0),
        timed("fsdp2", 1.8),
        timed("zerograph-3", 1.3),
        timed("zerograph-3-inductor", 1.2),
    ]
    found = verdicts({"mid": rows(measured, "mid")})
    over_floor, over_peer = verdict(found, "stage 3: step time"), verdict(found, "stage 3: times as fast")
    assert over_floor.value == pytest.approx(1.2)
    assert over_floor.met is True  # at most 1.22
    assert over_peer.value == pytest.approx(1.5)
    assert over_peer.met is True  # at least 1.40
    assert over_peer.floor == pytest.approx(1.8)
    assert verdict(found, "stage 3: eager").value == pytest.approx(1.8 / 1.3)


def test_memory_is_judged_against_the_lowest_peer() -> None:
    table = rows([weighed("zero-redundancy", 100), weighed("fairscale", 90), weighed("zerograph-1", 80)], "mid")
    found = verdict(verdicts({"mid": table}), "stage 1: peak memory")
    assert found.value == pytest.approx(80 / 90)
    assert found.met is False  # at most 0.80


def test_starts_are_judged_against_a_cold_start_of_plain_torch_compile() -> None:
    measured = [timed("alone-2-compiled-both", 1.0, first=40.0)]
    measured += [timed("zerograph-2-inductor", 1.0, number=k, first=s) for k, s in ((1, 30.0), (2, 12.0))]
    found = verdicts({"mid": rows(measured, "mid")})
    assert [(one.value, one.met) for one in found if one.goal.startswith("stage 2: first step")] == [
        (0.75, True),
        (0.3, False),
    ]


def test_a_goal_whose_contenders_are_missing_is_neither_met_nor_missed() -> None:
    found = verdicts({"mid": rows([timed("zerograph-1", 1.0)], "mid")})
    assert {one.met for one in found} == {None}


def test_page_names_what_failed_and_what_was_missed() -> None:
    table = rows([timed("alone-2", 1.0), timed("zerograph-1", 2.0), failed("ddp")], "mid")
    text = page({"date": "today"}, {"mid": "a GPT"}, {"mid": table}, ())
    assert "- DDP: failed: rank 0 ended" in text
    assert "| mid | stage 1: step time / compute floor | at most 1.15 | 2.000 | **missed** |" in text


def test_row_of_a_contender_that_is_not_installed_has_a_reason_and_no_numbers() -> None:
    reason = {"task": "mid", "contender": "fairscale", "kind": "time", "round": 1, "skipped": "no module"}
    row = rows([reason], "mid")["fairscale"]
    assert row == Row(row.contender, problem="skipped: no module")


def test_ours_over_sockets_has_a_row_beside_ours_and_no_goal(tmp_path: Path) -> None:
    names = ("alone-2", "fsdp2", "zerograph-3", "zerograph-3-sockets")
    measured = [timed(name, seconds) for name, seconds in zip(names, (1.0, 3.0, 2.0, 1.5), strict=True)]
    run = {"about": {"commit": "abc1234", "date": "2026-11-26 12:00", "measured": "2 rounds"}, "measurements": measured}
    (tmp_path / "peers.json").write_text(json.dumps(run))
    (tmp_path / "peers.md").write_text("# Peers\n")
    table = peers_table(tmp_path / "peers.json")
    assert "| 3 | zerograph 3, eager | 2000.0 | 2.000 |" in table
    assert "| 3 | zerograph 3, eager, sockets | 1500.0 | 1.500 |" in table
    assert "commit abc1234, 2026-11-26; 2 rounds" in table
    goal = verdict(verdicts({"mid": rows(measured, "mid")}), "stage 3: times as fast as the best peer")
    assert goal.value == pytest.approx(1.5)


def test_ours_over_sockets_is_started_with_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables: dict[str, str | None] = {}

    def start(command: list[str], env: dict[str, str], **_: Any) -> None:
        variables[command[3]] = env.get("ZEROGRAPH_WIRE")
        raise OSError("started")

    monkeypatch.setattr(pair, "subprocess", SimpleNamespace(Popen=start))
    for name in ("zerograph-3-sockets", "zerograph-3"):
        with pytest.raises(OSError, match="started"):
            pair.measure(CONTENDERS[name], "tiny", "time", 1, tmp_path, 1.0)
    assert variables == {"zerograph-3-sockets": "sockets", "zerograph-3": None}
