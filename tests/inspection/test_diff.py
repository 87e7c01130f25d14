"""Diffs of texts: whatever the texts, they say what leads from one to the other."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, strategies as st

from zerograph.inspection import compare

LINES = st.lists(st.sampled_from("abcdefgh"), max_size=12)


@given(LINES, LINES)
def test_both_texts_can_be_read_off_a_diff(before: list[str], after: list[str]) -> None:
    found = compare(before, after, ("before", "after"))
    assert [one.text for one in found.changes if one.kind != "+"] == before
    assert [one.text for one in found.changes if one.kind != "-"] == after
    assert bool(found) == (before != after)


@given(LINES, LINES)
def test_a_moved_line_says_where_it_stands_on_the_other_side(before: list[str], after: list[str]) -> None:
    for one in compare(before, after, ("before", "after")).changes:
        if one.moved is not None and one.kind == "-":
            assert after[one.old - 1 + one.moved] == one.text
        elif one.moved is not None:
            assert before[one.new - 1 - one.moved] == one.text


def test_one_line_that_moved_is_one_line_that_moved() -> None:
    before = [str(number) for number in range(20)]
    found = compare(before, [*before[1:15], "0", *before[15:]], ("before", "after"))
    assert (found.removed, found.added, found.moved) == (0, 0, 1)
    assert "-0  [moves to line 15]" in found.text.splitlines()
    assert "+0  [moved from line 1]" in found.text.splitlines()


def test_hunks_are_those_of_a_unified_diff() -> None:
    before = [str(number) for number in range(20)]
    found = compare(before, [*before[:9], "new", *before[10:]], ("before", "after"))
    assert found.text.splitlines() == [
        "--- before",
        "+++ after",
        "# 1 removed, 1 added",
        "@@ -7,7 +7,7 @@",
        *(" 6", " 7", " 8", "-9", "+new", " 10", " 11", " 12"),
    ]


class Terminal:
    """Standard output that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return None


def test_only_a_terminal_that_wants_them_gets_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare(["a"], ["b"], ("before", "after"))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert str(found) == found.text
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert "\x1b[31m-a\x1b[0m" in str(found)
    assert "\x1b" not in found.text
    monkeypatch.setenv("NO_COLOR", "1")
    assert str(found) == found.text


GRAPH = """
input  input0  f32 B (4)
       a:exp = exp(input0)  f32 B (4)  # forward t.py:1
       a:mul = mul(exp, exp)  f32 B (4)  # forward t.py:2
       a:add_1 = add(mul, input0)  f32 B (4)  # forward t.py:3
       return output0: add_1 B
""".strip().splitlines()


def test_a_node_that_only_has_another_number_is_no_difference() -> None:
    after = [line.replace("mul", "mul_7").replace("= mul_7(", "= mul(").replace("add_1", "add_3") for line in GRAPH]
    assert not compare(GRAPH, after, ("before", "after"))


def test_a_node_more_is_the_only_difference_though_it_renumbers_those_after_it() -> None:
    more = "       a:exp = exp(exp_1)  f32 B (4)  # forward t.py:1"
    after = [
        GRAPH[0],
        GRAPH[1].replace(":exp", ":exp_1"),
        more,
        *(line.replace("(exp, exp)", "(exp_1, exp_1)") for line in GRAPH[2:]),
    ]
    found = compare(GRAPH, after, ("before", "after"))
    assert [one.text for one in found.changes if one.kind != " "] == [more]


def test_a_node_that_reads_another_node_is_a_difference() -> None:
    both = [*GRAPH[:2], "       a:exp_1 = exp(input0)  f32 B (4)  # forward t.py:1", *GRAPH[2:]]
    after = [line.replace("mul(exp, exp)", "mul(exp, exp_1)") for line in both]
    found = compare(both, after, ("before", "after"))
    assert [one.text for one in found.changes if one.kind == "+"] == [after[3]]
    assert (found.removed, found.added) == (1, 1)
