"""Steps measured by ``torch.profiler``: every node by name, collectives from start to end by tensor."""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.profiler import ProfilerActivity, profile as torch_profile, record_function

from zerograph.compiler.compiled import PreparedStep
from zerograph.errors import ConfigError
from zerograph.inspection.collectives import Collective, collectives
from zerograph.inspection.names import is_wait, labels
from zerograph.ir.loop import Loop, loop_of
from zerograph.ir.memory import show_bytes
from zerograph.ir.metadata import Boxing, boxing_of, meta

Function = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Flight:
    """One measured collective.

    Attributes:
        collective: its kind and tensor.
        start: seconds from the beginning of the trace.
        seconds: from its start to the end of the wait for it.
        waited: seconds of the wait, which compute does not hide.
    """

    collective: Collective
    start: float
    seconds: float
    waited: float


@dataclass(frozen=True)
class Trace:
    """Measured steps.

    Attributes:
        path: this rank's file, for Perfetto (ui.perfetto.dev) or chrome://tracing.
        seconds: duration of each step, with the overhead of measuring.
        flights: the collectives of all steps, by start.
    """

    path: Path
    seconds: tuple[float, ...]
    flights: tuple[Flight, ...]

    def __str__(self) -> str:
        steps = len(self.seconds)
        each = ", ".join(f"{seconds * 1e3:.1f}" for seconds in self.seconds)
        lines = [f"{steps} step{'s' * (steps > 1)}: {each} ms; trace in {self.path}"]
        groups: dict[tuple[str, str], list[Flight]] = defaultdict(list)
        for flight in self.flights:
            groups[flight.collective.kind, flight.collective.what].append(flight)
        if groups:
            lines.append(
                "      ms  waited ms   per step: collectives, from start to end, and time that no compute hides"
            )
        for (kind, what), flights in groups.items():
            ms = sum(flight.seconds for flight in flights) * 1e3 / steps
            waited = sum(flight.waited for flight in flights) * 1e3 / steps
            size = show_bytes(sum(flight.collective.bytes for flight in flights) / steps)
            lines.append(f"{ms:>8.2f} {waited:>10.2f}   {len(flights) / steps:g} {kind} of {what}, {size}")
        return "\n".join(lines)


def file_of(path: str | os.PathLike[str], rank: int, ranks: int) -> Path:
    """Return this rank's file: ``trace.json``, or ``trace.rank1.json`` among several ranks.

    Raises:
        ConfigError: its folder does not exist, or cannot be written.
    """
    file = Path(path)
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise ConfigError(f"profile(path={str(path)!r}): {file.parent} is not a writable folder")
    return file if ranks == 1 else file.with_name(f"{file.stem}.rank{rank}{file.suffix}")


def named(function: Function, graph: fx.Graph) -> Function:
    """Return a function that runs the graph node by node, under names that a profiler records.

    Raises:
        ConfigError: the backend compiled the graph into one function.
    """
    module = getattr(function, "__self__", None)
    if not isinstance(module, fx.GraphModule):
        raise ConfigError(
            "profile(): the backend compiled the step into one function, in which no node can be named\n"
            "Set config.backend to 'eager' or 'inductor', or use torch.profiler around the step."
        )
    return _Interpreter(module, graph).run


