"""Workspace memory of convolutions, as the process sees it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from benchmarks.measure.process import forget_most_resident, most_resident, resident
from zerograph.ir.memory import workspace_bytes

aten = torch.ops.aten
ROOT = Path(__file__).resolve().parent.parent.parent

# Shapes of input and weight, stride, padding, groups, dtype.
Convolution = tuple[tuple[int, ...], tuple[int, ...], int, int, int, torch.dtype]
CONVOLUTIONS: dict[str, Convolution] = {
    "3x3": ((16, 64, 32, 32), (64, 64, 3, 3), 1, 1, 1, torch.float32),
    "1x1": ((16, 256, 32, 32), (64, 256, 1, 1), 1, 0, 1, torch.float32),
    "large weight": ((16, 512, 4, 4), (512, 512, 3, 3), 1, 1, 1, torch.float32),
    "depthwise": ((16, 64, 32, 32), (64, 1, 3, 3), 1, 1, 64, torch.float32),
    "one dimension": ((16, 64, 1024), (64, 64, 3), 1, 1, 1, torch.float32),
    "fp64": ((16, 64, 16, 16), (64, 64, 3, 3), 1, 1, 1, torch.float64),
}


def seen(run: Callable[[], Any]) -> int:
    """The most bytes that it takes, less those of its results."""
    # The first time oneDNN makes the kernel.
    run()
    before = resident()
    forget_most_resident()
    results = run()
    held = sum(one.nbytes for one in (results if isinstance(results, tuple) else (results,)) if one is not None)
    return most_resident() - before - held


def made(target: Any, *args: Any) -> fx.Node:
    """A node of a graph for these values, and the value."""
    graph = fx.Graph()
    nodes = []
    for number, one in enumerate(args):
        nodes.append(graph.placeholder(f"x{number}") if isinstance(one, Tensor) else one)
        if isinstance(one, Tensor):
            nodes[-1].meta["val"] = one
    node = graph.call_function(target, tuple(nodes))
    node.meta["val"] = target(*args)
    return node


def forward_and_backward(case: Convolution) -> list[tuple[int, int]]:
    """(predicted, seen) of the convolution, and of its gradients."""
    shape, weight_shape, stride, padding, groups, dtype = case
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(weight_shape, dtype=dtype)
    dims = x.dim() - 2
    how = [stride] * dims, [padding] * dims, [1] * dims, False, [0] * dims, groups
    gradient = torch.randn_like(aten.convolution.default(x, weight, None, *how))
    found = []
    for target, args in (
        (aten.convolution.default, (x, weight, None, *how)),
        (aten.convolution_backward.default, (gradient, x, weight, None, *how, [False, True, False])),
    ):
        predicted = workspace_bytes(made(target, *args))
        found.append((predicted, seen(functools.partial(target, *args))))
    return found


@pytest.fixture(scope="module")
def measured() -> dict[str, list[tuple[int, int]]]:
    """Measure all convolutions, in a process whose allocator keeps nothing back from its start on."""
    code = f"import json, {__name__} as here; print(json.dumps(here.all_of_them()))"
    keep_nothing = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **keep_nothing}, cwd=ROOT, capture_output=True, check=True
    )
    answer: dict[str, list[tuple[int, int]]] = json.loads(done.stdout)
    return answer


def all_of_them() -> dict[str, list[tuple[int, int]]]:
    return {name: forward_and_backward(case) for name, case in CONVOLUTIONS.items()}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads what Linux shows in /proc")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_workspace_of_a_convolution_is_what_the_process_takes(
    measured: dict[str, list[tuple[int, int]]], name: str
) -> None:
    for predicted, found in measured[name]:
        assert predicted == pytest.approx(found, rel=0.1, abs=2**20)


def test_channels_that_lie_last_stay_where_they_are() -> None:
    x, weight = torch.randn(2, 8, 6, 6), torch.randn(8, 8, 3, 3)
    rest = None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    assert workspace_bytes(made(aten.convolution.default, x, weight, *rest)) == x.nbytes + weight.nbytes
    last = x.to(memory_format=torch.channels_last)
    assert workspace_bytes(made(aten.convolution.default, last, weight, *rest)) == 0


def test_other_operators_have_none() -> None:
    assert workspace_bytes(made(aten.mm.default, torch.randn(8, 8), torch.randn(8, 8))) == 0
