"""Search the fastest configuration that fits: stages, meshes, offloading, and options that trade time for memory.

A *family* is a stage on a mesh with an offloading choice. Cheap checks come first: a lower bound of each family's
memory from its layout, then every family without trade-offs, then the families that did not fit with trade-offs. A
family that cannot fit, or cannot be faster than the best so far, is not compiled.

For ``config.zero.stage = "auto"`` every rank searches by itself at the first call, with a prediction that depends on
shapes and the configuration alone; a difference between ranks is an error on all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from zerograph._torch import pytree
from zerograph.base.progress import tell
from zerograph.base.sizes import show_bytes, show_seconds
from zerograph.compiler.batch import is_part
from zerograph.compiler.members import Members
from zerograph.compiler.virtual_ranks import slices_per_rank
from zerograph.errors import ConfigError, InputError, MemoryBudgetError, ZeroGraphError
from zerograph.ir.marks import copy_marks, mark_dynamic
from zerograph.ir.offload import Offload, OffloadTo
from zerograph.ir.step_graph import nbytes
from zerograph.planner.machine import Machine, default_headroom, machine
from zerograph.planner.plan import Call, laid_out, planned, samples, tensors
from zerograph.planner.plan_data import Candidate, Plan
from zerograph.planner.preparable import Preparable
from zerograph.planner.stored import StoredBytes
from zerograph.planner.timeline import Timeline
from zerograph.runtime.job.process_group import Job, agree, agreeing, digest
from zerograph.runtime.wire.selection import Transport, transport_of

STAGES: dict[str, dict[str, Any]] = {"off": {"stage": 0}, **{str(stage): {"stage": stage} for stage in (1, 2, 3)}}


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
        best: the fastest candidate that fits; None if none does.
        candidates: all candidates, in the order of their trial.
    """

    best: Candidate | None
    candidates: Sequence[Candidate]


def search(
    graph: Preparable,
    batch: Any,
    meshes: Sequence[Sequence[int]],
    machine: Machine,
    stages: Sequence[str] = tuple(STAGES),
    nvme_path: str | None = None,
    transport: str | Transport = "torch",
    **options: Any,
) -> Search:
    """Try every stage on every mesh: without offloading, with the optimizer on the CPU, and with state in files.

    A family that does not fit is tried with recomputation (``activation_checkpointing="auto"`` within the usable
    memory), then with micro-batches too, twice as many each time. The search leaves a family at its first candidate
    that fits.

    Args:
        batch: one rank's part of the batch.
        machine: limits a rank to the memory of its device without headroom.
        nvme_path: directory for files; None for the directory in the configuration. Without either, no files are used.
        transport: how ranks exchange tensors; see :meth:`zerograph.ZeroGraph.prepare`.
    """
    offload: Offload = options.get("offload", graph.config.memory.offload)
    files = _files(offload, nvme_path)
    families = [
        _Family(tuple(mesh), stage, offloading, {**STAGES[stage], "offload": replace(offload, **to)})
        for offloading, supported, to in _offloads(files, accelerator=machine.device.accelerator)
        for mesh in meshes
        for stage in supported
        if stage in stages
    ]
    trials = _Trials(graph, batch, machine, len(families), options, transport)
    trials.settle(families, trials.may_fit, trials.without_trade_offs, trials.with_trade_offs)
    if all(candidate.plan is None for candidate in trials.candidates):
        trials.compile_smallest()
    tell("candidates", len(families), len(families))
    fitting = [candidate for candidate in trials.candidates if candidate.plan is not None and candidate.plan.fits]
    best = min(fitting, key=_seconds, default=None)
    judged = [replace(candidate, verdict=_verdict(candidate, best)) for candidate in trials.candidates]
    return Search(None if best is None else judged[trials.candidates.index(best)], judged)


def _offloads(files: OffloadTo | None, *, accelerator: bool) -> Iterator[tuple[str, Sequence[str], dict[str, Any]]]:
    """Yield choices of what to offload, with the stages that support them, from the fastest memory to the slowest."""
    every, split = tuple(STAGES), ("1", "2", "3")
    nothing = {"optimizer": None, "parameters": None}
    yield "", every, nothing
    if accelerator:
        yield "optimizer on the CPU", split, {**nothing, "optimizer": "cpu"}
    if files is not None:
        yield "optimizer in files", split if accelerator else every, {**nothing, "optimizer": files}
        yield "optimizer and parameters in files", ("3",), {"optimizer": files, "parameters": files}


def _files(offload: Offload, nvme_path: str | None) -> OffloadTo | None:
    if nvme_path is not None:
        return OffloadTo("nvme", nvme_path)
    return next((to for to in (offload.optimizer, offload.parameters) if to is not None and to.device == "nvme"), None)


