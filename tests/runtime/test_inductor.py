"""The inductor backend: what it compiles, how often, and that nothing else changes."""

from __future__ import annotations

import functools
import re
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from filelock import FileLock
from torch import Tensor, fx, nn

from tests.harness import Case, needs_compiler, prepare, sliced
from tests.models import Gpt, TrainStep, adam_step, adamw, batches, make, part, update_by
from tests.passes.test_memory import _Watch
from tests.peak_memory import gathered_buckets, gradient_buckets, most_alive
from tests.pool import Pool
from zerograph import _torch
from zerograph.errors import CaptureError
from zerograph.ir import buckets, operator_parts
from zerograph.ir.memory import profile
from zerograph.ir.mesh import line
from zerograph.ir.metadata import meta, origin
from zerograph.ir.step_graph import placeholders
from zerograph.runtime.backends import compile_cache, inductor, pieces
from zerograph.runtime.backends.pieces import Piece, cut
from zerograph.runtime.backends.regions import _PRODUCTS, cut_regions

# A bucket for each layer.
OPTIONS = {"bucket_size": 8192}


every_size = patch.object(pieces, "SMALLEST", 0)


@pytest.fixture(autouse=True)
def _small_pieces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SMALLEST", 0)


@functools.cache
def emitted(layers: int, stage: int) -> fx.Graph:
    torch.manual_seed(0)
    model = Gpt(False, layers=layers)
    step = TrainStep(model, adamw(model), stage, backend="eager", **OPTIONS)
    return prepare(step, *batches("gpt", 1)[0]).graph.graph


def pieces_of(layers: int, stage: int, cutter: inductor.Cut) -> tuple[int, int]:
    """(pieces, distinct pieces)"""
    found = [one for one in cutter(emitted(layers, stage)) if isinstance(one, Piece)]
    return len(found), len({inductor.signature(one) for one in found})


both_cutters = pytest.mark.parametrize("cutter", [cut, cut_regions])


@both_cutters
@sliced("stage", [3], [0])
def test_deeper_models_have_more_pieces_but_no_other_ones(stage: int, cutter: inductor.Cut) -> None:
    few, distinct = pieces_of(4, stage, cutter)
    many, deeper = pieces_of(5, stage, cutter)
    assert many > few > distinct
    assert deeper == distinct


def lifetimes(stage: int, cutter: inductor.Cut) -> list[tuple[int, int]]:
    """Most buckets alive at once, as emitted and with pieces: gathered ones, and whole gradients."""
    graph = Case("gpt", stage, **OPTIONS).prepared().graph
    program = cutter(graph.graph)
    functions: dict[Piece, Any] = {one: _never for one in program if isinstance(one, Piece)}
    made = inductor.emit(graph, program, functions).graph
    return [
        (most_alive(spans(graph.graph), len(graph.graph.nodes)), most_alive(spans(made), len(made.nodes)))
        for spans in (gathered_buckets, gradient_buckets)
    ]


def _never(*_: Tensor) -> tuple[Tensor, ...]:
    raise AssertionError("this graph is only looked at")


@both_cutters
@pytest.mark.parametrize("stage", [3])
def test_no_bucket_lives_longer_for_a_piece(stage: int, cutter: inductor.Cut) -> None:
    for before, after in lifetimes(stage, cutter):
        assert 0 < after <= before


@both_cutters
def test_collectives_keep_their_order(cutter: inductor.Cut) -> None:
    graph = emitted(2, 3)
    names = [node.name for node in graph.nodes if "boxing" in node.meta and "c10d" in str(node.target)]
    assert len(names) > 10
    assert [one.name for one in cutter(graph) if isinstance(one, fx.Node) and one.name in names] == names


def accelerated(layers: int, ranks: int, vocabulary: int = 61) -> list[fx.Node | Piece]:
    """The regions of a GPT on an accelerator, where buckets are layers; a small bucket would take several."""
    model = Gpt(False, vocabulary, layers=layers)
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), fused=True), 3, backend="inductor")
    with patch.object(buckets, "default_bytes", lambda _: 1):
        prepared = step.prepare(line(ranks, 0, "ranks"), *batches("gpt", 1)[0], device="meta")
    return cut_regions(prepared.graph.graph)


