"""No code of a step's file runs, wherever it stands; a file that is written can be read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import zerograph as zg
from zerograph._torch import fake_mode, size_env
from zerograph.artifact.file import file_content, read_file, write_file
from zerograph.ir.dims import Dim, SizeGuard
from zerograph.ir.sizes import Sizes
from zerograph.ops.flex_attention import modification


class Step(zg.ZeroGraph):
    def __init__(self, kind: str = "both") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.model = kind, nn.Linear(8, 24)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=1e-2))

    def build(self, x: Tensor) -> Tensor:
        query, key, value = self.model(x).unflatten(2, (3, 1, 8)).permute(2, 0, 3, 1, 4)
        options: dict[str, Any] = {}
        if self.kind != "mask":
            options["score_mod"] = lambda score, b, h, i, j: score - (i - j)
        if self.kind != "score_mod":
            options["block_mask"] = create_block_mask(lambda b, h, i, j: i >= j, None, None, 6, 6, device="cpu")
        loss: Tensor = flex_attention(query, key, value, **options).square().mean()
        loss.backward()
        return loss


X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("steps") / "step.zg"
    step = Step()
    step.compile(X)
    step.export_compiled(path)
    return path


def calls(value: Any) -> list[dict[str, Any]]:
    """Return the nodes of FlexAttention, at any place of the document."""
    if isinstance(value, list):
        return [node for one in value for node in calls(one)]
    if not isinstance(value, dict):
        return []
    own = [value] if "flex_attention" in str(value.get("target")) else []
    return own + [node for one in value.values() for node in calls(one)]


def as_keyword(node: dict[str, Any], code: str) -> None:
    """Give the texts by name, with a statement before the function."""
    names = ["query", "key", "value", "captured", "axes", "score_mod", "mask_mod", "scale", "differentiable"]
    names = names[:8] if node["target"].endswith("flex_attention.default") else ["grad_out", "grad_lse", *names]
    first = names.index("score_mod")
    pairs = zip(names[first:], node["args"][first:], strict=True)
    texts = [[key, f"{code}\n{value}" if key == "score_mod" else value] for key, value in pairs]
    node["args"], node["kwargs"] = node["args"][:first], {"d": texts}


def in_text(old: str, new: str) -> Callable[[dict[str, Any], str], None]:
    def change(node: dict[str, Any], code: str) -> None:
        node["args"] = [one.replace(old, new.format(code)) if isinstance(one, str) else one for one in node["args"]]

    return change


WAYS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "a keyword": as_keyword,
    "an annotation": in_text("):", ", *more: {}):"),
    "an annotation of a keyword": in_text("):", ", *, more: {} = 1):"),
    "a default": in_text("):", ", more={}):"),
    "a decorator": in_text("def mod", "@{}\ndef mod"),
    "an argument": in_text("return ", "x = ops.aten.neg.default({}); return "),
    "a function of TorchScript": in_text("return ", "x = ops.aten.save.default(1, 'ran'); return "),
    "a file": in_text("return ", "x = ops.aten.from_file.default('ran'); return "),
    "an argument twice": lambda node, _: node.update(kwargs={"d": [["score_mod", "def mod(x): return x"]]}),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_text_of_a_file_runs(way: str, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document, tensors = read_file(exported)
    nodes = calls(document)
    assert len(nodes) >= 2
    for node in nodes:
        WAYS[way](node, "open('ran', 'w')")
    changed = tmp_path / "changed.zg"
    write_file(changed, file_content(document, tensors))
    step = Step()
    with pytest.raises(zg.ArtifactError):
        load_and_run(step, changed)
    assert not os.path.exists("ran")


def load_and_run(step: Step, path: Path) -> None:
    step.load_compiled(path)
    step(X)


@pytest.mark.parametrize(
    "text",
    [
        "open('ran', 'w')",
        "def mod(x: open('ran', 'w')): return x\nopen('ran', 'w')",
        "def mod(x): x = open('ran', 'w'); return x",
        "def mod(x): x = ops.aten.neg.default(*x); return x",
        "def mod(x): x = ops.aten.neg.default(**x); return x",
        "def mod(x): x.y = ops.aten.neg.default(x); return x",
        "def mod(x): x = ops.aten.neg.default.__globals__(x); return x",
        "def mod(x): return open('ran', 'w')",
        "def mod(x): return torch.hub",
    ],
)
def test_a_modification_is_interpreted(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"is not one function|has more than|does not assign|no operator|takes its|no plain value"
    ):
        modification(text)(torch.ones(()))
    assert not os.path.exists("ran")


@pytest.mark.parametrize("condition", ["open('ran', 'w')", "s0.__class__", "(lambda: 1)()", "[s0 for _ in s0]", "s0:="])
def test_a_condition_on_sizes_is_arithmetic(condition: str) -> None:
    with pytest.raises(ValueError, match="is not arithmetic"):
        SizeGuard(condition, frozenset({"s0"}), "", "")
    assert SizeGuard("s0 % 2 == 0 and math.floor(s0 / 3) >= min(s0, 1)", frozenset({"s0"}), "", "").holds({"s0": 4})


def test_a_name_of_a_size_is_a_name() -> None:
    with pytest.raises(ValueError, match="is no name of a size"):
        Sizes(size_env(fake_mode()), [Dim("s0=open('ran', 'w')", 4)])


@pytest.mark.parametrize("kind", ["score_mod", "mask"])
def test_a_step_with_one_function_of_flex_attention_is_exported_and_loaded(kind: str, tmp_path: Path) -> None:
    step, other = Step(kind), Step(kind)
    step.compile(X)
    step.export_compiled(tmp_path / "step.zg")
    other.load_compiled(tmp_path / "step.zg")
    assert torch.equal(other(X), step(X))


def test_what_cannot_be_read_again_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step()
    step.compile(X)

    def refuse(text: str) -> None:
        raise zg.ArtifactError("refused")

    monkeypatch.setattr("zerograph.artifact.operators.check_modification", refuse)
    with pytest.raises(zg.ArtifactError, match="refused"):
        step.export_compiled(tmp_path / "step.zg")
    assert not (tmp_path / "step.zg").exists()
