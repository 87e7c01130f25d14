"""Error feedback: what coded gradients and coded differences of weights have lacked so far, for the next step to add.

A *residual* is what this rank's codes of a gradient have lacked, along one mesh dimension. The *received* weights are
the bucket as all ranks have it from gathers that send differences. A checkpoint has both
(:mod:`zerograph.state.checkpoint.state`); what it held waits with the parameter until a step asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from zerograph.ir.mesh import local_part, local_shape
from zerograph.ir.sbp import NdSbp, PartialSum
from zerograph.runtime.job.exchange import gather_whole
from zerograph.runtime.state import Store, in_memory, store_of

_LOADED_RESIDUALS = "_zerograph_residuals"
# The key of received weights beside residuals, whose keys are mesh dimensions.
RECEIVED = -1


def residual(store: Store, dim: int, sbp: NdSbp, dtype: torch.dtype) -> Tensor:
    """Return this rank's residual of the reductions along a mesh dimension.

    Before the first step that of each rank's own gradients has what a checkpoint held (:func:`set_residuals`), whatever
    mesh that was of. Others are zeros.

    Args:
        sbp: the placement of the gradients that are coded.
        dtype: dtype of the residual.
    """
    sizes = store.job.mesh.shape
    is_own = all(isinstance(entry, PartialSum) for entry, size in zip(sbp, sizes, strict=False) if size > 1)
    if is_own:
        store.own_residual = dim
    if dim not in store.residuals:
        layout = store.layout
        shape = local_shape(layout.shape, sbp, store.job.mesh)
        store.residuals[dim] = new = torch.zeros(shape, dtype=dtype, device=layout.device)
        for parameter, slot in store.slots():
            for saved_dim, loaded in pending_residuals(parameter).items() if is_own else ():
                del vars(parameter)[_LOADED_RESIDUALS][saved_dim]
                if shape == layout.shape == (layout.padded,):
                    new[slot.offset : slot.offset + slot.numel].copy_(loaded)
    return store.residuals[dim]


def received(store: Store, dtype: torch.dtype) -> Tensor:
    """Return the bucket as all ranks have it from gathers that send differences.

    Before the first gather it is what a checkpoint held, else the exact bucket: a collective then. So it is where the
    step before computed with another dtype.

    Args:
        dtype: the dtype that the step computes with.
    """
    if store.received is None or store.received.dtype is not dtype:
        layout = store.layout
        whole = gather_whole(store.job, in_memory(store.flat).to(layout.device), layout.sbp).to(dtype)
        store.received = whole[local_part(layout.shape, layout.gathered, store.job.mesh)].clone()
        for parameter, slot in store.slots():
            loaded = vars(parameter).get(_LOADED_RESIDUALS, {}).pop(RECEIVED, None)
            if loaded is not None and store.received.shape == (layout.padded,):
                store.received[slot.offset : slot.offset + slot.numel].copy_(loaded)
    return store.received


def pending_residuals(parameter: nn.Parameter) -> dict[int, Tensor]:
    """Return this rank's residuals of a checkpoint, by mesh dimension, that no step has read yet."""
    pending: dict[int, Tensor] = vars(parameter).get(_LOADED_RESIDUALS, {})
    return {dim: tensor for dim, tensor in pending.items() if dim != RECEIVED}


def set_residuals(parameters: Iterable[nn.Parameter], loaded: Mapping[int, dict[int, Tensor]]) -> None:
    """Replace this rank's residuals of these parameters.

    Args:
        parameters: the parameters.
        loaded: by ``id`` of a parameter, its parts of the residuals by mesh dimension, [numel], and under ``RECEIVED``
            of the weights that all ranks have. Other residuals become 0, other weights are gathered.
    """
    for parameter in parameters:
        vars(parameter).pop(_LOADED_RESIDUALS, None)
        if id(parameter) in loaded:
            vars(parameter)[_LOADED_RESIDUALS] = loaded[id(parameter)]
        store = store_of(parameter)
        if store is not None:
            store.residuals.clear()
            store.received = None
