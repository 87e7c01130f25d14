"""The members of a graph (modules, parameters, buffers, optimizers), their checks, and facts that a step depends on."""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from zerograph._torch import WeakStorage, autocast_dtypes, gradient_hooks, module_tables, without_torch_function
from zerograph.base.dictionaries import Dictionaries
from zerograph.capture.accelerator import ACCELERATOR
from zerograph.capture.places import Identity, attribute_guards, module_guards
from zerograph.capture.trace import TensorSpec
from zerograph.capture.wrappers import check_modules
from zerograph.compiler.placement import to_local
from zerograph.errors import ConfigError, InputError, PlacementError
from zerograph.ir.annotate import annotate, annotated_sbp, annotation, copy_annotation, own_tensors
from zerograph.ir.sbp import NdSbp, broadcast, from_dtensor, is_dtensor, partial_sum, show
from zerograph.optim.hyperparameters import text_of
from zerograph.runtime.job.process_group import Job
from zerograph.runtime.parameters import parameters_of
from zerograph.runtime.state import adopt_shard, own_state, store_of, stores_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Optimizers = Sequence[torch.optim.Optimizer]


@dataclass(frozen=True, eq=False)
class Members:
    """The modules of a graph, and their tensors.

    Attributes:
        root: holds the modules as children.
        parameters, buffers: each distinct tensor, by its first qualified name.
        aliases: maps further names of a tensor (tied weights) to its first name.
        meta: the device that tensors on the meta device stand for. If it is the meta device itself, that stands for an
            accelerator, and tensors on the CPU stand for tensors on it too.
    """

    root: nn.Module
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    meta: torch.device | None = None

    def device(self, tensor: Tensor) -> torch.device:
        """Return the tensor's device, or the device that its own stands for."""
        if self.meta is not None and (tensor.is_meta or self.on_accelerator):
            return self.meta
        return tensor.device

    @property
    def on_accelerator(self) -> bool:
        """True if all tensors stand for tensors on an accelerator, which this build of torch need not support."""
        return self.meta == ACCELERATOR

    def specs(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
        """Return shape, dtype, device and ``requires_grad`` of each tensor, by name."""
        return {
            name: TensorSpec(tuple(tensor.shape), tensor.dtype, self.device(tensor), tensor.requires_grad)
            for name, tensor in tensors.items()
        }

    @functools.cached_property
    def names(self) -> dict[int, str]:
        """The qualified name of each parameter, by ``id``."""
        return {id(parameter): name for name, parameter in self.parameters.items()}

    def tied(self) -> set[str]:
        """Return the names of parameters that several modules hold, or one that a model uses in several places.

        A model that a second module of the graph wraps, such as the loss of a trainer, is not used twice by that.
        """
        named = [*((name, name) for name in self.parameters), *self.aliases.items()]
        places = Counter((first, name.partition(".")[0]) for name, first in named)
        holders = Counter(id(one) for module in self.root.modules() for one in module._parameters.values())
        several = {first for (first, _), count in places.items() if count > 1}
        return several | {name for name, parameter in self.parameters.items() if holders[id(parameter)] > 1}

    @functools.cached_property
    def module_facts(self) -> tuple[Any, ...]:
        """Facts of the modules at the first read. :class:`Tree` tells whether they still hold."""
        return module_guards(self.root)


def check_devices(members: Members, inputs: Iterable[tuple[str, torch.device]]) -> None:
    """Refuse parameters and buffers without values, and inputs on a device where the model has none.

    Args:
        members: the modules, and their tensors.
        inputs: name and device of each input with a dimension. Others may be on any device.

    Raises:
        InputError: names the tensor, and both devices or what to do.
    """
    state = {**members.parameters, **members.buffers}
    for name, tensor in state.items():
        if tensor.device.type == "meta":
            raise InputError(
                f"{name} is on the meta device and has no values\n"
                "Construct the model inside zg.sharded_init(), which gives each rank its part of the values, or move "
                "it by model.to_empty(device=...) and load its state_dict()."
            )
    places = {tensor.device: name for name, tensor in reversed(state.items())}
    for name, device in inputs:
        if places and device not in places:
            place, first = list(places.items())[-1]
            raise InputError(
                f"{name} is on {device}, and {first} on {place}\nMove the input before the call: x.to({str(place)!r})."
            )


def find_members(attributes: Mapping[str, Any]) -> Members:
    """Return the members of a graph with these attributes. Only attributes that are modules matter.

    Raises:
        ConfigError: a lazy module has no shapes yet, or another library manages a module's parameters.
    """
    root = nn.Module()
    for name, value in attributes.items():
        if isinstance(value, nn.Module):
            root.add_module(name, value)
    check_modules(root)
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    tables: tuple[dict[str, Any], ...] = (parameters, buffers)
    for table, named in zip(tables, (root.named_parameters, root.named_buffers), strict=True):
        for name, tensor in named(remove_duplicate=False):
            if isinstance(tensor, UninitializedParameter):
                raise ConfigError(f"{name} has no shape yet: run the lazy module once before you use it in a graph")
            if first.setdefault(id(tensor), name) == name:
                table[name] = tensor
            else:
                aliases[name] = first[id(tensor)]
    return Members(root, parameters, buffers, aliases)


class Tree:
    """The members of a graph, with a cheap check that they are unchanged.

    The check compares every attribute of every module, and its tables of parameters, buffers, modules and hooks, object
    by object: numbers, flags and tuples cannot change in place. Shape, dtype and the like of a parameter can; a step
    reads them each time.
    """

    def __init__(self, members: Members) -> None:
        self.members = members
        modules = [module for module in members.root.modules() if module is not members.root]
        self._modules, self._classes = modules, list(map(type, modules))
        self._contents = Dictionaries(table for module in modules for table in (vars(module), *module_tables(module)))

    def is_same(self, attributes: Mapping[str, Any]) -> bool:
        """Return True if a graph with these attributes has the same members, and these have the same facts."""
        children = self.members.root._modules
        modules = {name: value for name, value in attributes.items() if isinstance(value, nn.Module)}
        return (
            list(modules) == list(children)
            and all(map(operator.is_, modules.values(), children.values()))
            and self.is_same_below()
        )

    def is_same_below(self) -> bool:
        """Return True if the modules hold the same objects. Does not look at the graph's attributes."""
        return all(map(operator.is_, map(type, self._modules), self._classes)) and self._contents.are_same()


def repeated_blocks(module: nn.Module, path: str = "") -> Iterator[str]:
    """Yield the qualified names of the blocks that ``module`` repeats, in order.

    A block is a child of a container that numbers its children, as ``nn.ModuleList`` and ``nn.Sequential`` do. Another
    child there must be of the same class, and the block must have children itself. If such children differ in their
    parameters and contain blocks themselves, their blocks count instead: the layers of a Swin transformer are blocks,
    its stages are not.
    """
    numbered = [child for name, child in module.named_children() if name.isdigit()]
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        inner = list(repeated_blocks(child, child_path))
        same_class = [sibling for sibling in numbered if type(sibling) is type(child)] if name.isdigit() else []
        is_block = len(same_class) > 1 and any(True for _ in child.children())
        if is_block and (not inner or len({_parameter_shapes(sibling) for sibling in same_class}) == 1):
            yield child_path
        else:
            yield from inner


def _parameter_shapes(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, parameter.shape) for name, parameter in module.named_parameters())


