"""The fastest way to train that fits: stages, meshes and places of rest, each with as few trade-offs as it needs.

A *family* is a stage on a mesh with what rests elsewhere. What is cheap to know comes first: from the layout what each
family holds whatever it does, then all of them as they are, then those that did not fit with less memory for more time.
What cannot fit, or cannot be faster than what was found, is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zerograph.base.progress import tell
from zerograph.base.sizes import show_bytes, show_seconds
from zerograph.errors import InputError, MemoryBudgetError, ZeroGraphError
from zerograph.ir.offload import Offload
from zerograph.planner.machine import Machine
from zerograph.planner.plan import Plan, laid_out, planned, samples, tensors
from zerograph.planner.plan_data import Candidate
from zerograph.planner.preparable import Preparable
from zerograph.planner.resting import Resting
from zerograph.planner.timeline import Timeline

STAGES: dict[str, dict[str, Any]] = {
    "off": {"mode": "off"},
    **{str(stage): {"mode": "distributed_split", "stage": stage} for stage in (1, 2, 3)},
}


@dataclass(frozen=True)
class Search:
    """All ways that were tried.

    Attributes:
        best: the fastest that fits; None if none does.
        candidates: in the order in which they were tried.
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
    **options: Any,
) -> Search:
    """Try every stage on every mesh, as it is, with its optimizer on the CPU of an accelerator, and in files.

    Where that does not fit backward recomputes what it must (``recompute="auto"`` within the usable memory), and then
    the batch is cut into micro-batches as well, twice as many each time. A family is left at the first that fits.

    Args:
        batch: one rank's part.
        machine: the memory of its device without headroom is the most that a rank may hold.
        nvme_path: a directory for files. None: that of the configuration; if it has none, nothing rests in files.
    """
    places = _places(graph, machine, nvme_path, options)
    families = [_Family(tuple(mesh), stage, place) for place in places for mesh in meshes for stage in place.stages]
    families = [one for one in families if one.stage in stages]
    trying = _Trying(graph, batch, machine, len(families), options)
    trying.settle(families, trying.may_fit, trying.as_it_is, trying.with_less)
    if all(one.plan is None for one in trying.tried):
        trying.show_the_least()
    tell("candidates", len(families), len(families))
    fitting = [one for one in trying.tried if one.plan is not None and one.plan.fits]
    best = min(fitting, key=_seconds, default=None)
    judged = [replace(one, verdict=_verdict(one, best)) for one in trying.tried]
    return Search(None if best is None else judged[trying.tried.index(best)], judged)


@dataclass(frozen=True, eq=False)
class _Place:
    """What rests where.

    Attributes:
        name: the trade-off, for messages.
        stages: at which it can.
    """

    name: str
    stages: tuple[str, ...]
    options: Mapping[str, Any]


def _places(graph: Preparable, machine: Machine, nvme_path: str | None, options: Mapping[str, Any]) -> list[_Place]:
    """From the nearest out."""
    nowhere = {"optimizer_offload": None, "parameter_offload": None}
    found = [_Place("", tuple(STAGES), nowhere)]
    split = ("1", "2", "3")
    if machine.device.accelerator:
        found.append(_Place("optimizer on the CPU", split, {**nowhere, "optimizer_offload": Offload("cpu")}))
    if (files := _files(graph, nvme_path, options)) is not None:
        state = {**nowhere, "optimizer_offload": files}
        found.append(_Place("optimizer in files", split if machine.device.accelerator else tuple(STAGES), state))
        found.append(_Place("optimizer and parameters in files", ("3",), {**state, "parameter_offload": files}))
    return found


def _files(graph: Preparable, nvme_path: str | None, options: Mapping[str, Any]) -> Offload | None:
    if nvme_path is not None:
        return Offload("nvme", nvme_path)
    set_ones = (options.get(name, getattr(graph.config, name)) for name in ("optimizer_offload", "parameter_offload"))
    return next((one for one in set_ones if one is not None and one.device == "nvme"), None)


@dataclass(frozen=True, eq=False)
class _Family:
    mesh: tuple[int, ...]
    stage: str
    place: _Place


