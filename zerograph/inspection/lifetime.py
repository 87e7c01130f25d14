"""The result of :func:`zerograph.inspection.explain.explain`: a tensor and the events of its lifetime in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zerograph.base.sizes import show_bytes
from zerograph.inspection.text import shapes

TensorKind = Literal["parameter", "optimizer state", "buffer", "input", "value"]


@dataclass(frozen=True)
class Event:
    """One event of a tensor's lifetime.

    Attributes:
        what: ``"stored"``, ``"fetched"``, ``"cast"``, ``"gather starts"``, ``"gather ends"``, ``"used"``, ``"freed"``,
            ``"gradient made"``, ``"reduction starts"``, ``"reduction ends"``, ``"updated"``, ``"made"``, ...
        node: name in the emitted graph; empty between steps.
        at: index of the node in the emitted graph; bodies of loops count once. None between steps.
        times: number of occurrences per step: one per micro-batch inside their loop.
        phase, module: origin of the node.
        source: the user's ``file:line``; ``code`` is the text of that line.
        bytes: sent by this rank, or stored, or freed.
        note: details in words.
    """

    what: str
    node: str = ""
    at: int | None = None
    times: int = 1
    phase: str = ""
    module: str = ""
    source: str = ""
    code: str = ""
    bytes: int = 0
    note: str = ""

    def __str__(self) -> str:
        place = "     -" if self.at is None else f"{self.at:>6}"
        where = " ".join(filter(None, (self.phase, self.module))) or "between steps"
        size = f"{'sends ' * (self.what.endswith('starts'))}{show_bytes(self.bytes)}" if self.bytes else ""
        about = ", ".join(filter(None, (self.note, size, f"{self.times} times" * (self.times > 1))))
        line = f"{place}  {self.what:<17} {where}{f': {about}' if about else ''}"
        # The source line matters for computations only.
        if self.what not in ("used", "made", "gradient made") or not self.source:
            return line
        return f"{line}\n{' ' * 26}{self.source}{f'   {self.code}' if self.code else ''}"


@dataclass(frozen=True)
class Life:
    """A tensor's lifetime, in the order of the step.

    Attributes:
        name: qualified name; ``asked`` is the name that was asked for, for example another name of a tied parameter.
        kind: parameter, optimizer state, buffer, input, or a value that the step computes.
        dtype, shape: of the global tensor; ``local`` is the shape of this rank's part where it is stored or computed.
        sbp: where it is stored or computed.
        bucket: its bucket, if it has one.
        bytes: size of this rank's part.
        events: in order.
    """

    name: str
    asked: str
    kind: TensorKind
    dtype: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    sbp: str
    bucket: str | None
    bytes: int
    events: tuple[Event, ...]

    def of(self, what: str) -> tuple[Event, ...]:
        """Return the events of one kind."""
        return tuple(event for event in self.events if event.what == what)

    def __str__(self) -> str:
        alias = "" if self.name == self.asked else f" (asked for as {self.asked})"
        bucket = f", in {self.bucket}" if self.bucket else ""
        head = f"{self.name}{alias}: {self.kind}, {self.dtype} {self.sbp} {shapes(self.shape, self.local)}{bucket}"
        return "\n".join([head, "  node  what              where", *map(str, self.events)])
