"""Zerograph beside FSDP2 and plain PyTorch on one GPU: alone, and as rank 0 of 8 simulated ranks.

python -m benchmarks.gpu --seconds 480                             # GPT and Llama, bf16 with fp32 masters
python -m benchmarks.gpu --with-tests --seconds 480                # tests/gpu too, while the first ones compile
python -m benchmarks.gpu --only 'llama/*inductor/1' --traces       # names are size/contender/ranks
python -m benchmarks.gpu --page build/gpu/results.jsonl            # benchmarks/results/gpu.md from such a file
python -m benchmarks.gpu --device cpu --tiny --seconds 200         # only to see that everything runs: no GPU needed

Each contender trains in a process of its own. As many as the card holds compile at a time, then each measures alone;
most telling first. Each result is a line of results.jsonl in $OUT, or else in build/gpu, as soon as it is there. Ends
with status 1 if a contender or a test fails, with status 2 if there is no GPU.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no installed package

from benchmarks import generated  # noqa: E402
from benchmarks.choose import matching  # noqa: E402
from benchmarks.simulated import planned, report  # noqa: E402
from benchmarks.simulated.contenders import CONTENDERS  # noqa: E402
from benchmarks.simulated.schedule import Beside, Run, Schedule, add, name_of, rows_of, start  # noqa: E402
from benchmarks.simulated.sizes import SIZES  # noqa: E402
from zerograph.runtime.backends.backends import BACKENDS  # noqa: E402

PAGE = "benchmarks/results/gpu.md"
_FSDP, _PLAIN = "fsdp2-compiled", "plain-compiled"
# Most telling first: what a limit of time cuts off is what matters least.
NAMES = (
    "ceilings",
    *(f"llama/{each}/1" for each in ("zerograph-2-inductor", _FSDP, _PLAIN)),
    *(f"llama/{each}/8" for each in ("zerograph-3-inductor", _FSDP)),
    *(f"gpt/{each}/1" for each in ("zerograph-2-inductor", _FSDP)),
    *(f"gpt/{each}/8" for each in ("zerograph-3-inductor", _FSDP)),
    *(f"gpt/{_PLAIN}/1", "small/zerograph-2-inductor/1", f"small/{_PLAIN}/1", "small/zerograph-2-cudagraph/1"),
    *(f"gpt/zerograph-2-{each}-offload/1" for each in ("eager", "inductor")),
    *("llama/zerograph-2-eager/1", "gpt/zerograph-2-eager/1", "small/zerograph-2-eager/1", f"small/{_FSDP}/1"),
    *("llama/zerograph-3-eager/8", "gpt/zerograph-3-eager/8"),
    *("llama/zerograph-3-inductor/1", "gpt/zerograph-3-inductor/1"),
    *("llama/zerograph-2-inductor/8", "gpt/zerograph-2-inductor/8"),
    *("llama/zerograph-2-eager/8", "gpt/zerograph-2-eager/8"),
)
TINY = (
    *("tiny-llama/zerograph-2-eager/1", "tiny/zerograph-3-eager/8", "tiny/fsdp2-eager/8", "tiny/plain-eager/1"),
    *("tiny-llama/zerograph-2-inductor/1", "tiny-llama/fsdp2-compiled/1", "tiny-llama/plain-compiled/1"),
)
EVERYBODY = ["*"]
# Of the time, the tests get this share; of the card, this many bytes for their processes.
TESTS_SHARE, TESTS_BYTES, TESTS_PROCESSES = 0.4, 16e9, 6
# What other processes and torch's own handles take of the card.
MARGIN = 3e9


def main(
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    tiny: Annotated[bool, typer.Option(help="tiny models: only to see that everything runs")] = False,
    only: Annotated[list[str], typer.Option(help="names or patterns; may be repeated")] = EVERYBODY,
    seconds: Annotated[float, typer.Option(min=1, help="seconds for everything together")] = 480.0,
    with_tests: Annotated[bool, typer.Option(help="run tests/gpu, too")] = False,
    steps: Annotated[int, typer.Option(min=1, help="steps measured")] = 10,
    traces: Annotated[bool, typer.Option(help="keep chrome traces of the first four; 16 MiB each at most")] = False,
    commit: Annotated[str, typer.Option(help="commit of the code, where there is no repository")] = "",
    page: Annotated[Path | None, typer.Option(help="measure nothing: write the page of this file of results")] = None,
) -> None:
    """Zerograph beside FSDP2 and plain PyTorch on one GPU."""
    if page is not None:
        write_page(page)
        return
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"no device {device!r}: cuda or cpu")
    if device == "cuda" and not torch.cuda.is_available():
        typer.echo(
            "There is no GPU here (torch.cuda.is_available() is False), and this benchmark measures one.\n"
            "Only to see that it runs: python -m benchmarks.gpu --device cpu --tiny",
            err=True,
        )
        raise typer.Exit(2)
    end = time.monotonic() + seconds
    names = [name for name in matching(only, TINY if tiny else NAMES[device == "cpu" :]) if exists(name)]
    out = Path(os.environ.get("OUT") or ROOT / "build" / "gpu")
    out.mkdir(parents=True, exist_ok=True)
    memory = torch.cuda.get_device_properties(0).total_memory - MARGIN if device == "cuda" else float("inf")
    kept = names[:4] if traces else []
    schedule = Schedule(device, steps, memory, end, out, kept, say=lambda row: typer.echo(report.short(row)))
    before = rows_of(schedule.results)
    add(schedule.results, about(device, steps, commit))
    beside = tests(device, tiny, seconds, out) if with_tests else None
    schedule.measure([Run(name, reserved(name)) for name in names], beside)
    rows = rows_of(schedule.results)[len(before) :]
    typer.echo("\n\n".join(report.tables(rows)))
    if beside is not None and not any(row["kind"] == "test" for row in rows):
        typer.echo((out / "tests.txt").read_text()[-3000:])
    latest = {name_of(row): row for row in rows if row["kind"] == "step"}
    if any("failed" in row for row in latest.values()) or any(row.get("outcome") == "failed" for row in rows):
        raise typer.Exit(1)


def exists(name: str) -> bool:
    """Return whether the contender's backend is in this version."""
    contender = CONTENDERS.get(name.split("/")[1]) if "/" in name else None
    return contender is None or not contender.ours or contender.backend in BACKENDS


