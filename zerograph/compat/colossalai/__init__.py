"""ColossalAI's API over graphs of whole steps: ``launch()``, ``initialize()`` and the engine.

Change a script's import to ``from zerograph.compat import colossalai``; docs/colossalai.md lists what maps to what.
"""

from zerograph.compat.colossalai.engine import Engine
from zerograph.compat.colossalai.initializing import initialize
from zerograph.compat.colossalai.launching import launch, launch_from_torch
from zerograph.state.sharded_init import sharded_init as zero3_model_context

__all__ = ["Engine", "initialize", "launch", "launch_from_torch", "zero3_model_context"]
