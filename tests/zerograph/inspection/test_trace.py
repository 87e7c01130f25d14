"""Steps that are measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.zerograph.inspection.models import Step
from zerograph.errors import ConfigError


def profiled(folder: str) -> dict[str, Any]:
    step, plain = Step(device="cpu"), Step(device="cpu")
    x = torch.ones(2, 16)
    for wrong in ({"steps": 0, "path": f"{folder}/trace.json"}, {"steps": 1, "path": f"{folder}/none/trace.json"}):
        with pytest.raises(ConfigError, match=r"profile\("):
            step.profile(wrong["steps"], x, path=wrong["path"])
    trace = step.profile(2, x, path=f"{folder}/trace.json")
    for _ in range(2):
        plain(x)
    return {
        "path": str(trace.path),
        "text": str(trace),
        "steps": (len(trace.seconds), step.steps_done),
        "flights": [one.collective.node for one in trace.flights],
        "collectives": [one.node for one in step.collectives()],
        "equal": torch.equal(step(x), plain(x)),
    }


def test_a_trace_names_nodes_and_collectives(pool: Pool, tmp_path: Path) -> None:
    for rank, seen in enumerate(pool.run(2, profiled, str(tmp_path))):
        assert seen["path"].endswith(f"trace.rank{rank}.json")
        assert seen["steps"] == (2, 2)
        # The steps are steps as any.
        assert seen["equal"]
        assert sorted(seen["flights"]) == sorted(seen["collectives"] * 2)
        events = json.loads(Path(seen["path"]).read_text())["traceEvents"]
        names = {event.get("name") for event in events}
        assert {"all-gather of bucket0", "reduce-scatter of gradient of bucket0"} <= names
        assert any(str(name).startswith("model.blocks.0.up:addmm") for name in names)
        begun = [event for event in events if event.get("cat") == "collective" and event["ph"] == "b"]
        assert len(begun) == 2 * len(seen["collectives"])
        assert "model.first.weight" in begun[2]["args"]["parameters"] or any(
            "model.first.weight" in event["args"]["parameters"] for event in begun
        )
        assert "all-gather of bucket0" in seen["text"]