def of_layers(program: list[fx.Node | Piece]) -> list[set[str]]:
    regions = (step for step in program if isinstance(step, Piece))
    layers = [{match[1] for node in step.nodes if (match := LAYER.match(origin(node).module))} for step in regions]
    return [numbers for numbers in layers if numbers]


LAYER = re.compile(r"model\.blocks\.(\d+)")


def test_on_one_rank_a_region_is_a_layer() -> None:
    program = accelerated(3, 1)
    assert of_layers(program) == [{"0"}, {"1"}, {"2"}, {"2"}, {"1"}, {"0"}]
    alone = {str(step.target) for step in program if isinstance(step, fx.Node)}
    assert not {target for target in alone if re.search(r"aten\.(addmm|gelu|native_layer_norm|_scaled)", target)}


def test_on_several_ranks_a_layer_of_stage_3_has_one_region_with_products() -> None:
    products = [
        sum(node.target in _PRODUCTS for node in step.nodes) for step in accelerated(4, 8) if isinstance(step, Piece)
    ]
    assert products.count(5) == 4
    # In backward the first product runs before the gathered weights are there.
    assert products.count(8) == 4


def in_order(program: list[fx.Node | Piece]) -> fx.Graph:
    """The nodes in the order in which regions run."""
    nodes = dict.fromkeys(node for step in program for node in (step.nodes if isinstance(step, Piece) else [step]))
    graph = next(iter(nodes)).graph
    for node in nodes:
        graph.output_node().prepend(node)
    graph.lint()
    return graph


@pytest.mark.parametrize("ranks", [1, 8])
def test_regions_hold_no_more_than_the_step_without_them(ranks: int) -> None:
    """With many classes the peak is at the loss, whose region would else allocate the head's gradient in advance."""
    program = accelerated(3, ranks, vocabulary=4096)
    predicted = profile(next(step for step in program if isinstance(step, fx.Node)).graph)
    assert "_to_copy" in predicted.memory().node or "softmax" in predicted.memory().node
    assert profile(in_order(program)).peak == predicted.peak


def test_a_scatter_of_one_element_each_is_never_in_memory() -> None:
    """The gradient of a loss of classes: as many bytes as its logits."""
    scatters = [
        node
        for step in accelerated(1, 1)
        if isinstance(step, Piece)
        for node in step.nodes
        if node.target in operator_parts.SCATTERS
    ]
    assert len(scatters) == 1
    assert meta(scatters[0])["fused"]


@pytest.mark.parametrize("value", [torch.tensor([[2.5], [-1.0], [0.1]]), 7.25, torch.randn(3, 4)])
def test_a_scatter_written_as_a_choice_is_a_scatter(value: Tensor | float) -> None:
    x, index = torch.randn(3, 5), torch.tensor([[4], [0], [2]])
    overload = torch.ops.aten.scatter.src if isinstance(value, Tensor) else torch.ops.aten.scatter.value
    assert torch.equal(operator_parts.SCATTERS[overload](x, -1, index, value), x.scatter(-1, index, value))
    few = index[:2]
    assert torch.equal(operator_parts.SCATTERS[overload](x, 1, few, value), x.scatter(1, few, value))


@every_size
def steps_by(backend: str, stage: int, dtype: torch.dtype, name: str) -> tuple[list[Tensor], list[Tensor], int]:
    """Losses and parameters after three steps, and the most gathered buckets that were alive at once in the last."""
    step = adam_step(name, stage, dtype=dtype, backend=backend, **OPTIONS)
    data = [(part(x), part(y)) for x, y in batches(name, 3, dtype=dtype)]
    losses = [step(x, y) for x, y in data[:2]]
    with _Watch() as watch:
        losses.append(step(*data[2]))
    with step.full_parameters():
        return losses, [parameter.detach().clone() for parameter in step.model.parameters()], watch.most


