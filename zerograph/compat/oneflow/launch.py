"""``python -m zerograph.compat.oneflow.launch``: OneFlow's launcher, over ``torch.distributed.run``."""

from __future__ import annotations

import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Sequence

from torch.distributed import run


def arguments_of_torchrun(arguments: Sequence[str] | None = None) -> list[str]:
    """Translate OneFlow's options into torchrun's; exit with a message on unknown ones."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.redirect_stdout_and_stderr and not options.logdir:
        parser.error("--redirect_stdout_and_stderr needs --logdir, the folder to write to")
    if options.module and options.no_python:
        parser.error("--module and --no_python exclude each other: a module is run by python")
    for name in ("nnodes", "nproc_per_node"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: give a number from 1 up")
    if not 0 <= options.node_rank < options.nnodes:
        parser.error(f"--node_rank {options.node_rank}: with --nnodes {options.nnodes} give 0 to {options.nnodes - 1}")
    return [
        *_where(options),
        f"--nproc-per-node={options.nproc_per_node}",
        *([f"--log-dir={options.logdir}"] if options.logdir else []),
        *(["--redirects=3"] if options.redirect_stdout_and_stderr else []),
        *(["--module"] if options.module else []),
        *(["--no-python"] if options.no_python else []),
        options.training_script,
        *options.training_script_args,
    ]


def _where(options: Namespace) -> list[str]:
    if options.nnodes == 1 and options.master_addr is None and options.master_port is None:
        # With OneFlow's fixed port, two jobs on a machine would connect to each other.
        return ["--standalone"]
    return [
        f"--nnodes={options.nnodes}",
        f"--node-rank={options.node_rank}",
        f"--master-addr={options.master_addr or '127.0.0.1'}",
        f"--master-port={options.master_port or 29500}",
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
