"""The ranks that hold global tensors, and the programs that they have compiled."""

from __future__ import annotations

import contextlib
import struct
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerograph import _torch
from zerograph.base.source import warn_user
from zerograph.config import Config
from zerograph.eager.program import Compilation, Program, Spec
from zerograph.ir.mesh import with_slices
from zerograph.ir.sbp import NdSbp, Split, all_broadcast, partial_sum
from zerograph.runtime.job.channel import MAX_RANKS
from zerograph.runtime.job.process_group import Job, agree, digest, join
from zerograph.runtime.tensor_hash import hash_bits
from zerograph.runtime.wire.selection import transport_of

_MOST_PROGRAMS = 1 << 12
# The last losses that the ranks tell each other, in two numbers each: a comparison has room for eight numbers.
_MOST_LOSSES = 3
_CPU = torch.device("cpu")

# Rows of a rank from which on numbers that happen to be 0, 1, 2, ... are unlikely.
_FEWEST = 3


class World:
    """The ranks that hold global tensors, and the programs that they have compiled.

    Attributes:
        job: the ranks.
        whole: the SBP of a tensor that every rank has.
        operators: what :mod:`.dispatch` knows of operators, by identity.
        boxings: programs that change an SBP, by metadata, SBP and rows.
        rows_of_ranks: a loop passes rows that its ranks have cut, so their order in the batch is that of the ranks.
        joins_rows: operators have joined global rows since a loop has passed such rows.
        slices: ``config.virtual_ranks`` of the loops.
        mesh: the ranks, with slices if they do not divide them; see :class:`zerograph.ir.mesh.Mesh`.
        calls: number of calls of prepared models that have returned results.
    """

    def __init__(self, job: Job, slices: int | None = None) -> None:
        self.job, self.slices, self.mesh = job, slices, with_slices(job.mesh, slices)
        self.whole: NdSbp = all_broadcast(job.mesh.dims)
        # Of tensors and programs that exist: a loop whose sizes differ from step to step has ever other ones.
        self._specs = weakref.WeakValueDictionary[tuple[Any, ...], Spec]()
        self.operators: dict[int, Any] = {}
        self.boxings: dict[Any, Program] = {}
        self.rows_of_ranks = self.joins_rows = False
        self._warned: set[str] = set()
        # Shapes of whole numbers of this rank's rows, each looked at once.
        self._counted: set[tuple[int, ...]] = set()
        self.calls = self._draws = 0
        # The losses that backward has started from since the last update: the tensor, its version and history, and this
        # rank's summand.
        self._losses: list[tuple[Any, int, int, torch.Tensor]] = []
        self.compilation = Compilation(job, transport_of(job), self.warn, self.spec, slices)

    @property
    def is_alone(self) -> bool:
        """True if tensors stay plain: there is one rank, and it does not compute slice by slice."""
        return self.job.size == 1 and self.slices is None

    def spec(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        sbp: NdSbp,
        rows: tuple[int, ...] | None = None,
    ) -> Spec:
        """Return the one object for this metadata."""
        # A CPU has no number, which frameworks give it, and torch keeps it on fake tensors only.
        device = _CPU if device.type == "cpu" else device
        # What is not split has no unequal parts.
        key = shape, stride, dtype, device, sbp, rows if any(isinstance(one, Split) for one in sbp) else None
        spec = self._specs.get(key)
        if spec is None:
            spec = self._specs[key] = Spec(*key)
        return spec

    def whole_spec(self, tensor: torch.Tensor) -> Spec:
        """Return the metadata of a tensor that every rank has."""
        return self.spec(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, self.whole)

    def release(self) -> None:
        """Drop what refers to the ranks in cycles, which would keep threads of a destroyed process group."""
        vars(self).clear()

    def make_space(self, programs: dict[Any, Any]) -> None:
        """Clear a full table of programs: in a loop whose sizes differ from step to step it grows."""
        if len(programs) >= _MOST_PROGRAMS:
            programs.clear()

    def look_at_rows(self, part: torch.Tensor) -> None:
        """Warn if whole numbers, one for each row of this rank, count these rows: others are the first of the batch."""
        is_whole = part.layout is torch.strided and not (part.is_floating_point() or part.is_complex())
        is_counted = is_whole and not part.is_meta and _FEWEST <= len(part) == part.numel()
        if not is_counted or part.dtype == torch.bool or part.shape in self._counted:
            return
        self._counted.add(part.shape)
        if bool((part.detach().flatten().to(torch.int64) == torch.arange(len(part), device=part.device)).all()):
            self.warn(
                f"a tensor of {len(part)} rows of this rank has the numbers 0 to {len(part) - 1}. If it counts the "
                "rows of the batch, as torch.arange(len(x)) does in one process, the next ranks' are wrong\n"
                "Pass the loader to zg.prepare(), or the rows as zg.global_tensor(part, zg.sbp.split(0)): "
                "len(x) is then that of the whole batch."
            )

    def note_loss(self, loss: Any) -> None:
        """Note a global tensor that backward starts from; with the next update all ranks learn the value of a sum."""
        is_sum = not loss.dim() and loss.spec.sbp == (partial_sum,) and self.slices is None
        # Reading a number of an accelerator would wait for it. More ranks would exchange unequal numbers once more.
        if is_sum and loss.device.type == "cpu" and self.job.size <= MAX_RANKS:
            noted = weakref.ref(loss), _torch.version(loss), loss.history, loss.local
            self._losses = [*self._losses, noted][-_MOST_LOSSES:]

    def summands(self) -> list[int]:
        """Return whole numbers, as many for any number of losses: what tells their order, and this rank's summands."""
        order = hash(tuple(history for _, _, history, _ in self._losses)) % 2**60
        values = [*(float(local) for *_, local in self._losses), *[0.0] * (_MOST_LOSSES - len(self._losses))]
        return [order, *struct.unpack(f"<{2 * _MOST_LOSSES}I", struct.pack(f"<{_MOST_LOSSES}d", *values))]

    def learn_losses(self, summands: Sequence[Sequence[int]]) -> None:
        """Take the losses from their summands on each rank, so that one rank alone may read them."""
        losses, self._losses = self._losses, []
        if len({order for order, *_ in summands}) > 1:
            # Ranks have started from them in other orders.
            return
        rows = [struct.unpack(f"<{_MOST_LOSSES}d", struct.pack(f"<{2 * _MOST_LOSSES}I", *row)) for _, *row in summands]
        for (reference, version, _, local), values in zip(losses, zip(*rows, strict=True), strict=False):
            if (loss := reference()) is not None and loss.known is None and _torch.version(loss) == version:
                loss.known = loss.writes, torch.stack([local.new_tensor(one) for one in values]).sum()

    def seed(self) -> int:
        """Draw a number from torch's generator, as the seed of a graph's random numbers.

        Raises:
            RankMismatchError: the generators of ranks are in other states.
        """
        self.check_generator(None, _CPU)
        return int(torch.randint(2**62, ()))

    def check_generator(self, generator: torch.Generator | None, device: torch.device) -> None:
        """Check that ranks are about to draw the same numbers: at their first draws, and then ever more rarely.

        Args:
            generator: the generator; None for the device's own.
            device: where the numbers are drawn.

        Raises:
            RankMismatchError: the generators of ranks are in other states.
        """
        self._draws += 1
        if self._draws & (self._draws - 1) == 0 and self.job.size > 1:
            own = torch if device.type == "cpu" else torch.get_device_module(device)
            state = hash_bits(own.get_rng_state() if generator is None else generator.get_state())
            advice = f"from the state {int(state):x}: seed torch equally on all ranks, by torch.manual_seed()"
            facts = {"a random number": advice}
            agree(self.job, "drawing random numbers for a global tensor", digest(facts), lambda: facts)

    def warn(self, message: str) -> None:
        """Show a message once, on the first rank, at the user's line."""
        if message not in self._warned:
            self._warned.add(message)
            # A filter that makes it an error does so on all ranks.
            with warnings.catch_warnings(record=True) if self.job.rank else contextlib.nullcontext():
                warn_user(message)


_world: World | None = None
# Of the next world's exchanges, in seconds.
_timeout = Config().checks.timeout


def use_options(config: Config) -> None:
    """Have all ranks compute with ``config.virtual_ranks``; what they have compiled for another number is dropped.

    The first loop's ``config.checks.timeout`` is that of all exchanges between global tensors.
    """
    global _world, _timeout
    # A world of a process group that is gone says nothing: only this rank may have one.
    is_current = _world is not None and _world.job.world is dist.group.WORLD
    if not is_current:
        _timeout = config.checks.timeout
    if (config.virtual_ranks is not None or is_current) and world().slices != config.virtual_ranks:
        before = world()
        _world = World(before.job, config.virtual_ranks)
        before.release()


def leave() -> None:
    """Drop the world of ranks that are gone, and with it their process groups."""
    global _world
    if _world is not None:
        _world.release()
        _world = None


def world() -> World:
    """Return the world of all ranks, which it joins at the first call. Every rank must call it then."""
    global _world
    if _world is None or _world.job.world is not dist.group.WORLD:
        leave()
        _world = World(join(_timeout))
    return _world
