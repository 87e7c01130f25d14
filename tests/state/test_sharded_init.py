"""Models made split from the start have the values of plain construction, and are never whole."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerograph as zg
from tests.constructors import CONSTRUCTIONS, tied
from tests.harness import LossStep, Predict, stores_of
from tests.models import TrainStep, adamw, batches, part, train_plainly
from tests.peak_memory import Live, most_allocated
from tests.pool import Pool
from tests.scripts import run_apart
from zerograph.runtime.parameters import SplitParameter
from zerograph.state import construction


def split(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with zg.sharded_init():
        return make()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Tensor] = Predict(model).state_dict()["modules"]["model"]
    return state


def differences(make: Callable[[], nn.Module]) -> list[str]:
    """Return the differences between a model made split and the plain one; ranks but the first have another seed."""
    torch.manual_seed(0)
    plain = make()
    after = torch.rand(1)
    model = split(make, seed=zg.rank())
    found = [] if torch.equal(torch.rand(1), after) else ["random numbers afterwards"]
    state = state_of(model) | dict(model.named_buffers())
    for name, value in {**plain.state_dict(), **dict(plain.named_buffers())}.items():
        same = name in state and state[name].dtype == value.dtype and torch.equal(state[name], value)
        found += [] if same else [name]
    found += [name for name, one in model.named_parameters() if one.numel() and not isinstance(one, SplitParameter)]
    same_names = [name for name, _ in plain.named_parameters()] == [name for name, _ in model.named_parameters()]
    return found if same_names else [*found, "names"]


def everything() -> nn.Module:
    return nn.ModuleDict({name: make() for name, make in CONSTRUCTIONS.items()})


def differences_of_everything() -> list[str]:
    with every_tensor_cut():
        return differences(everything)


@contextlib.contextmanager
def every_tensor_cut() -> Iterator[None]:
    """Cut tensors of any size inside, as large ones are."""
    with mock.patch.object(construction, "LEAST_CUT_BYTES", 1):
        yield


@pytest.fixture(scope="module")
def found_differences(pool: Pool) -> list[str]:
    return [name for found in pool.run(2, differences_of_everything) for name in found]


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_values_are_those_of_plain_construction(found_differences: list[str], name: str) -> None:
    assert [one for one in found_differences if one.startswith(f"{name}.")] == []


def test_random_numbers_go_on_as_after_plain_construction(found_differences: list[str]) -> None:
    assert [one for one in found_differences if one.split(".")[0] not in CONSTRUCTIONS] == []


def from_transformers() -> dict[str, list[str]]:
    import transformers

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    names = {"vocab_size": 31, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    language = transformers.AutoModelForCausalLM.from_config
    vision = transformers.AutoModelForImageClassification.from_config
    models = {
        "gpt2": lambda: language(transformers.GPT2Config(**sizes, **names)),
        "llama": lambda: language(transformers.LlamaConfig(**sizes, **names), dtype=torch.bfloat16),
        "vit": lambda: vision(transformers.ViTConfig(**sizes, image_size=8, patch_size=4)),
        "convnext": lambda: vision(
            transformers.ConvNextConfig(hidden_sizes=[4, 8, 8, 8], depths=[1, 1, 1, 1], drop_path_rate=0.1)
        ),
    }
    with every_tensor_cut():
        return {name: differences(make) for name, make in models.items()}


def test_models_of_transformers_are_made_split(pool: Pool) -> None:
    assert pool.run(2, from_transformers) == [{"gpt2": [], "llama": [], "vit": [], "convnext": []}] * 2


def trained() -> dict[int, tuple[list[float], dict[str, Tensor]]]:
    found = {}
    for stage in (0, 3):
        model = split(tied)
        step = TrainStep(model, adamw(model), stage, backend="eager")
        losses = [float(step(part(x), part(y))) for x, y in batches("gpt_tied", 3)]
        found[stage] = losses, step.state_dict()["modules"]["model"]
    return found


def test_training_is_that_of_the_plain_model(pool: Pool) -> None:
    torch.manual_seed(0)
    plain = tied()
    losses = train_plainly(plain, adamw(plain), batches("gpt_tied", 3))
    for found, state in pool.run(2, trained)[0].values():
        torch.testing.assert_close(found, [float(one) for one in losses])
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


WIDTH = 128


def deep() -> nn.Module:
    """Eight layers, cast once they are made, and a copy of them for comparison."""
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))).double().float()
    return nn.ModuleList([layers, copy.deepcopy(layers)])


def distance(model: nn.Module) -> LossStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda model, x: (model[0](x) - 2 * model[1](x)).square().mean()  # noqa: E731
    return LossStep(model, optimizer, 3, loss, bucket_size=4 * 2 * WIDTH**2, backend="eager")


def memory() -> tuple[int, int]:
    made: list[nn.Module] = []
    making = most_allocated(lambda: made.append(split(deep)))
    step, x = distance(made[0]), torch.ones(1, WIDTH)
    # The profiler does not hear of memory that a collective's own thread gives back.
    with Live([store.flat for store in stores_of(step)]) as live:
        step.compile(x)
    return making, live.most


def test_no_rank_holds_more_than_its_parts_and_a_few_tensors(pool: Pool) -> None:
    layer = 4 * WIDTH**2
    parts = 16 * layer // 2
    for making, compiling in pool.run(2, memory):
        # A layer in fp64, as it is gathered and in its own memory.
        assert parts < making <= parts + 4.2 * layer
        # Two buckets of two layers each, and what the collectives' own threads are late to let go of.
        assert parts < compiling <= parts + 7 * layer


def on_a_grid() -> tuple[list[int], list[bool]]:
    """Made on a grid of ranks, and used on it, and on a line."""
    grid = zg.placement("cpu", ranks=[[0, 1], [2, 3]])
    torch.manual_seed(0)
    plain = nn.Linear(8, 4)
    torch.manual_seed(0)
    with zg.sharded_init(grid):
        model = nn.Linear(8, 4)
    sizes = [store.flat.numel() for store in stores_of(Predict(model))]
    x = torch.ones(4, 8)
    same = []
    for placement in (grid, None):
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.0), 2, backend="eager", placement=placement)
        step(part(x), torch.zeros(1, dtype=torch.int64))
        same.append(all(torch.equal(value, dict(plain.named_parameters())[k]) for k, value in state_of(model).items()))
    return sizes, same


def test_on_a_grid_parts_are_of_its_last_dimension_and_any_graph_takes_them_over(pool: Pool) -> None:
    assert pool.run(4, on_a_grid) == [([16, 2], [True, True])] * 4


LARGE, LAYERS, RANKS = 1024, 16, 8


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(LARGE, LARGE, bias=False) for _ in range(LAYERS)))


def made_within_a_limit(file: Path) -> None:
    """As the first of eight ranks, of which the others are simulated, with room for a quarter of the model."""
    torch.set_num_threads(1)
    # One arena (-8), and what is larger than 64 KiB is mapped apart (-3): nothing comes from memory that was freed.
    libc = ctypes.CDLL(None)
    assert libc.mallopt(-8, 1) == libc.mallopt(-3, 2**16) == 1
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    split(lambda: nn.Linear(3, 3))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * LARGE**2 * LAYERS // 4, resource.RLIM_INFINITY))
    found: dict[str, Any] = {}
    try:
        large()
    except (RuntimeError, MemoryError) as error:
        found["plain"] = str(error)
    model = split(large)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    torch.manual_seed(0)
    parts = [store.flat for store in stores_of(Predict(model))]
    wanted = [one.flatten()[: LARGE**2 // RANKS] for one in large().parameters()]
    found["same"] = all(torch.equal(one, other) for one, other in zip(parts, wanted, strict=True))
    file.write_text(json.dumps(found))


def test_a_model_larger_than_memory_is_made(tmp_path: Path) -> None:
    assert run_apart(made_within_a_limit, tmp_path / "found") == 0
    found = json.loads((tmp_path / "found").read_text())
    assert "can't allocate memory" in found["plain"]
    assert found["same"]


def resumed() -> list[tuple[Any, ...]]:
    """A checkpoint of a plain model is loaded into one that was made split, before its first step."""
    data = batches("gpt_tied", 3)
    torch.manual_seed(0)
    model = tied()
    first = TrainStep(model, adamw(model), 2, backend="eager")
    first(*map(part, data[0]))
    state = first.state_dict()
    again = split(tied, seed=5)
    second = TrainStep(again, adamw(again), 2, backend="eager")
    second.load_state_dict(state)
    return [tuple(float(step(*map(part, batch))) for step in (first, second)) for batch in data[1:]]


def test_a_checkpoint_is_loaded_before_the_first_step(pool: Pool) -> None:
    for pair in pool.run(2, resumed)[0]:
        assert pair[0] == pair[1]


def built_on() -> list[str]:
    """The optimizers that cannot be built on parameters that were made split."""
    model = split(lambda: nn.Linear(3, 3, bias=False))
    refused = []
    for name, one in vars(torch.optim).items():
        if isinstance(one, type) and issubclass(one, torch.optim.Optimizer) and one is not torch.optim.Optimizer:
            try:
                one(model.parameters(), lr=0.1)
            except zg.SplitParameterError:
                refused.append(name)
    return refused


def test_all_optimizers_of_torch_can_be_built_on_them(pool: Pool) -> None:
    assert pool.run(1, built_on) == [[]]


def adagrad() -> tuple[list[float], list[float]]:
    x = torch.ones(2, 3)
    found = []
    for make in (split, lambda make: (torch.manual_seed(0), make())[1]):
        model = make(lambda: nn.Linear(3, 3))
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
        step = TrainStep(model, optimizer, 2, backend="eager")
        step.loss_fn = lambda y, target: (y - target).square().mean()
        found.append([float(step(x, x)) for _ in range(3)])
    return found[0], found[1]


def test_state_that_an_optimizer_makes_when_it_is_built_is_taken_over(pool: Pool) -> None:
    ours, wanted = pool.run(1, adagrad)[0]
    assert ours == wanted


def failing() -> tuple[str, bool, str]:
    held: list[nn.Module] = []
    torch.manual_seed(zg.rank())
    before = torch.get_rng_state()

    def make() -> None:
        held.append(nn.Linear(3, 3))
        if zg.rank() == 1:
            raise ValueError("no room at the inn")

    message = ""
    try:
        with zg.sharded_init():
            make()
    except (ValueError, zg.RankMismatchError) as error:
        message = f"{type(error).__name__}: {error}"
    unchanged = torch.equal(torch.get_rng_state(), before)
    with pytest.raises(zg.SplitParameterError, match="without values"):
        held[0](torch.ones(3))
    return message, unchanged, type(split(lambda: nn.Linear(3, 3)).weight).__name__


def test_a_failure_on_one_rank_is_an_error_on_all_and_leaves_nothing_behind(pool: Pool) -> None:
    (first, *left), (second, *other) = pool.run(2, failing)
    assert first.startswith("RankMismatchError: rank 1 failed")
    assert "no room at the inn" in first
    assert second == "ValueError: no room at the inn"
    assert left == other == [True, "SplitParameter"]


def different_models() -> str:
    with pytest.raises(zg.RankMismatchError) as raised:
        split(lambda: nn.Linear(3, 3 + zg.rank()))
    return str(raised.value)


def test_ranks_that_make_different_models_are_told(pool: Pool) -> None:
    assert "first in line" in pool.run(2, different_models)[0]


def different_values() -> str:
    with pytest.raises(zg.RankMismatchError) as raised:
        split(lambda: nn.ParameterList([nn.Parameter(torch.from_numpy(np.full(3, float(zg.rank()))))]))
    return str(raised.value)


def test_ranks_that_make_a_model_of_other_values_are_told(pool: Pool) -> None:
    assert "from outside" in pool.run(2, different_values)[0]


def failing_at_a_gather() -> str:
    """One rank fails as the other gathers a weight, and the other's construction catches that."""

    def make() -> None:
        first, _ = nn.Linear(3, 3), nn.Linear(3, 3)
        if zg.rank() == 1:
            raise ValueError("no room at the inn")
        with contextlib.suppress(zg.RankMismatchError):
            first.weight.data.mul_(2)

    with every_tensor_cut(), pytest.raises((ValueError, zg.RankMismatchError)) as raised, zg.sharded_init():
        make()
    return f"{type(raised.value).__name__}: {raised.value} {type(split(lambda: nn.Linear(3, 3)).weight).__name__}"