@dataclass(eq=False)
class _Trying:
    """What has been tried, and what is known from it.

    Attributes:
        rests: what each family holds whatever it does.
        plain: the plan of each family as it is.
        fastest: seconds of the fastest that fits.
        settled: of how many of the ``total`` families all is known.
    """

    graph: Preparable
    batch: Any
    machine: Machine
    total: int
    options: Mapping[str, Any]
    tried: list[Candidate] = field(default_factory=list)
    rests: dict[_Family, Resting] = field(default_factory=dict)
    plain: dict[_Family, Plan] = field(default_factory=dict)
    fastest: float = float("inf")
    settled: int = 0

    def settle(self, families: Sequence[_Family], *rounds: Callable[[_Family], bool]) -> None:
        """Each family in each round, as long as a round leaves it open: what is cheap to know of all comes first."""
        for round_ in rounds:
            still = []
            for family in families:
                if round_(family):
                    still.append(family)
                else:
                    self.settled += 1
            families = still

    def may_fit(self, family: _Family) -> bool:
        """Whether what its layout says leaves room."""
        device = self.machine.device
        try:
            rests = laid_out(self.graph, self.batch, family.mesh, self.machine, **self._options(family))
        except InputError:
            raise
        except ZeroGraphError as error:
            self._note(family, f"cannot be compiled: {str(error).splitlines()[0]}")
            return False
        if family.place.name and not rests.trains:
            return False
        self.rests[family] = rests
        if rests.device > device.usable:
            self._note(family, f"does not fit: {show_bytes(rests.device)} at rest")
        elif rests.least > device.usable:
            what = "gradients" if rests.gradients >= rests.largest else "the largest parameter"
            more = f"{show_bytes(rests.least - rests.device)} of {what}" if what == "gradients" else what
            self._note(family, f"does not fit: {show_bytes(rests.device)} at rest, and {more}")
        elif device.cpu_memory is not None and rests.host > device.cpu_memory:
            self._note(family, f"does not fit: {show_bytes(rests.host)} at rest in the CPU's memory")
        else:
            return True
        return False

    def as_it_is(self, family: _Family) -> bool:
        """Compile it without further trade-offs; whether that does not fit, but something else of it may."""
        if family.place.name and (nearer := self._fits_nearer(family)) is not None:
            self._note(family, f"not needed: fits {nearer}")
            return False
        least, why = self._least_seconds(family)
        if least >= self.fastest:
            self._note(family, f"slower: {why}")
            return False
        plan = self._try(family, "", _AS_IT_IS)[0]
        if plan is None:
            return False
        self.plain[family] = plan
        return not plan.fits and plan.memory.at_rest <= plan.usable and plan.host_fits

    def with_less(self, family: _Family) -> bool:
        """Try it with less memory for more time, until something fits or nothing can; False: all is known then."""
        time = self.plain[family].time
        ways = list(_ways(self.batch, self.machine.device.usable, self.options))
        if self._loses(family, time, ways[0][0]) or self._settles(family, *ways.pop(0)):
            return False
        if len(ways) >= _MANY and self._settles(family, *ways.pop(), last=True):
            return False
        for given_up, more in ways:
            if self._loses(family, time, given_up) or self._settles(family, given_up, more):
                break
        return False

    def _loses(self, family: _Family, time: Timeline, given_up: str) -> bool:
        """Whether it cannot be faster than what was found: less memory takes no less computing."""
        least = time.compute + time.updating
        if least >= self.fastest:
            self._note(family, f"slower: computes for {show_seconds(least)} without further trade-offs", given_up)
        return least >= self.fastest

    def _settles(self, family: _Family, given_up: str, more: Mapping[str, Any], *, last: bool = False) -> bool:
        """Whether this ends it: it fits, and what follows is slower; or, if it holds the least, it does not."""
        plan, hopeless = self._try(family, given_up, more)
        fits = plan is not None and plan.fits
        return hopeless or fits != last

    def show_the_least(self) -> None:
        """Nothing can fit; what would take the least is compiled all the same, to be looked at."""
        if self.rests:
            family = min(self.rests, key=lambda one: self.rests[one].least)
            self.tried = [one for one in self.tried if (one.mesh, one.stage, one.given_up) != _about(family)]
            self._try(family, "", _AS_IT_IS)

    def _fits_nearer(self, family: _Family) -> str | None:
        """Where it fits as it is with the same stage and mesh, if it does."""
        for other, plan in self.plain.items():
            if (other.mesh, other.stage) == (family.mesh, family.stage) and plan.fits:
                return f"with {other.place.name}" if other.place.name else "without"
        return None

    def _least_seconds(self, family: _Family) -> tuple[float, str]:
        """Return a lower bound of the family's step time, from terms that do not depend on offloading."""
        device, rests = self.machine.device, self.rests[family]
        computes = [one.time.compute - one.time.phases.get("update", 0.0) for one in self.plain.values()]
        computing, updating = max(0.0, min(computes, default=0.0)), rests.updated / device.cpu
        # Read, and written.
        files = 2 * rests.files / device.file
        if files > computing + updating:
            return files, f"its files alone take {show_seconds(files)}"
        return (
            computing + updating,
            f"the CPU's update takes {show_seconds(updating)} beside {show_seconds(computing)} of computing",
        )

    def _options(self, family: _Family) -> dict[str, Any]:
        return {**self.options, **STAGES[family.stage], **family.place.options}

    def _note(self, family: _Family, verdict: str, given_up: str = "") -> None:
        mesh, stage, place = _about(family)
        self.tried.append(Candidate(stage, mesh, ", ".join(filter(None, (place, given_up))), None, verdict))

    def _try(self, family: _Family, given_up: str, more: Mapping[str, Any]) -> tuple[Plan | None, bool]:
        """Its plan, and whether giving up more activations is of no use."""
        chosen = {**STAGES[family.stage], **family.place.options, **more}
        given_up = ", ".join(filter(None, (family.place.name, given_up)))
        doing = f"stage {family.stage} on {_grid(family.mesh)}{', ' if given_up else ''}{given_up}"
        tell("candidates", self.settled, self.total, doing)
        plan: Plan | None = None
        verdict, hopeless = "", False
        try:
            plan = planned(self.graph, self.batch, family.mesh, self.machine, **{**self.options, **chosen})
        except MemoryBudgetError as error:
            verdict = f"does not fit: {show_bytes(error.missing)} too much"
            hopeless = error.missing > error.activations + error.in_buckets + _bytes(self.batch)
        except InputError:
            raise
        except ZeroGraphError as error:
            verdict = f"cannot be compiled: {str(error).splitlines()[0]}"
        if plan is not None and plan.fits:
            self.fastest = min(self.fastest, plan.time.seconds)
        self.tried.append(Candidate(family.stage, family.mesh, given_up, plan, verdict, chosen))
        return plan, hopeless


