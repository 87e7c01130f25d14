"""Seconds of one node of an emitted graph on a machine: the roofline of an operator, the time of a collective."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from zerograph._torch import OpOverload
from zerograph.ir.alias import is_view
from zerograph.ir.hosts import HostLayout, hosts_of_equal_size, traffic
from zerograph.ir.mesh import Mesh
from zerograph.ir.metadata import Boxing
from zerograph.ir.step_graph import nbytes, tensors_of
from zerograph.passes.recompute.cost import flops
from zerograph.planner.machine import Device, Link, Machine

aten = torch.ops.aten

# Kinds of operators that are not bound by memory in the same way; all others are "memory".
_KINDS: dict[str, tuple[str, ...]] = {
    "transcendental": (
        *("exp", "log", "tanh", "tanh_backward", "sigmoid", "gelu", "gelu_backward", "silu", "silu_backward"),
        *("erf", "pow", "sin", "cos", "softplus", "sqrt", "rsqrt", "div", "_softmax", "_log_softmax"),
        *("_softmax_backward_data", "_log_softmax_backward_data"),
    ),
    "norm": (
        *("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
        *("_native_batch_norm_legit", "native_batch_norm", "native_batch_norm_backward", "var_mean", "var"),
        *("_fused_rms_norm", "_fused_rms_norm_backward"),
    ),
    "indexing": ("embedding", "embedding_dense_backward", "index", "index_put", "gather", "scatter", "index_select"),
    "reduction": ("sum", "mean", "amax", "max", "linalg_vector_norm"),
    "update": ("_fused_adamw_", "_fused_adam_", "_fused_sgd_", "_fused_adagrad_"),
}
# They read no more of their first argument than they return.
_LOOKUPS = ("embedding", "index", "gather", "index_select")
# Products other than matrix products.
_PRODUCT_KINDS = {"convolution": "convolution", "scaled_dot_product": "attention", "flex_attention": "attention"}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}


def kind(node: fx.Node) -> str:
    """Return the device rate of the operator: a key of :attr:`zerograph.planner.machine.Device.moved`."""
    return _KIND_OF.get(_name(node).rstrip("_"), _KIND_OF.get(_name(node), "memory"))


def product_kind(node: fx.Node) -> str:
    """Return the kind of a product: a key of :attr:`zerograph.planner.machine.Device.shares`, or an empty text."""
    return next((kind for part, kind in _PRODUCT_KINDS.items() if part in _name(node)), "")


def is_pointwise(node: fx.Node) -> bool:
    """Return True if a compiler fuses the node with its inputs."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def is_free(node: fx.Node) -> bool:
    """Return True if the node computes nothing: a view, an input, an item of a tuple."""
    return (
        node.op != "call_function"
        or not isinstance(node.target, OpOverload)
        or is_view(node)
        or node.target in (aten._unsafe_view.default, aten.empty.memory_format)
    )


def seconds(node: fx.Node, device: Device) -> float:
    """Return the seconds of a compute node: the longer of its products and its memory traffic."""
    if is_free(node):
        return 0.0
    moved = _moved(node, fuses=device.fuses)
    if device.fuses and is_pointwise(node) and not moved:
        return 0.0
    products = device.product_seconds(_dtype(node), flops(node), product_kind(node))
    through_memory = device.moved_seconds("memory" if products else kind(node), moved)
    return device.in_step * (device.overhead + max(products, through_memory))


