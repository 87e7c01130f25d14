"""Every family of models trains on two ranks with the numbers of one device, at every stage."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import Tensor, fx, nn

from tests.equivalence.families import FAMILIES
from tests.equivalence.family import Family
from tests.equivalence.mesh_layouts import ON_A_MESH
from tests.equivalence.training import STAGES, Result, Stage, equal, largest_deviation, train, train_plainly
from tests.harness import sliced
from tests.pool import Pool
from zerograph import Collective, _torch
from zerograph.runtime.backends import inductor, regions
from zerograph.runtime.backends.pieces import Piece

# Placement, which is where families differ, does not depend on the stage: that all four agree show the models of
# test_stages, a transformer among them.
LAST = (3,)
# Llama is Qwen3 without norms of heads; Whisper has the attention of T5 and the convolutions of the U-Net, as torch's
# transformer and ViT have that of T5 and BERT; ResNet has what the models of test_stages and the mixer have. Two ranks
# train Mixtral in tests/capture/test_local.py, BERT in test_attention_dropout.py, an LSTM in test_recurrent.py.
IN_OTHERS = ("llama", "whisper", "resnet", "transformer", "vit", "mixtral", "bert", "lstm")
CASES = [(name, LAST) for name in FAMILIES if name not in IN_OTHERS]
REST = [(name, STAGES) for name in FAMILIES]


def train_as_rank(name: str, stages: Sequence[Stage]) -> tuple[dict[Stage, Result], list[Collective]]:
    """The results of the stages, and the collectives of stage 3, the last. A missing rule is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="no rule says")
        results, step = train(FAMILIES[name], stages=stages)
    return results, step.inspect.collectives()


@functools.cache
def trained(pool: Pool, name: str, stages: Sequence[Stage]) -> Any:
    """Return what two ranks return."""
    return pool.run(2, train_as_rank, name, stages)


@sliced("name, stages", CASES, REST)
def test_two_ranks_compute_what_one_device_computes(pool: Pool, name: str, stages: Sequence[Stage]) -> None:
    (results, collectives), (others, _) = trained(pool, name, stages)
    first = results[stages[0]]
    assert largest_deviation(first, train_plainly(FAMILIES[name])) <= 2e-6
    for stage in stages:
        assert equal(results[stage], first), f"stage {stage} has other numbers than data parallel"
        assert equal(results[stage], others[stage]), f"ranks got different numbers at stage {stage}"
    # Beside buckets only sums over the batch travel: losses, counts, statistics of channels and of experts.
    small = [one for one in collectives if not one.tensors[0].startswith("model.")]
    assert FAMILIES[name].samples_meet or all(one.bytes <= 4 * 64 * tensors_in(one) for one in small), small


def tensors_in(one: Collective) -> int:
    """How many it moves: small sums travel together."""
    several = re.search(r" and (\d+) more$", one.what)
    return 1 + int(several[1]) if several else 1


def train_on_a_mesh(name: str) -> dict[Stage, Result]:
    return train(FAMILIES[name], stages=[3], arrangement=ON_A_MESH[name])[0]


# A layer split by hand, Llama shows; rows along both dimensions, an MLP and convolutions: test_meshes.
@sliced("name", [], ON_A_MESH)
def test_four_ranks_on_a_mesh_compute_what_one_device_computes(pool: Pool, name: str) -> None:
    everybody = pool.run(4, train_on_a_mesh, name)
    wanted = train_plainly(FAMILIES[name])
    for results in everybody:
        assert all(largest_deviation(result, wanted) <= 2e-6 for result in results.values())


class Penalised(nn.Module):
    """A model of which one parameter does not meet the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.penalty = nn.Linear(6, 2), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean() + self.penalty.square().sum()


PENALISED = Family("penalised", Penalised, lambda generator, size: (torch.randn(size, 6, generator=generator),))


def train_penalised() -> list[dict[Stage, Result]]:
    """With all parameters in one bucket, and each in its own."""
    return [train(PENALISED, stages=stages, bucket_size=size)[0] for size, stages in ((None, (1, 3)), (8, ("off", 2)))]


def test_gradients_that_do_not_depend_on_the_batch_are_added_once(pool: Pool) -> None:
    wanted = train_plainly(PENALISED)
    for results in pool.run(2, train_penalised)[0]:
        assert all(largest_deviation(result, wanted) <= 2e-6 for result in results.values())


def as_it_is(piece: fx.GraphModule, values: Sequence[Any], *_: Any) -> Any:
    """Run a region operator by operator, given the strides that it is compiled for."""
    strides = [value.stride() for value in values if isinstance(value, Tensor)]

    def run(inputs: list[Any]) -> Any:
        assert [value.stride() for value in inputs if isinstance(value, Tensor)] == strides
        return piece(*inputs)

    return run


def train_in_regions(name: str) -> tuple[Result, int]:
    """Return what regions of an accelerator compute, and their number."""
    cut = Mock(side_effect=regions.cut_regions)
    with patch.object(inductor, "_on_accelerator", return_value=True), patch.object(inductor, "cut_regions", cut):
        with patch.object(_torch, "inductor", as_it_is):
            results, _step = train(FAMILIES[name], stages=(3,), backend="inductor")
        program = regions.cut_regions(cut.call_args.args[0])
    return results[3], sum(isinstance(part, Piece) for part in program)


# T5: attention as in BERT, norms as in Llama. Norms of Llama and batch norm of a ResNet: tests/gpu.
@sliced("name", ["gpt2"], ["bert", "llama", "resnet", "t5"])
def test_regions_compute_what_the_operators_compute(pool: Pool, name: str) -> None:
    """Each runs as it is here; ``tests/gpu`` shows what Inductor makes of it."""
    wanted, _ = trained(pool, name, LAST)[0]
    result, count = pool.run(2, train_in_regions, name)[0]
    assert equal(result, wanted[3])
    assert count > 2
