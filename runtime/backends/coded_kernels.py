"""Compile updates of coded optimizer state: one kernel decodes, updates and codes, with the bits of the operators."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from zerograph import _torch
from zerograph.base.source import warn_user
from zerograph.passes.buckets.coded_updates import CodedUpdate
from zerograph.runtime.backends.compile_cache import share

# Elements of a shard from which compiling, which takes seconds, is worth it.
MIN_NUMEL = 2**18


def compile_updates(graph: fx.GraphModule) -> None:
    """Give updates of long shards on the CPU compiled kernels, where there is a C++ compiler."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return
    updates: dict[str, list[CodedUpdate]] = {}
    for node in graph.graph.find_nodes(op="call_module"):
        module = graph.get_submodule(str(node.target))
        if isinstance(module, CodedUpdate) and module.compiled is None and module.compiles_exactly:
            shard = node.args[0].meta["val"]
            if shard.device.type == "cpu" and shard.dtype is torch.float32 and shard.numel() >= MIN_NUMEL:
                updates.setdefault(_key(module), []).append(module)
    kernels = share({key: functools.partial(compile_update, modules[0]) for key, modules in updates.items()})
    for key, modules in updates.items():
        for module in modules:
            module.compiled = kernels[key]


def _key(module: CodedUpdate) -> str:
    """Return a digest of what the kernel depends on."""
    text = f"{module.key} {module.guarded} {torch.get_num_threads()}"
    return hashlib.sha256(text.encode()).hexdigest()


def compile_update(module: CodedUpdate) -> Callable[..., Any] | None:
    """Compile an update for any number of blocks; None if that fails, with a warning."""
    environment = _torch.SizeEnv(duck_shape=False)
    rows = _torch.new_size(environment, "s0", 4096, minimum=2)
    with _torch.FakeTensorMode(shape_env=environment):
        numbers, blocks = module.examples(rows)
    kernel = module.blocks_kernel(torch.sqrt, len(numbers) - module.guarded)
    try:
        return _torch.inductor(lambda _, *arguments: kernel(*arguments), [rows, *numbers, *blocks], environment)
    except Exception as error:
        warn_user(
            f"Inductor could not compile the update of coded optimizer state; its operators run one by one, with "
            f"equal results: {type(error).__name__}: {str(error)[:300]}\n"
            "Check the C++ compiler, or name another one in the variable CXX."
        )
        return None
