"""What belongs to a graph: modules, their parameters and buffers, optimizers; and what makes it compile anew."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from zerograph._torch import gradient_hooks, module_tables, without_torch_function
from zerograph.base.dictionaries import Dictionaries
from zerograph.capture.accelerator import ACCELERATOR
from zerograph.capture.guards import Identity, attribute_guards, module_guards
from zerograph.capture.trace import TensorSpec
from zerograph.capture.wrappers import check_modules
from zerograph.compiler.placement import to_local
from zerograph.errors import ConfigError, PlacementError
from zerograph.ir.annotate import annotate, annotated_sbp, annotation, copy_annotation
from zerograph.ir.sbp import NdSbp, broadcast, from_dtensor, partial_sum, show
from zerograph.runtime.job.process_group import Job
from zerograph.runtime.relayout import adopt_shard
from zerograph.runtime.state import store_of, stores_of

Optimizers = Sequence[torch.optim.Optimizer]


@dataclass(frozen=True, eq=False)
class Members:
    """The modules of a graph under one root, and every distinct tensor in them by its first qualified name.

    ``aliases`` maps further names of the same tensor (tied weights) to the first. With ``meta``, tensors on the meta
    device stand for tensors on that one; if that is the meta device itself, an accelerator, those on the CPU do so too.
    """

    root: nn.Module
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    meta: torch.device | None = None

    def device(self, tensor: Tensor) -> torch.device:
        """Where the tensor is, or is to be."""
        stands = self.meta is not None and (tensor.is_meta or self.on_accelerator)
        return self.meta if stands and self.meta is not None else tensor.device

    @property
    def on_accelerator(self) -> bool:
        """Whether all tensors stand for those of an accelerator that this build of torch need not know."""
        return self.meta == ACCELERATOR

    def specs(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
        """Shape, dtype, device and ``requires_grad`` of each."""
        return {
            name: TensorSpec(tuple(tensor.shape), tensor.dtype, self.device(tensor), tensor.requires_grad)
            for name, tensor in tensors.items()
        }

    def names(self) -> Mapping[int, str]:
        """Qualified name of each parameter, by ``id``."""
        return self._names

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.parameters.items()}

    @functools.cached_property
    def module_facts(self) -> tuple[Any, ...]:
        """Facts of the modules as they were when first asked for: :class:`Tree` knows whether they still are."""
        return module_guards(self.root)


def find_members(attributes: Mapping[str, Any]) -> Members:
    """The members of a graph with these attributes: those that are modules count.

    Raises:
        ConfigError: a lazy module that has not seen an input yet, or one whose parameters another library holds.
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
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(f"{name} has no shape yet: run the lazy module once before using it in a graph")
        if first.setdefault(id(parameter), name) == name:
            parameters[name] = parameter
        else:
            aliases[name] = first[id(parameter)]
    for name, buffer in root.named_buffers(remove_duplicate=False):
        if first.setdefault(id(buffer), name) == name:
            buffers[name] = buffer
        else:
            aliases[name] = first[id(buffer)]
    return Members(root, parameters, buffers, aliases)


class Tree:
    """The members of a graph as they were found, which tells cheaply whether they would be found so again.

    Compares every attribute of every module, and all that it holds parameters, buffers, modules and hooks in, object by
    object: what numbers, flags and tuples say cannot change in the same object. Of a parameter, shape, dtype and the
    like can: those are asked for in each step.
    """

    def __init__(self, members: Members) -> None:
        self.members = members
        modules = [one for one in members.root.modules() if one is not members.root]
        self._modules, self._classes = modules, list(map(type, modules))
        self._contents = Dictionaries(one for module in modules for one in (vars(module), *module_tables(module)))

    def is_same(self, attributes: Mapping[str, Any]) -> bool:
        """Return whether a graph with these attributes has the same members, and these the same facts."""
        top = self.members.root._modules
        now = {name: value for name, value in attributes.items() if isinstance(value, nn.Module)}
        return list(now) == list(top) and all(map(operator.is_, now.values(), top.values())) and self.is_same_below()

    def is_same_below(self) -> bool:
        """Return whether the modules hold the same objects, whatever attributes the graph has."""
        return all(map(operator.is_, map(type, self._modules), self._classes)) and self._contents.are_same()


def current(tree: Tree | None, attributes: Mapping[str, Any]) -> Tree:
    """Return the members of a graph with these attributes: those of ``tree``, if they still are."""
    return tree if tree is not None and tree.is_same(attributes) else Tree(find_members(attributes))


def has_global(members: Members) -> bool:
    """Return True if any parameter or buffer is a global tensor."""
    return any(isinstance(one, DTensor) for one in (*members.parameters.values(), *members.buffers.values()))


def adopt_global(members: Members, optimizers: Optimizers, job: Job) -> None:
    """Replace parameters and buffers that are global tensors by plain ones; of what is split each rank keeps its piece.

    In the modules and in the optimizers: from here on the graph places them, split parameters as annotated parameters.
    Nothing is sent.

    Raises:
        PlacementError: one is partial, or split in a way that the graph cannot keep; nothing is changed then.
    """
    held: dict[str, Tensor] = {**members.parameters, **members.buffers}
    found = {name: tensor for name, tensor in held.items() if isinstance(tensor, DTensor)}
    for name, tensor in found.items():
        _check_global(name, tensor, job)
    plain: dict[int, Tensor] = {}
    for name, tensor in found.items():
        local = to_local(tensor.detach())
        made = _plain_parameter(name, tensor, local, job) if isinstance(tensor, nn.Parameter) else local
        vars(made)["_zerograph_was_global"] = tensor.device_mesh, from_dtensor(tensor.placements)
        plain[id(tensor)] = made
    for module in members.root.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        for name, old in [*parameters, *buffers]:
            if id(old) in plain:
                setattr(module, name, plain[id(old)])
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [plain.get(id(parameter), parameter) for parameter in group["params"]]
        for old in [parameter for parameter in optimizer.state if id(parameter) in plain]:
            optimizer.state[plain[id(old)]] = optimizer.state.pop(old)


