"""Save a graph's state as a checkpoint and load it.

``contents`` names the tensors. ``document`` encodes everything else as JSON, and ``written`` decodes and checks it.
``save`` and ``load`` move both, ``state`` lists everything that a checkpoint holds, ``folder`` orders the checkpoints
of a folder, and ``export`` reads a checkpoint without a graph.
"""

from zerograph.state.checkpoint.state import Parts, restore, state_of

__all__ = ["Parts", "restore", "state_of"]
