"""Generate tokens from sharded parameters, with the loop, caches and compilation of transformers' ``generate()``.

If a rank's memory budget allows it, parameters are gathered once, and each rank generates for its own rows without
communication. Otherwise :class:`_UnitGather` gathers them around each unit of a forward: a block of the model, or a
module with parameters outside of blocks. Then all ranks run the same units at the same time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zerograph.errors import CommunicationError, ConfigError, InputError, RankMismatchError
from zerograph.runtime.job.process_group import Job, agree, agreeing, reporting_failures
from zerograph.runtime.state import Store, reshard, start_unshard, store_of, stores_of, unshard

_DOING = "a forward of generate()"


@dataclass(frozen=True)
class Generation:
    """A checked call of ``generate()``.

    Attributes:
        ids: prompts of this rank's rows.
        options: further arguments of the model's ``generate()``.
        stores: the buckets to gather, in order.
    """

    model: Any
    ids: Tensor
    options: Mapping[str, Any]
    stores: tuple[Store, ...]

    @property
    def whole_bytes(self) -> int:
        """Bytes of the gathered parameters."""
        return sum(math.prod(store.layout.shape) * store.layout.dtype.itemsize for store in self.stores)


def check_call(root: nn.Module, model: Any, ids: Any, options: Mapping[str, Any], *, compiled: bool) -> Generation:
    """Return the call, with prompts of unequal lengths padded.

    Args:
        root: a module that has the modules of the graph as its children.
        compiled: a step of the graph is compiled.

    Raises:
        ConfigError: the model is not in the graph, cannot generate, or is not on all ranks yet; or padding is needed,
            and there is no token for it.
    """
    if not isinstance(model, nn.Module) or not any(module is model for module in root.modules()):
        raise ConfigError(
            f"generate() takes a module of the graph, such as step.model, not this {type(model).__name__}"
        )
    if not callable(getattr(model, "generate", None)):
        raise ConfigError(f"{type(model).__name__} has no generate(): give a model of transformers that generates")
    parameters = [parameter for parameter in model.parameters() if parameter.numel()]
    if not compiled and any(store_of(parameter) is None for parameter in parameters):
        raise ConfigError(
            "generate() before the first step: ranks may hold different parameters\n"
            "Call the graph, or compile(*inputs), or load the model with zg.from_pretrained()."
        )
    stores = tuple(store for store in stores_of(parameters) if not store.layout.is_whole)
    if not isinstance(ids, Tensor):
        ids, mask = _padded(model, ids, options)
        options = {"attention_mask": mask, **options}
    return Generation(model, ids, options, stores)


def _padded(model: Any, rows: Sequence[Any], options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return rows of tokens as one tensor, and its attention mask. Decoders are padded on the left."""
    device = next(model.parameters()).device
    tensors = [torch.as_tensor(row, dtype=torch.int64, device=device) for row in rows]
    if not tensors:
        return torch.empty(0, 0, dtype=torch.int64, device=device), torch.empty(0, 0, dtype=torch.int64, device=device)
    config = options.get("generation_config") or getattr(model, "generation_config", None)
    pad = options.get("pad_token_id", getattr(config, "pad_token_id", None))
    if pad is None and len({len(row) for row in tensors}) > 1:
        raise ConfigError("prompts of unequal lengths need a token for padding: give pad_token_id=")
    side = "right" if getattr(model.config, "is_encoder_decoder", False) else "left"

    def joined(values: Sequence[Tensor], fill: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(list(values), batch_first=True, padding_value=fill, padding_side=side)

    return joined(tensors, pad or 0), joined([torch.ones_like(row) for row in tensors], 0)


def facts_of(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return what must be equal on all ranks: the model, and arguments that are not tensors."""
    compared = {key: value for key, value in sorted(options.items()) if not isinstance(value, Tensor)}
    return {"the model": name, **{key: _described(value) for key, value in compared.items()}}


def _described(value: Any) -> str:
    if hasattr(value, "to_json_string"):
        return str(value.to_json_string())
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return repr([_described(item) for item in value])
    # Of functions each rank may have its own.
    return type(value).__name__


def generate(job: Job, call: Generation, *, whole: bool) -> Any:
    """Return what the model's ``generate()`` returns for this rank's rows. Every rank must call it.

    Args:
        whole: gather all parameters at once.
    """
    with _evaluating(call.model):
        if not whole:
            with _UnitGather(job, call) as units:
                return units.run()
        with _gathered(call), agreeing(job, "the end of generate()"):
            return call.model.generate(call.ids, **call.options) if len(call.ids) else call.ids


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set the model to evaluation inside, without dropout, and restore the mode of each module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def _gathered(call: Generation) -> Iterator[None]:
    """Gather all parameters inside, and free them at the end."""
    try:
        unshard(call.stores)
        yield
    finally:
        for store in call.stores:
            reshard(store, keep_changes=False)


class _UnitGather:
    """Gather the buckets of each unit before it runs, and those of the next one meanwhile.

    Before each forward the ranks tell each other which module they are about to run. A rank that has generated all its
    rows tells that it is done, and then gathers with the others until all are done.

    Attributes:
        plans: the units of a forward in order, by the index of the module that is called. Recorded at its first
            forward, in which nothing is gathered ahead of time.
    """

    def __init__(self, job: Job, call: Generation) -> None:
        self._job, self._call = job, call
        self.plans: dict[int, list[int]] = {}
        self._units = _units(call.model)
        self._resident: list[Store] = []
        self._pending: dict[Store, Callable[[], None]] = {}
        self._depth = 0
        self._kind = -1
        self._position = 0
        self._recorded: list[int] = []
        self._handles: list[Any] = []

    def __enter__(self) -> _UnitGather:
        numbers = {id(module): number for number, (module, _) in enumerate(self._units)}
        for index, module in enumerate(self._call.model.modules()):
            if any(_is_split(parameter) for parameter in module.parameters()):
                enter = self._enter_hook(index, numbers.get(id(module)))
                self._handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(self._leave)]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        with contextlib.suppress(CommunicationError):
            self._finish_pending()
        self._free(self._resident)

    def run(self) -> Any:
        """Generate for this rank's rows, then gather with the other ranks until all are done."""
        with reporting_failures(self._job, "generate()"):
            try:
                tokens = self._generated()
            except (CommunicationError, RankMismatchError):
                raise
            except BaseException as error:
                self._break_off(error)
                raise
            while (kind := self._announce(0)) is not None:
                self._begin(kind)
                for unit in self.plans[kind]:
                    self._use(unit)
            return tokens

    def _generated(self) -> Any:
        call = self._call
        if len(call.ids):
            # Compiled code would read parameters that are not gathered.
            return call.model.generate(call.ids, **{"disable_compile": True, **call.options})
        # A rank without rows learns the order of units from a row of its own.
        row = call.ids.new_zeros((1, max(1, call.ids.shape[1]), *call.ids.shape[2:]))
        call.model.generate(row, max_new_tokens=1, do_sample=False, num_beams=1, disable_compile=True)
        return call.ids

    def _break_off(self, error: BaseException) -> None:
        """Take part in the rest of the forward, and tell the other ranks of the error."""
        if self._depth:
            if self._kind not in self.plans:
                # The other ranks cannot be reached inside a first forward: they report the error when they time out.
                raise error
            for unit in self.plans[self._kind][self._position :]:
                self._use(unit)
        agree(self._job, _DOING, 0, dict, error, [0])

    def _announce(self, number: int) -> int | None:
        """Tell the other ranks which module this rank runs next, from 1, or 0; return the module that any of them runs.

        Raises:
            InputError: ranks run different modules, or one is done that cannot know the order of units.
        """
        numbers = {sizes[0] for sizes in agree(self._job, _DOING, 0, dict, None, [number])}
        kinds = numbers - {0}
        if len(kinds) > 1:
            raise InputError("ranks call different modules of the model in generate(), while it is gathered in units")
        kind = next(iter(kinds)) - 1 if kinds else None
        if 0 in numbers and kind is not None and kind not in self.plans:
            raise InputError("a rank is done before the model has called a module that others call in generate()")
        return kind

    def _enter_hook(self, index: int, unit: int | None) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            if not self._depth:
                self._announce(index + 1)
                self._begin(index)
            self._depth += 1
            if unit is not None:
                self._use(unit)

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self.plans.setdefault(self._kind, self._recorded)

    def _begin(self, kind: int) -> None:
        self._kind, self._position, self._recorded = kind, 0, []

    def _use(self, unit: int) -> None:
        plan = self.plans.get(self._kind)
        following: tuple[Store, ...] = ()
        if plan is None:
            self._recorded.append(unit)
        else:
            if self._position == len(plan) or plan[self._position] != unit:
                raise InputError(
                    f"{type(self._call.model).__name__} runs its modules in another order than in its first forward, "
                    "and cannot be gathered in units\nRaise config.memory.memory_budget, so that it is gathered once."
                )
            following = self._units[plan[(self._position + 1) % len(plan)]][1]
        self._position += 1
        self._hold(self._units[unit][1], following)

    def _hold(self, wanted: Sequence[Store], following: Sequence[Store]) -> None:
        """Gather the wanted buckets, free all others but those that follow, and start to gather these."""
        self._finish_pending()
        self._free([store for store in self._resident if store not in (*wanted, *following)])
        missing = [store for store in wanted if store not in self._resident]
        self._resident += missing
        unshard(missing)
        self._pending = {store: start_unshard(store) for store in following if store not in self._resident}

    def _finish_pending(self) -> None:
        while self._pending:
            store = next(iter(self._pending))
            self._pending.pop(store)()
            self._resident.append(store)

    def _free(self, stores: Sequence[Store]) -> None:
        for store in list(stores):
            reshard(store, keep_changes=False)
            self._resident.remove(store)


def _is_split(parameter: nn.Parameter) -> bool:
    store = store_of(parameter)
    return store is not None and not store.layout.is_whole


def _units(model: nn.Module) -> list[tuple[nn.Module, tuple[Store, ...]]]:
    """Return the units with their buckets: the outermost modules in lists, and other modules with own parameters.

    A block as a whole is a unit because its own modules may run in another order once keys and values are cached.
    """
    units: list[tuple[nn.Module, tuple[Store, ...]]] = []

    def walk(module: nn.Module, in_list: bool) -> None:
        parameters = [p for p in module.parameters(recurse=in_list) if _is_split(p)]
        if parameters and not isinstance(module, nn.ModuleList):
            units.append((module, tuple(stores_of(parameters))))
        for child in () if in_list else module.children():
            walk(child, isinstance(module, nn.ModuleList))

    walk(model, False)
    return units
