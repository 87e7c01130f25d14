"""``zg.GlobalTensor``: a tensor of which each rank has a part, with the meaning of one tensor."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerograph import _torch
from zerograph._torch import pytree
from zerograph.eager import dispatch
from zerograph.eager.dispatch import View
from zerograph.eager.program import Spec, check_slices
from zerograph.eager.world import world
from zerograph.errors import InputError, PlacementError, RankMismatchError, ZeroGraphError
from zerograph.ir.mesh import Mesh, global_shape, of_own_slices, slice_counts, with_all_slices
from zerograph.ir.sbp import NdSbp, Sbp, Split, broadcast, from_dtensor, nd_sbp, show, split, to_dtensor
from zerograph.runtime.job.differences import DOING
from zerograph.runtime.job.exchange import gather_whole
from zerograph.runtime.job.process_group import agree, digest, mesh_of
from zerograph.runtime.parameters import DATA, SplitParameter
from zerograph.runtime.tensor_hash import hash_bits

_OF_ALL_RANKS = (
    "a tensor with the rows of all ranks is read as one number: without a prepared loader, what each rank passes to a "
    "prepared model are its own rows\nIf every rank passes the same tensor, pass an iterable of the loop to "
    "zg.prepare() too, such as range(steps): plain tensors are then whole."
)
_NUMBERS = {Tensor.__bool__, Tensor.__int__, Tensor.__index__, Tensor.__float__, Tensor.__complex__}

_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_SHAPED = {Tensor.view, Tensor.reshape, torch.reshape}
_WARN_OF_SIZES = {F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss}


class GlobalTensor(Tensor):
    """A tensor of which each rank has a part. Operators mean what they mean on the whole tensor in one process.

    ``shape``, ``len()``, indices and printed values are those of the whole tensor; ``item()``, ``tolist()`` and
    ``numpy()`` read it, which are collectives. Every rank must run the same operators in the same order. A plain tensor
    beside a global one is equal on all ranks.

    Attributes:
        spec: metadata of the whole tensor.
        local: this rank's part.
        viewed: what it is a view of, if its elements are a copy of those; else None.
        known: ``writes`` of a 0-d tensor when all ranks learned its value, and the value.
        number: differs between ranks if the tensor was computed with numbers or plain tensors that do.
        history: differs between ranks if it was computed by other operators, or from results of other calls.
    """

    # A trace refuses such tensors.
    has_parts_of_ranks = True
    spec: Spec
    local: Tensor
    viewed: View | None
    known: tuple[tuple[int, int], Tensor] | None
    number: int = 0
    history: int = 0

    @staticmethod
    def __new__(cls, local: Tensor, spec: Spec) -> GlobalTensor:
        """Create the tensor of which ``local`` is this rank's part."""
        new: GlobalTensor = _torch.tensor_without_data(
            cls, spec.shape, spec.dtype, spec.device, requires_grad=False, stride=spec.stride
        )
        new.spec, new.local, new.viewed, new.known = spec, local, None, None
        return new

    def __init__(self, local: Tensor, spec: Spec) -> None:
        """Accept the arguments of ``__new__``, which torch's own ``__init__`` does not."""

    @classmethod
    @_torch.not_compiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch; where its shapes do not match, take plain tensors of this rank's rows as parts.

        A script that cuts its own rows has plain labels beside a global result of the model.
        """
        if any(issubclass(one, SplitParameter) or not issubclass(one, Tensor) for one in types):
            # A split parameter has no values here: its own function makes it whole first.
            return NotImplemented
        kwargs = kwargs or {}
        if func in _NUMBERS:
            # torch.tensor([loss]) calls them with the dispatcher off.
            value = dispatch.whole_of(args[0])
            if value.numel() > 1 and world().rows_of_ranks:
                raise InputError(_OF_ALL_RANKS)
            return func(value)
        if func is Tensor.backward:
            world().note_loss(args[0])
        elif func is Tensor.__getitem__ and world().rows_of_ranks:
            _check_index(*args)
        elif func in _SHAPED and world().rows_of_ranks:
            _check_shape(*args)
        elif func in _RECURRENT:
            args = _with_split_state(*args)
        if kwargs.get("is_grads_batched"):
            raise InputError("is_grads_batched=True of a zg.GlobalTensor: use torch.func.vjp and torch.vmap, or a loop")
        with _torch.without_torch_function():
            try:
                if func not in _WARN_OF_SIZES:
                    return func(*args, **kwargs)
                with warnings.catch_warnings(action="error", category=UserWarning):
                    return func(*args, **kwargs)
            except (ZeroGraphError, RuntimeError, ValueError, IndexError, UserWarning) as error:
                # Rows that ranks have cut differ between them, at the same operator.
                differs = (
                    isinstance(error, RankMismatchError)
                    and world().rows_of_ranks
                    and len({one[DOING] for one in error.facts}) == 1
                )
                if isinstance(error, ZeroGraphError) and not differs:
                    raise
                several = _with_parts((args, kwargs))
                if not several and not isinstance(error, UserWarning):
                    if func is Tensor.item and world().rows_of_ranks and not differs:
                        raise InputError(_OF_ALL_RANKS) from None
                    raise
            for args, kwargs in several[:-1]:
                with contextlib.suppress(RuntimeError, ValueError, IndexError):
                    return func(*args, **kwargs)
            args, kwargs = several[-1] if several else (args, kwargs)
            return func(*args, **kwargs)

    @classmethod
    @_torch.not_compiled
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return dispatch.call(GlobalTensor, func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        """The same tensor without history. Another tensor may be assigned, whose values this one then has."""
        detached: Tensor = DATA.__get__(self)
        return detached

    @data.setter
    def data(self, value: Tensor) -> None:
        one = value if isinstance(value, GlobalTensor) else dispatch.wrapped_whole(GlobalTensor, value)
        dispatch.refresh(one)
        DATA.__set__(self, one)
        self.local, self.spec, self.viewed, self.known = one.local, one.spec, None, None
        self.history = one.history

    @property
    def writes(self) -> tuple[int, int]:
        """The number of writes that torch counts, and of those to this rank's part, by ``.data`` too."""
        return _torch.version(self), getattr(self.local.untyped_storage(), "_zerograph_writes", 0)

    @property
    def sbp(self) -> NdSbp:
        """One SBP for each dimension of the mesh of ranks."""
        return self.spec.sbp

    def to_global(self, sbp: Sbp | Sequence[Sbp]) -> GlobalTensor:
        """Return the same tensor under another SBP. A collective where that needs one; gradients flow through it.

        Raises:
            PlacementError: the SBP does not fit the tensor.
        """
        target, ranks = _checked(sbp, self.dim()), world().mesh
        check_slices(self.shape, target, world().slices)
        for dim, one in enumerate(target):
            if isinstance(one, Split) and self.shape[one.dim] % ranks.divisor(dim):
                raise PlacementError(
                    f"a dimension of size {self.shape[one.dim]} cannot be split over {ranks.shape[dim]} ranks in equal "
                    "parts"
                )
        result: GlobalTensor = _Boxing.apply(self, target)
        return result

    def to_local(self) -> Tensor:
        """Return this rank's part, as a plain tensor. Gradients flow through it."""
        result: Tensor = _ToLocal.apply(self)
        return result

    def full_tensor(self) -> Tensor:
        """Return the whole tensor as a plain one, on every rank. A collective; gradients flow through it."""
        return self.to_global(world().whole).to_local()

    def to_dtensor(self) -> DTensor:
        """Return the same tensor as a DTensor, of the same memory and without history.

        Raises:
            PlacementError: ranks have unequal parts.
        """
        has_slices = world().mesh.slices is not None and self.sbp != world().whole
        if self.spec.rows is not None or has_slices:
            raise PlacementError("ranks have unequal parts, which no DTensor has: call full_tensor()")
        job, kind = world().job, self.device.type
        grid = mesh_of(kind, torch.tensor(job.grid, device="cpu"))
        placements = to_dtensor(self.sbp)
        return DTensor.from_local(
            self.local, grid, placements, run_check=False, shape=self.shape, stride=self.spec.stride
        )

    @staticmethod
    def from_dtensor(x: DTensor) -> GlobalTensor:
        """Return a DTensor over all ranks as a global tensor, of the same memory and without history."""
        now, sbp = world(), from_dtensor(x.placements)
        check_slices(x.shape, sbp, now.slices)
        part = x.to_local().detach()
        if now.mesh.slices is not None:
            return GlobalTensor.of_part(part, sbp)
        return GlobalTensor(part, now.spec(tuple(x.shape), x.stride(), x.dtype, part.device, sbp))

    @staticmethod
    def of_part(part: Tensor, sbp: NdSbp, rows: Sequence[int] | None = None) -> GlobalTensor:
        """Return the global tensor of which ``part`` is this rank's part. Gradients flow to it; nothing is compared.

        Args:
            part: this rank's part.
            sbp: the SBP.
            rows: the size of each rank's part in the dimension that is split, on a line of ranks. None: equal ones.
                Where one is 0, every rank gets the whole.
        """
        now, dim = world(), _split_dim(sbp)
        if rows is None and dim is not None and now.mesh.slices is not None:
            rows = [part.shape[dim]] * now.job.size
        if rows is not None and now.slices is not None and sum(rows) % now.slices == 0:
            unit = sum(rows) // now.slices
            if list(rows) != (needed := [count * unit for count in slice_counts(now.slices, now.job.size)]):
                raise InputError(
                    f"ranks pass {', '.join(map(str, rows))} rows: with config.virtual_ranks = {now.slices} each needs "
                    f"whole slices: {', '.join(map(str, needed))}\nPass these, or the loader to zg.prepare()."
                )
        if rows is not None and (0 in rows or (now.slices is not None and sum(rows) % now.slices)):
            whole: GlobalTensor = _Gathered.apply(part, dim, rows)
            return whole
        shape, unequal = list(global_shape(part.shape, sbp, now.job.mesh)), None
        if rows is not None and dim is not None and len(set(rows)) > 1:
            shape[dim] = sum(rows)
            unequal = tuple(rows) if now.slices is None else None
        check_slices(shape, sbp, now.slices)
        stride = torch.empty(shape, device="meta").stride()
        spec = now.spec(tuple(shape), stride, part.dtype, part.device, sbp, unequal)
        result: GlobalTensor = _FromLocal.apply(part.contiguous(), spec)
        return result

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole tensor as an array. A collective."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on a tensor that requires grad: use x.detach().numpy()")
        return dispatch.whole_of(self).numpy(force=force)

    def tolist(self) -> Any:
        """Return the values of the whole tensor. A collective."""
        return dispatch.whole_of(self).tolist()

    def __array__(self, dtype: Any = None) -> Any:
        values = self.numpy()
        return values if dtype is None else values.astype(dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text = repr(dispatch.whole_of(self))
        history = f", grad_fn=<{self.grad_fn.name()}>" if self.grad_fn is not None else ""
        return f"{text[:-1]}, sbp={show(self.sbp)}{history or ', requires_grad=True' * self.requires_grad})"

    def __format__(self, spec: str) -> str:
        value = dispatch.whole_of(self)
        return format(value, spec) if spec or not value.dim() else repr(self)

    def __copy__(self) -> Tensor:
        return self.detach().requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            raise RuntimeError("only tensors that the user created can be copied deeply: use x.detach()")
        copy = self.detach().clone()
        memo[id(self)] = copy
        copy.requires_grad_(self.requires_grad)
        if self.grad is not None:
            copy.grad = self.grad.__deepcopy__(memo)
        return copy

    def data_ptr(self) -> NoReturn:
        """Raise: torch would return a null pointer, which a kernel of Triton, for instance, would read."""
        raise InputError(
            "a zg.GlobalTensor has no memory of its own that a kernel could read: each rank has a part\n"
            "Give the kernel x.to_local() or x.full_tensor()."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputError(
            "a zg.GlobalTensor cannot be pickled: each rank has a part\n"
            "Save x.full_tensor(), which every rank must call."
        )


def _split_dim(sbp: NdSbp) -> int | None:
    return next((one.dim for one in sbp if isinstance(one, Split)), None)


def _of_slices(function: Callable[[Tensor, int, Mesh], Tensor], part: Tensor, sbp: NdSbp) -> Tensor:
    """Change the number of slices of a rank's part, where ranks do not divide ``config.virtual_ranks``."""
    dim = _split_dim(sbp)
    return part if dim is None else function(part, dim, world().mesh)


class _Boxing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: GlobalTensor, sbp: NdSbp) -> GlobalTensor:
        moved = dispatch.boxed(GlobalTensor, x, sbp)
        result = GlobalTensor(moved.local, moved.spec)
        result.history = moved.history
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # A gradient means the same under any SBP.
        return gradient, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: GlobalTensor) -> Tensor:
        dispatch.refresh(x)
        ctx.spec = x.spec
        own = _of_slices(of_own_slices, x.local, x.spec.sbp)
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return GlobalTensor(_of_slices(with_all_slices, gradient.contiguous(), ctx.spec.sbp), ctx.spec)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, spec: Spec) -> GlobalTensor:
        ctx.sbp, ctx.rows = spec.sbp, spec.rows
        return GlobalTensor(_of_slices(with_all_slices, part.detach(), spec.sbp), spec)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # The gradient of each summand of a partial sum is that of the sum.
        sbp = tuple(one if isinstance(one, Split) else broadcast for one in ctx.sbp)
        return _of_slices(of_own_slices, dispatch.boxed(GlobalTensor, gradient, sbp, ctx.rows).local, sbp), None


