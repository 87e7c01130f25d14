"""Run a compiled step: bind the graph's inputs to tensors, call it, and explain a failed operator or collective."""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from zerograph._torch import version, written_arguments
from zerograph.errors import CommunicationError, OperatorError, VerificationError, ZeroGraphError
from zerograph.ir.alias import WAIT
from zerograph.ir.dims import SizeInput
from zerograph.ir.loop import Loop, loop_of
from zerograph.ir.metadata import Origin, Role, boxing_of, meta
from zerograph.ir.pause import pause_of
from zerograph.ir.step_graph import placeholders
from zerograph.ops.offload import FETCH, TRANSFER
from zerograph.runtime.backends.backends import Compiled
from zerograph.runtime.feedback import received, residual
from zerograph.runtime.job.process_group import Job, communication_error, is_out_of_memory, reporting_failures
from zerograph.runtime.offload.threads import offloads, threads, update_threads
from zerograph.runtime.reduce_overhead import RETURNED_ARGUMENT, reduce_overhead
from zerograph.runtime.state import Store, accumulated, in_memory

Lookup = Callable[[], Tensor]
T = TypeVar("T")

# Errors of torch's operators for bad values: an index out of range, a matrix without an inverse.
_OPERATOR_ERRORS = (RuntimeError, IndexError, ValueError)


