"""Views of a step, compiled or only prepared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import fx

from zerograph.capture.captured import Captured
from zerograph.compiler.compiled import PreparedStep
from zerograph.compiler.layout import PlannedBucket
from zerograph.errors import ConfigError, did_you_mean
from zerograph.inspection.collectives import Collective, collectives
from zerograph.inspection.diff import Diff, compare
from zerograph.inspection.explain import explain
from zerograph.inspection.lifetime import Life
from zerograph.inspection.nodes import to_networkx
from zerograph.inspection.pages import description, page
from zerograph.inspection.placements import planned_placements
from zerograph.inspection.summary import Summary, summary
from zerograph.inspection.text import Line, lines, show_text
from zerograph.ir.memory import Memory, profile
from zerograph.ir.sbp import NdSbp, Sbp
from zerograph.passes.context import Context
from zerograph.passes.pipeline import PassRecord, stages

if TYPE_CHECKING:
    import networkx


class Inspection:
    """Read-only views of a step: text, diffs, the life of a tensor, memory, traffic, exports."""

    def __init__(self, step: PreparedStep) -> None:
        self.step = step

    @property
    def passes(self) -> tuple[PassRecord, ...]:
        """Return name, summary, graph, number of nodes and seconds of each pass."""
        return self.step.passes

    @property
    def memory(self) -> Memory:
        """Return the peak memory of this rank in bytes: its parts, and where in the step it is reached.

        The prediction is exact within some percent if nodes run one by one (backend ``"eager"``).
        """
        return profile(self.emitted).memory()

    def collectives(self) -> list[Collective]:
        """List the collectives in order: kind, bytes, tensors, phase. A collective appears once per run."""
        return [each for each, times in collectives(self.emitted, self.context) for _ in range(times)]

    def text(self, pass_name: str | None = None, module: str | None = None) -> str:
        """Show a graph, one node per line: module path and name, operator, dtype, SBP, global and local shape, source.

        Args:
            pass_name: show the graph after this pass; default: the graph that runs. See
                :mod:`zerograph.inspection.text`.
            module: qualified name of a module: show only its nodes.

        Raises:
            ConfigError: there is no such pass, or the module has no nodes.
        """
        (shown,) = self.texts(pass_name, module=module)
        return "\n".join(shown)

    def diff(self, before: str, after: str, module: str | None = None) -> Diff:
        """Compare the graphs after two passes: ``print(step.inspect.diff("place", "box"))``.

        Returns a unified diff of :meth:`text`. Lines that only moved are marked as moved. ``str()`` is coloured in a
        terminal.

        Args:
            before, after: names of passes; ``"capture"`` is the traced graph.
            module: qualified name of a module: compare only its nodes.

        Raises:
            ConfigError: there is no such pass, or the module has no nodes.
        """
        old, new = self.texts(before, after, module=module)
        return compare(old, new, (before, after))

    def explain(self, name: str) -> Life:
        """Return the lifetime of one tensor, with source lines.

        Its events: stored, gathered, used and freed; its gradient computed and reduced; updated.

        Args:
            name: qualified name of a parameter, of an entry of its optimizer state (``model.fc.weight.exp_avg``) or of
                a buffer; ``"input0"``; a node of :meth:`text`, with its module (``fc:addmm_2``) or without; or a
                module, for its output.

        Raises:
            ConfigError: there is no such tensor; the message lists close names.
        """
        return explain(self.step, name)

    def to_networkx(self, pass_name: str | None = None) -> networkx.MultiDiGraph[str]:
        """Export the graph after a pass, or the graph that runs.

        Its attributes are those of :func:`zerograph.inspection.nodes.to_networkx`; all are numbers and strings.

        Raises:
            ConfigError: there is no such pass.
        """
        return to_networkx(self.graph_after(pass_name).graph, self.context)

    @property
    def captured(self) -> Captured:
        """The traced graph of ``build()``."""
        return self.step.captured

    @property
    def context(self) -> Context:
        """The input of the passes."""
        return self.step.context

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tied parameters, each with the first name."""
        return self.step.aliases

    @property
    def warnings(self) -> tuple[str, ...]:
        """Messages of the compilation."""
        return self.step.warnings

    @property
    def emitted(self) -> fx.Graph:
        """The graph that a rank runs, with zerograph's metadata in ``node.meta``."""
        return self.step.emitted

    @property
    def graph(self) -> fx.GraphModule:
        """The graph that a rank runs, as a module; that of a micro-batch is its ``micro_batches.body``."""
        return self.step.graph

    def graph_after(self, name: str | None = None) -> fx.GraphModule:
        """Return the graph after the pass of that name, or after the last one.

        Raises:
            ConfigError: there is no such pass.
        """
        checked = _pass(self.step, name)
        return next(record for record in self.step.passes if record.name == checked).graph

    @property
    def summary(self) -> Summary:
        """The content of :meth:`page` as data."""
        return summary(self.step)

    def page(self) -> str:
        """Show the step on one screen: the traced program, buckets, collectives, memory, warnings."""
        return page(self.summary)

    def describe(self) -> str:
        """Show the step in full: every input, output, parameter, collective and pass."""
        return description(self.step)

    def texts(self, *names: str | None, module: str | None = None) -> list[list[str]]:
        """Return the lines of :meth:`text` after each of several passes; the pipeline runs once for all of them.

        Raises:
            ConfigError: there is no such pass, or the module has no nodes.
        """
        shown = _lines_after(self.step, *(_pass(self.step, name) for name in names))
        return [show_text(after, module).splitlines() for after in shown]


class Prepared(Inspection):
    """A prepared step and its views, as ``ZeroGraph.prepare()`` returns it.

    Attributes:
        device: the device that tensors on the meta device stand for.
    """

    def __init__(self, step: PreparedStep, device: torch.device | None = None) -> None:
        super().__init__(step)
        self.device = device

    @property
    def layout(self) -> tuple[PlannedBucket, ...]:
        """The buckets, in order of first use."""
        return self.step.layout

    @property
    def update_seconds(self) -> float:
        """Seconds that tracing the optimizers' updates took; 0 if all were cached."""
        return self.step.update_seconds

    def placements(self) -> dict[str, Sbp | NdSbp]:
        """Return the SBP between steps of every parameter and entry of optimizer state, by qualified name."""
        return planned_placements(self.layout, self.context.mesh.dims)


def _pass(step: PreparedStep, name: str | None) -> str:
    """Check the name of a pass; None means the last pass."""
    names = [record.name for record in step.passes]
    if name is None:
        return names[-1]
    if name not in names:
        raise ConfigError(f"there is no pass {name!r}{did_you_mean(name, names)}\nThere are {', '.join(names)}")
    return name


def _lines_after(step: PreparedStep, *names: str) -> list[list[Line]]:
    """Return the lines after each of the passes; run the pipeline at most once."""
    last = step.passes[-1].name
    shown = {last: lines(step.emitted, step.context)} if last in names else {}
    missing = set(names) - set(shown)
    for name, module in stages(step.captured.graph, step.context) if missing else ():
        if name in missing:
            shown[name] = lines(module.graph, step.context)
            missing.discard(name)
        if not missing:
            break
    return [shown[name] for name in names]
