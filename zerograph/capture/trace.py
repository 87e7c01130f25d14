"""capture: ``build()`` and its ``backward()`` become one functional graph of ATen operators on global tensors."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.capture import decompositions, module_attributes, random_operators
from zerograph.capture.backward import Backward
from zerograph.capture.captured import Captured
from zerograph.capture.guards import build_guards
from zerograph.capture.local import Capturing, inside
from zerograph.capture.modes import NoDataAssignment, Recorder, explained, module_paths
from zerograph.capture.python_state import Place, PythonState
from zerograph.capture.refused_calls import refused_calls
from zerograph.capture.state_changes import StateComparison
from zerograph.capture.substitutes import substituted
from zerograph.errors import CaptureError
from zerograph.ir import finite_check
from zerograph.ir.alias import base_of, viewed
from zerograph.ir.functionalize import without_mutation
from zerograph.ir.gradient_edits import has_shape, is_edit, join_mixed_overflows, mark_edits, total_norm
from zerograph.ir.metadata import Role, meta, origin
from zerograph.ir.region import Region
from zerograph.ir.step_graph import found_inf_role, output_nodes, placeholders, restore_origins, writes

aten = torch.ops.aten


@dataclass(frozen=True)
class TensorSpec:
    """Global shape, dtype and device of a tensor that enters the step."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    def fake(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def capture(
    build: Callable[..., Any],
    root: nn.Module,
    parameters: Mapping[str, TensorSpec],
    buffers: Mapping[str, TensorSpec],
    aliases: Mapping[str, str],
    inputs: Sequence[TensorSpec],
    arrange: Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]],
    *,
    train: bool,
    ranks: int,
    groups: Sequence[tuple[dict[str, Any], Sequence[str]]] = (),
    trained: Mapping[str, Collection[str]] | None = None,
    clip_grad_norm: float | None = None,
    batch_norm_groups: int = 1,
    amp_dtype: torch.dtype | None = None,
    scaled: bool = False,
    checked: bool = False,
    guarded: Sequence[Place] = (),
) -> Captured:
    """Trace ``build(*args, **kwargs)`` and the ``backward()`` inside it, touching no weight.

    Args:
        build: called with fake tensors of global shape; once, unless its first trace shows that it takes another.
        root: holds every module that ``build`` uses.
        parameters: each distinct parameter of ``root`` by qualified name; the graph's first inputs.
        buffers: likewise, its next inputs.
        aliases: further names of the same tensors (tied weights), to the name above.
        inputs: the flat tensors that ``arrange`` makes ``(args, kwargs)`` of.
        train: optimizers are registered, so some parameter must get a gradient.
        ranks: into how many parts the batch is cut, on ranks beside each other or micro-batches one after another;
            only local regions depend on it.
        groups: the optimizers' parameter groups, each with the names of its parameters: ``zero_grad()`` acts on them.
        trained: the names of each optimizer's parameters, by the optimizer's name in the graph.
        clip_grad_norm: clip all gradients together to this norm after ``build()``.
        batch_norm_groups: equal parts of the batch, each of which batch norm normalises by itself.
        amp_dtype: compute under ``torch.autocast`` to this dtype; None for as ``build`` says.
        scaled: multiply the loss by an input of the graph, and unscale the gradients.
        checked: return besides whether losses and gradients are finite (:mod:`zerograph.ir.finite_check`).
        guarded: Python state of which the caller traces again when it changes.

    Raises:
        CaptureError: ``build`` reads a value while it is traced, draws random numbers that no graph can repeat, runs
            ``backward()`` on a non-scalar or, with ``train``, not at all, computes with a parameter that belongs to no
            module of the graph, with what the step before is to leave in an attribute, or with random numbers of Python
            or numpy.
    """
    mode = _torch.fake_mode()
    with mode:
        state = {name: _parameter(spec) for name, spec in parameters.items()}
        state |= {name: spec.fake() for name, spec in buffers.items()}
        for name, fake in state.items():
            original = root.get_parameter(name) if name in parameters else root.get_buffer(name)
            _take_over(original, fake)
            # Weakly: graphs keep their fakes.
            fake._zerograph_original = weakref.ref(original)  # type: ignore[attr-defined]
        batch = [spec.fake() for spec in inputs]
        seed = torch.empty((), dtype=torch.int64)
        device = next((tensor.device for tensor in state.values()), torch.device("cpu"))
        scale = [torch.empty((), device=device)] if scaled else []
    drawn = random_operators.Draws()
    table = decompositions.table(batch_norm_groups) | random_operators.table(drawn)
    # A region sees one rank's part already.
    own_table = decompositions.table() | random_operators.table(drawn)
    gradients: list[str] = []
    returned: list[Any] = []
    output_spec: list[pytree.TreeSpec] = []
    regions: list[Region] = []
    checks: list[Role] = []
    held = module_attributes.Attributes(getattr(build, "__self__", None), root, mode)

    def facts_left() -> object:
        held.give_back()
        return build_guards(build, root)

    settling = StateComparison(PythonState(build, root, [group for group, _ in groups]), guarded, facts_left)
    # By attribute, what the trace left there.
    left_there: dict[str, Tensor] = {}
    # How often build() calls backward(): known once it has been traced.
    backwards = [1]

    def replaced(tensors: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[None]:
        return _torch.with_tensors(root, dict(tensors) | {alias: tensors[name] for alias, name in aliases.items()})

    def step(*tensors: Tensor) -> list[Tensor]:
        own = dict(zip(state, tensors, strict=False))
        drawn.seed, *given = tensors[len(own) :]
        loss_scale = given.pop(0) if scaled else None
        backward = Backward(device.type, loss_scale, backwards[-1], {n: own[n] for n in parameters}, trained or {})
        args, kwargs = arrange(given)
        with (
            replaced(own),
            _swapped_groups(groups, own),
            _torch.replaced_total_norm(total_norm),
            NoDataAssignment(),
            module_paths(root) as path,
            Recorder(path),
            inside(Capturing(ranks, mode, own_table, drawn, lambda: Recorder(path), replaced, own, regions)),
            drawn.instead_of_torchs(),
            backward.instead_of_torchs(),
            torch.enable_grad(),
        ):
            with autocast():
                flat, spec = pytree.tree_flatten(build(*args, **kwargs))
            if clip_grad_norm is not None and any(own[name].grad is not None for name in parameters):
                nn.utils.clip_grad_norm_([own[name] for name in parameters], clip_grad_norm)
            module_attributes.keep_assigned(root, parameters, buffers, aliases, own)
        left_there.update(held.left())
        backwards.append(backward.count)
        output_spec.append(spec)
        returned.extend(Tensor if isinstance(value, Tensor) else value for value in flat)
        left = {name: gradient for name in parameters if (gradient := own[name].grad) is not None}
        gradients.extend(left)
        behind = [(found_inf_role(one.optimizer), one.found) for one in backward.overflows]
        if checked:
            scalars = [value for value in flat if isinstance(value, Tensor) and not value.dim()]
            behind += finite_check.residues([*backward.roots, *scalars], backward.checked(left), backward.overflows)
        checks.extend(found for found, _ in behind)
        return [
            *(value.detach() for value in flat if isinstance(value, Tensor)),
            *left.values(),
            *(value for _, value in behind),
            *(value.detach() for value in left_there.values()),
        ]

    def traced_anew() -> fx.GraphModule:
        for noted in (gradients, returned, output_spec, regions, checks, left_there):
            noted.clear()
        drawn.count = 0
        for tensor in state.values():
            tensor.grad = None
        return _torch.trace(step, inputs_of_step, table)

    def traced_besides() -> fx.GraphModule:
        """A further trace, of which nothing is left."""
        noted: tuple[list[Any], ...] = (gradients, returned, output_spec, regions, checks, backwards)
        before = [list(one) for one in noted]
        held.give_back()
        try:
            other = traced_anew()
            module_attributes.computed(other, left_there)
            return other
        finally:
            for one, values in zip(noted, before, strict=True):
                one[:] = values

    def autocast() -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if amp_dtype is None else torch.autocast(device.type, amp_dtype)

    inputs_of_step = [*state.values(), seed, *scale, *batch]
    with (
        settling.restored_on_error(),
        held.given_back(),
        mode,
        # With oneDNN a recurrent layer is one opaque kernel; without, the operators that rules know.
        _torch.without_onednn(),
        _torch.eager_checkpoint_policies(),
        substituted(),
        refused_calls(),
        _torch.compiling(),
        _torch.preserved_metadata(),
        explained(),
    ):
        traced = traced_anew()
        if scaled and gradients and not backwards[-1]:
            raise CaptureError(
                "the loss is to be scaled, but build() makes gradients without calling backward()\n"
                "Call loss.backward(), or set config.grad_scaler to None."
            )
        if scaled and backwards[-1] > 1:
            # Gradients were unscaled behind the first backward() of several.
            held.give_back()
            traced = traced_anew()
        if stored := module_attributes.computed(traced, left_there):
            # Is it read before it is written? Only a step behind another one shows.
            held.give_back(but=list(stored.values()))
            traced = _next_step(traced_anew, stored)
            module_attributes.computed(traced, left_there)
        if train and not gradients:
            raise CaptureError(
                "an optimizer is registered, but build() gave no parameter a gradient\n"
                "Call loss.backward() inside build(), on a loss that depends on the model's parameters."
            )
        _refuse_foreign_parameters(traced)
        module_attributes.refuse_fakes(traced, stored)
        module_attributes.warn_of_lost(stored)
        settled = settling.after(traced, traced_besides)
        _strip_profiling(traced.graph)
        _write_once(traced.graph, len(state))
        graph = without_mutation(traced)
    roles = [Role("parameter", name) for name in parameters] + [Role("buffer", name) for name in buffers]
    roles += [Role("seed", "seed"), *([Role("scaler", "scale")] if scaled else [])]
    _name_roles(graph, roles, [*(Role("gradient", name) for name in gradients), *checks])
    random_operators.refuse_others(graph.graph)
    _drop_restored(graph.graph)
    _refuse_changed_parameters(graph.graph)
    _strip_detaches(graph.graph)
    mark_edits(graph.graph)
    join_mixed_overflows(graph.graph, trained or {})
    _cancel_views(graph.graph)
    _strip_copies(graph.graph)
    _drop_unused_seed(graph.graph)
    _own_outputs(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return Captured(graph, output_spec[0], tuple(returned), tuple(gradients), tuple(regions), settled)


def _next_step(trace: Callable[[], fx.GraphModule], stored: Mapping[str, Tensor]) -> fx.GraphModule:
    """The graph of a step that finds what the one before has ``stored``.

    Raises:
        CaptureError: it fails with that.
    """
    try:
        return trace()
    except Exception as error:
        raise module_attributes.refused(*next(iter(stored.items()))) from error


def _parameter(spec: TensorSpec) -> Tensor:
    return nn.Parameter(spec.fake(), requires_grad=spec.requires_grad)


def _take_over(original: Tensor, fake: Tensor) -> None:
    """What users attach to a parameter is on the one that ``build()`` sees: attributes, and hooks on its gradient."""
    for name, value in vars(original).items():
        if not name.startswith("_zerograph"):
            vars(fake).setdefault(name, value)
    if fake.requires_grad:
        ((on_gradient, behind),) = _torch.gradient_hooks([original])
        for hook in on_gradient:
            fake.register_hook(hook)
        for hook in behind:
            fake.register_post_accumulate_grad_hook(hook)


def original_of(tensor: Tensor) -> Tensor:
    """The parameter or buffer that a fake one stands for while ``build()`` is traced; of any other tensor itself."""
    known: Callable[[], Tensor | None] | None = getattr(tensor, "_zerograph_original", None)
    found = None if known is None else known()
    return tensor if found is None else found


@contextlib.contextmanager
def _swapped_groups(
    groups: Sequence[tuple[dict[str, Any], Sequence[str]]], tensors: Mapping[str, Tensor]
) -> Iterator[None]:
    """Optimizers hold the traced parameters: ``zero_grad()`` clears their gradients, and clipping finds them."""
    before = [group["params"] for group, _ in groups]
    for group, names in groups:
        group["params"] = [tensors[name] for name in names]
    try:
        yield
    finally:
        for (group, _), parameters in zip(groups, before, strict=True):
            group["params"] = parameters


def _refuse_foreign_parameters(graph: fx.GraphModule) -> None:
    for node in graph.graph.find_nodes(op="get_attr"):
        constant = getattr(graph, str(node.target))
        if isinstance(constant, Tensor) and constant.requires_grad:
            raise CaptureError(
                f"build() computes with a parameter of shape {tuple(constant.shape)} that belongs to no module of the "
                "graph\nAssign the module that holds it to an attribute of the graph in __init__ (a plain list or dict "
                "hides modules: use nn.ModuleList or nn.ModuleDict)."
            )


def _name_roles(graph: fx.GraphModule, roles: Sequence[Role], behind: Sequence[Role]) -> None:
    """``roles`` of the first inputs, and of the outputs ``behind`` what ``build()`` returned."""
    for index, node in enumerate(placeholders(graph.graph)):
        meta(node)["role"] = roles[index] if index < len(roles) else Role("input", str(index - len(roles)))
    output = graph.graph.output_node()
    returned = len(output_nodes(graph.graph)) - len(behind)
    meta(output)["roles"] = [*(Role("output", str(i)) for i in range(returned)), *behind]
    restore_origins(graph.graph)


def _drop_restored(graph: fx.Graph) -> None:
    """A parameter that was changed in between, and got its old value back, was not changed."""
    for write, target, value in list(writes(graph)):
        if meta(target)["role"].kind != "parameter":
            continue
        while value.op == "call_function" and value.target in _SAME_VALUE:
            given = value.args[_SAME_VALUE[value.target]]
            if not isinstance(given, fx.Node) or not _alike(given, value):
                break
            value = given
        if value is target:
            write.replace_all_uses_with(target)
            graph.erase_node(write)


# Operators whose result has the values of one of their arguments, and which.
_SAME_VALUE: dict[Any, int] = {
    aten.copy.default: 1,
    aten.clone.default: 0,
    aten.detach.default: 0,
    aten.alias.default: 0,
    aten.view.default: 0,
}


def _alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta["val"], other.meta["val"]
    return bool(a.shape == b.shape and a.dtype == b.dtype)


def _refuse_changed_parameters(graph: fx.Graph) -> None:
    for _, target, _ in writes(graph):
        if meta(target)["role"].kind == "parameter":
            raise CaptureError(
                f"build() changes the {meta(target)['role']} in place\n"
                "Parameters change through optimizers only. To compute at other values for a while, keep "
                "old = p.detach().clone() and write it back with p.copy_(old) (p.sub_() rounds), or use "
                "torch.func.functional_call; else make it a buffer, or change it outside build()."
            )


def _strip_profiling(graph: fx.Graph) -> None:
    """``zero_grad()`` times itself for torch's profiler."""
    for node in reversed(list(graph.nodes)):
        if getattr(node.target, "namespace", "") == "profiler":
            graph.erase_node(node)


def _write_once(graph: fx.Graph, state: int) -> None:
    """What a checkpoint computes again does not change buffers again: batch norm counts a batch once.

    ``state`` counts the inputs that are parameters and buffers.
    """
    held = set(placeholders(graph)[:state])
    for node in graph.nodes:
        written = _torch.written_arguments(node)
        if held.isdisjoint(written):
            if viewed(node) in held:
                held.add(node)
        elif node.meta.get("custom", {}).get("recomputed") and _only_writes(node):
            node.replace_all_uses_with(written[0])
            graph.erase_node(node)
        else:
            held.add(node)


def _only_writes(node: fx.Node) -> bool:
    """Whether what the operator returns, if anybody reads it, is what it wrote."""
    assert isinstance(node.target, _torch.OpOverload)
    return not node.users or all(result.alias_info is not None for result in _torch.returns(node.target))


def _strip_detaches(graph: fx.Graph) -> None:
    """Autograd is over: a detached tensor is the tensor."""
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        source = node.all_input_nodes[0]
        if source.op == "call_function":
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _strip_copies(graph: fx.Graph) -> None:
    """A tensor that was made empty and then filled is what it was filled with."""
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        old_node, source = node.args[:2]
        assert isinstance(old_node, fx.Node)
        assert isinstance(source, fx.Node)
        if old_node.target not in _EMPTY:
            continue
        new, old = node.meta["val"], source.meta["val"]
        if (new.shape, new.dtype, new.device, new.stride()) == (old.shape, old.dtype, old.device, old.stride()):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


_EMPTY = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default}


def _drop_unused_seed(graph: fx.Graph) -> None:
    """Only a graph that draws has a seed."""
    for node in placeholders(graph, "seed"):
        if not node.users:
            graph.erase_node(node)


def _cancel_views(graph: fx.Graph) -> None:
    """Views that lead back to the tensor are gone: in-place edits of gradients that are views leave many of them."""
    for node in list(graph.nodes):
        if not is_edit(node) or node.target not in _VIEWS:
            continue
        chain, source = [node], node.all_input_nodes[0]
        while True:
            if has_shape(source, node.meta["val"].shape) and _is_identity(source, chain):
                node.replace_all_uses_with(source)
                break
            if source.target not in _VIEWS:
                break
            chain.append(source)
            source = source.all_input_nodes[0]
    for node in reversed(list(graph.nodes)):
        if not node.users and is_edit(node) and node.target in _VIEWS:
            graph.erase_node(node)


_VIEWS: set[Any] = {
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.alias.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
}


def _is_identity(source: fx.Node, chain: Sequence[fx.Node]) -> bool:
    """Whether the views, last first, show ``source`` as it is: of a contiguous tensor, they are as contiguous."""
    whole = torch.empty(source.meta["val"].shape, device="meta")
    seen = whole
    for view in reversed(chain):
        try:
            seen = view.target(seen, *view.args[1:], **view.kwargs)  # type: ignore[operator]
        except RuntimeError:
            return False
    return seen.shape == whole.shape and seen.stride() == whole.stride()


def _own_outputs(graph: fx.Graph) -> None:
    """Outputs that are views of a weight or buffer get memory of their own: the step is about to overwrite it."""
    output = graph.output_node()
    for node in output.all_input_nodes:
        if base_of(node).op == "placeholder":
            with graph.inserting_before(output):
                clone = graph.call_function(aten.clone.default, (node,))
            clone.meta.update({"val": node.meta["val"], "origin": origin(node)})
            output.replace_input_with(node, clone)
