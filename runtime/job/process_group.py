"""The processes of a job: joining it, leaving it, and agreeing with the others before anything happens."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.metadata
import os
import platform
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from zerograph import _torch
from zerograph.errors import CommunicationError, PlacementError, RankMismatchError, ZeroGraphError
from zerograph.ir.mesh import Mesh
from zerograph.ir.sbp import NdSbp, Split
from zerograph.runtime.job import fork
from zerograph.runtime.job.differences import BROKE_OFF, DOING, first_difference
from zerograph.runtime.job.environment import check_launch, local_rank, number_of
from zerograph.runtime.job.messages import Notes, hang_up
from zerograph.runtime.job.signs import Signs, mark_told, ranks_named, signs_of


@dataclass(frozen=True, eq=False)
class Job:
    """The ranks that run a step together.

    Attributes:
        rank, size: this process among them, and how many there are.
        grid: their numbers as a nested list, one level for each mesh dimension.
        mesh: the same as this rank sees it.
        lines: for each mesh dimension the group of the ranks that differ from this one there only: the groups of
            the step's own collectives, on the model's device.
        data: the group of all, on the model's device.
        control: a group on CPU, over gloo, for what ranks tell each other outside the graph.
        notes: what the ranks compare before each step; over ``control`` until mailboxes are known.
        world: the default process group that both were made from.
        timeout: seconds until a collective without answer is an error.
        signs: what the ranks tell each other when one has failed.
    """

    rank: int
    size: int
    grid: Any
    mesh: Mesh
    lines: tuple[dist.ProcessGroup, ...]
    data: dist.ProcessGroup
    control: dist.ProcessGroup
    notes: Notes
    world: dist.ProcessGroup
    timeout: float
    signs: Signs

    def check_alive(self) -> None:
        """Raise if the process group has been destroyed since, or is that of the process that forked this one.

        Raises:
            CommunicationError: it has, or it is.
        """
        fork.refuse()
        if not dist.is_initialized() or dist.group.WORLD is not self.world:
            raise CommunicationError(
                "the process group of this graph is gone: somebody called destroy_process_group()\n"
                "Build the graph again after initialising a new one, or destroy it only when training has ended."
            )


# Groups cost sockets and threads: all graphs of a process share them, as long as the world lives.
_jobs: dict[tuple[float, str], Job] = {}
# So do those of placements: by device type and ranks, each with its world.
_meshes: dict[tuple[str, str], tuple[dist.ProcessGroup, DeviceMesh]] = {}


def join(timeout: float, placement: DeviceMesh | None = None) -> Job:
    """The job of all ranks, in a line or as ``placement`` arranges them. Every rank must call it.

    Initialises the process group if nobody has.

    Raises:
        PlacementError: the placement leaves ranks out, or has them in another than ascending order somewhere.
        CommunicationError: the launcher's environment is incomplete, or the other ranks do not answer.
        RankMismatchError: ranks run other versions of torch, zerograph or Python.
    """
    world = _world()
    everybody = torch.arange(dist.get_world_size(), device="cpu")
    grid = everybody if placement is None else placement.mesh.cpu()
    _check_grid(grid, everybody)
    key = timeout, str(grid.tolist())
    found = _jobs.get(key)
    if found is None:
        known = next(iter(_jobs.values()), None)
        found = _made(timeout, grid, world, signs_of(world) if known is None else known.signs)
        if known is None:
            facts = _versions()
            agree(found, "working together", digest(facts), lambda: facts)
        _jobs[key] = found
    return found


def _world() -> dist.ProcessGroup:
    """The default process group. Groups of another one, which is gone, would keep their threads awake: let go of."""
    initialise()
    fork.refuse()
    world = dist.group.WORLD
    assert world is not None
    if any(job.world is not world for job in _jobs.values()):
        _jobs.clear()
    if any(one is not world for one, _ in _meshes.values()):
        _meshes.clear()
    return world


def _made(timeout: float, grid: torch.Tensor, world: dist.ProcessGroup, signs: Signs) -> Job:
    limit = timedelta(seconds=timeout)
    try:
        data = dist.new_group(timeout=limit)
        control = dist.new_group(timeout=limit, backend=_control_backend(data))
        lines = (data,) if grid.dim() == 1 else _lines(grid, limit)
    except RuntimeError as error:
        raise CommunicationError(_lost(signs, "making process groups", timeout, error)) from error
    # Weakly: groups that are gone shall take their threads along.
    groups = [weakref.ref(group) for group in (data, control, *lines)]
    before, notes = signs.hang_up, Notes(control)
    notes_here = weakref.ref(notes)

    def hang_up_all() -> None:
        before()
        if (open_notes := notes_here()) is not None:
            open_notes.hang_up()
        for group in groups:
            hang_up(group())

    signs.hang_up = hang_up_all
    mesh = Mesh(tuple(grid.shape), _position(grid), tuple(line.group_name for line in lines))
    return Job(signs.rank, signs.size, grid.tolist(), mesh, lines, data, control, notes, world, timeout, signs)


def _versions() -> dict[str, str]:
    """What may give other numbers, or another order of the user's batches, where ranks have it differently."""
    return {
        "the version of zerograph": importlib.metadata.version("zerograph"),
        "the version of torch": torch.__version__,
        "the version of Python": platform.python_version().rpartition(".")[0],
    }


