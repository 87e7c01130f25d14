"""Saving and loading under OneFlow's names: whole values, plain files, training that goes on bitwise."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zerograph as zg
import zerograph.compat.oneflow as flow
from tests.compat.oneflow.samples import (
    HIDDEN,
    INPUTS,
    S0,
    B,
    Predict,
    Train,
    batches,
    everybody,
    mlp,
    plainly,
    trained,
)
from tests.pool import Pool


def adamw(model: Any) -> Any:
    return flow.optim.AdamW(model.parameters(), lr=0.01)


def step(model: Any, stage: int = 2) -> Train:
    model.to_global(placement=everybody(), sbp=B)
    optimizer = adamw(model)
    scheduler = flow.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return Train(model, optimizer, lr_sch=scheduler, stage=stage)


def saved_and_resumed(folder: str) -> dict[str, Any]:
    data, file = batches(4), Path(folder) / "graph.pt"
    first = step(mlp())
    losses = trained(first, data[:2])
    flow.save(first.state_dict(), file, global_dst_rank=0)
    flow.save(first.model.state_dict(), Path(folder) / "model.pt", global_dst_rank=1)
    losses += trained(first, data[2:])

    other = mlp()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    second = step(other, stage=3)
    with warnings.catch_warnings(action="error"):
        read = flow.load(file, global_src_rank=0)
    second.load_state_dict(read)
    again = trained(second, data[2:])
    # A graph that runs already is taken back too.
    first.load_state_dict(flow.load(file))
    third = trained(first, data[2:])
    return {
        "losses": losses,
        "resumed": [again, third],
        "steps": (second.steps_done, first.steps_done),
        "keys": list(first.state_dict()),
        "states": [graph.model.state_dict() for graph in (first, second)],
    }


@pytest.fixture(scope="module")
def found(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    folder = tmp_path_factory.mktemp("saved")
    return pool.run(2, saved_and_resumed, str(folder)), folder


def test_training_goes_on_bitwise_at_another_stage(found: tuple[list[Any], Path]) -> None:
    for rank in found[0]:
        for again in rank["resumed"]:
            for one, other in zip(rank["losses"][2:], again, strict=True):
                assert torch.equal(one, other)
        assert rank["steps"] == (4, 4)
        for name, value in rank["states"][0].items():
            assert torch.equal(value, rank["states"][1][name])


def test_training_that_was_saved_in_between_is_plain_training(found: tuple[list[Any], Path]) -> None:
    model = mlp()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = plainly(model, optimizer, batches(4), scheduler)
    torch.testing.assert_close(found[0][0]["losses"], losses, rtol=1e-10, atol=1e-12)


def test_a_saved_file_is_torchs_own_and_has_whole_tensors(found: tuple[list[Any], Path]) -> None:
    files = {name: torch.load(found[1] / name, weights_only=True) for name in ("graph.pt", "model.pt")}
    model = mlp()
    plainly(model, adamw(model), batches(2))
    torch.testing.assert_close(dict(files["model.pt"]), dict(model.state_dict()), rtol=1e-10, atol=1e-12)
    model.load_state_dict(files["model.pt"])
    for name, value in files["graph.pt"]["model"].items():
        assert torch.equal(value, files["model.pt"][name])
    assert sorted(path.name for path in found[1].iterdir()) == ["graph.pt", "model.pt"]


def test_the_state_of_a_graph_has_its_modules_by_name(found: tuple[list[Any], Path]) -> None:
    assert found[0][0]["keys"] == ["model", "loss_fn", "zerograph"]


def module_states(folder: str) -> dict[str, Any]:
    graph = step(mlp(), stage=3)
    model: Any = graph.model
    fresh = model.state_dict()
    trained(graph, batches(2))
    split = model.state_dict()
    part = model[0].state_dict()
    # Into split parameters: plain values, global ones, and some of them only.
    model.load_state_dict({name: value * 2 for name, value in split.items()})
    doubled = model.state_dict()
    rows = {name: value.to_global(placement=everybody(), sbp=B) for name, value in split.items()}  # type: ignore[attr-defined]
    model.load_state_dict({name: value.to_global(sbp=S0) for name, value in rows.items()})
    restored = model.state_dict()
    model.load_state_dict({"0.bias": torch.ones(HIDDEN, dtype=torch.float64)}, strict=False)
    partly = model.state_dict()
    problems = []
    for wrong in ({"0.bias": torch.ones(HIDDEN)}, {**split, "0.weight": torch.ones(2, 2)}):
        with pytest.raises(RuntimeError) as problem:
            model.load_state_dict(wrong)
        problems.append(str(problem.value))
    # Into a global module that no graph has yet.
    other = mlp()
    other.to_global(placement=everybody(), sbp=B)
    other[0].to_global(sbp=S0)
    other.load_state_dict(split)
    flow.save({"one": rows["0.weight"], "n": 3, "rows": other[0].weight}, Path(folder) / "some.pt", global_dst_rank=0)
    read = flow.load(Path(folder) / "some.pt", global_src_rank=1, map_location=everybody())
    weight = model[0].weight
    return {
        "fresh": fresh,
        "split": split,
        "part": part,
        "doubled": doubled,
        "restored": restored,
        "partly": partly,
        "problems": problems,
        "other": other.state_dict(),
        "read": (read["n"], read["one"].sbp, read["one"].to_local(), read["rows"].to_local()),
        "usable": trained(graph, batches(1)),
        "weight": (weight.sbp, weight.to_global(sbp=B).to_local().shape),
    }


@pytest.fixture(scope="module")
def states(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = pool.run(2, module_states, str(tmp_path_factory.mktemp("modules")))[1]
    return result


def equal(found: Any, wanted: Any) -> bool:
    return list(found) == list(wanted) and all(torch.equal(value, wanted[name]) for name, value in found.items())


def test_the_state_of_a_module_is_whole_and_plain_before_and_after_it_is_split(states: dict[str, Any]) -> None:
    assert equal(states["fresh"], mlp().state_dict())
    assert all(type(value) is Tensor for value in states["split"].values())
    model = mlp()
    plainly(model, adamw(model), batches(2))
    torch.testing.assert_close(dict(states["split"]), dict(model.state_dict()), rtol=1e-10, atol=1e-12)
    assert equal(states["part"], {name: states["split"][f"0.{name}"] for name in ("weight", "bias")})


def test_a_module_that_is_split_can_be_loaded_plain_global_or_partly(states: dict[str, Any]) -> None:
    assert equal(states["doubled"], {name: value * 2 for name, value in states["split"].items()})
    assert equal(states["restored"], states["split"])
    assert equal(states["partly"], {**states["split"], "0.bias": torch.ones(HIDDEN, dtype=torch.float64)})
    assert "Missing key" in states["problems"][0]
    assert "size mismatch for 0.weight" in states["problems"][1]
    assert equal(states["other"], states["split"])


def test_saved_global_tensors_come_back_whole_from_any_rank(states: dict[str, Any]) -> None:
    number, sbp, one, rows = states["read"]
    assert (number, sbp) == (3, (B,))
    assert torch.equal(one, states["split"]["0.weight"])
    assert torch.equal(rows, states["split"]["0.weight"])


def test_the_values_of_a_split_parameter_can_be_asked_for(states: dict[str, Any]) -> None:
    assert states["weight"] == ((S0,), (HIDDEN, INPUTS))


def wrong_files(folder: str) -> list[str]:
    graph = Predict(mlp())
    missing = Path(folder) / "missing" / "file.pt"
    found = []
    for wrong in (
        lambda: flow.save(graph, missing),
        lambda: flow.save({}, missing, global_dst_rank=2),
        lambda: flow.save({}, missing, save_as_external_data=True),
        lambda: flow.save({}, missing, global_dst_rank=0),
        lambda: flow.load(missing, global_src_rank=0),
        lambda: flow.load(folder),
        lambda: flow.load(missing),
        lambda: graph.load_state_dict({"other": {}}),
        lambda: graph.load_state_dict({"model": {}}),
    ):
        with pytest.raises((zg.ZeroGraphError, OSError, RuntimeError)) as problem:
            wrong()
        found.append(f"{type(problem.value).__name__}: {problem.value}")
    return found


def test_what_cannot_be_saved_or_loaded_is_an_error_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, wrong_files, str(tmp_path))
    parts = ["ConfigError: flow.save() takes values", "ConfigError: global_dst_rank=2", "ConfigError: flow.save(save"]
    for found in (first, second):
        for message, part in zip(found, parts, strict=False):
            assert part in message
    assert "RuntimeError: Parent directory" in first[3]
    assert "RankMismatchError: rank 0 failed before continuing after flow.save()" in second[3]
    assert "FileNotFoundError" in first[4]
    assert "rank 0 failed before continuing after flow.load()" in second[4]
    for message, part in zip(
        second[5:], ("is a directory", "FileNotFound", "the modules model", "Missing"), strict=True
    ):
        assert part in message


def test_what_is_no_state_of_the_graph_is_named() -> None:
    model = mlp()
    graph = Train(model, adamw(model))
    # A loss without parameters has nothing to save, and may be missing.
    graph.load_state_dict({"model": model.state_dict()})
    wrong: list[Any] = [None, "graph.pt", {}, model.state_dict(), {"model": None}]
    messages = []
    for strict in (True, False):
        for one in wrong:
            if strict or one != {}:
                with pytest.raises(zg.ConfigError) as problem:
                    graph.load_state_dict(one, strict)
                messages.append(str(problem.value))
    assert "flow.load(path), not None" in messages[0]
    assert "not 'graph.pt'" in messages[1]
    assert "is of nothing" in messages[2]
    assert "0.weight, 0.bias, 2.weight, 2.bias\n" in messages[3]
    assert "{'model': state}, or call model.load_state_dict(state)" in messages[3]
    assert messages[7] == messages[3]


def not_strict() -> tuple[bool, bool]:
    graph = step(mlp())
    data = batches(2)
    trained(graph, data)
    state = graph.state_dict()
    graph.load_state_dict({"model": {"0.bias": torch.zeros(HIDDEN)}, "gone": {}}, strict=False)
    found = graph.model.state_dict()
    kept = torch.equal(found["0.weight"], state["model"]["0.weight"])
    return kept, bool((found["0.bias"] == 0).all())


def test_loading_that_is_not_strict_takes_what_fits(pool: Pool) -> None:
    assert pool.run(2, not_strict) == [(True, True)] * 2


def made_split() -> list[str]:
    with zg.sharded_init():
        model = mlp()
    messages = []
    for wrong in (lambda: model.to_global(placement=everybody(), sbp=B), model.state_dict):
        with pytest.raises(zg.ZeroGraphError) as problem:
            wrong()
        messages.append(str(problem.value))
    graph = Predict(model)
    model.load_state_dict({name: value + 1 for name, value in mlp().state_dict().items()})
    with graph.full_parameters():
        messages.append(str(torch.equal(model[0].bias, mlp()[0].bias + 1)))
    return messages


def test_a_module_made_split_needs_a_graph_before_its_state_is_read_or_loaded(pool: Pool) -> None:
    placed, read, loaded = pool.run(2, made_split)[0]
    assert "Give the module to a graph as it is" in placed
    assert "give it to a ZeroGraph" in read
    assert loaded == "True"
