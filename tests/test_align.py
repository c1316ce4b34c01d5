"""Alignment against slow loops and against what its docstrings promise."""

from __future__ import annotations

import time
from collections.abc import Iterable
from difflib import SequenceMatcher
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests import toy
from tests.tiers import examples
from tito_audit.align.alignment import (
    Pair,
    _count_to_last_common_end,
    add_by_byte_ends,
    align,
    align_pair,
    diff_opcodes,
)
from tito_audit.align.blocks import BlockKind, Blocks, BlocksBuilder
from tito_audit.align.pieces import Pieces
from tito_audit.evidence.reference import Reference
from tito_audit.tokens.load import load_tokenizer

SAME, MERGE, SPLIT, RESPLIT = BlockKind.SAME, BlockKind.MERGE, BlockKind.SPLIT, BlockKind.RESPLIT
DRIFT, EXTRA, MISSING = BlockKind.DRIFT, BlockKind.EXTRA, BlockKind.MISSING
CONTROL = b"<c>"
SWAPPED = {MERGE: SPLIT, SPLIT: MERGE, EXTRA: MISSING, MISSING: EXTRA}
few = settings(max_examples=examples(25, 60), deadline=None, derandomize=True)

Row = tuple[BlockKind, int, int, int, int]


@cache
def id_of(token: bytes, other: bool) -> int:
    """An id for a spelling; `other` gives a second id that spells the same."""
    return int.from_bytes(token, "big") * 2 + other if token else 1 + other


def pieces(tokens: list[bytes], others: list[bool] | None = None) -> Pieces:
    """Tokens written as bytes; the control token is CONTROL whole."""
    others = others or [False] * len(tokens)
    ids = [id_of(token, other) % (2**31 - 1) for token, other in zip(tokens, others, strict=True)]
    control = [token == CONTROL and not other for token, other in zip(tokens, others, strict=True)]
    return Pieces(
        np.array(ids, np.int32),
        np.cumsum([len(token) for token in tokens], dtype=np.int64),
        b"".join(tokens),
        np.array(control, np.bool_),
    )


def rows(blocks: Blocks) -> list[Row]:
    """Every block with both its ranges."""
    r, c = blocks.lengths()
    return [
        (BlockKind(int(kind)), int(re - dr), int(re), int(ce - dc), int(ce))
        for kind, re, ce, dr, dc in zip(blocks.kind, blocks.recorded_end, blocks.canonical_end, r, c, strict=True)
    ]


def blocks_up_to(ends: Iterable[tuple[int, int]], a: Pieces, b: Pieces) -> list[Row]:
    """The blocks that end where both sides have had so many tokens, kind by kind."""
    out: list[Row] = []
    i = j = 0
    for m, n in ends:
        if a.ids[i:m].tolist() == b.ids[j:n].tolist():
            kind = SAME
        else:
            kind = {(False, True): MERGE, (True, False): SPLIT}.get((m - i == 1, n - j == 1), RESPLIT)
        if kind is SAME and out and out[-1][0] is SAME:
            out[-1] = (SAME, out[-1][1], m, out[-1][3], n)
        else:
            out.append((kind, i, m, j, n))
        i, j = m, n
    return out


def slow_cuts(a: Pieces, b: Pieces) -> list[Row]:
    """The blocks by walking over every byte of the string."""
    common = (byte for byte in range(1, len(a.data) + 1) if byte in a.end and byte in b.end)
    return blocks_up_to(((sum(a.end <= byte), sum(b.end <= byte)) for byte in common), a, b)


def plain_cuts(a: Pieces, b: Pieces) -> list[Row]:
    """The blocks by the sets of ends, for long sequences."""
    common = np.intersect1d(a.end, b.end)
    common = common[common > 0]
    ends = (np.searchsorted(side.end, common, side="right").tolist() for side in (a, b))
    return blocks_up_to(zip(*ends, strict=True), a, b)


def plain_cut(a: Pieces, b: Pieces, length: int) -> tuple[int, int]:
    """Tokens of both sides up to the last common cut, by the set of cuts."""
    common = set(a.end.tolist()) & set(b.end.tolist()) & set(range(length + 1))
    last = max(common, default=-1)
    return sum(end <= last for end in a.end), sum(end <= last for end in b.end)


