"""What compiling a step gives: prepared before the backend, then bound to the state that it updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from zerograph.inspection.placements import planned_placements
from zerograph.inspection.step import Inspection
from zerograph.layout import Planned
from zerograph.passes.context import Context
from zerograph.passes.pipeline import PassRecord
from zerograph.runtime.executor import Executor, Lookup
from zerograph.runtime.offload.transfers import check
from zerograph.runtime.state import Store, extents
from zerograph.sbp import NdSbp, Sbp
from zerograph.step_graph import Captured, Role
from zerograph.update_program import Path


@dataclass(frozen=True, eq=False)
class CompiledStep(Inspection):
    """A step bound to the state that it updates, and everything that led to it.

    Attributes:
        captured: what ``build()`` was traced to.
        passes: the graph after every pass.
        context: what the passes were told.
        backend: name of what compiled the last graph.
        executor: runs it.
        stores: the bucket at rest behind each of ``context.buckets``, by name.
        numbers: the optimizer group, and the place in it, behind each hyperparameter that is an input.
        outputs: SBP and global shape of each tensor that it returns.
        lookups: finds what rests in no store, for each run.
        aliases: further names of tied parameters, each with the first.
        warnings: what was said while it was compiled.
    """

    captured: Captured
    passes: tuple[PassRecord, ...]
    context: Context
    backend: str
    executor: Executor
    stores: Mapping[str, Store]
    numbers: Mapping[str, tuple[Mapping[str, Any], Path]]
    outputs: tuple[tuple[NdSbp, tuple[int, ...]], ...]
    lookups: Mapping[Role, Lookup]
    aliases: Mapping[str, str]
    warnings: tuple[str, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        """Names of the 0-d tensors that the graph returns behind the user's."""
        roles: list[Role] = self.executor.graph.graph.output_node().meta["roles"]
        return tuple(found.name for found in roles if found.kind != "output")

    @property
    def updated(self) -> Iterator[Store]:
        """The stores that this step updates."""
        return (self.stores[name] for name in self.context.updates)

    def check_files(self) -> None:
        """Raise if a file that the step reads is not what it left there.

        Raises:
            OffloadError: naming the file.
        """
        held = (one for store in self.stores.values() for one in extents(store).values())
        check(dict.fromkeys(one.file for one in held))


@dataclass(frozen=True, eq=False)
class Prepared(Inspection):
    """A step after everything before the backend: it has met no state and no process group.

    Attributes:
        captured: what ``build()`` was traced to.
        passes: the graph after every pass.
        context: what the passes were told.
        layout: the buckets, in order of first use.
        update_seconds: what tracing the optimizers' updates took; 0 where all were known.
        aliases: further names of tied parameters, each with the first.
        warnings: what was said on the way.
    """

    captured: Captured
    passes: tuple[PassRecord, ...]
    context: Context
    layout: tuple[Planned, ...]
    update_seconds: float
    aliases: Mapping[str, str]
    warnings: tuple[str, ...]

    @property
    def graph(self) -> fx.GraphModule:
        """What a rank runs."""
        return self.passes[-1].graph

    def placements(self) -> dict[str, Sbp | NdSbp]:
        """SBP between steps of every parameter and entry of optimizer state, by qualified name."""
        return planned_placements(self.layout, self.context.mesh.dims)
