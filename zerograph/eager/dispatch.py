"""Operators on global tensors: find or compile the program, box the arguments, run it on this rank's parts."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zerograph import _torch
from zerograph._torch import OpOverload, pytree
from zerograph.capture import random_operators
from zerograph.eager.program import Program, Slot, Spec
from zerograph.eager.world import World, world
from zerograph.errors import InputError
from zerograph.ir.mesh import local_part
from zerograph.ir.sbp import NdSbp, PartialSum, Split, broadcast
from zerograph.passes.rules import rule_of
from zerograph.runtime.job.process_group import agree, digest
from zerograph.runtime.tensor_hash import hash_bits

# The class in :mod:`.tensor`, which imports this module.
GlobalTensor = Any

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Operator:
    """An operator, and its programs.

    Attributes:
        operator: the operator.
        pointwise: its placement depends on a number only by whether it is 0.
        draws: it draws random numbers.
        written: indices of the arguments that it writes to.
        returned: index of the argument that it returns; None: it returns new tensors or views.
        views: it returns views.
        special: a function that runs it.
        programs: its programs, by the metadata of tensors and the other arguments. None: it runs on whole tensors.
        code: stands for it in histories; equal in all processes.
    """

    operator: OpOverload
    pointwise: bool
    draws: bool
    written: tuple[int, ...]
    returned: int | None
    views: bool
    special: Callable[..., Any] | None
    programs: dict[Any, Program | None]
    code: int


def _operator(operator: OpOverload) -> Operator:
    arguments = _torch.schema_arguments(operator)
    written = tuple(i for i, one in enumerate(arguments) if one.alias_info is not None and one.alias_info.is_write)
    results = _torch.returns(operator)
    returned = written[0] if written and len(results) == 1 and results[0].alias_info is not None else None
    special = _collective if operator.namespace in ("c10d", "_c10d_functional") else _SPECIAL.get(operator)
    if special is None and _torch.is_composite(operator):
        # Torch has not taken it apart, as in inference mode.
        special = lambda _, *args, **kwargs: operator.decompose(*args, **kwargs)  # noqa: E731
    if special is None and (without := _torch.overload_without_out(operator)) is not None:
        special = functools.partial(_into_out, *without)
    return Operator(
        operator,
        torch.Tag.pointwise in operator.tags,
        operator in _drawing(),
        written,
        returned,
        operator.is_view,
        special,
        {},
        zlib.crc32(str(operator).encode()),
    )


@functools.cache
def _drawing() -> frozenset[OpOverload]:
    return frozenset(random_operators.table(random_operators.Draws()))


def call(kind: type[GlobalTensor], operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator, of which at least one argument is a global tensor.

    Args:
        kind: the class of global tensors.
        operator: the operator.
        args, kwargs: its arguments.
    """
    now = world()
    # By identity: the hash of an operator is a function in Python.
    known: Operator | None = now.operators.get(id(operator))
    if known is None:
        known = now.operators[id(operator)] = _operator(operator)
    # Quotients of whole numbers have the default dtype.
    found = _, _, numbers, history = [torch.get_default_dtype()], list[Any](), list[Any](), [known.code]
    is_split = _describe((*args, *kwargs.items()), found, now, kind, with_numbers=not known.pointwise)
    result = _called(kind, known, args, kwargs, now, found, is_split)
    if known.written:
        for one in pytree.tree_leaves([args[index] for index in known.written if index < len(args)]):
            if type(one) is kind:
                _note_write(kind, one)
    number = hash(tuple(numbers)) if any(numbers) else 0
    for one in (result,) if type(result) is kind else pytree.tree_leaves((result, args[: len(known.written)])):
        if type(one) is kind:
            one.number, one.history = number or one.number, hash(tuple(history))
            # The next result is another one.
            history.append(0)
    return result


