"""Steps that are measured."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import needs_compiler, sliced
from tests.inspection.models import Step
from tests.pool import Pool
from zerograph.errors import ConfigError


def profiled_with(folder: str, backend: str, micro_batches: int, stage: int) -> dict[str, Any]:
    step, plain = Step(stage=stage, device="cpu"), Step(stage=stage, device="cpu")
    # As many rows as make a chain of operators worth compiling.
    x = torch.ones(512 * micro_batches, 16)
    for one in (step, plain):
        one.config.backend, one.config.gradient_accumulation_steps = backend, micro_batches
        one(x)
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
        "equal": torch.equal(step(x), plain(x)),
        "flights": [(one.collective.node, one.collective.kind, one.collective.what) for one in trace.flights],
        "collectives": [(one.node, one.kind, one.what) for one in step.inspect.collectives()],
        "in flight": [one.seconds >= one.waited >= 0 and one.start >= 0 for one in trace.flights],
    }


@sliced(
    "backend, micro_batches, stage",
    [("eager", 2, 3)],
    [
        ("eager", 4, 2),
        pytest.param("inductor", 1, 3, marks=needs_compiler),
        pytest.param("inductor", 2, 3, marks=needs_compiler),
    ],
)
def test_nodes_and_collectives_are_named_whatever_the_backend_and_in_every_micro_batch(
    pool: Pool, tmp_path: Path, backend: str, micro_batches: int, stage: int
) -> None:
    for rank, seen in enumerate(pool.run(2, profiled_with, str(tmp_path), backend, micro_batches, stage)):
        assert seen["path"].endswith(f"trace.rank{rank}.json")
        # The steps are steps as any.
        assert seen["steps"] == (2, 3)
        assert seen["equal"]
        assert sorted(seen["flights"]) == sorted(seen["collectives"] * 2)
        assert all(seen["in flight"])
        times = Counter((kind, what) for _, kind, what in seen["flights"])
        # Twice, in two steps: stage 3 gathers for each micro-batch forward and backward, stage 2 once for all.
        assert times["all-gather", "bucket1"] == 2 * (1 if stage == 2 else 2 * micro_batches)
        assert times["reduce-scatter", "gradient of bucket1"] == 2 * micro_batches
        assert f"{micro_batches} reduce-scatter of gradient of bucket1, " in seen["text"]
        events = json.loads(Path(seen["path"]).read_text())["traceEvents"]
        begun = [event for event in events if event.get("cat") == "collective" and event["ph"] == "b"]
        assert any("model.first.weight" in event["args"]["parameters"] for event in begun)
        assert Counter(event["name"] for event in begun) == {
            f"{kind} of {what}": count for (kind, what), count in times.items()
        }
        spans = Counter(str(event["name"]) for event in events if event.get("cat") == "user_annotation")
        assert backend == "inductor" or any(name.startswith("model.blocks.0.up:addmm") for name in spans)
        norms = {name: count for name, count in spans.items() if "model.blocks.1.norm:native_layer_norm_1" in name}
        # Under the name of what ran: the operator, or what it was compiled into, and nothing beside that.
        assert list(norms.values()) == [2 * micro_batches]
        assert all(name.startswith("compiled: ") == (backend == "inductor") for name in norms)
