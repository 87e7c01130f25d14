"""Note whether a loop clears its gradients, and which gradients a step has used.

A step that is one graph keeps no gradients. In a loop that never clears them they add up over steps: there, as where
gradients are read before the step, the sums stay after it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType

from torch import Tensor

from zerograph.base import source
from zerograph.errors import InputError


@dataclass(eq=False)
class Clearing:
    """Note what happened to the gradients of a loop's optimizers, by the optimizer's number.

    Attributes:
        used: the gradients that a step has used, which exist no more and were not cleared since; with the user's line.
        lost: likewise for gradients that a step did not compute.
    """

    used: dict[int, tuple[str, str]] = field(default_factory=dict)
    lost: dict[int, tuple[str, str]] = field(default_factory=dict)
    # Parameters whose ``grad`` the loop has set to None since.
    _discarded: dict[int, set[int]] = field(default_factory=dict)
    # Whether the loop lets gradients add up over steps.
    _adds_up: dict[int, bool] = field(default_factory=dict)

    def adds_up(self, number: int) -> bool:
        """Return whether the loop does not clear the gradients of an optimizer, as far as its code shows."""
        if number not in self._adds_up:
            self._adds_up[number] = not _is_cleared_by(sys._getframe(1))
        return self._adds_up[number]

    def clear(self, number: int) -> None:
        """Note that the gradients of an optimizer were cleared."""
        self._adds_up[number] = False
        for noted in (self.used, self.lost, self._discarded):
            noted.pop(number, None)

    def discard(self, number: int, parameter: Tensor, trained: Iterable[Tensor]) -> bool:
        """Note that the gradient of a parameter was set to None; return whether now all gradients are cleared.

        Args:
            number: the optimizer that trains it.
            parameter: the parameter.
            trained: all parameters of the optimizer.
        """
        if number not in self.used and number not in self.lost:
            return False
        discarded = self._discarded.setdefault(number, set())
        discarded.add(id(parameter))
        return discarded >= {id(one) for one in trained if one.requires_grad}

    def note(self, used: Iterable[int], lost: Iterable[int]) -> None:
        """Note gradients that a step has used, or lost, and that exist no more."""
        line = source.running_line()
        for number in used:
            self.used[number] = line
            self._discarded.pop(number, None)
        self.lost |= dict.fromkeys(lost, line)

    def check(self, number: int, here: str) -> None:
        """Raise unless the gradients that the last step used were kept or cleared.

        Args:
            number: the optimizer whose step comes next.
            here: the user's line, as a message shows it.

        Raises:
            InputError: they were not.
        """
        at = self.used.get(number) or self.lost.get(number)
        if at is None:
            return
        raise InputError(
            f"optimizer.step(){here}\nwithout zero_grad() since a step that used its gradients\n"
            f"  {at[0]}   {at[1]}\n"
            "In PyTorch they would add up; here that step was one graph, which keeps no gradients. "
            "Call optimizer.zero_grad() before backward(). Or read parameter.grad of one "
            "parameter right before each optimizer.step(): then gradients are kept until zero_grad()."
        )


def _is_cleared_by(frame: FrameType | None) -> bool:
    """Return whether a running function of the loop names ``zero_grad``, or the attribute ``grad``."""
    while frame is not None:
        ours = frame.f_globals.get("__name__", "").startswith("zerograph.loops.")
        if not ours and not {"zero_grad", "grad"}.isdisjoint(frame.f_code.co_names):
            return True
        frame = frame.f_back
    return False
