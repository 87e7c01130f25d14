"""Join a job, leave it, and agree with its other ranks before each action."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from zerograph import _torch
from zerograph.errors import CommunicationError, PlacementError, RankMismatchError, ZeroGraphError
from zerograph.ir.mesh import Mesh
from zerograph.runtime.job import fork
from zerograph.runtime.job.channel import Channel, hang_up
from zerograph.runtime.job.differences import BROKE_OFF, DOING, SHOWN_WITH, first_difference
from zerograph.runtime.job.environment import did_not_meet, init_from_environment, versions
from zerograph.runtime.job.launchers import find_launch, unused_allocation
from zerograph.runtime.job.liveness import Liveness, mark_reported, on_interrupt, sockets, start_liveness
from zerograph.runtime.job.reports import Answers, name_ranks


@dataclass(frozen=True, eq=False)
class Job:
    """The ranks that run a step together.

    Attributes:
        rank, size: this rank, and the number of ranks.
        grid: all ranks as a nested list, one level for each mesh dimension.
        mesh: the mesh, with this rank's position in it.
        groups: for each mesh dimension the process group of the ranks that differ from this one only there. The step's
            collectives use them, on the model's device.
        data: the group of all ranks, on the model's device.
        channel: all ranks, for exchanges outside the graph, on the CPU.
        world: the default process group when the job was created.
        timeout: seconds until a collective without an answer is an error.
        liveness: this rank's part in finding out which rank has failed.
    """

    rank: int
    size: int
    grid: Any
    mesh: Mesh
    groups: tuple[dist.ProcessGroup, ...]
    data: dist.ProcessGroup
    channel: Channel
    world: dist.ProcessGroup
    timeout: float
    liveness: Liveness

    def check_alive(self) -> None:
        """Check that the job's process group still exists and that this process is not a forked child.

        Raises:
            CommunicationError: the group has been destroyed, or this process was forked from a rank.
        """
        fork.refuse()
        if not dist.is_initialized() or dist.group.WORLD is not self.world:
            raise CommunicationError(
                "the process group of this graph is gone: destroy_process_group() was called\n"
                "Build the graph again after initialising a new one, or destroy it only when training has ended."
            )


# By timeout and grid. Groups cost sockets and threads: all graphs of a process share them while the world exists.
_jobs: dict[tuple[float, str], Job] = {}
# The variable that names the launcher's store to processes of an elastic job.
ELASTIC = "ZEROGRAPH_ELASTIC"
# Seconds in which ranks of an elastic job connect, whatever the timeout of their collectives: one may die meanwhile.
# Gloo waits so long for an address, and five times as long for a connection, if nothing ends that before.
_CONNECT_LIMIT = 8.0
# While this process connects a group of an elastic job: its size, and the sockets that this process has had before.
_connecting: tuple[int, set[int]] | None = None
# Memory of this process that other ranks write into until they learn that it has ended; in an elastic job until the
# next generation, which is formed when all that live have left the one before.
written_by_others: list[object] = []
# By device type and ranks, each with its world.
_meshes: dict[tuple[str, str], tuple[dist.ProcessGroup, DeviceMesh]] = {}


def join(timeout: float, placement: DeviceMesh | None = None, row: int = 1) -> Job:
    """Return the job of all ranks; initialise the process group if needed. Every rank must call it.

    Args:
        timeout: seconds until a collective without an answer is an error.
        placement: the mesh; None: all ranks.
        row: without placement, the ranks along the last of two dimensions; 1 or all ranks: one dimension.

    Raises:
        PlacementError: the placement leaves ranks out, or they do not ascend along a dimension.
        CommunicationError: the launcher's environment is incomplete, or the other ranks do not answer.
        RankMismatchError: ranks run different versions of torch, zerograph or Python.
    """
    world = _world()
    all_ranks = torch.arange(dist.get_world_size(), device="cpu")
    grid = _rows(all_ranks, row) if placement is None else placement.mesh.cpu()
    _check_grid(grid, all_ranks)
    key = timeout, str(grid.tolist())
    if key not in _jobs:
        earlier = next(iter(_jobs.values()), None)
        job = _create_job(timeout, grid, world, start_liveness(world) if earlier is None else earlier.liveness)
        if earlier is None:
            facts = versions()
            agree(job, "working together", digest(facts), lambda: facts)
        _jobs[key] = job
    return _jobs[key]


def _rows(all_ranks: torch.Tensor, row: int) -> torch.Tensor:
    if row in (1, len(all_ranks)):
        return all_ranks
    if len(all_ranks) % row:
        raise PlacementError(
            f"config.mesh.context_parallel or config.mesh.expert_parallel is {row}, which does not divide the "
            f"{len(all_ranks)} ranks of the job\nStart a multiple of it, or choose a number that divides them."
        )
    return all_ranks.view(-1, row)


def _world() -> dist.ProcessGroup:
    """Return the default process group. Drop the groups of a destroyed one, whose threads would go on."""
    initialise()
    fork.refuse()
    world = dist.group.WORLD
    assert world is not None
    if any(job.world is not world for job in _jobs.values()):
        _jobs.clear()
    if any(mesh_world is not world for mesh_world, _ in _meshes.values()):
        _meshes.clear()
    return world


def _create_job(timeout: float, grid: torch.Tensor, world: dist.ProcessGroup, liveness: Liveness) -> Job:
    """Create the job's process groups. A collective.

    Args:
        grid: the ranks, one dimension for each mesh dimension.
    """
    limit = timedelta(seconds=timeout)
    try:
        data = _group(None, limit, world)
        channel = Channel(new_group(timeout, _control_backend(data)))
        groups = (data,) if grid.dim() == 1 else _groups(grid, limit, world)
    except RuntimeError as error:
        raise CommunicationError(_lost_message(liveness, "creating process groups", timeout, error)) from error
    # Weak references: the threads of a destroyed group must end.
    group_references = [weakref.ref(group) for group in (data, channel.group, *groups)]
    channel_reference, hang_up_before = weakref.ref(channel), liveness.hang_up

    def hang_up_all() -> None:
        hang_up_before()
        if (open_channel := channel_reference()) is not None:
            open_channel.hang_up()
        for group in group_references:
            hang_up(group())

    liveness.hang_up = hang_up_all
    position = tuple((grid == liveness.rank).nonzero()[0].tolist())
    mesh = Mesh(tuple(grid.shape), position, tuple(group.group_name for group in groups))
    return Job(liveness.rank, liveness.size, grid.tolist(), mesh, groups, data, channel, world, timeout, liveness)


def _control_backend(data: dist.ProcessGroup) -> str:
    """Return gloo, or "fake" if the ranks are simulated.

    Ranks are simulated by torch's backend "fake", or one whose name begins so. Only this rank exists, and the others
    count as agreeing with it.
    """
    return "fake" if dist.get_backend(data).startswith("fake") else "gloo"


def _check_grid(grid: torch.Tensor, all_ranks: torch.Tensor) -> None:
    if not torch.equal(grid.flatten().sort().values, all_ranks):
        raise PlacementError(
            f"the placement has the ranks {grid.tolist()}, the job 0 to {len(all_ranks) - 1}\n"
            "A step runs on all of them."
        )
    for dim in range(grid.dim()):
        if not torch.equal(grid.sort(dim).values, grid):
            raise PlacementError(
                f"the placement {grid.tolist()} must have its ranks in ascending order along each dimension"
            )


def _group(ranks: list[int] | None, limit: timedelta, world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Create a group of these ranks, or of all, with the backends of the default group."""
    lazy = _torch.lazy_nccl(dist.get_backend_config(world), limit)
    if ELASTIC in os.environ:
        return new_group(limit.total_seconds(), "gloo", ranks)
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=limit, **lazy)
    return group


