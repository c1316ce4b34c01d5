"""Common prefixes and equal runs against plain loops."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tito_audit.align.runs import Gap, Run, equal_runs, gaps, nearest_run, paired_runs
from tito_audit.record.prefix import common_byte_prefix, common_ends, common_prefix, starts_with

some = settings(max_examples=100, deadline=None, derandomize=True)
TYPES = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
EDGES = (0, 1, 63, 64, 65, 319, 320, 321, 87_359, 87_360, 87_361)
"""Sizes around the ends of the blocks that are compared at once."""


def loop(a: Any, b: Any) -> int:
    """How many entries two sequences start with in common."""
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count


def ids(values: list[int], kind: Any = np.int32) -> NDArray[Any]:
    return np.array(values, kind)


few_ids = st.lists(st.integers(0, 3), max_size=90)


@some
@given(few_ids, few_ids, st.sampled_from(TYPES), st.sampled_from(TYPES))
def test_the_common_prefix_is_that_of_a_loop(a: list[int], b: list[int], kind: Any, other: Any) -> None:
    for left, right in ((a, b), (a, a + b), (a + b, a), (a + b, a + b[::-1])):
        first, second = ids(left, kind), ids(right, other)
        assert common_prefix(first, second) == loop(left, right)
        assert starts_with(first, second) is (left[: len(right)] == right)


@pytest.mark.parametrize("at", EDGES)
def test_sequences_that_part_around_the_end_of_a_block(at: int) -> None:
    a = np.arange(EDGES[-1] + 9, dtype=np.int32)
    b = a.copy()
    b[at:] += 1
    assert common_prefix(a, b) == at
    assert common_prefix(a[:at], a) == common_prefix(a, a[:at]) == at
    b[at + 1 :] = a[at + 1 :]
    assert common_prefix(a, b) == at, "one other token"


def test_numbers_of_two_types_that_share_their_bits_differ() -> None:
    assert common_prefix(ids([-1], np.int64), ids([2**64 - 1], np.uint64)) == 0
    assert common_prefix(ids([-1], np.int8), ids([255], np.uint8)) == 0
    assert common_prefix(ids([2**31], np.uint32), ids([-(2**31)], np.int32)) == 0


class Counting(np.ndarray[Any, Any]):
    """An array that counts the entries it is asked for."""

    looked_at = 0

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        if isinstance(key, slice):
            Counting.looked_at += len(part)
        return part


@pytest.mark.parametrize(("at", "most"), [(0, 64), (50_000, 5 * 50_000), (1_000_000, 1_000_000)])
def test_no_more_is_compared_than_a_few_times_what_is_shared(at: int, most: int) -> None:
    a = np.zeros(1_000_000, np.int32)
    b = a.copy()
    b[at:] = 1
    Counting.looked_at = 0
    assert common_prefix(a.view(Counting), b) == at
    assert Counting.looked_at <= most


@some
@given(few_ids, few_ids, few_ids)
def test_common_ends_are_those_of_loops_and_never_overlap(a: list[int], b: list[int], shared: list[int]) -> None:
    for left, right in ((a, b), (a + shared, b + shared), (shared + a + shared, shared + b + shared)):
        head, tail = common_ends(ids(left), ids(right))
        assert head == loop(left, right)
        assert tail == loop(left[head:][::-1], right[head:][::-1])
        assert head + tail <= min(len(left), len(right))


@some
@given(st.binary(max_size=9), st.binary(max_size=9))
def test_the_common_prefix_of_bytes_is_that_of_a_loop(a: bytes, b: bytes) -> None:
    for left, right in ((a, b), (a, a + b), (a + b, a), (a * 40, a * 40 + b)):
        assert common_byte_prefix(left, right) == loop(left, right)


def check_runs(runs: list[Run], a: list[int], b: list[int]) -> None:
    """Runs are equal, rise on both sides, and what the gaps leave out is all of both."""
    between = list(gaps(runs, len(a), len(b)))
    parts = sorted(
        [(r.start, r.other, r.start + r.size, r.other + r.size) for r in runs]
        + [(g.start, g.other, g.end, g.other_end) for g in between]
    )
    at = other_at = 0
    for start, other, end, other_end in parts:
        assert (start, other) == (at, other_at)
        assert end >= start
        assert other_end >= other
        at, other_at = end, other_end
    assert (at, other_at) == (len(a), len(b))
    assert all(a[r.start : r.start + r.size] == b[r.other : r.other + r.size] and r.size for r in runs)
    assert all(g.start < g.end or g.other < g.other_end for g in between)


@some
@given(few_ids, few_ids, st.sampled_from((None, 0, 200)))
def test_equal_runs_and_their_gaps_are_those_of_difflib(a: list[int], b: list[int], frequent: int | None) -> None:
    for left, right in ((a, b), (a * 5, b * 5)):
        matcher = SequenceMatcher(None, left, right, autojunk=frequent is not None)
        runs = equal_runs(ids(left), ids(right), frequent_from=frequent)
        assert [tuple(run) for run in runs] == [tuple(run) for run in matcher.get_matching_blocks()[:-1]]
        wanted = [tuple(rest) for tag, *rest in matcher.get_opcodes() if tag != "equal"]
        assert [tuple(gap) for gap in gaps(runs, len(left), len(right))] == wanted
        check_runs(runs, left, right)


@some
@given(few_ids, few_ids, few_ids, st.sampled_from((None, 0, 3, 40)))
def test_paired_runs_begin_and_end_with_what_both_share(
    a: list[int], b: list[int], shared: list[int], longest: int | None
) -> None:
    left, right = shared + a + shared, shared + b + shared
    runs = list(paired_runs(ids(left), ids(right), longest=longest))
    check_runs(runs, left, right)
    head, tail = common_ends(ids(left), ids(right))
    inside, other = left[head : len(left) - tail], right[head : len(right) - tail]
    wanted = [Run(0, 0, head)] * (head > 0)
    if longest is None or max(len(inside), len(other)) <= longest:
        wanted += [Run(head + i, head + j, size) for i, j, size in equal_runs(ids(inside), ids(other))]
    wanted += [Run(len(left) - tail, len(right) - tail, tail)] * (tail > 0)
    assert runs == wanted


def test_gaps_of_nothing_are_all_that_there_is() -> None:
    assert list(gaps([], 2, 3)) == [Gap(0, 2, 0, 3)]
    assert list(gaps([], 0, 0)) == []


@some
@given(few_ids, few_ids, st.lists(st.integers(4, 9), min_size=3, max_size=3))
def test_the_nearest_run_is_the_one_that_a_search_of_all_pairs_finds(
    a: list[int], b: list[int], run: list[int]
) -> None:
    for left, right in ((a, b), (a + run, b + run), ([8, 7, *a], [*b, 9])):
        places = [
            (i + j, i, j)
            for i in range(len(left) - 2)
            for j in range(len(right) - 2)
            if left[i : i + 3] == right[j : j + 3]
        ]
        nearest = nearest_run(ids(left), ids(right), 3)
        assert (nearest is None) is (not places)
        if nearest is not None:
            assert left[nearest.start : nearest.start + 3] == right[nearest.other : nearest.other + 3]
            assert nearest.size == 3
            assert (nearest.start + nearest.other, nearest.start, nearest.other) in places


def test_the_nearest_run_is_the_first_of_both_where_none_comes_twice() -> None:
    a, b = ids([1, 2, 3, 9, 9, 4, 5, 6]), ids([4, 5, 6, 8, 1, 2, 3, 7])
    assert nearest_run(a, b, 3) == Run(0, 4, 3)
    assert nearest_run(b, a, 3) == Run(4, 0, 3)
