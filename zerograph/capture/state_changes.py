"""Find what Python state ``build()`` changes, and whether it draws random numbers of Python or numpy.

``build()`` is traced again, from the state that the first trace left, and the graphs are compared:

* State that the second trace does not change is a cache. State that it changes again would go on changing in plain
  PyTorch: such values become guards, with a warning that the step is compiled again as long as they change.
* Guards of modules and attributes that only the first trace changed were set up at the first forward. If both graphs
  are equal, the step is valid under the new guards, too.
* Random generators are made to yield their lowest, then their highest numbers. If the graphs differ, the step depends
  on numbers that would be the same in every step, which is an error. If not, the draws only cause a warning.
"""

from __future__ import annotations

import contextlib
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from zerograph import _torch
from zerograph.base import source
from zerograph.capture.python_state import Place, PythonState, Snapshot
from zerograph.errors import CaptureError


@dataclass(frozen=True)
class StateChanges:
    """Consequences of the Python state that a trace changed.

    Attributes:
        guards: places whose values the graph is valid for; each step compares them.
        warnings: messages for the user.
        valid_after_trace: the trace changed guards of modules or attributes, as models do that install hooks at their
            first forward. The graph is the same for the guards that the trace left.
    """

    guards: tuple[Place, ...] = ()
    warnings: tuple[str, ...] = ()
    valid_after_trace: bool = False