def measure(steps: int, run: Callable[[], object], measured: PreparedStep, path: Path) -> Trace:
    """Run ``run()`` ``steps`` times under ``torch.profiler``, and write the trace."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with torch_profile(activities=activities) as profiler:
        for number in range(steps):
            with record_function(f"{_STEP}{number}"):
                run()
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        file = Path(folder) / path.name
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text())
        seconds, flights = _read(trace, measured)
        file.write_text(json.dumps(trace))
        file.replace(path)
    return Trace(path, seconds, flights)


_STEP = "zerograph step "
_WAIT = "wait for "
_COMPILED = "compiled: "
# Nodes of a compiled piece that its name lists.
_SHOWN = 3


def _named(graph: fx.Graph) -> dict[str, str]:
    """Return the name of every node in a trace, by its name in the graph."""
    starts = {node: _start(moved, node.name) for node in graph.nodes if (moved := boxing_of(node)) is not None}
    names: dict[str, str] = {}
    for node, name in labels(graph).items():
        waits_for = starts.get(node.all_input_nodes[0]) if is_wait(node) else None
        names[node.name] = starts.get(node) or (f"{_WAIT}{waits_for}" if waits_for else name)
    return names


def _start(moved: Boxing | Collective, node: str) -> str:
    what = moved.tensor if isinstance(moved, Boxing) else moved.what
    return f"{moved.kind} of {what} ({node})"


def _compiled(node: fx.Node) -> tuple[str, ...]:
    """Return the names of the nodes in the compiled piece that this node calls; empty for any other node."""
    return tuple(meta(node).get("compiled", ()))


class _Interpreter(fx.Interpreter):
    """Runs a graph node by node, each under its name in the emitted graph; frees values as the generated code does."""

    def __init__(self, module: fx.GraphModule, emitted: fx.Graph) -> None:
        super().__init__(module)
        self._names = _named(emitted)
        self._bodies = {str(node.target): loop.body.graph for node in emitted.nodes if (loop := loop_of(node))}

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output") or (n.target is getitem and _compiled(n.all_input_nodes[0])):
            # Outputs of a compiled piece were computed in it.
            return super().run_node(n)
        with record_function(self._name_of(n)):
            return super().run_node(n)

    def _name_of(self, n: fx.Node) -> str:
        names = [self._names.get(name, name) for name in _compiled(n) or (n.name,)]
        if not _compiled(n):
            return names[0]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return f"{_COMPILED}{', '.join(names[:_SHOWN])}{more}"

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.fetch_attr(target)
        if isinstance(module, Loop):
            inner = module.with_body(module.body, _Interpreter(module.body, self._bodies[target]).run)
            return inner(*args)
        return super().call_module(target, args, kwargs)


def _read(trace: dict[str, Any], measured: PreparedStep) -> tuple[tuple[float, ...], tuple[Flight, ...]]:
    """Return step seconds and collectives of a trace; add an event per collective from its start to its end."""
    events = trace["traceEvents"]
    spans: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "user_annotation":
            spans[event["name"]].append(event)
    for events_of_name in spans.values():
        events_of_name.sort(key=lambda event: float(event["ts"]))
    steps = [event for name, group in spans.items() if name.startswith(_STEP) for event in group]
    began = min((float(event["ts"]) for event in steps), default=0.0)
    flights = []
    for collective, _ in collectives(measured.emitted, measured.context):
        name = _start(collective, collective.node)
        for start, end in zip(spans[name], spans[f"{_WAIT}{name}"], strict=False):
            until = float(end["ts"]) + float(end["dur"])
            whole = until - float(start["ts"])
            waited = float(end["dur"])
            flights.append(Flight(collective, (float(start["ts"]) - began) / 1e6, whole / 1e6, waited / 1e6))
            events += _in_flight(collective, len(flights), start, until)
    seconds = [float(event["dur"]) / 1e6 for event in sorted(steps, key=lambda event: float(event["ts"]))]
    return tuple(seconds), tuple(sorted(flights, key=lambda flight: flight.start))


def _in_flight(collective: Collective, number: int, start: dict[str, Any], until: float) -> list[dict[str, Any]]:
    """Return a pair of asynchronous events: a track of spans cannot show collectives that overlap."""
    args = {
        "kind": collective.kind,
        "tensor": collective.what,
        "parameters": list(collective.tensors),
        "bytes sent by each rank": collective.bytes,
        "phase": collective.phase,
        "node": collective.node,
    }
    shared = {"cat": "collective", "id": number, "name": f"{collective.kind} of {collective.what}", "pid": start["pid"]}
    return [
        {**shared, "ph": "b", "ts": start["ts"], "tid": start["tid"], "args": args},
        {**shared, "ph": "e", "ts": until, "tid": start["tid"]},
    ]