# Each kernel is two seconds of the C++ compiler. test_inductor_sizes trains a transformer on two ranks in all runs.
@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize(("name", "stage"), [("mlp", 3), ("gpt_of_one_block", 0), ("gpt_of_one_block", 3)])
def test_steps_are_those_of_eager(pool: Pool, name: str, stage: int) -> None:
    losses, parameters, held = pool.run(2, steps_by, "eager", stage, torch.float64, name)[0]
    compiled = pool.run(2, steps_by, "inductor", stage, torch.float64, name)[0]
    compiled_losses, compiled_parameters, compiled_held = compiled
    torch.testing.assert_close(compiled_losses, losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(compiled_parameters, parameters, rtol=1e-12, atol=1e-12)
    assert compiled_held <= held


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_single_precision_is_off_by_rounding_only(pool: Pool, name: str) -> None:
    losses, _, _ = pool.run(2, steps_by, "eager", 2, torch.float32, name)[0]
    compiled_losses, _, _ = pool.run(2, steps_by, "inductor", 2, torch.float32, name)[0]
    torch.testing.assert_close(compiled_losses, losses, rtol=1e-6, atol=1e-6)


def _as_it_is(piece: fx.GraphModule, *_: Any) -> Any:
    def run(inputs: list[Tensor]) -> Any:
        return piece(*inputs)

    return run


def test_equal_layers_are_handed_to_inductor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step = adam_step("gpt", 2, backend="eager", **OPTIONS)
    (x, y), *_ = batches("gpt", 1)
    step.compile(x, y)
    graph = step.inspect.graph
    found = [inductor.signature(one) for one in cut(graph.graph) if isinstance(one, Piece)]
    compiled: list[fx.GraphModule] = []

    def counting(piece: fx.GraphModule, *_: Any) -> Any:
        compiled.append(piece)
        return _as_it_is(piece)

    monkeypatch.setattr(_torch, "inductor", counting)
    inductor.compile_pieces(graph)
    assert len(compiled) == len(set(found)) < len(found)


def test_a_piece_that_does_not_compile_names_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Any:
        raise NotImplementedError("no such loop")

    monkeypatch.setattr(_torch, "inductor", refuses)
    step = adam_step("mlp", 2, backend="inductor")
    (x, y), *_ = batches("mlp", 1)
    with pytest.raises(CaptureError, match=r"'inductor' could not compile.*no such loop") as caught:
        step(x, y)
    assert re.search(r"the forward of [\w., ]+\n.*\.py:\d+: ", str(caught.value))
    assert "config.backend = 'eager'" in str(caught.value)


def changes_between_reads(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    before = torch.relu(x) * 2
    whole = x.view(-1)
    x.mul_(y).add_(1)
    after = torch.sigmoid(whole) + whole
    head = whole[:2]
    head.mul_(3).add_(1)
    return before, after, torch.exp(x) - y, head * 2 + 1


@both_cutters
def test_writes_through_views_keep_their_order(monkeypatch: pytest.MonkeyPatch, cutter: inductor.Cut) -> None:
    """Pieces run as they are: what is tested is the cut."""
    monkeypatch.setattr(_torch, "inductor", _as_it_is)
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    graph = _torch.trace(changes_between_reads, (x.clone(), y))
    for node, value in zip(placeholders(graph.graph), (x, y), strict=True):
        node.meta["val"] = value
    compiled = inductor.compile_pieces(graph, cutter)
    assert "relu" not in {str(node.target).split(".")[1] for node in compiled.graph.nodes if "aten" in str(node.target)}
    mine, other = x.clone(), x.clone()
    torch.testing.assert_close(compiled(mine, y), changes_between_reads(other, y))
    torch.testing.assert_close(mine, other)


def test_what_another_process_compiles_is_waited_for_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "cache_folder", lambda: str(tmp_path))
    (tmp_path / "zerograph").mkdir()
    order: list[str] = []
    other = FileLock(tmp_path / "zerograph" / "first.lock", thread_local=False)
    other.acquire()

    def second() -> str:
        order.append("second")
        threading.Timer(0.2, other.release).start()
        return "2"

    def first() -> str:
        order.append("first")
        return "1"

    assert compile_cache.share({"first": first, "second": second}) == {"first": "1", "second": "2"}
    assert order == ["second", "first"]


def test_what_is_small_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(x: Tensor) -> Tensor:
        return torch.relu(x) * 2

    monkeypatch.setattr(pieces, "SMALLEST", 16)
    for size, compiled in ((15, 0), (16, 1)):
        graph = _torch.trace(double, (torch.ones(size),))
        (x,) = placeholders(graph.graph)
        x.meta["val"] = torch.ones(size)
        assert sum(isinstance(one, Piece) for one in cut(graph.graph)) == compiled


def test_a_process_that_is_stuck_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "cache_folder", lambda: str(tmp_path))
    monkeypatch.setattr(compile_cache, "_LOCK_TIMEOUT", 0.1)
    (tmp_path / "zerograph").mkdir()
    with FileLock(tmp_path / "zerograph" / "first.lock"):
        assert compile_cache.share({"first": lambda: "1"}) == {"first": "1"}