def has_global(members: Members) -> bool:
    """Return True if any parameter or buffer is a global tensor."""
    return any(is_dtensor(tensor) for tensor in (*members.parameters.values(), *members.buffers.values()))


def adopt_global(members: Members, optimizers: Optimizers, job: Job) -> None:
    """Replace global tensors in the modules and optimizers by plain ones. Nothing is sent.

    From then on the graph places them. A parameter that is split becomes an annotated parameter, of which each rank
    keeps its piece.

    Raises:
        PlacementError: a global tensor is partial, or split in a way that the graph cannot keep. Nothing is changed.
    """
    tensors: dict[str, Tensor] = {**members.parameters, **members.buffers}
    global_tensors = {name: tensor for name, tensor in tensors.items() if is_dtensor(tensor)}
    for name, tensor in global_tensors.items():
        _check_global(name, tensor, job)
    plain_tensors: dict[int, Tensor] = {}
    for name, tensor in global_tensors.items():
        local = to_local(tensor.detach())
        plain = _plain_parameter(name, tensor, local, job) if isinstance(tensor, nn.Parameter) else local
        vars(plain)["_zerograph_was_global"] = tensor.device_mesh, from_dtensor(tensor.placements)
        plain_tensors[id(tensor)] = plain
    for module in members.root.modules():
        for name, old in own_tensors(module):
            if id(old) in plain_tensors:
                setattr(module, name, plain_tensors[id(old)])
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [plain_tensors.get(id(parameter), parameter) for parameter in group["params"]]
        for old in [parameter for parameter in own_state(optimizer) if id(parameter) in plain_tensors]:
            own_state(optimizer)[plain_tensors[id(old)]] = own_state(optimizer).pop(old)