def reserved(name: str) -> float:
    """Return the bytes that a run takes from the card."""
    if name == "ceilings":
        return 5e9
    size, contender, ranks = name.split("/")
    return SIZES[size].bytes_on_card(contender, int(ranks))


def tests(device: str, tiny: bool, seconds: float, out: Path) -> Beside:
    """Start tests/gpu; they begin none after their share of the time, and end with it."""
    share = TESTS_SHARE * seconds
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--device", device, "-p", "no:cacheprovider"]
    command += ["--results", str(out / "results.jsonl"), "--seconds", str(share - 15), *(["--tiny"] if tiny else [])]
    if not tiny:
        # One test at a time to each process, so that those that tell most come first.
        command += ["--numprocesses", str(TESTS_PROCESSES), "--dist", "load", "--maxschedchunk", "1"]
    return Beside(start(command, out / "tests.txt"), TESTS_BYTES, time.monotonic() + share)


def about(device: str, steps: int, commit: str) -> dict[str, Any]:
    """When, where and of which code this run is."""
    return {
        "kind": "about",
        "commit": commit or generated.commit_of() or "unknown",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "sources": generated.digest(generated.PAGES[PAGE]),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {platform.machine()}: no measurement",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "steps": steps,
    }


def write_page(file: Path) -> None:
    """Write the page of the results in a file; predictions of the planner are added to the file where it lacks them."""
    rows = rows_of(file)
    for key in planned.missing(rows):
        rows.append(planned.predict(key))
        add(file, rows[-1])
        typer.echo(f"planned {key}: {rows[-1]['ms']:.1f} ms")
    (ROOT / PAGE).write_text(report.page(rows))


if __name__ == "__main__":
    typer.run(main)
