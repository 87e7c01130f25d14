"""Find this process's place in a job in the environment of a launcher: torchrun, srun, mpirun, Ray Train, Kubeflow."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from zerograph.errors import CommunicationError

# Port of the rendezvous where a launcher names none. Jobs of Slurm that share a host get ports of their own.
_PORT = 29500
_SLURM_PORTS = range(20000, 30000)

# Set by srun for the processes that it starts, and not for a batch script.
_STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS")


@dataclass(frozen=True)
class _Launcher:
    """Names of a launcher's variables.

    Attributes:
        name: name of the launcher in messages.
        rank, size, local_rank, local_size: its variables.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    address: str = ""
    port: str = ""


TORCH = _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SRUN = _Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
# The innermost first: mpirun starts its daemons by srun, whose variables are then those of the daemons.
_OTHERS = (
    _Launcher(
        "mpirun (Open MPI)",
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    _Launcher("mpirun (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _SRUN,
    _Launcher(
        *("Kubeflow", "PET_NODE_RANK", "PET_NNODES", "", "PET_NPROC_PER_NODE"),
        *("PET_MASTER_ADDR", "PET_MASTER_PORT"),
    ),
)


# Lists of hosts that srun sets, the narrowest first.
_HOST_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


@dataclass(frozen=True)
class Launch:
    """A process's place in a job.

    Attributes:
        launcher: who started it, for messages.
        variables: torch's own variables: rank, size, address and port, and those of the host where they are known.
    """

    launcher: str
    variables: Mapping[str, str]

    def describe(self, device: str) -> str:
        """Return the line that rank 0 prints."""
        at = f"{self.variables['MASTER_ADDR']}:{self.variables['MASTER_PORT']}"
        return (
            f"zerograph: rank {self.variables['RANK']} of {self.variables['WORLD_SIZE']}, started by {self.launcher}; "
            f"rendezvous at {at}; device {device}"
        )


def number_of(
    name: str,
    default: int | None = None,
    least: int = 0,
    most: int | None = None,
    environment: Mapping[str, str] = os.environ,
    launcher: str = "torchrun",
) -> int:
    """Return an environment variable as a whole number.

    Args:
        name: the variable.
        default: returned if it is not set; None: it must be set.
        least, most: the range of allowed numbers.
        environment: the variables.
        launcher: who sets it, for the message.

    Raises:
        CommunicationError: it is not set and has no default, or is not a number in the range.
    """
    text = environment.get(name)
    if text is None and default is not None:
        return default
    with contextlib.suppress(ValueError):
        number = int(text or "")
        if number >= least and (most is None or number <= most):
            return number
    allowed = f"a whole number from {least} " + ("on" if most is None else f"to {most}")
    shown = "is not set" if text is None else f"is {text!r:.60}"
    raise CommunicationError(f"the environment variable {name} {shown}: it must be {allowed}, as {launcher} sets it")


def find_launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Return this process's place in the job that the environment describes; None if it runs alone.

    torch's own variables count first. What they do not say is taken from another launcher's.

    Raises:
        CommunicationError: variables are missing, are not numbers in their range, or contradict each other.
    """
    if "SLURM_STEP_NUM_TASKS" in environment:
        # SLURM_NTASKS may be missing, as with --ntasks-per-node, or be the job's, as in the shell that salloc opens.
        environment = {**environment, "SLURM_NTASKS": environment["SLURM_STEP_NUM_TASKS"]}
    other = next((launcher for launcher in _OTHERS if _started(launcher, environment)), None)
    named = TORCH.rank in environment or TORCH.size in environment
    if named and (other is None or _is_nested(other, environment)):
        return Launch(_torch_launcher(environment), _checked(environment))
    if other is None:
        return None
    variables = _translated(other, environment)
    if not named and variables[TORCH.size] == "1":
        return None
    _check_agreement(other, environment, *(("rank", "size", "local_rank") if named else ()), "address", "port")
    return Launch(
        other.name, _checked({**variables, **{key: environment[key] for key in variables if key in environment}})
    )


def unused_allocation(environment: Mapping[str, str] = os.environ) -> str:
    """Return a line to print if Slurm has allocated several tasks to a process that runs alone; else an empty text."""
    tasks = environment.get("SLURM_NTASKS", "1")
    if tasks == "1":
        return ""
    return f"zerograph: SLURM_NTASKS is {tasks}, but srun has not started this process: it runs alone"


def _checked(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables.

    Raises:
        CommunicationError: one is missing, or not a number in its range.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise CommunicationError(
            f"the environment names a distributed job, but {', '.join(missing)} is not set\n"
            "Start with torchrun, or unset RANK and WORLD_SIZE to run as one process."
        )
    number_of("RANK", most=number_of("WORLD_SIZE", least=1, environment=environment) - 1, environment=environment)
    number_of("MASTER_PORT", most=2**16 - 1, environment=environment)
    number_of("LOCAL_WORLD_SIZE", 1, least=1, environment=environment)
    number_of("TORCHELASTIC_RESTART_COUNT", 0, environment=environment)
    # Some launchers set -1 if there is one process.
    number_of("LOCAL_RANK", 0, least=-1, environment=environment)
    return {name: environment[name] for name in _NAMES if name in environment}


def _torch_launcher(environment: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    return "Kubeflow" if "KUBERNETES_SERVICE_HOST" in environment else "a launcher that sets RANK and WORLD_SIZE"


def _started(launcher: _Launcher, environment: Mapping[str, str]) -> bool:
    """Return whether the launcher started this process itself, and not only a script around it."""
    if launcher.rank not in environment or launcher.size not in environment:
        return False
    if launcher.name == "mpirun (PMI)" and _started(_SRUN, environment):
        # srun --mpi=pmi2 sets PMI's variables too, to its own numbers.
        ours, theirs = (launcher.rank, launcher.size), (_SRUN.rank, _SRUN.size)
        return [environment[name] for name in ours] != [environment[name] for name in theirs]
    return launcher is not _SRUN or any(name in environment for name in _STEP_VARIABLES)


def _is_nested(other: _Launcher, environment: Mapping[str, str]) -> bool:
    """Return whether another launcher runs once on each host, and starts several ranks there."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return True
    counts = [environment.get(name, "") for name in (TORCH.local_size, other.size, TORCH.size)]
    if not all(count.isdigit() for count in counts):
        return False
    ranks_of_host, hosts, ranks = map(int, counts)
    return ranks_of_host > 1 and hosts * ranks_of_host == ranks


def _check_agreement(other: _Launcher, environment: Mapping[str, str], *fields: str) -> None:
    """Check that torch's variables say what the launcher's say in some fields of :class:`_Launcher`.

    Raises:
        CommunicationError: two variables differ.
    """
    for field in fields:
        ours, theirs = getattr(TORCH, field), getattr(other, field)
        if ours in environment and theirs in environment and environment[ours] != environment[theirs]:
            raise CommunicationError(
                f"{ours} is {environment[ours]!r:.60} and {theirs} is {environment[theirs]!r:.60}: they must be equal\n"
                f"Unset {ours}, which a script or an earlier launcher has set; {other.name} sets {theirs}."
            )


def _translated(launcher: _Launcher, environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables from another launcher's."""

    def number(name: str, default: int | None = None, least: int = 0, most: int | None = None) -> int:
        return number_of(name, default, least, most, environment, launcher.name)

    size = number(launcher.size, least=1)
    rank = number(launcher.rank, most=size - 1)
    if launcher.name == "Kubeflow" and TORCH.rank in environment and environment.get(launcher.local_size) == "auto":
        # The default of a PyTorchJob, which sets RANK and WORLD_SIZE for one rank in each pod.
        environment = {**environment, launcher.local_size: "1"}
    if launcher.name == "Kubeflow" and environment.get(launcher.local_size, "1") != "1":
        raise CommunicationError(
            f"{launcher.local_size} is {environment[launcher.local_size]!r:.60}: a pod is to have several ranks\n"
            "Let the pod's command be torchrun, which starts them."
        )
    variables = {TORCH.rank: str(rank), TORCH.size: str(size)}
    if launcher.local_rank:
        # Without it all ranks of a host would use its first GPU.
        name, least = (TORCH.local_rank, -1) if TORCH.local_rank in environment else (launcher.local_rank, 0)
        variables[TORCH.local_rank] = str(number(name, 0 if size == 1 else None, least))
    local_size = number(launcher.local_size, 0) if launcher.local_size else 0
    if local_size:
        variables[TORCH.local_size] = str(local_size)
    variables["MASTER_ADDR"] = _address(launcher, environment, alone=local_size == size)
    variables["MASTER_PORT"] = next(
        (environment[name] for name in ("MASTER_PORT", "PET_MASTER_PORT") if environment.get(name)), _port(environment)
    )
    number_of("MASTER_PORT", most=2**16 - 1, environment=variables, launcher=launcher.name)
    return variables


def _address(launcher: _Launcher, environment: Mapping[str, str], *, alone: bool) -> str:
    """Return the address of rank 0's host.

    Raises:
        CommunicationError: the launcher does not say it.
    """
    if address := environment.get("MASTER_ADDR") or environment.get("PET_MASTER_ADDR"):
        return address
    if launcher.name == "srun":
        hosts = next((environment[name] for name in _HOST_LISTS if environment.get(name)), "")
        if hosts:
            return first_host(hosts)
    if alone or environment.get(launcher.size) == "1":
        return "127.0.0.1"
    raise CommunicationError(
        f"{launcher.name} has set {launcher.rank} and {launcher.size}, but no variable names the host of rank 0\n"
        "Set MASTER_ADDR to it on every rank: mpirun -x MASTER_ADDR=HOST (Open MPI), -genv MASTER_ADDR HOST (MPICH)."
    )


def _port(environment: Mapping[str, str]) -> str:
    """Return the port of a rendezvous, equal on all ranks: for a step of Slurm one of its own.

    Slurm reserves ports of a step's hosts with ``srun --resv-ports``. Without them the steps of fewer than 99 jobs in
    sequence, of up to 100 steps each, have different ports.
    """
    if reserved := re.match(r"\d+", environment.get("SLURM_STEP_RESV_PORTS", "")):
        return reserved.group()
    if "SLURM_JOB_ID" not in environment:
        return str(_PORT)
    job = number_of("SLURM_JOB_ID", environment=environment, launcher="srun")
    step = number_of("SLURM_STEP_ID", 0, environment=environment, launcher="srun")
    return str(_SLURM_PORTS[(101 * job + step) % len(_SLURM_PORTS)])


def first_host(hosts: str) -> str:
    """Return the first host of a list as Slurm writes it: ``node[03-07,9],gpu1`` begins with ``node03``."""
    first, depth = "", 0
    for character in hosts:
        if character == "," and not depth:
            break
        depth += {"[": 1, "]": -1}.get(character, 0)
        first += character
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