@dataclass(frozen=True, eq=False)
class Executor:
    """A compiled step with the tensors that it reads and updates in place.

    Attributes:
        job: the ranks that run the step.
        graph: the emitted graph that ``function`` was compiled from.
        function: the compiled graph.
        feeds: for each placeholder a tensor that stays, a function that returns the tensor, or the index of a batch
            tensor.
        written: indices of placeholders that the user holds and the step writes.
        numbers: the 0-d tensor of each hyperparameter that is an input, by its name.
        seed: the 0-d tensor of the step's seed; nothing reads it in a graph that draws no random numbers.
        low_overhead: returns a form of ``function`` with cheaper calls, which runs instead; None where there is none.
            Its arguments are those of :func:`reduce_overhead`.
        can_pause: a form of it can stop at the graph's pause.
        gathers: the stores whose buckets the graph gathers into gather buffers, if it can do without.
        updates: the stores whose parameters the graph changes.
    """

    job: Job
    graph: fx.GraphModule
    function: Compiled
    feeds: Sequence[Tensor | Lookup | int | SizeInput]
    written: Sequence[int]
    numbers: Mapping[str, Tensor]  # each [], float64
    seed: Tensor  # [], int64
    low_overhead: Callable[..., Callable[..., Any]] | None = None
    can_pause: bool = False
    gathers: Sequence[Store] = ()
    updates: Sequence[Store] = ()

    def __call__(
        self,
        batch: Sequence[Tensor],
        numbers: Mapping[str, float],
        seed: int,
        doing: str,
        sizes: Mapping[SizeInput, int],
    ) -> list[Tensor]:
        """Run the step on this rank's part of the batch.

        Args:
            batch: this rank's input tensors.
            numbers: the value of each of ``self.numbers``.
            seed: the seed of this step's random numbers.
            doing: the step's name in messages: ``"step 3"``.
            sizes: value of each symbolic size that the graph reads.

        Returns:
            The values that the graph returns.

        Raises:
            CommunicationError: a collective failed; the message names it.
            OperatorError: an operator failed on this rank; the message names it with the user's line.
        """
        with self._reporting(doing):
            inputs, arguments = self._bound(batch, numbers, seed, sizes)

            def run() -> list[Tensor]:
                results = list(self._form(pauses=False)(*arguments))
                self._write_back(inputs, arguments)
                self._note_gathers()
                return results

            return self._explained(run, doing)

    def start(
        self,
        batch: Sequence[Tensor],
        numbers: Mapping[str, float],
        seed: int,
        doing: str,
        sizes: Mapping[SizeInput, int],
    ) -> tuple[Sequence[Tensor], Callable[..., list[Tensor]]]:
        """Run the step up to its pause. Arguments and errors are those of a call.

        Returns:
            The values that are computed there, and a function that runs the rest, given ``numbers`` and this rank's
            part of the gradients that the graph gets at its pause.
        """
        assert self.can_pause
        with self._reporting(doing):
            inputs, arguments = self._bound(batch, numbers, seed, sizes)
            running: Generator[tuple[Any, ...], Sequence[Tensor], Sequence[Any]]
            running = self._form(pauses=True)(*arguments)
            values, *_ = self._explained(lambda: next(running), doing)
            if self._writes_before_pause:
                self._write_back(inputs, arguments)
            self._note_gathers()

        def run_rest(gradients: Sequence[Tensor]) -> list[Tensor]:
            try:
                running.send(gradients)
            except StopIteration as end:
                if not self._writes_before_pause:
                    self._write_back(inputs, arguments)
                return list(end.value)
            raise AssertionError("a step has one pause")

        def finish(numbers: Mapping[str, float], gradients: Sequence[Tensor] = ()) -> list[Tensor]:
            with self._reporting(doing):
                # Another call may have run since: what is computed again draws by the seed of this one.
                self._fill(numbers, seed)
                return self._explained(lambda: run_rest(gradients), doing)

        return values, finish

    def _reporting(self, doing: str) -> reporting_failures:
        """Tell the other ranks of an error inside the block, and where the step broke off."""
        return reporting_failures(self.job, doing, self._mark_break)

    def _form(self, *, pauses: bool) -> Callable[..., Any]:
        if self.low_overhead is None:
            return self.function
        has_all = bool(self.gathers) and all(store.is_gathered for store in self.gathers)
        return self.low_overhead(pauses=pauses, gathers=not has_all)

    def _note_gathers(self) -> None:
        for store in self.gathers:
            # One with a gather buffer is in memory.
            store.gathered_version = version(in_memory(store.flat))

    def _fill(self, numbers: Mapping[str, float], seed: int) -> None:
        for name, tensor in self.numbers.items():
            tensor.fill_(numbers[name])
        if self.draws:
            self.seed.fill_(seed)

    def _bound(
        self, batch: Sequence[Tensor], numbers: Mapping[str, float], seed: int, sizes: Mapping[SizeInput, int]
    ) -> tuple[list[Any], list[Any]]:
        """Return the tensors that the placeholders stand for, and contiguous ones with the same values."""
        self._fill(numbers, seed)
        constants, changing = self._by_constancy
        inputs = constants.copy()
        for index, feed in changing:
            inputs[index] = _input_of(feed, batch, sizes)
        arguments = inputs.copy()
        for index, feed in changing:
            # The graph is compiled for contiguous tensors.
            if not isinstance(feed, SizeInput):
                arguments[index] = inputs[index].contiguous()
        return inputs, arguments

    def _write_back(self, inputs: Sequence[Any], arguments: Sequence[Any]) -> None:
        for index in self.written:
            if arguments[index] is not inputs[index]:
                inputs[index].copy_(arguments[index])

    def _explained(self, run: Callable[[], T], doing: str) -> T:
        """Run the graph; raise an operator's error in the user's terms."""
        try:
            for store in self.updates:
                store.gathered_version = None
            with torch.no_grad(), self._threads():
                return run()
        except BaseException as error:
            # Here first: outside, the error may have become another.
            self._mark_break(error, doing)
            explanation = self._explain(error, doing)
            if explanation is None:
                raise
            raise explanation from error

    def _threads(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which the CPU has the threads for updates of offloaded shards, if there are any."""
        if not self.offloads:
            return contextlib.nullcontext()
        return threads(update_threads())

    @functools.cached_property
    def offloads(self) -> bool:
        """True if the graph copies tensors between an accelerator and the CPU."""
        return offloads(self.graph.graph)

    @functools.cached_property
    def draws(self) -> bool:
        """True if the graph reads the seed."""
        return any(feed is self.seed for feed in self.feeds)

    @functools.cached_property
    def _writes_before_pause(self) -> bool:
        """True if buffers are written before the graph's pause, after which the loop may change them."""
        pause = pause_of(self.graph.graph)
        return pause is not None and bool(pause.args[1])

    @functools.cached_property
    def _by_constancy(self) -> tuple[list[Any], list[tuple[int, Lookup | int | SizeInput]]]:
        """Feeds that are the same tensors in every step, None in place of each other one, and the others."""
        changing = [(index, feed) for index, feed in enumerate(self.feeds) if not isinstance(feed, Tensor)]
        return [feed if isinstance(feed, Tensor) else None for feed in self.feeds], changing

    def _mark_break(self, error: BaseException, doing: str) -> None:
        """Note where the step broke off."""
        self.job.liveness.mark_break(f"{doing}, at {_break_point(error.__traceback__)}")

    def _explain(self, error: BaseException, doing: str) -> ZeroGraphError | None:
        """Return the error of the operator or collective that failed, in the user's terms; None for any other error."""
        if not isinstance(error, _OPERATOR_ERRORS) or isinstance(error, ZeroGraphError) or is_out_of_memory(error):
            return None
        explanation = self._failed_call(error, doing)
        if isinstance(explanation, CommunicationError):
            # Each rank may have left another part of the exchange undone: they cannot resume.
            self.job.liveness.broke_off += f", rank {self.job.rank}"
        return explanation

    def _failed_call(self, error: Exception, doing: str) -> ZeroGraphError:
        """Return the error of the node that failed."""
        lines = failed_lines(error.__traceback__)
        node = failed_node(self.graph.graph, lines)
        boxing = boxing_of(node) if node is not None else None
        if boxing is not None:
            collective = f"in the {boxing.kind} of {boxing.tensor} ({boxing.phase}, node {node})"
            return communication_error(self.job, f"{collective} of {doing}", error)
        if self.job.size > 1 and not lines and _looks_like_communication(error):
            return communication_error(self.job, f"in a collective of {doing}", error)
        return _operator_error(node, f"{doing} on rank {self.job.rank}", error, _state_after(self.graph.graph, lines))


def bind(
    job: Job,
    graph: fx.GraphModule,
    function: Compiled,
    stores: Mapping[str, Store],
    lookups: Mapping[Role, Lookup],
    copied: Collection[fx.Node] | None = None,
    written: Collection[Role] = (),
    updates: Sequence[Store] = (),
) -> Executor:
    """Bind the placeholders of a compiled graph to tensors.

    Args:
        job: the ranks that run the step.
        graph: the emitted graph.
        function: the compiled graph.
        stores: the store of each bucket, by the bucket's name in the graph.
        lookups: functions that return the tensors which no store holds.
        copied: for a graph that does not read files itself: the placeholders that it reads. Those that files hold get
            copies, new ones in each run.
        written: those of ``lookups`` whose tensors the graph writes.
        updates: the stores whose parameters it changes.

    Raises:
        VerificationError: a placeholder has no tensor.
    """
    feeds: list[Tensor | Lookup | int | SizeInput] = []
    numbers: dict[str, Tensor] = {}
    seed = torch.zeros((), dtype=torch.int64)
    for node in placeholders(graph.graph):
        role: Role = meta(node)["role"]
        if role.bucket is not None:
            feeds.append(_feed_of_store(stores[role.bucket], role, node, copied))
        elif role.kind == "hyperparameter":
            numbers[role.name] = torch.zeros((), dtype=torch.float64)
            feeds.append(numbers[role.name])
        elif role.kind == "seed":
            feeds.append(seed)
        elif role.kind == "size":
            feeds.append(meta(node)["size"])
        elif role.kind == "input":
            feeds.append(int(role.name))
        elif role in lookups:
            feeds.append(lookups[role])
        else:
            raise VerificationError(f"the graph's input {role} has no tensor")
    indices = tuple(index for index, node in enumerate(placeholders(graph.graph)) if meta(node)["role"] in written)
    return Executor(job, graph, function, tuple(feeds), indices, numbers, seed, updates=updates)


def with_low_overhead(executor: Executor, stores: Mapping[str, Store]) -> Executor:
    """Return the executor with low-overhead forms of its function, if that is an ``fx.GraphModule``'s of ours."""
    module = getattr(executor.function, "__self__", None)
    if not isinstance(module, fx.GraphModule):
        return executor
    constant_feeds = [feed if isinstance(feed, Tensor) else None for feed in executor.feeds]
    graph = executor.graph.graph
    return replace(
        executor,
        low_overhead=functools.cache(functools.partial(reduce_overhead, module, constant_feeds)),
        can_pause=_can_pause(graph),
        gathers=() if executor.updates else tuple(stores[bucket] for bucket in _gathered_first(graph)),
    )


def _gathered_first(graph: fx.Graph) -> list[str]:
    """Return the buckets with a gather buffer, if nothing but gathers before a pause uses the buffers; else none."""
    buffers, pause = placeholders(graph, "gather_buffer"), pause_of(graph)
    before = set(itertools.takewhile(lambda node: node is not pause, graph.nodes))
    if any(user.target not in RETURNED_ARGUMENT or user not in before for one in buffers for user in one.users):
        return []
    return [str(meta(one)["role"].bucket) for one in buffers if one.users]


def _can_pause(graph: fx.Graph) -> bool:
    """Return whether the graph has a pause, and neither changes state nor moves offloaded tensors before.

    If the loop computes the gradients that backward starts from, buffers are to be written before.
    """
    pause = pause_of(graph)
    if pause is None or any(node.target in (FETCH, TRANSFER) for node in graph.nodes):
        return False
    early = {"buffer"} if pause.args[1] else set()
    before = True
    for node in graph.nodes:
        before = before and node is not pause
        kinds = {meta(one)["role"].kind for one in written_arguments(node) if one.op == "placeholder"}
        if kinds - early - {"gather_buffer"} if before else kinds & early:
            return False
    return True


def _input_of(feed: Lookup | int | SizeInput, batch: Sequence[Tensor], sizes: Mapping[SizeInput, int]) -> Any:
    if isinstance(feed, int):
        return batch[feed]
    return sizes[feed] if isinstance(feed, SizeInput) else feed()


def _feed_of_store(store: Store, role: Role, node: fx.Node, copied: Collection[fx.Node] | None) -> Tensor | Lookup:
    """Return the feed of a tensor that belongs to a store; the graph fetches one that a file holds by its handle."""
    if role.kind == "accumulated":
        return functools.partial(accumulated, store)
    if role.kind == "residual":
        return functools.partial(residual, store, int(role.entry or 0), meta(node)["sbp"], node.meta["val"].dtype)
    if role.kind == "received":
        return functools.partial(received, store, node.meta["val"].dtype)
    values = {"bucket": store.flat, "gather_buffer": store.gather_buffer}
    value = store.state[role.entry or ""] if role.kind == "state" else values[role.kind]
    assert value is not None
    if isinstance(value, Tensor):
        return value
    return functools.partial(in_memory, value) if copied is not None and node in copied else value.handle


def failed_node(graph: fx.Graph, names: Sequence[str]) -> fx.Node | None:
    """Return the node at which a graph failed: that of the last name, or one in a loop's body, named after the loop.

    Of an exchange that was waited for the node that began it.
    """
    for number, name in enumerate(names):
        node = next((node for node in graph.nodes if node.name == name), None)
        if node is not None and (loop := loop_of(node)) is not None:
            return failed_node(loop.body.graph, names[number + 1 :]) or node
    node = next((node for node in graph.nodes if node.name in names[-1:]), None)
    return node.all_input_nodes[0] if node is not None and node.target is WAIT else node


def failed_lines(traceback: TracebackType | None) -> list[str]:
    """Return the names of the nodes whose generated lines an exception passed through, outermost first."""
    return [name for frame, line in walk_tb(traceback) if (name := _node_of_line(frame, line)) is not None]


def _node_of_line(frame: FrameType, line: int) -> str | None:
    """Return the name of the node that a line of generated code computes; None for other code."""
    filename = frame.f_code.co_filename
    if not filename.startswith("<eval_with_key>"):
        return None
    return linecache.getline(filename, line).split("=")[0].split(":")[0].strip()


def _break_point(traceback: TracebackType | None) -> str:
    """Return where an exception broke a step off: equal on ranks that have begun and awaited the same exchanges."""
    places, inside_node, own_line = [], 0, ""
    for frame, line in walk_tb(traceback):
        if frame.f_code.co_filename == __file__:
            own_line = f"{Path(__file__).name}:{line}"
            continue
        node = _node_of_line(frame, line)
        if frame.f_code is Loop.forward.__code__:
            places.append(f"micro-batch {frame.f_locals.get('number', 'none')}")
        else:
            places.append(node or f"{Path(frame.f_code.co_filename).name}:{line}")
        if node is not None:
            inside_node = len(places)
    return " > ".join(places[: inside_node or None]) or own_line


def _state_after(graph: fx.Graph, names: Sequence[str]) -> str:
    """Return a sentence on the state that a step leaves which ends at the node of the first name."""
    written = False
    for node in graph.nodes:
        if node.name in names[:1]:
            break
        origin = meta(node).get("origin")
        if isinstance(origin, Origin) and origin.phase == "update":
            return "Parameters may have been updated in part: load the last checkpoint."
        # A gather into its buffer changes no state: the shard in the buffer stays as it is.
        inputs = [argument for argument in written_arguments(node) if argument.op == "placeholder"]
        written = written or any(meta(argument)["role"].kind != "gather_buffer" for argument in inputs)
    if written:
        return "Parameters and optimizer state are those before the step, buffers may not be."
    return "Nothing was changed: parameters, buffers, optimizer state and counts are those before the step."


def _operator_error(node: fx.Node | None, where: str, error: Exception, state: str) -> OperatorError:
    """Return the error of an operator in the user's terms; ``node`` is None inside compiled code."""
    reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no reason given'])[0]}"
    origin = None if node is None else meta(node).get("origin")
    if not isinstance(origin, Origin):
        advice = "config.backend = 'eager' names the operator and its line."
        return OperatorError(f"an operator of {where} failed: {reason}\n{state}\n{advice}")
    assert node is not None
    operator = f"{node.target} in the {origin.phase} of {origin.module or 'build()'}"
    return OperatorError(
        f"{operator} failed in {where}: {reason}\n{origin.line}".rstrip() + f"\n{_advice(node, reason)}\n{state}"
    )


def _advice(node: fx.Node, reason: str) -> str:
    """Return where to look for the cause of an operator's error."""
    values = [argument.meta.get("val") for argument in node.all_input_nodes]
    dtypes = {value.dtype for value in values if isinstance(value, Tensor)}
    # An index of whole numbers is no mistake, unless the operator says so.
    if "dtype" not in reason:
        dtypes = {dtype for dtype in dtypes if dtype.is_floating_point}
    if len(dtypes) > 1:
        return (
            f"It got tensors of {' and '.join(sorted(map(str, dtypes)))}: give the batch in the dtype of the "
            "parameters (x.to(weight.dtype)), or convert the model."
        )
    return "It got the right shapes: look at the values of this rank's part of the batch."


def _looks_like_communication(error: Exception) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "connection", "timed out", "timeout"))