def sampled(x: Tensor) -> Sequence[Any]:
    """Return some elements of a tensor that every rank has, if reading them waits for nothing."""
    if x.device.type != "cpu" or x.layout is not torch.strided or isinstance(x, nn.Parameter):
        return ()
    some = x.detach().flatten()
    # NaN differs from itself.
    return [one if one == one else 0 for one in some[:: -(-len(some) // 32) or 1].tolist()]


def _called(
    kind: type[GlobalTensor], known: Operator, args: Any, kwargs: dict[str, Any], now: World, found: Any, is_split: bool
) -> Any:
    operator = known.operator
    if known.special is not None:
        return known.special(kind, *args, **kwargs)
    if now.rows_of_ranks and is_split and operator in _ALONG_ROWS:
        _check_order(operator, args, now)
    if known.draws:
        return _draw(kind, known, args, kwargs, now)
    if not is_split:
        return _run_whole(kind, known, args, kwargs, now)
    key, tensors, *_ = found
    wanted: Any = tuple(key)
    program = known.programs.get(wanted, _UNKNOWN)
    if program is _NUMBERED:
        wanted = wanted, _numbers_in((args, kwargs))
        program = known.programs.get(wanted, _UNKNOWN)
    if program is _UNKNOWN:
        now.make_space(known.programs)
        program = _compiled(kind, known, args, kwargs, tensors, now)
        if known.pointwise and program is not None and not program.keeps_arguments and wanted == tuple(key):
            # The program has the call's numbers inside.
            known.programs[wanted] = _NUMBERED
            wanted = wanted, _numbers_in((args, kwargs))
        known.programs[wanted] = program
    if program is None:
        return _run_gathered(kind, known, args, kwargs, now)
    if program.is_direct:
        results = program.run(*[one.local if type(one) is kind else one for one in args], **kwargs)
    elif program.arguments is None:
        results = program.run(*_parts(kind, program, tensors))
    else:
        parts = _parts(kind, program, tensors)
        # The call's own numbers, which the key of a pointwise operator leaves out.
        given, rest = ((args, kwargs), iter(parts)) if program.keeps_arguments else (program.arguments, parts)
        positional, named = _filled(given, rest)
        results = program.run(*positional, **named)
    if known.returned is not None:
        return args[known.returned]
    value = returned(kind, program, results)
    return _noted_views(kind, value, known, args, kwargs) if known.views else value


# They take rows apart, by their place in the batch, or join them.
_PIECES = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor})
_ALONG_ROWS = _PIECES | {aten.select.int, aten.unbind.int, aten.cat.default}


def _check_order(operator: OpOverload, args: Sequence[Any], now: World) -> None:
    """Refuse to train on pieces of rows that the ranks have cut themselves; warn where others are taken apart.

    Raises:
        InputError: a loss may depend on which rows a piece has.
    """
    if operator is aten.cat.default:
        # A program that joins global rows knows their order: pieces are likely those that it has joined.
        now.joins_rows |= (args[1] if len(args) > 1 else 0) == 0
        return
    at = 2 if operator in (aten.split.Tensor, aten.split_with_sizes.default) else 1
    if Split(0) not in args[0].spec.sbp or (args[at] if len(args) > at else 0) != 0:
        return
    if operator is aten.slice.Tensor and operator(torch.empty(len(args[0]), device="meta"), *args[1:]).numel() == len(
        args[0]
    ):
        return
    message = (
        "rows are taken apart by their place in the batch, where the batch is the rows of rank 0, then those of "
        "rank 1, and so on\nWhere the script has concatenated views, that is another order than in one process: "
        "pass its loader to zg.prepare(), or the rows as zg.global_tensor(part, zg.sbp.split(0))."
    )
    if operator in _PIECES and args[0].requires_grad and not now.joins_rows:
        raise InputError(message)
    now.warn(message)


_UNKNOWN: Any = object()
# In place of the program of a pointwise operator that has one for each value of its numbers.
_NUMBERED: Any = object()


def _numbers_in(arguments: Any) -> tuple[str, ...]:
    """Return the numbers among arguments, as texts that differ where they do."""
    return tuple(repr(leaf) for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, (bool, int, float)))


@dataclass
class View:
    """A view whose elements are a copy here, because ranks had to exchange them.

    A write to the view is written to the base too, and the view is taken anew once the base was written.

    Attributes:
        base: the tensor that it is a view of.
        operator, args, kwargs: the call that yields it.
        index: its index among several results.
        version: ``writes`` of the base when it was taken.
    """

    base: GlobalTensor
    operator: OpOverload
    args: Sequence[Any]
    kwargs: dict[str, Any]
    index: int | None
    version: tuple[int, int]

    def of(self, base: Tensor) -> Any:
        """Return the view of another base."""
        value = self.operator(base, *self.args[1:], **self.kwargs)
        return value if self.index is None else value[self.index]