def check_partition(blocks: Blocks, a: Pieces, b: Pieces) -> None:
    i = j = 0
    for kind, start, end, c_start, c_end in rows(blocks):
        assert (start, c_start) == (i, j)
        i, j = end, c_end
        if kind is SAME:
            assert a.ids[start:end].tolist() == b.ids[c_start:c_end].tolist()
        elif kind in (MERGE, SPLIT, RESPLIT):
            assert a.bytes_of(start, end) == b.bytes_of(c_start, c_end)
        elif kind is DRIFT:
            assert a.bytes_of(start, end) != b.bytes_of(c_start, c_end)
    assert (i, j) == (len(a), len(b))
    ours, theirs = blocks.matched_positions()
    wanted = [(p, q) for k, s, e, t, u in rows(blocks) if k is SAME for p, q in zip(range(s, e), range(t, u))]  # noqa: B905
    assert list(zip(ours.tolist(), theirs.tolist(), strict=True)) == wanted
    assert [row for row in rows(blocks) if row[0] is not SAME] == blocks.differing_blocks()
    kinds = [row[0] for row in rows(blocks)]
    assert (SAME, SAME) not in list(pairwise(kinds))


@st.composite
def cutting(draw: st.DrawFn, data: bytes) -> Pieces:
    """One way of cutting a string, with tokens of no bytes and second ids now and then."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    edges = [0, *cuts, len(data)]
    tokens = [data[a:b] for a, b in pairwise(edges)]
    tokens = [token for token in tokens if token or draw(st.booleans())]
    return pieces(tokens, draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens))))


@st.composite
def two_cuttings(draw: st.DrawFn) -> tuple[Pieces, Pieces]:
    data = draw(st.binary(max_size=12))
    return draw(cutting(data)), draw(cutting(data))


def align_cuts(recorded: Pieces, canonical: Pieces) -> Blocks:
    out = BlocksBuilder()
    add_by_byte_ends(out, recorded, canonical)
    return out.build()


WORDS = st.sampled_from([CONTROL, CONTROL, b"a", b"b", b"ab", b"ba", b"abab", b"", b" ", b"<", b"c", b">", b"<c"])
TOKENS = st.lists(WORDS, max_size=14)
PLAIN = st.lists(st.sampled_from([b"a", b"b", b"ab", b"ba", b" "]), min_size=1, max_size=5)

SHORT = st.lists(st.sampled_from([b"a", b"b", b"c", b"ab", b"ba", b"ca", b"abc"]), max_size=4)


@few
@given(two_cuttings())
def test_two_cuttings_of_one_string_pair_as_a_walk_over_its_bytes_pairs_them(pair: tuple[Pieces, Pieces]) -> None:
    a, b = pair
    blocks = align_cuts(a, b)
    check_partition(blocks, a, b)
    if a.data:
        assert rows(blocks) == slow_cuts(a, b)


@st.composite
def long_cuttings(draw: st.DrawFn) -> tuple[Pieces, Pieces]:
    """A long sequence and the same with some tokens cut, merged, spelled by other ids or put beside empty ones."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens = [bytes(rng.integers(97, 100, n).tolist()) for n in rng.integers(0, 5, int(rng.integers(1, 600)))]
    others = (rng.random(len(tokens)) < 0.01).tolist()
    rarely, changed = draw(st.sampled_from([1, 10, 100])), list[tuple[bytes, bool]]()
    for token, other in zip(tokens, others, strict=True):
        what = rng.random() * rarely
        if what < 0.1:
            at = int(rng.integers(0, len(token) + 1))
            changed += [(token[:at], False), (token[at:], False)]
        elif what < 0.2 and changed:
            changed[-1] = (changed[-1][0] + token, False)
        elif what < 0.25:
            changed.append((token, not other))
        else:
            changed.append((token, other))
    b = pieces([token for token, _ in changed], [other for _, other in changed])
    return pieces(tokens, others), b


@few
@given(long_cuttings())
def test_two_long_sequences_of_the_same_bytes_pair_as_the_sets_of_their_ends_do(
    pair: tuple[Pieces, Pieces],
) -> None:
    a, b = pair
    if a.data:
        for left, right in ((a, b), (b, a), (a, a)):
            blocks = align_cuts(left, right)
            check_partition(blocks, left, right)
            assert rows(blocks) == plain_cuts(left, right)


@few
@given(TOKENS, TOKENS, st.integers(0, 30))
def test_the_last_common_cut_is_that_of_the_sets_of_cuts(left: list[bytes], right: list[bytes], n: int) -> None:
    a, b = pieces(left), pieces(right)
    length = min(n, len(a.data), len(b.data))
    assert _count_to_last_common_end(a.end, b.end, length) == plain_cut(a, b, length)