class _Gathered(torch.autograd.Function):
    """The whole of a tensor of which a rank has an empty part, on every rank."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, rows: Sequence[int]) -> Any:
        job = world().job
        ctx.own = dim, sum(rows[: job.rank]), rows[job.rank]
        if not any(rows):
            return dispatch.wrapped_whole(GlobalTensor, part)
        pad = [0, 0] * (part.dim() - 1 - dim) + [0, max(rows) - rows[job.rank]]
        padded = gather_whole(job, nn.functional.pad(part.detach(), pad), (split(dim),))
        pieces = [piece.narrow(dim, 0, size) for piece, size in zip(padded.chunk(job.size, dim), rows, strict=True)]
        return dispatch.wrapped_whole(GlobalTensor, torch.cat(pieces, dim))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        whole = dispatch.whole_of(gradient) if isinstance(gradient, GlobalTensor) else gradient
        return whole.narrow(*ctx.own).clone(), None, None


def _with_parts(arguments: Any) -> list[Any]:
    """Return arguments in which plain tensors of fewer rows than global ones are parts, in several ways to try.

    At first those are parts that differ between ranks: others may be whole, such as the weights of classes.
    """
    leaves, spec = pytree.tree_flatten(arguments)
    rows = {len(one) for one in leaves if isinstance(one, GlobalTensor) and one.dim()}
    found = [one for one in leaves if _is_plain(one) and rows and len(one) < max(rows)]
    made = {id(one): x for one in found if len(x := global_tensor(one, split(0))) in rows}
    if not made:
        return []
    now = world()
    for one in found:
        now.look_at_rows(one)
    if now.slices is not None:
        # One rank would take them for whole tensors.
        raise InputError(
            "plain tensors of this rank's rows are beside global ones: with config.virtual_ranks pass the loader to "
            "zg.prepare(), or the rows as zg.global_tensor(part, zg.sbp.split(0))"
        )
    ways: list[Any] = [made]
    if len(made) > 1:
        hashes = [int(hash_bits(one.detach())) % 2**62 for one in found]
        everybody = agree(now.job, "an operator on rows of ranks", len(found), dict, None, hashes)
        apart = [id(one) for one, *values in zip(found, *everybody, strict=True) if len({*values}) > 1]
        differ = made.keys() & apart
        ways = [differ, made] if 0 < len(differ) < len(made) else ways
    return [pytree.tree_unflatten([made[id(x)] if id(x) in way else x for x in leaves], spec) for way in ways]


def _with_split_state(x: Any, state: Any, *rest: Any) -> Any:
    """Return the arguments of a recurrent layer with its plain state split as the rows, which are added to it in place.

    Those of packed sequences, of which each rank has all, stay as they are. With ``config.virtual_ranks`` every rank
    computes all rows, whose bits depend on how many there are.
    """
    dim = 0 if rest[-1] is True else 1
    is_even = isinstance(x, GlobalTensor) and x.dim() == 3 and x.sbp == (Split(dim),) and x.spec.rows is None
    if not is_even or world().slices is not None:
        return x, state, *rest
    parts = [
        global_tensor(one, broadcast).to_global(split(1)) if _is_plain(one) and one.shape[1] == x.shape[dim] else one
        for one in ([state] if isinstance(state, Tensor) else state)
    ]
    return x, parts[0] if isinstance(state, Tensor) else parts, *rest


def _check_index(x: Any, index: Any) -> None:
    """Refuse an index of whole numbers that counts the rows of this rank."""
    first = index[0] if isinstance(index, tuple) and index else index
    count = len(first) if isinstance(first, (list, range)) or (_is_plain(first) and first.dtype != torch.bool) else -1
    if isinstance(x, GlobalTensor) and Split(0) in x.spec.sbp and count == len(x.local) < len(x):
        raise InputError(
            "an index counts the rows of this rank, and the tensor has those of all ranks\n"
            "Pass the loader to zg.prepare(), or the rows as zg.global_tensor(part, zg.sbp.split(0)); for one entry of "
            "each row, call gather()."
        )


def _check_shape(x: Any, *shape: Any) -> None:
    """Refuse a shape that begins with the number of rows of a rank, as of ``view(len(x), -1)``: it would join rows."""
    first = shape[0][0] if shape and isinstance(shape[0], (tuple, list)) and shape[0] else [*shape, None][0]
    if not isinstance(x, GlobalTensor) or Split(0) not in x.spec.sbp or world().joins_rows:
        return
    if isinstance(first, int) and first < len(x) and first in (x.spec.rows or (len(x.local),)):
        raise InputError(
            f"a shape begins with {first}, the number of rows of this rank, and the tensor has the {len(x)} rows of "
            "all ranks\nPass the loader to zg.prepare(): len(x) is then that of the whole batch."
        )


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, (GlobalTensor, nn.Parameter)) and x.dim() > 0


def _checked(sbp: Sbp | Sequence[Sbp], dims: int) -> NdSbp:
    target = nd_sbp(sbp, world().job.mesh.dims)
    for one in target:
        if isinstance(one, Split) and one.dim >= dims:
            raise PlacementError(f"a tensor of {dims} dimension(s) has no dimension for {one}")
    return target


def global_tensor(part: Tensor, sbp: Sbp | Sequence[Sbp]) -> GlobalTensor:
    """Return the global tensor of which each rank passes its part. A collective.

    Parts may be unequal. If a rank's part is empty, every rank gets the whole.

    Args:
        part: this rank's part; the whole tensor, equal on all ranks, for ``zg.sbp.broadcast``. Gradients flow to it.
        sbp: the SBP of the global tensor, or one for each dimension of the mesh of ranks.

    Raises:
        PlacementError: the SBP does not fit the tensor.
        RankMismatchError: ranks pass parts of other shapes or dtypes, or other values for ``zg.sbp.broadcast``.
    """
    now, target = world(), _checked(sbp, part.dim())
    dims = {one.dim for one in target if isinstance(one, Split)}
    same = [size for dim, size in enumerate(part.shape) if dim not in dims]
    facts = {"shape": str(same), "dtype": str(part.dtype), "SBP": show(target)}
    sizes = agree(now.job, "zg.global_tensor()", digest(facts), lambda: facts, None, [part.shape[dim] for dim in dims])
    if all(one == sizes[0] for one in sizes):
        return GlobalTensor.of_part(part, target)
    if now.job.mesh.dims > 1:
        raise PlacementError("parts of unequal size are possible on a mesh of one dimension only")
    return GlobalTensor.of_part(part, target, [size for (size,) in sizes])
