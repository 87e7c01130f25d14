"""The configuration of a graph: every option with its default and unit; unknown names and values are refused."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from zerograph.errors import ConfigError, PlacementError, UnknownOptionError
from zerograph.grad_scaler import GradScaler
from zerograph.offload import Offload, complaint
from zerograph.precision import LOW_DTYPES
from zerograph.sbp import NdSbp, Sbp, Split, broadcast, nd
from zerograph.sizes import in_bytes as in_bytes
from zerograph.zero import MODES, STAGES, ZeroPolicy, policy


def _refusing_unknown(config: type[Config]) -> type[Config]:
    """The class, whose constructor refuses names that are no option as setting them does: with what is close."""
    init = config.__init__

    @functools.wraps(init)
    def checked(self: Config, *args: Any, **options: Any) -> None:
        for name in options:
            check_name(name)
        init(self, *args, **options)

    config.__init__ = checked  # type: ignore[method-assign]
    return config


@_refusing_unknown
@dataclass
class Config:
    """Options of one graph. Set them before the first call, or between calls: the step is then compiled again.

    Attributes:
        mode: ``"distributed_split"`` (ZeRO: shards cut through parameters), ``"non_distributed"`` (ZeRO: whole
            parameters are dealt out to the ranks, balanced by size) or ``"off"`` (plain data parallel, the default).
            Numbers do not depend on it; only fused kernels may round a shard's last few elements otherwise. All shards
            of a bucket are as long as the longest: dealt out, a parameter that is larger than all others together
            takes as much memory on every rank as on the one that it goes to.
        stage: 1, 2 or 3: what is split between the ranks; see :mod:`zerograph.zero`. Default 1; means nothing
            while the mode is off. ``"auto"``, whatever the mode: the first call looks for the fastest that fits
            ``memory_budget``, with as much recomputed, offloaded and accumulated as it needs, and writes what it chose
            into these options; see :mod:`zerograph.planner.choose`. Files are used if ``offload_optimizer`` names a
            directory.
        shard_min_size: parameters with fewer elements stay whole on every rank. Default 0.
        bucket_size: most bytes of parameters per bucket, and so per collective. Default None: an eighth of the
            parameters, within 1 MiB and 32 MiB; under a memory budget what fits it, up to four times as much.
        clip_grad_norm: clip all gradients together to this norm at the end of ``build()``, as
            ``torch.nn.utils.clip_grad_norm_`` over all parameters does there. Default None: do not.
        on_missing_rule: what to do about an operator without a rule, over several ranks: ``"gather"`` (default) its
            inputs and warn once, ``"error"``, or ``"discover"`` how it may be split by trying it on random data.
        backend: ``"eager"``, ``"inductor"``, a callable ``(fx.GraphModule, example_inputs) -> callable``, or
            ``"auto"`` (default): Inductor on accelerators, eager on CPU.
        batch_norm: whose statistics batch norm takes in training: ``"global"`` (default), those of the whole batch,
            as one device would; or ``"local"``: each rank normalises its part of the batch by itself, one micro-batch
            after the other, and exchanges nothing for it; running statistics then take the mean over all of theirs,
            once per update.
        seed: what all random numbers of the graph follow from, together with the number of the step, and so
            reproducibly. Default None: ``torch.initial_seed()`` of rank 0 when the graph is first compiled.
        memory_budget: the most memory that a rank may hold during a step, in bytes or as ``"40GiB"``, parameters and
            optimizer state at rest included: the predicted peak of ``step.memory`` stays below. At stage 3 it decides
            how many gathered buckets live from forward into backward, which spares gathering them again: from none, 3
            Psi of traffic, to all, stage 2's 2 Psi; at all stages, how many collectives are in flight at once. A step
            that cannot do with it is an error when it is compiled. Default None: as little as the stage promises.
        keep_freed_memory: on the CPU the process keeps what a step frees, for the next to take again, where glibc would
            give it to the system and take it back page by page. It is said to the C library for the whole process, and
            once; not where the environment sets one of its ``MALLOC_`` variables, or another allocator. Default True.
        amp_dtype: mixed precision: compute in ``torch.bfloat16`` or ``torch.float16`` wherever ``torch.autocast`` does,
            with parameters cast before they are gathered; masters and optimizer state stay fp32. Set by
            :meth:`enable_amp`. Default None: compute in the parameters' own dtype.
        reduce_dtype: the dtype in which gradients of fp32 parameters, and of narrower ones, are reduced. Default None:
            that in which the parameter is computed with.
        grad_scaler: loss scaling, a :class:`zerograph.GradScaler` or :class:`zerograph.StaticGradScaler`. Default None:
            no scaling; :meth:`enable_amp` puts a ``GradScaler()`` here for fp16.
        on_nonfinite: what to do where a loss or gradient is infinite or not a number on any rank: ``"ignore"``
            (default): nothing, and nothing is looked at; ``"skip"`` or ``"raise"``: look, and change no state:
            parameters, buffers, optimizer state and schedulers stay bitwise what they were, on all ranks. ``"skip"``
            goes on with the next batch, warns once, and counts in ``step.steps_skipped``. ``"raise"`` raises
            :class:`zerograph.NonFiniteError` on every rank; to find the first operator that made such a number, and
            its module, it runs the step's forward and backward again, node by node. Looked at are the tensors on which
            ``backward()`` is called, all 0-d tensors that ``build()`` returns, and the gradients as the update reads
            them: reduced, unscaled, clipped. Each step then waits for the device. Under loss scaling an overflow of
            the scaled gradients is no error: the update is skipped and the scale falls, as without this option. It is
            one where a loss is not finite before it is scaled, and where the scale cannot fall: it is at
            ``min_scale`` (give one, 1.0 for instance), or a ``StaticGradScaler``.
        check_replicas: every so many steps compare what ranks hold alike, before the step: parameters, buffers and
            optimizer state that are broadcast along a dimension of the mesh (with hybrid sharding the copies of each
            shard), bit by bit; and on the host hyperparameters, the state of schedulers and loss scaler, counts and
            seed. A difference is a :class:`zerograph.ReplicaError` on every rank that names the tensor, where in it,
            and the ranks. What rests in files is read for it. Each rank hashes what it has on its device, and one
            small exchange compares the hashes. Default None or 0: never.
        timeout: seconds until a rank that does not answer is an error. Default 600.
        placement: the mesh that the step runs on, made by ``zg.placement``. Default None: all ranks in a line.
        batch_sbp: for each mesh dimension how plain input tensors are placed: ``split(0)``, where each rank gives its
            part, or ``broadcast``, where ranks give the same. Default None: ``split(0)`` along all.
        zero_dim: the mesh dimension along which ZeRO splits; along the others its shards are broadcast. Default None:
            the last one along which inputs are split and no parameter is; if there is none, the last one along which
            inputs are split. What the user has split along it stays as it is: ZeRO splits the other parameters.
        recompute: what backward makes again instead of keeping it from forward, with no change to the model and to no
            number. ``"none"`` (default): what one pass over memory makes, activation functions and norms. ``"blocks"``:
            of the blocks that the model repeats (children of one class in an ``nn.ModuleList`` or ``nn.Sequential``),
            all but what enters them. ``"auto"``: what costs the least work, matrix products last, and only as much as
            ``memory_budget`` asks for; without a budget the same as ``"none"``. Of an accelerator, activations whose
            way to the CPU and back hides behind forward wait there first. No collective is sent twice but, at stage 3,
            the gathers of backward. ``torch.utils.checkpoint`` inside the model is honoured whatever this is.
        optimizer_offload: set by :meth:`offload_optimizer`. Default None: on the device.
        parameter_offload: set by :meth:`offload_parameters`. Default None: on the device.
        offload_activations: let activations of an accelerator wait for backward in the CPU's memory: of the first
            layers, and as many as can go there while forward still computes. Default False. On the CPU it means
            nothing.
        gradient_accumulation_steps: into how many micro-batches each rank's part of the batch is cut, along dimension
            0. They are computed one after another, so that only one's activations are in memory, and one update is made
            of all; the numbers are those of the whole batch at once. Means nothing for a graph without optimizer.
            Default 1. Data parallel and stage 1 sum a rank's gradients and reduce them once; stages 2 and 3 reduce each
            micro-batch's and keep the sum of the shards. That is another order of summation: bitwise, only these two
            and those two agree. Gradients narrower than fp32 are summed in fp32.
        accumulation_outputs: what tensors that ``build()`` computes from the batch are returned as, where there are
            several micro-batches: ``"whole"`` (default), as with one: a loss is that of the whole batch, split tensors
            have all samples; or ``"packed"``: one entry for each micro-batch, stacked in a new dimension in front. Of a
            sum or mean over the batch the entries are so scaled that *their mean is the value of the whole batch*; the
            entry of a plain mean is then the mean over its micro-batch, that of one that divides by a count over the
            batch (a masked mean) divides by a k-th of the whole count. What exists only once in a step is returned once
            either way: norms of gradients, what follows from the parameters alone, and what is computed from a sum over
            the batch by more than scaling it.
    """

    mode: str = "off"
    stage: int | Literal["auto"] = 1
    shard_min_size: int = 0
    bucket_size: int | None = None
    clip_grad_norm: float | None = None
    on_missing_rule: str = "gather"
    backend: str | Callable[..., Any] = "auto"
    batch_norm: str = "global"
    seed: int | None = None
    memory_budget: int | str | None = None
    keep_freed_memory: bool = True
    amp_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    grad_scaler: GradScaler | None = None
    on_nonfinite: str = "ignore"
    check_replicas: int | None = None
    timeout: float = 600.0
    placement: DeviceMesh | None = None
    batch_sbp: tuple[Sbp, ...] | None = None
    zero_dim: int | None = None
    recompute: str = "none"
    optimizer_offload: Offload | None = None
    parameter_offload: Offload | None = None
    offload_activations: bool = False
    gradient_accumulation_steps: int = 1
    accumulation_outputs: str = "whole"

    # That which enable_amp() made last.
    _amps_scaler: ClassVar[GradScaler | None] = None

    def __setattr__(self, name: str, value: Any) -> None:
        check_name(name)
        check = _CHECKS[name]
        complaint = check(value)
        if complaint:
            raise ConfigError(f"{name} = {value!r}: {complaint}")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise ConfigError(f"option {name!r} cannot be deleted: set it to its default, {getattr(Config, name, None)!r}")

    if not TYPE_CHECKING:  # mypy tells of names that do not exist, unless it sees this

        def __getattr__(self, name: str) -> Any:
            # Those that Python itself looks for are no mistake.
            raise AttributeError(name) if name.startswith("_") else UnknownOptionError(_unknown(name))

    def enable_zero(
        self, mode: bool | str = True, *, stage: int | Literal["auto"] = 1, shard_min_size: int = 0
    ) -> None:
        """Choose ZeRO's mode and stage: True means ``"distributed_split"``, False means ``"off"``.

        Raises:
            ConfigError: no such mode or stage; nothing is changed then.
        """
        if not isinstance(mode, (str, bool)):
            raise ConfigError(f"enable_zero({mode!r:.60}): give True, False or a mode, and the stage as stage=")
        wanted = mode if isinstance(mode, str) else MODES[0] if mode else "off"
        new = Config(mode=wanted, stage=stage, shard_min_size=shard_min_size)
        self.mode, self.stage, self.shard_min_size = new.mode, new.stage, new.shard_min_size

    def enable_amp(self, enabled: bool = True, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Mixed precision: compute in ``dtype``, bf16 or fp16, keep fp32 masters. For fp16 the loss is scaled.

        With fp16 ``grad_scaler`` becomes a ``GradScaler()`` unless there is one. bf16 drops that again, but no scaler
        that was set otherwise; False drops any.

        Raises:
            ConfigError: no such dtype; nothing is changed then.
        """
        if not isinstance(enabled, bool):
            raise ConfigError(f"enable_amp({enabled!r}): give True or False, and the dtype as dtype=")
        self.amp_dtype = dtype if enabled else None
        if not enabled:
            self.grad_scaler = None
        elif dtype is torch.float16 and self.grad_scaler is None:
            self.grad_scaler = GradScaler()
            object.__setattr__(self, "_amps_scaler", self.grad_scaler)
        elif dtype is not torch.float16 and self.grad_scaler is self._amps_scaler:
            self.grad_scaler = None

    @property
    def scaler(self) -> GradScaler | None:
        """``grad_scaler``, where it is to be used."""
        found = self.grad_scaler
        return found if found is not None and found.enabled else None

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """The same as ``gradient_accumulation_steps = steps``.

        Raises:
            ConfigError: not a whole number, 1 or more.
        """
        self.gradient_accumulation_steps = steps

    def offload_optimizer(
        self,
        device: str | None = "cpu",
        pin_memory: bool = True,
        fast_init: bool = True,
        nvme_path: str | None = None,
        *,
        keep_files: bool = False,
    ) -> None:
        """Let the optimizer's state rest elsewhere than on the device; the numbers stay the same.

        Of a model on an accelerator split parameters and their update are on the CPU too: shards go up for each
        gather, in the compute dtype, and reduced gradients down, both on a stream of their own beside the computation.
        An optimizer with ``fused=True`` then updates each bucket by its kernel for the CPU. It needs a ZeRO stage, of
        one rank as well; parameters below ``shard_min_size`` stay. Of a model on the CPU only files change anything.

        Args:
            device: ``"cpu"``: in the memory of the CPU. ``"nvme"``: in files, one for each rank, read ahead and
                written behind while other buckets are updated, past the page cache where the file system can. Three
                buckets of state are in memory at once: a smaller ``bucket_size`` makes that less. None: back to the
                default, on the device.
            pin_memory: keep shards in pinned memory, which an accelerator copies from by itself.
            fast_init: zeros that state begins with are not written to a new file, whose empty blocks read as such;
                False writes them, so that the first step finds all blocks in use.
            nvme_path: the directory of the files. It must exist, be writable, and have room for all of the state,
                which is asked for before the first step.
            keep_files: leave the files behind; else they go when the process exits, or the graph does.

        Raises:
            ConfigError: no such device, or no ``nvme_path``; nothing is changed then.
        """
        self.optimizer_offload = _offload(device, nvme_path, pin_memory, fast_init, 0, keep_files)

    def offload_parameters(
        self,
        device: str | None = "cpu",
        pin_memory: bool = True,
        max_in_cpu: int = 0,
        nvme_path: str | None = None,
        *,
        keep_files: bool = False,
    ) -> None:
        """Let split parameters rest elsewhere than on the device, at ZeRO stage 3; the numbers stay the same.

        Of a model on an accelerator shards are updated where they rest, so ``offload_optimizer`` must be set as well;
        then they are in the memory of the CPU at every stage, and only ``"nvme"`` says more. Parameters that are whole
        on each rank, below ``shard_min_size``, stay in memory.

        Args:
            device: ``"cpu"``, or ``"nvme"``: in files, as :meth:`offload_optimizer` does it; read for each gather,
                which sends what was read on, and for the update. None: back to the default, on the device.
            max_in_cpu: with files, the most bytes of a rank's parameters that stay in memory all the same.
            pin_memory, nvme_path, keep_files: as there.

        Raises:
            ConfigError: no such device, or no ``nvme_path``; nothing is changed then.
        """
        self.parameter_offload = _offload(device, nvme_path, pin_memory, True, max_in_cpu, keep_files)

    @property
    def policy(self) -> ZeroPolicy:
        """What the mode and stage decide.

        Raises:
            ConfigError: the stage is ``"auto"``, and nothing is chosen yet.
        """
        if self.stage != "auto":
            return policy(self.mode, self.stage)
        if self.mode == "off":
            return policy(self.mode, 1)
        raise ConfigError(
            "config.stage is 'auto': which one it is the first call of the graph decides\n"
            "Call it, or give 1, 2 or 3; zg.plan(..., stage='auto') looks for it without running anything."
        )

    @property
    def memory_bytes(self) -> int | None:
        """``memory_budget`` in bytes."""
        return None if self.memory_budget is None else in_bytes(self.memory_budget)

    def batch_on(self, mesh_dims: int) -> NdSbp:
        """SBP of plain input tensors on a mesh of so many dimensions.

        Raises:
            PlacementError: ``batch_sbp`` has another number of SBPs.
        """
        return (Split(0),) * mesh_dims if self.batch_sbp is None else nd(self.batch_sbp, mesh_dims)

    def zero_dim_on(self, mesh_dims: int, inputs: Sequence[NdSbp] = (), parameters: Sequence[NdSbp] = ()) -> int:
        """The mesh dimension along which ZeRO splits.

        Args:
            inputs: how the tensors of the batch are placed; where none is split, ``batch_sbp`` counts.
            parameters: how the user placed parameters.

        Raises:
            PlacementError: the mesh has no such dimension.
        """
        if self.zero_dim is None:
            split = _dims_split(inputs) or _dims_split([self.batch_on(mesh_dims)])
            free = split - _dims_split(parameters)
            return max(free or split, default=mesh_dims - 1)
        if self.zero_dim >= mesh_dims:
            raise PlacementError(f"config.zero_dim is {self.zero_dim}, but the placement has {mesh_dims} dimension(s)")
        return self.zero_dim

    def key(self) -> tuple[Any, ...]:
        """All options' values: equal where the compiled step may be the same."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def shown(self, *, changed: bool = False) -> str:
        """The same in words that are equal on all ranks.

        ``changed``: only of options that are not at their default, after the mode and, unless that is off, the stage.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if changed:
            default = Config()
            values = {k: v for k, v in values.items() if k in ("mode", "stage") or v != getattr(default, k)}
            if self.mode == "off" and self.stage != "auto":
                del values["stage"]
        return ", ".join(f"{k}={_shown(v)}" for k, v in values.items())


