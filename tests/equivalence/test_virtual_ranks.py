"""With ``config.virtual_ranks`` the bits of a run do not depend on the number of ranks, at any stage.

All that a run returns and leaves is compared: losses, norms, parameters, buffers and the optimizer's state.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config

import zerograph as zg
from tests.harness import (
    Function,
    LossStep,
    Predict,
    deviation,
    each_stage,
    joined,
    needs_compiler,
    plain_run,
    prepare,
    sliced,
)
from tests.models import MODELS, TrainStep, adam_step, adamw, batches, make, part, train_on
from tests.peak_memory import most_alive_bytes
from tests.pool import Pool, RanksError
from tests.scripts import run_script
from zerograph.ir.buckets import VECTOR_BYTES
from zerograph.ir.mesh import line
from zerograph.ir.step_graph import output_nodes
from zerograph.ops.rows import exchange_rows
from zerograph.ops.tree_sum import sum_in_tree
from zerograph.passes.buckets import flat_gradients
from zerograph.runtime.backends import pieces
from zerograph.runtime.backends.pieces import Piece, cut, cut_exactly
from zerograph.runtime.state import text_of

STEPS, SIZE = 3, 24
STAGES = (0, 1, 2, 3)
# The bits of each tensor as text, by name.
Run = dict[str, str]


class Step(LossStep):
    """Returns the loss and the norm of the gradients before it clips them."""

    def build(self, *batch: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        loss = super().build(*batch)
        return loss, torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def masked_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Weights that are no whole numbers: their sum depends on the order, too."""
    weights = (y.float() * 0.3 + 0.1).sqrt()
    return (F.cross_entropy(model(x), y, reduction="none") * weights).sum() / weights.sum()


def loss_of_pairs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Each sample is compared with those of all slices."""
    rows = F.normalize(model(x), dim=1)
    return F.cross_entropy(rows @ rows.T * 5, torch.arange(len(x)))


def loss_both_ways(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Each sample is compared with those of all slices, along rows and along columns."""
    rows = F.normalize(model(x), dim=1)
    others = F.normalize(model(x.flip(1)), dim=1)
    pairs, labels = rows @ others.T * 5, torch.arange(len(x))
    return F.cross_entropy(pairs, labels) + F.cross_entropy(pairs.T, labels) + pairs.softmax(0).square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(7, 9, batch_first=True), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(torch.stack([x, x.sin()], 1))[0].mean(1))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 15), nn.Dropout(0.3), nn.GELU(), nn.Linear(15, 3))


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Each parameter is whole on one rank, whose number decides where it is in its bucket."""
    return torch.optim.Muon(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "perceptron": ("mlp", {}),
    "GPT": ("gpt_tied_of_one_block", {}),
    "GPT in bf16": ("gpt_of_one_block", {"amp_dtype": torch.bfloat16}),
    "scaled fp16": ("mlp", {"amp_dtype": torch.float16, "grad_scaler": zg.GradScaler(2.0**20, growth_interval=2)}),
    "dropout": ("mlp", {"model": dropout}),
    "weighted mean": ("mlp", {"loss": masked_loss}),
    "all pairs": ("mlp", {"loss": loss_of_pairs}),
    "all pairs both ways": ("mlp", {"loss": loss_both_ways}),
    "recurrent": ("mlp", {"model": Recurrent}),
    "batch norm": ("conv", {}),
    "batch norm of each slice": ("conv", {"batch_norm": "local"}),
    "SGD": ("mlp", {"optimizer": sgd}),
    "fused AdamW": ("mlp", {"optimizer": fused}),
    "recomputation": ("gpt", {"activation_checkpointing": "blocks"}),
    "small buckets and a parameter that stays whole": ("mlp", {"bucket_size": 2**8, "shard_min_size": 40}),
}


def new_step(data: str, slices: int, options: dict[str, Any]) -> Step:
    options = dict(options)
    torch.manual_seed(0)
    model = options.pop("model", MODELS[data][0])()
    step = Step(model, options.pop("optimizer", adamw)(model), loss=options.pop("loss", mean_loss))
    step.config.set(**{"virtual_ranks": slices, "seed": 5} | options)
    return step


def own_rows(x: Tensor, step: zg.ZeroGraph) -> Tensor:
    """Return the rows of this rank's slices."""
    slices = torch.arange(step.config.virtual_ranks or zg.world_size()).tensor_split(zg.world_size())
    return x.unflatten(0, (sum(map(len, slices)), -1))[slices[zg.rank()]].flatten(0, 1)


