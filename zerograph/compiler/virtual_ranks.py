"""The requirements of ``config.virtual_ranks``: the number of ranks, and options that go together with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerograph import _torch
from zerograph.compiler.batch import Batch
from zerograph.config import Config
from zerograph.errors import ConfigError
from zerograph.ir.mesh import Mesh, has_slices, most_slices, of_own_slices, with_all_slices
from zerograph.ir.sbp import NdSbp, Split
from zerograph.passes.context import Context
from zerograph.runtime.backends import backends


def slices_per_rank(config: Config, mesh: Mesh) -> int:
    """Return the number of slices of ``config.virtual_ranks`` that each rank computes; the last ranks may add one less.

    Args:
        config: the options.
        mesh: the ranks.

    Raises:
        ConfigError: not every rank has slices, or another option makes numbers depend on the number of ranks.
    """
    slices = config.virtual_ranks
    assert slices is not None
    for is_set, option, advice in (
        (
            mesh.dims > 1
            or config.mesh.input_sbp not in (None, (Split(0),))
            or config.zero.shard_dims not in (None, 0, (0,)),
            "a placement, input_sbp or shard_dims that split more than the rows of the batch",
            "Tensor and sequence parallel ranks add in an order of their own: leave these out.",
        ),
        (
            max(config.mesh.context_parallel, config.mesh.expert_parallel) > 1,
            "context_parallel or expert_parallel",
            "Ranks that split sequences or experts add in an order of their own: set both to 1.",
        ),
        (
            config.gradient_accumulation_steps > 1 or config.accumulation_outputs != "whole",
            "gradient_accumulation_steps or accumulation_outputs",
            "The slices are the micro-batches: leave both at their defaults.",
        ),
        (
            config.precision.wire != "exact" or config.precision.optimizer_state != "exact",
            "wire or optimizer_state",
            "Each rank would code its own part: set both to 'exact'.",
        ),
        (
            config.zero.stage == "auto"
            or (config.memory.memory_budget is not None and config.zero.bucket_size is None),
            "stage = 'auto', or a memory_budget without bucket_size",
            "Each number of ranks would get other buckets, over which norms are added: set a stage and bucket_size.",
        ),
    ):
        if is_set:
            raise ConfigError(f"config.virtual_ranks = {slices} does not go together with {option}\n{advice}")
    if mesh.size > slices:
        raise ConfigError(
            f"config.virtual_ranks = {slices} on {mesh.size} ranks: every rank must have a slice\n"
            f"Run on at most {slices} ranks, or set it to {mesh.size} or more in all runs that are compared."
        )
    return most_slices(slices, mesh.size)


def check_target(config: Config, backend: backends.Backend, device: torch.device) -> None:
    """Check that a step of ``config.virtual_ranks`` runs where its numbers are known not to depend on the ranks.

    Raises:
        ConfigError: it is compiled by a backend whose code may round otherwise for other sizes, or computes on an
            accelerator with kernels that torch chooses by trial or that add by atomic operations.
    """
    on_accelerator = device.type not in ("cpu", "meta")
    if backend is not backends.eager and (on_accelerator or backend is not backends.inductor):
        raise ConfigError(
            f"config.virtual_ranks = {config.virtual_ranks}: what a compiler makes of a part of the step may add in "
            "another order on another number of ranks\nUse config.backend = 'eager', or 'inductor' on the CPU."
        )
    if on_accelerator and (torch.get_deterministic_debug_mode() < 2 or torch.backends.cudnn.benchmark):
        raise ConfigError(
            f"config.virtual_ranks = {config.virtual_ranks}: some kernels of accelerators add in another order each "
            "time, and cuDNN may choose others by trial\nCall torch.use_deterministic_algorithms(True), set "
            "torch.backends.cudnn.benchmark = False, and for CUDA the environment's CUBLAS_WORKSPACE_CONFIG=:4096:8."
        )
    if backend is backends.inductor and not _torch.inductor_rounds_each_operator():
        raise ConfigError(
            f"config.virtual_ranks = {config.virtual_ranks}: torch._inductor.config.cpp lets the C++ compiler contract "
            "or reorder sums and products, which it may do otherwise on another number of ranks\n"
            "Leave enable_floating_point_contract_flag and enable_unsafe_math_opt_flag at their defaults."
        )


def inputs_with_all_slices(tensors: Sequence[Tensor], batch: Batch, context: Context) -> Sequence[Tensor]:
    """Return the inputs of a step; a rank with fewer slices than the first one computes its first slice twice."""
    mesh = context.mesh_of_rows
    return [with_all_slices(x, 0, mesh) if is_cut else x for x, is_cut in zip(tensors, batch.cut, strict=True)]


def outputs_of_own_slices(
    values: Sequence[Tensor], outputs: Sequence[tuple[NdSbp, tuple[int, ...]]], context: Context
) -> list[Tensor]:
    """Return the outputs of a step without rows of slices that other ranks have."""
    mesh = context.mesh_of_rows
    return [
        of_own_slices(value, sbp[0].dim, mesh)
        if isinstance(sbp[0], Split) and has_slices(shape[sbp[0].dim], value.shape[sbp[0].dim], mesh)
        else value
        for value, (sbp, shape) in zip(values, outputs, strict=True)
    ]
