"""The public names: the same for ``import *``, for ``dir()``, for type checkers and at run time."""

from __future__ import annotations

import ast
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerograph as zg
from tests.harness import LossStep, mean_of_squares


def test_dir_and_star_have_every_public_name() -> None:
    assert {"ZeroGraph", "sbp", "__version__"} <= {*zg.__all__} <= {*dir(zg)}
    assert all(hasattr(zg, name) for name in zg.__all__)
    with pytest.raises(AttributeError, match="module 'zerograph' has no attribute 'ZeroGraf'"):
        zg.ZeroGraf  # type: ignore[attr-defined]  # noqa: B018


def test_every_warning_has_the_category_of_zerograph() -> None:
    package = Path(zg.__file__).parent
    without = []
    for file in [*package.rglob("*.py"), *(package / "passes").rglob("*.py"), *(package / "runtime").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
                categories = [ast.unparse(one) for one in (*node.args[1:2], *(k.value for k in node.keywords))]
                known = ("ZeroGraphWarning", "DeprecationWarning", "FutureWarning")
                without += [] if any(name in categories for name in known) else [f"{file}:{node.lineno}"]
    assert without == []
    assert issubclass(zg.ZeroGraphWarning, UserWarning)


FORMER = {
    "attention": ("ring", "mesh.context_parallel_method"),
    "batch_sbp": ((zg.sbp.split(1),), "mesh.input_sbp"),
    "recompute": ("blocks", "memory.activation_checkpointing"),
    "sequence_parallel": (2, "mesh.context_parallel"),
    "zero_dim": ((0, 1), "zero.shard_dims"),
    "offload_activations": (True, "memory.offload.activations"),
    "optimizer_offload": (zg.OffloadTo("cpu"), "memory.offload.optimizer"),
    "stage": (3, "zero.stage"),
    "timeout": (3.5, "checks.timeout"),
}


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_of_an_option_works_with_a_warning_at_the_users_line(name: str) -> None:
    value, new = FORMER[name]
    config: Any = zg.Config()

    def use() -> None:
        setattr(config, name, value)
        assert getattr(config, name) == value

    with pytest.warns(zg.ZeroGraphWarning, match=f"config.{name} is config.{new[:13]}") as seen:
        use()
    assert {warning.filename for warning in seen} == {__file__}
    assert len(seen) == 2
    assert operator.attrgetter(new)(config) == value


@pytest.mark.parametrize("name", sorted({*FORMER} - {"stage", "timeout"}))
def test_a_former_name_works_as_a_keyword(name: str) -> None:
    value, new = FORMER[name]
    with pytest.warns(zg.ZeroGraphWarning, match=f"the option {name!r} is config.{new[:13]}.* now") as seen:
        config = zg.Config(**{name: value})
    assert len(seen) == 1
    assert operator.attrgetter(new)(config) == value


MODES = {"distributed_split": (3, "elements"), "non_distributed": (3, "parameters"), "off": (0, "elements")}


@pytest.mark.parametrize("mode", MODES)
def test_the_former_mode_is_a_stage_and_what_is_sharded(mode: str) -> None:
    config: Any = zg.Config(stage=3)

    def use() -> None:
        config.mode = mode
        assert config.mode == mode

    with pytest.warns(
        zg.ZeroGraphWarning, match=r"config.mode is config.zero.stage, 0 for 'off', and config.zero.shard_by"
    ):
        use()
    assert (config.zero.stage, config.zero.shard_by) == MODES[mode]
    for order in (("mode", "stage"), ("stage", "mode")):
        with pytest.warns(zg.ZeroGraphWarning, match="the option 'mode' is"):
            assert zg.Config(**{name: {"mode": mode, "stage": 3}[name] for name in order}) == config


def test_former_methods_set_parts_of_one_offload() -> None:
    config = zg.Config()
    with pytest.warns(zg.ZeroGraphWarning, match=r"zg.Offload\(optimizer=...\) now"):
        config.offload_optimizer("cpu", pin_memory=False)
    with pytest.warns(zg.ZeroGraphWarning, match=r"zg.Offload\(parameters=...\) now"):
        config.offload_parameters("nvme", nvme_path="/x", max_in_cpu=3)
    files = zg.OffloadTo("nvme", "/x", max_in_cpu=3)
    assert config.memory.offload == zg.Offload(zg.OffloadTo("cpu", pin_memory=False), files)


def test_views_have_one_name_on_a_step_and_their_former_ones_with_a_warning() -> None:
    model = nn.Linear(2, 2)
    step: Any = LossStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_of_squares)
    step(torch.ones(2, 2))
    with pytest.warns(zg.ZeroGraphWarning, match=r"step.text is step.inspect.text now") as seen:
        assert step.text() == step.inspect.text()
    assert [warning.filename for warning in seen] == [__file__]
    with pytest.warns(zg.ZeroGraphWarning, match=r"step.graph is step.inspect.graph_after now"):
        assert step.graph("place") is step.inspect.graph_after("place")
    step.memory = nn.Linear(2, 2)
    assert isinstance(step.memory, nn.Linear)
    with pytest.raises(AttributeError, match="'LossStep' object has no attribute 'texts'"):
        _ = step.texts