class StateComparison:
    """A comparison of Python state before and after a trace.

    Args:
        state: the state that ``build()`` can reach.
        guarded: places that are guards already.
        read_guards: returns the guards of modules and attributes (:mod:`zerograph.capture.guards`).
    """

    def __init__(self, state: PythonState, guarded: Iterable[Place], read_guards: Callable[[], object]) -> None:
        self._state, self._guarded, self._read_guards = state, {place.key for place in guarded}, read_guards
        self._before, self._guards_before = state.snapshot(), read_guards()

    @contextlib.contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Put all state back if an error is raised inside."""
        try:
            yield
        except BaseException:
            self._before.restore()
            raise

    def compare(self, traced: fx.GraphModule, retrace: Callable[[], fx.GraphModule]) -> StateChanges:
        """Return what the trace changed, and what follows.

        Args:
            traced: the graph of the trace.
            retrace: traces once more, from the present state.

        Raises:
            CaptureError: the graph depends on random numbers of Python or numpy, or on a tensor that a step would
                leave in a container, closure or global for the next one.
        """
        changes = self._state_changes(traced, retrace)
        if changes.guards or self._read_guards() == self._guards_before:
            return changes
        return replace(changes, valid_after_trace=self._is_valid_after_trace(traced, retrace))

    def _is_valid_after_trace(self, traced: fx.GraphModule, retrace: Callable[[], fx.GraphModule]) -> bool:
        """Return whether a second trace yields the same graph and leaves the guards of the first one unchanged."""
        after, guards_after = self._state.snapshot(), self._read_guards()
        for generator in self._before.random.values():
            generator.set_state(generator.state)
        try:
            return same_graph(traced, retrace()) and self._read_guards() == guards_after
        finally:
            after.restore()

    def _state_changes(self, traced: fx.GraphModule, retrace: Callable[[], fx.GraphModule]) -> StateChanges:
        after = self._state.snapshot()
        changed, drawn = self._before.changed(after), self._before.drawn(after)
        new = [place for place in changed if place.key not in self._guarded]
        if not new and not drawn:
            self._remove_tensors(changed)
            return StateChanges()
        changes = StateChanges()
        try:
            draw_warnings = self._check_draws(drawn, after, retrace) if drawn else ()
            if new:
                changes = self._compare_with_retrace(traced, new, after, retrace)
        finally:
            after.restore()
        lost_warnings = self._remove_tensors(changed)
        return StateChanges(changes.guards, (*draw_warnings, *changes.warnings, *lost_warnings))

    def _check_draws(
        self, drawn: Sequence[str], after: Snapshot, retrace: Callable[[], fx.GraphModule]
    ) -> tuple[str, ...]:
        """Return a warning about the generators that the trace drew from.

        Raises:
            CaptureError: the graph depends on their numbers.
        """
        self._before.restore()
        _set_extreme(drawn, self._before, low=True)
        with lines_that_change(lambda: [self._before.random[name].get_state() for name in drawn]) as lines:
            low = retrace()
        self._before.restore()
        _set_extreme(drawn, after, low=False)
        high = retrace()
        where = "".join(f"\n  {line}   {code}" for line, code in lines) or f"\n  of {', '.join(drawn)}"
        if not same_graph(low, high):
            raise CaptureError(
                f"the step depends on random numbers of Python or numpy that build() draws{where}\n"
                "They would be drawn once, while the step is traced, and stay the same in every step. Use torch.rand() "
                "with torch.where(), or draw outside build() and pass a tensor to the graph."
            )
        return (
            f"build() draws random numbers of Python or numpy{where}\n"
            "They are drawn when the step is compiled, not in every step.",
        )

    def _compare_with_retrace(
        self, traced: fx.GraphModule, new: Sequence[Place], after: Snapshot, retrace: Callable[[], fx.GraphModule]
    ) -> StateChanges:
        """Trace again from the state after the first trace, and return what the differences mean."""
        after.restore(random=False)
        # Both traces draw the same random numbers, so that only the state makes the graphs differ.
        for generator in self._before.random.values():
            generator.set_state(generator.state)
        with lines_that_change(lambda: [place.read() for place in new]) as lines:
            second = retrace()
        _refuse_tensors(second, new)
        changed = after.changed(self._state.snapshot())
        same = same_graph(traced, second)
        if not changed and same:
            return StateChanges()
        if not changed:
            # Only the first step differs from the later ones.
            return StateChanges(tuple(new))
        names = ", ".join(dict.fromkeys(place.name for place in changed))
        where = "".join(f"\n  {line}   {code}" for line, code in lines)
        if same and all(place.steps[-1][0] == "len" or place.read() == _TENSOR for place in changed):
            collected = [
                place for place in changed if place.steps[-1][0] == "len" and not _holds_tensors(place.holder())
            ]
            names = ", ".join(dict.fromkeys(map(_container, collected)))
            message = (
                f"build() adds to {names}{where}\n"
                "It runs only while a step is compiled: other steps add nothing. Return from build() what is to "
                "be collected."
            )
            return StateChanges((), (message,) if collected else ())
        return StateChanges(
            tuple(new),
            (
                f"build() changes Python state that differs after each step: {names}{where}\n"
                "The step is compiled again in every step, as long as it changes. Keep it in a buffer, change it "
                "outside build(), or pass it to the graph as a tensor.",
            ),
        )

    def _remove_tensors(self, changed: Sequence[Place]) -> tuple[str, ...]:
        """Restore the places that hold tensors of the trace, which have no values after it; return a warning."""
        with_tensors = [
            place
            for place in changed
            if not place.own
            and (place.read() == _TENSOR if place.steps[-1][0] != "len" else _holds_tensors(place.holder()))
        ]
        for place in with_tensors:
            key = place.key if place.is_in_root else id(place.holder())
            self._before.restores.get(key, lambda: None)()
        if not with_tensors:
            return ()
        names = ", ".join(dict.fromkeys(map(_container, with_tensors)))
        return (
            f"build() stores tensors in {names}: after the step they are not there\n"
            "Return from build() what is to be read outside.",
        )


_TENSOR = ("object", "FakeTensor")


def _container(place: Place) -> str:
    """Return the name of the container whose length the place is, or of the place itself."""
    return place.name.removeprefix("len(").removesuffix(")") if place.steps[-1][0] == "len" else place.name


def _holds_tensors(value: Any, depth: int = 4) -> bool:
    if isinstance(value, (dict, list, deque, tuple)) and depth:
        return any(_holds_tensors(entry, depth - 1) for entry in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, _torch.FakeTensor)


def _refuse_tensors(graph: fx.GraphModule, places: Sequence[Place]) -> None:
    """Refuse a graph that reads a tensor of the trace before it.

    Raises:
        CaptureError: the graph reads one.
    """
    for node in graph.graph.find_nodes(op="get_attr"):
        constant = getattr(graph, str(node.target))
        if isinstance(constant, _torch.FakeTensor):
            names = [place.name for place in places if place.read() == _TENSOR or place.steps[-1][0] == "len"]
            raise CaptureError(
                f"build() reads a tensor of shape {tuple(constant.shape)} that the step before is to leave in "
                f"{', '.join(names) or 'Python state'}: what is computed stays in buffers only\n"
                "Register a buffer in __init__ and write to it with copy_(), or return the tensor and pass it to the "
                "next step."
            )


def same_graph(first: fx.GraphModule, second: fx.GraphModule) -> bool:
    """Return whether two traces are the same graph, constants included."""
    if _code(first) != _code(second):
        return False
    for node in first.graph.find_nodes(op="get_attr"):
        a, b = getattr(first, str(node.target), None), getattr(second, str(node.target), None)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            fake = isinstance(a, _torch.FakeTensor)
            if (a.shape, a.dtype, fake) != (b.shape, b.dtype, isinstance(b, _torch.FakeTensor)):
                return False
            with _torch.no_modes():
                if not fake and not torch.equal(a, b):
                    return False
    return True


def _code(graph: fx.GraphModule) -> str:
    """Return the graph's code without the numbers of local regions, which differ in each trace."""
    return re.sub(r"(zerograph\.local\.default\(.*), \d+\)", r"\1)", graph.code)