def _control_backend(data: dist.ProcessGroup) -> str:
    """Gloo, whatever the data goes over; but of simulated ranks none but this one is there to answer.

    Simulated: torch's backend "fake", or one whose name begins so. Every rank says there what this one says, so all
    agree.
    """
    return "fake" if dist.get_backend(data).startswith("fake") else "gloo"


def _check_grid(grid: torch.Tensor, everybody: torch.Tensor) -> None:
    if not torch.equal(grid.flatten().sort().values, everybody):
        raise PlacementError(
            f"the placement has the ranks {grid.tolist()}, the job 0 to {len(everybody) - 1}\n"
            "A step runs on all of them."
        )
    for dim in range(grid.dim()):
        if not torch.equal(grid.sort(dim).values, grid):
            raise PlacementError(
                f"the placement {grid.tolist()} must have its ranks in ascending order along each dimension"
            )


def _position(grid: torch.Tensor) -> tuple[int, ...]:
    found: list[int] = (grid == dist.get_rank()).nonzero()[0].tolist()
    return tuple(found)


def _lines(grid: torch.Tensor, limit: timedelta) -> tuple[dist.ProcessGroup, ...]:
    """Every rank makes every group, in the same order, and keeps its own."""
    own = []
    for dim in range(grid.dim()):
        for ranks in grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist():
            group = dist.new_group(ranks, timeout=limit)
            if dist.get_rank() in ranks:
                own.append(group)
    return tuple(own)


def initialise() -> None:
    """Initialise the default process group, from torchrun's environment or for this process alone, if nobody has.

    Raises:
        CommunicationError: the launcher's environment is incomplete, or the rendezvous failed.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        dist.init_process_group(backend, store=_torch.single_process_store(), rank=0, world_size=1)
    else:
        check_launch()
        # Several ranks on a machine with fewer GPUs may still train on its CPU.
        if local_rank() < torch.cuda.device_count():
            torch.cuda.set_device(local_rank())
        _keep_inside()
        _init_from_environment(backend)
    atexit.register(_leave)


def _keep_inside() -> None:
    """A job that meets at this machine's own address is of this machine: gloo listens nowhere else then.

    Left alone it listens where the host's name leads, whatever the launcher was told. (The store that ranks meet at is
    torchrun's, and listens on all addresses.)
    """
    address = os.environ["MASTER_ADDR"]
    if address == "localhost" or address == "::1" or address.startswith("127."):
        inside = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
        if inside is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", inside)


def _init_from_environment(backend: str) -> None:
    """As torch does; but of a job that torchrun has restarted on one machine under keys of its own.

    There the store still has those of the ranks that are gone (rendezvous backend static, the default), and a rank may
    find the address of a dead one. With several machines the counts of restarts may differ, and the store is a new one.
    """
    attempt = number_of("TORCHELASTIC_RESTART_COUNT", 0)
    if not attempt or number_of("LOCAL_WORLD_SIZE", 0) != number_of("WORLD_SIZE", least=1):
        dist.init_process_group(backend, init_method="env://")
        return
    store, rank, size = next(rendezvous("env://"))
    own = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=own, rank=rank, world_size=size)


def connect(rank: int, world_size: int, address: str, backend: str | None, local_rank: int | None) -> None:
    """Initialise the default process group as this rank of so many, which meet at ``address`` (``tcp://host:port``).

    Args:
        backend: what tensors travel over; None: NCCL where there is a GPU, and gloo.
        local_rank: the GPU to use, of those of this machine; None: the rank's number modulo how many there are.

    Raises:
        CommunicationError: this process is another rank already, the backend is not there, or the rendezvous failed.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise CommunicationError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already, and cannot be rank {rank} "
                f"of {world_size}\nLaunch once, with one set of numbers."
            )
        return
    gpus = torch.cuda.device_count()
    if backend == "nccl" and not (gpus and dist.is_nccl_available()):
        raise CommunicationError("backend='nccl' needs a GPU, and there is none: leave it out, or give backend='gloo'")
    if gpus:
        torch.cuda.set_device(rank % gpus if local_rank is None else local_rank)
    default = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    try:
        dist.init_process_group(backend or default, init_method=address, rank=rank, world_size=world_size)
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(
            f"rank {rank} of {world_size} did not meet the others at {address}: {str(error).strip().splitlines()[0]}"
        ) from error
    atexit.register(_leave)


