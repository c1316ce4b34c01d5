"""Memory and time are bounded by the row and by settings, never by what a row claims."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command import run, written
from tests.tiers import examples
from tests.toy import toy_tokenizer
from tito_audit.errors import RecordError
from tito_audit.evidence.differences import CompletionSpan, completion_at
from tito_audit.evidence.gather import uncovered
from tito_audit.formats.tinker import FORMAT
from tito_audit.record.finding import Where
from tito_audit.record.rollout import Place
from tito_audit.rules._drift import is_repeated, reasoning_blocks

LOADS_ANEW = True

TOKENIZER = Path("fixtures/tokenizers/toy_bpe").resolve()


def test_images_that_claim_more_tokens_than_there_are_take_no_memory() -> None:
    image = {"type": "image", "expected_tokens": (1 << 24) - 1}
    targets = {"data": [5, 6, 7], "dtype": "int64", "shape": [3]}
    row: dict[str, Any] = {"model_input": {"chunks": [image] * 40}, "loss_fn_inputs": {"target_tokens": targets}}
    tracemalloc.start()
    try:
        with pytest.raises(RecordError, match="model_input holds 671088600 tokens"):
            FORMAT.read(row, Place("claims.jsonl", 0))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def _ranges(most: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, most), st.integers(0, most)).map(lambda both: (min(both), max(both)))


@given(st.lists(st.integers(0, 4), max_size=8), _ranges(20))
def test_the_completion_that_a_stretch_touches_is_the_first_of_all(
    sizes: list[int], place: tuple[int, int]
) -> None:
    regions, at = [], 0
    for turn, size in enumerate(sizes):
        regions.append(CompletionSpan(turn, at + turn % 2, at + turn % 2 + size + 1))
        at = regions[-1].end
    start, end = place
    stretch: Any = SimpleNamespace(start=start, end=end)
    touched = (
        region
        for region in regions
        if (start < region.end and end > region.start) or (start == end and region.start <= start < region.end)
    )
    assert completion_at(stretch, regions) == next(touched, None)


def _difference(place: tuple[int, int], turn: int, same: bool) -> Any:
    side, other = SimpleNamespace(data=b"a"), SimpleNamespace(data=b"a" if same else b"b")
    start, end = place
    return SimpleNamespace(where=Where.ROW, turn=turn, start=start, end=end, recorded=side, canonical=other)


_SEVERAL = st.lists(st.builds(_difference, _ranges(9), st.integers(0, 1), st.booleans()), max_size=7)


@given(_SEVERAL, _SEVERAL, _SEVERAL)
def test_a_difference_is_left_out_if_an_earlier_one_covers_it(
    first: list[Any], second: list[Any], third: list[Any]
) -> None:
    shown, every = list(first), list(first)
    for several in (second, third):
        shown += uncovered(several, shown)
        every += [difference for difference in several if not any(_covers(old, difference) for old in every)]
    assert [id(difference) for difference in shown] == [id(difference) for difference in every]


def _covers(old: Any, difference: Any) -> bool:
    return bool(
        difference.turn == old.turn
        and old.start <= difference.start
        and difference.end <= old.end
        and (difference.start < difference.end or old.start < difference.start < old.end or old.start == old.end)
        and (old.recorded.data != old.canonical.data or difference.recorded.data == difference.canonical.data)
    )


@given(st.lists(st.integers(0, 1), min_size=1, max_size=14), _ranges(14))
def test_a_repetition_is_found_at_any_of_its_tokens(tokens: list[int], place: tuple[int, int]) -> None:
    ids = np.array(tokens, np.int32)
    start, end = min(place[0], len(tokens)), min(place[1], len(tokens))
    evidence: Any = SimpleNamespace(sequence=lambda where, turn: ids)
    difference: Any = SimpleNamespace(where=Where.ROW, turn=None, start=start, end=end)
    size = end - start
    places = range(max(start - size, 0), start + 1)
    slow = any(tokens[at : at + size] == tokens[at + size : at + 2 * size] for at in places)
    assert is_repeated(difference, evidence) == (slow and size > 0)


def test_markers_of_reasoning_that_never_ends_are_searched_once() -> None:
    begun = time.process_time()
    assert len(list(reasoning_blocks(b"<think>a</think>" + b"<think>" * 100_000))) == 1
    assert time.process_time() - begun < 1


def _merged(several: int) -> dict[str, Any]:
    """A row of words that re-encode otherwise."""
    vocabulary = toy_tokenizer().vocabulary
    return {"token_ids": [vocabulary.ids_of_bytes(bytes([byte]))[0] for byte in b" the"] * several}


def _above_zero(several: int) -> dict[str, Any]:
    """A row of logprobs above 0, with tokens between them that have none."""
    size = 2 * several
    return {"token_ids": [262] * size, "loss_mask": [1] * size, "logprobs": [0.5, -0.25] * several}


def _outside(several: int) -> dict[str, Any]:
    """A row of ids that no vocabulary has."""
    return {"token_ids": [999_999, 262] * several}


@pytest.mark.parametrize("make", [_merged, _above_zero, _outside])
def test_a_row_with_very_many_findings_takes_little_memory(make: Callable[[int], Any], tmp_path: Path) -> None:
    several, reset = examples(5_000, 100_000), Path("/proc/self/clear_refs")
    if not os.access(reset, os.W_OK):
        pytest.skip("the peak of this process cannot be measured here")
    log = written(tmp_path / "many.jsonl", [make(several)])
    scan = ("scan", log, "-t", TOKENIZER, "--jobs", "1", "--report", f"json={tmp_path / 'found.json'}")
    for command in (("scan", written(tmp_path / "one.jsonl", [make(1)]), "-t", TOKENIZER), scan):
        reset.write_text("5")
        before = _peak()
        run(*command)
        grown = _peak() - before
    report = json.loads((tmp_path / "found.json").read_text())
    counts = report["summary"]["findings"].values()
    assert sum(count[word] for count in counts for word in ("error", "warning", "note")) >= several
    assert len(report["findings"]) < 1_000
    assert (tmp_path / "found.json").stat().st_size < 2 << 20
    assert grown < (24 << 20) + 1_800 * several, f"{grown >> 20} MB for {several:,} findings"


def _peak() -> int:
    """The most memory that this process has held since the last reset, in bytes."""
    (line,) = (text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("VmHWM:"))
    return int(line.split()[1]) << 10
