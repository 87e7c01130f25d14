"""Calls of a model in a loop are graphs after the first, unless the loop uses them as none allows."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerograph as zg
from tests.harness import LossStep, are_graphs, sliced
from tests.loops.scripts import Prepare, assert_like_one_process, prepare_at, samples, seeded, unprepared
from tests.loops.test_habits import perceptron as plain, update
from tests.pool import Pool
from zerograph.runtime.parameters import stored_gradient
from zerograph.runtime.state import stores_of


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 4))


class Growing(nn.Module):
    """A model whose calls append to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = plain(), []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        result: Tensor = self.net(x) * len(self.seen)
        return result


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    x, y = samples(8 * count, 6).tensors
    return list(zip(x.split(8), y.split(8), strict=True))


def prepared(model: Any, stage: int, count: int = 4) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    module = seeded(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    result: tuple[nn.Module, torch.optim.Optimizer, Any] = prepare_at(stage)(module, optimizer, batches(count))
    return result


def changed_parameters() -> str:
    model, optimizer, loader = prepared(plain, 2)
    for number, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        if number == 2:
            optimizer.step()
            with pytest.raises(zg.InputError) as error:
                loss.backward()
            return str(error.value)
        update(optimizer, loss)
    raise AssertionError


def test_a_step_between_a_call_and_its_backward_is_an_error_as_in_pytorch(pool: Pool) -> None:
    for message in pool.run(2, changed_parameters):
        assert message.startswith("a parameter was changed between the call of the model and backward()")


class Telling(nn.Module):
    """A model that warns in each call, and counts its calls in its class."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = plain()

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("this call warns", stacklevel=1)
        count_call(self)
        result: Tensor = self.net(x) * type(self).count
        return result


def count_call(model: nn.Module) -> None:
    type(model).count += 1  # type: ignore[attr-defined]


def told_in_calls(prepare: Prepare) -> list[float]:
    model: Any = seeded(Telling)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = prepare(model, optimizer, batches(8))
    Telling.count = 0
    with warnings.catch_warnings(record=True, action="always") as shown:
        losses = [update(optimizer, F.cross_entropy(model(x), y)).item() for x, y in data]
    return [*losses, Telling.count, sum("this call warns" in str(one.message) for one in shown)]


def test_what_a_call_does_besides_happens_in_each_call(pool: Pool) -> None:
    assert_like_one_process(pool, told_in_calls, stages=(2,))


def noisy_losses(stage: int) -> tuple[list[str], list[bool]]:
    model, optimizer, loader = prepared(noisy, stage)
    losses = []
    torch.manual_seed(5)
    for _ in range(2):
        for x, y in loader:
            losses.append(update(optimizer, F.cross_entropy(model(x), y)).item().hex())
        model.eval()
        with torch.no_grad():
            losses.append(F.cross_entropy(model(x), y).item().hex())
        model.train()
    return losses, are_graphs(model)


@functools.cache
def noisy_losses_of(pool: Pool, stage: int) -> list[Any]:
    """Return what each of two ranks returns."""
    return pool.run(2, noisy_losses, stage)


def test_graphs_of_calls_with_dropout_and_buffers_agree_bitwise_between_stages(pool: Pool) -> None:
    seen = [noisy_losses_of(pool, stage) for stage in (0, 3)]
    assert {tuple(graphs) for ranks in seen for _, graphs in ranks} == {(True, True)}
    assert len({tuple(losses) for ranks in seen for losses, _ in ranks}) == 1


def test_masks_of_dropout_are_those_of_one_rank(pool: Pool) -> None:
    one, _ = noisy_losses(2)
    for losses, _ in noisy_losses_of(pool, 3):
        assert list(map(float.fromhex, losses)) == pytest.approx(list(map(float.fromhex, one)), rel=1e-5)


def graph_and_loop() -> tuple[list[str], list[str]]:
    model = seeded(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = LossStep(model, optimizer, 2, lambda model, x, y: F.cross_entropy(model(x), y))
    rank, ranks = zg.rank(), zg.world_size()
    of_graph = [step(x.chunk(ranks)[rank], y.chunk(ranks)[rank]).item().hex() for x, y in batches(4)]
    model, optimizer, loader = prepared(plain, 2)
    return of_graph, [update(optimizer, F.cross_entropy(model(x), y)).item().hex() for x, y in loader]


def test_a_loop_has_the_bits_of_the_graph_of_the_same_lines(pool: Pool) -> None:
    for of_graph, of_loop in pool.run(2, graph_and_loop):
        assert of_graph == of_loop


def profiled(folder: str | None) -> tuple[list[float], str]:
    model, optimizer, loader = prepared(plain, 2)
    losses, text = [], ""
    for number, (x, y) in enumerate(loader):
        losses.append(update(optimizer, F.cross_entropy(model(x), y)).item())
        if folder is not None and number == 2:
            # Reading makes parameters whole.
            assert next(model.parameters()).sum().isfinite()
            text = str(zg.step_of(model).profile(2, x, path=f"{folder}/trace.json"))
        losses.append(sum(float(one.grad.sum()) for one in model.parameters() if one.grad is not None))
    return losses, text


def test_a_profile_of_a_call_changes_no_gradient(pool: Pool, tmp_path: Path) -> None:
    plainly = pool.run(2, profiled, None)
    for (losses, text), (expected, _) in zip(pool.run(2, profiled, str(tmp_path)), plainly, strict=True):
        assert losses == expected
        assert "all-gather of bucket0" in text


# Of each update: whether a call is inside of no_sync(), and whether the loop reads gradients after it.
WINDOWS = [[(True, False)] * 2, [(True, False), (True, False), (False, False)], [(False, False), (True, True)]]
WINDOWS += [[(True, True), (False, False)], [(True, False), (True, False), (False, True), (True, False)]]
# The calls that reduce gradients, where ranks can keep what they add.
REDUCING = [[False] * 2, [False] * 3, [True, False], [False, True], [False] * 4]


def unsynced(stage: int | None) -> list[tuple[float, float, list[bool]]]:
    """Return the loss and the norm of each update, and which calls of it reduce gradients; None: in plain PyTorch."""
    model: Any = seeded(plain)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stage is not None:
        model, optimizer, _ = prepare_at(stage)(model, optimizer, batches(1))
    seen = []
    for number, window in enumerate(WINDOWS * 2):
        reduces = []
        for (x, y), (is_unsynced, reads) in zip(batches(4), window, strict=False):
            if stage is not None:
                x, y = (zg.global_tensor(one.chunk(2)[zg.rank()], zg.sbp.split(0)) for one in (x, y))
            with model.no_sync() if is_unsynced and stage is not None else contextlib.nullcontext():
                loss = F.cross_entropy(model(x), y) / len(window)
                loss.backward()
            if stage is not None and number >= len(WINDOWS):
                text = zg.step_of(model).inspect.text()
                reduces.append(any(line.startswith(">>") and ".grad:" in line for line in text.splitlines()))
            if reads:
                model[0].bias.grad *= 0.5
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2) if number % 2 else loss
        seen.append((loss.item(), norm.item(), reduces))
        optimizer.step()
        # Some of a bucket, then all.
        model[2].zero_grad()
        optimizer.zero_grad()
    return seen


@sliced("stage", [1, 2], [0, 3])
def test_gradients_of_no_sync_are_reduced_once_for_each_update(pool: Pool, stage: int) -> None:
    expected = unsynced(None)
    for seen in pool.run(2, unsynced, stage):
        for mine, others in zip(seen, expected, strict=True):
            assert mine[:2] == pytest.approx(others[:2], rel=1e-12)
        wanted = REDUCING if stage < 2 else [[True] * len(window) for window in WINDOWS]
        assert [reduces for *_, reduces in seen[len(WINDOWS) :]] == wanted


# What a loop does between two calls, and how many times the second one gathers a bucket then at stages 1 and 2.
BETWEEN = {"nothing": 0, "update": 1, "edit": 1, "load": 1, "whole": 1, "failure": 1, "evaluation": 0}


def gathering(stage: int | None) -> list[tuple[float, int]]:
    """Return the loss of each call, and how many buckets it gathered; None: in plain PyTorch."""
    model: Any = seeded(plain)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    (x, y), *_ = batches(1)
    if stage is not None:
        model, optimizer, _ = prepare_at(stage)(model, optimizer, batches(1))
        x, y = (zg.global_tensor(one.chunk(2)[zg.rank()], zg.sbp.split(0)) for one in (x, y))
    seen = []
    for between in ("nothing", "nothing", *BETWEEN):
        if between == "update":
            optimizer.step()
            optimizer.zero_grad()
        elif between == "edit":
            with torch.no_grad():
                model[0].weight.mul_(0.9)
        elif between == "load":
            model.load_state_dict({name: 1.1 * one for name, one in model.state_dict().items()})
        elif between == "whole" and stage is not None:
            with zg.full_parameters(model):
                model[2].weight.data.add_(0.1)
        elif between == "whole":
            model[2].weight.data.add_(0.1)
        elif between == "failure" and stage is not None:
            store, *_ = stores_of(model.parameters())
            # As after a call that one rank has not ended.
            store.gathered_version = None if zg.rank() else store.gathered_version
        elif between == "evaluation":
            with torch.no_grad():
                model(x), model(x)
        with torch.profiler.profile() as profile:
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        seen.append((loss.item(), sum(one.name == "zerograph::gather_into" for one in profile.events())))
    return seen


@sliced("stage", [2], [1])
def test_parameters_are_gathered_once_between_changes(pool: Pool, stage: int) -> None:
    expected = gathering(None)
    for seen in pool.run(2, gathering, stage):
        assert [loss for loss, _ in seen] == pytest.approx([loss for loss, _ in expected], rel=1e-12)
        assert [number for _, number in seen[2:]] == list(BETWEEN.values())


def forms_of_gradients() -> list[tuple[bool, int, float]]:
    model, optimizer, loader = prepared(plain, 2)
    seen = []
    for x, y in loader:
        optimizer.zero_grad()
        parameters = list(model.parameters())
        # Between steps gradients take no memory.
        assert all(store.accumulated is None for store in stores_of(parameters))
        F.cross_entropy(model(x), y).backward()
        is_split = stored_gradient(parameters[0]) is None
        elements = sum(store.accumulated.numel() for store in stores_of(parameters) if store.accumulated is not None)
        norm = nn.utils.clip_grad_norm_(parameters, 0.1)
        is_split &= stored_gradient(parameters[0]) is None
        total = sum(one.grad.pow(2).sum() for one in parameters) ** 0.5  # type: ignore[union-attr]
        seen.append((is_split, elements, float(total) / min(float(norm), 0.1)))
        optimizer.step()
    return seen


def test_gradients_stay_split_until_they_are_read_and_are_clipped_so(pool: Pool) -> None:
    size = sum(one.numel() for one in plain().parameters())
    for first, *others in pool.run(2, forms_of_gradients):
        assert first[0] is False
        assert [is_split for is_split, _, _ in others] == [True] * 3
        assert all(size // 2 <= elements < size for _, elements, _ in others)
        assert [ratio for *_, ratio in (first, *others)] == pytest.approx([1] * 4, rel=1e-4)


def counted() -> tuple[list[float], list[bool], list[str]]:
    model, optimizer, loader = prepared(Growing, 2)
    with warnings.catch_warnings(record=True, action="always") as caught:
        losses = [update(optimizer, F.cross_entropy(model(x), y)).item() for x, y in loader]
    return (
        losses,
        are_graphs(model),
        [str(one.message) for one in caught if "operator by operator" in str(one.message)],
    )


def test_a_call_that_changes_python_state_runs_operator_by_operator_and_says_so(pool: Pool) -> None:
    model = seeded(Growing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = [update(optimizer, F.cross_entropy(model(x), y)).item() for x, y in batches(4)]
    (losses, graphs, messages), (others, _, _) = pool.run(2, counted)
    assert losses == others == pytest.approx(expected, rel=1e-9)
    assert graphs == [False]
    assert len(messages) == 1
    assert "seen" in messages[0]


def differentiated_twice(prepare: Any) -> list[float]:
    module = seeded(plain)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    module, optimizer, loader = prepare(module, optimizer, batches(4))
    seen = []
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        out = module(x)
        loss = F.cross_entropy(out, y)
        if number == 3:
            loss.backward(retain_graph=True)
            (gradient,) = torch.autograd.grad(out.square().mean(), [module[0].weight], retain_graph=True)
            seen.append(float(gradient.sum()))
            loss = out.square().mean()
        loss.backward()
        optimizer.step()
        seen.append(float(module[0].weight.grad.sum()))
    return seen


def test_a_graph_that_is_differentiated_in_another_way_gives_the_right_gradients(pool: Pool) -> None:
    assert_like_one_process(pool, differentiated_twice, stages=(3,))


class WithNoise(nn.Module):
    """A model whose second result has the gradient of its last layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.scale = nn.Linear(6, 12), nn.Linear(12, 4, bias=False), 1.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.dropout(self.body(x), 0.4, self.training) * self.scale
        return self.head(hidden), hidden


def gradients_with_noise(stage: int) -> list[tuple[float, float]]:
    model, optimizer, loader = prepared(WithNoise, stage, 6)
    seen = []
    for number, (x, _) in enumerate(loader):
        optimizer.zero_grad()
        out, hidden = model(x)
        model.scale = number + 1
        loss = out.sum() if number < 2 else out.sum() + 2 * hidden.sum()
        if number == 3:
            (gradient,) = torch.autograd.grad(loss, [model.head.weight], retain_graph=True)
            assert model.head.weight.grad is None
            seen.append((float(gradient[0].sum()), float(hidden.sum())))
        loss.backward(retain_graph=number == 4)
        if number == 4:
            loss.backward()
        seen.append((float(model.head.weight.grad[0].sum()), float(hidden.sum()) * (2 if number == 4 else 1)))
        optimizer.step()
    return seen


def test_a_call_that_is_differentiated_in_another_way_keeps_its_random_numbers_and_its_state(pool: Pool) -> None:
    for stage in (0, 3):
        for seen in pool.run(2, gradients_with_noise, stage):
            assert len(seen) == 7
            for gradient, expected in seen:
                assert gradient == pytest.approx(expected, rel=1e-5)


class NoisyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.linear(x)), 0.4, self.training)


