"""``zg.plan``, the function for users."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zerograph._torch import pytree
from zerograph.base.progress import tell
from zerograph.base.sizes import in_bytes, show_bytes
from zerograph.compiler.input_layout import is_sequence, length_of, ranks_of_row, with_rows
from zerograph.config import option_values
from zerograph.errors import ConfigError, ZeroGraphError
from zerograph.graph import ZeroGraph
from zerograph.ir.zero import DEFAULT_STAGE
from zerograph.planner.machine import Machine, default_headroom, machine
from zerograph.planner.plan import grid_of, planned, tensors
from zerograph.planner.plan_data import Candidate, Plan
from zerograph.planner.preparable import configured
from zerograph.planner.search import STAGES, search

Optimizer = Callable[[Any], torch.optim.Optimizer]
Loss = Callable[..., Tensor]


class Training(ZeroGraph):
    """The training step of a model that returns its loss, or whose output ``loss`` turns into one."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, loss: Loss | None) -> None:
        super().__init__()
        self.config.zero.stage = DEFAULT_STAGE
        self.model = model
        self._loss = loss
        if optimizer is not None:
            self.add_optimizer(optimizer([parameter for parameter in model.parameters() if parameter.requires_grad]))

    def build(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss, and its gradients if there is an optimizer."""
        output = self.model(*args, **kwargs)
        loss = loss_of(output) if self._loss is None else self._loss(output)
        if self._optimizers:
            loss.backward()
        return loss


def loss_of(output: Any) -> Tensor:
    """Return the loss in a model's output: the output itself, its ``loss``, or the first of several.

    Raises:
        ConfigError: there is no loss.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    loss = loss[0] if isinstance(loss, (tuple, list)) and loss else loss
    if not isinstance(loss, Tensor) or loss.dim():
        raise ConfigError(
            f"the model returns {type(output).__name__} without a loss: a 0-d tensor, or one as its `loss`\n"
            "Give plan(loss=...), a function of the model's output, or a ZeroGraph with the whole step."
        )
    return loss


def graph_of(subject: Any, optimizer: Optimizer | None, loss: Loss | None) -> ZeroGraph:
    """Return the graph to plan: a graph, the result of a function without arguments, or a graph around a model.

    A function is called with the meta device as default, so that its tensors take no memory.

    Raises:
        ConfigError: the subject is none of these, or an optimizer or loss is passed for a graph that has its own.
    """
    if not isinstance(subject, (nn.Module, ZeroGraph)):
        if not callable(subject):
            raise ConfigError(
                f"plan({type(subject).__name__}): give a module, a ZeroGraph, or a function that returns one"
            )
        with torch.device("meta"):
            subject = subject()
    if isinstance(subject, ZeroGraph):
        if optimizer is not None or loss is not None:
            raise ConfigError("a ZeroGraph has its optimizer and its loss: leave out plan(optimizer=, loss=)")
        return subject
    if isinstance(subject, nn.Module):
        return Training(subject, optimizer, loss)
    raise ConfigError(f"the function returned {type(subject).__name__}: it must return a module or a ZeroGraph")


def plan(
    model: Any,
    batch: Any,
    optimizer: Optimizer | None = None,
    *,
    world_size: int | None = None,
    mesh: Sequence[Any] | None = None,
    stage: int | str | None = None,
    device: str | os.PathLike[str] | Machine = "h100",
    loss: Loss | None = None,
    fit: int | str | None = None,
    headroom: int | str | None = None,
    nvme_path: str | os.PathLike[str] | None = None,
    length: int | Literal["longest"] | None = None,
    **options: Any,
) -> Plan:
    """Predict memory, traffic and time of a training step on any number of ranks, without running it.

    The step is compiled as it would be on that machine: the same passes, the same emitted graph. It needs no
    accelerator, no process group, and no memory for weights on the meta device.

    Args:
        model: a module, a ``ZeroGraph``, or a function without arguments that returns one; it is called with the meta
            device as default.
        batch: one rank's part of the batch: a tensor, a tuple of arguments, or a dict of them; may be on the meta
            device.
        optimizer: for a module: a function of its parameters, ``functools.partial(torch.optim.AdamW, lr=1e-4)``; None
            for a forward pass.
        world_size: number of ranks, in a line.
        mesh: shape of a grid of ranks instead, ``(2, 4)``: each row has ranks that follow each other, which are close
            in the network; or the grid itself as :func:`zerograph.placement` takes it, ``[[0, 2], [1, 3]]``.
        stage: 1, 2 or 3; 0 or ``"off"`` for data parallel; ``"auto"`` for the fastest that fits, with the trade-offs
            that it needs (see :mod:`zerograph.planner.search`); None for the graph's configuration, ``"auto"``
            there included, and stage 2 for a module.
        device: a built-in machine, a YAML file, or a :class:`Machine`.
        loss: function from the module's output to the loss; None if the output is the loss, or has it as ``loss``.
        fit: the size of a rank's device, in bytes or as ``"80GB"``, instead of the memory of ``device``. With
            ``stage="auto"`` a smaller ``memory_budget`` counts.
        headroom: part of it that stays free for the device's context, NCCL's buffers and fragmentation, in bytes or
            as ``"4GiB"``; None for 8 %, and at least 2 GiB, of an accelerator, and 0 for a CPU.
        nvme_path: with ``stage="auto"``, a directory to which optimizer state and parameters may be offloaded, as by
            ``config.memory.offload``. It need not exist.
        length: number of positions of the batch's sequences, instead of its own; ``"longest"`` for the longest ones
            that fit, to 1/64 of their length.
        options: further options of :class:`zerograph.config.Config`. With ``context_parallel`` a line of ranks becomes
            rows of so many, and the batch is that of a row; with ``expert_parallel`` it becomes rows too.

    Returns:
        The plan. With ``stage="auto"``, the plan of the fastest candidate that fits, or else of the one with the lowest
        peak; its ``alternatives`` are all candidates.

    Raises:
        ConfigError: an argument has another type or value, or an option does not exist.
        ZeroGraphError: as compiling the step does.
    """
    if "machine" in options:
        raise ConfigError("plan(machine=): the machine is device=")
    if stage is not None and "mode" in options:
        raise ConfigError(f"plan(stage={stage!r}, mode=): give one of them")
    described = machine(device)
    memory = described.device.memory if fit is None else _size("fit", fit)
    free = default_headroom(memory, accelerator=described.device.accelerator)
    if headroom is not None:
        free = 0 if headroom in (0, "0") else _size("headroom", headroom)
    described = replace(described, device=replace(described.device, memory=memory, headroom=free))
    graph = graph_of(model, optimizer, loss)
    options = option_values(options, graph.config)
    # Before a search, whose candidates report what they cannot be compiled with.
    asked = copy.copy(graph.config)
    asked.set(**options)
    size, order = _shape(world_size, mesh)
    described, grid = replace(described, order=order), grid_of(size)
    with configured(graph, **{key: value for key, value in options.items() if key in _OF_ROWS}) as config:
        ranks, is_free, shape = config.mesh.context_parallel, ranks_of_row(config) == 1, with_rows(grid, config).shape
        if order is not None and len(shape) != len(size):
            raise ConfigError(f"plan(mesh={mesh!r}) and rows of {ranks_of_row(config)} ranks: give a grid of such rows")
    if (options.get("stage", graph.config.zero.stage) if stage is None else stage) == "auto":
        folder = None if nvme_path is None else os.fspath(nvme_path)
        budget = asked.memory_bytes
        if budget is not None and budget < described.device.usable:
            described = replace(described, device=replace(described.device, memory=budget, headroom=0))
        free = mesh is None and is_free

        def plan_of(batch: Any) -> Plan:
            return _fastest(graph, batch, shape, described, free, {**options, "nvme_path": folder})

        return _with_length(plan_of, batch, length, ranks)
    if nvme_path is not None:
        raise ConfigError("plan(nvme_path=) is for stage='auto': else give offload=")
    chosen = {} if stage is None else STAGES.get({"0": "off"}.get(str(stage), str(stage)))
    if chosen is None:
        raise ConfigError(f"stage = {stage!r}: choose 1, 2 or 3, 0 for data parallel, or 'auto'")
    configuration = {**options, **chosen}
    return _with_length(lambda batch: planned(graph, batch, shape, described, **configuration), batch, length, ranks)


def _with_length(plan_of: Callable[[Any], Plan], batch: Any, length: int | str | None, ranks: int) -> Plan:
    """Plan the batch with sequences of the length that is asked for; ``ranks`` of them split each sequence."""
    if length is None:
        return plan_of(batch)
    if length == "longest":
        return longest(lambda size: plan_of(with_length(batch, size)), own_length(batch), ranks)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ConfigError(f"plan(length={length!r}): give a number of positions, 1 or more, or 'longest'")
    return plan_of(with_length(batch, length))


# The options by which a line of ranks becomes rows.
_OF_ROWS = ("context_parallel", "expert_parallel")


def _fastest(
    graph: Any, batch: Any, shape: Sequence[int], described: Machine, free: bool, options: dict[str, Any]
) -> Plan:
    """Search the fastest plan.

    Args:
        free: a line of ranks may become a grid of the machine's nodes.
    """
    meshes = [tuple(shape)]
    inner = described.links[0].ranks
    if free and inner is not None and inner < shape[0] and shape[0] % inner == 0:
        meshes.append((shape[0] // inner, inner))
    result = search(graph, batch, meshes, described, **options)
    compiled = (candidate for candidate in result.candidates if candidate.plan is not None)
    best = result.best or min(compiled, key=_peak, default=None)
    if best is None or best.plan is None:
        # Reasons of the compiler first.
        reasons = "; ".join(sorted({one.verdict for one in result.candidates}))
        raise ConfigError(f"no stage of this step can be compiled: {reasons}")
    return replace(best.plan, alternatives=result.candidates)


def _size(name: str, value: int | str) -> int:
    size = in_bytes(value)
    if size is None:
        raise ConfigError(f"plan({name}={value!r}): give bytes, more than 0, or a size like '80GB' or '40GiB'")
    return size


def _peak(candidate: Candidate) -> int:
    assert candidate.plan is not None
    return candidate.plan.memory.peak


def _shape(world_size: int | None, mesh: Sequence[Any] | None) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the shape of the grid of ranks, and its ranks in row-major order if they were given."""
    if (world_size is None) == (mesh is None):
        raise ConfigError("give world_size=, the number of ranks, or mesh=, the shape of their grid")
    if mesh is not None and any(isinstance(row, Sequence) and not isinstance(row, str) for row in mesh):
        return _order(mesh)
    shape = (world_size,) if mesh is None else tuple(mesh)
    if not shape or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in shape):
        raise ConfigError(f"world_size={world_size!r}, mesh={mesh!r}: numbers of ranks are whole numbers from 1 up")
    return shape, None


def _order(mesh: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    try:
        grid = torch.tensor(mesh, dtype=torch.int64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        grid = None
    if grid is None or grid.flatten().sort().values.tolist() != list(range(grid.numel())):
        raise ConfigError(
            f"plan(mesh={mesh!r}): a grid of ranks has rows of equal length, and each rank from 0 up once"
        )
    return tuple(grid.shape), tuple(grid.flatten().tolist())


# Lengths that are tried are multiples of this, as kernels prefer, unless the batch is shorter.
_UNIT = 128
# The longest sequences are found to this part of their length.
_PRECISION = 64


def own_length(batch: Any) -> int:
    """Return the number of positions of a batch's sequences.

    Raises:
        ConfigError: no input is a sequence.
    """
    length = length_of(("", tensor) for tensor in tensors(batch))[1]
    if not length:
        raise ConfigError(
            "plan(length=): no input is a sequence: tokens [batch, length], or [batch, length, channels]\n"
            "Leave length out, or pass such an input."
        )
    return length


def with_length(batch: Any, length: int) -> Any:
    """Return the batch with sequences of another length: inputs that have its positions in dimension 1 become empty.

    Raises:
        ConfigError: no input is a sequence.
    """
    before = own_length(batch)

    def resized(x: Tensor) -> Tensor:
        return x.new_empty((x.shape[0], length, *x.shape[2:])) if is_sequence(x, before) else x

    return pytree.tree_map_only(Tensor, resized, batch)


def longest(plan_at: Callable[[int], Plan], begin: int, ranks: int) -> Plan:
    """Return the plan of the longest sequences that fit; of the shortest that were tried if none do.

    Args:
        plan_at: plans sequences of a length.
        begin: the length that is tried first.
        ranks: number of ranks that split each sequence, which must divide the length.

    Raises:
        ZeroGraphError: as ``plan_at`` for the first length.
    """
    unit = math.lcm(ranks, _UNIT) if begin >= _UNIT else ranks
    length = max(begin // unit, 1) * unit
    tried = {length: plan_at(length)}
    reasons: dict[int, str] = {}
    while (length := _next(tried, reasons, unit)) > 0:
        tell("lengths", len(tried) + len(reasons), len(tried) + len(reasons) + 1, f"{length:,} positions")
        try:
            tried[length] = plan_at(length)
        except ZeroGraphError as error:
            reasons[length] = str(error).splitlines()[0]
    fitting = [length for length, plan in tried.items() if plan.fits]
    if not fitting:
        return tried[min(tried)]
    plan, above = tried[max(fitting)], _too_long(tried, reasons, max(fitting))
    reason = reasons.get(above) or f"they need {show_bytes(tried[above].memory.peak)}"
    return replace(plan, longer=f"{above:,} do not fit: {reason}")


def _too_long(tried: dict[int, Plan], reasons: dict[int, str], fits: int) -> int:
    """Return the shortest length after ``fits`` that does not fit or cannot be compiled; 0 without one."""
    return min((length for length in (*tried, *reasons) if length > fits), default=0)


def _next(tried: dict[int, Plan], reasons: dict[int, str], unit: int) -> int:
    """Return the length to try next; 0 if the longest one is found.

    Peaks are near a line in the length, so every other guess is where that line meets the usable memory.
    """
    fits = max((length for length, plan in tried.items() if plan.fits), default=0)
    above = _too_long(tried, reasons, fits)
    if above and above - fits <= max(unit, fits // _PRECISION // unit * unit):
        return 0
    known = sorted(tried)
    at = max(0, min(known.index(fits) if fits else 0, len(known) - 2))
    guess = 2 * fits
    if above and (len(tried) + len(reasons)) % 2:
        guess = (fits + above) // 2
    elif len(known) > 1:
        low, high = known[at], known[at + 1]
        slope = (tried[high].memory.peak - tried[low].memory.peak) / (high - low)
        if slope > 0:
            guess = low + int((tried[low].usable - tried[low].memory.peak) / slope)
    most = above - unit if above else max(2 * fits, 64 * unit, 8 * fits)
    return max(fits + unit, min(guess // unit * unit, most))
