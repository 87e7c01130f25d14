"""The compiled steps of one graph, and the one that serves a call."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import and_
from typing import Any

import torch

from zerograph.base.source import warn_user
from zerograph.capture.named_values import NAMED_VALUES
from zerograph.compiler.batch import Batch, read_batch
from zerograph.compiler.compiled import CompiledStep
from zerograph.compiler.compiler import Compiler
from zerograph.compiler.dependencies import Dependencies
from zerograph.compiler.dimensions import Dimensions, Kind, SizeChange, local_sizes, sizes_on
from zerograph.compiler.members import (
    Members,
    Tree,
    adopt_global,
    capture_facts,
    check_devices,
    find_members,
    first_updates,
    has_global,
    layout_facts,
    model_sizes,
)
from zerograph.compiler.plain_inputs import check_whole, digests_of_whole
from zerograph.compiler.preparation import check_target, keeps_budget
from zerograph.compiler.step_key import Call, Snapshot, StepKey, StepRequest, take_snapshot, texts_of_facts
from zerograph.errors import CommunicationError, InputError, MemoryBudgetError
from zerograph.ir.mesh import Mesh
from zerograph.optim.step_hooks import refuse_hooks_before
from zerograph.runtime.job.differences import HYPERPARAMETERS
from zerograph.runtime.job.process_group import Job, agree, digest
from zerograph.runtime.state import Store, guarded_state, stores_of

# torch.compile compiles a function at most this often.
RECOMPILE_LIMIT = 8
# Compilations in a row, all because of the same line, that are worth a warning.
_SAME_LINE_LIMIT = 3
# Stores of which ranks compare whether their gather buffers are up to date: the bits of a message's number.
_MOST_NOTED = 62


@dataclass(eq=False, slots=True)
class Selection:
    """A call on this rank, and what it selects once the sizes of the other ranks are known.

    Attributes:
        batch: the call's inputs; those of the last call have no tensors.
        key: what selects the step besides sizes.
        stores: those of the graph's parameters.
        members: the graph's modules and tensors; None if a snapshot of the last call matched.
        repeated: the last call had the same key.
        everybody: the sizes of the inputs on each rank.
        step: the step that the call runs.
    """

    batch: Batch
    key: StepKey
    stores: Sequence[Store] = ()
    members: Members | None = None
    repeated: bool = False
    everybody: Sequence[Sequence[int]] = ()
    step: CompiledStep | None = None


class Steps:
    """The compiled steps of one graph. A call selects one, or has a new one compiled.

    Args:
        compiler: compiles them.
        attributes: returns the graph's public attributes, by name.
        state: returns these and the private attributes that are the user's.

    Attributes:
        compilations: number of compilations so far. Ranks that have compiled equally often know the same steps.
        may_be_cached: the cache of steps may have the steps of calls.
        notes: numbers from 0 up, as many on each rank, that this rank sends with the comparison of its calls.
        notes_of_ranks: those of the last call, of each rank.
        last: the last call, without its tensors; None before the first.
    """

    def __init__(
        self,
        compiler: Compiler,
        attributes: Callable[[], Mapping[str, Any]],
        state: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.compilations, self.may_be_cached = 0, True
        self.notes: list[int] = []
        self.notes_of_ranks: list[list[int]] = []
        self._compiler, self._attributes, self._state = compiler, attributes, state
        self._steps: dict[Hashable, CompiledStep] = {}
        self._digests: dict[Hashable, int] = {}
        self._recompiles = Recompiles()
        self._tree: Tree | None = None
        self._dimensions = Dimensions()
        self._snapshot: Snapshot | None = None
        self.last: Selection | None = None

    @property
    def are_recompiled(self) -> bool:
        """True if inputs of one kind have been compiled for as often as it is worth: constants change in each call."""
        return max(self._recompiles.counts.values(), default=0) >= RECOMPILE_LIMIT

    def members(self) -> Members:
        """Return the graph's present modules and tensors."""
        attributes = self._attributes()
        if self._tree is None or not self._tree.is_same(attributes):
            self._tree = Tree(find_members(attributes))
        return self._tree.members

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
        self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any], device: str, request: StepRequest
    ) -> tuple[Members, Batch, StepKey]:
        """Return the members and the batch as they would be on the mesh and device, and the key of their step."""
        check_target(mesh, device)
        refuse_hooks_before(self._compiler.optimizers)
        members = replace(self.members(), meta=torch.device(device))
        grid = torch.arange(mesh.size).view(mesh.shape).tolist()
        config = self._compiler.config
        batch = read_batch((args, kwargs), mesh, grid, config, self._compiler.micro_batches(mesh), members.meta)
        # Sizes of calls leave no trace here: only marked dimensions are dynamic, or all.
        facts = {**self._facts(members, request), "the device": members.meta}
        key = StepKey(tuple(facts.items()), config.key(), request, None, batch.pattern(), config.dynamic_shapes)
        sizes = sizes_on(mesh, batch)
        return members, Dimensions().resolve(batch, key.kind, sizes, mesh, grid, lambda: model_sizes(members)), key

    def dependencies(self, members: Members, key: StepKey | None = None) -> Dependencies:
        """Return what a captured graph depends on besides its inputs.

        Args:
            key: has the facts of the graph now, if they are known.
        """
        compiler = self._compiler
        return Dependencies(
            texts_of_facts(self._facts(members) if key is None else dict(key.facts)),
            lambda: texts_of_facts(self._facts(self.members())),
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
        request: StepRequest,
        doing: str,
        counts: Callable[[], Mapping[str, str]],
        check: Callable[[], object],
    ) -> tuple[CompiledStep, Batch]:
        """Return the step for a call once all ranks agree on it; compile it if there is none.

        Args:
            job: the ranks.
            arguments: ``(args, kwargs)`` of the call on this rank.
            request: what the caller asks for.
            doing: names the call in messages.
            counts: returns the numbers of steps so far as text, by name.
            check: a further check of the call; an error that it raises on one rank is raised on all.
        """
        call = self.call_of(job, arguments, request)
        selection: Selection | None = None
        problem: BaseException | None = None
        try:
            check()
            selection = self._select(call)
        except BaseException as error:
            problem = error
        everybody = self._agree(call, selection, problem, doing, counts)
        assert selection is not None
        last = self.last
        if last is None or last.step is None or selection.key is not last.key or everybody != last.everybody:
            last = self.last = self._selected(job, selection, everybody, doing)
        else:
            selection.batch = selection.batch.resolved(last.batch.specs, last.batch.sizes, last.batch.variant)
        # On the second such call in a row, take a snapshot of the call.
        if selection.repeated and self._tree is not None and not self._compiler.guards():
            self._snapshot = take_snapshot(call, self._tree, selection.batch, selection.key)
        assert last.step is not None
        return last.step, selection.batch

    def call_of(self, job: Job, arguments: tuple[tuple[Any, ...], dict[str, Any]], request: StepRequest) -> Call:
        """Return a call with the objects that it depends on. The arguments are those of :meth:`ready`."""
        compiler = self._compiler
        of_optimizers = compiler.updates.all_attributes
        return Call(job, self._attributes(), compiler.optimizers, of_optimizers, compiler.config, request, arguments)

    def variant(self, job: Job, key: StepKey, batch: Batch, request: StepRequest, doing: str) -> CompiledStep:
        """Return the step of an earlier call for another request; compile it if there is none. A collective.

        Args:
            job: the ranks.
            key: what selected the step of that call.
            batch: the inputs of that call.
            request: what the caller asks for.
            doing: names the call in messages.

        Raises:
            InputError: the step must be traced anew, and what it depends on has changed.
        """
        key = replace(key, request=request, layout=layout_facts(self.members()))
        step = self._steps.get(key.of_step(batch))
        if step is not None:
            return step
        now = tuple(self._facts(self.members(), request).items())
        if not self._compiler.has_captured(batch, key) and key.facts != now:
            raise InputError(f"{doing} is to be traced again, and what it depends on has changed")
        return self._compile(job, Selection(batch, key), doing, may_be_cached=False)

    def _selected(self, job: Job, selection: Selection, everybody: Sequence[Sequence[int]], doing: str) -> Selection:
        """Return a selection with its step, compiled if there is none yet; resolve the sizes of its batch."""
        unresolved, kind = selection.batch, selection.key.kind
        selection.batch = self._resolve_sizes(job, unresolved, kind, everybody)
        step = self._find(selection)
        if step is None and selection.batch.sizes:
            try:
                step = self._compile(job, selection, doing)
            except (CommunicationError, MemoryBudgetError):
                raise
            except Exception as error:
                # No static step can split one row over the ranks.
                if any(sum(rows) == 1 for rows in selection.batch.sizes.values()):
                    raise
                self._compile_static(kind, error, doing)
                selection.batch = self._resolve_sizes(job, unresolved, kind, everybody)
                step = self._find(selection)
        if step is not None and not keeps_budget(step, selection.batch):
            _warn_of_larger_sizes(selection.batch, doing)
            step = None
        step = step or self._compile(job, selection, doing)
        return Selection(selection.batch.with_tensors(()), selection.key, everybody=everybody, step=step)

    def _select(self, call: Call) -> Selection:
        """Return what a call brings: by the snapshot of the last call where nothing but sizes changed, else anew."""
        snapshot = self._snapshot
        if snapshot is not None and not self._compiler.guards() and self._compiler.reads_same():
            batch = snapshot.match(call)
            if batch is not None:
                _check_usable(snapshot.stores)
                return Selection(batch, snapshot.key, snapshot.stores)
        self._snapshot = None
        members = self.adopted(lambda: call.job)
        stores = stores_of(members.parameters.values())
        _check_usable(stores)
        if call.request.gradients == "update":
            # In a loop gradients exist outside of graphs.
            refuse_hooks_before(call.optimizers)
        mesh = call.job.mesh
        batch = read_batch(call.arguments, mesh, call.job.grid, call.config, self._compiler.micro_batches(mesh))
        check_devices(
            members, [(name, spec.device) for name, spec in zip(batch.names, batch.specs, strict=True) if spec.shape]
        )
        self._compiler.updates.lift_changed(call.config)
        facts = tuple(self._facts(members, call.request).items())
        # A backend that is a function, and slices, get static sizes only.
        is_static = call.config.virtual_ranks is not None or not self._compiler.runs_symbolic_sizes(members)
        layout, mode = layout_facts(members), False if is_static else call.config.dynamic_shapes
        key = StepKey(facts, call.config.key(), call.request, layout, batch.pattern(), mode)
        if self.last is not None and key == self.last.key:
            return Selection(batch, self.last.key, stores, members, repeated=True)
        if call.job.size > 1:
            on_ranks = key.facts, key.config, key.request, key.pattern
            if on_ranks not in self._digests:
                self._digests[on_ranks] = digest({**batch.facts(), **key.texts(call.config.shown())})
            key = replace(key, digest=self._digests[on_ranks])
        return Selection(batch, key, stores, members)

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
        if call.job.size == 1:
            if problem is not None:
                raise problem
            assert selection is not None
            self.notes_of_ranks = [self.notes]
            return [local_sizes(selection.batch)]
        number, sizes, digests = 0, [], []
        inputs: dict[str, float] = {}
        if selection is not None:
            number = selection.key.digest ^ self.compilations
            sizes, digests = local_sizes(selection.batch), digests_of_whole(selection.batch)
            if call.request.gradients in ("update", "accumulated"):
                inputs = self._compiler.updates.inputs()
                number ^= digest(inputs)
            if call.config.checks.check_replicas:
                number ^= digest(counts())  # The counts decide whether replicas are compared now.

        def texts() -> dict[str, str]:
            assert selection is not None
            shown = selection.key.texts(call.config.shown())
            compilations = {"the number of compiled steps": str(self.compilations)}
            shown |= {f"{HYPERPARAMETERS}: {name}": str(value) for name, value in inputs.items()}
            return {**selection.batch.facts(), **shown, **compilations, **counts(), **selection.batch.shapes()}

        stores = () if selection is None else selection.stores
        gathered = sum(store.is_gathered << place for place, store in enumerate(stores[:_MOST_NOTED]))
        everybody = agree(call.job, doing, number, texts, problem, [gathered, *self.notes, *sizes, *digests])
        # A rank whose last call failed may have gathered less than the others.
        gathered = functools.reduce(and_, (row[0] for row in everybody))
        for place, store in enumerate(stores):
            if not gathered >> place & 1:
                store.gathered_version = None
        count = len(self.notes) + 1
        self.notes_of_ranks, everybody = [row[1:count] for row in everybody], [row[count:] for row in everybody]
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
        warn_user(
            f"{doing} could not be compiled for inputs whose sizes differ between calls, so each size is "
            f"compiled by itself:\n  {reason}\nconfig.dynamic_shapes = False does so from the start, without this "
            "warning."
        )

    def _find(self, selection: Selection) -> CompiledStep | None:
        """Return the step for a selection whose sizes are resolved, if there is one."""
        key, batch, last = selection.key, selection.batch, self.last
        if (
            last is not None
            and key is last.key
            and (batch.variant, batch.specs) == (last.batch.variant, last.batch.specs)
        ):
            return last.step
        return self._steps.get(key.of_step(batch))

    def _compile(self, job: Job, selection: Selection, doing: str, *, may_be_cached: bool = True) -> CompiledStep:
        """Compile the step for a selection that has none, and keep it."""
        key, batch, config = selection.key, selection.batch, self._compiler.config
        members = self.adopted(lambda: job) if selection.members is None else selection.members
        kept = self._compiler.kept(job, members, batch, key)
        if kept is None:
            texts = {**dict(batch.constants), **key.texts(config.shown())}
            self._recompiles.count((batch.kind(), config.key()), members, texts, doing)
        change = self._dimensions.change(key.kind, batch.variant)
        self._recompiles.count_sizes((key.kind, config.key()), change, doing)
        dependencies = self.dependencies(members, key)
        may_be_cached = may_be_cached and self.may_be_cached
        arguments = job, members, batch, key, doing, dependencies
        step = self._compiler.compile(*arguments, may_be_cached=may_be_cached, kept=kept)
        self.compilations += 1
        self._dimensions.add_guards(key.kind, batch.variant, step.captured.guards)
        # Steps bound to dissolved stores would keep their memory.
        self._steps = {
            k: s for k, s in self._steps.items() if not any(store.is_released for store in s.stores.values())
        }
        # Compiling moves parameters into stores: the layout is that of the calls to come.
        moved = replace(key, layout=layout_facts(members))
        now = self._compiler.key_after(step, batch, moved, lambda: self._facts(self.members(), key.request))
        self._steps |= {one.of_step(batch): step for one in (moved, now)}
        selection.key = moved
        return step

    def _facts(self, members: Members, request: StepRequest | None = None) -> dict[str, Any]:
        """Return what a captured graph depends on besides its inputs, by name."""
        compiler = self._compiler
        # Updates and edits of gradients run no code of the model.
        runs = request is None or request.gradients not in ("accumulated", "edit")
        constants = compiler.updates.constants
        facts = capture_facts(members, self._attributes(), compiler.optimizers, constants, runs_modules=runs)
        if runs and torch.get_default_dtype() is not torch.float32:
            facts |= {"the default dtype": torch.get_default_dtype()}
        if runs and (mode := torch.get_deterministic_debug_mode()):
            facts |= {"torch.use_deterministic_algorithms": mode}
        # Its number is a rank's own.
        if runs and (device := torch.get_default_device().type) != "cpu":
            facts |= {"the default device": device}
        if compiler.config.virtual_ranks is not None:
            # Some kernels add in another order with another number of threads.
            facts |= {
                "the number of threads (torch.set_num_threads), with config.virtual_ranks": torch.get_num_threads()
            }
        return facts | compiler.guards() | (compiler.named_values(members) if runs else {})