# A budget would be an error where it is not kept, and what is too much is to be seen.
_AS_IT_IS: Mapping[str, Any] = {"memory_budget": None}

# Numbers of micro-batches of which the largest, that holds the least, is tried first: if that does not fit, none does.
_MANY = 3


def _about(family: _Family) -> tuple[tuple[int, ...], str, str]:
    return family.mesh, family.stage, family.place.name


def _ways(batch: Any, limit: int, options: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over trade-offs for memory, the cheapest first."""
    saving = {"recompute": "auto", "memory_budget": limit}
    yield "recompute", saving
    count = samples(batch)
    steps = int(options.get("gradient_accumulation_steps", 1)) * 2
    while count % steps == 0:
        yield f"recompute, {steps} micro-batches", {**saving, "gradient_accumulation_steps": steps}
        steps *= 2


def _verdict(one: Candidate, best: Candidate | None) -> str:
    if one.plan is None:
        return one.verdict
    if one.plan.memory.peak > one.plan.usable:
        return f"does not fit: {show_bytes(one.plan.memory.peak - one.plan.usable)} too much"
    if not one.plan.fits:
        assert one.plan.host is not None
        assert one.plan.cpu_capacity is not None
        return f"does not fit: {show_bytes(one.plan.host.peak - one.plan.cpu_capacity)} too much in the CPU's memory"
    assert best is not None
    if one.plan is best.plan:
        return "the fastest that fits"
    return f"fits, {_seconds(one) / _seconds(best) - 1:.1%} slower"


def _seconds(one: Candidate) -> float:
    assert one.plan is not None
    return one.plan.time.seconds


def _bytes(batch: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tensors(batch))


def _grid(mesh: Sequence[int]) -> str:
    return "x".join(map(str, mesh)) + " ranks"
