"""``flow.nn.Graph``: zerograph's graph under OneFlow's names."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.lr_scheduler import LRScheduler

from zerograph._torch import pytree
from zerograph.compat.oneflow.nn.graph.accumulation import of_micro_batches
from zerograph.compat.oneflow.nn.graph.config import GraphConfig
from zerograph.compat.oneflow.nn.graph.module import GraphTensor, checkpoints
from zerograph.compat.oneflow.optim.base import check_clipping, check_options, clip, clipping_facts
from zerograph.compat.oneflow.tensors import is_global, keep_state_whole, placement_of_tensor, replicated, whole_of
from zerograph.compiler.batch import Batch
from zerograph.compiler.compiled import CompiledStep
from zerograph.errors import ConfigError, ZeroGraphError
from zerograph.graph import ZeroGraph
from zerograph.ir.grad_scaler import GradScaler
from zerograph.ir.zero import DEFAULT_STAGE, options_of_mode
from zerograph.runtime.job.process_group import Job, rank


class _TakesSwitches(type):
    """Read ``flow.boxing.nccl``'s switches at the end of a graph's construction: scripts set them in ``__init__``."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        graph = super().__call__(*args, **options)
        graph._constructed()
        return graph


# Counts the graphs of each class, for their names.
_counters: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

# The key of a graph's state that belongs to no module.
_REST = "zerograph"


