"""Zerograph beside FSDP2 on one GPU: alone, and as rank 0 of 8 simulated ranks.

python benchmarks/gpu.py                                      # a GPT of 1.3 B parameters, bf16 with fp32 masters
python benchmarks/gpu.py --trace traces                       # chrome traces; collectives on their own stream
python benchmarks/gpu.py --contenders 'zerograph-3-*' --contenders 'fsdp2-*' --ranks 8 --batch 4
python benchmarks/gpu.py --device cpu --tiny                  # only to see that everything runs: no GPU needed

Each contender trains in a process of its own. After each measurement the JSON file is written, the Markdown page at
the end. Ends with status 1 if a contender fails, with status 2 if there is no GPU.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no installed package

from benchmarks.choose import choose  # noqa: E402
from benchmarks.simulated import report  # noqa: E402
from benchmarks.simulated.contenders import TABLE, Contender  # noqa: E402
from benchmarks.simulated.sizes import SIZES  # noqa: E402

EVERYBODY = ["*"]
ALONE_AND_EIGHT = [1, 8]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"


def main(
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    tiny: Annotated[bool, typer.Option(help="a tiny model: only to see that everything runs")] = False,
    contenders: Annotated[list[str], typer.Option(help="names or patterns; may be repeated")] = EVERYBODY,
    ranks: Annotated[list[int], typer.Option(min=1, help="how many ranks the job has; may be repeated")] = (
        ALONE_AND_EIGHT
    ),
    batch: Annotated[int | None, typer.Option(min=1, help="sequences of a rank; the size's own if not given")] = None,
    steps: Annotated[int, typer.Option(min=1, help="steps measured")] = 10,
    peak: Annotated[float | None, typer.Option(help="the device's dense bf16 TFLOP/s, where it is not known")] = None,
    trace: Annotated[Path | None, typer.Option(help="a folder for a chrome trace of each contender")] = None,
    patience: Annotated[float, typer.Option(help="seconds until one measurement is given up")] = 900.0,
    out: Annotated[
        Path | None,
        typer.Option(help="where to write: this name with .json and .md; nowhere if not given, on CPU or if tiny"),
    ] = None,
) -> None:
    """Zerograph beside FSDP2 on one GPU."""
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"no device {device!r}: cuda or cpu")
    if device == "cuda" and not torch.cuda.is_available():
        typer.echo(
            "There is no GPU here (torch.cuda.is_available() is False), and this benchmark measures one.\n"
            "Only to see that it runs: python benchmarks/gpu.py --device cpu --tiny",
            err=True,
        )
        raise typer.Exit(2)
    size = "tiny" if tiny else "1.3B"
    chosen = choose(contenders, TABLE)
    # What the tiny model takes on a CPU must not stand where a GPU's results belong.
    out = out or (RESULTS if device == "cuda" and not tiny else None)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    run: dict[str, Any] = {
        "about": about(device, size, batch, steps, trace is not None),
        "ranks": ranks,
        "peak_tflops": peak,
    }
    run["measurements"] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in ranks:
            for one in chosen:
                asked = ["--size", size, "--device", device, "--ranks", str(number), "--steps", str(steps)]
                asked += [] if batch is None else ["--batch", str(batch)]
                asked += [] if trace is None else ["--trace", str(trace.resolve() / f"{one.name}-of-{number}.json")]
                found = measure(one, asked, Path(folder) / "measured.json", patience)
                run["measurements"].append({"contender": one.name, "ranks": number, **found})
                typer.echo(f"{one.title}, {number} ranks: {found.get('failed') or _short(found)}")
                if out is not None:
                    out.with_suffix(".json").write_text(json.dumps(run))
    page = report.page(run)
    if out is not None:
        out.with_suffix(".md").write_text(page)
    typer.echo(page)
    if any("failed" in one for one in run["measurements"]):
        raise typer.Exit(1)


def measure(one: Contender, asked: list[str], out: Path, patience: float) -> dict[str, Any]:
    """Measure in a process of its own; return its result, or ``{"failed": reason}``."""
    command = [sys.executable, "-m", "benchmarks.simulated.worker", one.name, str(out), *asked]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=patience)
    except subprocess.TimeoutExpired:
        return {"failed": f"no end after {patience:g} seconds"}
    if ended.returncode:
        lines = [line.strip() for line in ended.stderr.splitlines() if "Error" in line]
        return {"failed": f"status {ended.returncode}: {lines[-1] if lines else 'it wrote no error'}"}
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def _short(found: dict[str, Any]) -> str:
    return f"{min(found['seconds']) * 1000:.1f} ms at least, peak {found['peak'] / 1e6:.1f} MB"


def about(device: str, size: str, batch: int | None, steps: int, traced: bool) -> dict[str, str]:
    """When, where and what this run is."""
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    versions += [f"CUDA {torch.version.cuda}"] if device == "cuda" else []
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": ", ".join([*versions, f"zerograph {importlib.metadata.version('zerograph')}"]),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {platform.machine()}: no measurement",
        "model": str(SIZES[size].with_batch(batch)),
        "collectives": "on a stream of their own" if traced else "copies on the stream that calls them",
        "measured": f"{steps} steps after 3 that are not counted",
    }


if __name__ == "__main__":
    typer.run(main)
