"""Buckets that stay gathered are gathered into memory that stays, the shard inside it; numbers are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn

import zerograph as zg
from tests.harness import Case, Predict, difference, needs_compiler, sliced, stores_of
from tests.models import TrainStep, adam_step, adamw, batches, make, part
from tests.peak_memory import most_alive_bytes, most_allocated_bytes
from tests.pool import Pool
from zerograph.ir.metadata import origin
from zerograph.ir.rewrite import emit
from zerograph.ir.step_graph import nbytes, placeholders
from zerograph.passes.memory.gather_in_place import gather_in_place
from zerograph.runtime.state import Store
from zerograph.runtime.wire import collectives, selection

aten = torch.ops.aten
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default

GPT = "gpt_of_one_block"
SMALL = {"bucket_size": 8192}
# Of the perceptron: two buckets.
TINY = {"bucket_size": 512}
STEPS = 3


@contextmanager
def without_rooms() -> Iterator[None]:
    """Nothing gathers into memory that is there."""
    with patch.object(selection, "select_exchanges", lambda job: {"all-gather": collectives.gather_pieces}):
        yield


@contextmanager
def by_torch() -> Iterator[None]:
    """torch's own collectives."""
    with patch.object(selection, "select_exchanges", lambda job: {}):
        yield


def rooms(step: zg.ZeroGraph) -> list[Store]:
    return [store for store in stores_of(step) if store.gather_buffer is not None]


