"""What steps took, as ``torch.profiler`` saw it: every node by name, collectives from start to end by tensor."""

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
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from zerograph.compiler.compiled import RewrittenStep
from zerograph.errors import ConfigError
from zerograph.inspection.collectives import Collective, collectives
from zerograph.inspection.names import is_wait, labels
from zerograph.ir.loop import Loop, loop_of
from zerograph.ir.memory import show_bytes
from zerograph.ir.metadata import Boxing, boxing_of, meta

Function = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Flight:
    """One collective as it was measured.

    Attributes:
        collective: what it is.
        start: seconds from the beginning of the trace.
        seconds: from its start until it was waited for.
        waited: seconds of these in which nothing else was done: what is not hidden behind compute.
    """

    collective: Collective
    start: float
    seconds: float
    waited: float


@dataclass(frozen=True)
class Trace:
    """Steps that were measured.

    Attributes:
        path: this rank's file, for Perfetto (ui.perfetto.dev) or chrome://tracing.
        seconds: that each step took, with what measuring costs.
        flights: its collectives, in the order in which they started.
    """

    path: Path
    seconds: tuple[float, ...]
    flights: tuple[Flight, ...]

    def __str__(self) -> str:
        steps = len(self.seconds)
        each = ", ".join(f"{seconds * 1e3:.1f}" for seconds in self.seconds)
        lines = [f"{steps} step{'s' * (steps > 1)}: {each} ms; trace in {self.path}"]
        by_what: dict[tuple[str, str], list[Flight]] = defaultdict(list)
        for one in self.flights:
            by_what[one.collective.kind, one.collective.what].append(one)
        if by_what:
            lines.append("      ms  waited ms   per step: collectives, from start to end, and what no compute hides")
        for (kind, what), found in by_what.items():
            ms, waited = (sum(values) * 1e3 / steps for values in _times(found))
            size = show_bytes(sum(one.collective.bytes for one in found) / steps)
            lines.append(f"{ms:>8.2f} {waited:>10.2f}   {len(found) / steps:g} {kind} of {what}, {size}")
        return "\n".join(lines)


def _times(flights: Sequence[Flight]) -> tuple[list[float], list[float]]:
    return [one.seconds for one in flights], [one.waited for one in flights]


def file_of(path: str | os.PathLike[str], rank: int, ranks: int) -> Path:
    """This rank's file: ``trace.json``, or ``trace.rank1.json`` among several.

    Raises:
        ConfigError: its folder is none, or cannot be written.
    """
    asked = Path(path)
    if not asked.parent.is_dir() or not os.access(asked.parent, os.W_OK):
        raise ConfigError(f"profile(path={str(path)!r}): {asked.parent} is no folder that can be written")
    return asked if ranks == 1 else asked.with_name(f"{asked.stem}.rank{rank}{asked.suffix}")


def named(function: Function, graph: fx.Graph) -> Function:
    """The same, node by node under the names of the emitted graph, for a profiler to see.

    Raises:
        ConfigError: a backend made of the graph what cannot be looked into.
    """
    module = getattr(function, "__self__", None)
    if not isinstance(module, fx.GraphModule):
        raise ConfigError(
            "profile(): the backend made one function of the step, in which no node can be named\n"
            "Set config.backend to 'eager' or 'inductor', or use torch.profiler around the step."
        )
    return _Interpreter(module, graph).run


def measure(steps: int, run: Callable[[], object], about: RewrittenStep, path: Path) -> Trace:
    """Run ``run()`` so often under ``torch.profiler``, and write what it saw."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with torch_profile(activities=activities) as seen:
        for number in range(steps):
            with record_function(f"{_STEP}{number}"):
                run()
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        made = Path(folder) / path.name
        seen.export_chrome_trace(str(made))
        trace = json.loads(made.read_text())
        found = _read(trace, about)
        made.write_text(json.dumps(trace))
        made.replace(path)
    return Trace(path, *found)


_STEP = "zerograph step "
_WAIT = "wait for "
_COMPILED = "compiled: "
# Of the nodes of a compiled piece.
_SHOWN = 3


def _named(graph: fx.Graph) -> dict[str, str]:
    """What every node of a graph is called in a trace, by its own name."""
    starts = {node: _start(moved, node.name) for node in graph.nodes if (moved := boxing_of(node)) is not None}
    found: dict[str, str] = {}
    for node, name in labels(graph).items():
        waits_for = starts.get(node.all_input_nodes[0]) if is_wait(node) else None
        found[node.name] = starts.get(node) or (f"{_WAIT}{waits_for}" if waits_for else name)
    return found


def _start(found: Boxing | Collective, node: str) -> str:
    what = found.tensor if isinstance(found, Boxing) else found.what
    return f"{found.kind} of {what} ({node})"


def _compiled(node: fx.Node) -> tuple[str, ...]:
    """The names of the nodes that the backend made one function of, and that this one calls; empty for any other."""
    return tuple(meta(node).get("compiled", ()))


class _Interpreter(fx.Interpreter):
    """Runs a graph node by node, each under its name in the emitted one; frees values as the generated code does."""

    def __init__(self, module: fx.GraphModule, emitted: fx.Graph) -> None:
        super().__init__(module)
        self._names = _named(emitted)
        self._bodies = {str(node.target): found.body.graph for node in emitted.nodes if (found := loop_of(node))}

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output") or (n.target is getitem and _compiled(n.all_input_nodes[0])):
            # What leaves a compiled piece was computed in it.
            return super().run_node(n)
        with record_function(self._called(n)):
            return super().run_node(n)

    def _called(self, n: fx.Node) -> str:
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


def _read(trace: dict[str, Any], about: RewrittenStep) -> tuple[tuple[float, ...], tuple[Flight, ...]]:
    """The steps and collectives of a trace, which gets an event for each collective from its start to its end."""
    events = trace["traceEvents"]
    spans: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "user_annotation":
            spans[event["name"]].append(event)
    for same in spans.values():
        same.sort(key=lambda event: float(event["ts"]))
    steps = [event for name, same in spans.items() if name.startswith(_STEP) for event in same]
    begun = min((float(event["ts"]) for event in steps), default=0.0)
    flights = []
    for one, _ in collectives(about.emitted, about.context.buckets):
        name = _start(one, one.node)
        for start, end in zip(spans[name], spans[f"{_WAIT}{name}"], strict=False):
            until = float(end["ts"]) + float(end["dur"])
            whole = until - float(start["ts"])
            waited = float(end["dur"])
            flights.append(Flight(one, (float(start["ts"]) - begun) / 1e6, whole / 1e6, waited / 1e6))
            events += _in_flight(one, len(flights), start, until)
    seconds = [float(event["dur"]) / 1e6 for event in sorted(steps, key=lambda event: float(event["ts"]))]
    return tuple(seconds), tuple(sorted(flights, key=lambda one: one.start))


def _in_flight(one: Collective, number: int, start: dict[str, Any], until: float) -> list[dict[str, Any]]:
    """A pair of asynchronous events: collectives overlap each other, which a track of spans cannot show."""
    args = {
        "kind": one.kind,
        "tensor": one.what,
        "parameters": list(one.tensors),
        "bytes sent by each rank": one.bytes,
        "phase": one.phase,
        "node": one.node,
    }
    shared = {"cat": "collective", "id": number, "name": f"{one.kind} of {one.what}", "pid": start["pid"]}
    return [
        {**shared, "ph": "b", "ts": start["ts"], "tid": start["tid"], "args": args},
        {**shared, "ph": "e", "ts": until, "tid": start["tid"]},
    ]