@few
@given(TOKENS, st.integers(0, 14), st.integers(0, 14), st.sampled_from([1, 4000]))
def test_the_text_around_a_range_reaches_to_the_nearest_control_tokens(
    tokens: list[bytes], first: int, second: int, limit: int
) -> None:
    whole = pieces(tokens)
    start, end = sorted((min(first, len(tokens)), min(second, len(tokens))))
    before = [i for i in range(start) if whole.control[i]]
    after = [i for i in range(end, len(tokens)) if whole.control[i]]
    left = b"".join(tokens[before[-1] if before else 0 : start])
    right = b"".join(tokens[end : after[0] + 1 if after else len(tokens)])
    assert (whole.bytes_before(start, limit), whole.bytes_after(end, limit)) == (left[-limit:], right[:limit])


@few
@given(two_cuttings())
def test_swapping_the_sides_swaps_merge_with_split_and_extra_with_missing(pair: tuple[Pieces, Pieces]) -> None:
    forth, back = rows(align_cuts(*pair)), rows(align_cuts(pair[1], pair[0]))
    assert back == [(SWAPPED.get(kind, kind), c, d, a, b) for kind, a, b, c, d in forth]


def test_a_token_of_no_bytes_joins_the_block_before_it_and_the_first_one_the_block_after() -> None:
    recorded, canonical = pieces([b"", b"a", b"b", b""]), pieces([b"a", b"b"])
    assert rows(align_cuts(recorded, canonical)) == [(MERGE, 0, 2, 0, 1), (MERGE, 2, 4, 1, 2)]
    assert rows(align_cuts(pieces([b""]), pieces([]))) == [(EXTRA, 0, 1, 0, 0)]
    assert rows(align_cuts(pieces([]), pieces([b""]))) == [(MISSING, 0, 0, 0, 1)]
    assert rows(align_cuts(pieces([b""]), pieces([b""]))) == [(SAME, 0, 1, 0, 1)]
    assert rows(align_cuts(pieces([]), pieces([]))) == []


@few
@given(TOKENS, TOKENS, st.booleans())
def test_every_alignment_is_a_partition_whose_kinds_say_the_truth(
    left: list[bytes], right: list[bytes], open_end: bool
) -> None:
    a, b = pieces(left), pieces(right)
    check_partition(align(a, b, open_end=open_end), a, b)


@settings(max_examples=examples(300, 5_000), deadline=None, derandomize=True)
@given(SHORT, SHORT, SHORT, SHORT)
def test_a_pair_differs_where_its_whole_alignment_does(
    start: list[bytes], left: list[bytes], right: list[bytes], end: list[bytes]
) -> None:
    a, b = pieces([*start, *left, *end]), pieces([*start, *right, *end])
    assume(len(a) and len(b) and a.ids.tolist() != b.ids.tolist())
    assert align_pair(a, b) == align(a, b).differing_blocks()


@few
@given(TOKENS, st.booleans())
def test_equal_sequences_are_one_same_block(tokens: list[bytes], open_end: bool) -> None:
    whole = pieces(tokens)
    wanted = [(SAME, 0, len(whole), 0, len(whole))] if tokens else []
    assert rows(align(whole, whole, open_end=open_end)) == wanted


@few
@given(TOKENS, PLAIN, PLAIN, TOKENS)
def test_only_the_changed_text_between_two_control_tokens_differs(
    before: list[bytes], old: list[bytes], new: list[bytes], after: list[bytes]
) -> None:
    head, tail = [*before, CONTROL], [CONTROL, *after]
    a, b = pieces([*head, *old, *tail]), pieces([*head, *new, *tail])
    for _, start, end, c_start, c_end in align(a, b).differing_blocks():
        assert len(head) <= start <= end <= len(a) - len(tail)
        assert len(head) <= c_start <= c_end <= len(b) - len(tail)


@few
@given(two_cuttings(), st.integers(0, 3))
def test_a_control_token_at_one_place_of_both_sides_stays_itself(
    pair: tuple[Pieces, Pieces], controls: int
) -> None:
    a, b = ([x.data[p:q] for p, q in zip([0, *x.end], x.end, strict=False)] for x in pair)
    a, b = ([token for token in side if token] for side in (a, b))
    left, right = pieces([*a, CONTROL, *b]), pieces([*b, *[CONTROL] * controls, *a])
    for recorded, canonical in ((left, pieces([*b, CONTROL, *a])), (left, right)):
        blocks = align(recorded, canonical)
        check_partition(blocks, recorded, canonical)
        for kind, start, end, c_start, c_end in blocks.differing_blocks():
            if kind in (MERGE, SPLIT, RESPLIT):
                both = recorded.control[start:end].any() and canonical.control[c_start:c_end].any()
                assert not both


