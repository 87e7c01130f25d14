"""Optimizer state in eight bits: the same bits on any number of ranks, and those of plain PyTorch with such state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep, each_stage, needs_compiler, prepare, sliced, stores_of
from tests.models import part, update_by
from tests.pool import Pool
from zerograph.ir.coded_state import UNSIGNED, decode_entry, encode_entry
from zerograph.optim.coded import with_coded_state
from zerograph.optim.hyperparameters import read
from zerograph.optim.program import trace_update
from zerograph.passes.buckets.coded_updates import CodedUpdate
from zerograph.passes.context import BucketUpdate
from zerograph.runtime.backends import coded_kernels
from zerograph.runtime.checkpoint.index import Entry
from zerograph.state.checkpoint import load, state as checkpoint_state

STEPS, SAMPLES = 3, 8
KEYS = ("exp_avg", "exp_avg_sq")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(7, 75)


def adamw(module: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, fused=fused)


def product(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Gradients are sums of products of small integers, which are exact in any order."""
    return (module(x) * y).sum()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda width: torch.randint(-4, 5, (SAMPLES, width), generator=generator).float()  # noqa: E731
    return [(draw(7), draw(75)) for _ in range(STEPS)]


def codes_of(step: zg.ZeroGraph) -> dict[str, Tensor]:
    """The state of a plain optimizer that decodes the codes: equal codes, equal bits."""
    states = step.state_dict()["optimizers"][0]["state"]
    return {f"{number}.{key}": states[number][key] for number in states for key in KEYS}


def train(stages: list[int], options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Return parameters and state after training at each stage."""
    results = []
    module = model()
    step = LossStep(module, adamw(module), loss=product, optimizer_state="int8", **options)
    for _ in each_stage(step, stages):
        for x, y in batches():
            step(part(x), part(y))
        results.append(step.state_dict()["modules"]["model"] | codes_of(step))
    return results


def rounded(value: Tensor, power: int) -> Tensor:
    """Return what eight bits keep of a parameter's entry: its root of this power, relative to its block's largest."""
    blocks = nn.functional.pad(value.flatten(), (0, -value.numel() % 256)).view(-1, 256)
    if power == 4:
        blocks = blocks.sqrt()
    largest = blocks.abs().amax(1, keepdim=True)
    root = (blocks * torch.where(largest > 0, 1 / largest, 0)).abs().sqrt()
    kept = (root * 127).round() / 127 if power == 2 else (root * 255).round().clamp(min=1) / 255
    kept = torch.copysign(kept * kept, blocks) * largest
    return (kept if power == 2 else kept * kept).flatten()[: value.numel()].view(value.shape)


def train_plainly() -> dict[str, Tensor]:
    module = model()
    update = adamw(module)
    for x, y in batches():
        update_by(update, product(module, x, y))
        for state in update.state.values():
            state["exp_avg"], state["exp_avg_sq"] = rounded(state["exp_avg"], 2), rounded(state["exp_avg_sq"], 4)
    states = {f"{number}.{key}": state[key] for number, state in enumerate(update.state.values()) for key in KEYS}
    return dict(module.state_dict()) | states


@sliced(
    "ranks, stages, options",
    [(2, [0, 2], {}), (4, [3], {"bucket_size": 1})],
    [(2, [0, 1, 2, 3], {}), (4, [0], {"bucket_size": 1})],
)
def test_bits_depend_neither_on_the_ranks_nor_on_the_stage(
    pool: Pool, ranks: int, stages: list[int], options: dict[str, Any]
) -> None:
    expected = train([0], {})[0]
    for result in pool.run(ranks, train, stages, options)[0]:
        for name, value in expected.items():
            assert torch.equal(result[name], value), name


def test_an_update_is_that_of_plain_pytorch_with_rounded_state() -> None:
    result, expected = train([2], {})[0], train_plainly()
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=1e-6, atol=1e-9, msg=name)


def test_state_takes_at_most_27_percent() -> None:
    def state_bytes(**options: Any) -> int:
        module = nn.Linear(64, 256)
        step = LossStep(module, adamw(module), 2, product, **options)
        prepared = prepare(step, torch.zeros(8, 64), torch.zeros(8, 256))
        return prepared.memory.kinds["optimizer state"]

    assert state_bytes(optimizer_state="int8") <= 0.27 * state_bytes()


def test_checkpoints_keep_codes_and_load_from_exact_state_and_back(tmp_path: Path) -> None:
    def step(state: str, stage: int) -> LossStep:
        module = model()
        return LossStep(module, adamw(module), stage, product, optimizer_state=state)

    coded = step("int8", 1)
    for x, y in batches():
        coded(x, y)
    coded.save(tmp_path / "coded")
    again, exact = step("int8", 3), step("exact", 2)
    for loaded in (again, exact):
        loaded.load(tmp_path / "coded")
    for name, value in codes_of(coded).items():
        assert torch.equal(codes_of(again)[name], value)
        assert torch.equal(codes_of(exact)[name], value)
    exact.save(tmp_path / "exact")
    once_more = step("int8", 2)
    once_more.load(tmp_path / "exact")
    # One more step: the loaded state is coded, and decoded again.
    losses = [one(*batches()[0]) for one in (coded, again, once_more)]
    for other in (again, once_more):
        for name, value in codes_of(coded).items():
            assert torch.equal(codes_of(other)[name], value), name
    assert torch.equal(losses[0], losses[1])


def test_a_skipped_step_changes_no_bit_of_the_state() -> None:
    module = model()
    step = LossStep(module, adamw(module, fused=True), 2, product, optimizer_state="int8", on_nonfinite="skip")
    x, y = batches()[0]
    step(x, y)
    before = [value.clone() for store in stores_of(step) for value in (store.flat, *store.state.values())]
    with pytest.warns(UserWarning, match="skip"):
        step(torch.full_like(x, torch.inf), y)
    after = [value for store in stores_of(step) for value in (store.flat, *store.state.values())]
    assert all(map(torch.equal, before, after))
    step(x, y)
    assert not torch.equal(stores_of(step)[0].flat, before[0])


def coded(optimizer: Any, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, str]:
    """The kind of each coded entry of an optimizer's state."""
    parameter = nn.Parameter(torch.zeros(4, 4, dtype=dtype))
    made = optimizer([parameter], **options)
    program = trace_update(made, made.param_groups[0], parameter.shape, dtype, "cpu")
    state = with_coded_state(program, "model.weight").state
    return {name: spec.codec.code for name, spec in state.items() if spec.codec is not None}


@pytest.mark.long
@needs_compiler
def test_a_compiled_kernel_yields_the_bits_of_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"on_nonfinite": "skip"}
    expected = train([2], options)[0]
    monkeypatch.setattr(coded_kernels, "MIN_NUMEL", 256)
    compiled: list[CodedUpdate] = []
    compile_one = coded_kernels.compile_update
    monkeypatch.setattr(coded_kernels, "compile_update", lambda module: compiled.append(module) or compile_one(module))
    result = train([2], options)[0]
    assert compiled
    assert all(update.compiled is not None for update in compiled)
    for name, value in expected.items():
        assert torch.equal(result[name], value), name


