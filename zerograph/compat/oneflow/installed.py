"""Add OneFlow's methods to torch's tensors and modules when ``zerograph.compat.oneflow`` is imported.

Each is a name that torch does not have, or a call that raises in torch. Code that works without the import works the
same with it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerograph.compat.oneflow import tensors
from zerograph.compat.oneflow.nn.graph import GraphModule


def install() -> None:
    """Add OneFlow's methods, once."""
    if hasattr(Tensor, "is_global"):
        return
    added: Any = torch.Tensor
    # x.to_global(placement=P, sbp=S0): how OneFlow's scripts make their batches global.
    added.to_global = tensors.to_global
    # y.to_local(): torch's for a DTensor; a local tensor itself, because graphs return local tensors for local inputs.
    added.to_local = tensors.to_local
    # weight.sbp, weight.placement: how scripts look at ZeRO's placements.
    added.sbp = property(tensors.sbp_of)
    added.placement = property(tensors.placement_of_tensor)
    added.is_global = property(tensors.is_global)
    added.is_local = property(lambda x: not tensors.is_global(x))
    # model.to_global(placement=P, sbp=B).
    added = nn.Module
    added.to_global = tensors.module_to_global
    # module.to(nn.graph.GraphModule).activation_checkpointing = True; torch raises for a class.
    added.to = _also_to_graph_module(nn.Module.to)
    # weight.numpy(), which torch refuses while the parameter requires a gradient; weight.to(flow.Tensor): itself.
    added = nn.Parameter
    added.numpy = lambda x, *, force=False: x.detach().numpy(force=force)
    added.to = _also_to_tensor(Tensor.to)
    # loss.numpy(), loss.tolist(), f"{loss:.4f}" of a global tensor: the whole value. Torch refuses them.
    added = DTensor
    added.numpy = _numpy
    added.to = _also_to_tensor(DTensor.to)
    added.tolist = lambda x: tensors.whole_of(x).tolist()
    added.__format__ = _format


def _also_to_graph_module(original: Any) -> Any:
    def to(self: nn.Module, *args: Any, **options: Any) -> Any:
        if args == (GraphModule,):
            return GraphModule(self)
        if args == (nn.Module,):
            return self
        return original(self, *args, **options)

    to.__doc__, to.__name__, to.__qualname__ = original.__doc__, "to", "Module.to"
    return to


def _also_to_tensor(original: Any) -> Any:
    @functools.wraps(original)
    def to(self: Tensor, *args: Any, **options: Any) -> Any:
        return self if args == (Tensor,) else original(self, *args, **options)

    return to


def _numpy(x: DTensor, *, force: bool = False) -> Any:
    if x.requires_grad and not (force or x.is_leaf):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
    return tensors.whole_of(x).numpy(force=force)


def _format(x: DTensor, spec: str) -> str:
    return format(x.item(), spec) if spec and x.dim() == 0 else object.__format__(x, spec)
