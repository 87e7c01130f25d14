"""Plan for an absent accelerator: move a graph that was traced on the CPU to the meta device.

Autograd over fake CUDA tensors needs a torch with CUDA. A trace on the meta device decomposes attention into products
that accelerators compute in one kernel. The operators of the CPU save the same tensors for backward as those of
accelerators. After capture the meta device stands for the accelerator, and the CPU for its host.
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
    """Move the tensors of a captured graph, in place, from the CPU to the accelerator; return it."""
    _move(captured.graph.graph)
    return replace(captured, regions=tuple(map(_moved_region, captured.regions)))


def _moved_region(region: Region) -> Region:
    _move(region.graph)
    return replace(region, outputs=tuple(replace(spec, device=_on_accelerator(spec.device)) for spec in region.outputs))


def _move(graph: fx.Graph) -> None:
    with mode_of(graph):
        for node in graph.nodes:
            node.args = fx.node.map_aggregate(node.args, _on_accelerator)
            node.kwargs = fx.node.map_aggregate(node.kwargs, _on_accelerator)
            node_role = role(node)
            # The seed is on the CPU for every device.
            if "val" in node.meta and (node_role is None or node_role.kind != "seed"):
                node.meta["val"] = pytree.tree_map(_fake, node.meta["val"])


def _on_accelerator(argument: Any) -> Any:
    return ACCELERATOR if isinstance(argument, torch.device) and argument == _CPU else argument


def _fake(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.device != _CPU:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=ACCELERATOR)
