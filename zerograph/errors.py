"""Every error that zerograph raises on purpose: one root, one child per kind of mistake."""

from __future__ import annotations


class ZeroGraphError(RuntimeError):
    """Root of all errors raised by zerograph; its message says what happened, where, and what to do."""


class ConfigError(ZeroGraphError):
    """An option, mode, stage or backend that does not exist or cannot hold the given value."""


class UnknownOptionError(ConfigError, AttributeError):
    """An option was read that does not exist; ``hasattr`` and ``getattr`` with a default see what they expect."""


class CaptureError(ZeroGraphError):
    """``build()`` or an optimizer does something that cannot be one graph for all values."""


class MemoryBudgetError(ZeroGraphError):
    """A step needs more memory than ``config.memory_budget`` allows, however its collectives are scheduled.

    Attributes:
        missing: bytes that it needs more.
        activations: bytes of activations at its peak.
        in_buckets: bytes of gathered parameters and of gradients there.
    """

    def __init__(self, message: str, missing: int = 0, activations: int = 0, in_buckets: int = 0) -> None:
        super().__init__(message)
        self.missing, self.activations, self.in_buckets = missing, activations, in_buckets


class OffloadError(ZeroGraphError):
    """A file that optimizer state or parameters rest in cannot be made, read or written, or has been tampered with."""


class CheckpointError(ZeroGraphError):
    """A checkpoint that cannot be written, or is missing, damaged, or of something else."""


class InputError(ZeroGraphError):
    """What was given to a graph is not what it takes."""


class PlacementError(ZeroGraphError):
    """A placement, an SBP or a global tensor that does not fit the graph or the job."""


class SplitParameterError(ZeroGraphError):
    """A parameter was used eagerly while its values are split between the ranks."""


class RankMismatchError(ZeroGraphError):
    """Ranks were about to do different things: other inputs, another graph, or one of them failed."""


class ReplicaError(RankMismatchError):
    """What every rank holds alike is not bitwise equal on all of them."""


class OperatorError(ZeroGraphError):
    """An operator of the running step refused the values that it got; its own error is the ``__cause__``."""


class NonFiniteError(ZeroGraphError):
    """A loss or gradient is infinite or not a number, and ``config.on_nonfinite`` is ``"raise"``."""


class CommunicationError(ZeroGraphError):
    """A collective failed or timed out, usually because another rank died or stalls."""


class VerificationError(ZeroGraphError):
    """A pass left the step graph in a state that breaks one of its invariants: a bug in the pass."""
