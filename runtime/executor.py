"""One compiled step: it feeds the graph, runs it, and explains a collective that failed."""

from __future__ import annotations

import contextlib
import functools
import linecache
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType

import torch
from torch import Tensor, fx

from zerograph._torch import written_arguments
from zerograph.errors import CommunicationError, OperatorError, VerificationError, ZeroGraphError
from zerograph.ir.loop import Loop, loop_of
from zerograph.ir.metadata import Boxing, Origin, Role, meta
from zerograph.ir.step_graph import placeholders
from zerograph.runtime.backends.backends import Compiled
from zerograph.runtime.job.process_group import Job, communication_error, noted
from zerograph.runtime.lean import lean
from zerograph.runtime.state import Held, Store, in_memory

Lookup = Callable[[], Tensor]

# What torch's operators refuse values with: an index out of range, a matrix that has no inverse.
_REFUSALS = (RuntimeError, IndexError, ValueError)


@dataclass(frozen=True, eq=False)
class Executor:
    """A step bound to the tensors that it reads and updates in place.

    Attributes:
        graph: the emitted graph that ``function`` was compiled from.
        feeds: one for each placeholder: a tensor that stays, a lookup, or the number of a batch tensor.
        written: places among them of what the user holds and the step writes.
        numbers: the 0-d tensor of each hyperparameter that is an input, by its name.
        seed: the 0-d tensor of the step's seed; nothing reads it in a graph that draws no random numbers.
        lean: runs instead of ``function``, which it is made of, where that is an ``fx.GraphModule``'s.
    """

    job: Job
    graph: fx.GraphModule
    function: Compiled
    feeds: Sequence[Tensor | Lookup | int]
    written: Sequence[int]
    numbers: Mapping[str, Tensor]
    seed: Tensor
    lean: Compiled | None = None

    def __call__(self, batch: Sequence[Tensor], numbers: Mapping[str, float], seed: int, doing: str) -> list[Tensor]:
        """Run the step on this rank's part of the batch; ``doing`` names it in messages.

        Args:
            numbers: the value of each of ``self.numbers``.
            seed: what this step's random numbers follow from.

        Raises:
            CommunicationError: a collective failed, which is named.
            OperatorError: an operator failed on this rank, which is named with the user's line.
        """
        with noted(self.job, doing), self._breaking_off(doing):
            for name, tensor in self.numbers.items():
                tensor.fill_(numbers[name])
            self.seed.fill_(seed)
            found = [
                feed if isinstance(feed, Tensor) else batch[feed] if isinstance(feed, int) else feed()
                for feed in self.feeds
            ]
            # The graph is made for tensors whose elements lie in order. What the user lays otherwise it has a copy of.
            arguments = [
                one if isinstance(feed, Tensor) else one.contiguous()
                for feed, one in zip(self.feeds, found, strict=True)
            ]
            try:
                with torch.no_grad(), self._breaking_off(doing):
                    values = list((self.lean or self.function)(*arguments))
                    for place in self.written:
                        if arguments[place] is not found[place]:
                            found[place].copy_(arguments[place])
                    return values
            except (ZeroGraphError, torch.OutOfMemoryError):
                raise
            except _REFUSALS as error:
                if "DefaultCPUAllocator" in str(error):
                    # The CPU's way to be out of memory, which says how much was asked for.
                    raise
                told = self._explained(error, doing)
                if isinstance(told, CommunicationError):
                    # Each rank may have left another part of the exchange undone.
                    self.job.signs.broke_off += f", rank {self.job.rank}"
                raise told from error

    @contextlib.contextmanager
    def _breaking_off(self, doing: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # Not again further out, where it may have become another.
            if not self.job.signs.broke_off:
                self.job.signs.broke_off = f"{doing}, at {_place(error.__traceback__)}"
            raise

    def _explained(self, error: Exception, doing: str) -> ZeroGraphError:
        lines = _failed_lines(error.__traceback__)
        node = _failed_node(self.graph.graph, lines)
        if node is not None and node.target is torch.ops._c10d_functional.wait_tensor.default:
            node = node.all_input_nodes[0]
        found = meta(node).get("boxing") if node is not None else None
        if isinstance(found, Boxing):
            what = f"in the {found.kind} of {found.tensor} ({found.phase}, node {node})"
            return communication_error(self.job, f"{what} of {doing}", error)
        if self.job.size > 1 and not lines and _looks_like_communication(error):
            return communication_error(self.job, f"in a collective of {doing}", error)
        return _refused(node, f"{doing} on rank {self.job.rank}", error, _state_behind(self.graph.graph, lines))


def bind(
    job: Job,
    graph: fx.GraphModule,
    function: Compiled,
    stores: Mapping[str, Store],
    lookups: Mapping[Role, Lookup],
    copied: Collection[fx.Node] | None = None,
    written: Collection[Role] = (),
) -> Executor:
    """Bind a compiled graph's placeholders: buckets and their state to ``stores``, by bucket name in the graph.

    Args:
        lookups: of what rests in no store.
        copied: for a graph that knows of no files: the placeholders that it reads. They get copies of what rests in
            files, for each run anew.
        written: those of ``lookups`` whose tensors the graph writes.
    """
    feeds: list[Tensor | Lookup | int] = []
    numbers: dict[str, Tensor] = {}
    seed = torch.zeros((), dtype=torch.int64)
    for node in placeholders(graph.graph):
        found: Role = meta(node)["role"]
        if found.kind == "bucket":
            feeds.append(_fed(stores[found.name].flat, node, copied))
        elif found.kind == "gather_buffer":
            assert found.bucket is not None
            room = stores[found.bucket].room
            assert room is not None
            feeds.append(room)
        elif found.kind == "state":
            bucket, name = found.name.split(".", 1)
            feeds.append(_fed(stores[bucket].state[name], node, copied))
        elif found.kind == "hyperparameter":
            numbers[found.name] = torch.zeros((), dtype=torch.float64)
            feeds.append(numbers[found.name])
        elif found.kind == "seed":
            feeds.append(seed)
        elif found.kind == "input":
            feeds.append(int(found.name))
        elif found in lookups:
            feeds.append(lookups[found])
        else:
            raise VerificationError(f"nothing feeds the graph's {found}")
    places = tuple(place for place, node in enumerate(placeholders(graph.graph)) if meta(node)["role"] in written)
    return Executor(job, graph, function, tuple(feeds), places, numbers, seed)


def leaner(executor: Executor) -> Executor:
    """Return the executor with a leaner form of its function, if that is an ``fx.GraphModule``'s of ours."""
    module = getattr(executor.function, "__self__", None)
    if not isinstance(module, fx.GraphModule):
        return executor
    stay = [feed if isinstance(feed, Tensor) else None for feed in executor.feeds]
    return replace(executor, lean=lean(module, stay))


def _fed(held: Held, node: fx.Node, copied: Collection[fx.Node] | None) -> Tensor | Lookup:
    """What rests in a file the graph fetches by its handle."""
    if isinstance(held, Tensor):
        return held
    return functools.partial(in_memory, held) if copied is not None and node in copied else held.handle


def _failed_node(graph: fx.Graph, names: Sequence[str]) -> fx.Node | None:
    """The node at which a step failed: that of the last name; in a loop's body, of those behind the loop's."""
    for number, name in enumerate(names):
        node = next((node for node in graph.nodes if node.name == name), None)
        if node is not None and (loop := loop_of(node)) is not None:
            return _failed_node(loop.body.graph, names[number + 1 :]) or node
    return next((node for node in graph.nodes if node.name in names[-1:]), None)


def _failed_lines(traceback: TracebackType | None) -> list[str]:
    """The names of the nodes whose lines of generated code an exception passed through, outermost first."""
    return [name for frame, line in walk_tb(traceback) if (name := _node_of_line(frame, line)) is not None]


def _node_of_line(frame: FrameType, line: int) -> str | None:
    """The name of the node that a line of generated code computes; None: the code is not generated."""
    filename = frame.f_code.co_filename
    if not filename.startswith("<eval_with_key>"):
        return None
    return linecache.getline(filename, line).split("=")[0].split(":")[0].strip()


def _place(traceback: TracebackType | None) -> str:
    """Where a step was when an exception came: ranks at the same place have begun and awaited the same exchanges."""
    found, inside_node, here = [], 0, ""
    for frame, line in walk_tb(traceback):
        if frame.f_code.co_filename == __file__:
            here = f"{Path(__file__).name}:{line}"
            continue
        node = _node_of_line(frame, line)
        if frame.f_code is Loop.forward.__code__:
            found.append(f"micro-batch {frame.f_locals.get('number', 'none')}")
        else:
            found.append(node or f"{Path(frame.f_code.co_filename).name}:{line}")
        if node is not None:
            inside_node = len(found)
    return " > ".join(found[: inside_node or None]) or here


def _state_behind(graph: fx.Graph, names: Sequence[str]) -> str:
    """What a step that ends at the node of the first name leaves behind, as a sentence."""
    written = False
    for node in graph.nodes:
        if node.name in names[:1]:
            break
        origin = meta(node).get("origin")
        if isinstance(origin, Origin) and origin.phase == "update":
            return "Parameters may have been updated in part: load the last checkpoint."
        # What is gathered into its room is no change: the shard there is as it was.
        inputs = [one for one in written_arguments(node) if one.op == "placeholder"]
        written = written or any(meta(one)["role"].kind != "gather_buffer" for one in inputs)
    if written:
        return "Parameters and optimizer state are those before the step, buffers may not be."
    return "Nothing was changed: parameters, buffers, optimizer state and counts are those before the step."


def _refused(node: fx.Node | None, where: str, error: Exception, state: str) -> OperatorError:
    """The error of an operator, in the user's terms; ``node`` is unknown inside what a compiler made."""
    reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no reason given'])[0]}"
    origin = None if node is None else meta(node).get("origin")
    if not isinstance(origin, Origin):
        advice = "config.backend = 'eager' names the operator and its line."
        return OperatorError(f"an operator of {where} failed: {reason}\n{state}\n{advice}")
    assert node is not None
    what = f"{node.target} in the {origin.phase} of {origin.module or 'build()'}"
    return OperatorError(
        f"{what} failed in {where}: {reason}\n  {origin.source}   {origin.code}".rstrip()
        + f"\n{_advice(node)}\n{state}"
    )


def _advice(node: fx.Node) -> str:
    """Return where to look for the cause of an operator's error."""
    values = [given.meta.get("val") for given in node.all_input_nodes]
    floating = {str(one.dtype) for one in values if isinstance(one, Tensor) and one.dtype.is_floating_point}
    if len(floating) > 1:
        return (
            f"It got tensors of {' and '.join(sorted(floating))}: give the batch in the dtype of the parameters "
            "(x.to(weight.dtype)), or convert the model."
        )
    return "It got the right shapes: look at the values of this rank's part of the batch."


def _looks_like_communication(error: Exception) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "connection", "timed out", "timeout"))