def _check_global(name: str, tensor: DTensor, job: Job) -> None:
    """Raise a PlacementError if the graph cannot keep the placement of a global parameter or buffer."""
    sbp = from_dtensor(tensor.placements)
    if all(entry == broadcast for entry in sbp):
        return
    about = f"{name} of shape {tuple(tensor.shape)} is a global tensor placed {show(sbp)}"
    if partial_sum in sbp:
        raise PlacementError(f"{about}: between steps no tensor may be a partial sum\nMake it broadcast or split(d).")
    if not isinstance(tensor, nn.Parameter):
        raise PlacementError(f"{about}, but every rank must hold the whole of a buffer\nMake it broadcast.")
    if tensor.device_mesh.mesh.tolist() != job.grid:
        raise PlacementError(
            f"{about} on the ranks {tensor.device_mesh.mesh.tolist()}, the graph runs on {job.grid}\n"
            "Set config.mesh.placement to the placement of the module."
        )
    annotated_sbp(name, tensor, job.mesh)


def _plain_parameter(name: str, tensor: nn.Parameter, local: Tensor, job: Job) -> nn.Parameter:
    """Return a plain parameter in place of a global one.

    Args:
        tensor: the global parameter.
        local: this rank's part of it. If that is not the whole, the job stores it, and the data of the parameter is a
            0-d tensor expanded to the global shape.
    """
    sbp = annotation(tensor)
    whole = tensor.shape == local.shape
    data = local if whole else local.new_zeros(()).expand(tensor.shape)
    parameter = nn.Parameter(data, tensor.requires_grad)
    copy_annotation(tensor, parameter)
    if sbp is not None:
        annotate(parameter, sbp=sbp)
        if not whole:
            adopt_shard(job, name, parameter, local, sbp)
    return parameter


def was_global(tensor: Tensor) -> tuple[DeviceMesh, NdSbp] | None:
    """Return the mesh and SBP that a tensor had before :func:`adopt_global`; None if it was plain."""
    placed: tuple[DeviceMesh, NdSbp] | None = getattr(tensor, "_zerograph_was_global", None)
    return placed


def check_optimizers(members: Members, optimizers: Optimizers) -> None:
    """Check that every parameter of every optimizer is in the graph, and in one optimizer only.

    Raises:
        ConfigError: one is not; names the optimizer and the parameter.
    """
    names = members.names
    owner: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in parameters_of(optimizer):
            if id(parameter) not in names:
                raise ConfigError(
                    f"{_title(optimizers, number)} holds a parameter of shape {tuple(parameter.shape)} that no module "
                    "of the graph has\nAssign the module to an attribute of the graph in __init__, or build the "
                    "optimizer from the graph's module, after zg.to_global() if you make that global."
                )
            if (other := owner.setdefault(id(parameter), number)) != number:
                raise ConfigError(
                    f"{names[id(parameter)]} is in two optimizers, {_title(optimizers, other)} and "
                    f"{_title(optimizers, number)}: put each parameter into one only"
                )