@dataclass(frozen=True, eq=False)
class _Family:
    """A stage on a mesh with a choice of what to offload, which is empty for nothing; ``options`` configure all."""

    mesh: tuple[int, ...]
    stage: str
    offloading: str
    options: Mapping[str, Any]

    @property
    def key(self) -> tuple[tuple[int, ...], str, str]:
        return self.mesh, self.stage, self.offloading


@dataclass(eq=False)
class _Trials:
    """The state of a search.

    Attributes:
        total: number of families.
        stored: bytes that each family stores, from its layout.
        plain: plan of each family without trade-offs.
        fastest: seconds of the fastest candidate that fits.
        settled: number of families that are done.
    """

    graph: Preparable
    batch: Any
    machine: Machine
    total: int
    options: Mapping[str, Any]
    transport: str | Transport
    candidates: list[Candidate] = field(default_factory=list)
    stored: dict[_Family, StoredBytes] = field(default_factory=dict)
    plain: dict[_Family, Plan] = field(default_factory=dict)
    fastest: float = float("inf")
    settled: int = 0

    def settle(self, families: Sequence[_Family], *rounds: Callable[[_Family], bool]) -> None:
        """Run the rounds, cheapest first, over all families; a round returns False if it settles the family."""
        for round_ in rounds:
            open_families = []
            for family in families:
                if round_(family):
                    open_families.append(family)
                else:
                    self.settled += 1
            families = open_families

    def may_fit(self, family: _Family) -> bool:
        """Return True if the family's layout alone fits."""
        device = self.machine.device
        try:
            stored = laid_out(self.graph, self.batch, family.mesh, self.machine, **{**self.options, **family.options})
        except InputError:
            raise
        except ZeroGraphError as error:
            self._note(family, f"cannot be compiled: {str(error).splitlines()[0]}")
            return False
        if family.offloading and not stored.trains:
            return False
        self.stored[family] = stored
        if stored.device > device.usable:
            self._note(family, f"does not fit: {show_bytes(stored.device)} stored")
        elif stored.lower_bound > device.usable:
            more = "the largest parameter"
            if stored.gradients >= stored.largest:
                more = f"{show_bytes(stored.gradients)} of gradients"
            self._note(family, f"does not fit: {show_bytes(stored.device)} stored, and {more}")
        elif device.cpu_memory is not None and stored.host > device.cpu_memory:
            self._note(family, f"does not fit: {show_bytes(stored.host)} stored in the CPU's memory")
        else:
            return True
        return False

    def without_trade_offs(self, family: _Family) -> bool:
        """Compile the family without trade-offs; return True if it does not fit, but may fit with them."""
        if family.offloading and (less := self._fits_with_less_offloading(family)) is not None:
            self._note(family, f"not needed: fits {less}")
            return False
        bound, reason = self._seconds_bound(family)
        if bound >= self.fastest:
            self._note(family, f"slower: {reason}")
            return False
        # A budget in the configuration holds for the step that runs: it has other buffers than one without.
        plan, hopeless = self._try(family, "", {})
        if plan is None:
            return not hopeless
        self.plain[family] = plan
        return not plan.fits and plan.memory.at_rest <= plan.usable and plan.host_fits

    def with_trade_offs(self, family: _Family) -> bool:
        """Try the family with trade-offs until one fits or none can; return False, for it is settled."""
        time = self.plain[family].time if family in self.plain else None
        begin = int(self.options.get("gradient_accumulation_steps", self.graph.config.gradient_accumulation_steps))
        ways = list(_trade_offs(samples(self.batch), self.machine.device.usable, begin))
        if self._loses(family, time, ways[0][0]) or self._settles(family, *ways.pop(0)):
            return False
        if len(ways) >= _MANY and self._settles(family, *ways.pop(), last=True):
            return False
        for trade_offs, more in ways:
            if self._loses(family, time, trade_offs) or self._settles(family, trade_offs, more):
                break
        return False

    def _loses(self, family: _Family, time: Timeline | None, trade_offs: str) -> bool:
        """Return True if the family cannot beat the fastest candidate: trade-offs do not reduce computing."""
        bound = 0.0 if time is None else time.compute + time.updating
        if bound >= self.fastest:
            self._note(family, f"slower: computes for {show_seconds(bound)} without further trade-offs", trade_offs)
        return bound >= self.fastest

    def _settles(self, family: _Family, trade_offs: str, more: Mapping[str, Any], *, last: bool = False) -> bool:
        """Try trade-offs; return True if they settle the family.

        They do if they fit, since later ones are slower. The ``last`` ones, which need the least memory, settle it if
        they do not fit.
        """
        plan, hopeless = self._try(family, trade_offs, more)
        fits = plan is not None and plan.fits
        return hopeless or fits != last

    def compile_smallest(self) -> None:
        """Compile the family with the lowest memory bound, so that there is a plan although nothing fits."""
        if self.stored:
            family = min(self.stored, key=lambda each: self.stored[each].lower_bound)
            self.candidates = [
                each for each in self.candidates if (each.mesh, each.stage, each.trade_offs) != family.key
            ]
            self._try(family, "", _NO_BUDGET)

    def _fits_with_less_offloading(self, family: _Family) -> str | None:
        """Name the offloading with which the same stage fits on the same mesh, or return None."""
        for other, plan in self.plain.items():
            if (other.mesh, other.stage) == (family.mesh, family.stage) and plan.fits:
                return f"with {other.offloading}" if other.offloading else "without"
        return None

    def _seconds_bound(self, family: _Family) -> tuple[float, str]:
        """Return a lower bound of the family's step time, from terms that do not depend on offloading."""
        device, stored = self.machine.device, self.stored[family]
        computes = [plan.time.compute - plan.time.phases.get("update", 0.0) for plan in self.plain.values()]
        computing, updating = max(0.0, min(computes, default=0.0)), stored.updated / device.cpu
        # Files are read and written.
        files = 2 * stored.files / device.file
        if files > computing + updating:
            return files, f"its files alone take {show_seconds(files)}"
        return (
            computing + updating,
            f"the CPU's update takes {show_seconds(updating)} beside {show_seconds(computing)} of computing",
        )

    def _note(self, family: _Family, verdict: str, trade_offs: str = "") -> None:
        mesh, stage, offloading = family.key
        self.candidates.append(Candidate(stage, mesh, ", ".join(filter(None, (offloading, trade_offs))), None, verdict))

    def _try(self, family: _Family, trade_offs: str, more: Mapping[str, Any]) -> tuple[Plan | None, bool]:
        """Return the plan with trade-offs, and True if no recomputation can make it fit."""
        chosen = {**family.options, **more}
        trade_offs = ", ".join(filter(None, (family.offloading, trade_offs)))
        ranks = "x".join(map(str, family.mesh))
        doing = ", ".join(filter(None, (f"stage {family.stage} on {ranks} ranks", trade_offs)))
        tell("candidates", self.settled, self.total, doing)
        plan: Plan | None = None
        verdict, hopeless = "", False
        try:
            plan = planned(
                self.graph, self.batch, family.mesh, self.machine, self.transport, **{**self.options, **chosen}
            )
        except MemoryBudgetError as error:
            verdict = f"does not fit: {show_bytes(error.missing)} too much"
            hopeless = error.missing > error.activations + error.in_buckets + sum(map(nbytes, tensors(self.batch)))
        except InputError:
            raise
        except ZeroGraphError as error:
            verdict, hopeless = f"cannot be compiled: {str(error).splitlines()[0]}", True
        if plan is not None and plan.fits:
            self.fastest = min(self.fastest, plan.time.seconds)
        self.candidates.append(Candidate(family.stage, family.mesh, trade_offs, plan, verdict, chosen))
        return plan, hopeless