@few
@given(st.lists(st.sampled_from([b"x", b"y", b"xy", b" "]), min_size=1, max_size=6), TOKENS)
def test_with_an_open_end_what_follows_a_drifted_end_is_missing_and_not_part_of_it(
    answer: list[bytes], more: list[bytes]
) -> None:
    head, other = [b"q", CONTROL], [b"z", b"zz"]
    assume(b"".join(answer) not in b"".join(more))
    for end in ([CONTROL], []):
        seen, prompt = pieces([*head, *answer, *end]), pieces([*head, *other, CONTROL, *more])
        blocks = rows(align(seen, prompt, open_end=True))
        assert blocks[:2] == [(SAME, 0, 2, 0, 2), (DRIFT, 2, 2 + len(answer), 2, 4)]
        assert [kind for kind, *_ in blocks[2:]] in ([SAME, MISSING], [SAME], [MISSING])


def test_text_of_equal_bytes_between_two_drifted_ends_is_no_drift() -> None:
    run = [b"%d" % n for n in range(12)]
    left = [b"p", *run, b"mid", b"dle", *run[::-1], b"q"]
    right = [b"r", *run, b"middle", *run[::-1], b"s"]
    blocks = rows(align(pieces(left), pieces(right)))
    assert [row[0] for row in blocks] == [DRIFT, SAME, MERGE, SAME, DRIFT]


def test_blocks_refuse_to_be_empty_on_a_side_that_their_kind_needs() -> None:
    for kind in BlockKind:
        for recorded, canonical in ((0, 0), (0, 1), (1, 0), (1, 1)):
            fits = {EXTRA: (1, 0), MISSING: (0, 1)}.get(kind, (1, 1)) == (recorded, canonical)
            columns = np.array([recorded]), np.array([canonical]), np.array([kind], np.int8)
            if fits:
                Blocks(*columns)
            else:
                with pytest.raises(ValueError, match="empty"):
                    Blocks(*columns)
    with pytest.raises(ValueError, match="length"):
        Blocks(np.array([1]), np.array([1, 2]), np.array([0], np.int8))
    growing = BlocksBuilder()
    growing.add(DRIFT, 0, 3)
    assert rows(growing.build()) == [(MISSING, 0, 0, 0, 3)]


TEXTS = st.lists(
    st.sampled_from(
        ["Skinny", " Skinny", " dogs", "\n", "\n\n", " 42", "é", "🙂", ' {"q":', " 你好", "<|im", "s"]
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("name", ["toy_bpe", "toy_metaspace"])
@few
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), spelled=st.lists(st.booleans(), min_size=60, max_size=60))
def test_toy_tokens_spelled_byte_by_byte_keep_their_place(
    name: str, texts: list[str], spelled: list[bool]
) -> None:
    tokenizer = load_tokenizer(str(toy.ROOT / "fixtures" / "tokenizers" / name))
    reference, vocabulary = Reference(tokenizer, None), tokenizer.vocabulary
    ends = min(
        reference.end_ids(), key=lambda i: vocabulary.piece(i) != {"toy_bpe": "<|im_end|>"}.get(name, "</s>")
    )
    ids: list[int] = []
    for text in texts:
        ids += [*tokenizer.encode(text).tolist(), ends]
    recorded: list[int] = []
    wanted: list[tuple[int, int, int]] = []
    for position, token in enumerate(ids):
        data = vocabulary.token_bytes(token)
        parts = [vocabulary.ids_of_bytes(bytes([byte])) for byte in data]
        if position < len(spelled) and spelled[position] and len(data) > 1 and all(parts):
            wanted.append((len(recorded), len(recorded) + len(data), position))
            recorded += [part[0] for part in parts]
        else:
            recorded.append(token)
    a, b = reference.pieces(np.array(recorded, np.int32)), reference.pieces(np.array(ids, np.int32))
    assume(a.data == b.data)
    blocks = align(a, b)
    check_partition(blocks, a, b)
    assert blocks.differing_blocks() == [(MERGE, start, end, at, at + 1) for start, end, at in wanted]