def run_of(step: Step, data: str, first: int = 0, last: int = STEPS) -> Run:
    results = [step(*(own_rows(x, step) for x in batch)) for batch in batches(data, STEPS, SIZE)[first:last]]
    run = {f"loss {n}": text_of(loss) for n, (loss, _) in enumerate(results)}
    return run | {f"norm {n}": text_of(norm) for n, (_, norm) in enumerate(results)} | step.fingerprint()


def trained(data: str, slices: int, stages: tuple[int, ...], options: dict[str, Any]) -> list[Run]:
    step = new_step(data, slices, options)
    return [run_of(step, data) for _ in each_stage(step, stages)]


def assert_equal(run: Run, wanted: Run, where: str) -> None:
    assert run.keys() == wanted.keys()
    different = [name for name, value in wanted.items() if run[name] != value]
    assert not different, f"{where}: {different}"


@functools.cache
def alone(name: str, slices: int) -> Run:
    """Return what one rank computes at stage 0, with which all is compared."""
    (run,) = trained(CASES[name][0], slices, (0,), CASES[name][1])
    return run


# Of each number of ranks its stages; one case shows that all agree.
Stages = dict[int, tuple[int, ...]]
EVERYWHERE: Stages = {1: (3,), 2: STAGES, 4: STAGES}
# One slice on each of four ranks: test_a_checkpoint_of_two_ranks_goes_on_with_the_same_bits_on_one_and_on_four.
SOMEWHERE: tuple[Stages, ...] = ({2: STAGES}, {2: (0,)}, {2: (2,)}, {2: (3,)})
# Sums of slices 3 and 4, or 4 to 7, are those of two ranks: of 12 slices a rank has 6, 4 or 3.
ACROSS: Stages = {2: (0, 3), 3: (2,), 4: (2,)}
# The first of 3 ranks has two of 4 slices. The others compute one more than their own, and do not add it.
OTHERS = ("GPT", "all pairs both ways", "batch norm", "batch norm of each slice", "SGD", "fused AdamW", "recomputation")


@sliced(
    "name, slices, stages",
    [
        *((name, 4, SOMEWHERE[n and 1 + n % 3]) for n, name in enumerate(CASES) if name not in OTHERS),
        ("perceptron", 3, {3: (3,)}),
        ("perceptron", 12, {2: (3,), 4: (2,)}),
        ("batch norm", 4, {3: (3,)}),
    ],
    [(name, *case) for name in CASES for case in ((4, EVERYWHERE), (12, ACROSS), (4, {3: STAGES}))],
)
def test_any_number_of_ranks_has_the_bits_of_one(pool: Pool, name: str, slices: int, stages: Stages) -> None:
    data, options = CASES[name]
    for ranks, there in stages.items():
        for rank, runs in enumerate(pool.run(ranks, trained, data, slices, there, options)):
            for stage, run in zip(there, runs, strict=True):
                assert_equal(run, alone(name, slices), f"stage {stage}, rank {rank} of {ranks}")


def compiled(data: str, slices: int, stages: tuple[int, ...], options: dict[str, Any]) -> list[Run]:
    with patch.object(pieces, "SMALLEST", 0):
        return trained(data, slices, stages, options | {"backend": "inductor"})


@needs_compiler
@sliced(
    "name, slices, stages",
    [("all pairs", 2, {2: (3,)})],
    [(name, 4, {1: (3,), 2: (0, 3), 3: (2,), 4: (2, 3)}) for name in CASES if name != "batch norm of each slice"],
)
def test_code_that_inductor_compiles_has_the_same_bits_on_any_number_of_ranks(
    pool: Pool, name: str, slices: int, stages: dict[int, tuple[int, ...]]
) -> None:
    """Slices without a loop are cut in other pieces than those of several loops. Forward and backward are eager's."""
    data, options = CASES[name]
    (wanted,) = compiled(data, slices, (0,), options)
    eager = alone(name, slices)
    assert (wanted["loss 0"], wanted["norm 0"]) == (eager["loss 0"], eager["norm 0"])
    for ranks, there in stages.items():
        for stage, run in zip(there, pool.run(ranks, compiled, data, slices, there, options)[0], strict=True):
            assert_equal(run, wanted, f"stage {stage} on {ranks} ranks")