class Returning(TrainStep):
    """Returns a parameter beside the loss."""

    def build(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        loss = super().build(x, y)
        weight = self.model.head.weight
        assert isinstance(weight, Tensor)
        return loss, weight, weight.t()


def trained(step: TrainStep, name: str, own: Any = part) -> tuple[list[Tensor], dict[str, Any]]:
    losses = [step(own(x), own(y)) for x, y in batches(name, STEPS)]
    return losses, step.state_dict()


# The numbers are those of gathers into new memory.


def both_ways(name: str, stage: int, options: dict[str, Any]) -> tuple[bool, int, int]:
    """(whether all numbers are equal, buckets with a room, without one where there are none)."""
    grid = {"placement": zg.placement("cpu", ranks=[[0, 1], [2, 3]])} if zg.world_size() == 4 else {}
    found = []
    for plain in (False, True):
        step = adam_step(name, stage, **{**SMALL, **grid, **options})
        if plain:
            with without_rooms():
                found.append((trained(step, name), len(rooms(step))))
        else:
            found.append((trained(step, name), len(rooms(step))))
    (one, with_rooms), (other, without) = found
    return not difference(one, other), with_rooms, without


@sliced(
    "ranks, name, stage, options",
    [
        (2, "mlp", 1, {"clip_grad_norm": 0.5, "gradient_accumulation_steps": 2, **TINY}),
        pytest.param(2, "mlp", 2, {"backend": "inductor", **TINY}, marks=needs_compiler),
    ],
    [(2, GPT, 1, {"clip_grad_norm": 0.5}), (2, "conv", 2, {"clip_grad_norm": 0.5}), (4, "mlp", 2, TINY)],
)
def test_a_room_changes_no_number(pool: Pool, ranks: int, name: str, stage: int, options: dict[str, Any]) -> None:
    same, with_rooms, without = pool.run(ranks, both_ways, name, stage, options)[0]
    assert same
    assert with_rooms > 0
    assert without == 0


def gathered_by_torch() -> tuple[bool, int]:
    """(whether torch's collectives into rooms yield the numbers of exchanges, how many fill one)."""
    model, other = make("mlp"), make("mlp")
    exchanging = trained(TrainStep(other, adamw(other), 2, **TINY), "mlp")
    step = TrainStep(model, adamw(model), 2, **TINY)
    with by_torch():
        found = trained(step, "mlp")
    target = torch.ops._c10d_functional.all_gather_into_tensor_out.default
    return not difference(found, exchanging), len(
        step.inspect.graph.graph.find_nodes(op="call_function", target=target)
    )


def test_collectives_of_torch_fill_rooms_as_well(pool: Pool) -> None:
    same, fill = pool.run(2, gathered_by_torch)[0]
    assert same
    assert fill > 0


# What the caller is given does not change.


def returned() -> tuple[bool, int]:
    """(whether what was returned is what it was, rooms)."""
    model = make(GPT)
    step = Returning(model, adamw(model), 2, **SMALL)
    kept, copies = [], []
    for x, y in batches(GPT, STEPS):
        _, *values = step(part(x), part(y))
        kept.append(values)
        copies.append([value.clone() for value in values])
    different = not torch.equal(copies[0][0], copies[1][0])
    return not difference(kept, copies) and different, len(rooms(step))


def test_a_returned_parameter_stays_as_it_was(pool: Pool) -> None:
    same, with_rooms = pool.run(2, returned)[0]
    assert same
    assert with_rooms > 0


def rooms_beside(change: Callable[[fx.Graph, fx.Node], None]) -> tuple[int, int]:
    """Rooms in one rank's graph as it is, and where one gathered bucket is read by what ``change`` adds."""
    found = Case(GPT, 2, **SMALL).prepared()
    module = found.graph_after("offload")
    (start, *_) = module.graph.find_nodes(op="call_function", target=GATHER)
    change(module.graph, next(iter(start.users)))
    module = gather_in_place(module, found.context)
    module.graph.lint()
    return len(placeholders(found.graph.graph, "gather_buffer")), len(placeholders(module.graph, "gather_buffer"))


def given(graph: fx.Graph, gathered: fx.Node) -> None:
    """The caller is given a view."""
    with graph.inserting_after(gathered):
        view = emit(graph, aten.slice.Tensor, (gathered, 0, 0, 2), origin(gathered), like=gathered)
    output = graph.output_node()
    output.args = ((*output.args[0], view),)  # type: ignore[misc]


def read_late(graph: fx.Graph, gathered: fx.Node) -> None:
    """A view is read behind the update."""
    with graph.inserting_after(gathered):
        view = emit(graph, aten.slice.Tensor, (gathered, 0, 0, 2), origin(gathered), like=gathered)
    output = graph.output_node()
    with graph.inserting_before(output):
        total = emit(graph, aten.sum.default, (view,), origin(gathered), like=gathered)
    output.args = ((*output.args[0], total),)  # type: ignore[misc]


@pytest.mark.parametrize("change", [given, read_late])
def test_what_is_read_behind_its_update_has_no_gather_buffer(change: Callable[[fx.Graph, fx.Node], None]) -> None:
    before, after = rooms_beside(change)
    assert after == before - 1 > 0


# A forward graph shares the store.


def predicted_between() -> tuple[bool, bool, int, float]:
    """(training as without predictions, predictions as plain, rooms, share of the predicted bytes that are alive)."""
    model, alone, plain = make("mlp"), make("mlp"), make("mlp")
    step, other = TrainStep(model, adamw(model), 2, **TINY), TrainStep(alone, adamw(alone), 2, **TINY)
    predict = Predict(model)
    same = right = True
    for x, y in batches("mlp", STEPS):
        same &= torch.equal(step(part(x), part(y)), other(part(x), part(y)))
        plain.load_state_dict(step.state_dict()["modules"]["model"])
        right &= torch.allclose(predict(part(x)), plain(part(x)), atol=1e-6)
    filled = len(placeholders(predict.inspect.graph.graph, "gather_buffer"))
    predicted = predict.inspect.memory.peak
    return same, right, filled, most_alive_bytes(predict, part(batches("mlp", 1)[0][0])) / predicted


def test_a_forward_graph_gathers_into_the_rooms_of_training(pool: Pool) -> None:
    for same, right, filled, alive in pool.run(2, predicted_between):
        assert same
        assert right
        assert filled > 0
        assert alive == pytest.approx(1, rel=0.1)


# Memory.


def lie_within(stage: int) -> tuple[list[bool], list[bool], int, int]:
    """Return True if each shard is inside its gather buffer and no buffer has moved since the last step; bytes."""
    step = adam_step("mlp", stage, **TINY)
    (x, y), (x2, y2) = batches("mlp", 2)
    step(part(x), part(y))
    before = {store: store.gather_buffer.data_ptr() for store in rooms(step) if store.gather_buffer is not None}
    step(part(x2), part(y2))
    within = []
    for store in rooms(step):
        assert store.gather_buffer is not None
        assert isinstance(store.flat, Tensor)
        at = store.gather_buffer.data_ptr() + zg.rank() * nbytes(store.flat)
        within.append(store.flat.data_ptr() == at and nbytes(store.gather_buffer) == 2 * nbytes(store.flat))
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for store in stores_of(step)
        for tensor in (store.flat, store.gather_buffer, *store.state.values())
        if isinstance(tensor, Tensor)
    }
    stayed = [store.gather_buffer.data_ptr() == at for store, at in before.items() if store.gather_buffer is not None]
    return within, stayed, step.state_bytes(), sum(storages.values())


