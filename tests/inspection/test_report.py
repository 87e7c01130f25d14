"""``step.inspect.report()``: what it says of a step is what the step is, and it says it with the passes' own graphs."""

from __future__ import annotations

import base64
import datetime
import gzip
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep, Predict
from tests.models import Gpt
from zerograph.base.source import relative_to_package
from zerograph.inspection import report
from zerograph.inspection.report.data import runs
from zerograph.inspection.step import Prepared
from zerograph.ir.memory import profile
from zerograph.ir.mesh import line

HOSTILE = "</script><script>alert(1)</script><!--"


class Hostile(nn.Module):
    """A module whose name a page must not believe."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(HOSTILE, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = getattr(self, HOSTILE)(x)
        return found


class TrainGpt(LossStep):
    def __init__(self, turns: int = 1, layers: int = 2, stage: int = 3) -> None:
        with torch.device("meta"):
            model = Gpt(tied=False, layers=layers)
        options = {"shard_min_size": 1, "bucket_size": 16384, "backend": "eager", "gradient_accumulation_steps": turns}
        super().__init__(model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage, token_loss, **options)


def token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


class Small(Predict):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, lambda model, x: model(x).sum(), backend="eager")


def prepared(turns: int, layers: int = 2, stage: int = 3) -> Prepared:
    tokens = torch.zeros(2 * turns, 12, dtype=torch.int64, device="meta")
    return TrainGpt(turns, layers, stage).prepare(line(4, 0, "ranks"), tokens, tokens)


def packed(page: Path) -> list[Any]:
    """Return the data of each step that is packed in a page."""
    found = re.search(r'<script id="data"[^>]*>([^<]*)</script>', page.read_text())
    assert found is not None
    return [json.loads(gzip.decompress(base64.b64decode(one))) for one in found[1].split()]


def read(page: Path) -> Any:
    (step,) = packed(page)
    return step


@pytest.fixture(scope="module", params=[1, 3], ids=["one batch", "micro-batches"])
def step(request: pytest.FixtureRequest) -> Prepared:
    return prepared(request.param)


@pytest.fixture(scope="module")
def data(step: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("report") / "step.html"
    report.write(step, path, title="TrainGpt", machine="h100")
    return read(path)


def orders(data: Any) -> list[list[int]]:
    """The records of each pass, from runs over the pass before."""
    found: list[list[int]] = []
    for one in data["passes"]:
        before = found[-1] if found else []
        pairs = zip(one["runs"][::2], one["runs"][1::2], strict=True)
        found.append(
            [before[start + at] if start >= 0 else -1 - start + at for start, count in pairs for at in range(count)]
        )
    return found


def names(data: Any, order: list[int]) -> list[str]:
    return [data["names"][data["records"]["name"][record]] for record in order]


def test_every_pass_has_the_nodes_of_its_graph_in_their_order(step: Prepared, data: Any) -> None:
    assert [one["name"] for one in data["passes"]] == [record.name for record in step.passes]
    for at, order in enumerate(orders(data)):
        if at in (0, 4, 7, len(step.passes) - 1):
            shown = [name for name in names(data, order) if "." not in name]
            nodes = [node.name for node in step.passes[at].graph.graph.nodes if node.op != "output"]
            assert shown == nodes, step.passes[at].name


def test_nodes_read_what_they_read_in_the_graph(step: Prepared, data: Any) -> None:
    records, order = data["records"], orders(data)[7]
    starts = [0]
    for count in records["reads"]:
        starts.append(starts[-1] + count)
    shown = {
        data["names"][records["name"][one]]: {
            data["names"][name] for name in records["inputs"][starts[one] : starts[one + 1]]
        }
        for one in order
    }
    graph = step.passes[7].graph.graph
    assert shown == {n.name: {one.name for one in n.all_input_nodes} for n in graph.nodes if n.op != "output"}


def test_memory_over_the_nodes_has_the_peak_of_the_profile(step: Prepared, data: Any) -> None:
    held = [0] * len(orders(data)[-1])
    for count, _, _, born, dies in zip(*data["held"], strict=True):
        for at in range(born, dies + 1):
            held[at] += count
    assert max(held) == data["peak"] == profile(step.graph.graph).peak


def test_every_collective_is_a_boxing_node_with_its_bytes(step: Prepared, data: Any) -> None:
    shown = sorted(
        tuple(data["boxings"][number][at] for at in (0, 4))
        for one in orders(data)[-1]
        if (number := data["records"]["boxing"][one]) >= 0
    )
    loop = next((node.meta["loop"] for node in step.graph.graph.nodes if "loop" in node.meta), None)
    graphs = [step.graph.graph] + ([] if loop is None else [loop.body.graph])
    found = [node.meta["boxing"] for graph in graphs for node in graph.nodes if "boxing" in node.meta]
    assert shown == sorted((one.kind, one.bytes) for one in found)


def test_modules_are_rows_in_the_order_in_which_forward_runs_them(data: Any) -> None:
    modules = [title for _, title, _, kind, _ in data["rows"] if kind == "module"]
    own = ["tokens", "positions", "blocks", "blocks.0", "blocks.1", "norm", "head"]
    inner = ["norm1", "qkv", "out", "norm2", "up", "down"]
    assert [one for one in modules if one.removeprefix("model.") in own] == [f"model.{one}" for one in own]
    first = [one.removeprefix("model.blocks.0.") for one in modules if one.startswith("model.blocks.0.")]
    assert first == inner


def test_no_two_nodes_of_a_cell_stand_in_one_place(data: Any) -> None:
    for flat in data["cells"]:
        places = list(zip(flat[::2], flat[1::2], strict=True))
        assert len(set(places)) == len(places)


def test_the_time_line_is_of_nodes_of_the_last_pass(data: Any) -> None:
    last = len(orders(data)[-1])
    assert data["time"]["machine"] == "h100"
    assert data["time"]["events"]
    assert all(0 <= node < last and length >= 0 for node, _, length, _, _ in data["time"]["events"])


def test_without_a_machine_there_is_no_time_line_and_a_page_needs_nothing_else(tmp_path: Path) -> None:
    step = Small(nn.Linear(4, 4)).prepare(line(2, 0, "ranks"), torch.ones(2, 4))
    report.write(step, tmp_path / "step.html", title="no time")
    assert read(tmp_path / "step.html")["time"] is None
    page = (tmp_path / "step.html").read_text()
    assert not re.search(r"""\b(src|href)\s*=\s*["']?\s*(https?:)?//""", page)
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_a_list_is_told_by_the_one_before() -> None:
    assert runs([5, 6, 7, 8], [5, 6, 7, 8]) == [0, 4]
    assert runs([5, 6, 7], [6, 7, 9, 10, 5]) == [1, 2, -10, 2, 0, 1]
    assert runs([], [0, 1, 2]) == [-1, 3]


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    step = Small(Hostile())
    mesh = line(2, 0, "ranks")
    report.write(step.prepare(mesh, torch.ones(2, 8)), tmp_path / "step.html", title=HOSTILE)
    page = (tmp_path / "step.html").read_text()
    assert HOSTILE not in page
    assert any(HOSTILE in title for _, title, *_ in read(tmp_path / "step.html")["rows"])


