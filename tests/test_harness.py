"""How a test is divided into what ``make test`` runs, and what runs with ``--long`` only."""

from __future__ import annotations

import itertools

from tests.harness import covering, in_turn, sliced


def test_a_slice_of_a_product_has_each_value_about_as_often_as_the_others() -> None:
    cases = list(itertools.product("abcd", (0, 1)))
    chosen, rest = covering(cases)
    assert sorted(one for one, _ in chosen) == list("abcd")
    assert sorted(other for _, other in chosen) == [0, 0, 1, 1]
    assert sorted(chosen + rest) == cases


def test_each_case_has_an_option_in_turn_and_every_case_is_there() -> None:
    chosen, every = in_turn(["a", ("b", 0), "c"], (1, (2, 3)))
    assert chosen == [("a", 1), ("b", 0, 2, 3), ("c", 1)]
    assert len(every) == 6
    assert set(chosen) < set(every)


def test_other_cases_are_marked_long_and_each_is_there_once() -> None:
    _, cases = sliced("name, number", [("a", 1)], [("a", 1), ("b", 2)]).args
    assert [(one.values, [mark.name for mark in one.marks]) for one in cases] == [(("a", 1), []), (("b", 2), ["long"])]
