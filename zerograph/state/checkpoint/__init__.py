"""A graph's state as a checkpoint: ``contents`` names the tensors, ``document`` writes what is none, ``save`` and
``load`` move both, ``state`` is the list of it all, and ``export`` reads it without a graph.
"""

from zerograph.state.checkpoint.state import Parts, restore, state_of

__all__ = ["Parts", "restore", "state_of"]