def capture_facts(
    members: Members,
    attributes: Mapping[str, Any],
    optimizers: Optimizers,
    constants: Callable[[int, int], Mapping[str, Any]],
    *,
    runs_modules: bool = True,
) -> dict[str, Any]:
    """Return what a captured graph depends on besides its inputs, by name. Equal facts mean the same graph.

    Args:
        members: the modules and tensors.
        attributes: the graph's public attributes.
        optimizers: those of the graph.
        constants: returns the hyperparameters that are constants in the graph, of an optimizer and a group by number.
        runs_modules: the graph depends on what the modules hold besides tensors.
    """
    names, hooks = members.names, gradient_hooks(members.parameters.values())
    with without_torch_function():
        parameters = tuple(
            [
                (name, p.shape, p.dtype, p.device, p.requires_grad, annotation(p), *map(Identity, (*before, *after)))
                for (name, p), (before, after) in zip(members.parameters.items(), hooks, strict=True)
            ]
        )
    return {
        "parameters": parameters,
        "buffers": tuple((name, b.shape, b.dtype, b.device) for name, b in members.buffers.items()),
        "tied weights": tuple(members.aliases.items()),
        "modules": members.module_facts if runs_modules else (),
        "attributes of the graph": attribute_guards(attributes),
        "optimizers": tuple(
            (
                type(optimizer).__qualname__,
                tuple(_hyperparameters(constants(number, i), names) for i in range(len(optimizer.param_groups))),
            )
            for number, optimizer in enumerate(optimizers)
        ),
        "autocast": autocast_dtypes(),
    }


def layout_facts(members: Members) -> tuple[Any, ...]:
    """Return, for each parameter, its store and whether the store's first update needs a step of its own."""
    layout: list[Any] = []
    for parameter in members.parameters.values():
        store = store_of(parameter)
        own_first = store is not None and store.fresh and (store.first_differs or store.keeps_unused)
        layout.append(None if store is None else (store.serial, own_first))
    return tuple(layout)


def first_updates(members: Members) -> dict[str, str]:
    """Return whether the first update is done of optimizers that compute it in another way than later updates.

    Such optimizers are SGD with dampening, Rprop and ASGD. The result is a fact for the warning of repeated
    compilations, empty without such optimizers.
    """
    stores = [store for store in stores_of(members.parameters.values()) if store.first_differs]
    if not stores:
        return {}
    states = sorted({"to come" if store.fresh else "done" for store in stores})
    kinds = sorted({type(store.optimizer).__name__ for store in stores})
    return {f"the first update of {', '.join(kinds)}, which is computed in another way": str(states)}


def _hyperparameters(group: Mapping[str, Any], names: Mapping[int, str]) -> tuple[Any, ...]:
    """Return all hyperparameters except the learning rate, an input of the graph, and the names of the parameters."""
    values = tuple((key, _frozen(value)) for key, value in group.items() if key not in ("params", "lr", "initial_lr"))
    return values, tuple(names.get(id(parameter), "?") for parameter in group["params"])


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(element) for element in value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    # The address of an object differs between ranks.
    is_number = isinstance(value, (bool, int, float, str))
    return value if value is None or is_number else re.sub(" at 0x[0-9a-f]+", "", text_of(value))


def _title(optimizers: Optimizers, number: int) -> str:
    name = type(optimizers[number]).__name__
    return name if len(optimizers) == 1 else f"optimizer {number} ({name})"


def model_sizes(members: Members) -> set[int]:
    """Return the sizes of parameters and buffers, which dynamic dimensions are not traced with."""
    specs = [*members.specs(members.parameters).values(), *members.specs(members.buffers).values()]
    return {size for spec in specs for size in spec.shape if isinstance(size, int)}