@torch.no_grad()
def updated(optimizer: Any, *, compiled: bool = False, lifted: Any = (), **options: Any) -> list[Tensor]:
    """Return parameter and state after three updates by an optimizer with coded state."""
    parameter = nn.Parameter(torch.linspace(-1, 1, 4096))
    made = optimizer([parameter], **options)
    traced = trace_update(made, made.param_groups[0], parameter.shape, torch.float32, "cpu", lifted=lifted)
    program = with_coded_state(traced, "weight")
    names = {name: name for name in program.numbers}
    update = CodedUpdate(BucketUpdate((program,), False, names, {}, {}, {}, "optimizer0"), guarded=False)
    assert update.compiles_exactly
    update.compiled = coded_kernels.compile_update(update) if compiled else None
    assert (update.compiled is not None) == compiled
    values = [read(made.param_groups[0], path) for path in program.numbers.values()]
    state = [
        torch.ones((), dtype=spec.dtype)
        if spec.codec is None
        else encode_entry(torch.linspace(0, 1, 4096), spec.codec).view(-1)
        for spec in program.state.values()
    ]
    for number in range(3):
        gradient = torch.linspace(-1, 2 + number, 4096).sin()
        update(parameter.detach(), gradient, *torch.tensor(values, dtype=torch.float64), *state)
    return [parameter, *state]


def test_a_scheduled_hyperparameter_gives_the_bits_of_a_constant_one() -> None:
    scheduled = updated(torch.optim.AdamW, lifted=[("betas", 0), ("betas", 1), ("weight_decay",)])
    assert all(map(torch.equal, updated(torch.optim.AdamW), scheduled))


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_a_compiled_update_of_each_optimizer_yields_the_bits_of_the_operators(optimizer: Any, options: Any) -> None:
    operators, kernel = (updated(optimizer, compiled=compiled, **options) for compiled in (False, True))
    assert all(map(torch.equal, operators, kernel))


