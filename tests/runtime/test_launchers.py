"""A process finds its place in a job in the environment of its launcher."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zerograph as zg
from benchmarks.measure.hosts import LINK, two_hosts, unavailable
from tests.harness import sliced
from zerograph.runtime.job import environment, liveness
from zerograph.runtime.job.launchers import Launch, find_launch, first_host, unused_allocation

ROOT = Path(__file__).parents[2]
TORCH = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "host0", "MASTER_PORT": "29400"}
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[03-06],gpu1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
POD = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "train-0", "PET_MASTER_PORT": "29401"}
MASTER = {"MASTER_ADDR": "train-0", "MASTER_PORT": "29401"}
RAY = TORCH | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}


def _without(environment: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key != name}


def place(environment: dict[str, str]) -> tuple[str, ...]:
    """Launcher, rank, size, address and port."""
    launch = find_launch(environment)
    assert launch is not None
    return launch.launcher, *(launch.variables[name] for name in TORCH)


def test_a_process_that_nobody_launched_is_alone() -> None:
    assert find_launch({"PATH": "/bin"}) is None
    assert find_launch(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    # The shell that salloc opens: a step of one task that keeps the job's SLURM_NTASKS.
    assert find_launch(SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCH | {"TORCHELASTIC_RUN_ID": "x"}, ("torchrun", "3", "8", "host0", "29400")),
        (RAY, ("a launcher that sets RANK and WORLD_SIZE", "3", "8", "host0", "29400")),
        (TORCH | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, ("Kubeflow", "3", "8", "host0", "29400")),
        (POD, ("Kubeflow", "1", "2", "train-0", "29401")),
        (SLURM, ("srun", "3", "8", "node03", "24636")),
        (SLURM | {"MASTER_ADDR": "login", "MASTER_PORT": "5"}, ("srun", "3", "8", "login", "5")),
        (_without(SLURM, "SLURM_NTASKS") | {"SLURM_STEP_NUM_TASKS": "6"}, ("srun", "3", "6", "node03", "24636")),
        (SLURM | {"SLURM_STEP_RESV_PORTS": "12003-12006"}, ("srun", "3", "8", "node03", "12003")),
        (OPEN_MPI, ("mpirun (Open MPI)", "3", "4", "127.0.0.1", "29500")),
        # mpirun inside of an allocation: Slurm's variables are those of its daemons.
        (OPEN_MPI | SLURM, ("mpirun (Open MPI)", "3", "4", "127.0.0.1", "24636")),
        (MPICH | {"MASTER_ADDR": "host0"}, ("mpirun (PMI)", "1", "4", "host0", "29500")),
        # mpirun of MPICH there, and srun --mpi=pmi2.
        (MPICH | SLURM | {"MASTER_ADDR": "host0"}, ("mpirun (PMI)", "1", "4", "host0", "24636")),
        (SLURM | {"PMI_RANK": "3", "PMI_SIZE": "8"}, ("srun", "3", "8", "node03", "24636")),
        # A PyTorchJob of Kubeflow whose command is python.
        (
            TORCH | POD | {"RANK": "1", "WORLD_SIZE": "2", "PET_NPROC_PER_NODE": "auto"} | MASTER,
            ("Kubeflow", "1", "2", "train-0", "29401"),
        ),
        # torchrun, and a launcher that starts several ranks on each of Slurm's nodes.
        (SLURM | TORCH | {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "32"}, ("torchrun", "3", "32", "host0", "29400")),
        (
            SLURM | TORCH | {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "16", "RANK": "9"},
            ("a launcher that sets RANK and WORLD_SIZE", "9", "16", "host0", "29400"),
        ),
        # A script that sets some of torch's variables itself.
        (SLURM | {"WORLD_SIZE": "8", "RANK": "3"}, ("srun", "3", "8", "node03", "24636")),
    ],
)
def test_rank_size_and_address_are_found(environment: dict[str, str], expected: tuple[str, ...]) -> None:
    assert place(environment) == expected


def test_steps_of_jobs_in_sequence_have_ports_of_their_own() -> None:
    steps = [(job, step) for job in range(1200, 1290) for step in range(20)]
    numbers = [{"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job, step in steps]
    assert len({place(SLURM | one)[-1] for one in numbers}) == len(steps)


def test_the_rank_of_a_device_is_found() -> None:
    found = [find_launch(environment) for environment in (SLURM, OPEN_MPI, RAY)]
    assert [launch.variables["LOCAL_RANK"] for launch in found if launch is not None] == ["1", "3", "1"]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (SLURM | {"RANK": "2", "WORLD_SIZE": "8"}, ("RANK is '2'", "SLURM_PROCID is '3'", "Unset RANK")),
        (SLURM | {"WORLD_SIZE": "4"}, ("WORLD_SIZE is '4'", "SLURM_NTASKS is '8'", "Unset WORLD_SIZE")),
        (OPEN_MPI | {"WORLD_SIZE": "5"}, ("WORLD_SIZE is '5'", "OMPI_COMM_WORLD_SIZE is '4'")),
        (SLURM | {"SLURM_PROCID": "8"}, ("SLURM_PROCID is '8'", "from 0 to 7", "srun")),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, ("no variable names the host of rank 0", "Set MASTER_ADDR")),
        (MPICH, ("no variable names the host of rank 0", "mpirun -x MASTER_ADDR=HOST")),
        # All ranks of a host would share its first GPU.
        (_without(MPICH, "MPI_LOCALRANKID") | {"MASTER_ADDR": "host0"}, ("MPI_LOCALRANKID is not set", "mpirun (PMI)")),
        (POD | {"PET_NPROC_PER_NODE": "auto"}, ("PET_NPROC_PER_NODE is 'auto'", "torchrun")),
        (POD | {"PET_NPROC_PER_NODE": "8"}, ("PET_NPROC_PER_NODE is '8'", "torchrun")),
        (
            POD | {"MASTER_ADDR": "host0"},
            ("MASTER_ADDR is 'host0'", "PET_MASTER_ADDR is 'train-0'", "Unset MASTER_ADDR"),
        ),
        (POD | MASTER | {"MASTER_PORT": "5"}, ("MASTER_PORT is '5'", "PET_MASTER_PORT is '29401'")),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ("MASTER_ADDR, MASTER_PORT is not set", "torchrun")),
    ],
)
def test_contradictions_and_gaps_name_the_variables(environment: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(zg.CommunicationError) as raised:
        find_launch(environment)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node[03-07,9],gpu1", "node03"),
        ("a,b", "a"),
        ("rack[2-3]n[010,12].site", "rack2n010.site"),
    ],
)
def test_the_first_host_of_slurms_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_a_batch_script_of_slurm_runs_alone_and_is_told() -> None:
    batch = _without(SLURM, "SLURM_STEP_ID") | {"SLURM_PROCID": "0"}
    assert find_launch(batch) is None
    assert "SLURM_NTASKS is 8, but srun has not started this process" in unused_allocation(batch)
    assert unused_allocation({}) == ""


def test_torchruns_error_file_has_the_named_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr(sys, "last_value", ValueError("of the user"), raising=False)
    liveness._write_error_file()
    assert not file.exists()
    monkeypatch.setattr(
        sys, "last_value", zg.CommunicationError("rank 0 of 2 lost rank 1 while comparing notes before step 3")
    )
    liveness._write_error_file()
    message = json.loads(file.read_text())["message"]
    assert "rank 0 of 2 lost rank 1 while comparing notes before step 3" in message["message"]
    # The summary of torchrun prints this.
    assert "rank 0 of 2 lost rank 1 while comparing notes before step 3" in message["extraInfo"]["py_callstack"]


def test_a_failed_rendezvous_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> object:
        raise RuntimeError("Connection refused\nmore")

    monkeypatch.setattr(environment, "rendezvous", refused)
    variables = TORCH | {"RANK": "1", "WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(zg.CommunicationError) as raised:
        environment.init_from_environment("gloo", Launch("torchrun", variables))
    assert str(raised.value) == "rank 1 of 2 did not meet the others at host0:29400: Connection refused"


SCRIPT = """
import torch, torch.distributed as dist
from zerograph.runtime.job.process_group import initialise
initialise()
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print(dist.get_rank(), dist.get_world_size(), int(total), flush=True)
"""


# Rank 3 fails after all ranks have met, until the last restart.
FAILING = """
import os, sys, torch.distributed as dist
from zerograph.runtime.job.process_group import initialise
initialise()
if os.environ["RANK"] == "3" and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < RESTARTS:
    sys.exit(1)