@contextlib.contextmanager
def lines_that_change(fingerprint: Callable[[], Any]) -> Iterator[list[tuple[str, str]]]:
    """Yield a list that collects the user's lines, with their code, during which ``fingerprint()`` changes.

    It stays empty under a debugger, whose trace function is not replaced.
    """
    lines: list[tuple[str, str]] = []
    if sys.gettrace() is not None:
        yield lines
        return
    value = fingerprint()
    running: tuple[str, int] | None = None

    def follow(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal value, running
        if not source.is_users(frame.f_code.co_filename):
            return None
        present = fingerprint()
        if present != value:
            value = present
            if running is not None and (line := source.described(*running)) not in lines:
                lines.append(line)
        here: FrameType | None = frame
        if event == "return":
            here = frame.f_back
            while here is not None and not source.is_users(here.f_code.co_filename):
                here = here.f_back
        running = None if here is None else (here.f_code.co_filename, here.f_lineno)
        return follow

    sys.settrace(follow)
    try:
        yield lines
    finally:
        sys.settrace(None)


def _set_extreme(drawn: Sequence[str], snapshot: Snapshot, *, low: bool) -> None:
    """Make generators yield their lowest or highest numbers next; unknown kinds get the snapshot's state."""
    for name in drawn:
        generator = snapshot.random[name]
        generator.set_state(_extreme(generator.state, low=low))


# The generator's tempering turns this word into all ones.
_ALL_ONES = 0x12DD9BB3


def _extreme(state: Any, *, low: bool) -> Any:
    """Return a Mersenne Twister state whose next 64 words are all zeros or all ones; any other state unchanged."""
    words = [0 if low else _ALL_ONES] * 64 + [random.Random(2 * number + low).getrandbits(32) for number in range(560)]
    if isinstance(state, tuple) and len(state) == 3 and isinstance(state[1], tuple) and len(state[1]) == 625:
        return state[0], (*words, 0), None
    if isinstance(state, tuple) and state[0] == "MT19937":
        return state[0], words, 0, 0, 0.0
    return state
