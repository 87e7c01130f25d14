"""Plain inputs that hold the boundaries of sequences are recognised by the operator that reads them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import Predict
from zerograph.ir import mesh

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
ENDS = torch.tensor([0, 2, 6])


@torch.library.custom_op("zerograph_tests::attend", mutates_args=())
def attend(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    return x.clone()


@attend.register_fake
def _(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_boundaries_of_sequences_are_recognised_by_the_operator_that_reads_them() -> None:
    step = Predict(nn.Linear(8, 4), lambda model, x, lengths: attend(model(x), lengths.to(torch.int64)))
    with pytest.warns(UserWarning, match="no rule"):
        step.prepare(mesh.line(2, 0, "both"), X, zg.replicated(ENDS))
    with pytest.raises(zg.InputError, match=r"the cu_seqlens of zerograph_tests\.attend"):
        step.prepare(mesh.line(2, 0, "both"), X, ENDS)


@pytest.mark.parametrize("name", ["boundaries", "sorted_sequence"])
def test_boundaries_that_number_the_sequence_of_each_row_are_recognised(name: str) -> None:
    def call(model: nn.Module, x: Tensor, ends: Tensor) -> Tensor:
        rows = torch.arange(len(x))
        sequence = torch.bucketize(rows, ends) if name == "boundaries" else torch.searchsorted(ends, rows)
        return model(x) * sequence[:, None]

    step = Predict(nn.Linear(8, 4), call)
    with pytest.raises(zg.InputError, match=rf"has boundaries, the {name} of aten[^$]*zg\.replicated\(args\[1\]\)"):
        step.prepare(mesh.line(2, 0, "both"), X, ENDS)


def test_searching_the_sorted_row_of_each_sample_is_no_search_in_boundaries() -> None:
    step = Predict(nn.Linear(8, 4), lambda model, x, edges: model(x) * torch.searchsorted(edges, x[:, :4].contiguous()))
    with pytest.warns(UserWarning, match="no rule says how aten.searchsorted"):
        step.prepare(mesh.line(2, 0, "both"), X, X[:, :5].sort().values)