def _noted_views(kind: type[GlobalTensor], value: Any, known: Operator, args: Any, kwargs: Any) -> Any:
    """Note on results of a view operator which of them are copies."""
    base = args[0]
    results = [value] if type(value) is kind else value
    for index, one in enumerate(results):
        if base.viewed is not None or not _torch.share_memory(one.local, base.local):
            number = None if results is not value else index
            one.viewed = View(base, known.operator, args, kwargs, number, base.writes)
    return value


def _note_write(kind: type[GlobalTensor], x: Any) -> None:
    """Count a write to a tensor; if its elements are a copy, write them to those of its base."""
    # Of the memory, so that views of this rank's part count too.
    memory = x.local.untyped_storage()
    memory._zerograph_writes = getattr(memory, "_zerograph_writes", 0) + 1
    if x.viewed is not None:
        base = x.viewed.base
        whole = whole_of(base)
        whole = whole.clone() if whole is base.local else whole
        # The copy itself: it is not taken anew from a base that torch counts as written already.
        x.viewed.of(whole).copy_(boxed(kind, kind(x.local, x.spec), world().whole).local)
        write_whole(base, whole)
        _note_write(kind, base)
        x.viewed.version = base.writes


def refresh(x: GlobalTensor) -> None:
    """Take a copied view anew if its base was written since."""
    view = x.viewed
    if view is None:
        return
    refresh(view.base)
    if view.base.writes != view.version:
        fresh = view.of(type(x)(view.base.local, view.base.spec))
        x.local, x.spec, view.version = fresh.local, fresh.spec, view.base.writes


def _describe(values: Sequence[Any], found: Any, now: World, kind: type, *, with_numbers: bool) -> bool:
    """Add what distinguishes arguments to the key, and tensors and what ranks may differ in to lists.

    Returns:
        Whether any of them is not whole.
    """
    is_split, (key, tensors, numbers, history) = False, found
    for value in values:
        type_ = type(value)
        if type_ is kind:
            if value.viewed is not None:
                refresh(value)
            key.append(value.spec)
            tensors.append(value)
            numbers.append(value.number)
            history.append(value.history)
            is_split |= value.spec.sbp != now.whole
        elif type_ is float or type_ is int or type_ is bool:
            key.append(type_)
            # A partial sum plus 0 is one too. 0.0 equals -0.0.
            key.append((value or str(value)) if with_numbers else not value)
            numbers.append(value if value == value else 0)
            if type_ is int:
                # Not others: a script may print a global number per second, each rank by its own clock.
                history.append(value)
        elif type_ is list or type_ is tuple:
            key.append(len(value))
            is_split |= _describe(value, found, now, kind, with_numbers=with_numbers)
        elif isinstance(value, Tensor):
            key.append(now.whole_spec(value) if value.layout is torch.strided else value.layout)
            tensors.append(value)
            numbers += sampled(value)
        else:
            key.append(value)
    return is_split


def _parts(kind: type[GlobalTensor], program: Program, tensors: Sequence[Any]) -> list[Tensor]:
    """Return this rank's parts of the arguments, boxed as the program needs them."""
    needs = program.needs
    parts: list[Tensor] = []
    for index, tensor in enumerate(tensors):
        one = tensor if type(tensor) is kind else None
        if needs is not None and (world().whole if one is None else one.spec.sbp) != needs[index]:
            one = boxed(kind, tensor, needs[index], program.rows)
        parts.append(tensor if one is None else one.local)
    return parts


def _filled(value: Any, parts: Any) -> Any:
    """Return arguments with this rank's parts in place of tensors.

    Args:
        value: the arguments, in tuples, lists and dicts.
        parts: an iterator over the parts, or a list of them by the number of a slot.
    """
    if isinstance(value, Slot):
        return parts[value.index]
    if isinstance(value, Tensor):
        return next(parts)
    if isinstance(value, dict):
        return {name: _filled(one, parts) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_filled(one, parts) for one in value]
    return value


def returned(kind: type[GlobalTensor], program: Program, results: Any) -> Any:
    """Return what a program has returned as global tensors, in the structure that the operator returns."""
    if type(program.outputs) is Spec and isinstance(results, Tensor):
        return kind(results, program.outputs)
    several = [results] if isinstance(results, Tensor) else results
    tensors = iter([one for one in several if isinstance(one, Tensor)])
    return pytree.tree_map_only(Spec, lambda spec: kind(next(tensors), spec), program.outputs)