@sliced("stage", [1], [2])
def test_the_shard_is_a_piece_of_the_room_which_stays(pool: Pool, stage: int) -> None:
    for within, stayed, said, held in pool.run(2, lie_within, stage):
        assert within
        assert all(within)
        assert len(stayed) == len(within)
        assert all(stayed)
        assert said == held


class Wide(TrainStep):
    """Layers of one bucket each."""

    def __init__(self, stage: int) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]
        model = nn.Sequential(*layers, nn.Linear(256, 3))
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.1), stage, bucket_size=2**18)


def grown(stage: int) -> tuple[int, int, int]:
    """Bytes that a step takes with rooms, and without; bytes of all gathered buckets."""
    # Most is held where backward begins, with every bucket gathered.
    x, y = torch.randn(1024, 256), torch.randint(3, (1024,))
    step, plain = Wide(stage), Wide(stage)
    step(x, y)
    whole = sum(nbytes(store.gather_buffer) for store in rooms(step) if store.gather_buffer is not None)
    with without_rooms():
        plain(x, y)
    return most_allocated_bytes(step, x, y), most_allocated_bytes(plain, x, y), whole


@sliced("stage", [2], [1])
def test_a_step_takes_no_memory_for_what_it_gathers(pool: Pool, stage: int) -> None:
    for taken, before, whole in pool.run(2, grown, stage):
        assert whole > 4 * 256 * 256 * 4
        # The bucket of the first layers may be out of use already.
        assert before - taken > whole / 2


def buffers_with(stage: int, **options: Any) -> int:
    """Count the gather buffers of a prepared step."""
    return len(placeholders(Case(GPT, stage, **SMALL, **options).prepared().graph.graph, "gather_buffer"))


@pytest.mark.parametrize(
    ("stage", "options"), [(3, {}), (2, {"memory_budget": "1GiB"}), (2, {"amp_dtype": torch.bfloat16})]
)
def test_what_comes_and_goes_or_is_cast_has_no_gather_buffer(stage: int, options: dict[str, Any]) -> None:
    count = buffers_with(stage, **options)
    # What is computed with in fp32 anyway, scales of norms, may have one.
    assert count < buffers_with(2) if "amp_dtype" in options else count == 0 < buffers_with(2)


def own_backend(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    return module.forward


def test_a_backend_of_ones_own_is_given_no_inputs_that_overlap() -> None:
    assert buffers_with(2, backend=own_backend) == 0 < buffers_with(2)


def stages_in_turn() -> list[tuple[int, bool, int]]:
    """(rooms, whether the numbers are those of stage 3 alone, predicted bytes at rest beside those held) by stage.

    A layer is frozen, as all but the adapters are in LoRA.
    """
    model, other = make("mlp"), make("mlp")
    for one in (model, other):
        one.get_submodule("0").requires_grad_(requires_grad=False)
    step, alone = TrainStep(model, adamw(model), 3, **TINY), TrainStep(other, adamw(other), 3, **TINY)
    found = []
    for stage, (x, y) in zip((2, 3, 1), batches("mlp", 3), strict=True):
        step.config.zero.stage = stage
        same = torch.equal(step(part(x), part(y)), alone(part(x), part(y)))
        found.append((len(rooms(step)), same, step.inspect.memory.at_rest - step.state_bytes()))
    return found


def test_a_stage_that_frees_what_it_gathers_gives_rooms_back(pool: Pool) -> None:
    two, three, one = pool.run(2, stages_in_turn)[0]
    assert two[0] == one[0] > 0
    assert three[0] == 0
    for _, same, more in (two, three, one):
        assert same
        assert abs(more) <= 64


# Checkpoints.


def saved(folder: str) -> tuple[int, int]:
    """Return the bytes that are written, and those of the state."""
    step = adam_step(GPT, 2, **SMALL)
    step(*map(part, batches(GPT, 1)[0]))
    step.save(folder)
    written = sum(one.stat().st_size for one in Path(folder).rglob("*.safetensors"))
    return written, 12 * sum(parameter.numel() for parameter in make(GPT).parameters())


def test_a_checkpoint_has_each_number_once(pool: Pool, tmp_path: Path) -> None:
    written, state = pool.run(2, saved, str(tmp_path))[0]
    assert state <= written < 1.1 * state