def test_a_compiled_step_writes_its_report(tmp_path: Path) -> None:
    step = Small(nn.Linear(4, 4))
    step.compile(torch.ones(2, 4))
    step.inspect.report(tmp_path / "step.html")
    found = read(tmp_path / "step.html")
    assert found["title"] == "Small"
    assert names(found, orders(found)[-1]) == [n.name for n in step.inspect.graph.graph.nodes if n.op != "output"]


def test_a_report_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Small(nn.Linear(4, 4)).prepare(line(2, 0, "ranks"), torch.ones(2, 4))

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("zerograph.inspection.report.collect", fail)
    (tmp_path / "old.html").write_text("old")
    for name in ("new.html", "old.html"):
        with pytest.raises(MemoryError):
            report.write(step, tmp_path / name, title="step")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("old.html", "old")]


@pytest.mark.parametrize(("path", "machine"), [("missing/step.html", None), (".", None), ("step.html", "abacus")])
def test_what_cannot_be_written_is_an_error_that_leaves_no_file(tmp_path: Path, path: str, machine: str | None) -> None:
    step = Small(nn.Linear(4, 4)).prepare(line(2, 0, "ranks"), torch.ones(2, 4))
    with pytest.raises(zg.ConfigError, match=r"cannot be written|there is no machine"):
        report.write(step, tmp_path / path, title="nowhere", machine=machine)
    assert not list(tmp_path.iterdir())


def facts(data: Any) -> dict[str, Any]:
    return {label: value for label, value, _ in data["facts"]}


