"""Rows of measurements and tests as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.simulated import planned
from benchmarks.simulated.contenders import CONTENDERS, RIVAL
from benchmarks.simulated.kernels import CLASSES
from benchmarks.simulated.sizes import SIZES
from benchmarks.tables import line

Row = Mapping[str, Any]
# How far off the predicted time of a step may be.
NEAR = 0.15

NOTES = """\
One process is rank 0 of a job; the other ranks are simulated: the process group is torch's fake one, whose collectives
copy the rank's own data on the device and send nothing. Memory and compute are those of a real rank, the wire is not,
and with more than one rank the numbers that are trained on are not those of a real job.

Zerograph and plain PyTorch: fp32 parameters, `torch.autocast` in bf16 around forward and loss. FSDP2: fp32 parameters,
`MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)`, loss in fp32; its gathers move bf16. All: fused
AdamW. FSDP2 and plain PyTorch are compiled block by block. **offloaded**:
`zg.Offload(optimizer="cpu")`, a bound for which is the longest of compute, link and update.

**step**: median of 10 steps in a row, by CUDA events, with nothing else on the card; **host**: the host's
milliseconds of a step, which it runs ahead by where nothing waits for the card. **planned**: the time in which the
device computes, as `zg.plan` predicts it for its `h100`, and in brackets over the measured step; the planner knows no
backends.
**MFU**: model flops (6 for each token and each weight that is multiplied, 12 * layers * width * context for each token
in attention) over what the card's maker promises dense in bf16. **peak**: the most that torch's allocator had given out
within a step, in 10^9 bytes; **predicted**: `step.inspect.memory.peak` over it; **reserved**: what the allocator held.
**kernels**, **waits**: kernels, copies and fills of a step, and calls of `cudaStreamSynchronize`, by the profiler.
**/ FSDP2**: over compiled FSDP2 on as many ranks.

**deviation**: the largest relative difference of a loss from that of plain PyTorch on the same card."""

_HEAD = (
    *("contender", "ranks", "step, ms", "fastest", "host", "/ FSDP2", "planned, ms", "MFU"),
    *("peak, GB", "/ FSDP2", "predicted", "reserved", "kernels", "waits"),
)


def page(rows: Sequence[Row]) -> str:
    """Return the whole page. Of several rows of one name the last counts."""
    about = next(row for row in reversed(rows) if row["kind"] == "about")
    sources = f"sources {about['sources']}" if about.get("sources") else "sources not recorded"
    kept = {"kind", "commit", "date", "sources"}
    facts = [f"- {name}: {value}" for name, value in about.items() if name not in kept]
    return "\n\n".join(
        [
            "# On one GPU: alone, and as rank 0 of simulated ranks",
            "Written by `make bench-gpu` and `python -m benchmarks.gpu --page FILE`.\n"
            f"Commit {about['commit']}, {about['date']}, {sources}.",
            "\n".join(facts),
            *tables(rows),
            "## What it means",
            NOTES + "\n",
        ]
    )


def tables(rows: Sequence[Row]) -> list[str]:
    """Return headings and tables: each size's steps, where their time goes, and the tests."""
    steps = {(*_key(row), row.get("changed")): row for row in rows if row["kind"] == "step"}
    parts = [
        f"Ceilings: {row['tflops']:.0f} TFLOP/s (bf16 product, 8192 cubed), {row['copy_tb']:.2f} TB/s (copy)."
        for row in rows
        if row["kind"] == "ceilings" and "tflops" in row
    ][-1:]
    predictions = planned.predicted(rows)
    for size in SIZES:
        own = [row for (of, *_), row in steps.items() if of == size]
        if not own:
            continue
        own.sort(key=lambda row: (row["ranks"], not CONTENDERS[row["contender"]].ours))
        measured = [row for row in own if "ms" in row]
        parts.append(f"## {SIZES[size]}")
        if measured:
            cells = [_cells(row, steps.get((size, RIVAL, row["ranks"], None), {}), predictions) for row in measured]
            parts.append(_table(_HEAD, cells))
        parts += [_split(measured)] if any(row.get("kernels") for row in measured) else []
        failed = [f"- {_title(row)}, {row['ranks']} ranks: {_plain(row['failed'])}" for row in own if "failed" in row]
        parts += ["\n".join(failed)] if failed else []
    return [*parts, *_within(steps.values(), predictions), *_tests(rows)]


def _within(steps: Iterable[Row], predictions: Mapping[planned.Key, Row]) -> list[str]:
    """Say how many predicted steps are near the measured ones."""
    ratios = [
        plan["ms"] / row["ms"]
        for row in steps
        if "ms" in row and CONTENDERS[row["contender"]].planned and (plan := predictions.get(planned.key_of(row)))
    ]
    near = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
    text = f"Planned steps within {NEAR:.0%} of the measured ones: {near} of {len(ratios)}, "
    return [text + f"from {min(ratios):.2f} to {max(ratios):.2f} of them."] if ratios else []