def test_inductor_compiles_with_slices_what_rounds_alike_in_pieces_of_any_size() -> None:
    graph = prepare(new_step("conv", 4, {}), *batches("conv", 1, 1024)[0], ranks=4).graph.graph
    whole, exact = (
        [node.target for piece in cutter(graph) if isinstance(piece, Piece) for node in piece.nodes]
        for cutter in (cut, cut_exactly)
    )
    sums, updates = {torch.ops.aten.sum.dim_IntList}, {torch.ops.aten.addcdiv_.default, torch.ops.aten.sub.Tensor}
    assert sums.issubset(whole)
    assert updates.issubset(exact)
    assert sums.isdisjoint(exact)


def predicted(slices: int) -> Tensor:
    step = Predict(make("mlp"))
    step.config.virtual_ranks = slices
    return step(own_rows(batches("mlp", 1, 8)[0][0], step)).clone()


def test_outputs_are_those_of_a_ranks_own_slices(pool: Pool) -> None:
    wanted = predicted(4)
    parts = pool.run(3, predicted, 4)
    assert list(map(len, parts)) == [4, 2, 2]
    assert torch.equal(torch.cat(parts), wanted)


@pytest.fixture
def eight() -> Iterator[Pool]:
    pool = Pool(size=8)
    yield pool
    pool.close()


# Slices, numbers of ranks and stages.
MANY = ((8, (2, 4, 8), (0, 3)), (24, (2, 3, 4, 6, 8), (2, 3)), (8, (3, 5, 6), (0, 2, 3)), (12, (5, 8), (0, 2, 3)))


@pytest.mark.long
@pytest.mark.parametrize(("slices", "numbers", "stages"), MANY)
@pytest.mark.parametrize("name", ["GPT", "batch norm", "all pairs"])
def test_up_to_eight_ranks_have_the_bits_of_one(
    eight: Pool, name: str, slices: int, numbers: tuple[int, ...], stages: tuple[int, ...]
) -> None:
    for ranks in numbers:
        for run in eight.run(ranks, trained, *(CASES[name][0], slices, stages, CASES[name][1]))[0]:
            assert_equal(run, alone(name, slices), f"{ranks} ranks")


def trained_by_halves(stages: tuple[int, ...]) -> list[Run]:
    with patch.object(flat_gradients, "rows_add_alike", lambda device: False):
        return trained("mlp", 4, stages, {})


def test_blocks_of_a_norm_that_are_summed_as_on_accelerators_have_the_bits_of_one(pool: Pool) -> None:
    (wanted,) = trained_by_halves((0,))
    # Sums in fp64, of another order.
    assert wanted["loss 1"] == alone("perceptron", 4)["loss 1"]
    for ranks, stage in ((2, 0), (3, 3)):
        (run,) = pool.run(ranks, trained_by_halves, (stage,))[0]
        assert_equal(run, wanted, f"{ranks} ranks")


def test_a_norm_on_an_accelerator_sums_no_rows() -> None:
    step, x, y = new_step("mlp", 4, {"model": lambda: make("mlp").to("meta")}), *batches("mlp", 1, 8)[0]
    text = step.prepare(line(2, 0, "ranks"), x, y, device="meta").text()
    halves = re.findall(r" = add\(.*\)  f64 S\(0\) \(4, (\d+)\)", text)
    assert halves == ["32", "16", "8", "4", "2", "1"]
    assert not re.search(r" = sum.*  f64 S\(0\)", text)


@sliced("name", ["conv"], ["mlp"])
def test_slices_compute_what_one_device_computes_on_the_whole_batch(pool: Pool, name: str) -> None:
    plain = plain_run(name, 3, 8, torch.float64)
    for losses, state in pool.run(2, in_fp64, name):
        assert max(map(deviation, losses, plain.losses)) <= 1e-12
        assert deviation(joined(state), joined(plain.state)) <= 1e-12