def _dims_split(sbps: Sequence[NdSbp]) -> set[int]:
    """The mesh dimensions along which any of them is split."""
    return {dim for sbp in sbps for dim, one in enumerate(sbp) if isinstance(one, Split)}


def check_name(name: Any) -> None:
    """Raise if there is no such option.

    Raises:
        ConfigError: there is none; the message has the nearest, and all.
    """
    if name not in _CHECKS:
        raise ConfigError(_unknown(name))


def _unknown(name: Any) -> str:
    near = difflib.get_close_matches(str(name), _CHECKS, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"there is no option {name!r:.60}{hint}\nOptions: {', '.join(_CHECKS)}."


def _offload(device: Any, nvme_path: Any, *rest: Any) -> Offload | None:
    if nvme_path is not None and not isinstance(nvme_path, (str, os.PathLike)):
        raise ConfigError(f"nvme_path = {nvme_path!r:.60}: give a directory, as text or as a path")
    return None if device is None else Offload(device, None if nvme_path is None else os.fspath(nvme_path), *rest)


def _shown(value: Any) -> str:
    if isinstance(value, DeviceMesh):
        return str(value.mesh.tolist())
    return str(getattr(value, "__qualname__", type(value)) if callable(value) else value)


def _whole_number(low: int, unit: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        good = isinstance(value, int) and not isinstance(value, bool) and value >= low
        return "" if good else f"give a whole number of {unit}, {low} or more"

    return check


def _one_of(value: Any, *choices: str) -> bool:
    """Values that compare in ways of their own, tensors among them, are none."""
    return isinstance(value, str) and value in choices


def _mode(value: Any) -> str:
    return (
        ""
        if isinstance(value, str) and value in MODES
        else f"unknown ZeRO mode; choose one of {', '.join(map(repr, MODES))}"
    )


def _stage(value: Any) -> str:
    known = (type(value) is int and value in STAGES) or _one_of(value, "auto")
    return "" if known else "unknown ZeRO stage; choose 1, 2 or 3, or 'auto', or the mode 'off' for plain data parallel"


def _backend(value: Any) -> str:
    known = callable(value) or _one_of(value, "auto", "eager", "inductor")
    return "" if known else "unknown backend; choose 'auto', 'eager', 'inductor' or give a callable"


def _batch_norm(value: Any) -> str:
    return "" if _one_of(value, "global", "local") else "unknown batch norm; choose 'global' or 'local'"


def _memory_budget(value: Any) -> str:
    good = value is None or in_bytes(value) is not None
    return "" if good else "give bytes, more than 0, or a size like '40GiB' or '500MB', or None for no limit"


def _amp_dtype(value: Any) -> str:
    good = value is None or (isinstance(value, torch.dtype) and value in LOW_DTYPES)
    return "" if good else "give torch.bfloat16 or torch.float16, or None for neither"


def _reduce_dtype(value: Any) -> str:
    good = value is None or (isinstance(value, torch.dtype) and value in (*LOW_DTYPES, torch.float32))
    return "" if good else "give torch.float32, torch.bfloat16 or torch.float16, or None for the compute dtype"


def _grad_scaler(value: Any) -> str:
    good = value is None or isinstance(value, GradScaler)
    return "" if good else "give a zerograph.GradScaler or zerograph.StaticGradScaler, or None for no scaling"


def _seed(value: Any) -> str:
    good = value is None or (isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**64)
    return "" if good else "give a whole number of 64 bits, or None for that of torch.manual_seed()"


def _timeout(value: Any) -> str:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 2**31
    return "" if good else "give seconds, more than 0"


def _on_missing_rule(value: Any) -> str:
    return "" if _one_of(value, "gather", "error", "discover") else "choose 'gather', 'error' or 'discover'"


def _on_nonfinite(value: Any) -> str:
    return "" if value in ("ignore", "skip", "raise") else "choose 'ignore', 'skip' or 'raise'"


def _clip_grad_norm(value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
    return "" if value is None or number else "give the largest norm that gradients may have, more than 0, or None"


def _placement(value: Any) -> str:
    return "" if value is None or isinstance(value, DeviceMesh) else "give a placement made by zg.placement(), or None"


def _batch_sbp(value: Any) -> str:
    good = isinstance(value, tuple) and bool(value) and all(one in (Split(0), broadcast) for one in value)
    return "" if value is None or good else "give a tuple of sbp.split(0) and sbp.broadcast, one per mesh dimension"


def _switch(value: Any) -> str:
    return "" if isinstance(value, bool) else "choose True or False"


def _recompute(value: Any) -> str:
    return "" if _one_of(value, "none", "blocks", "auto") else "choose 'none', 'blocks' or 'auto'"


def _accumulation_outputs(value: Any) -> str:
    return "" if _one_of(value, "whole", "packed") else "choose 'whole' or 'packed'"


_CHECKS: dict[str, Callable[[Any], str]] = {
    "mode": _mode,
    "stage": _stage,
    "shard_min_size": _whole_number(0, "elements"),
    "bucket_size": lambda value: "" if value is None else _whole_number(1, "bytes")(value),
    "clip_grad_norm": _clip_grad_norm,
    "on_missing_rule": _on_missing_rule,
    "backend": _backend,
    "batch_norm": _batch_norm,
    "memory_budget": _memory_budget,
    "keep_freed_memory": _switch,
    "seed": _seed,
    "amp_dtype": _amp_dtype,
    "reduce_dtype": _reduce_dtype,
    "grad_scaler": _grad_scaler,
    "on_nonfinite": _on_nonfinite,
    "check_replicas": lambda value: "" if value is None else _whole_number(0, "steps")(value),
    "timeout": _timeout,
    "placement": _placement,
    "batch_sbp": _batch_sbp,
    "zero_dim": lambda value: "" if value is None else _whole_number(0, "mesh dimensions")(value),
    "recompute": _recompute,
    "optimizer_offload": complaint,
    "parameter_offload": complaint,
    "offload_activations": _switch,
    "gradient_accumulation_steps": _whole_number(1, "micro-batches"),
    "accumulation_outputs": _accumulation_outputs,
}
