"""``ZEROGRAPH_LOGS=passes,+memory``: log each step that is compiled, through ``logging``.

The loggers are ``zerograph.passes``, ``zerograph.placement``, ``zerograph.collectives``, ``zerograph.memory`` and
``zerograph.cache``. A name alone sets level INFO, ``+name`` DEBUG, ``-name`` ERROR; ``all`` is every name. Nothing is
computed for a disabled logger. Without the variable, a program may set the level of one of these or of ``zerograph``.
That of the root logger alone, which programs and Ray's workers set to INFO, enables ``cache`` only.

============= ================================================ ===============================================
logger        INFO                                             DEBUG
============= ================================================ ===============================================
passes        every pass with its nodes and seconds            and its changes, as a diff
placement     every input, output and bucket with its SBP      and the placed graph, node by node
collectives   collectives and bytes by phase and kind, and     and every collective
              why ranks of a host do not share memory
memory        the peak and the stored state, by kind           and the tensors live at the peak, largest first
cache         steps read from the cache and written to it,     the same
              and why one was not
============= ================================================ ===============================================
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator

from zerograph.base.sizes import show_bytes
from zerograph.compiler.compiled import PreparedStep
from zerograph.errors import ConfigError, did_you_mean
from zerograph.inspection.diff import compare
from zerograph.inspection.names import labels
from zerograph.inspection.step import Inspection
from zerograph.ir.memory import profile

VARIABLE = "ZEROGRAPH_LOGS"
NAMES = ("passes", "placement", "collectives", "memory", "cache")
_LEVELS = {"+": logging.DEBUG, "-": logging.ERROR}
# Tensors that are listed at the peak, at most.
_LARGEST = 20


def configure() -> None:
    """Set up the loggers as the environment says, if it has changed since the last call.

    Raises:
        ConfigError: it names a log that does not exist.
    """
    value = os.environ.get(VARIABLE, "")
    if value == _handler.variable:
        return
    levels = parse(value)
    for name in NAMES:
        logging.getLogger(f"zerograph.{name}").setLevel(levels.get(name, logging.NOTSET))
    root = logging.getLogger("zerograph")
    if levels and not root.handlers:
        root.addHandler(_handler)
        # Not printed twice, whatever the root logger does.
        root.propagate = False
    elif not levels and _handler in root.handlers:
        root.removeHandler(_handler)
        root.propagate = True
    _handler.variable = value


def parse(value: str) -> dict[str, int]:
    """Return the level of each logger that the variable names.

    Raises:
        ConfigError: it names a log that does not exist.
    """
    levels: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in value.split(","))):
        name = part.lstrip("+-")
        if name not in (*NAMES, "all"):
            raise ConfigError(
                f"{VARIABLE}={value}: there is no log {name!r}{did_you_mean(name, NAMES)}\n"
                f"There are {', '.join(NAMES)} and all; +name logs more, -name only errors."
            )
        level = _LEVELS.get(part[0], logging.INFO)
        levels |= dict.fromkeys(NAMES if name == "all" else [name], level)
    return levels


class _Standard(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the current ``sys.stderr``.

    Attributes:
        variable: the last value of the environment's variable, which the loggers have been set up for.
    """

    variable = ""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(_Format())

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _Format(logging.Formatter):
    """Starts every line with the logger's name and, among several ranks, the rank."""

    def format(self, record: logging.LogRecord) -> str:
        rank = getattr(record, "rank", None)
        head = f"[{record.name}{'' if rank is None else f' rank {rank}'}] "
        return "\n".join(head + line for line in record.getMessage().splitlines())


_handler = _Standard()


def tell(step: PreparedStep, name: str, rank: int | None = None) -> None:
    """Log a step to the enabled loggers.

    Args:
        name: name of the graph.
        rank: this rank if there are several, else None.
    """
    for topic, messages in (
        ("passes", _passes),
        ("placement", _placement),
        ("collectives", _collectives),
        ("memory", _memory),
    ):
        logger = logging.getLogger(f"zerograph.{topic}")
        levels = logger.level, logging.getLogger("zerograph").level
        if any(levels) and logger.isEnabledFor(logging.INFO):
            for level, text in messages(Inspection(step), more=logger.isEnabledFor(logging.DEBUG)):
                logger.log(level, "%s: %s", name, text, extra={"rank": rank})


Messages = Iterator[tuple[int, str]]


def _passes(step: Inspection, *, more: bool) -> Messages:
    names = [record.name for record in step.passes]
    texts = step.texts(*names) if more else []
    for number, record in enumerate(step.passes):
        yield logging.INFO, f"{record.name:<24} {record.nodes:>6} nodes {record.seconds:>8.3f} s   {record.summary}"
        if more and number:
            changes = compare(texts[number - 1], texts[number], (names[number - 1], record.name))
            if changes:
                yield logging.DEBUG, changes.text


def _placement(step: Inspection, *, more: bool) -> Messages:
    summary = step.summary
    for value in (*summary.inputs, *summary.outputs):
        yield logging.INFO, f"{value.name} {value}"
    for bucket in summary.buckets:
        gradient = "" if bucket.gradient is None else f", gradient {bucket.gradient}"
        state = "".join(f", {name} {sbp}" for name, sbp in bucket.state.items())
        location = f", {bucket.location}" if bucket.location else ""
        placed = f"{bucket.name} {bucket.dtype} {bucket.sbp}{gradient}{state}{location}"
        yield logging.INFO, f"{placed}: {', '.join(bucket.parameters)}"
    if more:
        yield logging.DEBUG, f"graph after place:\n{step.text('place')}"


def _collectives(step: Inspection, *, more: bool) -> Messages:
    summary = step.summary
    for sent in summary.sent:
        yield logging.INFO, f"{sent.phase:<8} {sent.times:>5} {sent.kind:<14} {sent.bytes:>15,} bytes"
    yield logging.INFO, f"each rank sends {summary.bytes_sent:,} bytes per step"
    for collective in step.collectives() if more else ():
        yield logging.DEBUG, f"{collective.node}: {collective}"


def _memory(step: Inspection, *, more: bool) -> Messages:
    summary = step.summary
    yield logging.INFO, f"peak {summary.memory}"
    kinds = ", ".join(f"{kind} {show_bytes(count)}" for kind, count in summary.at_rest.items())
    yield logging.INFO, f"between steps {show_bytes(summary.memory.at_rest)}: {kinds or 'nothing'}"
    if not more:
        return
    whole = profile(step.emitted)
    names = labels(step.emitted)
    at = whole.bytes.index(whole.peak)
    live = [storage for storage in whole.storages if storage.born <= at <= storage.dies]
    for storage in sorted(live, key=lambda storage: storage.bytes, reverse=True)[:_LARGEST]:
        owners = (node for node, storages in whole.of.items() if any(each is storage for each in storages))
        name = names[next(owners, whole.nodes[storage.born])]
        yield logging.DEBUG, f"{show_bytes(storage.bytes):>12} {storage.kind:<16} {name}"