@few
@given(data=st.data(), left=st.lists(st.sampled_from("abcd"), max_size=24))
def test_units_pair_as_difflib_pairs_them(data: st.DataObject, left: list[str]) -> None:
    change = st.one_of(st.just(""), st.sampled_from(["", "", "X", "Y", "a"]))
    changes = data.draw(st.lists(change, min_size=len(left), max_size=len(left)))
    right = [new or old for old, new in zip(left, changes, strict=True)]
    right += data.draw(st.lists(st.sampled_from("abX"), max_size=6))
    for pair in ((left, right), (right, left)):
        assert list(diff_opcodes(*pair)) == SequenceMatcher(None, *pair, autojunk=False).get_opcodes()


@few
@given(
    left=st.lists(st.sampled_from("aabcde") | st.integers(0, 99).map(str), min_size=6, max_size=24),
    tail=st.lists(st.sampled_from("abXY"), max_size=4),
    data=st.data(),
)
def test_sequences_that_begin_alike_pair_as_difflib_pairs_them(
    left: list[str], tail: list[str], data: st.DataObject
) -> None:
    right = left[: len(left) - data.draw(st.integers(0, 4))] + tail
    for pair in ((left, right), (right, left), ("aaaab", "aaaaab"), ("xaaaabc", "xaaaaabc")):
        assert list(diff_opcodes(*pair)) == SequenceMatcher(None, *pair, autojunk=False).get_opcodes()


@few
@given(TOKENS, TOKENS, TOKENS, TOKENS, st.integers(0, 12))
def test_pairs_that_are_not_looked_into_change_nothing_behind_them(
    left: list[bytes], right: list[bytes], more: list[bytes], others: list[bytes], after: int
) -> None:
    pairs: list[Pair] = []
    align(pieces(left), pieces(right), pairs=pairs)
    a, b = pieces([*left, CONTROL, *more]), pieces([*right, CONTROL, *others])
    known_pairs = [pair for pair in pairs if pair[1] < len(left) and pair[3] < len(right)]
    whole, part = align(a, b).differing_blocks(), align(a, b, known_pairs=known_pairs).differing_blocks()
    skipped = {(pair[0], pair[1]) for pair in known_pairs}
    inside = {row for row in whole if any(start <= row[1] <= row[2] <= end for start, end in skipped)}
    assert set(whole) - inside <= set(part)
    assert [row for row in align(a, b, compare_from=after).differing_blocks() if row[1] >= after] == [
        row for row in whole if row[1] >= after
    ]


def test_long_chats_of_equal_units_pair_without_comparing_every_unit_with_every_other() -> None:
    class Unit(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Unit.compared += 1
            return str.__eq__(self, str(other))

        __hash__ = str.__hash__

    left = [Unit("same") for _ in range(2000)]
    right = [Unit("other") if place % 100 == 7 else Unit("same") for place in range(2000)]
    for place in range(7, 2000, 100):
        left[place] = Unit("old")
    assert len(list(diff_opcodes(left, right))) == 41
    assert Unit.compared < 20 * len(left)


@few
@given(
    left=st.lists(st.sampled_from("aabbcdefgh"), max_size=30),
    right=st.lists(st.sampled_from("aabbcdxyz"), max_size=30),
    steps=st.integers(0, 200),
)
def test_units_that_take_too_long_still_pair_only_where_they_are_equal(
    left: list[str], right: list[str], steps: int
) -> None:
    i = j = 0
    for tag, start, end, other, other_end in diff_opcodes(left, right, steps):
        assert (start, other) == (i, j)
        assert end > start or other_end > other
        assert (tag == "equal") == (left[start:end] == right[other:other_end])
        i, j = end, other_end
    assert (i, j) == (len(left), len(right))


def test_a_long_chat_of_other_lengths_pairs_by_what_each_side_holds_once() -> None:
    turns = [unit for turn in range(20_000) for unit in ("<s>", f"text {turn}", "<e>", "\n")]
    other = [*turns[:8], "<s>", "more", "<e>", "\n", *turns[8:]]
    other[-50_000] = "changed"
    began = time.process_time()
    sizes = [(tag, end - start, last - first) for tag, start, end, first, last in diff_opcodes(turns, other)]
    assert time.process_time() - began < 5
    changes = [entry for entry in sizes if entry[0] != "equal"]
    assert [tag for tag, *_ in changes] == ["insert", "replace"]
    assert sum(size for tag, size, _ in sizes if tag == "equal") == len(turns) - 1


def test_units_that_all_repeat_are_given_up_in_bounded_time() -> None:
    left = ["a", "b"] * 30_000
    right = ["b", "a", "c"] * 20_000
    began = time.process_time()
    assert list(diff_opcodes(left, right))
    assert time.process_time() - began < 5
