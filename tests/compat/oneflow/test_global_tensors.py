"""Placements, SBPs and global tensors under OneFlow's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import zerograph as zg
import zerograph.compat.oneflow as flow
from tests.compat.oneflow.samples import S0, B, everybody, given, mlp
from tests.pool import Pool
from zerograph.compat.oneflow import nn

P = flow.sbp.partial_sum


def test_sbps_have_an_attribute_and_a_call_form() -> None:
    assert flow.sbp.broadcast() == flow.sbp.broadcast == zg.sbp.broadcast
    assert flow.sbp.partial_sum() == flow.sbp.partial_sum == zg.sbp.partial_sum
    assert flow.sbp.split(dim=1) == flow.sbp.split(1) != flow.sbp.split(0)
    assert isinstance(flow.sbp.split(0), flow.sbp.sbp)


def placements() -> list[Any]:
    line, nested = flow.placement("cpu", ranks=[0, 1]), flow.placement(type="cpu", ranks=[[0], [1]])
    return [
        flow.placement.all("cpu") == line == flow.placement("cpu", range(2)),
        line != nested,
        len({line, flow.placement.all("cpu"), nested}),
        line.mesh is flow.placement("cpu", (0, 1)).mesh,
        (line.type, line.ranks, nested.ranks, tuple(nested.mesh.shape)),
        repr(nested),
        (flow.env.get_rank(), flow.env.get_world_size(), flow.env.get_local_rank(), flow.env.get_node_size()),
    ]


def test_placements_compare_by_device_and_ranks_and_share_groups(pool: Pool) -> None:
    found = pool.run(2, placements)[1]
    assert found[:4] == [True, True, 2, True]
    assert found[4] == ("cpu", [0, 1], [[0], [1]], (2, 1))
    assert found[5] == 'flow.placement(type="cpu", ranks=[[0], [1]])'
    assert found[6] == (1, 2, 0, 1)


def conversions() -> dict[str, Any]:
    rank, line = flow.env.get_rank(), everybody()
    own: Any = torch.arange(4.0).view(2, 2) + 10 * rank
    same = own.clone()
    rows = own.to_global(placement=line, sbp=S0)
    only = rows.to_global(placement=flow.placement("cpu", ranks=[1]), sbp=B)
    return {
        "rows": (tuple(rows.shape), rows.sbp, rows.placement == line, rows.is_global, rows.is_local, own.is_global),
        "local": rows.to_local(),
        "columns": rows.to_global(sbp=flow.sbp.split(1)).to_local(),
        "whole": rows.to_global(sbp=B).to_local(),
        "list": rows.to_global(sbp=[B]).numpy(),
        "copied": (own.to_global(line, B, copy=True).to_local(), torch.equal(own, same)),
        "first": same.to_global(line, B).to_local(),
        "sum": own.to_global(placement=line, sbp=P).to_global(sbp=B).to_local(),
        "moved": (only.placement.ranks, only.to_local().numel(), only.to_global(line, S0).to_local()),
        "double": rows.to_global(placement=flow.placement("cpu", ranks=[[0, 1]]), sbp=[B, S0]).to_local(),
        "plain": own.to_local() is own,
        "unchecked": (own.clone().to_global(line, S0, check_meta=False) - rows).abs().max().item(),
    }


def test_to_global_and_to_local(pool: Pool) -> None:
    first, second = pool.run(2, conversions)
    parts = [torch.arange(4.0).view(2, 2), torch.arange(4.0).view(2, 2) + 10]
    whole = torch.cat(parts)
    for rank, found in enumerate((first, second)):
        assert found["rows"] == ((4, 2), (S0,), True, True, False, False)
        assert torch.equal(found["local"], parts[rank])
        assert torch.equal(found["columns"], whole[:, rank : rank + 1])
        assert torch.equal(found["whole"], whole)
        assert torch.equal(torch.from_numpy(found["list"]), whole)
        assert torch.equal(found["copied"][0], parts[0])
        # Local to broadcast takes rank 0's data.
        assert torch.equal(found["first"], parts[0])
        assert torch.equal(found["sum"], parts[0] + parts[1])
        assert found["moved"][:2] == ([1], 8 * rank)
        assert torch.equal(found["moved"][2], parts[rank])
        assert torch.equal(found["double"], parts[rank])
        assert found["plain"]
        assert found["unchecked"] == 0
    assert (first["copied"][1], second["copied"][1]) == (True, True)


def factories() -> dict[str, Any]:
    torch.manual_seed(flow.env.get_rank())
    line = everybody()
    drawn = flow.randn(4, 3, placement=line, sbp=S0)
    numbers = flow.randint(1, 100, (4, 3), dtype=flow.float32, placement=line, sbp=B)
    return {
        "drawn": (drawn.to_local(), drawn.full_tensor()),
        "numbers": (numbers.dtype, numbers.to_local()),
        "ones": flow.ones(4, placement=line, sbp=P).to_local(),
        "whole": flow.tensor([[1, 2], [3, 4]], placement=line, sbp=[S0]).to_local(),
        "like": flow.zeros_like(drawn, placement=line, sbp=flow.sbp.split(1)).to_local(),
        "plain": (type(flow.ones(2)), flow.ones(2, requires_grad=True).requires_grad),
        "wants": flow.ones(2, placement=line, sbp=B, requires_grad=True).requires_grad,
    }


def test_factories_make_global_tensors_that_are_the_same_on_all_ranks(pool: Pool) -> None:
    first, second = pool.run(2, factories)
    assert torch.equal(first["drawn"][1], second["drawn"][1])
    assert torch.equal(torch.cat([first["drawn"][0], second["drawn"][0]]), first["drawn"][1])
    assert torch.equal(first["numbers"][1], second["numbers"][1])
    assert first["numbers"][0] is torch.float32
    assert torch.equal(first["ones"] + second["ones"], torch.ones(4))
    assert (first["whole"].tolist(), second["whole"].tolist()) == ([[1, 2]], [[3, 4]])
    # Of three columns over two ranks the first has two.
    assert (tuple(first["like"].shape), tuple(second["like"].shape)) == ((4, 2), (4, 1))
    assert first["plain"] == (Tensor, True)
    assert first["wants"]


def modules() -> dict[str, Any]:
    line, model = everybody(), mlp()
    returned: Any = model.to_global(placement=line, sbp=B)
    parts: Any = torch.nn.Linear(3, 2)
    parts.to_global(placement=line, sbp=S0)
    model[2].to_global(sbp=S0)
    return {
        "self": returned is model,
        "whole": all(isinstance(one, DTensor) for one in model.parameters()),
        "sbp": (model[0].weight.sbp, model[2].weight.sbp, tuple(model[2].weight.shape), model[2].bias.requires_grad),
        "parts": tuple(parts.weight.shape),
        "state": {name: type(value) for name, value in model.state_dict().items()},
        "same": nn.Module.to(model, nn.Module) is model,
    }


def test_a_module_is_made_global_tensor_by_tensor(pool: Pool) -> None:
    found = pool.run(2, modules)[0]
    assert found["self"]
    assert found["whole"]
    assert found["sbp"] == ((B,), (S0,), (4, 10), True)
    # A local module's parameters are parts, as in OneFlow.
    assert found["parts"] == (4, 3)
    assert set(found["state"].values()) == {Tensor}
    assert found["same"]


def mistakes() -> list[str]:
    line = everybody()
    x: Any = torch.ones(2, 2)
    rows = x.to_global(placement=line, sbp=S0)
    found = []
    for wrong in (
        lambda: x.to_global(placement=line),
        lambda: x.to_global(sbp=B),
        lambda: rows.to_global(),
        lambda: x.to_global(placement="cpu", sbp=B),
        lambda: x.to_global(placement=line, sbp=[B, B]),
        lambda: x.to_global(placement=line, sbp=flow.sbp.split(2)),
        lambda: x.to_global(placement=line, sbp="broadcast"),
        lambda: flow.placement("cpu", ranks=[0, 2]),
        lambda: flow.placement("tpu", ranks=[0, 1]),
        lambda: flow.ones(2, placement=line),
        lambda: flow.ones(2, placement=line, sbp=B, device="cpu"),
        lambda: flow.ones(2, placement=line, sbp=flow.sbp.split(1)),
    ):
        with pytest.raises(zg.PlacementError) as problem:
            wrong()
        found.append(str(problem.value))
    with pytest.raises(AttributeError) as missing:
        x.sbp  # noqa: B018
    return [*found, str(missing.value), str(hasattr(x, "placement"))]


def test_mistakes_are_named(pool: Pool) -> None:
    found = pool.run(2, mistakes)[0]
    parts = ["both placement= and sbp="] * 2 + ["placement=, sbp= or both", "no placement", "2 SBPs", "no dimension"]
    parts += ["not an SBP", "the ranks 0 to 1", "no device", "both placement= and sbp=", "not both", "no dimension"]
    parts += ["a local tensor has no sbp", "False"]
    for message, part in zip(found, parts, strict=True):
        assert part in message


class Looks(nn.Graph):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.seen: list[Any] = []

    def build(self, x: Any) -> Any:
        line = everybody()
        ones = flow.ones(x.shape[0], 10, placement=line, sbp=S0, dtype=x.dtype)
        scores = self.model[0](x).to_global(placement=line, sbp=B) + ones
        self.seen += [x.is_global, scores.is_global, self.model[0].weight.placement == line, self.model[0].weight.sbp]
        try:
            self.seen.append(scores.sbp)
        except AttributeError as error:
            self.seen.append(str(error))
        return scores


def looking() -> list[Any]:
    model: Any = mlp()
    model.to_global(placement=everybody(), sbp=B)
    x = torch.ones(16, 12, dtype=torch.float64)
    graph = Looks(model)
    found = graph(given(x)).full_tensor()
    return [*graph.seen, torch.allclose(found, model[0](x).detach() + 1)]


def test_inside_build_all_tensors_are_global_and_code_that_places_them_runs(pool: Pool) -> None:
    *seen, message, right = pool.run(2, looking)[0]
    assert seen == [True, True, True, (B,)]
    assert "only parameters and buffers have .sbp" in message
    assert right