def test_the_head_of_the_page_says_what_the_step_is(data: Any) -> None:
    head = facts(data)
    model = Gpt(tied=False)
    assert head["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert head["rank"] == "0"
    assert head["precision"] == "fp32"
    assert head["predicted peak"] == data["peak"]
    assert head["predicted step on h100"] == data["time"]["seconds"]


def test_the_head_names_mixed_precision_and_its_masters(tmp_path: Path) -> None:
    graph = TrainGpt()
    graph.config.enable_amp(True, dtype=torch.bfloat16)
    tokens = torch.zeros(2, 12, dtype=torch.int64, device="meta")
    report.write(graph.prepare(line(4, 0, "ranks"), tokens, tokens), tmp_path / "step.html", title="mixed")
    assert facts(read(tmp_path / "step.html"))["precision"] == "bf16 with fp32 masters"


def test_the_head_has_the_day_and_the_commit_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Small(nn.Linear(4, 4)).prepare(line(2, 0, "ranks"), torch.ones(2, 4))
    monkeypatch.chdir(tmp_path)
    # No repository of a folder around the temporary one either.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    report.write(step, "step.html", title="no repository")
    head = facts(read(Path("step.html")))
    assert "commit" not in head
    assert head["written"] == datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    identity = ("-c", "user.name=someone", "-c", "user.email=someone@example.com")
    for command in (("init", "-q"), (*identity, "commit", "-q", "--allow-empty", "-m", "a commit")):
        subprocess.run(["git", *command], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    report.write(step, "step.html", title="a repository")
    head = facts(read(Path("step.html")))
    assert commit.startswith(head["commit"])


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "/opt/venv/lib/python3.13/site-packages/transformers/loss/loss_utils.py:42",
            "transformers/loss/loss_utils.py:42",
        ),
        ("/usr/lib/python3/dist-packages/timm/models/vit.py:7", "timm/models/vit.py:7"),
        ("examples/train_gpt.py:31", "examples/train_gpt.py:31"),
        ("/srv/scripts/train.py:3", "train.py:3"),
        ("", ""),
    ],
)
def test_source_lines_are_named_from_their_package_on(line: str, shown: str) -> None:
    assert relative_to_package(line) == shown


def test_a_package_outside_of_site_packages_is_named_whole(tmp_path: Path) -> None:
    inner = tmp_path / "models" / "vision"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    assert relative_to_package(f"{inner}/vit.py:9") == "models/vision/vit.py:9"


def test_no_page_has_the_path_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in source lines nor in the names of outputs, which say where they are from."""
    installed = tmp_path / "site-packages" / "models_of_others"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text(
        "import torch\n"
        "class Mean(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner = torch.nn.Linear(8, 8)\n"
        "    def forward(self, x):\n"
        "        return self.inner(x).mean(0)\n"
    )
    monkeypatch.syspath_prepend(str(installed.parent))
    mean = importlib.import_module("models_of_others").Mean()
    monkeypatch.delitem(sys.modules, "models_of_others")
    report.write(Small(mean).prepare(line(2, 0, "ranks"), torch.ones(2, 8)), tmp_path / "step.html", title="installed")
    text = json.dumps(read(tmp_path / "step.html"))
    assert "models_of_others/__init__.py:7" in text
    assert "site-packages" not in text


def test_a_graph_writes_its_report_beside_another_step(tmp_path: Path) -> None:
    step = Small(nn.Linear(4, 4))
    step.compile(torch.ones(2, 4))
    step.inspect.report(tmp_path / "steps.html", beside=step.prepare(line(2, 0, "ranks"), torch.ones(2, 4)))
    assert [one["title"] for one in packed(tmp_path / "steps.html")] == ["Small, 1 rank", "Small, 2 ranks"]


def test_a_report_of_a_graph_that_is_not_compiled_or_beside_one_is_an_error(tmp_path: Path) -> None:
    step, other = Small(nn.Linear(4, 4)), Small(nn.Linear(4, 4))
    step.compile(torch.ones(2, 4))
    for one, beside in ((step, other), (other, None)):
        with pytest.raises(zg.ConfigError, match="call the graph, or compile"):
            one.inspect.report(tmp_path / "steps.html", beside=beside)
    assert not list(tmp_path.iterdir())


def test_the_head_has_the_planners_tokens_per_second_and_mfu(tmp_path: Path) -> None:
    tokens = torch.zeros(2, 12, dtype=torch.int64, device="meta")
    plan = zg.plan(TrainGpt(), (tokens, tokens), world_size=4, device="h100")
    report.write(plan.prepared, tmp_path / "step.html", title="planned", machine="h100")
    head = facts(read(tmp_path / "step.html"))
    assert plan.tokens_per_second is not None
    assert plan.mfu is not None
    assert head["tokens/s per device"] == pytest.approx(plan.tokens_per_second)
    assert head["MFU"] == pytest.approx(plan.mfu)
    assert head["precision"] == plan.precision
    assert head["parameters"] == plan.parameters
