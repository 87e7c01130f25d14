"""The results of the compiler: a step after all passes, a prepared step, and a step bound to its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from zerograph.capture.captured import Captured
from zerograph.compiler.layout import Planned
from zerograph.ir.metadata import Role, meta
from zerograph.ir.sbp import NdSbp
from zerograph.ir.step_graph import output_nodes
from zerograph.ir.update_program import Path
from zerograph.passes.context import Context
from zerograph.passes.pipeline import PassRecord
from zerograph.runtime.executor import Executor, Lookup
from zerograph.runtime.offload.transfers import check
from zerograph.runtime.state import Store, extents


@dataclass(frozen=True, eq=False, kw_only=True)
class RewrittenStep:
    """A step after all passes, before or after the backend.

    Attributes:
        captured: the graph that ``build()`` was traced to.
        passes: the graph after every pass.
        context: the input of the passes.
        aliases: further names of tied parameters, each with the first name.
        warnings: messages of the compilation.
    """

    captured: Captured
    passes: tuple[PassRecord, ...]
    context: Context
    aliases: Mapping[str, str]
    warnings: tuple[str, ...]

    @property
    def emitted(self) -> fx.Graph:
        """The graph that a rank runs, with zerograph's metadata in ``node.meta``."""
        return self.passes[-1].graph.graph


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedStep(RewrittenStep):
    """A step before the backend: it is bound to no state and to no process group.

    Attributes:
        layout: the buckets, in order of first use.
        update_seconds: seconds that tracing the optimizers' updates took; 0 if all were cached.
    """

    layout: tuple[Planned, ...]
    update_seconds: float

    @property
    def graph(self) -> fx.GraphModule:
        """The graph that a rank runs, as a module."""
        return self.passes[-1].graph


@dataclass(frozen=True, eq=False, kw_only=True)
class CompiledStep(RewrittenStep):
    """A step bound to the state that it updates.

    Attributes:
        backend: name of the backend that compiled the last graph.
        executor: runs the compiled graph.
        stores: the state of each of ``context.buckets``, by bucket name.
        numbers: the optimizer group, and the path in it, of each hyperparameter that is an input.
        outputs: SBP and global shape of each tensor that the step returns.
        lookups: find the tensors that are in no store, at each run.
    """

    backend: str
    executor: Executor
    stores: Mapping[str, Store]
    numbers: Mapping[str, tuple[Mapping[str, Any], Path]]
    outputs: tuple[tuple[NdSbp, tuple[int, ...]], ...]
    lookups: Mapping[Role, Lookup]

    @property
    def flags(self) -> tuple[str, ...]:
        """Names of the 0-d tensors that the graph returns after the user's outputs."""
        roles: list[Role] = meta(self.executor.graph.graph.output_node())["roles"]
        return tuple(found.name for found in roles if found.kind != "output")

    def metric(self, values: Sequence[Tensor]) -> float:
        """Return the first 0-d tensor that ``build()`` returns, among ``values``; of one that was packed the mean."""
        traced = output_nodes(self.captured.graph.graph)
        value = next(value for value, node in zip(values, traced, strict=False) if node.meta["val"].dim() == 0)
        return float(value.item() if value.dim() == 0 else value.double().mean().item())

    def check_files(self) -> None:
        """Raise if a file that the step reads is not what it left there.

        Raises:
            OffloadError: naming the file.
        """
        held = (one for store in self.stores.values() for one in extents(store).values())
        check(dict.fromkeys(one.file for one in held))