def wrapped_whole(kind: type[GlobalTensor], tensor: Tensor) -> GlobalTensor:
    """Return a tensor that every rank has as a global one, of the same memory."""
    return kind(tensor.detach(), world().whole_spec(tensor))


def boxed(kind: type[GlobalTensor], x: GlobalTensor, sbp: NdSbp, rows: tuple[int, ...] | None = None) -> GlobalTensor:
    """Return the same tensor under another SBP. A collective where that needs one.

    Args:
        x: a global tensor, or a plain one that every rank has.
        rows: number of rows of each rank in the result, where it differs.
    """
    x = x if isinstance(x, kind) else wrapped_whole(kind, x)
    refresh(x)
    now = world()
    fits = rows in (None, x.spec.rows) and not any(
        isinstance(one, Split) and x.shape[one.dim] % sum(x.spec.rows or (1,)) for one in sbp
    )
    if not fits and all(any(isinstance(s, Split) for s in one) for one in (x.spec.sbp, sbp)):
        # A program has one division of rows.
        x = boxed(kind, x, now.whole)
    if x.spec.sbp == sbp:
        return x
    key, programs = (x.spec, sbp, rows), now.boxings
    if key not in programs:
        now.make_space(programs)
        programs[key] = now.compilation.compile(lambda one: one, [x.spec], [sbp], rows=rows)
    program = programs[key]
    with torch.no_grad():
        (result,) = program.run(x.local, history=x.history) if program.compares else program.run(x.local)
    moved = kind(result, program.outputs)
    moved.history = x.history
    return moved


def whole_of(x: GlobalTensor) -> Tensor:
    """Return the whole tensor on every rank, plain and without history. A collective unless every rank has it."""
    refresh(x)
    if x.known is not None and x.known[0] == x.writes:
        return x.known[1].clone()  # type: ignore[no-any-return]
    whole: Tensor = boxed(type(x), x, world().whole).local
    if not x.dim() and whole is not x.local:
        x.known = x.writes, whole
    return whole


def _compiled(
    kind: type[GlobalTensor], known: Operator, args: Any, kwargs: Any, tensors: Sequence[Any], now: World
) -> Program | None:
    """Return the program of an operator; None if it runs on whole tensors."""
    operator = known.operator
    # A copy does not read what it writes to, such as memory that nobody has written yet.
    read = tensors[1:] if operator is aten.copy_.default else tensors
    _check_alike(operator, [one for one in read if type(one) is not kind and not isinstance(one, nn.Parameter)], now)
    rows = {one.spec.rows for one in tensors if type(one) is kind and any(isinstance(s, Split) for s in one.spec.sbp)}
    # Of two batches the ranks may have other parts.
    if len(rows) > 1 or operator in _GATHERED or any(one.layout is not torch.strided for one in tensors):
        return None
    specs: list[Spec] = [one.spec if type(one) is kind else now.whole_spec(one) for one in tensors]

    def function(*fakes: Tensor) -> Any:
        positional, named = _filled((args, kwargs), iter(fakes))
        return known.operator(*positional, **named)

    try:
        program = now.compilation.compile(function, specs, operator=operator)
        is_flat = not any(isinstance(one, (list, tuple)) and any(isinstance(t, Tensor) for t in one) for one in args)
        has_boxing = program.needs is not None and list(program.needs) != [spec.sbp for spec in specs]
        named = any(isinstance(one, Tensor) for one in kwargs.values())
        if program.keeps_arguments and is_flat and not has_boxing and not named:
            program = replace(program, is_direct=True)
        return program
    except Exception:
        # An error of the user's is raised again where the operator runs on whole tensors.
        if rule_of(operator) is not None:
            return None
        now.warn(
            f"no rule says how {operator} may be split: it runs on whole tensors, which are gathered\n"
            "Give it a rule with zg.register_rule."
        )
        return None


def _check_alike(operator: OpOverload, plain: Sequence[Tensor], now: World) -> None:
    """Compare plain tensors beside global ones across ranks, at an operator's first call for their shapes.

    Raises:
        RankMismatchError: ranks have other values.
    """
    if not plain or now.job.size == 1:
        return
    number = digest([int(hash_bits(one.detach().to_dense().contiguous())) for one in plain])
    shapes = ", ".join(str(tuple(one.shape)) for one in plain)
    advice = f"with the digest {number}: make this rank's part global by zg.global_tensor(part, sbp)"
    facts = {f"a plain tensor beside a global one, of shape {shapes},": advice}
    agree(now.job, f"running {operator}", number, lambda: facts)


