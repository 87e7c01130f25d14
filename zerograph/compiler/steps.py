"""The compiled steps of one graph, and the one that serves a call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zerograph.base.source import levels_to_user
from zerograph.compiler.batch import Batch, read_batch
from zerograph.compiler.compiled import CompiledStep
from zerograph.compiler.compiler import Compiler
from zerograph.compiler.dependencies import Dependencies
from zerograph.compiler.dimensions import Dimensions, Kind, Mode, local_sizes
from zerograph.compiler.dynamic_memory import keeps_budget
from zerograph.compiler.input_layout import batch_on
from zerograph.compiler.members import (
    Members,
    Tree,
    adopt_global,
    capture_facts,
    check_devices,
    current,
    has_global,
    layout_facts,
    model_sizes,
)
from zerograph.compiler.plain_inputs import check_whole, digests_of_whole
from zerograph.compiler.preparation import check_target
from zerograph.compiler.selection import CacheEntry, LastCall, Recompiles, Selection, Situation, show_facts
from zerograph.compiler.snapshot import Call, Snapshot, take_snapshot
from zerograph.errors import CommunicationError, InputError, MemoryBudgetError, ZeroGraphWarning
from zerograph.ir.mesh import Mesh
from zerograph.optim.step_hooks import refuse_hooks_before
from zerograph.runtime.job.process_group import Job, agree, digest
from zerograph.runtime.optimizer_state import guarded_state
from zerograph.runtime.state import Store, stores_of


class Steps:
    """The compiled steps of one graph. A call selects one, or has a new one compiled.

    Args:
        compiler: compiles them.
        attributes: returns the graph's public attributes, by name.
        state: returns these and the private attributes that are the user's.

    Attributes:
        compilations: number of compilations so far. Ranks that have compiled equally often know the same steps.
    """

    def __init__(
        self,
        compiler: Compiler,
        attributes: Callable[[], Mapping[str, Any]],
        state: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.compilations = 0
        self._compiler, self._attributes, self._state = compiler, attributes, state
        self._steps: dict[Hashable, CompiledStep] = {}
        self._digests: dict[Hashable, int] = {}
        self._recompiles = Recompiles()
        self._tree: Tree | None = None
        self._dimensions = Dimensions()
        self._snapshot: Snapshot | None = None
        self._last_call: LastCall | None = None
        self._last_situation: Situation | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def members(self) -> Members:
        """Return the graph's present modules and tensors."""
        return self._current().members

    def adopted(self, job: Callable[[], Job]) -> Members:
        """Return the members, after replacing those that are global tensors by plain ones.

        Args:
            job: returns the ranks; called only if there are such tensors.
        """
        members = self.members()
        if not has_global(members):
            return members
        adopt_global(members, self._compiler.optimizers, job())
        return self.members()

    def inputs_on(
        self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any], device: str
    ) -> tuple[Members, Batch, Hashable]:
        """Return the members and the batch as they would be on the mesh and device, and the key of their capture."""
        check_target(mesh, device)
        refuse_hooks_before(self._compiler.optimizers)
        members = replace(self.members(), meta=torch.device(device))
        grid = torch.arange(mesh.size).view(mesh.shape).tolist()
        config = self._compiler.config
        batch = self._read((args, kwargs), mesh, grid, members.meta)
        kind = batch.pattern()[0], config.dynamic_shapes
        # Sizes of calls leave no trace here: only marked dimensions are dynamic, or all.
        sizes = [local_sizes(batch)] * mesh.size
        batch = Dimensions().resolve(batch, kind, sizes, mesh, grid, lambda: model_sizes(members))
        facts = self._facts(members)
        return members, batch, (tuple(facts.values()), batch.key(), members.meta)

    def _read(
        self, arguments: tuple[tuple[Any, ...], dict[str, Any]], mesh: Mesh, grid: Any, meta: torch.device | None = None
    ) -> Batch:
        config = self._compiler.config
        plain = batch_on(config, mesh)
        return read_batch(*arguments, mesh, grid, plain, self._compiler.micro_batches, meta, config.sequence_parallel)

    def dependencies(self, members: Members, facts: Mapping[str, Any] | None = None) -> Dependencies:
        """Return what a captured graph depends on besides its inputs.

        Args:
            facts: those of the graph now, if they are known.
        """

        def shown(facts: Mapping[str, Any]) -> dict[str, str]:
            texts = show_facts(facts, "")
            del texts["configuration"]
            return texts

        compiler = self._compiler
        return Dependencies(
            shown(self._facts(members) if facts is None else facts),
            lambda: shown(self._facts(self.members())),
            getattr(compiler.build, "__self__", None),
            self._state(),
            members,
            compiler.optimizers,
            compiler.config,
        )

    def ready(
        self,
        job: Job,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        doing: str,
        counts: Callable[[], Mapping[str, str]],
        check: Callable[[], object],
    ) -> tuple[CompiledStep, Batch]:
        """Return the step for a call once all ranks agree on it; compile it if there is none.

        Args:
            job: the ranks.
            arguments: ``(args, kwargs)`` of the call on this rank.
            doing: names the call in messages.
            counts: returns the numbers of steps so far as text, by name.
            check: a further check of the call; an error that it raises on one rank is raised on all.
        """
        call = Call(job, self._attributes(), self._compiler.optimizers, self._compiler.config, arguments)
        selection: Selection | None = None
        problem: BaseException | None = None
        try:
            check()
            selection = self._select(call)
        except BaseException as error:
            problem = error
        everybody = self._agree(call, selection, problem, doing, counts)
        assert selection is not None
        last = self._last_call
        batch = None if last is None else last.resolve(selection, everybody)
        if last is not None and last.entry.step is not None and batch is not None:
            step, selection.batch = last.entry.step, batch
        else:
            step = self._step_of(job, selection, everybody, doing)
        if selection.members is not None:
            self._remember(call, selection)
        return step, selection.batch

    def _step_of(self, job: Job, selection: Selection, everybody: Sequence[Sequence[int]], doing: str) -> CompiledStep:
        """Return the step for a selection, compiled if there is none yet; resolve the sizes of its batch."""
        unresolved, kind = selection.batch, selection.situation.kind
        selection.batch = self._resolve_sizes(job, unresolved, kind, everybody)
        entry = self._entry(selection)
        step = entry.step
        if step is None and selection.batch.sizes:
            try:
                step = self._compile(job, selection, entry, doing)
            except (CommunicationError, MemoryBudgetError):
                raise
            except Exception as error:
                if _is_one_row(selection.batch):
                    raise
                self._compile_static(kind, error, doing)
                selection.batch = self._resolve_sizes(job, unresolved, kind, everybody)
                entry = self._entry(selection)
                step = entry.step
        if step is not None and not keeps_budget(step, selection.batch):
            _warn_of_larger_sizes(selection.batch, doing)
            step = None
        step = step or self._compile(job, selection, entry, doing)
        # Compiling moves parameters into stores: the layout is that of the calls to come.
        entry = CacheEntry(entry.key, selection.situation.layout, step)
        self._last_call = LastCall(selection.situation, everybody, selection.batch.with_tensors(()), entry)
        return step

    def _select(self, call: Call) -> Selection:
        """Return what a call brings: by the snapshot of the last call where nothing but sizes changed, else anew."""
        snapshot = self._snapshot
        if snapshot is not None and not self._compiler.guards():
            batch = snapshot.match(call)
            if batch is not None:
                _check_usable(snapshot.stores)
                return Selection(batch, snapshot.situation)
        self._snapshot = None
        members = self.adopted(lambda: call.job)
        _check_usable(stores_of(members.parameters.values()))
        refuse_hooks_before(call.optimizers)
        batch = self._read(call.arguments, call.job.mesh, call.job.grid)
        check_devices(
            members, [(name, spec.device) for name, spec in zip(batch.names, batch.specs, strict=True) if spec.shape]
        )
        self._compiler.updates.lift_changed(call.config)
        facts = self._facts(members)
        situation = Situation(
            tuple(facts.values()),
            call.config.key(),
            layout_facts(members),
            batch.pattern(),
            self._shape_mode(members),
            digest=0,
        )
        last = self._last_situation
        if last is not None and situation.is_like(last):
            return Selection(batch, last, members, facts, repeated=True)
        if call.job.size > 1:
            key = situation.facts, situation.config, situation.pattern
            if key not in self._digests:
                self._digests[key] = digest({**batch.facts(), **show_facts(facts, call.config.shown())})
            situation = replace(situation, digest=self._digests[key])
        return Selection(batch, situation, members, facts)

    def _agree(
        self,
        call: Call,
        selection: Selection | None,
        problem: BaseException | None,
        doing: str,
        counts: Callable[[], Mapping[str, str]],
    ) -> list[list[int]]:
        """Return the sizes of the inputs of all ranks, if these agree on the rest; else raise on every rank.

        Whole sequences that several ranks split must be equal on these.

        Args:
            selection: None if there is a ``problem``.
        """
        number, sizes, digests = 0, [], []
        if selection is not None:
            number = selection.situation.digest ^ self.compilations
            sizes, digests = local_sizes(selection.batch), digests_of_whole(selection.batch)
            if call.config.check_replicas:
                number ^= digest(counts())  # The counts decide whether replicas are compared now.

        def texts() -> dict[str, str]:
            assert selection is not None
            shown = show_facts(selection.facts or self._facts(self.members()), call.config.shown())
            compilations = {"the number of compiled steps": str(self.compilations)}
            return {**selection.batch.facts(), **shown, **compilations, **counts(), **selection.batch.shapes()}

        everybody = agree(call.job, doing, number, texts, problem, [*sizes, *digests])
        if digests:
            assert selection is not None
            check_whole(selection.batch, [row[len(sizes) :] for row in everybody], call.job.grid)
        return [row[: len(sizes)] for row in everybody] if digests else everybody

    def _resolve_sizes(self, job: Job, batch: Batch, kind: Kind, everybody: Sequence[Sequence[int]]) -> Batch:
        return self._dimensions.resolve(batch, kind, everybody, job.mesh, job.grid, lambda: model_sizes(self.members()))

    def _compile_static(self, kind: Kind, error: Exception, doing: str) -> None:
        """Have each size compiled by itself, after a step with dynamic dimensions failed to compile on all ranks."""
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        self._dimensions.refuse(kind, reason)
        warnings.warn(
            f"{doing} could not be compiled for inputs whose sizes differ between calls, so each size is "
            f"compiled by itself:\n  {reason}\nconfig.dynamic_shapes = False does so from the start, without this "
            "warning.",
            ZeroGraphWarning,
            stacklevel=levels_to_user(),
        )

    def _shape_mode(self, members: Members) -> Mode:
        """Return ``config.dynamic_shapes``; a backend that is a function gets static sizes only."""
        return self._compiler.config.dynamic_shapes if self._compiler.runs_symbolic_sizes(members) else False

    def _entry(self, selection: Selection) -> CacheEntry:
        """Return the step for a selection whose sizes are resolved, or the key to compile one under."""
        situation, batch, last = selection.situation, selection.batch, self._last_call
        selected = situation, batch.variant, batch.specs
        if last is not None and selected == (last.situation, last.batch.variant, last.batch.specs):
            return last.entry
        key = situation.key(batch)
        if last is not None and (last.entry.key, last.entry.layout) == (key, situation.layout):
            return last.entry
        return CacheEntry(key, situation.layout, self._steps.get((key, situation.layout)))

    def _compile(self, job: Job, selection: Selection, entry: CacheEntry, doing: str) -> CompiledStep:
        """Compile the step for a selection that has none, and keep it."""
        batch, config, key = selection.batch, self._compiler.config, entry.key
        members = self.adopted(lambda: job) if selection.members is None else selection.members
        facts = selection.facts or self._facts(members)
        shown = show_facts(facts, config.shown())
        texts = {**dict(batch.constants), **shown}
        self._recompiles.count((batch.kind(), config.key()), members, texts, doing)
        kind = selection.situation.kind
        self._recompiles.count_sizes((kind, config.key()), self._dimensions.change(kind, batch.variant), doing)
        step = self._compiler.compile(job, members, batch, key[0], doing, self.dependencies(members, facts))
        self.compilations += 1
        self._dimensions.add_guards(selection.situation.kind, batch.variant, step.captured.guards)
        # Steps bound to dissolved stores would keep their memory.
        self._steps = {
            k: s for k, s in self._steps.items() if not any(store.is_released for store in s.stores.values())
        }
        keys = [key, *self._compiler.keys_after(step, batch, facts, lambda: self._facts(self.members()))]
        layout = layout_facts(members)
        self._steps |= {(one, layout): step for one in keys}
        selection.situation = replace(selection.situation, layout=layout)
        return step

    def _remember(self, call: Call, selection: Selection) -> None:
        """Keep the situation as the last one; on the second such call in a row, take a snapshot of the call."""
        self._last_situation = selection.situation
        if selection.repeated and self._tree is not None and not self._compiler.guards():
            self._snapshot = take_snapshot(call, self._tree, selection.batch, selection.situation)

    def _current(self) -> Tree:
        self._tree = current(self._tree, self._attributes())
        return self._tree

    def _facts(self, members: Members) -> dict[str, Any]:
        """Return what a captured graph depends on besides its inputs, by name."""
        constants = self._compiler.updates.constants
        facts = capture_facts(members, self._attributes(), self._compiler.optimizers, constants)
        return facts | self._compiler.guards()