def parameter_groups(members: Members, optimizers: Optimizers) -> list[tuple[str, dict[str, Any], list[str]]]:
    """Return every parameter group, with its optimizer's name in the graph and the names of its parameters."""
    return [
        (f"optimizer{number}", group, [members.names[id(parameter)] for parameter in group["params"]])
        for number, optimizer in enumerate(optimizers)
        for group in optimizer.param_groups
    ]


def check_shared_memory(members: Members, constants: Sequence[tuple[str, Tensor]], changed: Collection[str]) -> None:
    """Check that no member that a step changes shares memory with another member, or with a constant.

    Parts of one large tensor that do not overlap share none.

    Args:
        members: the modules and tensors.
        constants: other tensors that the step reads, and what they are.
        changed: names of parameters that get a gradient, and of buffers that are written.

    Raises:
        SharedMemoryError: one of these overlaps another tensor; names both.
    """
    # A parameter whose values are split between ranks has one element, in memory of its own.
    with without_torch_function():
        tensors = (*members.parameters.items(), *members.buffers.items(), *constants)
        spans = sorted(_spans(tensors), key=lambda span: span.begin)
        open_spans: list[_Span] = []
        for span in spans:
            open_spans = [other for other in open_spans if other.end > span.begin]
            for other in open_spans:
                if not {other.name, span.name}.isdisjoint(changed) and _overlap(other, span):
                    raise SharedMemoryError(other.name, span.name)
            open_spans.append(span)
        former = {
            memory: name
            for store in stores_of(members.parameters.values())
            for name, memory in store.former.items()
            if not memory.expired()
        }
        for title, constant in constants if former else ():
            if (name := former.get(WeakStorage(constant.untyped_storage()))) is not None:
                raise SharedMemoryError(name, title)


class SharedMemoryError(ConfigError):
    """Two tensors share memory, which a graph gives each: no way to run the step computes what was meant."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(
            f"{first} and {second} share memory, but are two tensors: a graph gives each its own, so a step that "
            "changes one would not change the other\nTie parameters by making them one (b.weight = a.weight, without "
            ".data). Make a buffer a copy (.clone()), or compute it in forward()."
        )


@dataclass(frozen=True, eq=False)
class _Span:
    """A tensor's memory: the addresses ``begin <= address < end``."""

    begin: int
    end: int
    name: str
    tensor: Tensor


def _spans(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[_Span]:
    for name, tensor in tensors:
        if tensor.is_meta or not tensor.numel() or tensor.layout != torch.strided or is_dtensor(tensor):
            continue
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.data_ptr()
        yield _Span(begin, begin + (last + 1) * tensor.element_size(), name, tensor)


def _overlap(first: _Span, second: _Span) -> bool:
    """Return True if any byte is in both tensors. Spans of two columns of a matrix intersect, but share no byte."""
    if first.tensor.device != second.tensor.device:
        return False
    if first.begin == second.begin or (first.tensor.is_contiguous() and second.tensor.is_contiguous()):
        return True
    start = min(first.begin, second.begin)
    marks = torch.zeros(max(first.end, second.end) - start, dtype=torch.bool, device="cpu")
    _bytes(marks, first, start).fill_(True)
    return bool(_bytes(marks, second, start).any())


def _bytes(marks: Tensor, span: _Span, start: int) -> Tensor:
    """Return the view of ``marks``, one mark per byte from ``start`` on, that covers the tensor's bytes."""
    size = span.tensor.element_size()
    # A dimension of stride 0 is expanded: its bytes exist once.
    dims = [(n, stride) for n, stride in zip(span.tensor.shape, span.tensor.stride(), strict=True) if stride]
    shape, strides = [n for n, _ in dims], [stride * size for _, stride in dims]
    return marks.as_strided([*shape, size], [*strides, 1], span.begin - start)
