"""An accelerator that need not be there: what was traced on the CPU, as if it lay on the meta device.

Autograd over fake CUDA tensors needs a torch with CUDA, and traced on the meta device itself attention falls apart into
products that no accelerator makes one by one. The CPU's operators keep for backward what an accelerator's do. From the
captured graph on the meta device is the accelerator, and the CPU is the one whose memory things may rest in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import pytree
from zerograph.capture.captured import Captured
from zerograph.ir.evaluate import mode_of
from zerograph.ir.metadata import role
from zerograph.ir.region import Region

ACCELERATOR = torch.device("meta")
_CPU = torch.device("cpu")


def moved(captured: Captured) -> Captured:
    """The same graph, changed in place, with its tensors on the accelerator instead of the CPU."""
    _move(captured.graph.graph)
    return replace(captured, regions=tuple(map(_moved_region, captured.regions)))


def _moved_region(region: Region) -> Region:
    _move(region.graph)
    return replace(region, outputs=tuple(replace(one, device=_there(one.device)) for one in region.outputs))


def _move(graph: fx.Graph) -> None:
    with mode_of(graph):
        for node in graph.nodes:
            node.args = fx.node.map_aggregate(node.args, _there)
            node.kwargs = fx.node.map_aggregate(node.kwargs, _there)
            found = role(node)
            # What random numbers follow from is on the CPU everywhere.
            if "val" in node.meta and (found is None or found.kind != "seed"):
                node.meta["val"] = pytree.tree_map(_fake, node.meta["val"])


def _there(given: Any) -> Any:
    return ACCELERATOR if isinstance(given, torch.device) and given == _CPU else given


def _fake(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.device != _CPU:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=ACCELERATOR)
