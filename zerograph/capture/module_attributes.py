"""Tensors that ``build()`` assigns to attributes while it is traced: they are fake, and none is lost silently.

Modules get their former attributes back (:mod:`zerograph.capture.state_changes`). A buffer that another tensor is
assigned to gets the values of that tensor, as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, fx, nn

from zerograph import _torch
from zerograph.errors import CaptureError
from zerograph.ir.rewrite import ancestors, drop_unused


def keep_assigned(
    root: nn.Module,
    parameters: Collection[str],
    buffers: Collection[str],
    aliases: Mapping[str, str],
    state: Mapping[str, Tensor],
) -> None:
    """Copy the tensors that ``build()`` assigned to buffers into the traced buffers.

    Args:
        root: holds the modules.
        parameters: names of the parameters.
        buffers: names of the buffers.
        aliases: further names of the same tensors, mapped to the names above.
        state: the traced parameters and buffers, by name.

    Raises:
        CaptureError: ``build()`` assigned something of another shape or dtype, or replaced a parameter.
    """
    assigned: dict[str, Tensor] = {}
    for name in (*parameters, *buffers, *aliases):
        path, _, attribute = name.rpartition(".")
        module, first_name = root.get_submodule(path), aliases.get(name, name)
        value, traced = getattr(module, attribute, None), state[first_name]
        if value is traced:
            continue
        if first_name in parameters or (name in aliases and assigned.get(first_name) is not value):
            raise CaptureError(
                f"build() puts another tensor in the place of {name}\n"
                "Parameters, and buffers that several modules share, stay the tensors that they are: write to a buffer "
                "with copy_(), compute with another parameter through torch.func.functional_call."
            )
        if not isinstance(value, Tensor) or (value.shape, value.dtype) != (traced.shape, traced.dtype):
            what = repr(value)
            if isinstance(value, Tensor):
                what = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
            raise CaptureError(
                f"build() assigns {what:.120} to the buffer {name} of shape {tuple(traced.shape)} and {traced.dtype}\n"
                "A step is compiled for one shape and dtype: keep those, or change the buffer outside build()."
            )
        assigned[first_name] = value
    with torch.no_grad():
        # Copies first: one buffer may have been assigned to another.
        values = {name: value.detach().clone() for name, value in assigned.items()}
        for name, value in values.items():
            state[name].copy_(value)


def take_computed(graph: fx.GraphModule, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove the graph's last outputs, which are ``stored`` in attributes; return those that depend on inputs.

    The others are constants, a table that is computed once for instance: the graph computes them in each step.
    """
    output = graph.graph.output_node()
    (nodes,) = output.args
    assert isinstance(nodes, (list, tuple))
    count = len(nodes) - len(stored)
    computed = {}
    for (name, tensor), node in zip(stored.items(), nodes[count:], strict=True):
        assert isinstance(node, fx.Node)
        if any(source.op == "placeholder" for source in (node, *ancestors([node]))):
            computed[name] = tensor
    output.args = (list(nodes[:count]),)
    drop_unused(graph.graph)
    return computed


def refuse_constants(graph: fx.GraphModule, stored: Mapping[str, Tensor], others: Collection[str] = ()) -> None:
    """Refuse a graph that reads a parameter of no module, or a tensor of an earlier trace, which has no values.

    Args:
        graph: the graph.
        stored: tensors that the earlier trace left in attributes, by path.
        others: names of other places where it left tensors.

    Raises:
        CaptureError: the graph reads one.
    """
    for node in graph.graph.find_nodes(op="get_attr"):
        constant = getattr(graph, str(node.target))
        if isinstance(constant, _torch.FakeTensor):
            path = next((path for path, tensor in stored.items() if tensor is constant), None)
            raise stored_tensor_read(path, constant, others)
        if isinstance(constant, Tensor) and constant.requires_grad:
            raise CaptureError(
                f"build() computes with a parameter of shape {tuple(constant.shape)} that belongs to no module of the "
                "graph\nAssign the module that holds it to an attribute of the graph in __init__ (a plain list or dict "
                "hides modules: use nn.ModuleList or nn.ModuleDict)."
            )


def stored_tensor_read(path: str | None, tensor: Tensor, others: Collection[str] = ()) -> CaptureError:
    """Return the error for a tensor that one step stores and the next one reads."""
    what = f"{path}, which the step before is to leave there"
    if path is None:
        where = ", ".join(others) or "Python state"
        what = f"a tensor of shape {tuple(tensor.shape)} that the step before is to leave in {where}"
    return CaptureError(
        f"build() reads {what}: what is computed stays in buffers only\n"
        "Register a buffer in __init__ and write to it with copy_(), or return the tensor and pass it to the next step."
    )


def lost_tensors(places: Iterable[str]) -> str:
    """Return the warning that the tensors that ``build()`` stores in some places are not there after the step."""
    return (
        f"build() stores tensors in {', '.join(places)}: after the step they are not there\n"
        "Return from build() what is to be read outside."
    )
