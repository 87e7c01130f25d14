"""``ZEROGRAPH_LOGS=passes,+memory``: what zerograph says of each step that it compiles, through ``logging``.

The loggers are ``zerograph.passes``, ``zerograph.placement``, ``zerograph.collectives`` and ``zerograph.memory``. A
name alone is level INFO, ``+name`` DEBUG, ``-name`` ERROR; ``all`` is every name. Nothing is worked out for a logger
that is not enabled. Without the variable the loggers are as ``logging`` has them; a program may set levels itself.

============= ================================================ ===============================================
logger        INFO                                             DEBUG
============= ================================================ ===============================================
passes        every pass with its nodes and seconds            and what it changed, as a diff
placement     every input, output and bucket with its SBP      and the placed graph, node by node
collectives   collectives and bytes by phase and kind, and     and every collective
              why ranks of a host do not share memory
memory        the peak and what rests, by kind                 and what is held at the peak, the largest first
============= ================================================ ===============================================
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator

from zerograph.base.sizes import show_bytes
from zerograph.compiler.compiled import RewrittenStep
from zerograph.errors import ConfigError
from zerograph.inspection.diff import compare
from zerograph.inspection.names import close_to, labels
from zerograph.inspection.step import Inspection
from zerograph.ir.memory import profile

VARIABLE = "ZEROGRAPH_LOGS"
NAMES = ("passes", "placement", "collectives", "memory")
_LEVELS = {"+": logging.DEBUG, "-": logging.ERROR}
# As many as anybody reads.
_HOLDERS = 20


def configure() -> None:
    """Do what the environment says, if it has changed since it was looked at last.

    Raises:
        ConfigError: it has a name that there is not.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked == _state.asked:
        return
    levels = parse(asked)
    for name in NAMES:
        logging.getLogger(f"zerograph.{name}").setLevel(levels.get(name, logging.NOTSET))
    root = logging.getLogger("zerograph")
    if levels and not root.handlers:
        root.addHandler(_state.handler)
        # Said once, whatever the root logger does.
        root.propagate = False
    elif not levels and _state.handler in root.handlers:
        root.removeHandler(_state.handler)
        root.propagate = True
    _state.asked = asked


def parse(asked: str) -> dict[str, int]:
    """The level of each logger that is asked for.

    Raises:
        ConfigError: naming what there is not, and what there is.
    """
    found: dict[str, int] = {}
    for one in filter(None, (part.strip() for part in asked.split(","))):
        name = one.lstrip("+-")
        if name not in (*NAMES, "all"):
            raise ConfigError(
                f"{VARIABLE}={asked}: there is no log {name!r}{close_to(name, NAMES)}\n"
                f"There are {', '.join(NAMES)} and all; +name says more, -name only errors."
            )
        level = _LEVELS.get(one[0], logging.INFO)
        found |= dict.fromkeys(NAMES if name == "all" else [name], level)
    return found


class _Standard(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what standard error is at that time."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(_Format())

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _Format(logging.Formatter):
    """Every line with the logger's name and, among several ranks, this one's."""

    def format(self, record: logging.LogRecord) -> str:
        rank = getattr(record, "rank", None)
        head = f"[{record.name}{'' if rank is None else f' rank {rank}'}] "
        return "\n".join(head + line for line in record.getMessage().splitlines())


class _State:
    """What was asked for last, and the handler that was made for it."""

    def __init__(self) -> None:
        self.asked = ""
        self.handler = _Standard()


_state = _State()


def tell(step: RewrittenStep, name: str, rank: int | None = None) -> None:
    """Say of a step what the loggers are enabled for.

    Args:
        name: of the graph.
        rank: this one, where there are several.
    """
    for topic, says in (
        ("passes", _passes),
        ("placement", _placement),
        ("collectives", _collectives),
        ("memory", _memory),
    ):
        logger = logging.getLogger(f"zerograph.{topic}")
        if logger.isEnabledFor(logging.INFO):
            for level, text in says(Inspection(step), more=logger.isEnabledFor(logging.DEBUG)):
                logger.log(level, "%s: %s", name, text, extra={"rank": rank})


Said = Iterator[tuple[int, str]]


def _passes(step: Inspection, *, more: bool) -> Said:
    names = [record.name for record in step.passes]
    texts = step.texts(*names) if more else []
    for number, record in enumerate(step.passes):
        about = f"{record.name:<24} {record.nodes:>6} nodes {record.seconds:>8.3f} s   {record.summary}"
        yield logging.INFO, about
        if more and number:
            found = compare(texts[number - 1], texts[number], (names[number - 1], record.name))
            if found:
                yield logging.DEBUG, found.text


def _placement(step: Inspection, *, more: bool) -> Said:
    found = step.summary
    for value in (*found.inputs, *found.outputs):
        yield logging.INFO, f"{value.name} {value}"
    for bucket in found.buckets:
        gradient = "" if bucket.gradient is None else f", gradient {bucket.gradient}"
        state = "".join(f", {name} {sbp}" for name, sbp in bucket.state.items())
        about = f"{bucket.name} {bucket.dtype} {bucket.sbp}{gradient}{state}{f', {bucket.rests}' * bool(bucket.rests)}"
        yield logging.INFO, f"{about}: {', '.join(bucket.parameters)}"
    if more:
        yield logging.DEBUG, f"graph after place:\n{step.text('place')}"


def _collectives(step: Inspection, *, more: bool) -> Said:
    found = step.summary
    for one in found.sent:
        yield logging.INFO, f"{one.phase:<8} {one.times:>5} {one.kind:<14} {one.bytes:>15,} bytes"
    yield logging.INFO, f"each rank sends {found.bytes_sent:,} bytes per step"
    for each in step.collectives() if more else ():
        yield logging.DEBUG, f"{each.node}: {each}"


def _memory(step: Inspection, *, more: bool) -> Said:
    found = step.summary
    yield logging.INFO, f"peak {found.memory}"
    kinds = ", ".join(f"{kind} {show_bytes(count)}" for kind, count in found.at_rest.items())
    yield logging.INFO, f"between steps {show_bytes(found.memory.at_rest)}: {kinds or 'nothing'}"
    if not more:
        return
    whole = profile(step.emitted)
    names = labels(step.emitted)
    at = whole.bytes.index(whole.peak)
    held = sorted(
        (one for one in whole.storages if one.born <= at <= one.dies), key=lambda one: one.bytes, reverse=True
    )
    for one in held[:_HOLDERS]:
        node = whole.nodes[one.born]
        for owner, storages in whole.of.items():
            if any(each is one for each in storages):
                node = owner
                break
        yield logging.DEBUG, f"{show_bytes(one.bytes):>12} {one.kind:<16} {names[node]}"
