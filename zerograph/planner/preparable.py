"""The planner's view of a graph: its configuration, and a step that is prepared or laid out."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, Protocol

from zerograph.compiler.layout import PlannedBucket
from zerograph.config import Config
from zerograph.inspection.step import Prepared
from zerograph.ir.mesh import Mesh
from zerograph.runtime.wire.selection import Transport


class Preparable(Protocol):
    """A graph that can be prepared without running; :class:`zerograph.ZeroGraph` is one."""

    @property
    def config(self) -> Config:
        """The options of the graph."""

    def prepare(
        self, mesh: Mesh, *args: Any, device: str = "cpu", transport: str | Transport = "torch", **kwargs: Any
    ) -> Prepared:
        """Prepare a step; see :meth:`zerograph.ZeroGraph.prepare`."""

    def lay_out(self, mesh: Mesh, *args: Any, device: str = "cpu", **kwargs: Any) -> tuple[PlannedBucket, ...]:
        """Lay out a step; see :meth:`zerograph.ZeroGraph.lay_out`."""


@contextlib.contextmanager
def configured(graph: Preparable, **options: Any) -> Iterator[Config]:
    """Set options of the graph inside the context; restore them after it."""
    before = copy.copy(graph.config)
    try:
        graph.config.set(**options)
        yield graph.config
    finally:
        graph.config.set(**before.options())
