"""The cheapest way from one SBP to another: one mesh dimension at a time, so that each step is one collective."""

from __future__ import annotations

import functools
import itertools
import math

import networkx as nx

from zerograph.ir.mesh import Mesh, local_shape
from zerograph.ir.sbp import NdSbp, Split, broadcast, wire_bytes


def route(source: NdSbp, target: NdSbp, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> tuple[NdSbp, ...]:
    """The SBPs on the way from ``source`` (left out) to ``target``, by fewest bytes sent, then fewest steps.

    Args:
        shape, itemsize: of the global tensor.
    """
    return _route(source, target, shape, itemsize, mesh.shape) if source != target else ()


@functools.lru_cache(maxsize=4096)
def _route(
    source: NdSbp, target: NdSbp, shape: tuple[int, ...], itemsize: int, mesh_shape: tuple[int, ...]
) -> tuple[NdSbp, ...]:
    mesh = Mesh(mesh_shape, (0,) * len(mesh_shape), ("",) * len(mesh_shape))
    graph = nx.DiGraph()
    choices = [dict.fromkeys((a, b, broadcast)) for a, b in zip(source, target, strict=True)]
    for here in itertools.product(*choices):
        for dim, options in enumerate(choices):
            for option in options:
                there = (*here[:dim], option, *here[dim + 1 :])
                cost = step_bytes(here, there, dim, shape, itemsize, mesh)
                if there != here and cost < math.inf and _divides(there, shape, mesh):
                    # The constant makes fewer steps win where bytes are equal, slices above all.
                    graph.add_edge(here, there, cost=cost + 1e-3)
    found: list[NdSbp] = nx.shortest_path(graph, source, target, weight="cost")
    return tuple(found[1:])


def step_bytes(source: NdSbp, target: NdSbp, dim: int, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> float:
    """Bytes that each rank sends for a change along ``dim`` alone; ``inf`` where that alone cannot be made.

    Of two mesh dimensions that split one dimension of the tensor the later one cuts the finer pieces, so the
    earlier one cannot change while the later one is split there.
    """
    cuts = {one.dim for one in (source[dim], target[dim]) if isinstance(one, Split)}
    if any(isinstance(inner, Split) and inner.dim in cuts for inner in source[dim + 1 :]):
        return math.inf
    return wire_bytes(source[dim], target[dim], held_bytes(source, dim, shape, itemsize, mesh), mesh.shape[dim])


def held_bytes(sbp: NdSbp, dim: int, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """Bytes of the tensor that the ranks along mesh dimension ``dim`` hold together."""
    others = tuple(broadcast if index == dim else one for index, one in enumerate(sbp))
    return math.prod(local_shape(shape, others, mesh)) * itemsize


def _divides(sbp: NdSbp, shape: tuple[int, ...], mesh: Mesh) -> bool:
    pieces = list(shape)
    for one, ranks in zip(sbp, mesh.shape, strict=True):
        if isinstance(one, Split):
            if pieces[one.dim] % ranks:
                return False
            pieces[one.dim] //= ranks
    return True
