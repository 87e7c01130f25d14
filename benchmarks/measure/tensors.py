"""Bytes of tensors: those alive between steps, and the most alive within one."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

MARK = "the measured step"


def alive() -> int:
    """Bytes of storage behind all tensors that Python knows, each storage once, gradients included."""
    gc.collect()
    sizes: dict[int, int] = {}
    # type(), not isinstance(): lazy modules answer the latter by importing themselves.
    found = [one for one in gc.get_objects() if issubclass(type(one), Tensor) and not issubclass(type(one), FakeTensor)]
    # Split parameters of ours refuse to be looked at otherwise; they are empty.
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in itertools.chain(found, _gradients(found)):
            # A wrapper (DTensor) has no data; the tensor inside it is found by itself.
            if not is_traceable_wrapper_subclass(tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _gradients(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Return tensors that Python may never have looked at."""
    for tensor in tensors:
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


def most_allocated(step: Callable[[], object]) -> int:
    """The most bytes of tensors that a step holds beyond those alive at its start: every allocation, C++'s too.

    The profiler hears of a block's end only if it saw the beginning, so a step goes before the one that counts.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
        with record_function(MARK):
            step()
    events = list(seen.profiler.kineto_results.events())  # type: ignore[union-attr]
    mark = next(event for event in events if event.name() == MARK)
    now = most = 0
    memory = [event for event in events if event.name() == "[memory]"]
    for event in sorted(memory, key=lambda event: event.start_ns()):
        if mark.start_ns() <= event.start_ns() <= mark.end_ns():
            now += event.nbytes()
            most = max(most, now)
    return most