def _run_whole(kind: type[GlobalTensor], known: Operator, args: Any, kwargs: Any, now: World) -> Any:
    """Run an operator on tensors that every rank has."""
    positional, named = pytree.tree_map_only(kind, lambda x: x.local, (args, kwargs))
    result = known.operator(*positional, **named)
    if known.returned is not None:
        return args[known.returned]
    value = _as_global(kind, result, now)
    is_copied = known.views and type(args[0]) is kind and args[0].viewed is not None
    return _noted_views(kind, value, known, args, kwargs) if is_copied else value


def _as_global(kind: type[GlobalTensor], result: Any, now: World) -> Any:
    """Return results that every rank has as global tensors. Sparse ones stay plain."""
    if not isinstance(result, Tensor):
        return pytree.tree_map_only(Tensor, lambda one: _as_global(kind, one, now), result)
    return kind(result, now.whole_spec(result)) if result.layout is torch.strided else result


def _run_gathered(kind: type[GlobalTensor], known: Operator, args: Any, kwargs: Any, now: World) -> Any:
    """Run an operator on whole tensors, which are gathered; write back what it writes."""
    values = {id(x): whole_of(x) for x in pytree.tree_leaves((args, kwargs)) if type(x) is kind}
    positional, named = pytree.tree_map_only(kind, lambda x: values[id(x)], (args, kwargs))
    result = known.operator(*positional, **named)
    for index in known.written:
        name = _torch.schema_arguments(known.operator)[index].name
        target = args[index] if index < len(args) else kwargs.get(name)
        for one in target if isinstance(target, (list, tuple)) else [target]:
            if type(one) is kind and values[id(one)] is not one.local:
                write_whole(one, values[id(one)])
    if known.returned is not None:
        return args[known.returned]
    wrapped = _as_global(kind, result, now)
    return _noted_views(kind, wrapped, known, args, kwargs) if known.views else wrapped


def write_whole(x: GlobalTensor, value: Tensor) -> None:
    """Write the value of the whole tensor, which every rank has, to this rank's part. Nothing is sent."""
    mesh = world().mesh
    splits = tuple(broadcast if isinstance(one, PartialSum) else one for one in x.spec.sbp)
    holds = all(not at for one, at in zip(x.spec.sbp, mesh.position, strict=True) if isinstance(one, PartialSum))
    if holds:
        x.local.copy_(value[local_part(value.shape, splits, replace(mesh, rows=x.spec.rows))])
    else:
        # The first rank has the value of a partial sum, and the others zeros.
        x.local.zero_()


def _draw(kind: type[GlobalTensor], known: Operator, args: Any, kwargs: dict[str, Any], now: World) -> Any:
    """Run an operator that draws random numbers on whole tensors, as one device does; keep this rank's parts."""
    tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    x: Any = next(one for one in tensors if type(one) is kind)
    now.check_generator(kwargs.get("generator"), x.device)
    # Such an operator draws by the shape and dtype of its only tensor alone.
    is_like = bool(known.written) or known.operator.overloadpacket.__name__.endswith("_like")
    by_shape = is_like and len(tensors) == 1
    values = (args, kwargs)
    positional, named = pytree.tree_map_only(kind, lambda x: x.spec.fake() if by_shape else whole_of(x), values)
    result = known.operator(*positional, **named)
    for index in known.written:
        if type(args[index]) is kind:
            write_whole(args[index], positional[index])
    if known.returned is not None:
        return args[known.returned]
    sbp = tuple(broadcast if isinstance(one, PartialSum) else one for one in x.spec.sbp)

    def part(one: Tensor) -> Any:
        return boxed(kind, one, sbp, x.spec.rows) if one.shape == x.shape else wrapped_whole(kind, one)

    return pytree.tree_map_only(Tensor, part, result)


def _detach(kind: type[GlobalTensor], x: GlobalTensor) -> GlobalTensor:
    refresh(x)
    result = kind(x.local, x.spec)
    result.viewed = None if x.viewed is None else replace(x.viewed)
    return result


