"""The step that a call of a graph selects, the facts that select it, and a warning if each call changes them."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerograph.base.source import levels_to_user
from zerograph.compiler.batch import Batch
from zerograph.compiler.compiled import CompiledStep
from zerograph.compiler.dimensions import Kind, Mode
from zerograph.compiler.members import Members, first_updates
from zerograph.compiler.size_variants import SizeChange
from zerograph.errors import ZeroGraphWarning

# torch.compile compiles a function at most this often.
RECOMPILE_LIMIT = 8
# Compilations in a row, all because of the same line, that are worth a warning.
_SAME_LINE_LIMIT = 3


@dataclass(frozen=True, eq=False)
class CacheEntry:
    """A compiled step, under what selects it.

    Attributes:
        key: the facts of the graph and its inputs, and its options.
        layout: the store of each parameter.
        step: the compiled step; None if there is none yet.
    """

    key: tuple[Hashable, Hashable]
    layout: Hashable
    step: CompiledStep | None


@dataclass(frozen=True, eq=False)
class Situation:
    """The facts that select a step together with the sizes of the inputs.

    Attributes:
        facts: what the captured graph depends on besides its inputs.
        config: key of the graph's options.
        layout: the store of each parameter.
        pattern: the inputs without their sizes, and their marks.
        mode: ``config.dynamic_shapes``; False for a backend that is a function, which gets each size by itself.
        digest: equal on ranks whose situations are equal; 0 in a job of one rank.
    """

    facts: Hashable
    config: Hashable
    layout: Hashable
    pattern: tuple[Hashable, Hashable]
    mode: Mode
    digest: int

    @property
    def kind(self) -> Kind:
        """The kind of inputs whose sizes are followed. A mark counts for later calls of the same kind too."""
        return self.pattern[0], self.mode

    def is_like(self, other: Situation) -> bool:
        """Return whether calls in both situations select equal steps for equal sizes."""
        mine = self.facts, self.config, self.layout, self.pattern
        its = other.facts, other.config, other.layout, other.pattern
        return mine == its

    def key(self, batch: Batch) -> tuple[Hashable, Hashable]:
        """Return the key of the step for a batch whose sizes are resolved."""
        return (self.facts, batch.key()), self.config


@dataclass(eq=False, slots=True)
class Selection:
    """A call on this rank, before the sizes of the other ranks are known.

    Attributes:
        batch: the call's inputs.
        situation: what selects the step besides sizes.
        members: the graph's modules and tensors; None if a snapshot of the last call matched.
        facts: what the captured graph depends on besides its inputs; empty if a snapshot matched.
        repeated: the last call was in the same situation.
    """

    batch: Batch
    situation: Situation
    members: Members | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    repeated: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class LastCall:
    """The inputs of the last call without their values, and the step that it ran.

    Attributes:
        situation: what selected the step besides sizes.
        everybody: the sizes of the inputs on each rank.
        batch: the call's inputs, whose sizes are resolved; without tensors.
        entry: the step that the call ran.
    """

    situation: Situation
    everybody: Sequence[Sequence[int]]
    batch: Batch
    entry: CacheEntry

    def resolve(self, selection: Selection, everybody: Sequence[Sequence[int]]) -> Batch | None:
        """Return the inputs of a call in the same situation, with equal sizes on all ranks; None for any other call."""
        if selection.situation is not self.situation or everybody != self.everybody:
            return None
        return selection.batch.resolved(self.batch.specs, self.batch.sizes, self.batch.variant)


def show_facts(facts: Mapping[str, Any], configuration: str) -> dict[str, str]:
    """Return facts as text. Parameters, buffers and modules are one entry each, so that a difference has a short name.

    Args:
        facts: what a captured graph depends on, by name.
        configuration: the graph's options as text.
    """
    shown = {"configuration": configuration}
    for name, value in facts.items():
        if name in ("parameters", "buffers", "modules"):
            shown |= {f"{name}: {entry[0] or 'the graph'}": str(entry[1:]) for entry in value}
        elif name not in shown:
            shown[name] = str(value)
    return shown


class Recompiles:
    """Count the compilations for each kind of inputs, and keep the facts of the last one."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()
        self._latest_facts: dict[Hashable, Mapping[str, str]] = {}
        self._size_changes: defaultdict[Hashable, list[SizeChange]] = defaultdict(list)

    def count(self, inputs: Hashable, members: Members, facts: Mapping[str, str], doing: str) -> None:
        """Count a compilation. At the eighth for inputs of one kind, warn once and name the ``facts`` that changed.

        Args:
            inputs: the kind of the inputs and the configuration; equal where, but for constants, one step could serve.
            members: those of the graph; the first update of its optimizers may be computed in another way.
            facts: constants, and what else the step depends on, as text by name.
            doing: names the step in messages.
        """
        facts = {**facts, **first_updates(members)}
        before, self._latest_facts[inputs] = self._latest_facts.get(inputs, {}), facts
        self._counts[inputs] += 1
        if self._counts[inputs] == RECOMPILE_LIMIT:
            changed = [name for name, fact in facts.items() if before.get(name) != fact]
            what = ", ".join(changed) or "the buckets of parameters, which another graph lays out in between"
            warnings.warn(
                f"{doing} is compiled for the {RECOMPILE_LIMIT}th time for inputs of one kind; since the last time "
                f"this has changed: {what}\nPass a value that changes in every step as a tensor, or keep it in a "
                "buffer. Keep a value that build() does not need in an object that is not a module.",
                ZeroGraphWarning,
                stacklevel=2,
            )

    def count_sizes(self, kind: Hashable, change: SizeChange | None, doing: str) -> None:
        """Count a compilation for sizes. Warn of a line that each of the last ones failed at, and at the eighth.

        Args:
            kind: the kind of the inputs, without their sizes.
            change: why no earlier step serves the sizes; None where a further dimension has become dynamic.
            doing: names the step in messages.
        """
        if change is None:
            return
        changes = self._size_changes[kind]
        changes.append(change)
        last = changes[-_SAME_LINE_LIMIT:]
        if len(changes) == RECOMPILE_LIMIT:
            problem = f"{doing} is compiled for the {RECOMPILE_LIMIT}th time because of sizes alone"
        elif len(changes) == _SAME_LINE_LIMIT and change.place and len({(one.dims, one.place) for one in last}) == 1:
            problem = f"each of the last {_SAME_LINE_LIMIT} new sizes compiled {doing} again"
        else:
            return
        place = f"\n  {change.place}" if change.place else ""
        warnings.warn(
            f"{problem}: {change.dims} cannot be symbolic, because {change.reason}{place}\n"
            "Use operators on whole tensors for a loop over a dimension, torch.where for a branch on a size, "
            "x.shape[0] for len(x); or pad to few different sizes.",
            ZeroGraphWarning,
            stacklevel=levels_to_user(),
        )