def new_group(timeout: float, backend: str, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Create a process group. A collective.

    Args:
        timeout: of its collectives, in seconds.
        backend: of torch.distributed, on the CPU.
        ranks: its ranks; None: all.
    """
    with _ending(dist.get_world_size()):
        connects = min(timeout, _CONNECT_LIMIT) if ELASTIC in os.environ else timeout
        group: dist.ProcessGroup = dist.new_group(
            None if ranks is None else list(ranks), timeout=timedelta(seconds=connects), backend=backend
        )
    if connects < timeout and (ranks is None or dist.get_rank() in ranks):
        _torch.set_timeout(group, timedelta(seconds=timeout))
    return group


@contextlib.contextmanager
def _ending(size: int) -> Iterator[None]:
    """Let :func:`end_exchanges` end what the block connects, in an elastic job.

    Args:
        size: at least the ranks of a group that is connected.
    """
    global _connecting
    _connecting = (size, {_inode(one) for _, one in sockets()}) if ELASTIC in os.environ else None
    try:
        yield
    finally:
        _connecting = None


def _inode(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


def _groups(grid: torch.Tensor, limit: timedelta, world: dist.ProcessGroup) -> tuple[dist.ProcessGroup, ...]:
    """Create the groups of all ranks along each mesh dimension, in the same order on each, and return this rank's."""
    own = []
    for dim in range(grid.dim()):
        for ranks in grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist():
            group = _group(ranks, limit, world)
            if dist.get_rank() in ranks:
                own.append(group)
    return tuple(own)


def has_no_rank() -> bool:
    """Return whether this is a process of an elastic job that is in no generation now."""
    return ELASTIC in os.environ and not dist.is_initialized()


def initialise() -> None:
    """Initialise the default process group if there is none, from a launcher's environment or for this process alone.

    Raises:
        CommunicationError: the launcher's environment is incomplete, or the rendezvous failed.
    """
    if dist.is_initialized():
        return
    if has_no_rank():
        raise CommunicationError(
            "this process has no rank outside of zg.elastic(): ranks of an elastic job come and go\n"
            "Call zg.rank(), graphs and prepared loaders only in the function that zg.elastic() calls."
        )
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    launch = find_launch()
    if launch is None:
        if line := unused_allocation():
            print(line, file=sys.stderr, flush=True)
        dist.init_process_group(
            backend, store=_torch.single_process_store(), rank=0, world_size=1, **_torch.lazy_nccl(backend)
        )
    else:
        init_from_environment(backend, launch)
    atexit.register(_leave)


def connect(rank: int, world_size: int, address: str, backend: str | None, local_rank: int | None) -> None:
    """Initialise the default process group without a launcher's environment.

    Args:
        rank: this process's rank.
        world_size: the number of ranks.
        address: of the rendezvous, ``tcp://host:port``.
        backend: of torch.distributed; None: NCCL for GPUs, if there are any, and gloo for the CPU.
        local_rank: the index of the GPU to use; None: the rank modulo the number of GPUs.

    Raises:
        CommunicationError: this process is another rank already, the backend is missing, or the rendezvous failed.
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
    device = None
    if gpus:
        device = rank % gpus if local_rank is None else local_rank
        torch.cuda.set_device(device)
    backend = backend or ("cpu:gloo,cuda:nccl" if gpus else "gloo")
    lazy = _torch.lazy_nccl(backend, device=device)
    try:
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=world_size, **lazy)
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(did_not_meet(rank, world_size, address, error)) from error
    atexit.register(_leave)


def _leave() -> None:
    """Destroy the process group that this module initialised; torch warns if a process exits with one."""
    if fork.is_child():
        return
    _jobs.clear()
    _meshes.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def enter(store: Any, rank: int, size: int) -> None:
    """Initialise the default process group of a generation of an elastic job, over gloo.

    New groups on every torch. From 2.14 on gloo's group can be given other ranks instead (``_reconfigure``), in 2 to 15
    ms on three ranks where leaving and making one takes 90 to 100, of the half second in which ranks regroup. But
    torch's tables then have the ranks of before, so groups of a mesh and ranks that join need new ones all the same.

    Raises:
        RuntimeError: a rank does not connect.
    """
    written_by_others.clear()
    # Ranks meet under equal names, and others of them have failed to connect before.
    _torch.restart_group_names()
    limit = timedelta(seconds=_CONNECT_LIMIT)
    with _ending(size):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    assert dist.group.WORLD is not None
    _torch.set_timeout(dist.group.WORLD, default_pg_timeout)
    atexit.unregister(_leave)
    atexit.register(_leave)


def abandon(why: str) -> None:
    """Destroy all process groups without waiting for other ranks. Their exchanges with this one end with an error."""
    liveness = next((job.liveness for job in _jobs.values()), None)
    if liveness is not None:
        # Peers on this host that wait in a step ask the store.
        liveness.mark_break(why)
        liveness.report_failure(CommunicationError(why))
        liveness.hang_up()
        liveness.end_threads()
    _torch.end_works(drops=True)
    _leave()


def end_exchanges() -> None:
    """End all exchanges of this process, in whatever thread they wait, with an error. Its groups stay.

    A group that is being connected counts as connected then, to nobody.
    """
    for job in tuple(_jobs.values()):
        job.liveness.hang_up()
    hang_up(dist.group.WORLD)
    if (connecting := _connecting) is not None:
        size, before = connecting
        for _, one in sockets():
            if _inode(one) not in before:
                with contextlib.suppress(OSError):
                    _torch.end_connecting(one, size)


def rank() -> int:
    """Return this process's rank, from 0; initialise the process group if needed."""
    initialise()
    return dist.get_rank()


def world_size() -> int:
    """Return the number of ranks; initialise the process group if needed."""
    initialise()
    return dist.get_world_size()


def mesh_of(device_type: str, ranks: torch.Tensor) -> DeviceMesh:
    """Return the mesh of the ranks on a type of device, created once. Every rank of the job must call it.

    Args:
        ranks: an integer tensor in the shape of the mesh; all ranks in a line are over the default process group.
    """
    world = _world()
    key = device_type, str(ranks.tolist())
    if key not in _meshes:
        is_world = torch.equal(ranks, torch.arange(dist.get_world_size(), device="cpu"))
        made = DeviceMesh.from_group(world, device_type) if is_world else DeviceMesh(device_type, ranks)
        _meshes[key] = world, made
    return _meshes[key][1]


def keep_mesh(mesh: DeviceMesh) -> None:
    """Let :func:`mesh_of` return this mesh for its ranks, if there is none yet. No collective."""
    _meshes.setdefault((mesh.device_type, str(mesh.mesh.tolist())), (_world(), mesh))


def digest(value: object) -> int:
    """Return a 64-bit hash of ``repr(value)``, equal on all ranks, unlike Python's own ``hash`` of a string."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), signed=True)


@contextlib.contextmanager
def agreeing(job: Job, doing: str) -> Iterator[dict[str, str]]:
    """Yield a dict for facts; at the end check that all ranks have the same ones, and that no rank has failed inside.

    Those whose key ends with ``SHOWN_WITH`` are for messages only.

    Args:
        job, doing: as for :func:`agree`, whose errors are raised.
    """
    problem: BaseException | None = None
    facts: dict[str, str] = {}
    try:
        yield facts
    except BaseException as error:
        problem = error
    # A state may list its tensors in another order on each rank.
    compared = sorted((key, fact) for key, fact in facts.items() if not key.endswith(SHOWN_WITH))
    agree(job, doing, digest(compared), lambda: facts, problem)


def agree(
    job: Job,
    doing: str,
    number: int,
    facts: Callable[[], Mapping[str, str]],
    problem: BaseException | None = None,
    sizes: Sequence[int] = (),
) -> list[list[int]]:
    """Check that the number is equal on all ranks and that none has a problem; else raise on every rank.

    Args:
        job: the ranks.
        doing: what the ranks are about to do, for messages: ``"step 3"``.
        number: a digest of everything that must be equal.
        facts: returns the same in words, by name and in order; called only if ranks differ.
        problem: an error or interrupt of this rank, which the other ranks would else wait for.
        sizes: numbers from 0 up to gather, as many on each rank.

    Returns:
        The sizes of each rank.

    Raises:
        RankMismatchError: ranks differ (the message names the first fact that does), or another rank has a problem.
        CommunicationError: a rank did not answer.
        BaseException: this rank's own ``problem``.
    """
    if job.size == 1:
        if problem is not None:
            raise problem
        return [list(sizes)]
    # Ranks at different steps may be equal in all else. And if one broke off alone, its next message would be taken for
    # the one that it has not sent.
    broke_off = job.liveness.broke_off
    number ^= digest((doing, broke_off))
    # Counted before the comparison, which may fail: all ranks count it.
    job.liveness.agreed += 1
    try:
        with explaining_failures(job, f"comparing notes before {doing}", breaks_off=False):
            equal, problems, everybody = job.channel.compare(number, problem is not None, sizes)
            if equal and not problems:
                if broke_off:
                    _torch.end_works()
                    job.liveness.resume()
                if everybody is None:
                    # Ranks whose numbers are equal have equally many.
                    everybody = job.channel.gather(torch.tensor(sizes, dtype=torch.int64, device="cpu")).tolist()
                return everybody
            problem_text = f"{type(problem).__name__}: {problem}".removesuffix(": ") if problem is not None else None
            named_facts = {} if problems else {BROKE_OFF: broke_off or "nowhere", DOING: doing, **facts()}
            reports = job.channel.share((problem_text, named_facts))
    except CommunicationError as error:
        # The user asked for the interrupt, whatever the other ranks do.
        if problem is not None and not isinstance(problem, Exception):
            raise problem from error
        raise
    if problem is not None:
        if not isinstance(problem, Exception):
            mark_reported(problem)
        raise problem
    problems_by_rank = {rank: text for rank, (text, _) in enumerate(reports) if text is not None}
    if problems_by_rank:
        first = problems_by_rank[min(problems_by_rank)]
        raise RankMismatchError(f"{name_ranks(problems_by_rank)} failed before {doing}:\n  {first}\nNo rank went on.")
    of_ranks = [named_facts for _, named_facts in reports]
    mismatch = RankMismatchError(first_difference(of_ranks, doing))
    mismatch.facts = of_ranks
    raise mismatch


@contextlib.contextmanager
def explaining_failures(job: Job, doing: str, *, breaks_off: bool = True) -> Iterator[None]:
    """Turn a failed exchange inside the context into an error that says what it was for and which rank is lost.

    Args:
        job: the ranks.
        doing: what this rank is doing.
        breaks_off: after an error or an interrupt the ranks cannot go on: each may have left another part undone.

    Raises:
        CommunicationError: the exchange failed.
    """
    job.check_alive()
    place = f"{doing}, rank {job.rank}" if breaks_off else doing
    with job.liveness.busy(doing), on_interrupt(lambda interrupt: job.liveness.report_interrupt(interrupt, place)):
        try:
            yield
        except ZeroGraphError:
            raise
        except RuntimeError as error:
            if breaks_off:
                job.liveness.mark_break(place)
            if is_out_of_memory(error):
                job.liveness.report_failure(error)
                raise
            raise communication_error(job, doing, error) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device or the CPU is out of memory; the message says how much was asked for."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@dataclass(eq=False, slots=True)
class reporting_failures:  # noqa: N801
    """Publish an exception raised inside the block, so that ranks that wait for this one can report its cause.

    Attributes:
        job: the ranks.
        doing: what this rank is doing.
        note: is called with any exception, and with ``doing``.
    """

    job: Job
    doing: str
    note: Callable[[BaseException, str], None] = lambda *_: None
    _busy: Any = None

    def __enter__(self) -> None:
        self.job.liveness.forget()
        self._busy = self.job.liveness.busy(self.doing)
        self._busy.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if error is None:
                return
            self.note(error, self.doing)
            if isinstance(error, (CommunicationError, RankMismatchError)):
                return
            if isinstance(error, Exception):
                self.job.liveness.report_failure(error)
            else:
                self.job.liveness.report_interrupt(error, self.doing)
        finally:
            self._busy.__exit__()


def communication_error(job: Job, doing: str, error: BaseException) -> CommunicationError:
    """Return the error of a failed collective in the user's terms. Asking the other ranks takes some seconds.

    Args:
        job: the ranks.
        doing: what this rank was doing.
        error: what the collective raised.
    """
    return CommunicationError(_lost_message(job.liveness, doing, job.timeout, error))


def _lost_message(liveness: Liveness, doing: str, timeout: float, error: BaseException) -> str:
    """Ask the other ranks and return the message that says which are lost; publish it for ranks that ask later."""
    own = liveness.own_failure()
    # The launcher of an elastic job knows who is lost, and the other ranks wait for this one.
    is_elastic = ELASTIC in os.environ
    answers = Answers(liveness.rank, doing, {}) if is_elastic else liveness.ask()
    lost = () if own is not None else answers.lost()
    head = f"rank {liveness.rank} of {liveness.size} lost {liveness.name(lost) if lost else 'the others'} while {doing}"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    liveness.report_failure(CommunicationError(head), lost)
    lines = [head, f"  {first}", *(f"  {line}" for line in answers.lines(liveness.name))]
    if own is not None:
        advice = (
            f"This rank broke off before, {own.doing}: {own.failed}. The others have missed it since: start the job "
            "anew, from the last checkpoint."
        )
    elif lost and answers.has_ended(lost):
        advice = (
            "Steps, full_parameters(), state_dict(), save() and load() are calls of all ranks: they belong under no "
            "'if rank == 0', and before the end of the script on every rank."
        )
    elif lost:
        advice = (
            f"Look at the output of {name_ranks(lost)} for the cause (config.checks.timeout is {timeout:g} seconds)."
        )
    else:
        advice = (
            "Another rank has died, stalls, or runs something else, or the network to it is cut (config.checks.timeout "
            f"is {timeout:g} seconds). Look at the other ranks' output; the first to fail is the cause."
        )
    return "\n".join([*lines, advice])
