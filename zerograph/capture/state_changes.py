"""What follows from Python state that ``build()`` changed, and from random numbers of Python and numpy that it drew.

``build()`` is traced again, from the state that the first trace left, and the graphs are compared:

* State that the second trace leaves alone was a cache. State that it changes again would go on changing in plain
  PyTorch: such values become guards, so that the step is compiled again as long as they change, with a warning.
* Facts of modules and attributes that the first trace changed and the second leaves alone were set up at the first
  forward: if the graph is the same, the step is kept under the new facts, too.
* Random numbers are drawn as low, then as high as generators give them. If that makes another graph, the step depends
  on numbers that would be the same in every step: an error. If not, they serve something else: a warning.
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
    """What became of the state that a trace changed.

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
    """Compares the state of Python before and after a trace.

    Args:
        state: what can be reached.
        guarded: places that are guards already, by key.
        facts: reads what every step compares of modules and attributes (:mod:`zerograph.capture.guards`).
    """

    def __init__(self, state: PythonState, guarded: Iterable[Place], facts: Callable[[], object]) -> None:
        self._state, self._guarded, self._facts = state, {place.key for place in guarded}, facts
        self._before, self._facts_before = state.snapshot(), facts()

    @contextlib.contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Put all state back if an error is raised inside."""
        try:
            yield
        except BaseException:
            self._before.restore()
            raise

    def after(self, traced: fx.GraphModule, again: Callable[[], fx.GraphModule]) -> StateChanges:
        """Find what the trace changed, and what follows.

        Args:
            traced: the graph of the trace.
            again: traces once more, from the state that there is.

        Raises:
            CaptureError: the graph depends on random numbers of Python or numpy, or on a tensor that a step would
                leave in a container, closure or global for the next one.
        """
        settled = self._state_after(traced, again)
        if settled.guards or self._facts() == self._facts_before:
            return settled
        return replace(settled, valid_after_trace=self._valid_after_trace(traced, again))

    def _valid_after_trace(self, traced: fx.GraphModule, again: Callable[[], fx.GraphModule]) -> bool:
        """Return whether the graph is the same for the facts that the trace left, and whether these then stay."""
        after, left = self._state.snapshot(), self._facts()
        for generator in self._before.random.values():
            generator.put(generator.state)
        try:
            return alike(traced, again()) and self._facts() == left
        finally:
            after.restore()

    def _state_after(self, traced: fx.GraphModule, again: Callable[[], fx.GraphModule]) -> StateChanges:
        after = self._state.snapshot()
        changed, drawn = self._before.changed(after), self._before.drawn(after)
        new = [place for place in changed if place.key not in self._guarded]
        if not new and not drawn:
            self._take_back_tensors(changed)
            return StateChanges()
        settled = StateChanges()
        try:
            told = self._random(drawn, after, again) if drawn else ()
            if new:
                settled = self._counted(traced, new, after, again)
        finally:
            after.restore()
        lost = self._take_back_tensors(changed)
        return StateChanges(settled.guards, (*told, *settled.warnings, *lost))

    def _random(self, drawn: Sequence[str], after: Snapshot, again: Callable[[], fx.GraphModule]) -> tuple[str, ...]:
        self._before.restore()
        _draw(drawn, self._before, low=True)
        with lines_that_change(lambda: [self._before.random[name].read() for name in drawn]) as lines:
            low = again()
        self._before.restore()
        _draw(drawn, after, low=False)
        high = again()
        where = "".join(f"\n  {line}   {code}" for line, code in lines) or f"\n  of {', '.join(drawn)}"
        if not alike(low, high):
            raise CaptureError(
                f"the step depends on random numbers of Python or numpy that build() draws{where}\n"
                "They would be drawn once, while the step is traced, and stay the same in every step. Use torch.rand() "
                "with torch.where(), or draw outside build() and pass a tensor to the graph."
            )
        return (
            f"build() draws random numbers of Python or numpy{where}\n"
            "They are drawn when the step is compiled, not in every step.",
        )

    def _counted(
        self, traced: fx.GraphModule, new: Sequence[Place], after: Snapshot, again: Callable[[], fx.GraphModule]
    ) -> StateChanges:
        after.restore(random=False)
        # As the first trace drew them: then the graphs differ by what the state says.
        for generator in self._before.random.values():
            generator.put(generator.state)
        with lines_that_change(lambda: [place.read() for place in new]) as lines:
            second = again()
        _refuse_tensors(second, new)
        changed = after.changed(self._state.snapshot())
        same = alike(traced, second)
        if not changed and same:
            return StateChanges()
        if not changed:
            # The first step is another one than those after it, and no more than that.
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

    def _take_back_tensors(self, changed: Sequence[Place]) -> tuple[str, ...]:
        """Put back what holds tensors of the trace, which nobody could read after it."""
        stained = [
            place
            for place in changed
            if not place.own
            and (place.read() == _TENSOR if place.steps[-1][0] != "len" else _holds_tensors(place.holder()))
        ]
        for place in stained:
            key = place.key if place.first else id(place.holder())
            self._before.restores.get(key, lambda: None)()
        if not stained:
            return ()
        names = ", ".join(dict.fromkeys(map(_container, stained)))
        return (
            f"build() stores tensors in {names}: after the step they are not there\n"
            "Return from build() what is to be read outside.",
        )


_TENSOR = ("object", "FakeTensor")


def _container(place: Place) -> str:
    """The name of the container whose length a place is, or of the place."""
    return place.name.removeprefix("len(").removesuffix(")") if place.steps[-1][0] == "len" else place.name


def _holds_tensors(value: Any, depth: int = 4) -> bool:
    if isinstance(value, (dict, list, deque, tuple)) and depth:
        return any(_holds_tensors(one, depth - 1) for one in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, _torch.FakeTensor)


def _refuse_tensors(graph: fx.GraphModule, places: Sequence[Place]) -> None:
    """Raise if a graph reads a tensor that the trace before it left.

    Raises:
        CaptureError: it does.
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