def _check_global(name: str, tensor: DTensor, job: Job) -> None:
    sbp = from_dtensor(tensor.placements)
    if all(one == broadcast for one in sbp):
        return
    about = f"{name} of shape {tuple(tensor.shape)} is a global tensor placed {show(sbp)}"
    if partial_sum in sbp:
        raise PlacementError(f"{about}: between steps nothing is a partial sum\nMake it broadcast or split(d).")
    if not isinstance(tensor, nn.Parameter):
        raise PlacementError(f"{about}, but each rank holds the whole of a buffer\nMake it broadcast.")
    if tensor.device_mesh.mesh.tolist() != job.grid:
        raise PlacementError(
            f"{about} on the ranks {tensor.device_mesh.mesh.tolist()}, the graph runs on {job.grid}\n"
            "Set config.placement to the placement of the module."
        )
    annotated_sbp(name, tensor, job.mesh)


def _plain_parameter(name: str, tensor: nn.Parameter, local: Tensor, job: Job) -> nn.Parameter:
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
    """How a tensor that :func:`adopt_global` made plain was placed; None of any other."""
    found: tuple[DeviceMesh, NdSbp] | None = getattr(tensor, "_zerograph_was_global", None)
    return found


def check_optimizers(members: Members, optimizers: Optimizers) -> None:
    """Every parameter of every optimizer must be in the graph, and in one optimizer only.

    Raises:
        ConfigError: naming the optimizer and the parameter.
    """
    names = members.names()
    owner: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in parameters_of(optimizer):
            if id(parameter) not in names:
                raise ConfigError(
                    f"{_title(optimizers, number)} holds a parameter of shape {tuple(parameter.shape)} that no module "
                    "of the graph has\nAssign the module to an attribute of the graph in __init__, or build the "
                    "optimizer from the module that is there, after zg.to_global() if you make it global."
                )
            if owner.setdefault(id(parameter), number) != number:
                raise ConfigError(f"{names[id(parameter)]} is in two optimizers: give each its own parameters")


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Return the optimizer's parameters in the order in which its ``state_dict()`` numbers them."""
    for group in optimizer.param_groups:
        yield from group["params"]


def capture_facts(
    members: Members,
    attributes: Mapping[str, Any],
    optimizers: Optimizers,
    constants: Callable[[int, int], Mapping[str, Any]],
) -> dict[str, Any]:
    """What a captured graph depends on besides its inputs, by name; equal values mean the same graph.

    Args:
        constants: an optimizer's group, by their numbers, with those hyperparameters that are constants in the graph.
    """
    names, hooks = members.names(), gradient_hooks(members.parameters.values())
    with without_torch_function():
        parameters = tuple(
            [
                (
                    name,
                    p.shape,
                    p.dtype,
                    p.device,
                    p.requires_grad,
                    annotation(p),
                    *map(Identity, (*on_gradient, *behind)),
                )
                for (name, p), (on_gradient, behind) in zip(members.parameters.items(), hooks, strict=True)
            ]
        )
    return {
        "parameters": parameters,
        "buffers": tuple((name, b.shape, b.dtype, b.device) for name, b in members.buffers.items()),
        "tied weights": tuple(members.aliases.items()),
        "modules": members.module_facts,
        "attributes of the graph": attribute_guards(attributes),
        "optimizers": tuple(
            (
                type(optimizer).__qualname__,
                tuple(_hyperparameters(constants(number, i), names) for i in range(len(optimizer.param_groups))),
            )
            for number, optimizer in enumerate(optimizers)
        ),
        "autocast": tuple((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)),
    }


def layout_facts(members: Members) -> tuple[Any, ...]:
    """Where each parameter lives now, and whether a first update there needs a step of its own."""
    found: list[Any] = []
    for parameter in members.parameters.values():
        store = store_of(parameter)
        own_first = store is not None and store.fresh and (store.first_differs or store.keeps_unused)
        found.append(None if store is None else (store.serial, own_first))
    return tuple(found)


def first_updates(members: Members) -> dict[str, str]:
    """Return, for the notice of a step that is compiled again, which optimizers' first updates are done.

    Only of those whose first update is computed in another way than later ones: SGD with dampening, Rprop, ASGD.
    """
    stores = [store for store in stores_of(members.parameters.values()) if store.first_differs]
    done = {"to come" if store.fresh else "done" for store in stores}
    kinds = sorted({type(store.optimizer).__name__ for store in stores})
    return (
        {f"the first update of {', '.join(kinds)}, which is computed in another way": str(sorted(done))} if done else {}
    )


def _hyperparameters(group: Mapping[str, Any], names: Mapping[int, str]) -> tuple[Any, ...]:
    """All but the learning rate, which is an input of the graph."""
    values = tuple((key, _frozen(value)) for key, value in group.items() if key not in ("params", "lr", "initial_lr"))
    return values, tuple(names.get(id(parameter), "?") for parameter in group["params"])


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(one) for one in value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    # Without the address, which differs between ranks.
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value).split(" at 0x")[0]


def _title(optimizers: Optimizers, number: int) -> str:
    name = type(optimizers[number]).__name__
    return name if len(optimizers) == 1 else f"optimizer {number} ({name})"