def test_a_negative_entry_is_not_coded_as_another_number() -> None:
    values = torch.ones(512)
    values[300] = -1e-3
    decoded = decode_entry(encode_entry(values, UNSIGNED), values.shape, UNSIGNED, torch.float32)
    assert torch.equal(decoded[:256], values[:256])
    assert decoded[256:].isnan().all()


def test_entries_that_are_never_negative_have_a_code_of_their_own() -> None:
    adam = {"exp_avg": "root", "exp_avg_sq": "fourth_root"}
    for kind in (torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam):
        assert coded(kind) == adam
    assert coded(torch.optim.Adam, amsgrad=True) == adam | {"max_exp_avg_sq": "fourth_root"}
    assert coded(torch.optim.SGD, momentum=0.9) == {"momentum_buffer": "root"}
    assert coded(torch.optim.Adagrad) == {"sum": "fourth_root"}
    assert coded(torch.optim.Adadelta) == {"square_avg": "fourth_root", "acc_delta": "fourth_root"}
    assert coded(torch.optim.RMSprop, momentum=0.9) == {"square_avg": "fourth_root", "momentum_buffer": "root"}
    for sign in (1, -1):
        assert coded(Squares, sign=sign) == {"sum": "fourth_root" if sign > 0 else "root"}


class Squares(torch.optim.Optimizer):
    """Sums squares of gradients, weighted by a 0-d tensor that may be negative."""

    def __init__(self, params: Any, sign: int) -> None:
        super().__init__(params, {"lr": 0.1, "sign": sign})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"], state["sum"] = torch.tensor(0.0), torch.zeros_like(parameter)
                state["step"] += 1
                weight = 1 - 0.9 ** state["step"]
                state["sum"].add_(parameter.grad.square() * (weight if group["sign"] > 0 else -weight))
                parameter.sub_(group["lr"] * state["sum"])


def test_what_cannot_be_coded_is_refused() -> None:
    with pytest.raises(zg.CaptureError, match=r"RMSprop, which updates model\.weight, takes the root of a difference"):
        coded(torch.optim.RMSprop, centered=True)
    with pytest.raises(zg.CaptureError, match=r"Adafactor, which updates model\.weight, is not elementwise"):
        coded(torch.optim.Adafactor)
    with pytest.raises(zg.CaptureError, match=r"exp_avg of torch\.float64"):
        coded(torch.optim.AdamW, torch.float64)
    module = model()
    zg.annotate(module.weight, sbp=zg.sbp.split(0))
    step = LossStep(module, adamw(module), 2, product, optimizer_state="int8")
    with pytest.raises(zg.CaptureError, match=r"weight is split S\(0\): its state cannot be coded"):
        prepare(step, *(torch.zeros(8, width) for width in (7, 75)), ranks=5)


def test_a_compiled_step_with_codes_is_written_and_read(tmp_path: Path) -> None:
    def step() -> LossStep:
        module = model()
        options = {"optimizer_state": "int8", "wire": {"reduce": "int8"}}
        return LossStep(module, adamw(module), 2, product, **options)

    compiled, loaded = step(), step()
    for x, y in batches():
        compiled(x, y)
    compiled.export_compiled(tmp_path / "step.zg")
    loaded.load_compiled(tmp_path / "step.zg")
    for x, y in batches():
        loaded(x, y)
    for name, value in codes_of(compiled).items():
        assert torch.equal(codes_of(loaded)[name], value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "has no codes of blocks"),
        ({"shape": ()}, "has no codes of blocks"),
        ({"shape": (3, 259)}, "has no codes of blocks"),
        ({"shape": (9, 260)}, "has other blocks"),
        ({"residual": (10**6, 600)}, "has no row for each of 1 ranks"),
    ],
)
def test_codes_and_residuals_of_other_shapes_are_refused_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    module = model()
    step = LossStep(module, adamw(module), 1, product, optimizer_state="int8")
    step(*batches()[0])
    step.save(tmp_path)
    opened = load.open_checkpoint

    def tampered(path: Path) -> Any:
        reader = opened(path)
        tensors = dict(reader.index.tensors)
        name = next(name for name in tensors if name.endswith(".root"))
        if "residual" in change:
            tensors["residuals.0.model.weight"] = Entry("float32", change["residual"], ())
        else:
            tensors[name] = replace(tensors[name], **change)
        object.__setattr__(reader.index, "tensors", tensors)
        return reader

    monkeypatch.setattr(checkpoint_state, "open_checkpoint", tampered)
    other = model()
    exact = LossStep(other, adamw(other), 0, product)
    before = exact.state_dict()
    with pytest.raises(zg.CheckpointError, match=message):
        exact.load(tmp_path)
    torch.testing.assert_close(exact.state_dict()["modules"], before["modules"], rtol=0, atol=0)
