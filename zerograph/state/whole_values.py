"""Whole values that a user may write: equal on all ranks, or nothing is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerograph.compiler.members import Members
from zerograph.errors import CommunicationError, ConfigError, RankMismatchError
from zerograph.ir.sbp import is_dtensor
from zerograph.runtime.checkpoint.file_tensor import FileTensor
from zerograph.runtime.job.exchange import broadcast_from
from zerograph.runtime.job.process_group import Job, agree, agreeing, digest
from zerograph.runtime.state import Store, StoredState, guarded_state, in_memory, reshard, store_of, text_of, unshard
from zerograph.runtime.tensor_hash import hash_bits
from zerograph.state import state_dict
from zerograph.state.checks import check_optimizer_state

_END = "the end of full_parameters()"


class WholeValues:
    """Parameters, optimizer state and buffers that are whole until :meth:`end`.

    Args:
        job: the ranks.
        members: the modules.
        stores: the stores of their parameters, sharded.
        modifier_rank: the rank whose changes count; None: those that all ranks make.
    """

    def __init__(self, job: Job, members: Members, stores: Sequence[Store], modifier_rank: int | None) -> None:
        self._job, self._members, self._stores, self._modifier_rank = job, members, stores, modifier_rank
        self._compares = job.size > 1
        self._states = [state for store in stores if (state := guarded_state(store.optimizer)) is not None]
        self._states = list({id(state): state for state in self._states}.values())
        self._buffers: dict[str, Tensor] = {}
        self._plain: dict[str, nn.Parameter] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        if self._compares:
            self._buffers = {name: one for name, one in members.buffers.items() if not is_dtensor(one)}
            # As the first step would, which moves them into stores.
            self._plain = {name: one for name, one in members.parameters.items() if _is_plain(one)}
            with torch.no_grad():
                broadcast_from(job, [one.detach() for one in self._plain.values()])
            unsplit = [in_memory(store.flat) for store in stores if store.layout.is_whole]
            whole = (*unsplit, *self._plain.values(), *self._buffers.values())
            self._copies = [(tensor, tensor.detach().clone()) for tensor in whole]
        unshard(stores)
        for state in self._states:
            state.open(job)

    def end(self, problem: BaseException | None) -> None:
        """Keep the changes if all ranks have made the same ones, else restore the values from before. A collective.

        Args:
            problem: the error of the block on this rank.

        Raises:
            RankMismatchError: on every rank: values differ, or the block failed on another rank.
            BaseException: this rank's own ``problem``.
        """
        keeps = False
        try:
            if not self._compares:
                keeps = problem is None or self._job.size == 1
            # All ranks have had an error of theirs already if one has found them apart.
            is_known = isinstance(problem, (GeneratorExit, RankMismatchError, CommunicationError))
            if problem is not None and (is_known or not self._compares):
                raise problem
            if self._compares and self._modifier_rank is not None:
                agree(self._job, _END, 0, dict, problem)
                self._broadcast(self._modifier_rank)
            elif self._compares:
                facts = self._facts() if problem is None else {}
                agree(self._job, _END, digest(facts), lambda: facts, problem)
            changes = _changes(self._states)
            keeps = True
        finally:
            if not keeps:
                for tensor, copy in self._copies:
                    with torch.no_grad():
                        tensor.copy_(copy)
            for state in self._states:
                state.close()
            for store in self._stores:
                reshard(store, keep_changes=keeps)
        for optimizer, changed in changes:
            state_dict.load_optimizer(optimizer, changed)

    def _facts(self) -> dict[str, str]:
        """Return texts of what all ranks must have alike, by name."""
        names = self._members.names
        facts = {
            names.get(id(parameter), "a parameter of another module"): text_of(parameter.detach())
            for parameter in self._parameters()
        }
        before = {id(tensor): copy for tensor, copy in self._copies}
        for name, buffer in self._buffers.items():
            changed = int(hash_bits(buffer)) != int(hash_bits(before[id(buffer)]))
            facts[name] = text_of(buffer) if changed else "as before"
        return facts | _written(self._states)

    def _parameters(self) -> list[nn.Parameter]:
        return [*(one for store in self._stores for one in store.parameters), *self._plain.values()]

    def _broadcast(self, rank: int) -> None:
        """Overwrite parameters and buffers with those of a rank."""
        parameters = [parameter.detach() for parameter in self._parameters()]
        with torch.no_grad():
            broadcast_from(self._job, [*parameters, *self._buffers.values()], rank)


def check_modifier(job: Job, rank: int | None) -> None:
    """Check that a rank whose values all ranks are to get is one of the job.

    Raises:
        ConfigError: it is not.
    """
    if rank is not None and not (type(rank) is int and 0 <= rank < job.size):
        raise ConfigError(f"full_parameters(modifier_rank={rank!r}): the job has ranks 0 to {job.size - 1}")


def _is_plain(parameter: nn.Parameter) -> bool:
    return store_of(parameter) is None and not is_dtensor(parameter) and not parameter.is_meta


def keep_states(job: Job, states: Sequence[StoredState]) -> None:
    """Store the states of optimizers that were whole, with their changes. A collective.

    Raises:
        RankMismatchError: ranks have made other changes. None is kept.
        ConfigError: a state is none of such an optimizer.
    """
    try:
        with agreeing(job, "the end of a change of optimizer.state") as facts:
            facts |= _written(states)
        changes = _changes(states)
    finally:
        for state in states:
            state.close()
    for optimizer, changed in changes:
        state_dict.load_optimizer(optimizer, changed)


def _written(states: Sequence[StoredState]) -> dict[str, str]:
    """Return texts of the states that were read, by name."""
    return {f"{type(one.optimizer).__name__}'s {k}": v for one in states for k, v in (one.written() or {}).items()}


def _changes(states: Sequence[StoredState]) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """Return the optimizers whose state has changed, with states that they can load."""
    changes: list[tuple[torch.optim.Optimizer, dict[str, Any]]] = []
    for state in states:
        if (entries := state.changes()) is not None:
            groups = state_dict.numbered_groups(state.optimizer)
            changes.append((state.optimizer, {"state": entries, "param_groups": groups}))
            check_optimizer_state(*changes[-1])
    return changes


def loaded_facts(state: Mapping[str, Any]) -> dict[str, str]:
    """Return texts of what ``load_state_dict()`` is about to load, which all ranks must have alike, by name.

    Values that are still in files count by their shape: each rank reads its rows only.

    Args:
        state: the state of a graph.
    """
    modules = state.get("modules", {}).items()
    facts = {f"{module}.{name}": _text(value) for module, entries in modules for name, value in entries.items()}
    for number, optimizer in enumerate(state.get("optimizers", ())):
        for key, entries in optimizer.get("state", {}).items():
            facts |= {f"{name} of parameter {key} of optimizer {number}": _text(v) for name, v in entries.items()}
        facts[f"the groups of optimizer {number}"] = text_of(optimizer["param_groups"])
    for name in ("lr_schedulers", "steps_done", "grad_scaler", "random"):
        facts[name] = text_of(state.get(name))
    return facts


def _text(value: Any) -> str:
    if isinstance(value, FileTensor):
        return f"{tuple(value.shape)} {value.dtype} of a file"
    # Ranks hold parts of a global tensor.
    return "a global tensor" if isinstance(value, Tensor) and is_dtensor(value) else text_of(value)
