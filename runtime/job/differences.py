"""Describe ranks that differ: the first fact in which they do, and what to do."""

from __future__ import annotations

from zerograph.runtime.job.reports import name_ranks

# Ends the key of a text that is shown with a fact of the same key, and may differ.
SHOWN_WITH = " is shown with"
DOING = "what they are about to do"
HYPERPARAMETERS = "hyperparameters"
BROKE_OFF = "where the step before broke off"
READING = "reading the values of a global tensor"
# By the fact that differs, or by what the ranks were about to do.
_ADVICE = {
    BROKE_OFF: "What they were exchanging there is lost: start the job again, from the last checkpoint.",
    READING: "Every rank must read what ranks have parts of, in the same order: read before 'if rank == 0', and print "
    "inside of it. A set of texts has an order of its own in each process.",
    DOING: "Every rank must make the same calls in the same order: steps, reading parameters, full_parameters(), "
    "state_dict(), save() and load() belong under no 'if rank == 0'.",
    "the batch": "Every rank must read the same whole batches, of which it keeps its part. A loader that is split "
    "between ranks already stays out of zg.prepare(): its tensors are this rank's rows.",
    "a gradient that was computed without global tensors": "Pass the loop's loader to zg.prepare(), or this rank's "
    "rows as zg.global_tensor(part, zg.sbp.split(0)): methods and submodules compute with plain tensors as they are.",
    "the emitted graph": "All ranks must run the same step. Code that goes through a set of texts does so in another "
    "order in each process: let it go through a list, or set PYTHONHASHSEED=0 for all ranks.",
    HYPERPARAMETERS: "Set hyperparameters, and step schedulers, alike on all ranks: by values of the whole batch.",
    "the end of full_parameters()": "No change was kept. Every rank must make the same changes, or one rank: "
    "full_parameters(..., modifier_rank=0).",
    "loading a state": "Nothing was loaded. All ranks must load the same values.",
    "saving a checkpoint": "All ranks must save into the same folder, with the same arguments.",
    "loading a checkpoint": "All ranks must load the same checkpoint, from a folder that they share.",
}


def first_difference(facts: list[dict[str, str]], doing: str) -> str:
    """Return a message that names the first fact in which ranks differ.

    Args:
        facts: of each rank, by name and in order.
        doing: what the ranks were about to do.
    """
    positions: dict[str, int] = {}
    for rank_facts in facts:
        for index, key in enumerate(rank_facts):
            if not key.endswith(SHOWN_WITH):
                positions[key] = min(index, positions.get(key, index))
    # At one position, facts that a rank lacks come first: other differences follow from that.
    for key in sorted(positions, key=lambda key: (positions[key], all(key in rank_facts for rank_facts in facts))):
        values = [rank_facts.get(key, "nothing") for rank_facts in facts]
        if len(set(values)) > 1:
            shown: dict[str, list[int]] = {}
            for rank, (value, rank_facts) in enumerate(zip(values, facts, strict=True)):
                shown.setdefault(value + rank_facts.get(key + SHOWN_WITH, ""), []).append(rank)
            lines = "\n".join(f"  {name_ranks(ranks)}: {value}" for value, ranks in shown.items())
            advice = _ADVICE.get(READING if READING in values else key.partition(":")[0])
            advice = advice or _ADVICE.get(doing, "All ranks must run the same step.")
            return f"ranks differ before {doing}, first in {key}:\n{lines}\n{advice}"
    return f"ranks differ before {doing}, in something that has no name. All ranks must run the same step."