def in_fp64(name: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    step = adam_step(name, 2, dtype=torch.float64, virtual_ranks=4)
    return train_on(step, batches(name, 3, 8, torch.float64))


def with_rows_at(shift: int, optimizer: Callable[..., torch.optim.Optimizer], stage: int) -> Run:
    """Train on rows that begin so many elements after the beginning of their memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(129, 63, bias=False), nn.GELU(), nn.Linear(63, 3, bias=False))
    step = TrainStep(model, optimizer(model), stage, virtual_ranks=4)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(12, 129, generator=generator), torch.randint(0, 3, (12,), generator=generator)
    rows = torch.empty(shift + part(x).numel())[shift:].view_as(part(x)).copy_(part(x))
    losses = {f"loss {n}": text_of(step(rows, part(y))) for n in range(STEPS)}
    return losses | step.fingerprint()


PLACES = ((1, 5, 2), (2, 3, 3), (4, 0, 1))


@sliced("optimizer, places", [(adamw, PLACES[:2])], [(adamw, PLACES), (muon, PLACES)])
def test_bits_do_not_depend_on_where_rows_are_in_memory(
    pool: Pool, optimizer: Callable[..., torch.optim.Optimizer], places: Any
) -> None:
    """A product of three rows by 129 columns rounds otherwise where a row begins in the middle of a vector."""
    wanted = with_rows_at(0, optimizer, 0)
    for ranks, shift, stage in places:
        assert_equal(pool.run(ranks, with_rows_at, shift, optimizer, stage)[0], wanted, f"{ranks} ranks")


def saved(folder: Path) -> Run:
    step = new_step("mlp", 4, {})
    step.set_zero_mode("distributed_split", stage=3)
    run_of(step, "mlp", 0, 2)
    step.save(folder)
    return run_of(step, "mlp", 2, 3)


def gone_on(folder: Path, stage: int) -> Run:
    step = new_step("mlp", 4, {})
    step.set_zero_mode("distributed_split", stage=stage)
    step.load(folder)
    return run_of(step, "mlp", 2, 3)


def test_a_checkpoint_of_two_ranks_goes_on_with_the_same_bits_on_one_and_on_four(pool: Pool, tmp_path: Path) -> None:
    wanted = pool.run(2, saved, tmp_path / "saved")[0]
    for ranks, stage in ((1, 2), (4, 3)):
        assert_equal(pool.run(ranks, gone_on, tmp_path / "saved", stage)[0], wanted, f"{ranks} ranks")


def peaks(slices: int, stage: int) -> tuple[float, int]:
    """Return the predicted and the measured peak, in bytes, of a perceptron whose gradients are large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 3))
    step = TrainStep(model, adamw(model), stage, virtual_ranks=slices)
    x, y = torch.randn(48, 512), torch.randint(0, 3, (48,))
    for _ in range(2):
        step(own_rows(x, step), own_rows(y, step))
    return step.inspect.memory.peak, most_alive_bytes(step, own_rows(x, step), own_rows(y, step))


@sliced("ranks, slices", [(1, 8), (2, 12)], [(2, 8), (4, 4), (3, 8)])
def test_the_peak_of_memory_is_the_predicted_one(pool: Pool, ranks: int, slices: int) -> None:
    """With several slices a rank holds sums that wait for others, and with 6 of 12 two nodes of the tree."""
    for predicted, measured in pool.run(ranks, peaks, slices, 3):
        assert measured == pytest.approx(predicted, rel=0.03)


@pytest.mark.parametrize(("ranks", "stage"), [(2, 1), (3, 2), (4, 3)])
def test_shards_and_parameters_with_owners_begin_at_whole_vectors(ranks: int, stage: int) -> None:
    for optimizer in (adamw, muon):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(37, 23, bias=False), nn.Linear(23, 11, bias=False))
        step = TrainStep(model, optimizer(model), stage, virtual_ranks=12)
        prepared = prepare(step, torch.ones(24, 37), torch.zeros(24, dtype=torch.long), ranks=ranks)
        for bucket in (planned.layout for planned in prepared.layout):
            assert bucket.padded // ranks * bucket.dtype.itemsize % VECTOR_BYTES == 0
            if bucket.has_owners:
                assert all(slot.offset * bucket.dtype.itemsize % VECTOR_BYTES == 0 for slot in bucket.slots)


def graph_of(ranks: int, **options: Any) -> str:
    step = adam_step("mlp", 2, virtual_ranks=4, **options)
    return prepare(step, *batches("mlp", 1, 8)[0], ranks=ranks).text("lower_to_p2p")


def test_a_rank_with_one_slice_has_no_loop() -> None:
    assert "accumulate_in_tree" in graph_of(2)
    assert "accumulate" not in graph_of(4)