def alike(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Return whether two traces are the same graph, constants included."""
    if _code(one) != _code(other):
        return False
    for node in one.graph.find_nodes(op="get_attr"):
        a, b = getattr(one, str(node.target), None), getattr(other, str(node.target), None)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            fake = isinstance(a, _torch.FakeTensor)
            if (a.shape, a.dtype, fake) != (b.shape, b.dtype, isinstance(b, _torch.FakeTensor)):
                return False
            with _torch.no_modes():
                if not fake and not torch.equal(a, b):
                    return False
    return True


def _code(graph: fx.GraphModule) -> str:
    """Its operators and arguments; each trace numbers its local regions anew."""
    return re.sub(r"(zerograph\.local\.default\(.*), \d+\)", r"\1)", graph.code)


@contextlib.contextmanager
def lines_that_change(fingerprint: Callable[[], Any]) -> Iterator[list[tuple[str, str]]]:
    """Yield a list that gets the user's lines, with their code, during which ``fingerprint()`` changes.

    A debugger that follows the program is left alone: then there are no lines.
    """
    lines: list[tuple[str, str]] = []
    if sys.gettrace() is not None:
        yield lines
        return
    latest: list[Any] = [fingerprint(), None]

    def follow(frame: FrameType, event: str, _: Any) -> Any:
        if not source.is_users(frame.f_code.co_filename):
            return None
        now = fingerprint()
        if now != latest[0]:
            latest[0] = now
            if latest[1] is not None and (line := source.described(*latest[1])) not in lines:
                lines.append(line)
        here: FrameType | None = frame
        if event == "return":
            here = frame.f_back
            while here is not None and not source.is_users(here.f_code.co_filename):
                here = here.f_back
        latest[1] = None if here is None else (here.f_code.co_filename, here.f_lineno)
        return follow

    sys.settrace(follow)
    try:
        yield lines
    finally:
        sys.settrace(None)


def _draw(drawn: Sequence[str], other: Snapshot, *, low: bool) -> None:
    """Let generators give their lowest numbers first, or their highest; those of which that is unknown ``other``'s."""
    for name in drawn:
        generator = other.random[name]
        generator.put(_extreme(generator.state, low=low))


# All ones, before the generator tempers it.
_ALL_ONES = 0x12DD9BB3


def _extreme(state: Any, *, low: bool) -> Any:
    """The state of a Mersenne Twister whose next 64 words are all zeros or all ones; another state as it is."""
    words = [0 if low else _ALL_ONES] * 64 + [random.Random(2 * number + low).getrandbits(32) for number in range(560)]
    if isinstance(state, tuple) and len(state) == 3 and isinstance(state[1], tuple) and len(state[1]) == 625:
        return state[0], (*words, 0), None
    if isinstance(state, tuple) and state[0] == "MT19937":
        return state[0], words, 0, 0, 0.0
    return state
