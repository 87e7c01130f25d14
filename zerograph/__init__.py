"""Zerograph: a training step as one placed graph, with the Zero Redundancy Optimizer.

``ZeroGraph`` is the class to subclass; ``sbp``, ``placement``, ``to_global`` and ``to_local`` are for global tensors;
``register_rule`` says how an operator of your own may be split.

``__init__.pyi`` lists the public names. They are imported when they are first asked for: ``import zerograph`` and
commands that need no graph load no torch.

The packages, lowest layer first (``tests/test_layers.py`` holds the order):

``base``         options, disk cache, progress, source locations
``ir``           the graph dialect: SBP, mesh, buckets, metadata, rewriting helpers, memory estimate
``passes``       the pipeline, its passes and rules
``runtime``      process groups, transports, backends, sharded state, executor
``capture``      ``build()`` to one graph
``eager``        global tensors outside of graphs
``optim``        optimizer updates as graphs
``compiler``     the driver
``state``        state dicts, checkpoints, sharded construction
``inspection``   views of a step: text, diffs, report
``planner``      predicted memory and time
``graph``        the front door, :class:`ZeroGraph`
``data``         batches until all ranks are done, outputs of all ranks
``loops``        training loops as users write them
``compat``       the front doors of OneFlow, ColossalAI and DeepSpeed
``integrations`` the front doors of transformers' Trainer, Accelerate and Lightning
``cli``          the commands
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

__version__ = "0.1.1"

# In a checkout without symbolic links, passes/ and runtime/ are found beside this folder.
if not os.path.isdir(os.path.join(os.path.dirname(__file__), "passes")):
    __path__.append(os.path.dirname(os.path.dirname(__file__)))

# The module of each public name, as type checkers read it too.
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
_HOMES = {name.name: each.module for each in _STUB.body if isinstance(each, ast.ImportFrom) for name in each.names}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a public name, or a submodule, and bind it here."""
    home = _HOMES.get(name, "zerograph")
    if home != "zerograph":
        value = getattr(importlib.import_module(home), name)
    elif not name.startswith("__") and importlib.util.find_spec(f"zerograph.{name}") is not None:
        value = importlib.import_module(f"zerograph.{name}")
    else:
        raise AttributeError(f"module 'zerograph' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