class Graph(ZeroGraph, metaclass=_TakesSwitches):
    """A training step, or a forward pass, as one graph: subclass it, assign modules, write ``build()``, call it.

    Everything of :class:`zerograph.ZeroGraph` is there too.

    Args:
        debug_v_level: as in :meth:`debug`.
        debug_ranks: as in :meth:`debug`.
        debug_max_py_stack_depth: no effect.
        debug_only_user_py_stack: no effect.
        debug_op_repr_with_py_stack: no effect.

    Attributes:
        config: the graph's options, a :class:`GraphConfig`.
        name: the class's name with a number.
    """

    config: GraphConfig

    def __init__(
        self,
        *,
        debug_v_level: int = -1,
        debug_ranks: int | Sequence[int] | None = None,
        debug_max_py_stack_depth: int = 2,
        debug_only_user_py_stack: bool = True,
        debug_op_repr_with_py_stack: bool = False,
    ) -> None:
        super().__init__()
        self.config = GraphConfig()
        self._name = f"{type(self).__name__}_{next(_counters[type(self).__name__])}"
        self._debug_level = -1
        self.debug(debug_v_level, ranks=debug_ranks)

    @property
    def name(self) -> str:
        """Return the class's name with a number."""
        return self._name

    @property
    def is_compiled(self) -> bool:
        """True if a step has been compiled."""
        return self._latest is not None

    @property
    def training(self) -> bool:
        """True if the graph has an optimizer."""
        return self.config.training

    def add_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: LRScheduler | None = None,
        *,
        lr_sch: LRScheduler | None = None,
        is_sparse: bool = False,
    ) -> None:
        """Register an optimizer. After ``build()`` the graph makes its update and steps the scheduler.

        Each group with ``clip_grad_max_norm`` and ``clip_grad_norm_type`` is clipped separately before the update.

        Args:
            optimizer: the optimizer.
            lr_scheduler: the optimizer's scheduler, under zerograph's name.
            lr_sch: the optimizer's scheduler, under OneFlow's name.
            is_sparse: not supported.

        Raises:
            ConfigError: as in :meth:`zerograph.ZeroGraph.add_optimizer`; or both schedulers are passed, ``is_sparse``
                is True, only one of the clipping options is set, or the optimizer would ignore an option of a group.
        """
        if is_sparse:
            raise ConfigError("add_optimizer(is_sparse=True): updates are dense here; leave it out")
        if lr_sch is not None and lr_scheduler is not None:
            raise ConfigError("add_optimizer() takes lr_sch= or lr_scheduler=, which are the same, not both")
        if isinstance(optimizer, torch.optim.Optimizer):
            check_clipping(optimizer)
            check_options(optimizer)
        super().add_optimizer(optimizer, lr_scheduler if lr_sch is None else lr_sch)
        # No option of the user's, so not by the configuration's own check.
        object.__setattr__(self.config, "training", True)

    def set_grad_scaler(self, grad_scaler: GradScaler) -> None:
        """Set the loss scaler: a ``flow.amp.GradScaler`` or ``flow.amp.StaticGradScaler``.

        Raises:
            ConfigError: the argument is neither.
        """
        if not isinstance(grad_scaler, GradScaler):
            raise ConfigError(
                f"set_grad_scaler({grad_scaler!r:.60}): give flow.amp.GradScaler() or flow.amp.StaticGradScaler(200.0)"
            )
        self.config.precision.grad_scaler = grad_scaler

    def set_zero_mode(self, mode: str, stage: int | Literal["auto"] = DEFAULT_STAGE) -> None:
        """Call :meth:`zerograph.ZeroGraph.set_zero_mode`."""
        self.config.set(**options_of_mode(mode, stage))  # type: ignore[arg-type]

    def debug(
        self,
        v_level: int = -1,
        *,
        ranks: int | Sequence[int] | None = None,
        max_py_stack_depth: int = 2,
        only_user_py_stack: bool = True,
        op_repr_with_py_stack: bool = False,
    ) -> None:
        """Print a report of each compilation.

        Args:
            v_level: -1 prints nothing, 0 a line, 1 the passes too, 2 the operators too, 3 the source line of each
                operator too.
            ranks: the ranks that print. Default: rank 0; -1: all.
            max_py_stack_depth: no effect: operators always carry the user's innermost line.
            only_user_py_stack: no effect.
            op_repr_with_py_stack: no effect.

        Raises:
            ConfigError: the level does not exist, or ``ranks`` are not ranks.
        """
        if isinstance(v_level, bool) or not isinstance(v_level, int) or not -1 <= v_level <= 3:
            raise ConfigError(f"debug({v_level!r}): give a level from -1, nothing, to 3, everything")
        chosen = [0] if ranks is None else [ranks] if isinstance(ranks, int) else ranks
        if not isinstance(chosen, (list, tuple)) or not all(isinstance(number, int) for number in chosen):
            raise ConfigError(f"debug(ranks={ranks!r}): give a rank, or a list of ranks, or -1 for all")
        if v_level == -1:
            self._debug_level = -1
        elif -1 in chosen or rank() in chosen:
            self._debug_level = v_level

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step on this rank's part of the batch, or on global tensors.

        Global inputs give global outputs, losses included.

        Raises:
            ZeroGraphError: on every rank, before any state changes, if something is wrong on any of them.
            CommunicationError: another rank does not answer within ``config.checks.timeout`` seconds.
        """
        result = super().__call__(*args, **kwargs)
        global_input = next(_globals((args, kwargs)), None)
        if global_input is None:
            return result
        mesh = global_input.device_mesh
        return pytree.tree_map_only(
            Tensor, lambda leaf: leaf if isinstance(leaf, DTensor) else replicated(leaf, mesh), result
        )

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the state of each module under its name, and other state under ``zerograph``. A collective.

        All ranks get all of it, in whole tensors.

        Args:
            destination: the dict to write to. Default: a new one.
        """
        state = super().state_dict()
        result = {} if destination is None else destination
        result.update(state.pop("modules"))
        result[_REST] = state
        return result

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load what :meth:`state_dict` returned, on any number of ranks, also from ``flow.load``.

        A state of modules alone leaves optimizers unchanged. Modules without state may be missing.

        Args:
            state: a state of this graph, or of its modules alone.
            strict: require exactly the graph's modules, parameters and buffers; otherwise entries are loaded by name.

        Raises:
            ConfigError: the state does not fit; nothing has changed then.
        """
        self._check_state(state, strict)
        plain = pytree.tree_map_only(Tensor, whole_of, dict(state))
        rest = plain.pop(_REST, None)
        now = super().state_dict() if rest is None or not strict else {}
        modules = self._stateless() | plain if strict else _filled(now["modules"], plain)
        super().load_state_dict({**(now if rest is None else rest), "modules": modules})

    @staticmethod
    def trace(func: Callable[..., Any]) -> Graph:
        """Decorate a function: return a graph without modules whose ``build()`` calls it.

        Raises:
            ConfigError: the argument is not a function.
        """
        if not inspect.isfunction(func):
            raise ConfigError(f"Graph.trace takes a function, not {type(func).__name__}: for modules write a Graph")

        def build(self: Graph, *args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

        members = {"build": build, "__doc__": func.__doc__, "__module__": func.__module__}
        traced: Any = _TakesSwitches(f"{func.__name__}_graph", (Graph,), members)
        graph: Graph = traced()
        return graph

    def _state(self) -> Iterator[GraphTensor]:
        """Iterate over every parameter and buffer of the graph's modules, each once."""
        members = self._members()
        return map(GraphTensor, (*members.parameters.values(), *members.buffers.values()))

    def _check_state(self, state: Any, strict: bool) -> None:
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"load_state_dict() takes what state_dict() returned, or flow.load(path), not {state!r:.60}"
            )
        mine = [name for name, _ in self._members().root.named_children()]
        theirs = [key for key in state if key != _REST]
        by_module = all(isinstance(state[key], Mapping) for key in theirs)
        missing = set(mine) - {*theirs, *self._stateless()}
        if by_module and not (strict and (missing or set(theirs) - set(mine))):
            return
        shown = ", ".join(map(str, theirs[:4])) + (f", ... ({len(theirs)} keys)" if len(theirs) > 4 else "")
        name = min(missing, key=mine.index, default=mine[0] if mine else "model")
        raise ConfigError(
            f"the graph has the modules {', '.join(mine) or 'none'}; the loaded state is of {shown or 'nothing'}\n"
            f"If it is that of one module, wrap it: {{{name!r}: state}}, or call {name}.load_state_dict(state)."
        )

    def _stateless(self) -> dict[str, Any]:
        """Return the names of modules without state, each with an empty state."""
        children = self._members().root.named_children()
        return {name: {} for name, module in children if not module.state_dict(keep_vars=True)}

    def _constructed(self) -> None:
        self.config.take_switches()
        self._keep_state_whole()

    def _keep_state_whole(self) -> None:
        for module in self._attributes().values():
            if isinstance(module, nn.Module):
                keep_state_whole(module)

    def _ready(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], check: Callable[[], object] | None = None
    ) -> tuple[CompiledStep, Batch]:
        if self.config.gradient_accumulation_steps > 1:
            args, kwargs = pytree.tree_map_only(DTensor, _cut_on_one_rank, (args, kwargs))
        self._follow(_globals((args, kwargs)))
        return super()._ready(args, kwargs, check)

    def _on_compiled(self, step: CompiledStep, job: Job) -> None:
        super()._on_compiled(step, job)
        self._keep_state_whole()
        if self._debug_level >= 0:
            kind = f"ZeRO {self.config.policy.name}" if self.training else "forward graph"
            title = f"(GRAPH:{self.name}:{type(self).__name__}) {kind},"
            print(_report(self, title, self._debug_level), flush=True)

    def _join(self) -> Job:
        if self._job is None:
            # Errors of the members are raised later, on all ranks.
            with contextlib.suppress(ZeroGraphError):
                self._follow(self._members().parameters.values())
        return super()._join()

    def _follow(self, tensors: Iterable[Tensor]) -> None:
        """Take a placement of several dimensions from the tensors, unless the configuration has one.

        As in OneFlow, ZeRO splits along all of them.
        """
        if self.config.mesh.placement is None:
            meshes = (placement_of_tensor(tensor).mesh for tensor in tensors if is_global(tensor))
            self.config.mesh.placement = mesh = next((mesh for mesh in meshes if mesh.ndim > 1), None)
            if mesh is not None and self.config.zero.shard_dims is None:
                self.config.zero.shard_dims = tuple(range(mesh.ndim))

    def _traced_build(self, *args: Any, **kwargs: Any) -> Any:
        micro_batches = self.config.gradient_accumulation_steps
        with checkpoints(self._members().root), of_micro_batches(micro_batches, (args, kwargs)):
            result = super()._traced_build(*args, **kwargs)
        clip(self._optimizers)
        return result

    def _attributes(self) -> dict[str, Any]:
        # A change of these attributes compiles the graph again.
        return super()._attributes() | {"clipping of groups": clipping_facts(self._optimizers)}


