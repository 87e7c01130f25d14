"""The traced updates of a graph's optimizers, and the hyperparameters that are inputs of the step."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zerograph.base.contexts import collection_paused
from zerograph.capture.captured import Captured
from zerograph.compiler.layout import Update, stays_whole
from zerograph.compiler.members import Members, Optimizers
from zerograph.config import Config
from zerograph.errors import CaptureError
from zerograph.ir.offload import offload_device
from zerograph.ir.update_program import Path, UpdateProgram
from zerograph.optim import Programs, check_separate, hyperparameters, programs_of, trace_update
from zerograph.optim.alone import check_alone, is_separate
from zerograph.optim.coded import with_coded_state
from zerograph.optim.counts import advance, counts_of, without
from zerograph.optim.hyperparameters import NotLiftedError
from zerograph.optim.step_hooks import check_step
from zerograph.optim.surroundings import Attributes, constructed_for, is_known


@dataclass
class Updates:
    """Traces and caches the updates, and lifts hyperparameters that change to inputs of the step.

    Attributes:
        optimizers: those of the graph; an optimizer and a group are known by their numbers.
        scheduled: the hyperparameters, other than the learning rate, that an optimizer's scheduler changes.
    """

    optimizers: Optimizers
    scheduled: dict[int, set[Path]] = field(default_factory=dict)
    _programs: Programs = field(default_factory=Programs)
    # Updates with coded state, by those with exact state.
    _coded: dict[UpdateProgram, UpdateProgram] = field(default_factory=dict)
    # By (optimizer, group): the hyperparameters at the last step.
    _last: dict[tuple[int, int], dict[Path, float]] = field(default_factory=dict)
    # By (optimizer, group): the hyperparameters that are inputs, with the numbers that the update compares them with.
    _lifted: dict[tuple[int, int], dict[Path, set[float]]] = field(default_factory=dict)
    # The hyperparameters that could not be lifted.
    _constant: set[tuple[int, int, Path]] = field(default_factory=set)
    # By (optimizer, group): the numbers that change in each step.
    _counts: dict[tuple[int, int], tuple[Path, ...]] = field(default_factory=dict)
    # By optimizer, for those of users: the attributes, and their values with which parameters are updated as alone.
    _attributes: dict[int, Attributes] = field(default_factory=dict)
    _checked: dict[int, Hashable] = field(default_factory=dict)

    @collection_paused()
    def of(
        self,
        members: Members,
        captured: Captured,
        config: Config,
        traced: Mapping[str, tuple[str, UpdateProgram]] | None = None,
    ) -> dict[str, Update]:
        """Return the update of each parameter that gets a gradient, by parameter name.

        Args:
            traced: updates that another process traced, with the names of their groups, by parameter name. One that
                has other inputs than this process needs is traced again.
        """
        names = members.names
        updates = {}
        for number, optimizer in enumerate(self.optimizers):
            check_step(optimizer)
            for index, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    name = names[id(parameter)]
                    if name in captured.gradients:
                        group_name = f"optimizer{number}.group{index}"
                        traced_name, program = (traced or {}).get(name, ("", None))
                        inputs = {
                            hyperparameters.LR,
                            *self._lifted.get((number, index), ()),
                            *self._counted(number, index),
                        }
                        if program is None or traced_name != group_name or set(program.numbers.values()) != inputs:
                            program = self._program(number, index, parameter, members.device(parameter), config)
                        if config.precision.optimizer_state == "int8" and not program.is_coded:
                            if program not in self._coded:
                                self._coded[program] = with_coded_state(program, name)
                            program = self._coded[program]
                        updates[name] = Update(program, group_name, group, optimizer)
            self._check_alone(number, names)
        return updates

    def expect_changes(self, number: int, scheduler: object) -> None:
        """Make the hyperparameters that a scheduler changes inputs from the first step on."""
        for inner in getattr(scheduler, "_schedulers", ()):
            self.expect_changes(number, inner)
        if getattr(scheduler, "cycle_momentum", False):
            self.scheduled.setdefault(number, set()).update((("momentum",), ("betas", 0)))

    def constants(self, number: int, index: int) -> Mapping[str, Any]:
        """Return an optimizer's group as compiled steps depend on it.

        A hyperparameter that is an input is replaced by the results of the update's comparisons with it. Attributes of
        a user's optimizer are among its first group.
        """
        group = self._constants_of_group(number, index)
        return group if index else {**group, "the optimizer's attributes": self.attributes(number)}

    def _constants_of_group(self, number: int, index: int) -> Mapping[str, Any]:
        group = without(self.optimizers[number].param_groups[index], self._counted(number, index))
        for path, thresholds in self._lifted.get((number, index), {}).items():
            value = hyperparameters.read(group, path)
            group = hyperparameters.replaced(group, path, hyperparameters.sides(value, thresholds))
        if group.get("lr", 0.0) is None:
            group = {**group, "without a rate": True}
        return group

    def _key_of_group(self, number: int, index: int) -> tuple[tuple[str, str], ...]:
        group = self._constants_of_group(number, index)
        return tuple(
            (name, hyperparameters.text_of(value)) for name, value in group.items() if name not in ("params", "lr")
        )

    def attributes(self, number: int) -> tuple[tuple[str, Hashable], ...]:
        """Return the attributes of a user's optimizer and of its parameters, but for counts, with their values."""
        optimizer = self.optimizers[number]
        if is_known(optimizer):
            return ()
        if number not in self._attributes:
            self._attributes[number] = Attributes(optimizer)
        groups = range(len(optimizer.param_groups))
        counts = {hyperparameters.name(path) for index in groups for path in self._counted(number, index)}
        return self._attributes[number].values(counts)

    def all_attributes(self) -> Hashable:
        """Return :meth:`attributes` of all optimizers."""
        return tuple(self.attributes(number) for number in range(len(self.optimizers)))

    def _check_alone(self, number: int, names: Mapping[int, str]) -> None:
        optimizer = self.optimizers[number]
        if is_known(optimizer):
            return
        groups = [
            (self._key_of_group(number, at), *map(id, g["params"])) for at, g in enumerate(optimizer.param_groups)
        ]
        key = (self.attributes(number), *groups)
        if self._checked.get(number) != key:
            check_alone(optimizer, names)
            self._checked[number] = key

    def inputs(self) -> dict[str, float]:
        """Return the present hyperparameters that are inputs of the step, by name."""
        return {
            f"{hyperparameters.name(path)} of group {index} of optimizer {number}": hyperparameters.read(group, path)
            for number, optimizer in enumerate(self.optimizers)
            for index, group in enumerate(optimizer.param_groups)
            for path in (hyperparameters.LR, *self._lifted.get((number, index), ()))
        }

    def advance(self, number: int) -> None:
        """Advance the numbers of an optimizer that count steps, after its update."""
        advance(self.optimizers[number], {index: counts for (n, index), counts in self._counts.items() if n == number})

    def _counted(self, number: int, index: int) -> tuple[Path, ...]:
        if (number, index) not in self._counts:
            optimizer = self.optimizers[number]
            self._counts[number, index] = counts_of(optimizer, optimizer.param_groups[index])
        return self._counts[number, index]

    def lift_changed(self, config: Config) -> None:
        """Lift the hyperparameters that changed since the last step: further changes do not compile again.

        A hyperparameter stays constant if the update uses it in a way that cannot be lifted. Each change then compiles
        again.
        """
        for number, optimizer in enumerate(self.optimizers):
            for index, group in enumerate(optimizer.param_groups):
                now = hyperparameters.numbers(group)
                before = self._last.get((number, index))
                if before is None:
                    # A hyperparameter that a scheduler changes counts as changed.
                    scheduled = self.scheduled.get(number, ())
                    before = {path: math.nan if path in scheduled else value for path, value in now.items()}
                self._last[number, index] = now
                lifted = self._lifted.setdefault((number, index), {})
                for path in now:
                    is_new = path not in lifted and path not in self._counted(number, index)
                    if path in before and before[path] != now[path] and is_new:
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
        """Return the traced update of a parameter of an optimizer's group."""
        optimizer = self.optimizers[number]
        group = optimizer.param_groups[index]
        lifted, counts = self._lifted.get((number, index), {}), self._counted(number, index)
        # A parameter is updated where it is stored.
        whole = stays_whole(parameter, config)
        device = offload_device(config.memory.offload.optimizer, device, whole=whole) or device
        constants = self._key_of_group(number, index)
        # Only this graph has the numbers that the update compares a lifted hyperparameter with.
        owner, programs = programs_of(optimizer, self._programs) if not lifted else (id(optimizer), self._programs)
        constructed = repr(constructed_for(optimizer, parameter))
        kind = (owner, constants, self.attributes(number), constructed, tuple(lifted), counts, parameter.dtype, device)
        key = (*kind, parameter.shape)
        traced = programs.traced
        if kind in traced:
            return traced[kind]
        if key not in traced:
            other_shapes = [program for other, program in traced.items() if other[: len(kind)] == kind]
            program = traced[key] = trace_update(
                optimizer, group, parameter.shape, parameter.dtype, device, other_shapes, tuple(lifted), counts
            )
            for path, thresholds in lifted.items():
                thresholds |= program.thresholds[hyperparameters.name(path)]
        if kind not in programs.separate:
            try:
                check_separate(optimizer, group, parameter.shape, parameter.dtype, device, counts)
            except CaptureError:
                if is_known(optimizer) or not is_separate(optimizer):
                    raise
            programs.separate.add(kind)
        if traced[key].any_shape:
            traced[kind] = traced[key]
        return traced[key]
