"""Inductor's code for an H100, where there is no card and perhaps no Triton: it is generated, and never compiled."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._dynamo import device_interface
from torch._inductor import config, scheduler
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _triton

from zerograph._torch import inductor

CARD = torch.device("cuda", 0)
# What the code depends on: how reductions are split, what is fused.
_H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=232448,
    warp_size=32,
    gcnArchName="",
    total_memory=80 * 2**30,
)
# A launch in the function that Inductor writes: its own kernels, those of libraries, other operators, and the sum over
# what the blocks of a kernel have added up.
_LAUNCH = re.compile(
    r"(?<![\w.])(triton_\w+(?=\.run\()|extern_kernels\.\w+|torch\.ops\.\w+\.\w+\.\w+(?=\())|\.(sum)\(dim"
)


class _Generated(BaseException):
    """Ends a compilation whose code is there. It is no error that Inductor would wrap."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code


class _Absent(device_interface.CudaInterface):
    """Answers to what Inductor asks a card for."""

    class Worker(device_interface.CudaInterface.Worker):
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: _H100)

    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    get_device_properties = staticmethod(lambda device=None: _H100)
    get_compute_capability = staticmethod(lambda device=None: 90)
    is_available = staticmethod(lambda: True)
    is_bf16_supported = staticmethod(lambda including_emulation=False: True)


def _generate(graph: GraphLowering) -> None:
    code, _ = graph.codegen()
    raise _Generated(code.value)


@contextlib.contextmanager
def generating() -> Iterator[None]:
    """Let Inductor generate code for a card, and end there."""
    device_interface.get_interface_for_device("cuda")
    with contextlib.ExitStack() as patches:
        for patched in (
            patch.dict(device_interface.device_interfaces, {"cuda": _Absent, "cuda:0": _Absent}),
            patch.object(torch.cuda, "get_device_properties", lambda device=None: _H100),
            patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            patch.object(torch.cuda, "current_device", lambda: 0),
            # As methods they ask for a device guard, which a build without CUDA lacks.
            patch.object(FakeTensor, "__invert__", lambda tensor: torch.bitwise_not(tensor), create=True),
            patch.object(FakeTensor, "copy_", lambda *args: torch.ops.aten.copy_.default(*args), create=True),
            patch.object(scheduler, "has_triton", lambda: True),
            patch.object(_triton, "triton_hash_with_backend", lambda: ""),
            patch.object(GraphLowering, "compile_to_module", _generate),
            config.patch(force_disable_caches=True, compile_threads=1),
        ):
            patches.enter_context(patched)
        yield


def launches(
    graph: fx.GraphModule, values: Sequence[Any], device: str, strides: Sequence[tuple[int, ...]]
) -> list[str]:
    """Return what the code launches that Inductor generates for a graph, in order.

    Args:
        graph: plain operators. It is changed: its tensors move to the card.
        values: the inputs.
        device: the type of the device that stands for the card.
        strides: see :func:`zerograph._torch.inductor`.
    """

    def moved(argument: Any) -> Any:
        return CARD if isinstance(argument, torch.device) and argument.type == device else argument

    for node in graph.graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), moved)
    graph.recompile()
    with FakeTensorMode():
        inputs = [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=moved(value.device))
            if isinstance(value, Tensor)
            else value
            for value in values
        ]
    with generating():
        try:
            inductor(graph, inputs, strides=strides)
        except _Generated as generated:
            matches = _LAUNCH.finditer(generated.code, generated.code.index("def call("))
            return [match[1] or match[2] for match in matches]
    raise AssertionError("Inductor has generated no code")
