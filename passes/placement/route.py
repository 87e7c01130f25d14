"""The cheapest route from one SBP to another. Each step changes one mesh dimension, so it is one collective."""

from __future__ import annotations

import functools
import itertools
import math

from zerograph.ir.mesh import Mesh, local_shape
from zerograph.ir.sbp import NdSbp, Split, broadcast, wire_bytes


@functools.lru_cache(maxsize=4096)
def route(
    source: NdSbp, target: NdSbp, shape: tuple[int, ...], itemsize: int, mesh: Mesh, first: int
) -> tuple[NdSbp, ...]:
    """Return the SBPs from ``source`` (left out) to ``target``, by fewest bytes sent, then fewest steps.

    Args:
        source, target: SBPs of the global tensor.
        shape, itemsize: shape and bytes per element of the global tensor.
        mesh: the ranks.
        first: the mesh dimension that changes first among routes that are equal. Sums in the order of ZeRO's
            reduce-scatters have the same bits at every stage.
    """
    import networkx as nx

    if source == target:
        return ()
    graph = nx.DiGraph()
    choices = [dict.fromkeys((a, b, broadcast)) for a, b in zip(source, target, strict=True)]
    for before in itertools.product(*choices):
        for dim, options in enumerate(choices):
            for option in options:
                after = (*before[:dim], option, *before[dim + 1 :])
                cost = step_bytes(before, after, dim, shape, itemsize, mesh)
                if after != before and cost < math.inf and _is_even(after, shape, mesh):
                    # The constant makes fewer steps win where the bytes are equal.
                    early = dim != first and first < mesh.dims and before[first] != target[first]
                    graph.add_edge(before, after, cost=cost + 1e-3 + 1e-5 * early)
    path: list[NdSbp] = nx.shortest_path(graph, source, target, weight="cost")
    return tuple(path[1:])


def step_bytes(source: NdSbp, target: NdSbp, dim: int, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> float:
    """Return the bytes that each rank sends for a change along ``dim`` alone; ``inf`` if it needs other changes first.

    Where two mesh dimensions split one dimension of the tensor, the later one cuts the finer pieces. The earlier one
    cannot change while the later one is split there, unless it has one rank, whose part is the whole.

    Args:
        source, target: SBPs that differ at ``dim`` only.
        dim: the mesh dimension.
        shape, itemsize: shape and bytes per element of the global tensor.
        mesh: the ranks.
    """
    cuts = {sbp.dim for sbp in (source[dim], target[dim]) if isinstance(sbp, Split)}
    if mesh.shape[dim] > 1 and any(isinstance(inner, Split) and inner.dim in cuts for inner in source[dim + 1 :]):
        return math.inf
    return wire_bytes(source[dim], target[dim], held_bytes(source, dim, shape, itemsize, mesh), mesh.shape[dim])


def held_bytes(sbp: NdSbp, dim: int, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """Return the bytes of the tensor that the ranks along mesh dimension ``dim`` hold together."""
    others = tuple(broadcast if index == dim else other for index, other in enumerate(sbp))
    return math.prod(local_shape(shape, others, mesh)) * itemsize


def _is_even(sbp: NdSbp, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Return whether every split cuts its dimension into equal parts."""
    pieces = list(shape)
    for mesh_dim, placement in enumerate(sbp):
        if isinstance(placement, Split):
            if pieces[placement.dim] % mesh.divisor(mesh_dim):
                return False
            pieces[placement.dim] //= mesh.shape[mesh_dim]
    return True
