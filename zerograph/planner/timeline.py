"""Predict when each node of an emitted graph runs: compute nodes one by one, collectives beside them.

A collective begins when it is started and the previous one on the wire is done; a wait for it ends when it is done.
Transfers between memories, transfers to files, and updates that the CPU computes have streams of their own. The body of
a loop is predicted once and repeated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, fx

from zerograph.ir.alias import WAIT
from zerograph.ir.loop import loop_of
from zerograph.ir.mesh import Mesh
from zerograph.ir.metadata import Phase, boxing_of, origin
from zerograph.ir.step_graph import is_collective, nbytes, tensors_of
from zerograph.ops.offload import FETCH, TRANSFER, WAIT_TRANSFER, WRITE_BACK
from zerograph.planner import costs
from zerograph.planner.machine import Machine

Stream = Literal["compute", "communication", "host", "files", "cpu"]


@dataclass(frozen=True)
class Event:
    """The time of one node.

    Attributes:
        node: of the graph, or of a loop's body.
        start, end: seconds from the beginning of the step.
        stream: the resource that it occupies.
        waits: seconds that the device idles in it, for a collective or a transfer.
        turn: micro-batch, in a loop; there are events of the first micro-batch only.
    """

    node: fx.Node
    start: float
    end: float
    stream: Stream
    waits: float = 0.0
    turn: int | None = None

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class Timeline:
    """A step's time on one rank.

    Attributes:
        seconds: from the first node to the last.
        events: in order of their start; of a loop only the first micro-batch.
        compute: seconds in which the device computes, in all micro-batches.
        communication: seconds of collectives, exposed or not.
        exposed: seconds in which the device waits for a collective.
        transfers: seconds in which the device waits for a transfer.
        updating: seconds in which the device waits for the CPU's update of offloaded state.
        phases: seconds of each phase on the device.
    """

    seconds: float
    events: Sequence[Event] = field(repr=False)
    compute: float
    communication: float
    exposed: float
    transfers: float
    updating: float
    phases: Mapping[Phase, float]


def timeline(graph: fx.Graph, machine: Machine, mesh: Mesh) -> Timeline:
    """Predict the time of a step.

    Args:
        graph: the emitted graph, in this rank's shapes and with its collectives.
        mesh: the ranks of the graph, in the order of the machine.
    """
    values = (value for node in graph.nodes for value in tensors_of(node))
    walk = _Walk(machine, mesh, any(value.device.type != "cpu" for value in values))
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
    """One walk over the nodes in order.

    Attributes:
        apart: the graph is for an accelerator, and the CPU computes nodes of CPU tensors.
        now: the device's clock in seconds.
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
        """Add the events of a graph, and ``times`` their seconds to the totals."""
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
        elif boxing is not None and is_collective(node):
            took, idle = costs.wire_seconds(boxing, self.mesh, self.machine)
            self._start(node, "communication", took, times, turn)
            # Compute that the device loses to carrying it.
            self._compute(None, idle, times, turn)
        elif node.target is TRANSFER:
            self._start(node, "host", costs.carry_seconds(node, self.machine.device), times, turn)
        elif node.target is FETCH or node.target is WRITE_BACK:
            self._start(node, "files", _size(node) / self.machine.device.file, times, turn)
        elif self.apart and costs.on_cpu(node):
            self._update(node, costs.cpu_seconds(node, self.machine.device), times, turn)
        else:
            self._compute(node, costs.seconds(node, self.machine.device), times, turn)

    def _update(self, node: fx.Node, seconds: float, times: int, turn: int | None) -> None:
        """Add a CPU update, during which the device waits: the next nodes read its results."""
        if seconds:
            self.events.append(Event(node, self.now, self.now + seconds, "cpu", waits=seconds, turn=turn))
            self.now += seconds
            self.totals["updating"] += seconds * times

    def _compute(self, node: fx.Node | None, seconds: float, times: int, turn: int | None) -> None:
        if seconds:
            if node is not None:
                self.events.append(Event(node, self.now, self.now + seconds, "compute", turn=turn))
            self.now += seconds
            self.totals["compute"] += seconds * times

    def _start(self, node: fx.Node, stream: Stream, seconds: float, times: int, turn: int | None) -> None:
        start = max(self.now, self._free[stream])
        self._free[stream] = self._ready[node] = start + seconds
        self.events.append(Event(node, start, start + seconds, stream, turn=turn))
        if stream == "communication":
            self.totals["communication"] += seconds * times

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
