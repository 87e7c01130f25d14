"""Error classes, one subclass for each kind of mistake, and a part of messages about misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence


def did_you_mean(name: str, names: Iterable[str], most: int = 3) -> str:
    """Return ``; did you mean 'a' or 'b'?`` with the ``most`` closest names, or an empty string if none is close."""
    matches = difflib.get_close_matches(name, list(names), n=most)
    return f"; did you mean {' or '.join(map(repr, matches))}?" if matches else ""


class ZeroGraphError(RuntimeError):
    """Base class of all errors raised by zerograph; the message says what happened, where, and what to do."""


class ZeroGraphWarning(UserWarning):
    """Category of all warnings of zerograph. They point at the user's line."""


class ConfigError(ZeroGraphError):
    """An option, mode, stage, backend or argument does not exist or cannot have the value."""


class UnknownOptionError(ConfigError, AttributeError):
    """An option that does not exist was read; ``hasattr`` and ``getattr`` with a default work."""


class CaptureError(ZeroGraphError):
    """``build()`` or an optimizer does something that cannot be one graph for all values."""


class MemoryBudgetError(ZeroGraphError):
    """A step needs more memory than ``config.memory.memory_budget`` allows, however its collectives are scheduled.

    Attributes:
        missing: bytes by which the peak exceeds the budget.
        activations: bytes of activations at the peak.
        in_buckets: bytes of gathered parameters and of gradients at the peak.
    """

    def __init__(self, message: str, missing: int = 0, activations: int = 0, in_buckets: int = 0) -> None:
        super().__init__(message)
        self.missing, self.activations, self.in_buckets = missing, activations, in_buckets


class OffloadError(ZeroGraphError):
    """A file with offloaded state or parameters cannot be created, read or written, or was changed from outside."""


class CheckpointError(ZeroGraphError):
    """A checkpoint cannot be written, or is missing, damaged, or of another model."""


class InputError(ZeroGraphError):
    """The inputs of a call are not what the graph takes."""


class PlacementError(ZeroGraphError):
    """A placement, an SBP or a global tensor does not fit the graph or the job."""


class SplitParameterError(ZeroGraphError):
    """A parameter was used eagerly while its values are sharded over the ranks."""


class RankMismatchError(ZeroGraphError):
    """Ranks differ in their inputs, graph or configuration, or one of them failed before the step.

    Attributes:
        facts: what was compared, in words by name, of each rank; empty if a rank failed.
    """

    facts: Sequence[Mapping[str, str]] = ()


class ReplicaError(RankMismatchError):
    """A replicated tensor or number is not bitwise equal on all ranks."""


class OperatorError(ZeroGraphError):
    """An operator raised on its values while the step ran; its own error is the ``__cause__``."""


class NonFiniteError(ZeroGraphError):
    """A loss or gradient is infinite or not a number, and ``config.checks.on_nonfinite`` is ``"raise"``."""


class CommunicationError(ZeroGraphError):
    """A collective failed or timed out, usually because another rank died or stalled."""


class VerificationError(ZeroGraphError):
    """A pass violated an invariant of the graph: a bug in the pass."""


class ArtifactError(ZeroGraphError):
    """A compiled step cannot be written to a file, or its file is damaged, or of another step."""
