"""Logs and dumps of each compilation, as the environment asks for them."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import fx

from zerograph.compiler.compiled import PreparedStep
from zerograph.inspection import dump, logs
from zerograph.inspection.step import Inspection
from zerograph.passes.context import Context


class EnvironmentObserver:
    """Follow a compilation for ``ZEROGRAPH_LOGS`` and ``ZEROGRAPH_DUMP``."""

    def started(self) -> None:
        """Set up the loggers.

        Raises:
            ConfigError: ``ZEROGRAPH_LOGS`` names a log that does not exist.
        """
        logs.configure()

    def passes(self, captured: fx.GraphModule, context: Context, rank: int) -> AbstractContextManager[None]:
        """Dump the graphs up to a pass that fails inside."""
        return dump.failures(captured, context, rank)

    def prepared(self, step: PreparedStep, rank: int) -> None:
        """Dump the graph after every pass."""
        if dump.wanted():
            dump.dump(step.captured.graph, step.context, rank, Inspection(step).describe())