def _leave() -> None:
    """What we initialised we end: a process that exits with a group alive is warned by torch."""
    if fork.is_child():
        return
    _jobs.clear()
    _meshes.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """This process's rank, from 0; joins the job if need be."""
    initialise()
    return dist.get_rank()


def world_size() -> int:
    """How many ranks the job has; joins it if need be."""
    initialise()
    return dist.get_world_size()


def mesh(device_type: str) -> DeviceMesh:
    """The placement of all ranks on a type of device, over the default process group."""
    initialise()
    return DeviceMesh.from_group(dist.group.WORLD, device_type)  # type: ignore[arg-type]


def mesh_of(device_type: str, ranks: torch.Tensor) -> DeviceMesh:
    """The placement of these ranks, as they are arranged, on a type of device; made once. A collective of all ranks."""
    world = _world()
    key = device_type, str(ranks.tolist())
    if key not in _meshes:
        _meshes[key] = world, DeviceMesh(device_type, ranks)
    return _meshes[key][1]


def digest(value: object) -> int:
    """A number that is equal on all ranks for equal values (Python's own ``hash`` of a string is not)."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), signed=True)


def agree(
    job: Job, doing: str, number: int, facts: Callable[[], Mapping[str, str]], problem: BaseException | None = None
) -> None:
    """Return if all ranks come with the same number and none with a problem; else raise on every one of them.

    Args:
        doing: what the ranks are about to do, for messages: ``"step 3"``.
        number: digest of all that must be equal.
        facts: the same in words, by name and in order; asked for only where ranks differ.
        problem: what went wrong on this rank; an interrupt too, which the others would else wait for.

    Raises:
        RankMismatchError: ranks differ (names the first fact that does), or another rank has a problem.
        CommunicationError: a rank did not answer.
        BaseException: this rank's own ``problem``.
    """
    if (reports := differing(job, doing, number, facts, problem)) is not None:
        raise RankMismatchError(first_difference(reports, doing))


def differing(
    job: Job, doing: str, number: int, facts: Callable[[], Mapping[str, str]], problem: BaseException | None = None
) -> list[dict[str, str]] | None:
    """As :func:`agree`, but returns every rank's facts where the numbers differ; None: they do not."""
    if job.size == 1:
        if problem is not None:
            raise problem
        return None
    # Ranks at different steps may have all else in common. And where one broke off alone, what another sends next would
    # be taken for what it has not sent yet.
    broke_off = job.signs.broke_off
    number ^= digest((doing, broke_off))
    # Counted as soon as this rank takes part: all ranks do, whatever comes of it.
    job.signs.agreed += 1
    try:
        with explained(job, f"comparing notes before {doing}"):
            equal, problems = job.notes.compare(number, problem is not None)
            if equal and not problems:
                if broke_off:
                    job.signs.resume()
                return None
            reports: list[Any] = [None] * job.size
            shown = f"{type(problem).__name__}: {problem}".removesuffix(": ") if problem is not None else None
            told = {} if problems else {BROKE_OFF: broke_off or "nowhere", DOING: doing, **facts()}
            dist.all_gather_object(reports, (shown, told), group=job.control)
    except CommunicationError as error:
        # An interrupt is what the user has asked for, whatever the other ranks do.
        if problem is not None and not isinstance(problem, Exception):
            raise problem from error
        raise
    if problem is not None:
        if not isinstance(problem, Exception):
            mark_told(problem)
        raise problem
    failed = {index: report for index, (report, _) in enumerate(reports) if report is not None}
    if failed:
        first = min(failed)
        raise RankMismatchError(f"{ranks_named(failed)} failed before {doing}:\n  {failed[first]}\nNo rank went on.")
    return [report for _, report in reports]