def is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def numbers_made_in_pieces() -> list[str]:
    torch.manual_seed(0)
    model = Gpt(False, layers=1)
    step = TrainStep(model, torch.optim.AdamW(model.parameters()), 2, backend="eager", **OPTIONS)
    graph = prepare(step, *batches("gpt", 1)[0]).graph.graph
    assert any(node.target is torch.ops.aten.pow.Scalar for node in graph.nodes)
    return [
        str(node.target)
        for one in cut(graph)
        if isinstance(one, Piece)
        for node in one.nodes
        if all(is_number(value.meta["val"]) for value in (node, *node.all_input_nodes))
    ]


def test_powers_of_adams_betas_are_made_once_not_in_the_loop_over_the_bucket() -> None:
    assert numbers_made_in_pieces() == []


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {}),
    ],
)
def test_an_update_whose_rate_is_a_number_of_an_operator_is_in_pieces(
    monkeypatch: pytest.MonkeyPatch, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    monkeypatch.setattr(_torch, "inductor", _as_it_is)
    model, plain = make("mlp").double(), make("mlp").double()
    optimizer, plain_optimizer = (kind(one.parameters(), lr=0.1, **options) for one in (model, plain))
    step = TrainStep(model, optimizer, 2, backend="inductor")
    for lr, (x, y) in zip((0.1, 0.3, 0.2), batches("mlp", 3, dtype=torch.float64), strict=True):
        optimizer.param_groups[0]["lr"] = plain_optimizer.param_groups[0]["lr"] = lr
        step(x, y)
        update_by(plain_optimizer, nn.functional.cross_entropy(plain(x), y))
    with step.full_parameters():
        torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=1e-13, atol=1e-13)
    program = cut(prepare(TrainStep(model, optimizer, 2, backend="eager"), *batches("mlp", 1)[0]).graph.graph)
    alone = [one for one in program if isinstance(one, fx.Node) and origin(one).phase == "update"]
    assert [node for node in alone if isinstance(node.meta["val"], Tensor) and node.meta["val"].dim()] == []


def test_an_output_in_another_layout_is_copied_to_the_strides_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 returned a transposed copy as a view on an H200; a region that read it refused its strides."""
    compile_fx = pytest.importorskip("torch._inductor.compile_fx")
    monkeypatch.setattr(compile_fx, "compile_fx_inner", lambda *_, **__: lambda inputs: [inputs[0] * 2])
    graph = _torch.trace(lambda x: (x.contiguous() * 2,), (torch.ones(2, 3, 4).transpose(1, 2),))
    x = torch.randn(2, 3, 4).transpose(1, 2)
    run = _torch.inductor(graph, [x], strides=[(12, 3, 1)])
    for _ in range(2):
        (doubled,) = run([x])
        assert doubled.stride() == (12, 3, 1)
        assert torch.equal(doubled, x * 2)
