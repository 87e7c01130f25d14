"""Write the tables of docs/options.md from zerograph/config.py: each option's place, values, default and purpose.

python docs/options_table.py
"""

from __future__ import annotations

import re
from dataclasses import Field
from pathlib import Path
from typing import Any

from zerograph.config import OPTIONS, place

PAGE = Path(__file__).with_name("options.md")
BEGIN, END = "<!-- written by docs/options_table.py -->\n", "<!-- end of what it writes -->\n"

# Title of a table, its pages, and its options.
GROUPS: tuple[tuple[str, str, str], ...] = (
    (
        "What is sharded, and where",
        "[stages](stages.md), [meshes](meshes.md)",
        "stage shard_by shard_min_size bucket_size shard_dims placement input_sbp",
    ),
    (
        "Sequences and experts",
        "[long sequences](long-sequences.md), [expert parallelism](meshes.md#expert-parallelism)",
        "context_parallel context_parallel_method expert_parallel expert_capacity",
    ),
    (
        "Memory",
        "[does it fit](mixed-precision-and-offload.md#does-it-fit), "
        "[recompute](mixed-precision-and-offload.md#recompute), [offload](mixed-precision-and-offload.md#offload), "
        "[state in eight bits](optimizers.md#state-in-eight-bits)",
        "memory_budget activation_checkpointing offload optimizer_state keep_freed_memory",
    ),
    (
        "Numbers",
        "[mixed precision](mixed-precision-and-offload.md#mixed-precision), [wire formats](wire-formats.md), "
        "[optimizers](optimizers.md), [any model](any-model.md)",
        "amp_dtype reduce_dtype grad_scaler wire clip_grad_norm batch_norm seed",
    ),
    (
        "Batches",
        "[accumulation](mixed-precision-and-offload.md#accumulation), [any batch](any-batch.md), "
        "[the same bits on any number of ranks](numbers.md#the-same-bits-on-any-number-of-ranks)",
        "gradient_accumulation_steps accumulation_outputs dynamic_shapes virtual_ranks",
    ),
    (
        "Compilation",
        "[backends](#backends), [writing a rule](writing-a-rule.md), [writing a pass](writing-a-pass.md)",
        "backend on_missing_rule passes",
    ),
    ("Faults", "[when something goes wrong](faults.md)", "on_nonfinite check_replicas timeout"),
)


def tables() -> str:
    """Return the tables as Markdown."""
    parts = []
    for title, pages, names in GROUPS:
        rows = "".join(_row(OPTIONS[name]) for name in names.split())
        parts.append(f"## {title}\n\nSee {pages}.\n\n| option | values | default | |\n|---|---|---|---|\n{rows}")
    return "\n".join(parts)


def _row(option: Field[Any]) -> str:
    advice = option.metadata["check"].advice.rpartition("; ")[2]
    values = re.sub(r"^(choose|give) ", "", advice) or _code(str(option.type))
    values = values.replace("or give ", "or ")
    if option.default is None and "None" not in values:
        values += ", or None"
    # "auto" and the like as code; the bar of a type would end the cell.
    values = re.sub(r"'[\w.]+'", lambda name: _code(name[0].replace("'", '"')), values).replace("|", "\\|")
    default = repr(option.default).replace("'", '"')
    return f"| `{place(option.name)}` | {values} | {_code(default)} | {_purpose(option.metadata['documentation'])} |\n"


def _purpose(documentation: str) -> str:
    """Return the first sentence, in Markdown."""
    text = " ".join(documentation.split())
    first = re.split(r"(?<=[\w)`\"])\. (?=[A-Z`])", text)[0].rstrip(".")
    first = re.sub(r":meth:`(\w+)`", r"`config.\1()`", re.sub(r"; see :.*", "", first))
    first = re.sub(r":\w+:`~?(?:zerograph\.)?([^`]*)`", r"`\1`", first).replace("``", "`")
    return first.replace("|", "\\|") + "."


def _code(text: str) -> str:
    return f"`{text}`"


def page(text: str) -> str:
    """Return the page with its tables as they are now."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n" + tables() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