@contextlib.contextmanager
def explained(job: Job, doing: str) -> Iterator[None]:
    """A failed exchange outside the graph, as an error that says what it was for, and which rank is lost."""
    job.check_alive()
    with job.signs.busy(doing), job.signs.interruptible(doing):
        try:
            yield
        except ZeroGraphError:
            raise
        except RuntimeError as error:
            raise communication_error(job, doing, error) from error


@contextlib.contextmanager
def noted(job: Job, doing: str) -> Iterator[None]:
    """What this rank alone fails with inside, ``doing`` something, the others are told of when they miss it."""
    job.signs.forget()
    with job.signs.busy(doing), job.signs.interruptible(doing):
        try:
            yield
        except (CommunicationError, RankMismatchError):
            raise
        except Exception as error:
            job.signs.note(error)
            raise


def communication_error(job: Job, doing: str, error: BaseException) -> CommunicationError:
    """``error``, raised by a collective on this rank while ``doing`` something, in the user's terms.

    Asks the others who is lost, which takes some seconds.
    """
    return CommunicationError(_lost(job.signs, doing, job.timeout, error))


def _lost(signs: Signs, doing: str, timeout: float, error: BaseException) -> str:
    """The message; those that will ask this rank later are told of it as well."""
    own = signs.own_failure()
    answers = signs.ask()
    lost = () if own is not None else answers.lost()
    head = f"rank {signs.rank} of {signs.size} lost {ranks_named(lost) if lost else 'the others'} while {doing}"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    signs.note(CommunicationError(head), lost)
    lines = [head, f"  {first}", *(f"  {line}" for line in answers.told())]
    if own is None:
        return "\n".join([*lines, _advice(lost, timeout)])
    return "\n".join(
        [
            *lines,
            f"This rank broke off before, {own.doing}: {own.failed}. The others have missed it since: start the job "
            "anew, from the last checkpoint.",
        ]
    )


def _advice(lost: Sequence[int], timeout: float) -> str:
    limit = f"(config.timeout is {timeout:g} seconds)"
    if lost:
        return f"Look at the output of {ranks_named(lost)} for the cause {limit}."
    return (
        f"Another rank has died, stalls, or runs something else, or the network to it is cut {limit}. "
        "Look at the other ranks' output; the first to fail is the cause."
    )


def first_ranks(job: Job, number: int) -> int:
    """Rank 0's ``number`` (of 64 bits), on every rank."""
    if job.size == 1:
        return number
    shared = torch.tensor([number], device="cpu")
    with explained(job, "taking over rank 0's seed"):
        dist.broadcast(shared, group_src=0, group=job.control)
    return int(shared)


def first_ranks_notes(job: Job, notes: Sequence[torch.Tensor], what: str) -> None:
    """Every rank's small tensors on the CPU become rank 0's, in place; ``what`` they are, for messages."""
    if job.size == 1:
        return
    with explained(job, f"taking over rank 0's {what}"):
        for note in notes:
            dist.broadcast(note, group_src=0, group=job.control)


def gather_whole(job: Job, part: torch.Tensor, sbp: NdSbp) -> torch.Tensor:
    """The whole of a tensor of which each rank holds a part, on every rank, in memory of its own."""
    whole = part
    for dim in reversed(range(job.mesh.dims)):
        one, ranks = sbp[dim], job.mesh.shape[dim]
        if isinstance(one, Split) and ranks > 1:
            parts = torch.empty((ranks, *whole.shape), dtype=part.dtype, device=part.device)
            with explained(job, "gathering state outside a step"):
                _torch.all_gather(parts.view(-1), whole.contiguous().view(-1), job.lines[dim])
            whole = parts.flatten(0, 1) if one.dim == 0 else torch.cat(list(parts), one.dim)
    return part.clone() if whole is part else whole


def broadcast_from_first(job: Job, tensors: list[torch.Tensor]) -> None:
    """Every rank's tensors become rank 0's, in place."""
    if job.size == 1:
        return
    with explained(job, "taking over rank 0's parameters and buffers"):
        for tensor in tensors:
            whole = tensor if tensor.is_contiguous() else tensor.contiguous()
            dist.broadcast(whole, group_src=0, group=job.data)
            if whole is not tensor:
                tensor.copy_(whole)