def short(row: Row) -> str:
    """Return a row as a line for the terminal."""
    if row["kind"] == "ceilings":
        return f"{row.get('tflops', 0):.0f} TFLOP/s, copies at {row.get('copy_tb', 0):.2f} TB/s"
    what = f"{row['size']}, {_title(row)}, {row['ranks']} ranks: "
    return what + (row["failed"] if "failed" in row else f"{row['ms']:.1f} ms, peak {row['peak'] / 1e9:.2f} GB")


def _key(row: Row) -> tuple[str, str, int]:
    return row["size"], row["contender"], row["ranks"]


def _title(row: Row) -> str:
    title = CONTENDERS[row["contender"]].title if row["contender"] in CONTENDERS else row["contender"]
    return title + (f" ({row['changed']})" if "changed" in row else "")


def _plain(text: str) -> str:
    """Return a message on one line that a table can hold."""
    return " ".join(text.replace("|", "/").split())[:300]


def _cells(row: Row, rival: Row, predictions: Mapping[planned.Key, Row]) -> Sequence[str]:
    plan = predictions.get(planned.key_of(row)) if CONTENDERS[row["contender"]].planned else None
    share = lambda name: f"{row[name] / rival[name]:.3f}" if rival.get(name) and row.get(name) else ""  # noqa: E731
    return (
        _title(row),
        str(row["ranks"]),
        f"{row['ms']:.1f}",
        f"{row['fastest_ms']:.1f}",
        f"{row['host_ms']:.1f}" if "host_ms" in row else "",
        share("ms"),
        f"{plan['ms']:.1f} ({plan['ms'] / row['ms']:.2f})" if plan else "",
        f"{row['mfu']:.3f}" if row.get("mfu") else "",
        _gigabytes(row.get("peak")),
        share("peak"),
        f"{row['predicted'] / row['peak']:.3f}" if row.get("predicted") else "",
        _gigabytes(row.get("reserved")),
        f"{row['kernels']:.0f}" if row.get("kernels") else "",
        f"{row['waits']:.0f}" if "waits" in row else "",
    )


def _split(rows: Sequence[Row]) -> str:
    """Return where the time of steps goes, in milliseconds, by classes of kernels."""
    cells = [
        (
            *(_title(row), str(row["ranks"])),
            *(f"{row['ms_of'][what]:.1f}" + _number(row, what) for what in CLASSES),
            f"{row['idle_ms']:.1f}",
        )
        for row in rows
        if row.get("kernels")
    ]
    head = ("ms (kernels) of a step", "ranks", *CLASSES, "idle")
    return _table(head, cells)


def _number(row: Row, what: str) -> str:
    return f" ({row['kernels_of'][what]:.0f})" if "kernels_of" in row else ""


def _tests(rows: Sequence[Row]) -> list[str]:
    tests = {row["name"]: row for row in rows if row["kind"] == "test"}
    if not tests:
        return []
    groups: dict[str, list[Row]] = {}
    for name, row in tests.items():
        groups.setdefault(name.partition("[")[0].replace("::test_", ": ").replace("_", " "), []).append(row)
    cells = [
        (group.removeprefix("test ").replace(".py", ""), *(str(_count(own, what)) for what in _OUTCOMES), _worst(own))
        for group, own in groups.items()
    ]
    failed = [f"- {row['name']}: {_plain(_reason(row))}" for row in tests.values() if row["outcome"] == "failed"]
    parts = ["## Tests on the card", _table(("test", *_OUTCOMES, "largest deviation"), cells)]
    return parts + (["\n".join(failed)] if failed else [])


_OUTCOMES = ("passed", "failed", "skipped")


def _count(rows: Sequence[Row], outcome: str) -> int:
    return sum(row["outcome"] == outcome for row in rows)


def _worst(rows: Sequence[Row]) -> str:
    values = [value for row in rows for value in _numbers(row.get("deviation"))]
    return f"{max(values):.1g}" if values else ""


def _numbers(value: Any) -> list[float]:
    """Return a test's deviations: one, or one for each of its parts."""
    return list(value.values()) if isinstance(value, Mapping) else [] if value is None else [value]


def _reason(row: Row) -> str:
    """Return the line of a test's error that names it: the last one that pytest marks."""
    lines = [text[1:].strip() for text in row["error"].splitlines() if text.startswith("E ")]
    return lines[0] if lines else row["error"]


def _gigabytes(value: float | None) -> str:
    return "" if value is None else f"{value / 1e9:.2f}"


def _table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    return "\n".join([line(head), line(["---", *["---:"] * (len(head) - 1)]), *map(line, cells)])
