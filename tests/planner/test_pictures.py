"""Pictures of plans show the plans' numbers: bars are as high, and spans as long, as the plan says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import zerograph as zg
from tests.cli.test_plan import run
from tests.inspection import models
from zerograph.base.palette import ACTIVITIES
from zerograph.inspection.report.page import render
from zerograph.planner import pictures
from zerograph.planner.machine import machine

SCRIPT = f"{models.__file__}:example"
STAGES = ["off", "stage 1", "stage 2", "stage 3"]


def lines_of_json(shown: str) -> list[str]:
    """Return the plans in what a command printed, without its progress."""
    return [line for line in shown.splitlines() if line.startswith("{")]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """By file name, the pictures that a command draws."""
    found: dict[str, Figure] = {}
    save = Figure.savefig

    def savefig(self: Figure, path: Path, **options: Any) -> None:
        found[Path(path).name] = self
        save(self, path, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return found


def heights(axes: Axes) -> dict[str, dict[str, float]]:
    """By the label below the bar, the height of each kind."""
    below = [label.get_text() for label in axes.get_xticklabels()]
    found: dict[str, dict[str, float]] = {name: {} for name in below}
    for bars in axes.containers:
        for name, bar in zip(below, bars, strict=True):
            found[name][str(bars.get_label())] = bar.get_height()
    return found


def test_the_report_and_the_timeline_have_one_palette() -> None:
    style = render("", "").split("<style>")[1].split("</style>")[0]
    for activity, colour in pictures.COLOURS.items():
        variable = re.escape(activity.replace(" ", "-"))
        # On white; on black in a choice and in a media query.
        values = re.findall(rf"--{variable}: (#\w+);", style)
        assert values == [colour, *[ACTIVITIES[activity][1]] * 2]


def lengths(axes: Axes) -> dict[str, float]:
    """By what it is, the length of all spans together, in the axis's unit."""
    return {
        str(spans.get_label()): sum(path.get_extents().width for path in spans.get_paths())
        for spans in axes.collections
        if str(spans.get_label()) in pictures.COLOURS
    }


def test_bars_are_as_high_as_the_plans_say(tmp_path: Path, kept: dict[str, Figure]) -> None:
    options = ("--world-size", "4", "--stage", "off,1,2,3", "--json")
    code, shown = run(SCRIPT, *options, "--memory", str(tmp_path / "memory.png"))
    assert code == 0, shown
    plans = {plan["stage"]: plan for plan in map(json.loads, lines_of_json(shown))}
    assert list(plans) == STAGES
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    together, apart = kept["memory.png"].axes
    for axes, numbers in ((together, lambda plan: plan["peak"]["kinds"]), (apart, lambda plan: plan["most"])):
        drawn = heights(axes)
        assert list(drawn) == STAGES
        for stage, plan in plans.items():
            expected = numbers(plan)
            for kind in ("parameters", "gathered", "gradients", "optimizer state", "activations"):
                assert drawn[stage][kind] * 2**30 == pytest.approx(expected.get(kind, 0)), (stage, kind)
            assert sum(drawn[stage].values()) * 2**30 == pytest.approx(sum(expected.values()))
    for stage, of in heights(together).items():
        assert sum(of.values()) * 2**30 == pytest.approx(plans[stage]["peak"]["bytes"])


def test_spans_are_as_long_as_the_plans_say(tmp_path: Path, kept: dict[str, Figure]) -> None:
    options = ("--world-size", "16", "--stage", "off,1,2,3", "--json")
    code, shown = run(SCRIPT, *options, "--timeline", str(tmp_path / "timeline.svg"))
    assert code == 0, shown
    plans = [json.loads(line) for line in lines_of_json(shown)]
    assert "<svg" in (tmp_path / "timeline.svg").read_text()
    rows = kept["timeline.svg"].axes
    assert len(rows) == 4
    assert rows[-1].get_xlabel() == "\N{MICRO SIGN}s"
    for plan, axes in zip(plans, rows, strict=True):
        seconds, drawn = plan["seconds"], {what: length / 1e6 for what, length in lengths(axes).items()}
        computing = sum(
            drawn.get(what, 0.0) for what in ("forward", "backward", "update", "recompute", pictures.CARRYING)
        )
        assert computing == pytest.approx(seconds["compute"])
        assert drawn.get("waiting", 0.0) == pytest.approx(seconds["exposed"])
        sent = sum(drawn.get(what, 0.0) for what in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all"))
        assert sent == pytest.approx(seconds["communication"])
        # What stage 3 says of itself: parameters are gathered, gradients reduced to shards.
        assert ("all-gather" in drawn) == ("reduce-scatter" in drawn) == (plan["stage"] != "off")
        assert plan["stage"] in axes.get_title(loc="left")


def planned(micro_batches: int, overlap: float = 1.0) -> zg.Plan:
    described = replace(machine("h100"), overlap=overlap)
    x = torch.empty(8, 16, device="meta")
    options: dict[str, Any] = {"gradient_accumulation_steps": micro_batches}
    return zg.plan(models.Step(layers=1), x, world_size=16, stage=3, device=described, **options)


def test_of_micro_batches_the_first_is_drawn_and_the_others_counted() -> None:
    plan = planned(4)
    drawn = pictures.timeline_figure([plan])
    (axes,) = drawn.axes
    assert [text.get_text() for text in axes.texts] == ["3 more micro-batches"]
    whole = sum(seconds for spans in pictures.spans(plan.time, "compute").values() for _, seconds in spans)
    inside = [event for event in plan.time.events if event.turn is not None and event.stream == "compute"]
    first = max(event.end for event in inside) - min(event.start for event in inside)
    # Three turns as long as the first are not among the spans.
    assert whole + 3 * first == pytest.approx(plan.time.seconds, rel=1e-3)


def test_what_carrying_collectives_takes_of_the_device_is_drawn() -> None:
    plan = planned(1, overlap=0.5)
    drawn = {what: sum(one for _, one in spans) for what, spans in pictures.spans(plan.time, "compute").items()}
    assert drawn[pictures.CARRYING] == pytest.approx(plan.time.communication / 2)


def test_curves_have_a_line_for_each_stage() -> None:
    x = torch.empty(8, 16, device="meta")
    found = [
        zg.plan(models.Step(layers=1), x, mesh=mesh, stage=stage) for mesh in ((2,), (4,), (2, 2)) for stage in (2, 3)
    ]
    memory, _, efficiency = pictures.scaling_figure(found).axes
    assert set(heights(memory)) == {f"{ranks}\nstage {stage}" for ranks in ("2", "4", "2x2") for stage in (2, 3)}
    lines = {line.get_label(): list(map(int, line.get_xdata())) for line in efficiency.lines}  # type: ignore[arg-type]
    assert lines["stage 2, in a line"] == [2, 4]
    assert lines["stage 3, on a grid of nodes"] == [4]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([SCRIPT, "--memory", "memory.txt"], "not the name of a picture"),
        ([SCRIPT, "--timeline", "nowhere/timeline.png"], "nowhere is not a writable folder"),
        (["--params", "1e9", "--memory", "memory.png"], "give a script's step for --memory"),
        ([SCRIPT, "--precision", "int8"], "choose fp32, bf16, fp16"),
    ],
)
def test_a_picture_that_cannot_be_is_an_error_before_anything_is_compiled(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zerograph.cli.script.load", lambda *_, **__: pytest.fail("it was compiled"))
    code, shown = run(*arguments)
    assert code == 2
    assert said in " ".join(shown.replace("\u2502", " ").split())
    assert list(tmp_path.iterdir()) == []