def gradients_of_two_calls(together: bool) -> list[Tensor]:
    model, config = seeded(lambda: nn.Sequential(NoisyBlock(), NoisyBlock(), NoisyBlock())), zg.Config()
    config.memory.activation_checkpointing = "blocks"
    model, _ = zg.prepare(model, torch.optim.SGD(model.parameters()), config=config)
    x = torch.linspace(-1, 1, 32).view(4, 8).double()
    model(x).sum().backward()
    model.zero_grad()
    torch.manual_seed(5)
    first = model(x).square().sum()
    if not together:
        first.backward()
    second = model(2 * x).square().sum()
    second.backward()
    if together:
        first.backward()
    assert are_graphs(model)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_backward_recomputes_the_random_numbers_of_its_own_call() -> None:
    for one, other in zip(gradients_of_two_calls(True), gradients_of_two_calls(False), strict=True):
        torch.testing.assert_close(one, other)


class ScalingBlock(nn.Module):
    """A block that reads a buffer, of which the elements are apart in memory, and then changes it."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("scale", torch.linspace(1, 2, 11, dtype=torch.float64)[::2])

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(x)) * self.scale.view(1, 6).clone()
        if self.training:
            self.scale.mul_(1.1)
        return x + torch.tanh(hidden)


def in_blocks(*objects: Any) -> Any:
    config = zg.Config()
    config.memory.activation_checkpointing = "blocks"
    return zg.prepare(*objects, config=config)


def parameters_after_changes_of_buffers(prepare: Any) -> list[Tensor]:
    model = seeded(lambda: nn.Sequential(*(ScalingBlock() for _ in range(3))))
    model, optimizer, loader = prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), batches(6))
    for number, (x, _) in enumerate(loader):
        loss = model(x).square().sum()
        if number > 3:
            loss = loss + model(2 * x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert prepare is unprepared or any(are_graphs(model))
    return [*model.state_dict().values()]


def test_backward_recomputes_from_buffers_as_its_own_call_has_read_them() -> None:
    expected = parameters_after_changes_of_buffers(unprepared)
    for one, other in zip(parameters_after_changes_of_buffers(in_blocks), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_buffer_that_changes_between_a_call_and_its_backward_is_an_error() -> None:
    model = seeded(lambda: nn.Sequential(*(ScalingBlock() for _ in range(3)))).eval()
    model, _, ((x, _), *_) = in_blocks(model, torch.optim.SGD(model.parameters()), batches(2))
    for changes in (False, True):
        loss = model(x).square().sum()
        if changes:
            model[1].scale.mul_(2)
            with pytest.raises(zg.InputError, match="a buffer of a call of Sequential was changed in place"):
                loss.backward()
        else:
            loss.backward()


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_buffer_that_changes_before_a_call_runs_once_more_is_an_error(create_graph: bool) -> None:
    model = seeded(ScalingBlock).eval()
    model, _, ((x, _), *_) = zg.prepare(model, torch.optim.SGD(model.parameters()), batches(2))
    model(x).sum().backward()
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    model.scale.mul_(2)
    with pytest.raises(zg.InputError, match="a buffer of a call of ScalingBlock was changed in place"):
        loss.backward(create_graph=create_graph)


def one_of_two_results(prepare: Any) -> list[float]:
    module = seeded(WithNoise)
    module.eval()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    module, optimizer, loader = prepare(module, optimizer, batches(6))
    seen = []
    for number, (x, _) in enumerate(loader):
        optimizer.zero_grad()
        out, hidden = module(x)
        (out.square().mean() + hidden.square().mean() if number in (0, 1, 4) else hidden.square().mean()).backward()
        optimizer.step()
        gradient = module.head.weight.grad
        seen += [float(module(x)[0].detach().sum()), -1.0 if gradient is None else float(gradient.sum())]
    return seen


def test_a_parameter_that_the_loss_does_not_reach_has_no_gradient(pool: Pool) -> None:
    # AdamW would change it for a gradient of zeros.
    assert one_of_two_results(unprepared).count(-1.0) == 3
    assert_like_one_process(pool, one_of_two_results, stages=(2,))


def unequal(prepare: Any) -> list[float]:
    module = seeded(WithNoise)
    module.eval()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    x, y = samples(45, 6).tensors
    sizes = [7, 7, 8, 5, 7, 8, 3]
    module, optimizer, loader = prepare(module, optimizer, list(zip(x.split(sizes), y.split(sizes), strict=True)))
    seen = []
    for x, y in loader:
        x = x.clone().requires_grad_()
        out, hidden = module(x)
        loss = update(optimizer, F.cross_entropy(out, y) + out[:2].sum())
        with torch.inference_mode():
            seen.append(float(module(x.detach())[0].sum()))
        seen += [loss.item(), float(x.grad.abs().sum()), float(hidden.detach().sum()), len(out)]
    return [*seen, float(all(are_graphs(module))) if hasattr(module, "no_sync") else 1.0]


@sliced("stage", [3], [0])
def test_calls_with_unequal_rows_are_graphs_in_inference_mode_too(pool: Pool, stage: int) -> None:
    assert_like_one_process(pool, unequal, stages=(stage,))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = plain()

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = self.net(x) * weights[:, None]
        return result


def parts_that_are_equal() -> list[str]:
    module = seeded(Weighted)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    weights = torch.tensor([0.5, 1.0, 2.0, 1.5] * 2, dtype=torch.float64)
    module, optimizer, loader = zg.prepare(module, optimizer, [(x, weights) for x, _ in batches(3)], stage=2)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for x, one in loader:
            update(optimizer, module(x, one).square().mean())
    return [str(one.message) for one in caught if issubclass(one.category, zg.ZeroGraphWarning)]


def test_parts_of_a_prepared_loader_may_be_equal(pool: Pool) -> None:
    assert pool.run(2, parts_that_are_equal) == [[], []]


def action_of_all_ranks() -> list[str]:
    module, messages = zg.prepare(seeded(plain)), []
    for read in (int, Tensor.item):
        with torch.no_grad(), pytest.raises(zg.InputError) as error:
            read(module(torch.ones(1, 6, dtype=torch.float64)).argmax(1))
        messages.append(str(error.value))
    return messages


def test_one_number_of_the_rows_of_all_ranks_is_an_error_with_advice(pool: Pool) -> None:
    for messages in pool.run(2, action_of_all_ranks):
        for message in messages:
            assert "such as range(steps): plain tensors are then whole" in message


class WithPictures(nn.Module):
    """Texts, and pictures of some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.picture = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor, pictures: Tensor | None = None) -> Tensor:
        out: Tensor = self.text(x).square().mean()
        return out if pictures is None else out + self.picture(pictures).square().mean()