def _globals(inputs: Any) -> Iterator[DTensor]:
    return (leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, DTensor))


def _cut_on_one_rank(value: DTensor) -> DTensor:
    """Return a global tensor on one rank with the SBP ``split(0)``, along which accumulation cuts."""
    if value.device_mesh.size() > 1 or not value.dim():
        return value
    split = [Shard(0)] + [Replicate()] * (value.device_mesh.ndim - 1)
    return DTensor.from_local(value.to_local(), value.device_mesh, split, run_check=False)


def _filled(now: Mapping[str, Mapping[str, Any]], loaded: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the current state with loaded entries of the same names."""
    return {
        name: {key: loaded.get(name, {}).get(key, value) for key, value in state.items()} for name, state in now.items()
    }


def _report(graph: ZeroGraph, title: str, level: int) -> str:
    """Return a line at level 0; 1 adds the passes, 2 the operators of the graph, 3 the user's line of each."""
    seconds = sum(record.seconds for record in graph.inspect.passes)
    lines = [f"{title} compiled in {seconds:.2f} s, {len(graph.inspect.collectives())} collectives"]
    if level >= 1:
        lines += [f"  pass {p.name}: {p.nodes} nodes, {p.seconds:.3f} s. {p.summary}" for p in graph.inspect.passes]
    if level >= 2:
        nodes = graph.inspect.text().splitlines()
        lines += [f"  {line if level >= 3 else line.partition('  # ')[0]}" for line in nodes]
    return "\n".join(lines)
