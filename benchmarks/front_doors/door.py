"""The line of a script that differs between one process and ZeRO."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH = 8


@dataclass(frozen=True)
class Door:
    """How a script is run. Each script calls one of the methods in one line, the one that a user changes.

    Attributes:
        folder: of the script's files.
        stage: the ZeRO stage; None: the script as it is without zerograph.
        ranks: number of processes.
        accumulation: micro-batches of a step.
        steps: number of steps.
    """

    folder: Path
    stage: int | None
    ranks: int
    accumulation: int
    steps: int

    @property
    def batch_size(self) -> int:
        """Samples of a micro-batch in one process."""
        return BATCH // self.ranks

    def trainer(self, plain: Any) -> Any:
        """Return a trainer of transformers or TRL: ``class Trainer(ZeroTrainerMixin, plain)``."""
        if self.stage is None:
            return plain
        from zerograph.integrations.transformers import ZeroTrainerMixin

        return functools.partial(type(plain.__name__, (ZeroTrainerMixin, plain), {}), zero=self.stage)

    def accelerator(self) -> Callable[..., Any]:
        """Return the class ``Accelerator``: ``from zerograph.integrations.accelerate import Accelerator``."""
        if self.stage is None:
            from accelerate import Accelerator

            return Accelerator
        from zerograph.integrations.accelerate import Accelerator as ZeroAccelerator

        return functools.partial(ZeroAccelerator, zero=self.stage)

    def strategy(self) -> Any:
        """Return the strategy of a Lightning trainer: ``strategy=ZeroStrategy()``."""
        if self.stage is None:
            return "auto"
        from zerograph.integrations.lightning import ZeroStrategy

        return ZeroStrategy(self.stage)

    def prepare(self, *objects: Any) -> Any:
        """Return the objects of a plain loop: ``model, optimizer, loader = zg.prepare(model, optimizer, loader)``."""
        if self.stage is None:
            return objects if len(objects) > 1 else objects[0]
        import zerograph as zg

        return zg.prepare(*objects, stage=self.stage)


def missing(names: Iterable[str]) -> list[str]:
    """Return the packages of these that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]
