"""docs/troubleshooting.md has a section for every error class, and shows messages as they are raised."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest
import torch

import zerograph as zg
from tests.docs.pages import ROOT, blocks
from tests.harness import LossStep, mean_of_squares
from tests.pool import Pool
from zerograph import errors

PAGE = ROOT / "docs" / "troubleshooting.md"
CLASSES = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, RuntimeError)]


class Step(LossStep):
    def __init__(self, model: torch.nn.Module | None = None) -> None:
        torch.manual_seed(0)
        model = model or torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        super().__init__(model, torch.optim.AdamW(model.parameters(), lr=0.01), 2, mean_of_squares)


class Branch(Step):
    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        if loss.item() > 3:
            loss = loss * 2
        loss.backward()
        return loss


def set_stage() -> None:
    Step().config.zero.stage = 4


def read_option() -> None:
    _ = Step().config.bucket_sise


def read_value() -> None:
    Branch()(torch.randn(16, 8))


def load_missing() -> None:
    Step().load("runs/gpt")


def load_missing_step() -> None:
    Step().load_compiled("old.zg")


def pass_object() -> None:
    Step()([torch.randn(16, 8), object()])


def place_on_two() -> None:
    zg.placement("cpu", ranks=[0, 1])


def offload_to_missing() -> None:
    step = Step()
    step.config.memory.offload = zg.Offload(optimizer=zg.OffloadTo("nvme", "/missing"))
    step(torch.randn(16, 8))


def use_split() -> None:
    step = Step()
    step(torch.randn(16, 8))
    step.model(torch.randn(16, 8))


def look_up_missing() -> None:
    Step(torch.nn.Embedding(10, 4))(torch.full((4, 3), 10))


# What a single rank can show; the others are shown by tests/faults.
RAISING: dict[str, Callable[[], None]] = {
    "ConfigError": set_stage,
    "UnknownOptionError": read_option,
    "CaptureError": read_value,
    "CheckpointError": load_missing,
    "InputError": pass_object,
    "PlacementError": place_on_two,
    "OffloadError": offload_to_missing,
    "SplitParameterError": use_split,
    "OperatorError": look_up_missing,
    "ArtifactError": load_missing_step,
}


def first_line(message: str) -> str:
    """First line of a message, without the address of an object."""
    return re.sub(r"0x[0-9a-f]+", "0x", message.splitlines()[0])


def raised() -> dict[str, tuple[str, str]]:
    """The class and the message that each raises, in a job of one rank."""
    shown = {}
    for name, function in RAISING.items():
        try:
            function()
        except zg.ZeroGraphError as error:
            shown[name] = type(error).__name__, first_line(str(error))
    return shown


def test_every_error_class_has_a_section_in_order() -> None:
    assert re.findall(r"^## (\w+)$", PAGE.read_text(), re.MULTILINE) == CLASSES


@pytest.mark.parametrize("name", CLASSES[1:])
def test_a_section_says_what_it_means_why_and_what_to_do(name: str) -> None:
    section = PAGE.read_text().split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert all(word in section for word in ("**Means:**", "**Common causes:**", "**Do:**", "```text\n"))


def test_messages_are_shown_as_they_are_raised(pool: Pool) -> None:
    shown = {block.section: first_line(block.text) for block in blocks(PAGE)}
    assert pool.run(1, raised)[0] == {name: (name, shown[name]) for name in RAISING}