def _warn_of_larger_sizes(batch: Batch, doing: str) -> None:
    sizes = ", ".join(f"{name} = {sum(rows)}" for name, rows in batch.sizes.items())
    warnings.warn(
        f"{doing} is compiled again: with inputs of these sizes ({sizes}) the step would exceed "
        "config.memory_budget, which it keeps for the largest sizes seen when it was compiled\n"
        "zg.mark_dynamic(x, dim, max=...) declares the largest size, and one compilation keeps the budget for it.",
        ZeroGraphWarning,
        stacklevel=levels_to_user(),
    )


def _is_one_row(batch: Batch) -> bool:
    """Return whether all ranks together hold one row, which no static step can split."""
    return any(sum(rows) == 1 for rows in batch.sizes.values())


def _check_usable(stores: Iterable[Store]) -> None:
    for store in stores:
        if store.is_unsharded:
            raise InputError("the graph was called inside full_parameters(): leave it first")
        if store.optimizer is not None and guarded_state(store.optimizer) is None:
            raise InputError(
                f"the attribute state of {type(store.optimizer).__name__} was replaced, by an assignment or by the "
                "optimizer's own load_state_dict(), but a graph has the state\nLoad it by load_state_dict() of the "
                "graph, or change optimizer.state inside 'with step.full_parameters():'."
            )
        store.check_aliases()
