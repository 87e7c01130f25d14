"""The configuration of a graph. Each option is declared once: type, default, check and documentation.

Options are in groups, as attributes of :class:`Config`: ``config.zero.stage``. Their names are unique: as keywords, in
``Config(stage=2)`` and on the command line, they need no group.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from zerograph.base.options import (
    POSITIVE,
    SWITCH,
    Check,
    check_by,
    declared,
    document,
    hashable,
    is_number,
    is_one_of,
    one_of,
    option,
    whole_number,
    whole_numbers,
)
from zerograph.base.sizes import in_bytes
from zerograph.base.source import warn_user
from zerograph.errors import ConfigError, UnknownOptionError, did_you_mean
from zerograph.ir.coded_state import SIGNED
from zerograph.ir.grad_scaler import GradScaler
from zerograph.ir.offload import Device, Offload, OffloadTo
from zerograph.ir.pass_edits import PassEdit
from zerograph.ir.precision import LOW_DTYPES
from zerograph.ir.sbp import Sbp, Split, broadcast
from zerograph.ir.wire import WireFormat, block_of, wire_complaint
from zerograph.ir.zero import DEFAULT_STAGE, STAGES, ShardBy, Stage, ZeroPolicy, mode_of, options_of_mode, policy


class Options:
    """Options as attributes, each of which is checked when it is set."""

    def __delattr__(self, name: str) -> None:
        raise ConfigError(
            f"option {name!r} cannot be deleted: set it to its default, {getattr(type(self), name, None)!r}"
        )

    if not TYPE_CHECKING:  # with them mypy would accept unknown names

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in self.__dataclass_fields__:
                raise ConfigError(_unknown(name))
            if message := OPTIONS[name].metadata["check"].complaint(value):
                raise ConfigError(f"{name} = {value!r}: {message}")
            object.__setattr__(self, name, value)

        def __getattr__(self, name: str) -> Any:
            # Python itself looks for private names.
            raise AttributeError(name) if name.startswith("_") else UnknownOptionError(_unknown(name))


@dataclass
class ZeroOptions(Options):
    """ZeRO: what is sharded, and how. ``config.zero``."""

    stage: Stage = option(
        0,
        Check(
            lambda value: (type(value) is int and (value == 0 or value in STAGES)) or is_one_of(value, "auto"),
            "unknown ZeRO stage; choose 0, 1, 2 or 3, or 'auto'",
        ),
        """Stage of ZeRO: 1 splits optimizer state between the ranks, 2 gradients too, 3 parameters too; see
        :mod:`zerograph.ir.zero`. 0 (default): nothing, plain data parallel. The stage does not change numbers, except
        that fused kernels may round the last few elements of a shard differently. ``"auto"``: the first call searches
        for the fastest plan that fits ``memory_budget``, with recomputation, offload and accumulation as needed, and
        writes it into these options; see :mod:`zerograph.planner.search`. Files are used only if ``offload`` names a
        directory.""",
    )
    shard_by: ShardBy = option(
        "elements",
        one_of("elements", "parameters"),
        """``"elements"`` (default): shards cut through parameters. ``"parameters"``: each rank stores and updates whole
        parameters, balanced by size. All shards of a bucket are as long as the longest one: a parameter larger than all
        others together takes as much memory on every rank as on its owner.""",
    )
    shard_min_size: int = option(0, whole_number(0, "elements"), "Smaller parameters stay on every rank. Default 0.")
    bucket_size: int | None = option(
        None,
        whole_number(1, "bytes", optional=True),
        """Maximum bytes of parameters per bucket, and so per collective. Default None: an eighth of the parameters,
        between 1 MiB and 32 MiB, and on accelerators layers up to 512 MiB; under a budget what fits it.""",
    )
    shard_dims: int | tuple[int, ...] | None = option(
        None,
        whole_numbers(0, "mesh dimensions"),
        """The mesh dimension along which ZeRO splits, or a tuple of them (then backward gathers along the first only);
        along others its shards are broadcast. Default None: the last dimension along which inputs are split and no
        parameter is; else the last one along which inputs are split; with split sequences, the one of most ranks.""",
    )


@dataclass
class MeshOptions(Options):
    """The mesh of ranks, and what is split along it. ``config.mesh``."""

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
    context_parallel_method: str = option(
        "auto",
        one_of("auto", "ulysses", "gather", "ring"),
        """The form of attention where ranks split the sequence: ``"ulysses"`` exchanges positions for heads before
        attention and back after it, ``"gather"`` gathers keys and values, ``"ring"`` passes them from rank to rank.
        ``"auto"`` (default): the one of the first two that sends fewer bytes, for each attention.""",
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


@dataclass
class PrecisionOptions(Options):
    """Dtypes and formats of what is computed, sent and stored. ``config.precision``."""

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
    grad_scaler: GradScaler | None = option(
        None,
        Check(
            lambda value: value is None or isinstance(value, GradScaler),
            "give a zerograph.GradScaler or zerograph.StaticGradScaler, or None for no scaling",
        ),
        """Loss scaling: a :class:`zerograph.GradScaler` or :class:`zerograph.StaticGradScaler`. Default None: no
        scaling; :meth:`enable_amp` sets a ``GradScaler()`` for fp16.""",
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


@dataclass
class MemoryOptions(Options):
    """Memory: its budget, and what is recomputed or offloaded. ``config.memory``."""

    memory_budget: int | str | None = option(
        None,
        Check(
            lambda value: value is None or in_bytes(value) is not None,
            "give bytes, more than 0, or a size like '40GiB' or '500MB', or None for no limit",
        ),
        """Maximum memory of a rank during a step, in bytes or as ``"40GiB"``, with parameters and optimizer state: the
        predicted peak of ``step.inspect.memory`` stays below. At stage 3 it decides how many gathered buckets stay
        gathered between forward and backward, which saves their second all-gather: between none (3 Psi of traffic) and
        all (2 Psi, as at stage 2). At all stages it decides how many collectives are in flight at once. A step that
        does not fit is an error when it is compiled. Default None: as little memory as the stage promises.""",
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
    offload: Offload = option(
        Offload(),
        Check(lambda value: isinstance(value, Offload), "give a zg.Offload"),
        """Store optimizer state, parameters or activations in CPU memory or files, as :class:`zerograph.Offload` says.
        Numbers stay the same. Default ``Offload()``: nothing.""",
    )
    keep_freed_memory: bool = option(
        True,
        SWITCH,
        """On the CPU, keep the memory that a step frees in the process, where glibc would return it to the system and
        take it back page by page. This sets glibc's malloc options for the whole process, once, unless a ``MALLOC_``
        environment variable or another allocator is in use. Default True.""",
    )


@dataclass
class CheckOptions(Options):
    """How problems are found and handled. ``config.checks``."""

    on_missing_rule: str = option(
        "gather",
        one_of("gather", "error", "discover"),
        """How to handle an operator without a rule, on several ranks: ``"gather"`` its inputs and warn once
        (default), ``"error"``, or ``"discover"`` how it may be split by running it on random data.""",
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


@dataclass(init=False, repr=False)
class Config(Options):
    """Options of one graph. Set them before the first call, or between calls: the step is then compiled again.

    Groups have most options: ``config.zero.stage = 2``. Keywords need no group: ``Config(stage=2)``.
    """

    zero: ZeroOptions = field(default_factory=ZeroOptions)
    mesh: MeshOptions = field(default_factory=MeshOptions)
    precision: PrecisionOptions = field(default_factory=PrecisionOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    checks: CheckOptions = field(default_factory=CheckOptions)
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
    dynamic_shapes: Literal["auto"] | bool = option(
        "auto",
        Check(lambda value: value in ("auto", True, False), "choose 'auto', True or False"),
        """Serve inputs of different sizes by one compiled step. ``"auto"`` (default), as in ``torch.compile``:
        the first size of a dimension is static; when a second one comes, the step is compiled once more with that
        dimension symbolic, and no further size compiles again. True: all dimensions of plain inputs are symbolic from
        the start. False: each size compiles a step, and all ranks must hold equally many rows. See also
        :func:`zerograph.mark_dynamic`.""",
    )
    clip_grad_norm: float | None = option(
        None,
        POSITIVE,
        """Clip all gradients together to this norm at the end of ``build()``, as
        ``torch.nn.utils.clip_grad_norm_`` over all parameters does. Default None: do not clip.""",
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
    passes: tuple[PassEdit, ...] = option(
        (),
        Check(
            lambda value: isinstance(value, tuple) and all(isinstance(edit, PassEdit) for edit in value),
            "give a tuple of zg.PassEdit.before(), after(), replace() or disable()",
        ),
        """Passes of your own and changes of the pipeline, as :class:`zerograph.PassEdit`, made in order; the same on
        all ranks. Default (): none.""",
    )

    # The scaler that enable_amp() created last.
    _amps_scaler: ClassVar[GradScaler | None] = None

    def __init__(self, **options: Any) -> None:
        for each in fields(self):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            # dataclasses.replace() passes groups.
            is_group = each.name in _GROUPS and isinstance(options.get(each.name), Options)
            object.__setattr__(self, each.name, copy.copy(options.pop(each.name)) if is_group else default)
        self.set(**options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.options().items())})"

    def __copy__(self) -> Self:
        new = object.__new__(type(self))
        vars(new).update({k: copy.copy(v) if isinstance(v, Options) else v for k, v in vars(self).items()})
        return new

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            if name in _GROUPS:
                raise ConfigError(f"config.{name} is a group of options: set those, as config.zero.stage = 2")
            if name not in _FORMER:
                super().__setattr__(name, value)
            else:
                warn_user(f"config.{name} is {_FORMER[name]} now; {_UNTIL}")
                self.set(**_today(name, value, self))

        def __getattr__(self, name: str) -> Any:
            if name not in _FORMER:
                return super().__getattr__(name)
            warn_user(f"config.{name} is {_FORMER[name]} now; {_UNTIL}")
            if name == "mode":
                return mode_of(self.zero.stage, self.zero.shard_by)
            if name in _OFFLOADS:
                return getattr(self.memory.offload, _OFFLOADS[name])
            return self.options()[RENAMED.get(name, name)]

    def _home(self, name: str) -> Options:
        """Return the object that has the option."""
        group = _GROUP_OF[name]
        return getattr(self, group) if group else self

    def set(self, **options: Any) -> None:
        """Set options by name, all or, if one is invalid, none: ``config.set(stage=3, memory_budget="40GiB")``.

        Raises:
            ConfigError: an option does not exist or cannot have its value.
        """
        options = option_values(options, self)
        for config in (copy.copy(self), self) if options else ():
            for name, value in options.items():
                setattr(config._home(name), name, value)

    def options(self) -> dict[str, Any]:
        """Return the values of all options by name."""
        return {name: getattr(self._home(name), name) for name in OPTIONS}

    def parts(self) -> list[Options]:
        """Return the objects that have the options: the groups, and the configuration itself."""
        return [*(getattr(self, name) for name in _GROUPS), self]

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
        self.precision.amp_dtype = dtype if enabled else None
        if not enabled:
            self.precision.grad_scaler = None
        elif dtype is torch.float16 and self.precision.grad_scaler is None:
            self.precision.grad_scaler = GradScaler()
            object.__setattr__(self, "_amps_scaler", self.precision.grad_scaler)
        elif dtype is not torch.float16 and self.precision.grad_scaler is self._amps_scaler:
            self.precision.grad_scaler = None

    @property
    def scaler(self) -> GradScaler | None:
        """``grad_scaler`` if it is enabled, else None."""
        scaler = self.precision.grad_scaler
        return scaler if scaler is not None and scaler.enabled else None

    def enable_zero(self, mode: bool | str = True, *, stage: Stage = DEFAULT_STAGE, shard_min_size: int = 0) -> None:
        """Set ``config.zero``, under a former name."""
        warn_user(f"config.enable_zero() is config.zero.stage and config.zero.shard_by now; {_UNTIL}")
        self.set(**options_of_mode(mode, stage), shard_min_size=shard_min_size)

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Set ``config.gradient_accumulation_steps``, under a former name."""
        warn_user(f"config.set_gradient_accumulation_steps() is config.gradient_accumulation_steps now; {_UNTIL}")
        self.gradient_accumulation_steps = steps

    def offload_optimizer(
        self,
        device: Device | None = "cpu",
        pin_memory: bool = True,
        fast_init: bool = True,
        nvme_path: str | None = None,
        *,
        keep_files: bool = False,
    ) -> None:
        """Set ``optimizer`` of ``config.memory.offload``, under its former name."""
        self._offload("optimizer", device, nvme_path, pin_memory, fast_init, 0, keep_files)

    def offload_parameters(
        self,
        device: Device | None = "cpu",
        pin_memory: bool = True,
        max_in_cpu: int = 0,
        nvme_path: str | None = None,
        *,
        keep_files: bool = False,
    ) -> None:
        """Set ``parameters`` of ``config.memory.offload``, under its former name."""
        self._offload("parameters", device, nvme_path, pin_memory, True, max_in_cpu, keep_files)

    def _offload(self, part: str, device: Device | None, *target: Any) -> None:
        warn_user(
            f"config.offload_{part}(...) is config.memory.offload = zg.Offload({part}=...) now; the old name goes in "
            "0.3"
        )
        new: dict[str, Any] = {part: None if device is None else OffloadTo(device, *target)}
        self.memory.offload = replace(self.memory.offload, **new)

    @property
    def policy(self) -> ZeroPolicy:
        """The ZeRO policy of the stage.

        Raises:
            ConfigError: the stage is ``"auto"``, and not chosen yet.
        """
        if self.zero.stage != "auto":
            return policy(self.zero.stage, self.zero.shard_by)
        raise ConfigError(
            "config.zero.stage is 'auto': the first call of the graph chooses the stage\n"
            "Call it, or set 0, 1, 2 or 3; zg.plan(..., stage='auto') searches for it without running anything."
        )

    @property
    def memory_bytes(self) -> int | None:
        """``memory_budget`` in bytes; None without budget."""
        return None if self.memory.memory_budget is None else in_bytes(self.memory.memory_budget)

    @property
    def block(self) -> int:
        """Number of elements at whose multiples parameters begin in buckets."""
        return max(block_of(self.precision.wire), SIGNED.block if self.precision.optimizer_state == "int8" else 1)

    def key(self) -> tuple[Any, ...]:
        """Return all options' values: a compiled step is for one such key."""
        return tuple(map(hashable, self.options().values()))

    def shown(self, *, changed: bool = False) -> str:
        """Return the options as text that is equal on all ranks; with ``changed`` only the stage and changed ones."""
        values = self.options()
        if changed:
            default = Config().options()
            values = {k: v for k, v in values.items() if k == "stage" or v != default[k]}
        return ", ".join(f"{k}={_shown(v)}" for k, v in values.items())


