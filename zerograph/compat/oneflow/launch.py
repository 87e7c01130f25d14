"""``python -m zerograph.compat.oneflow.launch``: OneFlow's launcher, over ``torch.distributed.run``."""

from __future__ import annotations

import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Sequence

from torch.distributed import run


def arguments_of_torchrun(arguments: Sequence[str] | None = None) -> list[str]:
    """Translate OneFlow's options into torchrun's; exits with a message on unknown ones."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.redirect_stdout_and_stderr and not given.logdir:
        parser.error("--redirect_stdout_and_stderr needs --logdir, the folder to write to")
    if given.module and given.no_python:
        parser.error("--module and --no_python exclude each other: a module is run by python")
    for name in ("nnodes", "nproc_per_node"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} {getattr(given, name)}: give a number from 1 up")
    if not 0 <= given.node_rank < given.nnodes:
        parser.error(f"--node_rank {given.node_rank}: with --nnodes {given.nnodes} give 0 to {given.nnodes - 1}")
    return [
        *_where(given),
        f"--nproc-per-node={given.nproc_per_node}",
        *([f"--log-dir={given.logdir}"] if given.logdir else []),
        *(["--redirects=3"] if given.redirect_stdout_and_stderr else []),
        *(["--module"] if given.module else []),
        *(["--no-python"] if given.no_python else []),
        given.training_script,
        *given.training_script_args,
    ]


def _where(given: Namespace) -> list[str]:
    if given.nnodes == 1 and given.master_addr is None and given.master_port is None:
        # OneFlow's fixed port would let two jobs on a machine meet.
        return ["--standalone"]
    return [
        f"--nnodes={given.nnodes}",
        f"--node-rank={given.node_rank}",
        f"--master-addr={given.master_addr or '127.0.0.1'}",
        f"--master-port={given.master_port or 29500}",
    ]


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m zerograph.compat.oneflow.launch", description=__doc__, allow_abbrev=False)
    parser.add_argument("--nnodes", type=int, default=1, help="machines; default 1")
    parser.add_argument("--node_rank", "--node-rank", type=int, default=0, help="which of them this is, from 0")
    count = "processes on each machine; default 1"
    parser.add_argument("--nproc_per_node", "--nproc-per-node", type=int, default=1, help=count)
    parser.add_argument("--master_addr", "--master-addr", help="address of machine 0; default 127.0.0.1")
    port = "a free port there; default: any, with several machines 29500"
    parser.add_argument("--master_port", "--master-port", type=int, help=port)
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as for python -m")
    parser.add_argument("--no_python", "--no-python", action="store_true", help="run the script itself, not by python")
    redirect = "--redirect_stdout_and_stderr", "--redirect-stdout-and-stderr"
    parser.add_argument(*redirect, action="store_true", help="write what is printed to --logdir")
    parser.add_argument("--logdir", help="folder for the logs of the processes")
    parser.add_argument("training_script", help="the program that each process runs, followed by its arguments")
    parser.add_argument("training_script_args", nargs=REMAINDER)
    return parser


if __name__ == "__main__":
    run.main(arguments_of_torchrun(sys.argv[1:]))