def on_cpu(node: fx.Node) -> bool:
    """Return True if the operator works on CPU tensors of at least one dimension: its results, or else its inputs."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    results = tensors_of(node)
    values = results or [each for source in node.all_input_nodes for each in tensors_of(source)]
    return any(each.dim() for each in values) and all(each.device.type == "cpu" for each in values)


def cpu_seconds(node: fx.Node, device: Device) -> float:
    """Return the seconds of a node that the CPU computes for an accelerator: an update, bound by CPU memory."""
    return 0.0 if is_free(node) else device.overhead + _moved(node, fuses=device.fuses) / device.cpu


def carry_seconds(node: fx.Node, device: Device) -> float:
    """Return the seconds of a copy between devices: of the link, or of the CPU's cast into pinned memory if longer.

    Args:
        node: a copy that the pass ``prefetch_offloaded`` inserted.
    """
    result: Tensor = node.meta["val"]
    source: Tensor = node.all_input_nodes[0].meta["val"]
    if source.device.type != "cpu" or source.dtype == result.dtype:
        return nbytes(result) / device.host
    return max(nbytes(result) / device.host, (nbytes(source) + 3 * nbytes(result)) / device.cpu)


def wire_seconds(boxing: Boxing, mesh: Mesh, machine: Machine) -> tuple[float, float]:
    """Return the seconds of a collective, and those of them in which the device does not compute.

    A collective takes the latency of each level of the network, and the time of its bytes at the slowest level's rate.

    NCCL runs gathers and reductions on as many rings as a node has ranks of the group. Each ring enters and leaves a
    node once, by the link of another rank, so that these links share what crosses between nodes: the bus bandwidth
    that nccl-tests reports is that of all of a node's links together. An all-to-all and a shift send every piece
    from its own rank, and so do the CPU's exchanges. Over hosts of several ranks these exchange inside of a host and
    then between hosts, where each byte goes once per host.
    """
    crossed = list(_crossed(mesh, boxing.dim, machine))
    if not crossed or not boxing.sent:
        return 0.0, 0.0
    if (layout := _exchanged_by_hosts(mesh, machine)) is not None:
        sent, (inside, between) = traffic(boxing, mesh, layout), (link for link, _, _ in crossed)
        parts = (
            (inside, inside.latency + inside.rate.seconds(sent.inside)),
            (between, between.latency + between.rate.seconds(sent.between)),
        )
        return sum(took for _, took in parts), sum(took * _idle(link, machine) for link, took in parts)
    latency = sum(link.latency * math.ceil(math.log2(members)) for link, members, _ in crossed)
    rings = machine.device.accelerator and boxing.kind not in ("all-to-all", "shift")
    times = [(link.rate.seconds(boxing.sent / (within if rings else 1)), link) for link, _, within in crossed]
    slowest, link = max(times, key=lambda one: one[0])
    return latency + slowest, (latency + slowest) * _idle(link, machine)


def _idle(link: Link, machine: Machine) -> float:
    return 1 - (machine.overlap if link.overlap is None else link.overlap)


def _exchanged_by_hosts(mesh: Mesh, machine: Machine) -> HostLayout | None:
    """Return the hosts of the ranks if exchanges cross the wire once per host, as over gloo; else None."""
    per_host = machine.links[0].ranks
    if machine.device.accelerator or mesh.dims > 1 or len(machine.links) != 2 or per_host is None or machine.order:
        return None
    return hosts_of_equal_size(mesh.size, per_host) if 1 < per_host < mesh.size and not mesh.size % per_host else None


def _crossed(mesh: Mesh, dim: int, machine: Machine) -> Iterator[tuple[Link, int, int]]:
    """Yield the levels that a group along a mesh dimension crosses, the parts it joins there, and ranks in each part.

    Of the groups along the dimension the one that is spread widest counts: the others wait for it.
    """
    size = apart = mesh.shape[dim]
    for link in machine.links:
        parts = 1 if link.ranks is None else _parts(mesh.shape, dim, machine.order, link.ranks)
        if parts < apart:
            yield link, math.ceil(apart / parts), math.ceil(size / apart)
            apart = parts


@functools.lru_cache(maxsize=64)
def _parts(shape: tuple[int, ...], dim: int, order: tuple[int, ...] | None, ranks: int) -> int:
    """Return over how many runs of so many consecutive ranks a group along a mesh dimension is spread, at most."""
    places = torch.arange(math.prod(shape)) if order is None else torch.tensor(order)
    nodes = (places // ranks).reshape(shape).movedim(dim, -1).sort(-1).values
    return 1 + int((nodes.diff(dim=-1) != 0).sum(-1).max())


def _moved(node: fx.Node, *, fuses: bool) -> int:
    """Return the bytes read and written; values inside a fused kernel do not count."""
    if _name(node) in _LOOKUPS:
        return 2 * sum(map(nbytes, tensors_of(node)))
    read = [
        value
        for source in node.all_input_nodes
        if not (fuses and is_pointwise(node) and is_pointwise(source) and len(source.users) == 1)
        for value in tensors_of(source)
    ]
    inside = fuses and is_pointwise(node) and len(node.users) == 1 and is_pointwise(next(iter(node.users)))
    written = [] if inside else tensors_of(node)
    return sum(map(nbytes, read)) + sum(map(nbytes, written))


def _dtype(node: fx.Node) -> str:
    """Return the compute dtype, that of the first floating-point argument, as a machine's file names it."""
    inputs = (value for source in node.all_input_nodes for value in tensors_of(source))
    dtype = next((value.dtype for value in inputs if value.dtype.is_floating_point), torch.float32)
    return str(dtype).removeprefix("torch.")


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return str(target.overloadpacket.__name__) if isinstance(target, OpOverload) else ""
