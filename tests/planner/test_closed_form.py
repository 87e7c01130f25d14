"""The closed form is that of the ZeRO paper (arXiv 1910.02054): every cell of Table 1, and Figure 1."""

from __future__ import annotations

import pytest

import zerograph as zg
from zerograph.planner.closed_form import model_states

RANKS = (1, 4, 16, 64, 256, 1024)

# GB on each rank, by parameters and stage, as the paper prints them.
TABLE_1 = {
    (7.5e9, 1): "120 52.5 35.6 31.4 30.4 30.1",
    (7.5e9, 2): "120 41.3 21.6 16.6 15.4 15.1",
    (7.5e9, 3): "120 30 7.5 1.88 0.47 0.12",
    (128e9, 1): "2048 896 608 536 518 513",
    (128e9, 2): "2048 704 368 284 263 257",
    (128e9, 3): "2048 512 128 32 8 2",
    (1e12, 1): "16000 7000 4750 4187 4046 4011",
    (1e12, 2): "16000 5500 2875 2218 2054 2013",
    (1e12, 3): "16000 4000 1000 250 62.5 15.6",
}


@pytest.mark.parametrize(("parameters", "stage"), TABLE_1)
def test_table_1(parameters: float, stage: int) -> None:
    cells = TABLE_1[parameters, stage].split()
    found = [model_states(parameters, ranks, stage).total / 1e9 for ranks in RANKS]
    # The paper cuts off digits here and rounds there: half a unit of the last digit, or a whole one.
    for cell, value in zip(cells, found, strict=True):
        digits = len(cell.partition(".")[2])
        assert abs(value - float(cell)) < 10.0**-digits


def test_figure_1() -> None:
    found = [model_states(7.5e9, 64, stage).total / 1e9 for stage in (0, 1, 2, 3)]
    assert [f"{value:.1f}" for value in found] == ["120.0", "31.4", "16.6", "1.9"]


def test_fp32_has_no_masters() -> None:
    found = model_states(1e9, 4, 1, "fp32")
    assert (found.parameters, found.gradients, found.optimizer_state) == (4e9, 4e9, 2e9)


@pytest.mark.parametrize("arguments", [(7.5e9, 64, 4), (7.5e9, 0, 1), (0, 64, 1), (7.5e9, 64, 1, "int8")])
def test_what_has_no_closed_form(arguments: tuple[object, ...]) -> None:
    with pytest.raises(zg.ConfigError):
        model_states(*arguments)  # type: ignore[arg-type]