def _collective(*_: Any, **__: Any) -> NoReturn:
    raise InputError(
        "torch.distributed is called with a zg.GlobalTensor, which has the same values on all ranks\n"
        "Leave the call out, and count one process where its result is divided by the number of ranks. For an exchange "
        "of what each rank has, pass x.to_local()."
    )


def _into_out(operator: OpOverload, names: Sequence[str], kind: type[GlobalTensor], *args: Any, **kwargs: Any) -> Any:
    """Run an operator that writes to tensors of these names."""
    out = [kwargs.pop(name) for name in names]
    results = operator(*args, **kwargs)
    for one, result in zip(out, results if len(out) > 1 else [results], strict=True):
        if one.shape != result.shape:
            one.resize_(result.shape)
        one.copy_(result)
    return out if len(out) > 1 else out[0]


def _fill(kind: type[GlobalTensor], x: Any, value: Any = 0) -> Any:
    number = whole_of(value) if type(value) is kind else value
    if type(x) is not kind:
        return x.fill_(number)
    refresh(x)
    if any(isinstance(one, PartialSum) for one in x.spec.sbp):
        write_whole(x, torch.full(x.shape, 0, dtype=x.dtype, device=x.device).fill_(number))
    else:
        x.local.fill_(number)
    return x


def _packed(kind: type[GlobalTensor], x: Any, lengths: Any, batch_first: bool) -> tuple[GlobalTensor, Tensor]:
    """Pack sequences; the sizes of the steps are a plain tensor, which kernels and backward read."""
    values = [whole_of(one) if type(one) is kind else one for one in (x, lengths)]
    data, sizes = aten._pack_padded_sequence(*values, batch_first)
    return kind(data, world().whole_spec(data)), sizes


def _reshaped(operator: OpOverload, kind: type[GlobalTensor], x: Any, *args: Any) -> Any:
    """Change the shape of a tensor in place: give it the part and the metadata of the view, and torch its new shape."""
    view = getattr(torch, operator.overloadpacket.__name__[:-1])(x, *args)
    with _torch.without_dispatch():
        operator(x, *args)
    x.local, x.spec, x.viewed = view.local, view.spec, view.viewed
    return x


def _refuse(kind: type[GlobalTensor], *_: Any, **__: Any) -> NoReturn:
    raise InputError("a zg.GlobalTensor cannot be resized in place (resize_, set_): create another one")


def _marked(view: OpOverload, operator: OpOverload, kind: type[GlobalTensor], x: GlobalTensor) -> GlobalTensor:
    """Compute a view that torch only marks as conjugate or negative: ranks exchange memory, which has no mark."""
    result = operator(x)
    result.viewed = View(x, view, (x,), {}, None, x.writes)
    return result


_SPECIAL: dict[OpOverload, Callable[..., Any]] = {
    aten._conj.default: functools.partial(_marked, aten._conj.default, aten._conj_physical.default),
    aten._neg_view.default: functools.partial(_marked, aten._neg_view.default, aten.neg.default),
    aten.zero_.default: _fill,
    aten.fill_.Scalar: _fill,
    aten.fill_.Tensor: _fill,
    aten.resize_.default: _refuse,
    aten.set_.source_Tensor: _refuse,
    **{
        getattr(packet, name): functools.partial(_reshaped, getattr(packet, name))
        for packet in (aten.squeeze_, aten.unsqueeze_, aten.t_, aten.transpose_)
        for name in packet.overloads()
        if name != "dimname"
    },
    aten.detach.default: _detach,
    aten._local_scalar_dense.default: lambda _, x: whole_of(x).item(),
    aten.equal.default: lambda kind, *xs: torch.equal(*[whole_of(x) if type(x) is kind else x for x in xs]),
    aten.is_same_size.default: lambda _, x, y: x.shape == y.shape,
    aten._pack_padded_sequence.default: _packed,
}

# Their results are sparse or have as many elements as the values say, so no graph has them; or they judge sums of
# gradients.
_GATHERED = frozenset(
    {
        aten._sparse_coo_tensor_with_dims_and_tensors.default,
        aten._to_sparse.default,
        aten._to_sparse.sparse_dim,
        aten._amp_foreach_non_finite_check_and_unscale_.default,
        aten.nonzero.default,
        aten.masked_select.default,
        aten._unique2.default,
        aten.unique_dim.default,
        aten.unique_consecutive.default,
        aten.repeat_interleave.Tensor,
        aten.bincount.default,
    }
)