class Recompiles:
    """Count the compilations for each kind of inputs, and keep the facts of the last one.

    Attributes:
        counts: the compilations of each kind.
    """

    def __init__(self) -> None:
        self.counts: Counter[Hashable] = Counter()
        self._latest_facts: dict[Hashable, Mapping[str, str]] = {}
        self._size_changes: defaultdict[Hashable, list[SizeChange]] = defaultdict(list)

    def count(self, inputs: Hashable, members: Members, facts: Mapping[str, str], doing: str) -> None:
        """Count a compilation. At the eighth for inputs of one kind, warn once and name the ``facts`` that changed.

        Args:
            inputs: the kind of the inputs and the configuration; equal where, but for constants, one step could serve.
            members: those of the graph; the first update of its optimizers may be computed in another way.
            facts: constants, and what else the step depends on, as text by name.
            doing: names the step in messages.
        """
        facts = {**facts, **first_updates(members)}
        before, self._latest_facts[inputs] = self._latest_facts.get(inputs, {}), facts
        self.counts[inputs] += 1
        if self.counts[inputs] == RECOMPILE_LIMIT:
            changed = [
                fact.partition(": ")[2] if name == NAMED_VALUES else name
                for name, fact in facts.items()
                if before.get(name) != fact
            ]
            what = ", ".join(changed) or "the buckets of parameters, which another graph lays out in between"
            warn_user(
                f"{doing} is compiled for the {RECOMPILE_LIMIT}th time for inputs of one kind; since the last time "
                f"this has changed: {what}\nPass a value that changes in every step as a tensor, or keep it in a "
                "buffer. Keep a value that build() does not need in an object that is not a module."
            )

    def count_sizes(self, kind: Hashable, change: SizeChange | None, doing: str) -> None:
        """Count a compilation for sizes. Warn of a line that each of the last ones failed at, and at the eighth.

        Args:
            kind: the kind of the inputs, without their sizes.
            change: why no earlier step serves the sizes; None where a further dimension has become dynamic.
            doing: names the step in messages.
        """
        if change is None:
            return
        changes = self._size_changes[kind]
        changes.append(change)
        last = changes[-_SAME_LINE_LIMIT:]
        if len(changes) == RECOMPILE_LIMIT:
            problem = f"{doing} is compiled for the {RECOMPILE_LIMIT}th time because of sizes alone"
        elif len(changes) == _SAME_LINE_LIMIT and change.place and len({(one.dims, one.place) for one in last}) == 1:
            problem = f"each of the last {_SAME_LINE_LIMIT} new sizes compiled {doing} again"
        else:
            return
        place = f"\n  {change.place}" if change.place else ""
        warn_user(
            f"{problem}: {change.dims} cannot be symbolic, because {change.reason}{place}\n"
            "Use operators on whole tensors for a loop over a dimension, torch.where for a branch on a size, "
            "x.shape[0] for len(x); or pad to few different sizes."
        )


def _warn_of_larger_sizes(batch: Batch, doing: str) -> None:
    sizes = ", ".join(f"{name} = {sum(rows)}" for name, rows in batch.sizes.items())
    warn_user(
        f"{doing} is compiled again: with inputs of these sizes ({sizes}) the step would exceed "
        "config.memory.memory_budget, which it keeps for the largest sizes seen when it was compiled\n"
        "zg.mark_dynamic(x, dim, max=...) declares the largest size, and one compilation keeps the budget for it."
    )


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
