"""The inductor backend with symbolic sizes: compiled once for all sizes, with the numbers of one device."""

from __future__ import annotations

import functools
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import sym_or

from tests.compiler.test_any_batch import ROWS, data, own
from tests.harness import LossStep, compilations_of, needs_compiler, prepare, sliced
from tests.models import Gpt, TrainStep, adam_step, adamw, batches, make, train_plainly
from tests.pool import Pool
from zerograph import _torch
from zerograph.runtime.backends import inductor, pieces
from zerograph.runtime.backends.pieces import Piece, cut

every_size = patch.object(pieces, "SMALLEST", 0)


def trained(name: str, stage: int) -> tuple[list[Tensor], dict[str, Tensor], list[int], int]:
    """Train on batches of all sizes.

    Returns:
        Losses, parameters, how many pieces were compiled by the end of each step, and the number of compiled steps.
    """
    compiled, compilations = [], []

    def counting(*arguments: Any, inductor: Any = _torch.inductor) -> Any:
        compiled.append(arguments)
        return inductor(*arguments)

    step = adam_step(name, stage, dtype=torch.float64, backend="inductor", dynamic_shapes=True)
    losses = []
    with every_size, patch.object(_torch, "inductor", counting), warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*The piece is")
        for rows, x, y in data(name, ROWS[2], torch.float64):
            losses.append(step(own(rows, x), own(rows, y)))
            compilations.append(len(compiled))
    return losses, step.state_dict()["modules"]["model"], compilations, compilations_of(step)


@needs_compiler
@sliced("name, stage", [("mlp", 3)], [("gpt_of_one_block", 3), ("conv", 2), ("mlp", 0)])
def test_pieces_compiled_for_all_sizes_train_as_one_device(pool: Pool, name: str, stage: int) -> None:
    model = make(name, torch.float64)
    expected = train_plainly(model, adamw(model), [(x, y) for _, x, y in data(name, ROWS[2], torch.float64)])
    for losses, parameters, compilations, steps in pool.run(2, trained, name, stage):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(parameters, model.state_dict(), rtol=1e-6, atol=1e-8)
        assert steps == 1
        assert 0 < compilations[0] == compilations[-1]


def draws_and_pairs(model: nn.Module, x: Tensor) -> Tensor:
    """Draw a mask, which depends on where this rank's rows begin, and compare all samples of the whole batch."""
    hidden = F.normalize(F.dropout(F.gelu(model(x)), 0.5, training=True))
    return F.cross_entropy(hidden @ hidden.t(), torch.arange(x.shape[0]))


def losses_by(backend: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(6, 5).double()
    optimizer, options = torch.optim.SGD(model.parameters(), lr=0.5), {"seed": 7, "dynamic_shapes": True}
    step = LossStep(model, optimizer, 2, draws_and_pairs, backend=backend, **options)
    with every_size, warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*The piece is")
        return [
            step(own(rows, torch.randn(sum(rows), 6, dtype=torch.float64))) for rows in [(3, 3), (2, 5), (0, 4), (6, 1)]
        ]


@needs_compiler
def test_draws_and_gathers_of_unequal_parts_are_those_of_eager(pool: Pool) -> None:
    torch.testing.assert_close(
        pool.run(2, losses_by, "inductor"), pool.run(2, losses_by, "eager"), rtol=1e-12, atol=1e-12
    )


@functools.cache
def pieces_of(dynamic: bool) -> list[Piece]:
    model = Gpt(False, layers=1)
    step = TrainStep(model, adamw(model), 2, backend="inductor", dynamic_shapes=dynamic)
    with every_size:
        program = cut(prepare(step, *batches("gpt", 1)[0]).graph.graph)
    return [piece for piece in program if isinstance(piece, Piece)]


def test_symbolic_sizes_cut_the_graph_where_static_ones_do() -> None:
    static, symbolic = pieces_of(False), pieces_of(True)
    assert [[str(node.target) for node in piece.nodes] for piece in symbolic] == [
        [str(node.target) for node in piece.nodes] for piece in static
    ]
    assert {inductor.signature(piece) for piece in symbolic} - {inductor.signature(piece) for piece in static}


def test_code_runs_for_sizes_that_it_is_valid_for_and_operators_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def for_some_lengths(graph: fx.GraphModule, values: Any, environment: Any, *_: Any) -> Any:
        (length,) = (_torch.sizes.in_env(environment, value) for value in values if str(value) == "s1")
        assert sym_or(length < 100, length > 200)
        return lambda *inputs: "compiled"

    monkeypatch.setattr(_torch, "inductor", for_some_lengths)
    piece = next(piece for piece in pieces_of(True) if "log_softmax" in str(piece.nodes[0].target))
    run = inductor._compile(piece)

    def result(rows: int, length: int) -> Any:
        sizes = {"s0_rows": rows, "s1": length, "s0_rows*s1": rows * length}
        values = [node.meta["val"] for node in piece.inputs]
        inputs = [
            torch.zeros([sizes.get(str(size), size) for size in value.shape], dtype=value.dtype)
            if isinstance(value, Tensor)
            else sizes[str(value)]
            for value in values
        ]
        return run(inputs)

    assert result(1, 99) == "compiled"
    with warnings.catch_warnings(action="error"):
        assert all(isinstance(output, Tensor) for length in (99, 201) for output in result(0, length))
    with pytest.warns(UserWarning, match=r"for \(.*s1 < 100.*\) does not serve \(s0_rows, s1\) = \(2, 100\)") as caught:
        assert all(isinstance(output, Tensor) for output in result(2, 100))
    assert "log_softmax" in str(caught[0].message)
    assert "models.py:" in str(caught[0].message)


def refusing_log_softmax(graph: fx.GraphModule, values: Any, environment: Any, *_: Any) -> Any:
    """Compile nothing; refuse graphs with symbolic sizes and a log_softmax."""
    if environment is not None and has_log_softmax(graph):
        raise NotImplementedError("no such loop")
    return inductor_as_it_is(graph)


def inductor_as_it_is(graph: fx.GraphModule) -> Any:
    def run(inputs: list[Any]) -> Any:
        return graph(*inputs)

    return run


def has_log_softmax(graph: fx.GraphModule) -> bool:
    return any(node.target is torch.ops.aten._log_softmax.default for node in graph.graph.nodes)


def losses_of(backend: str) -> list[Tensor]:
    step = adam_step("gpt_of_one_block", 0, dtype=torch.float64, backend=backend, dynamic_shapes=True)
    with every_size:
        return [step(x, y) for _, x, y in data("gpt_of_one_block", ROWS[1][:3], torch.float64)]


def test_a_piece_that_does_not_compile_for_all_sizes_runs_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "inductor", refusing_log_softmax)
    with pytest.warns(UserWarning, match="could not compile a piece of the step for all sizes") as caught:
        losses = losses_of("inductor")
    text = next(str(one.message) for one in caught if "operator by operator" in str(one.message))
    assert "no such loop" in text
    assert "aten._log_softmax.default" in text
    assert "models.py:" in text
    torch.testing.assert_close(losses, losses_of("eager"), rtol=1e-12, atol=1e-12)
