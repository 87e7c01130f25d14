"""The losses of example scripts on two ranks beside those of one process on the whole batch."""

from __future__ import annotations

import importlib
import logging
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.front_doors.door import Door, missing
from tests.integrations.frameworks import on_ranks
from tests.pool import Pool

RANKS = 2
GOAL = 1e-5


@dataclass(frozen=True)
class Script:
    """A script, and what it needs.

    Attributes:
        shown: the name of the public example.
        place: module and function.
        needs: packages.
        accumulates: it has an argument for accumulation.
    """

    shown: str
    place: str
    needs: tuple[str, ...] = ()
    accumulates: bool = True

    @property
    def name(self) -> str:
        """The name for the command line."""
        return self.place.partition(":")[2]


_TRAINER = ("transformers", "accelerate")
SCRIPTS = (
    Script("transformers `run_clm.py`, GPT-2", "trainers:run_clm", _TRAINER),
    Script("transformers `run_glue.py`, BERT", "trainers:run_glue", _TRAINER),
    Script("transformers `run_summarization.py`, T5", "trainers:run_summarization", _TRAINER),
    Script("transformers `run_image_classification.py`, ViT", "trainers:run_image_classification", _TRAINER),
    Script("transformers `run_speech_recognition_ctc.py`, Wav2Vec2", "trainers:run_speech_recognition_ctc", _TRAINER),
    Script("transformers `run_ner.py`, DistilBERT", "trainers:run_ner", _TRAINER),
    Script("TRL `sft.py`, Llama", "trl_scripts:trl_sft", (*_TRAINER, "trl")),
    Script("TRL `dpo.py`, Llama", "trl_scripts:trl_dpo", (*_TRAINER, "trl")),
    Script("PEFT LoRA, Llama", "trainers:peft_lora", (*_TRAINER, "peft")),
    Script("Lightning `BoringModel`", "lightning_scripts:boring_model", ("lightning",)),
    Script("Lightning image classifier", "lightning_scripts:image_classifier", ("lightning",)),
    Script("Accelerate `nlp_example.py`, BERT", "accelerate_scripts:nlp_example", _TRAINER),
    Script("PyTorch `imagenet/main.py`, ResNet", "plain_scripts:imagenet", accumulates=False),
    Script("nanoGPT `train.py`", "plain_scripts:nanogpt"),
)
# Accumulation, and the stages with it.
CASES = ((1, (2, 3)), (2, (2,)), (4, (3,)))


def compare(scripts: Sequence[Script], steps: int, quick: bool) -> list[list[str]]:
    """Return a row of cells for each script: its losses, and the largest difference of each case."""
    pool = Pool(hash_apart=False, patience=1200.0)
    try:
        return [_row(pool, script, steps, quick) for script in scripts]
    finally:
        pool.close()


def header(quick: bool) -> list[str]:
    """Return the names of the columns."""
    return ["script", "first and last loss", *(_shown(count, stage) for count, stage in _cases(quick))]


def _cases(quick: bool) -> list[tuple[int, int]]:
    return [(count, stage) for count, stages in CASES[: 1 if quick else None] for stage in stages[-1 if quick else 0 :]]


def _shown(accumulation: int, stage: int) -> str:
    return f"stage {stage}" + (f", accumulation {accumulation}" if accumulation > 1 else "")


def differences(pool: Pool, script: Script, accumulation: int, stage: int, steps: int) -> tuple[list[float], float]:
    """Return the losses in one process, and the largest difference of those on the ranks.

    Raises:
        AssertionError: a rank failed, or the script has another number of losses.
    """
    expected = _run(script.place, None, 1, accumulation, steps)
    ranks = pool.run(RANKS, _run, script.place, stage, RANKS, accumulation, steps)
    lengths = {len(losses) for losses in (expected, *ranks)}
    if len(lengths) > 1 or len(expected) < steps:
        raise AssertionError(f"{script.name} has {lengths} losses of {steps} steps")
    return expected, max(abs(a - b) for losses in ranks for a, b in zip(losses, expected, strict=True))


def _row(pool: Pool, script: Script, steps: int, quick: bool) -> list[str]:
    if absent := missing(script.needs):
        return [script.shown, f"not run: {', '.join(absent)} not installed"]
    shown, cells, began = "", list[str](), time.perf_counter()
    for accumulation, stage in _cases(quick):
        if accumulation > 1 and not script.accumulates:
            cells.append("")
            continue
        try:
            losses, difference = differences(pool, script, accumulation, stage, steps)
        except AssertionError as error:
            print(str(error).rstrip().splitlines()[-1], flush=True)
            cells.append("failed")
            continue
        shown = shown or f"{losses[0]:.4f}, {losses[steps - 1]:.4f}"
        cells.append(f"{difference:.1e}")
    print(f"{script.name}: {' | '.join(cells)}  ({time.perf_counter() - began:.0f} s)", flush=True)
    return [script.shown, shown, *cells]


def _run(place: str, stage: int | None, ranks: int, accumulation: int, steps: int) -> list[float]:
    """Run a script on this rank; return the losses of all steps, and what it evaluates."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    module, _, name = place.partition(":")
    script = getattr(importlib.import_module(f"benchmarks.front_doors.{module}"), name)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        losses: list[float] = on_ranks(script, Door(Path(folder), stage, ranks, accumulation, steps))
    return losses