_UNTIL = "the old name goes in 0.3"
# Names of before 0.1.0, for two minor releases.
RENAMED = {
    "attention": "context_parallel_method",
    "batch_sbp": "input_sbp",
    "recompute": "activation_checkpointing",
    "sequence_parallel": "context_parallel",
    "zero_dim": "shard_dims",
}


# Parts of what is one option today.
_OFFLOADS = {
    "optimizer_offload": "optimizer",
    "parameter_offload": "parameters",
    "offload_activations": "activations",
}


def option_values(options: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return options that were given as keywords, by name; former names are translated with a warning.

    Args:
        options: the keywords.
        config: the options that are not given.

    Raises:
        ConfigError: there is no such option; names the closest one.
    """
    values: dict[str, Any] = {}
    # The mode decides with a stage, wherever that is given, and a part of offload adds to it.
    for name, value in sorted(options.items(), key=lambda item: item[0] == "mode" or item[0] in _OFFLOADS):
        if name not in OPTIONS and name in _FORMER:
            warn_user(f"the option {name!r} is {_FORMER[name]} now; {_UNTIL}")
        values |= _today(name, value, config, values)
    return values


def _today(name: Any, value: Any, config: Config, given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return what an option sets today; ``given`` are options that are set with it."""
    if name == "mode":
        return options_of_mode(value, given.get("stage", config.zero.stage or DEFAULT_STAGE))
    if name in _OFFLOADS:
        return {"offload": replace(given.get("offload", config.memory.offload), **{_OFFLOADS[name]: value})}
    new = RENAMED.get(name, name)
    if new not in OPTIONS:
        raise ConfigError(_unknown(name))
    return {new: value}


def place(name: str) -> str:
    """Return where an option is: ``config.zero.stage``."""
    return ".".join(filter(None, ("config", _GROUP_OF[name], name)))


def _unknown(name: Any) -> str:
    if name in OPTIONS:
        return f"there is no option {name!r} here: it is {place(name)}"
    hint = did_you_mean(str(name), OPTIONS, most=1)
    return f"there is no option {name!r:.60}{hint}\nOptions: {', '.join(OPTIONS)}."


def _shown(value: Any) -> str:
    if isinstance(value, DeviceMesh):
        return str(value.mesh.tolist())
    return str(getattr(value, "__qualname__", type(value)) if callable(value) else value)


# The groups of options, the options by name, and the group of each; none for those of Config itself.
_GROUPS = {
    "zero": ZeroOptions,
    "mesh": MeshOptions,
    "precision": PrecisionOptions,
    "memory": MemoryOptions,
    "checks": CheckOptions,
}
_PLACED = [(group, each) for group, options in {**_GROUPS, "": Config}.items() for each in declared(options)]
OPTIONS = {each.name: each for _, each in _PLACED}
_GROUP_OF = {each.name: group for group, each in _PLACED}
# Attributes of Config before options were in groups, and keywords of former names, with what they are today.
_FORMER = {
    **{name: place(name) for name, group in _GROUP_OF.items() if group},
    **{name: place(new) for name, new in RENAMED.items()},
    **{name: f"config.memory.offload = zg.Offload({part}=...)" for name, part in _OFFLOADS.items()},
    "mode": "config.zero.stage, 0 for 'off', and config.zero.shard_by",
}
for _options in (*_GROUPS.values(), Config):
    document(_options)