def test_slices_that_wait_for_statistics_of_all_divide_the_loop() -> None:
    step = adam_step("conv", 2, virtual_ranks=4)
    text = prepare(step, *batches("conv", 1, 8)[0], ranks=2).text("loop")
    # A loss needs the count of labels. Of each norm forward needs a mean, then a variance, and backward two sums.
    assert graph_of(2).count("= loop over") == 2
    assert text.count("= loop over") == 7


def test_no_library_adds_partial_sums() -> None:
    text = graph_of(4)
    assert "all_reduce" not in text
    assert "reduce_scatter" not in text


@pytest.mark.parametrize(("width", "in_pieces"), [(128, False), (256, True)])
def test_a_sum_of_more_than_64_kib_travels_in_pieces_and_has_its_shape(width: int, in_pieces: bool) -> None:
    step = Function(lambda x: x.t() @ x, virtual_ranks=4)
    graph = step.prepare(line(2, 0, "ranks"), torch.ones(8, width)).graph.graph
    (total,) = output_nodes(graph)
    assert total.meta["val"].shape == (width, width)
    assert any(node.target is exchange_rows for node in graph.nodes) == in_pieces


def test_what_all_ranks_have_is_cut_where_their_slices_are() -> None:
    step = Function(lambda x, weights: x * weights, virtual_ranks=4)
    prepared = step.prepare(line(3, 0, "ranks"), torch.ones(8, 4), zg.replicated(torch.ones(16, 4)))
    assert [node.meta["val"].shape for node in output_nodes(prepared.graph.graph)] == [(8, 4)]


def test_a_sum_in_a_tree_adds_pairs() -> None:
    parts = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    pairs = (parts[0] + parts[1]) + (parts[2] + parts[3])
    assert torch.equal(sum_in_tree([parts], 7), pairs + ((parts[4] + parts[5]) + parts[6]))


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (5, {}, "on 5 ranks: every rank must have a slice\nRun on at most 4 ranks"),
        (1, {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        (1, {"accumulation_outputs": "packed"}, "accumulation_outputs"),
        (1, {"wire": "int8"}, "wire"),
        (1, {"optimizer_state": "int8"}, "optimizer_state"),
        (1, {"memory_budget": "1GiB"}, "memory_budget without bucket_size"),
        (1, {"backend": "cudagraph"}, "config.backend = 'eager', or 'inductor' on the CPU"),
        (2, {"context_parallel": 2}, "context_parallel"),
        (2, {"shard_by": "parameters", "clip_grad_norm": 1.0}, "has an owner"),
    ],
)
def test_what_would_depend_on_the_number_of_ranks_is_refused(ranks: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(zg.ConfigError, match=message):
        graph_of(ranks, **options)


def test_a_compiler_that_contracts_products_and_sums_is_refused() -> None:
    contracts = inductor_config.patch({"cpp.enable_floating_point_contract_flag": "fast"})
    with contracts, pytest.raises(zg.ConfigError, match="lets the C\\+\\+ compiler contract"):
        graph_of(2, backend="inductor")


def with_threads(rows: list[int], threads: list[int]) -> None:
    torch.set_num_threads(threads[zg.rank()])
    try:
        step = adam_step("mlp", virtual_ranks=4)
        x, y = batches("mlp", 1, 8)[0]
        step(x[: rows[zg.rank()]], y[: rows[zg.rank()]])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("rows", "threads", "message"),
    [
        ([4, 4], [1, 2], "number of threads"),
        ([3, 3], [1, 1], "virtual_ranks = 4 .* does not divide the number of rows"),
        ([4, 2], [1, 1], "unequal numbers of rows"),
        ([4, 4, 4], [1, 1, 1], "ranks have 2, 1, 1 slices, not of equally many rows"),
    ],
)
def test_ranks_that_differ_are_refused(pool: Pool, rows: list[int], threads: list[int], message: str) -> None:
    with pytest.raises(RanksError, match=message):
        pool.run(len(rows), with_threads, rows, threads)


@sliced("others", [(3,)], [(2, 4)])
def test_the_example_prints_one_hash(pool: Pool, others: tuple[int, ...]) -> None:
    script = Path(__file__).parents[2] / "examples" / "same_bits.py"
    printed = {ranks: run_script(pool, ranks, script)[0][0] for ranks in (1, *others)}
    hashes = {re.findall(r"hash (\w+)", text)[0] for text in printed.values()}
    assert len(hashes) == 1
    assert f"{others[-1]} rank(s)" in printed[others[-1]]
