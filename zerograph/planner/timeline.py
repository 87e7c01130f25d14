"""Predict when each node of an emitted graph runs: compute nodes one by one, collectives beside them.

A collective begins when it is started and the one before it on the wire is done; what waits for it waits until it is.
Transfers between memories and to files have lines of their own, and so has what the CPU computes for an accelerator. A
loop's body is predicted once and repeated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, fx

from zerograph.ir.alias import WAIT
from zerograph.ir.loop import loop_of
from zerograph.ir.mesh import Mesh
from zerograph.ir.metadata import Phase, boxing_of, origin
from zerograph.ir.offload_operators import FETCH, TRANSFER, WAIT_TRANSFER, WRITE_BACK
from zerograph.ir.step_graph import nbytes
from zerograph.planner import costs
from zerograph.planner.machine import Machine

Stream = Literal["compute", "communication", "host", "files", "cpu"]


@dataclass(frozen=True)
class Event:
    """One node's time.

    Attributes:
        node: what runs, of the graph or of a loop's body.
        start, end: seconds from the beginning of the step.
        stream: what it keeps busy.
        waits: seconds that the device idles in it: for a collective, or for a transfer.
        turn: which micro-batch, where there are several; events stand for the first turn only.
    """

    node: fx.Node
    start: float
    end: float
    stream: Stream
    waits: float = 0.0
    turn: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def name(self) -> str:
        """Return the collective's kind and tensor, or module and operator."""
        boxing = boxing_of(self.node)
        if boxing is not None and self.stream == "communication":
            return f"{boxing.kind} of {boxing.tensor}"
        what = str(self.node.target).removeprefix("aten.").removesuffix(".default")
        module = origin(self.node).module
        return f"{module}: {what}" if module else what


@dataclass(frozen=True, eq=False)
class Timeline:
    """A step's time on one rank.

    Attributes:
        seconds: from the first node to the last.
        events: in order of their start; of a loop's turns the first.
        compute: seconds that the device computes, in all turns.
        communication: seconds that collectives take, exposed or not.
        exposed: seconds in which the device idles and waits for a collective; ``transfers``: for a transfer;
            ``updating``: for the CPU, which updates what rests in its memory.
        phases: seconds of each phase, as the device sees them.
    """

    seconds: float
    events: Sequence[Event] = field(repr=False)
    compute: float
    communication: float
    exposed: float
    transfers: float
    updating: float
    phases: Mapping[Phase, float]

    def chrome_trace(self) -> dict[str, Any]:
        """Return the timeline as a trace for Perfetto or ``chrome://tracing``."""
        lines = {"compute": 0, "communication": 1, "host": 2, "files": 3, "cpu": 4}
        names = [
            {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": stream}}
            for stream, number in lines.items()
            if stream == "compute" or any(event.stream == stream for event in self.events)
        ]
        return {
            "displayTimeUnit": "ms",
            "traceEvents": names
            + [
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": lines[event.stream],
                    "name": event.name,
                    "cat": origin(event.node).phase,
                    "ts": event.start * 1e6,
                    "dur": event.seconds * 1e6,
                    "args": _arguments(event),
                }
                for event in self.events
            ],
        }


def timeline(graph: fx.Graph, machine: Machine, mesh: Mesh) -> Timeline:
    """Predict a step.

    Args:
        graph: the last one: in this rank's shapes, with its collectives.
        mesh: the ranks that the graph is for; what is innermost there is closest in the network.
    """
    values = (one for node in graph.nodes for one in costs.tensors(node.meta.get("val")))
    walk = _Walk(machine, mesh, any(one.device.type != "cpu" for one in values))
    walk.run(graph, 1, None)
    totals = walk.totals
    events = sorted(walk.events, key=lambda event: event.start)
    return Timeline(
        walk.now,
        events,
        totals["compute"],
        totals["communication"],
        totals["exposed"],
        totals["transfers"],
        totals["updating"],
        walk.phases,
    )


