"""A step that is compiled again and again for equal inputs: somebody should be told what keeps changing."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Mapping

from zerograph.compiler.members import Members, first_updates

# As often torch.compile compiles a function before it gives up.
MANY = 8


class Recompiles:
    """How often each kind of inputs was compiled for, and from what the step was made the last time."""

    def __init__(self) -> None:
        self._times: Counter[Hashable] = Counter()
        self._latest: dict[Hashable, Mapping[str, str]] = {}

    def note(self, inputs: Hashable, members: Members, facts: Mapping[str, str], doing: str) -> None:
        """One more; warns once, at the eighth for equal inputs, of the ``facts`` that are not as they were before.

        Args:
            inputs: equal for inputs, and a configuration, that one compiled step could take, but for constants.
            members: of the graph, whose optimizers may have a first update that is computed in another way.
            facts: what the step depends on besides, and constants, by what messages call it.
            doing: names the step.
        """
        facts = {**facts, **first_updates(members)}
        before, self._latest[inputs] = self._latest.get(inputs, {}), facts
        self._times[inputs] += 1
        if self._times[inputs] == MANY:
            changed = [name for name, fact in facts.items() if before.get(name) != fact]
            what = ", ".join(changed) or "where parameters lie, which another graph changes in between"
            warnings.warn(
                f"{doing} is compiled for the {MANY}th time for inputs of one kind; since the last time this has "
                f"changed: {what}\nWhat changes in every step belongs into a tensor that is given, or a buffer; what "
                "build() does not need, into an object that is no module.",
                stacklevel=2,
            )