def test_a_failure_reaches_a_rank_that_gathers(pool: Pool) -> None:
    first, second = pool.run(2, failing_at_a_gather)
    assert first.startswith("RankMismatchError: rank 1 failed")
    assert first.endswith("SplitParameter")
    assert second == "ValueError: no room at the inn SplitParameter"


def nested() -> list[dict[str, Tensor]]:
    """Return the state of a model of which a function constructs a part in a block of its own, and of a plain one."""
    states = []
    for outer, inner in ((zg.sharded_init, zg.sharded_init), (contextlib.nullcontext, contextlib.nullcontext)):
        torch.manual_seed(0)
        with outer():
            first = nn.Linear(3, 3)
            with inner():
                second = nn.Linear(3, 3)
            model = nn.Sequential(first, second, nn.Linear(3, 3))
        step: Any = InBuild()
        step.model = model
        states.append(step.state_dict()["modules"]["model"])
    return states


def test_a_block_inside_of_another_is_a_part_of_it(pool: Pool) -> None:
    for sharded, plain in pool.run(2, nested):
        torch.testing.assert_close(sharded, plain, rtol=0, atol=0)


def lazy() -> None:
    split(lambda: nn.LazyLinear(3))


class InBuild(zg.ZeroGraph):
    def build(self, x: Tensor) -> Tensor:
        with zg.sharded_init():
            model = nn.Linear(3, 3)
        return model(x)