@dataclass
class _Walk:
    """One walk over the nodes in order; ``now`` is the device's clock, ``free`` when each other stream is.

    ``apart``: the graph is one of an accelerator, and what is on the CPU is not on it.
    """

    machine: Machine
    mesh: Mesh
    apart: bool
    now: float = 0.0
    events: list[Event] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    phases: dict[Phase, float] = field(default_factory=lambda: defaultdict(float))
    _free: dict[Stream, float] = field(default_factory=lambda: defaultdict(float))
    _ready: dict[fx.Node, float] = field(default_factory=dict)

    def run(self, graph: fx.Graph, times: int, turn: int | None) -> None:
        """Add a graph's events; what it adds to totals counts ``times``."""
        for node in graph.nodes:
            began = self.now
            self._node(node, times, turn)
            if loop_of(node) is None:
                self.phases[origin(node).phase] += (self.now - began) * times

    def _node(self, node: fx.Node, times: int, turn: int | None) -> None:
        boxing = boxing_of(node)
        if (loop := loop_of(node)) is not None:
            began = self.now
            self.run(loop.body.graph, times * loop.micro_batches, 0)
            self.now = began + (self.now - began) * loop.micro_batches
        elif node.target is WAIT or node.target is WAIT_TRANSFER:
            self._wait(node, times, turn)
        elif boxing is not None and boxing.kind != "slice":
            took = costs.wire_seconds(boxing, self.mesh, self.machine)
            self._start(node, "communication", took, times, turn)
            # What the device gives of itself to carry it.
            self._compute(None, took * (1 - self.machine.overlap), times, turn)
        elif node.target is TRANSFER:
            self._start(node, "host", costs.carry_seconds(node, self.machine.device), times, turn)
        elif node.target is FETCH or node.target is WRITE_BACK:
            self._start(node, "files", _size(node) / self.machine.device.file, times, turn)
        elif self.apart and costs.on_cpu(node):
            self._update(node, costs.cpu_seconds(node, self.machine.device), times, turn)
        else:
            self._compute(node, costs.seconds(node, self.machine.device), times, turn)

    def _update(self, node: fx.Node, took: float, times: int, turn: int | None) -> None:
        """The device has nothing to do meanwhile: what comes next reads what the CPU makes."""
        if took:
            self.events.append(Event(node, self.now, self.now + took, "cpu", waits=took, turn=turn))
            self.now += took
            self.totals["updating"] += took * times

    def _compute(self, node: fx.Node | None, took: float, times: int, turn: int | None) -> None:
        if took:
            if node is not None:
                self.events.append(Event(node, self.now, self.now + took, "compute", turn=turn))
            self.now += took
            self.totals["compute"] += took * times

    def _start(self, node: fx.Node, stream: Stream, took: float, times: int, turn: int | None) -> None:
        start = max(self.now, self._free[stream])
        self._free[stream] = self._ready[node] = start + took
        self.events.append(Event(node, start, start + took, stream, turn=turn))
        if stream == "communication":
            self.totals["communication"] += took * times

    def _wait(self, node: fx.Node, times: int, turn: int | None) -> None:
        awaited = node.all_input_nodes[0]
        idle = max(0.0, self._ready.get(awaited, 0.0) - self.now)
        if idle:
            self.events.append(Event(node, self.now, self.now + idle, "compute", waits=idle, turn=turn))
            self.now += idle
            self.totals["exposed" if node.target is WAIT else "transfers"] += idle * times


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    moved = value if isinstance(value, Tensor) else node.all_input_nodes[-1].meta["val"]
    return nbytes(moved)


def _arguments(event: Event) -> dict[str, Any]:
    found = origin(event.node)
    said = {"node": event.node.name, "module": found.module, "source": found.source, "phase": found.phase}
    boxing = boxing_of(event.node)
    if boxing is not None:
        said |= {"tensor": str(boxing.tensor), "bytes sent": str(round(boxing.sent))}
    return {key: value for key, value in said.items() if value}
