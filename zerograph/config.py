"""The configuration of a graph. Each option is declared once: type, default, check and documentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from zerograph.base.options import (
    POSITIVE,
    SWITCH,
    Check,
    check_by,
    checks,
    document,
    hashable,
    is_number,
    is_one_of,
    one_of,
    option,
    take_names,
    whole_number,
    whole_numbers,
)
from zerograph.base.sizes import in_bytes
from zerograph.base.source import warn_user
from zerograph.errors import ConfigError, UnknownOptionError, did_you_mean
from zerograph.ir.coded_state import SIGNED
from zerograph.ir.grad_scaler import GradScaler
from zerograph.ir.offload import Offload, complaint, offload_to
from zerograph.ir.pass_edits import PassEdit
from zerograph.ir.precision import LOW_DTYPES
from zerograph.ir.sbp import Sbp, Split, broadcast
from zerograph.ir.wire import WireFormat, block_of, wire_complaint
from zerograph.ir.zero import DEFAULT_STAGE, MODES, STAGES, Mode, Stage, ZeroPolicy, policy


@dataclass
class Config:
    """Options of one graph. Set them before the first call, or between calls: the step is then compiled again."""

    mode: Mode = option(
        "off",
        one_of(*MODES, advice=f"unknown ZeRO mode; choose one of {', '.join(map(repr, MODES))}"),
        """``"distributed_split"`` (ZeRO with shards that cut through parameters), ``"non_distributed"`` (ZeRO with
        whole parameters on each rank, balanced by size) or ``"off"`` (plain data parallel, the default). The mode does
        not change numbers, except that fused kernels may round the last few elements of a shard differently. All
        shards of a bucket are as long as the longest one: with ``"non_distributed"``, a parameter larger than all
        others together takes as much memory on every rank as on its owner.""",
    )
    stage: Stage = option(
        DEFAULT_STAGE,
        Check(
            lambda value: (type(value) is int and value in STAGES) or is_one_of(value, "auto"),
            "unknown ZeRO stage; choose 1, 2 or 3, or 'auto', or the mode 'off', which zg.prepare(stage=0) sets",
        ),
        """1, 2 or 3: what is split between the ranks; see :mod:`zerograph.ir.zero`. Default 2. Ignored while the mode
        is ``"off"``. ``"auto"``, in any mode: the first call searches for the fastest plan that fits ``memory_budget``,
        with recomputation, offload and accumulation as needed, and writes it into these options; see
        :mod:`zerograph.planner.choose`. Files are used only if ``offload_optimizer`` names a directory.""",
    )
    shard_min_size: int = option(0, whole_number(0, "elements"), "Smaller parameters stay on every rank. Default 0.")
    bucket_size: int | None = option(
        None,
        whole_number(1, "bytes", optional=True),
        """Maximum bytes of parameters per bucket, and so per collective. Default None: an eighth of the parameters,
        between 1 MiB and 32 MiB, and on accelerators layers up to 512 MiB; under a budget what fits it.""",
    )
    clip_grad_norm: float | None = option(
        None,
        POSITIVE,
        """Clip all gradients together to this norm at the end of ``build()``, as
        ``torch.nn.utils.clip_grad_norm_`` over all parameters does. Default None: do not clip.""",
    )
    on_missing_rule: str = option(
        "gather",
        one_of("gather", "error", "discover"),
        """How to handle an operator without a rule, on several ranks: ``"gather"`` its inputs and warn once
        (default), ``"error"``, or ``"discover"`` how it may be split by running it on random data.""",
    )
    passes: tuple[PassEdit, ...] = option(
        (),
        Check(
            lambda value: isinstance(value, tuple) and all(isinstance(edit, PassEdit) for edit in value),
            "give a tuple of zg.PassEdit.before(), after(), replace() or disable()",
        ),
        """Passes of your own and changes of the pipeline, as :class:`zerograph.PassEdit`, made in order; the same on
        all ranks. Default (): none.""",
    )
    backend: str | Callable[..., Any] = option(
        "auto",
        Check(
            lambda value: callable(value) or is_one_of(value, "auto", "eager", "inductor", "cudagraph"),
            "unknown backend; choose 'auto', 'eager', 'inductor', 'cudagraph' or give a callable",
        ),
        """``"eager"``, ``"inductor"``, ``"cudagraph"`` (Inductor, and one launch for what is between two collectives),
        a callable ``(fx.GraphModule, inputs) -> callable``, or ``"auto"`` (default): Inductor on accelerators, eager on
        CPU.""",
    )
    batch_norm: str = option(
        "global",
        one_of("global", "local", advice="unknown batch norm; choose 'global' or 'local'"),
        """Statistics of batch norm in training: ``"global"`` (default): of the whole batch, as on one device; or
        ``"local"``: each rank normalises each of its micro-batches by itself and exchanges nothing for it. Running
        statistics are then the mean over all ranks and micro-batches, once per update.""",
    )
    seed: int | None = option(
        None,
        Check(
            lambda value: (
                value is None or (isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**64)
            ),
            "give a whole number of 64 bits, or None for that of torch.manual_seed()",
        ),
        """Seed of all random numbers of the graph, together with the number of the step. Default None:
        ``torch.initial_seed()`` of rank 0 when the graph is first compiled.""",
    )
    memory_budget: int | str | None = option(
        None,
        Check(
            lambda value: value is None or in_bytes(value) is not None,
            "give bytes, more than 0, or a size like '40GiB' or '500MB', or None for no limit",
        ),
        """Maximum memory of a rank during a step, in bytes or as ``"40GiB"``, with parameters and optimizer state: the
        predicted peak of ``step.memory`` stays below. At stage 3 it decides how many gathered buckets stay gathered
        between forward and backward, which saves their second all-gather: between none (3 Psi of traffic) and all (2
        Psi, as at stage 2). At all stages it decides how many collectives are in flight at once. A step that does not
        fit is an error when it is compiled. Default None: as little memory as the stage promises.""",
    )
    keep_freed_memory: bool = option(
        True,
        SWITCH,
        """On the CPU, keep the memory that a step frees in the process, where glibc would return it to the system and
        take it back page by page. This sets glibc's malloc options for the whole process, once, unless a ``MALLOC_``
        environment variable or another allocator is in use. Default True.""",
    )
    amp_dtype: torch.dtype | None = option(
        None,
        Check(
            lambda value: value is None or (isinstance(value, torch.dtype) and value in LOW_DTYPES),
            "give torch.bfloat16 or torch.float16, or None for neither",
        ),
        """Mixed precision: compute in ``torch.bfloat16`` or ``torch.float16`` wherever ``torch.autocast`` does, with
        parameters cast before they are gathered; master weights and optimizer state stay fp32. Set by
        :meth:`enable_amp`. Default None: compute in the parameters' own dtype.""",
    )
    reduce_dtype: torch.dtype | None = option(
        None,
        Check(
            lambda value: value is None or (isinstance(value, torch.dtype) and value in (*LOW_DTYPES, torch.float32)),
            "give torch.float32, torch.bfloat16 or torch.float16, or None for the compute dtype",
        ),
        """Dtype in which gradients of fp32 and narrower parameters are reduced. Default None: the dtype that the
        parameter is computed with.""",
    )
    wire: str | WireFormat | Mapping[str, Any] = option(
        "exact",
        check_by(wire_complaint),
        """Format in which parameters and gradients are sent: ``"exact"`` (default), ``"bf16"``, ``"int8"``, ``"int4"``
        or a :func:`zerograph.wire`, such as one with error feedback, or a dict by ``"gather"`` and ``"reduce"``, or
        there by mesh dimension.""",
    )
    optimizer_state: str = option(
        "exact",
        one_of("exact", "int8"),
        """``"int8"``: store the state of elementwise optimizers in 8 bits. Default ``"exact"``.""",
    )
    grad_scaler: GradScaler | None = option(
        None,
        Check(
            lambda value: value is None or isinstance(value, GradScaler),
            "give a zerograph.GradScaler or zerograph.StaticGradScaler, or None for no scaling",
        ),
        """Loss scaling: a :class:`zerograph.GradScaler` or :class:`zerograph.StaticGradScaler`. Default None: no
        scaling; :meth:`enable_amp` sets a ``GradScaler()`` for fp16.""",
    )
    on_nonfinite: str = option(
        "ignore",
        Check(lambda value: value in ("ignore", "skip", "raise"), "choose 'ignore', 'skip' or 'raise'"),
        """How to handle a loss or gradient that is infinite or NaN on any rank. ``"ignore"`` (default): do not check.
        ``"skip"`` and ``"raise"``: check, and change no state: parameters, buffers, optimizer state and schedulers stay
        bitwise as they were, on all ranks. ``"skip"`` continues with the next batch, warns once, and counts in
        ``step.steps_skipped``. ``"raise"`` raises :class:`zerograph.NonFiniteError` on every rank; it runs the step's
        forward and backward again, node by node, to find the first operator that computed such a number, and its
        module. Checked are the tensors on which ``backward()`` is called, all 0-d tensors that ``build()`` returns, and
        the gradients as the update reads them: reduced, unscaled, clipped. Each step then waits for the device. Under
        loss scaling an overflow of the scaled gradients is no error: the update is skipped and the scale is lowered, as
        without this option. It is an error if a loss is not finite before it is scaled, or if the scale cannot be
        lowered: it is at ``min_scale`` (1.0, for instance), or the scaler is a ``StaticGradScaler``.""",
    )
    dynamic_shapes: Literal["auto"] | bool = option(
        "auto",
        Check(lambda value: value in ("auto", True, False), "choose 'auto', True or False"),
        """Serve inputs of different sizes by one compiled step. ``"auto"`` (default), as in ``torch.compile``:
        the first size of a dimension is static; when a second one comes, the step is compiled once more with that
        dimension symbolic, and no further size compiles again. True: all dimensions of plain inputs are symbolic from
        the start. False: each size compiles a step, and all ranks must hold equally many rows. See also
        :func:`zerograph.mark_dynamic`.""",
    )
    check_replicas: int | None = option(
        None,
        whole_number(0, "steps", optional=True),
        """Compare what ranks hold alike, before every n-th step: parameters, buffers and optimizer state that are
        broadcast along a mesh dimension (with hybrid sharding the copies of each shard), bitwise; on the host,
        hyperparameters, the state of schedulers and loss scaler, counts and seed. A difference is a
        :class:`zerograph.ReplicaError` on every rank that names the tensor, the place in it, and the ranks. State in
        files is read for it. Each rank hashes its tensors on its device, and one small exchange compares the hashes.
        Default None or 0: never.""",
    )
    timeout: float = option(
        600.0,
        Check(lambda value: is_number(value) and 0 < value < 2**31, "give seconds, more than 0"),
        """Seconds until a rank that does not answer is an error. Default 600.""",
    )
    placement: DeviceMesh | None = option(
        None,
        Check(
            lambda value: value is None or isinstance(value, DeviceMesh),
            "give a placement made by zg.placement(), or None",
        ),
        """The mesh that the step runs on, from ``zg.placement``. Default None: all ranks along one dimension.""",
    )
    input_sbp: tuple[Sbp, ...] | None = option(
        None,
        Check(
            lambda value: (
                value is None
                or (isinstance(value, tuple) and value != () and all(type(x) is Split or x == broadcast for x in value))
            ),
            "give a tuple of sbp.split(d) and sbp.broadcast, one per mesh dimension",
        ),
        """SBP of plain input tensors along each mesh dimension: ``split(0)`` if each rank passes its rows of the batch,
        ``split(1)`` if each rank passes its piece of the sequence, ``broadcast`` if ranks pass the same. A tensor that
        has no such dimension is the same on all ranks along it. Default None: ``split(0)`` along all.""",
    )
    context_parallel: int = option(
        1,
        whole_number(1, "ranks"),
        """Number of ranks that split each sequence. Without ``placement`` the ranks form rows of so many, and the ranks
        of a row pass the same plain tensors, whole; each takes its piece. Default 1: sequences are not split.""",
    )
    expert_parallel: int = option(
        1,
        whole_number(1, "ranks"),
        """Number of ranks that split the experts of a mixture of experts. Without ``placement`` the ranks form rows of
        so many; each rank of a row stores and computes its experts, for the tokens of the row. Default 1: none.""",
    )
    expert_capacity: float | None = option(
        1.25,
        POSITIVE,
        """Rows that a rank sends each rank in the first round of an all-to-all of tokens, times those of even routing;
        a second round has the rest. Default 1.25. None: gather tokens always.""",
    )
    context_parallel_method: str = option(
        "auto",
        one_of("auto", "ulysses", "gather", "ring"),
        """The form of attention where ranks split the sequence: ``"ulysses"`` exchanges positions for heads before
        attention and back after it, ``"gather"`` gathers keys and values, ``"ring"`` passes them from rank to rank.
        ``"auto"`` (default): the one of the first two that sends fewer bytes, for each attention.""",
    )
    shard_dims: int | tuple[int, ...] | None = option(
        None,
        whole_numbers(0, "mesh dimensions"),
        """The mesh dimension along which ZeRO splits, or a tuple of them (then backward gathers along the first only);
        along others its shards are broadcast. Default None: the last dimension along which inputs are split and no
        parameter is; else the last one along which inputs are split; with split sequences, the one of most ranks.""",
    )
    activation_checkpointing: Literal["none", "blocks", "auto"] = option(
        "none",
        one_of("none", "blocks", "auto"),
        """Values that backward recomputes instead of keeping them; numbers and model stay the same. ``"none"``
        (default): only what passes over memory compute (activation functions, gates, norms, casts), as long as it takes
        little time beside the products; more of it under Inductor, which fuses it. ``"blocks"``: everything in the
        blocks that the model repeats (children of one class in an ``nn.ModuleList`` or ``nn.Sequential``) except their
        inputs. ``"auto"``: what costs the least work, matrix products last, and only as much as ``memory_budget``
        requires; without a budget the same as ``"none"``. On an accelerator, activations whose copies to the CPU and
        back are hidden by forward are offloaded first. No collective is sent twice, except the all-gathers of backward
        at stage 3 and of attention. ``torch.utils.checkpoint`` inside the model is honoured in all cases.""",
    )
    optimizer_offload: Offload | None = option(
        None, check_by(complaint), """Set by :meth:`offload_optimizer`. Default None: on the device."""
    )
    parameter_offload: Offload | None = option(
        None, check_by(complaint), """Set by :meth:`offload_parameters`. Default None: on the device."""
    )
    offload_activations: bool = option(
        False,
        SWITCH,
        """Offload activations of an accelerator to the CPU between forward and backward: those of the first layers, as
        many as can be copied while forward computes. Default False. No effect on the CPU.""",
    )
    gradient_accumulation_steps: int = option(
        1,
        whole_number(1, "micro-batches"),
        """Number of micro-batches into which each rank's part of the batch is cut, along dimension 0. They are computed
        one after another, so that only the activations of one are in memory, and followed by one update; the numbers
        are those of the whole batch. No effect on a graph without optimizer. Default 1. Data parallel and stage 1 sum a
        rank's gradients and reduce them once; stages 2 and 3 reduce the gradients of each micro-batch and sum the
        shards. That is another order of summation: bitwise, only the first two agree, and the last two. Gradients
        narrower than fp32 are summed in fp32.""",
    )
    virtual_ranks: int | None = option(
        None,
        whole_number(1, "slices", optional=True),
        """Make the bits of a step independent of the number of ranks. The batch consists of so many slices of equally
        many rows, and each rank computes its slices one after another, as micro-batches. Every sum over slices, and
        every norm of gradients, adds in one fixed order; gradients narrower than fp32 are added in fp32 unless
        ``reduce_dtype`` is set. Losses, norms, parameters and optimizer state are then bitwise equal on each number of
        ranks up to that of the slices, at all stages. If it does not divide them, the first ranks have one slice more.
        In a loop of ``zg.prepare`` each operator computes slice by slice. The hardware and the threads of a rank must
        be the same. See :doc:`numbers`. Default None: off.""",
    )
    accumulation_outputs: str = option(
        "whole",
        one_of("whole", "packed"),
        """Form of the tensors that ``build()`` computes from the batch, with several micro-batches. ``"whole"``
        (default): as with one: a loss is that of the whole batch, and split tensors have all samples. ``"packed"``: one
        entry for each micro-batch, stacked in a new first dimension. The entries of a sum or mean over the batch are
        scaled so that *their mean is the value of the whole batch*. So the entry of a plain mean is the mean over its
        micro-batch; the entry of a mean that divides by a count over the batch (a masked mean) divides by a k-th of the
        whole count. What exists once per step is returned once in both forms: norms of gradients, functions of the
        parameters alone, and anything computed from a sum over the batch by more than scaling it.""",
    )

    # The scaler that enable_amp() created last.
    _amps_scaler: ClassVar[GradScaler | None] = None

    def __delattr__(self, name: str) -> None:
        raise ConfigError(f"option {name!r} cannot be deleted: set it to its default, {getattr(Config, name, None)!r}")

    if not TYPE_CHECKING:  # with them mypy would accept unknown names

        def __setattr__(self, name: str, value: Any) -> None:
            name = option_name(name)
            message = _CHECKS[name].complaint(value)
            if message:
                raise ConfigError(f"{name} = {value!r}: {message}")
            object.__setattr__(self, name, value)

        def __getattr__(self, name: str) -> Any:
            if name in RENAMED:
                return getattr(self, option_name(name))
            # Python itself looks for private names.
            raise AttributeError(name) if name.startswith("_") else UnknownOptionError(_unknown(name))

    def enable_zero(self, mode: bool | Mode = True, *, stage: Stage = DEFAULT_STAGE, shard_min_size: int = 0) -> None:
        """Set ZeRO's ``mode``, ``stage`` and ``shard_min_size``.

        Args:
            mode: True means ``"distributed_split"``, False means ``"off"``.

        Raises:
            ConfigError: there is no such mode or stage. Nothing is changed.
        """
        if not isinstance(mode, (str, bool)):
            raise ConfigError(f"enable_zero({mode!r:.60}): give True, False or a mode, and the stage as stage=")
        mode_name: Mode = mode if isinstance(mode, str) else "distributed_split" if mode else "off"
        new = Config(mode=mode_name, stage=stage, shard_min_size=shard_min_size)
        self.mode, self.stage, self.shard_min_size = new.mode, new.stage, new.shard_min_size

    def enable_amp(self, enabled: bool = True, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Turn mixed precision on or off: compute in ``dtype``, keep fp32 master weights. For fp16 the loss is scaled.

        Args:
            enabled: False also removes ``grad_scaler``.
            dtype: fp16 sets ``grad_scaler`` to a ``GradScaler()`` if there is none; bf16 removes only that one again.

        Raises:
            ConfigError: there is no such dtype. Nothing is changed.
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
        """``grad_scaler`` if it is enabled, else None."""
        scaler = self.grad_scaler
        return scaler if scaler is not None and scaler.enabled else None

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Set ``gradient_accumulation_steps``, under OneFlow's name."""
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
        """Offload the optimizer's state. Numbers stay the same.

        For a model on an accelerator, split parameters and their update are offloaded to the CPU too: separate streams
        copy shards to the accelerator for each gather, in the compute dtype, and reduced gradients to the CPU. A fused
        optimizer uses its CPU kernel, on the rank's share of the cores. This needs a ZeRO stage, on one rank too. Below
        ``shard_min_size`` parameters stay on the accelerator. For a model on the CPU only ``"nvme"`` has an effect.

        Args:
            device: ``"cpu"``: CPU memory. ``"nvme"``: one file for each rank, read and written while other buckets are
                updated, with direct I/O where possible. The state of three buckets is in memory at once; a smaller
                ``bucket_size`` lowers that. None, the default: the device of the model.
            pin_memory: keep shards in pinned memory, from which an accelerator copies asynchronously.
            fast_init: do not write the initial zeros to a new file, whose empty blocks read as zeros. False allocates
                all blocks before the first step.
            nvme_path: the directory of the files. It must be writable and have space for all of the state.
            keep_files: keep the files when the process exits or the graph is deleted.

        Raises:
            ConfigError: there is no such device, or ``nvme_path`` is missing. Nothing is changed.
        """
        self.optimizer_offload = offload_to(device, nvme_path, pin_memory, fast_init, 0, keep_files)

    def offload_parameters(
        self,
        device: str | None = "cpu",
        pin_memory: bool = True,
        max_in_cpu: int = 0,
        nvme_path: str | None = None,
        *,
        keep_files: bool = False,
    ) -> None:
        """Offload split parameters, at ZeRO stage 3. Numbers stay the same.

        For a model on an accelerator ``offload_optimizer`` must be set too, because shards are updated where they are
        stored. That already keeps shards in CPU memory at every stage, so only ``"nvme"`` adds to it. Parameters below
        ``shard_min_size``, which are whole on each rank, stay in memory.

        Args:
            device: ``"cpu"``, or ``"nvme"``: files, as for :meth:`offload_optimizer`, which are read for each gather
                and for the update. None, the default: the device of the model.
            max_in_cpu: with ``"nvme"``, bytes of a rank's parameters that stay in memory.
            pin_memory, nvme_path, keep_files: as for :meth:`offload_optimizer`.

        Raises:
            ConfigError: there is no such device, or ``nvme_path`` is missing. Nothing is changed.
        """
        self.parameter_offload = offload_to(device, nvme_path, pin_memory, True, max_in_cpu, keep_files)

    @property
    def policy(self) -> ZeroPolicy:
        """The ZeRO policy of the mode and stage.

        Raises:
            ConfigError: the stage is ``"auto"``, and not chosen yet.
        """
        if self.stage != "auto":
            return policy(self.mode, self.stage)
        if self.mode == "off":
            return policy(self.mode, 1)
        raise ConfigError(
            "config.stage is 'auto': the first call of the graph chooses the stage\n"
            "Call it, or set 1, 2 or 3; zg.plan(..., stage='auto') searches for it without running anything."
        )

    @property
    def memory_bytes(self) -> int | None:
        """``memory_budget`` in bytes; None without budget."""
        return None if self.memory_budget is None else in_bytes(self.memory_budget)

    @property
    def block(self) -> int:
        """Number of elements at whose multiples parameters begin in buckets."""
        return max(block_of(self.wire), SIGNED.block if self.optimizer_state == "int8" else 1)

    def key(self) -> tuple[Any, ...]:
        """Return all options' values: a compiled step is for one such key."""
        return tuple(hashable(getattr(self, field.name)) for field in fields(self))

    def shown(self, *, changed: bool = False) -> str:
        """Return the options as text that is equal on all ranks; with ``changed`` only mode, stage and changed ones."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if changed:
            default = Config()
            values = {k: v for k, v in values.items() if k in ("mode", "stage") or v != getattr(default, k)}
            if self.mode == "off" and self.stage != "auto":
                del values["stage"]
        return ", ".join(f"{k}={_shown(v)}" for k, v in values.items())


# Names of before 0.1.0, for two minor releases.
RENAMED = {
    "attention": "context_parallel_method",
    "batch_sbp": "input_sbp",
    "recompute": "activation_checkpointing",
    "sequence_parallel": "context_parallel",
    "zero_dim": "shard_dims",
}


def option_name(name: Any) -> str:
    """Return the name of an option; of its former name with a warning.

    Raises:
        ConfigError: there is no such option; names the closest one.
    """
    new = RENAMED.get(name)
    if new is not None:
        warn_user(f"the option {name!r} is called {new!r} now; the old name goes in 0.3")
        return new
    if name not in _CHECKS:
        raise ConfigError(_unknown(name))
    return str(name)


def _unknown(name: Any) -> str:
    hint = did_you_mean(str(name), _CHECKS, most=1)
    return f"there is no option {name!r:.60}{hint}\nOptions: {', '.join(_CHECKS)}."


def _shown(value: Any) -> str:
    if isinstance(value, DeviceMesh):
        return str(value.mesh.tolist())
    return str(getattr(value, "__qualname__", type(value)) if callable(value) else value)


document(Config)
take_names(Config, option_name)
_CHECKS = checks(Config)