"""


def start(file: Path, place: dict[str, str]) -> mp.process.BaseProcess:
    """Run the script in a process with these variables, forked off what has imported everything; it prints to files."""
    process = mp.get_context("forkserver").Process(target=_run_script, args=(file, place))
    process.start()
    return process


def _run_script(file: Path, place: dict[str, str]) -> None:
    for number, name in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(file.with_suffix(name), os.O_CREAT | os.O_WRONLY), number)
    for name in [name for name in os.environ if name in TORCH or "SLURM" in name]:
        del os.environ[name]
    os.environ |= place
    torch.set_num_threads(1)
    try:
        exec(SCRIPT, {"__name__": "__main__"})
    except KeyboardInterrupt:
        # As Python ends then.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def started(folder: Path, places: list[dict[str, str]]) -> list[tuple[str, str]]:
    """Return standard output and error of the script in processes with these variables."""
    files = [folder / f"rank{number}" for number in range(len(places))]
    for process in [start(file, place) for file, place in zip(files, places, strict=True)]:
        process.join(300)
    return [(file.with_suffix(".out").read_text(), file.with_suffix(".err").read_text()) for file in files]


def free_port() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


def of_slurm(rank: int) -> dict[str, str]:
    nodes = {"SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank)}
    return SLURM | nodes | {"SLURM_PROCID": str(rank)}


def of_mpirun(rank: int) -> dict[str, str]:
    size = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    return OPEN_MPI | size | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)}


@sliced("launched", [of_slurm], [of_mpirun])
def test_ranks_meet_without_options_and_rank_0_says_where(launched: object, tmp_path: Path) -> None:
    port = {"MASTER_PORT": free_port()}
    first, second = started(tmp_path, [launched(rank) | port for rank in range(2)])  # type: ignore[operator]
    assert (first[0], second[0]) == ("0 2 3\n", "1 2 3\n")
    name, host = ("srun", "localhost") if launched is of_slurm else ("mpirun (Open MPI)", "127.0.0.1")
    line = f"zerograph: rank 0 of 2, started by {name}; rendezvous at {host}:{port['MASTER_PORT']}; device cpu"
    assert line in first[1]
    assert "zerograph:" not in second[1]


@pytest.mark.long
def test_ranks_that_agents_of_two_hosts_start_again_meet_in_the_same_store(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    # A process that has asked, and has died before it was answered.
    store.append(environment._ASKED, "dead ")
    for counts in (("0", "0"), ("1", "0")):
        ranks = enumerate(counts)
        asked = [place | {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": count} for rank, count in ranks]
        results = started(tmp_path, asked)
        assert [output for output, _ in results] == ["0 2 3\n", "1 2 3\n"], results


def test_ctrl_c_ends_a_rank_that_waits_for_the_others(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    rank, said = start(tmp_path / "rank", place), tmp_path / "rank.err"
    try:
        while not (said.exists() and "rank 0 of 2" in said.read_text()):
            assert rank.is_alive()
            time.sleep(0.02)
        # It has come, and blocks from now on.
        time.sleep(1)
        assert rank.pid is not None
        os.kill(rank.pid, signal.SIGINT)
        rank.join(20)
        assert rank.exitcode == -signal.SIGINT
    finally:
        rank.kill()


@pytest.mark.long
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
@pytest.mark.parametrize("restarts", [0, 1])
def test_an_agent_on_each_of_two_hosts(tmp_path: Path, restarts: int) -> None:
    file = tmp_path / "script.py"
    file.write_text(f"RESTARTS = {restarts}\n{FAILING}{SCRIPT}")
    plain = {name: value for name, value in os.environ.items() if name not in TORCH}
    plain |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LINK}
    with two_hosts() as hosts:
        names = ",".join(host.address for host in hosts)
        launch = [sys.executable, "-m", "zerograph", "launch", "--ranks", "2", "--hosts", names]
        launch += ["--max-restarts", str(restarts)]
        agents = [
            subprocess.Popen(
                [*host.enter(), *launch, "--host", host.address, str(file)],
                env=plain,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host in hosts
        ]
        outputs = [agent.communicate(timeout=400) for agent in agents]
    lines = sorted(line for output, _ in outputs for line in output.splitlines())
    assert lines == [f"{rank} 4 10" for rank in range(4)], outputs