def called_inside() -> None:
    with zg.sharded_init():
        Predict(nn.Linear(3, 3))(torch.ones(2, 3))


def saved_inside() -> None:
    with zg.sharded_init():
        copy.copy(nn.Linear(3, 3).weight).share_memory_()


def sent_inside() -> None:
    with zg.sharded_init():
        dist.all_reduce(torch.rand(3))


def trained_inside() -> None:
    with zg.sharded_init():
        model = nn.Linear(3, 3)
        model(torch.ones(3)).sum().backward()


def copied_from_meta() -> None:
    with zg.sharded_init():
        torch.empty(3, device="meta").to("cpu")


def used_eagerly() -> None:
    split(lambda: nn.Linear(3, 3))(torch.ones(3))


def view_used() -> None:
    with zg.sharded_init():
        model = nn.Linear(3, 3)
        row = model.weight[0]
    print(row + 1)


MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "lazy": (lazy, zg.ConfigError, "lazy module"),
    "in build()": (lambda: InBuild()(torch.ones(2, 3)), zg.ConfigError, "inside of build"),
    "a graph called": (called_inside, zg.InputError, "only parts there"),
    "shared memory": (saved_inside, zg.CaptureError, "share_memory_"),
    "a collective": (sent_inside, zg.CaptureError, "other ranks"),
    "sparse": (lambda: split(lambda: nn.ParameterList([torch.eye(3).to_sparse()])), zg.CaptureError, "sparse_coo"),
    "a gradient": (trained_inside, zg.ConfigError, "zero_grad"),
    "a copy of nothing": (copied_from_meta, NotImplementedError, "no data"),
    "eager use": (used_eagerly, zg.SplitParameterError, "give it to a ZeroGraph"),
    "a view of a parameter": (view_used, zg.SplitParameterError, "shares memory"),
}


def mistakes() -> dict[str, tuple[str, str]]:
    found = {}
    for name, (make, _, _) in MISTAKES.items():
        try:
            make()
            found[name] = "nothing", ""
        except Exception as error:
            found[name] = type(error).__name__, str(error)
    return found


def test_mistakes_are_clear_errors(pool: Pool) -> None:
    found = pool.run(1, mistakes)[0]
    for name, (_, kind, part_of_message) in MISTAKES.items():
        assert found[name][0] == kind.__name__, name
        assert part_of_message in found[name][1], name


def outside() -> tuple[str, bool, bool]:
    torch.manual_seed(0)
    teacher = nn.Linear(3, 3)
    before = teacher.weight.detach().clone()
    with zg.sharded_init():
        student = copy.deepcopy(teacher)
        with torch.no_grad():
            teacher.bias.zero_()
    return type(teacher.weight).__name__, torch.equal(state_of(student)["weight"], before), not teacher.bias.any()


def test_what_was_there_before_stays_plain_and_is_written_to(pool: Pool) -> None:
    assert pool.run(2, outside) == [("Parameter", True, True)] * 2
