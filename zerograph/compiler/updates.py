"""How the optimizers of a graph update its parameters, and which of their numbers are inputs of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zerograph.capture.captured import Captured
from zerograph.compiler.layout import Update, stays_whole
from zerograph.compiler.members import Members, Optimizers
from zerograph.config import Config
from zerograph.ir.offload import offload_device
from zerograph.ir.update_program import Path, UpdateProgram
from zerograph.optim import Programs, check_separate, hyperparameters, programs_of, trace_update
from zerograph.optim.hyperparameters import NotLiftedError


@dataclass
class Updates:
    """Keeps the programs of the updates, and what became of the hyperparameters that changed."""

    optimizers: Optimizers
    # By optimizer: the hyperparameters besides the learning rate that its scheduler changes.
    scheduled: dict[int, set[Path]] = field(default_factory=dict)
    _programs: Programs = field(default_factory=Programs)
    # By (optimizer, group): the floats at the last step; those that are inputs, with what they were compared with.
    _last: dict[tuple[int, int], dict[Path, float]] = field(default_factory=dict)
    _lifted: dict[tuple[int, int], dict[Path, set[float]]] = field(default_factory=dict)
    _constant: set[tuple[int, int, Path]] = field(default_factory=set)

    def of(self, members: Members, captured: Captured, config: Config) -> dict[str, Update]:
        """How each parameter that gets a gradient is updated, by its name."""
        names = members.names()
        found = {}
        for number, optimizer in enumerate(self.optimizers):
            for index, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    name = names[id(parameter)]
                    if name in captured.gradients:
                        program = self._program(number, index, parameter, members.device(parameter), config)
                        found[name] = Update(program, f"optimizer{number}.group{index}", group, optimizer)
        return found

    def expect(self, number: int, scheduler: object) -> None:
        """Note what the scheduler of an optimizer is going to change: it is an input from the first step on."""
        for inner in getattr(scheduler, "_schedulers", ()):
            self.expect(number, inner)
        if getattr(scheduler, "cycle_momentum", False):
            self.scheduled.setdefault(number, set()).update((("momentum",), ("betas", 0)))

    def constants(self, number: int, index: int) -> Mapping[str, Any]:
        """An optimizer's group as compiled steps depend on it: of what is an input, only how it compares."""
        group: Mapping[str, Any] = self.optimizers[number].param_groups[index]
        for path, thresholds in self._lifted.get((number, index), {}).items():
            value = hyperparameters.read(group, path)
            group = hyperparameters.replaced(group, path, hyperparameters.sides(value, thresholds))
        return group

    def lift_changed(self, config: Config) -> None:
        """Make inputs of the hyperparameters that changed since the last step: from now on they need no compiling.

        One that the update uses in a way that is not understood stays a constant: each change compiles anew.
        """
        for number, optimizer in enumerate(self.optimizers):
            for index, group in enumerate(optimizer.param_groups):
                place = number, index
                now = hyperparameters.numbers(group)
                before = self._last.get(place)
                if before is None:
                    # One that a scheduler is going to change counts as changed.
                    scheduled = self.scheduled.get(number, ())
                    before = {path: math.nan if path in scheduled else value for path, value in now.items()}
                self._last[place] = now
                lifted = self._lifted.setdefault(place, {})
                for path in now:
                    if path in before and before[path] != now[path] and path not in lifted:
                        self._lift(number, index, path, config)

    def _lift(self, number: int, index: int, path: Path, config: Config) -> None:
        lifted = self._lifted[number, index]
        if (number, index, path) in self._constant:
            return
        lifted[path] = set()
        try:
            for parameter in self.optimizers[number].param_groups[index]["params"]:
                self._program(number, index, parameter, parameter.device, config)
        except NotLiftedError:
            del lifted[path]
            self._constant.add((number, index, path))

    def _program(
        self, number: int, index: int, parameter: nn.Parameter, device: torch.device, config: Config
    ) -> UpdateProgram:
        optimizer = self.optimizers[number]
        group = optimizer.param_groups[index]
        lifted = self._lifted.get((number, index), {})
        # It is updated where it rests.
        whole = stays_whole(parameter, config)
        device = offload_device(config.optimizer_offload, device, whole=whole) or device
        constants = tuple((k, repr(v)) for k, v in self.constants(number, index).items() if k not in ("params", "lr"))
        # Numbers that the update compared a hyperparameter with are known to this graph only.
        which, programs = programs_of(optimizer, self._programs) if not lifted else (id(optimizer), self._programs)
        kind = (which, constants, tuple(lifted), parameter.dtype, device)
        key = (*kind, parameter.shape)
        traced = programs.traced
        if kind in traced:
            return traced[kind]
        if key not in traced:
            known = [program for other, program in traced.items() if other[: len(kind)] == kind]
            program = traced[key] = trace_update(
                optimizer, group, parameter.shape, parameter.dtype, device, known, tuple(lifted)
            )
            for path, thresholds in lifted.items():
                thresholds |= program.thresholds[hyperparameters.name(path)]
        if kind not in programs.separate:
            check_separate(optimizer, group, parameter.shape, parameter.dtype, device)
            programs.separate.add(kind)
        if traced[key].any_shape:
            traced[kind] = traced[key]
        return traced[key]
