"""Values of nodes are computed on fake tensors, and nothing keeps those of a graph that is gone."""

from __future__ import annotations

import gc
import weakref

import pytest

from tests.models import TrainStep, adamw, batches, make
from zerograph import _torch
from zerograph.capture import trace


def test_a_graphs_values_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode that keeps a view of its own leads to itself through torch, where the garbage collector does not see."""
    modes: list[weakref.ref[_torch.CachingFakeMode]] = []

    def noted(symbolic: bool = False) -> _torch.CachingFakeMode:
        mode = made()
        modes.append(weakref.ref(mode))
        return mode

    made = _torch.fake_mode
    model = make("mlp")
    step = TrainStep(model, adamw(model), 2)
    with monkeypatch.context() as patched:
        patched.setattr(trace._torch, "fake_mode", noted)
        step(*batches("mlp", 1)[0])
    # The trace's own cycles, which refer to the mode too.
    gc.collect()
    captured = modes[0]
    assert captured() is not None
    del step, model
    gc.collect()
    assert captured() is None