# With a budget, a step that exceeds it is an error; here the excess is reported.
_NO_BUDGET: Mapping[str, Any] = {"memory_budget": None}

# From this number of choices on, the most micro-batches are tried first: if they do not fit, nothing does.
_MANY = 3


def _trade_offs(count: int, limit: int, steps: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield trade-offs and their options, cheapest first, for so many samples in ``steps`` micro-batches."""
    saving = {"activation_checkpointing": "auto", "memory_budget": limit}
    yield "recompute", saving
    steps *= 2
    while count % steps == 0:
        yield f"recompute, {steps} micro-batches", {**saving, "gradient_accumulation_steps": steps}
        steps *= 2


def _verdict(candidate: Candidate, best: Candidate | None) -> str:
    plan = candidate.plan
    if plan is None:
        return candidate.verdict
    if plan.memory.peak > plan.usable:
        return f"does not fit: {show_bytes(plan.memory.peak - plan.usable)} too much"
    if not plan.fits:
        assert plan.host is not None
        assert plan.cpu_capacity is not None
        return f"does not fit: {show_bytes(plan.host.peak - plan.cpu_capacity)} too much in the CPU's memory"
    assert best is not None
    if plan is best.plan:
        return "the fastest that fits"
    return f"fits, {_seconds(candidate) / _seconds(best) - 1:.1%} slower"


def _seconds(candidate: Candidate) -> float:
    assert candidate.plan is not None
    return candidate.plan.time.seconds


_log = logging.getLogger("zerograph")


def choose(
    graph: Preparable,
    job: Job,
    members: Callable[[], Members],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    doing: str,
) -> None:
    """Set the graph's options to the fastest way to train that fits the memory budget, on the job's own mesh.

    Args:
        members: returns the members of the graph.
        args, kwargs: this rank's part of the batch.
        doing: name of the step in messages.

    Raises:
        MemoryBudgetError: nothing fits; the message lists what was tried.
        ConfigError: no machine describes the device, or the graph is on the CPU without a budget.
    """
    # Collectives and the job's own exchanges differ in the memory that they take.
    transport = transport_of(job)
    call = _largest(job, Call(tuple(args), dict(kwargs)), f"choosing a stage for {doing}")
    with agreeing(job, f"running {doing}") as shown:
        with job.liveness.busy(f"choosing a stage for {doing}"):
            result = _search(graph, job, members(), call, transport)
        assert result.best is not None
        chosen = _chosen(result.best)
        shown |= {name: str(value) for name, value in chosen.items()}
    graph.config.set(**chosen)
    _log.info("stage 'auto' chose %s", ", ".join(f"{name}={value}" for name, value in shown.items()))


def _largest(job: Job, call: Call, doing: str) -> Call:
    """Return the batch with parts as large as the largest of any rank, for which all ranks search alike."""
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    parts = {place: leaf for place, leaf in enumerate(leaves) if is_part(leaf)}
    facts = {f"number of dimensions of tensor {place}": str(part.dim()) for place, part in parts.items()}
    sizes = [size for part in parts.values() for size in part.shape]
    everybody = zip(*agree(job, doing, digest(facts), lambda: facts, sizes=sizes), strict=True)
    for place, part in parts.items():
        of_ranks = [next(everybody) for _ in part.shape]
        if any(min(dim) < max(dim) for dim in of_ranks):
            leaves[place] = larger = part.new_zeros([max(dim) for dim in of_ranks])
            mark_dynamic(larger, 0)
            copy_marks(part, larger)
    return Call(*pytree.tree_unflatten(leaves, structure))


def _search(graph: Preparable, job: Job, members: Members, call: Call, transport: Transport) -> Search:
    if graph.config.virtual_ranks is not None:
        slices_per_rank(graph.config, job.mesh)
    device = next((parameter.device for parameter in members.parameters.values()), torch.device("cpu"))
    described, limit = _machine(device), graph.config.memory_bytes
    if limit is None and device.type == "cpu":
        raise ConfigError(
            "config.zero.stage = 'auto' on the CPU needs config.memory.memory_budget: the memory of this rank, such as "
            "'4GiB'"
        )
    if limit is None:
        limit = int(torch.cuda.get_device_properties(device).total_memory)
        limit -= default_headroom(limit, accelerator=True)
    order = tuple(torch.tensor(job.grid, device="cpu").flatten().tolist())
    in_order = order == tuple(range(len(order)))
    device_of_rank = replace(described.device, memory=limit, headroom=0)
    described = replace(described, device=device_of_rank, order=None if in_order else order)
    result = search(graph, call, [job.mesh.shape], described, transport=transport)
    if result.best is None:
        raise MemoryBudgetError(
            f"nothing that config.zero.stage = 'auto' tried fits into {show_bytes(limit)} on this rank:\n"
            + "\n".join(_line(candidate) for candidate in result.candidates)
        )
    return result


def _machine(device: torch.device) -> Machine:
    if device.type == "cpu":
        return machine("cpu")
    name = torch.cuda.get_device_name(device)
    builtin = next((key for key in ("h200", "h100", "a100") if key.upper() in name.upper()), None)
    if builtin is None:
        raise ConfigError(
            f"config.zero.stage = 'auto' has no machine for {name!r}\n"
            "Measure one with `zerograph calibrate mine.yaml`, and set the options that zg.plan(..., stage='auto', "
            "device='mine.yaml') chooses."
        )
    return machine(builtin)


def _chosen(best: Candidate) -> dict[str, Any]:
    """Return the options to set. The user's budget stays unless the search set one: it holds for later batches too."""
    return {name: value for name, value in best.options.items() if name != "memory_budget" or value is not None}


def _line(candidate: Candidate) -> str:
    stage = "off" if candidate.stage == "off" else f"stage {candidate.stage}"
    return f"  {', '.join(filter(None, (stage, candidate.trade_offs)))}: {candidate.verdict}"