def pictures_on_some_ranks(prepare: Prepare, rank: int | None, *, leaves_out: bool) -> list[float]:
    torch.manual_seed(0)
    model = WithPictures().double()
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, pictures = torch.randn(4, 4).double(), torch.randn(3, 5).double()
    x = x if rank is None else x[2 * rank :][:2]
    losses = []
    for step in range(4):
        # In turn one rank has all pictures.
        part = pictures[len(pictures) * (rank is not None and rank != step % 2) :]
        loss = model(x, **({} if leaves_out and not len(part) else {"pictures": part}))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def pictures_of_two_ranks(leaves_out: bool) -> list[float]:
    return pictures_on_some_ranks(prepare_at(2), dist.get_rank(), leaves_out=leaves_out)


@pytest.mark.parametrize("leaves_out", [False, True])
def test_a_rank_without_rows_of_an_argument_passes_none(pool: Pool, leaves_out: bool) -> None:
    expected = pictures_on_some_ranks(unprepared, None, leaves_out=False)
    for losses in pool.run(2, pictures_of_two_ranks, leaves_out):
        torch.testing.assert_close(losses, expected)


def one_row_on_one_rank() -> str:
    model = WithPictures()
    model, _ = prepare_at(2)(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(zg.RankMismatchError) as error:
        model(torch.randn(2, 4), **({"pictures": torch.randn(1, 5)} if dist.get_rank() == 0 else {}))
    return str(error.value)


def test_one_row_that_only_one_rank_passes_is_an_error_since_it_might_be_broadcast(pool: Pool) -> None:
    for message in pool.run(2, one_row_on_one_rank):
        assert "first in the number of its tensors" in message
        assert "passes an empty tensor" in message


def test_an_update_does_not_depend_on_what_a_module_keeps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    model.kept = []  # type: ignore[assignment]
    model, optimizer = prepare_at(2)(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True, action="always") as messages:
        for number in range(10):
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.kept.append(number)
    assert not [one for one in messages if str(one.message).startswith("step ")]


def a_function_of_calls() -> tuple[set[str], float, float]:
    torch.manual_seed(0)
    model, kinds = nn.Linear(4, 3), set()

    def loss_of(x: Tensor, *, reads: bool) -> Tensor:
        loss = model(x).square().mean()
        kinds.add(type(model.weight).__name__)
        return loss + model.weight.sum() if reads else loss

    model, optimizer, function = prepare_at(3)(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of)
    for reads in (False, False, False, True):
        loss = function(torch.ones(1, 4), reads=reads)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return kinds, loss.item(), model.state_dict()["weight"].sum().item()


def test_a_prepared_function_that_calls_modules_gathers_nothing_else(pool: Pool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for reads in (False, False, False, True):
        loss = model(torch.ones(1, 4)).square().mean() + (model.weight.sum() if reads else 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for kinds, last, total in pool.run(2, a_function_of_calls):
        assert "SplitParameter" in kinds
        assert (last, total) == pytest.approx((loss.item(), model.weight.sum().item()))


class Turned(torch.autograd.Function):
    """A view of a tensor, whose gradient it turns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x[:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda out: out[:, :2].clone(),
    "part": lambda out: out[:, :2],
    "first": lambda out: out[1:, 2][1:],
    "transposed": lambda out: out.T,
    "detached": lambda out: out[:, :2].detach(),
    "own gradient": Turned.apply,
    "rows": lambda out: out[: len(out) // 2],
}
NO_GRAPHS = ("transposed", "detached", "own gradient")


class Sharing(nn.Module):
    """A model that returns a tensor twice, chunks that share memory without overlap, and maybe a view."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain()

    def forward(self, x: Tensor, *, view: str) -> list[Tensor]:
        out = self.net(x)
        return [out, out, *(out * 2).chunk(2, dim=1), VIEWS[view](out)]


def written_results(stage: int | None, view: str, small: int) -> tuple[list[float], list[bool]]:
    model: Any = seeded(Sharing)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data: Any = [*batches(3), *((x[:4], y[:4]) for x, y in batches(2)[:small])]
    model, optimizer, data = (unprepared if stage is None else prepare_at(stage))(model, optimizer, data)
    seen = []
    for number, (x, y) in enumerate(data):
        with torch.no_grad():
            results = model(x, view=view)
            results[0].mul_(3)
            results[4].add_(1)
        seen += [float(one.sum()) for one in results]
        results = model(x, view=view)
        loss = results[2].square().mean() + results[4].square().sum()
        if number % 2:
            loss = loss + F.cross_entropy(results[1], y)
        seen.append(float(update(optimizer, loss).detach()))
    return seen, [] if stage is None else are_graphs(model)


# Whose memory is a result's: of two sizes, where that depends on the size; of no view at all, the others show.
@sliced("view, small", [("rows", 2), *((view, 0) for view in NO_GRAPHS), ("first", 0)], [(view, 2) for view in VIEWS])
def test_results_that_share_memory_share_it_after_a_graph_or_run_operator_by_operator(
    pool: Pool, view: str, small: int
) -> None:
    expected, _ = written_results(None, view, small)
    for seen, by_graphs in pool.run(2, written_results, 3, view, small):
        assert seen == pytest.approx(expected, rel=1e-12)
        assert by_graphs == [view not in NO_GRAPHS] * 2
