"""What :func:`zerograph.inspection.explain.explain` tells: a tensor, and everything that happens to it in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zerograph.base.sizes import show_bytes
from zerograph.inspection.text import shapes

TensorKind = Literal["parameter", "optimizer state", "buffer", "input", "value"]


@dataclass(frozen=True)
class Event:
    """Something that happens to the tensor.

    Attributes:
        what: ``"stored"``, ``"fetched"``, ``"cast"``, ``"gather starts"``, ``"gather ends"``, ``"used"``, ``"freed"``,
            ``"gradient made"``, ``"reduction starts"``, ``"reduction ends"``, ``"updated"``, ``"made"``, ...
        node: its name in the emitted graph; empty for what is so between steps.
        at: the node's place in the emitted graph, from 0; bodies of loops count once. None between steps.
        times: how often it happens in a step: once for each micro-batch inside their loop.
        phase, module, source, code: where the node comes from; ``source`` is ``file:line``, ``code`` what stands there.
        bytes: sent by this rank where something is sent, else held or freed.
        note: more about it, in words.
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
        # Who computes: of what only moves and frees it is enough to know where.
        if self.what not in ("used", "made", "gradient made") or not self.source:
            return line
        return f"{line}\n{' ' * 26}{self.source}{f'   {self.code}' if self.code else ''}"


@dataclass(frozen=True)
class Life:
    """A tensor's life, in the order of the step.

    Attributes:
        name: as zerograph calls it; ``asked`` is what was asked for, another name of a tied parameter for instance.
        kind: parameter, optimizer state, buffer, input, or a value that the step computes.
        dtype, shape: of the global tensor; ``local`` is this rank's shape of it where it is stored or made.
        sbp: where it is stored, or made.
        bucket: the bucket that it lies in, if it lies in one.
        bytes: of it on this rank where it is stored, or made.
        events: what happens.
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
        """The events of one kind."""
        return tuple(one for one in self.events if one.what == what)

    def __str__(self) -> str:
        known_as = "" if self.name == self.asked else f" (asked for as {self.asked})"
        bucket = f", in {self.bucket}" if self.bucket else ""
        head = f"{self.name}{known_as}: {self.kind}, {self.dtype} {self.sbp} {shapes(self.shape, self.local)}{bucket}"
        return "\n".join([head, "  node  what              where", *map(str, self.events)])
