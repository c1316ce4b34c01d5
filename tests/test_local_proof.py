"""Proof by pieces: what differs from the log is said by the reference, whatever a fast encoder says."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.test_encoders import NAMES, drawn, real, toy
from tests.tiers import examples, some
from tito_audit.align.alignment import align
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids
from tito_audit.tokens.encoders import ReferenceEncoder
from tito_audit.tokens.segments import ControlTokens
from tito_audit.tokens.tokenizer import Tokenizer, find_unproven_pieces, sample_segments

LOADS_ANEW = True

CHAT = (
    "<|im_start|>user\nI like Skinny jeans, grüße 👍🏽 e\u0301 and 1234 dogs\n\n  x<|im_end|>\n"
    "<|im_start|>assistant\nMe too, don't you?\r\nYes <|im_end|>\n<|im_start|>user\n你好 <|im<|im_end|>\n"
)
KINDS = [*NAMES[:2], *some(NAMES[2:], 1)]
"""Both toys and, in `make test`, one real tokenizer."""
WORDS = ("dogs", " Skinny", "\n", "\n\n", " 42", "é", "🙂", ' {"q":', " 你好", "<|im", "s", "<|im_end|>", "'s")


def believed(tokenizer: Tokenizer) -> Tokenizer:
    """A fresh tokenizer of the same kind that trusts an encoder."""
    fresh = Tokenizer(tokenizer.name, tokenizer.backend, tokenizer.vocabulary)
    assert fresh.adopt_fast(ReferenceEncoder(fresh.backend))
    return fresh


@cache
def spellings(tokenizer_name: str, data: bytes) -> tuple[tuple[int, ...], ...]:
    """Ways of spelling some bytes by two tokens, or by another one."""
    vocabulary = kind(tokenizer_name).vocabulary
    halves = [(vocabulary.ids_of_bytes(data[:i]), vocabulary.ids_of_bytes(data[i:])) for i in range(1, len(data))]
    return tuple((a[0], b[0]) for a, b in halves if a and b)


@cache
def kind(name: str) -> Tokenizer:
    return toy(name) if name.startswith("toy") else real(name)


def respelled(name: str, ids: Ids, rng: np.random.Generator, share: float, near: Ids | None = None) -> Ids:
    """The ids with some tokens cut in two, neighbours of one spelling joined, all over or `near` some places."""
    out: list[int] = []
    vocabulary = kind(name).vocabulary
    chosen = rng.random(len(ids)) < share
    if near is not None:
        chosen &= np.isin(np.arange(len(ids)), near)
    for token, change in zip(ids.tolist(), chosen.tolist(), strict=True):
        ways = spellings(name, vocabulary.token_bytes(token)) if change else ()
        if ways:
            out += ways[int(rng.integers(len(ways)))]
        elif (
            change and out and (joined := vocabulary.ids_of_bytes(vocabulary.bytes_of(np.array([out[-1], token]))))
        ):
            out[-1] = joined[0]
        else:
            out.append(token)
    return np.array(out, np.int32)


def damaged(ids: Ids, rng: np.random.Generator) -> Ids:
    """The ids with tokens lost, doubled, swapped for others, or for ids that no vocabulary has."""
    out = ids.copy()
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(0, len(out) + 1))
        fresh = np.array([[-1, 2**31 - 1, 5, int(out[at - 1]) if at else 7][int(rng.integers(4))]], np.int32)
        what = rng.integers(4)
        if what == 0:
            out = np.concatenate((out[:at], fresh, out[at:]))
        elif what == 1:
            out = np.concatenate((out[:at], out[at + 1 :]))
        elif what == 2:
            out = np.concatenate((out[:at], fresh, out[at + 1 :]))
        else:
            out = out[:at]
    return out.astype(np.int32)


def findings(tokenizer: Tokenizer, recorded: Ids, canonical: Ids) -> set[tuple[object, ...]]:
    """What would be reported: every block of recorded tokens that the canonical ones differ in."""
    reference = Reference(tokenizer, None)
    blocks = align(reference.pieces(recorded), reference.pieces(canonical), open_end=True)
    return {
        (kind, start, end, canonical[first:last].tobytes())
        for kind, start, end, first, last in blocks.differing_blocks()
        if start < len(recorded)
    }


def whole_pieces(text: str, fast: Ids, recorded: Ids, tokenizer: Tokenizer) -> list[tuple[str, Ids]] | None:
    safe = tokenizer._safe_cuts
    assert safe is not None
    pieces = find_unproven_pieces(text, fast, recorded, tokenizer.vocabulary, tokenizer.control_tokens, safe)
    return None if pieces is None else list(pieces)


def texts_of(name: str, rng: np.random.Generator, count: int) -> list[str]:
    own = ["".join(rng.choice(WORDS, int(rng.integers(1, 40)))) for _ in range(count)]
    return [CHAT, *own, *drawn(name).chats(count)]


@pytest.mark.parametrize("name", KINDS)
def test_an_encoder_that_is_right_is_believed_and_the_ids_are_those_of_the_reference(name: str) -> None:
    tokenizer = believed(kind(name))
    rng = np.random.default_rng(1)
    for text in texts_of(name, rng, examples(8, 20)):
        right = tokenizer.encode(text)
        for recorded in (
            respelled(name, right, rng, 0.02),
            respelled(name, right, rng, 0.5),
            respelled(name, right, rng, 0.1)[: len(right) // 2],
            damaged(right, rng),
            right[:0],
        ):
            tokenizer._reference.cache.clear()
            assert tokenizer.prove(text, right, recorded).tolist() == right.tolist(), ascii(text)
    assert tokenizer.encoder_notice is None, "an honest encoder was given up"


@pytest.mark.parametrize("name", KINDS)
def test_a_lying_encoder_never_gets_a_wrong_finding_out(name: str) -> None:
    tokenizer = believed(kind(name))
    encoder, rng = tokenizer._fast, np.random.default_rng(2)
    found_out = 0
    for text in texts_of(name, rng, examples(8, 25)):
        right = kind(name).encode(text)
        recorded = respelled(name, right, rng, 0.05)
        lies = [
            respelled(name, right, rng, 0.05),
            respelled(name, right, rng, 1.0),
            respelled(name, recorded, rng, 0.05),
            recorded,
            damaged(right, rng),
            damaged(recorded, rng),
        ]
        for fast in lies:
            tokenizer._fast = encoder
            ids = tokenizer.prove(text, fast, recorded)
            given_up = tokenizer._fast is None
            found_out += given_up
            reported, wanted = findings(tokenizer, recorded, ids), findings(tokenizer, recorded, right)
            assert reported <= wanted, ascii(text)
            if given_up:
                assert ids.tolist() == right.tolist()
            elif ids.tolist() != right.tolist():
                assert ids is fast, "what is not the reference's is what was taken over"
    assert found_out > 25


@pytest.mark.parametrize("name", KINDS)
def test_every_token_that_differs_is_asked_of_the_reference(name: str) -> None:
    """One lie at a time, at each place where the log differs: none of them is believed."""
    tokenizer = believed(kind(name))
    encoder, rng = tokenizer._fast, np.random.default_rng(3)
    tried = 0
    for text in texts_of(name, rng, 8):
        right = kind(name).encode(text)
        recorded = respelled(name, right, rng, 0.1)
        for at in np.flatnonzero(rng.random(len(right)) < 0.3).tolist():
            fast = respelled(name, right, rng, 1.0, np.array([at]))
            if fast.tolist() == right.tolist() or findings(tokenizer, recorded, fast) <= findings(
                tokenizer, recorded, right
            ):
                continue
            tried += 1
            tokenizer._fast = encoder
            assert tokenizer.prove(text, fast, recorded).tolist() == right.tolist(), ascii(text)
            assert tokenizer._fast is None
    assert tried > 20


@pytest.mark.parametrize("name", KINDS)
def test_the_tail_of_a_text_goes_on_with_the_tail_of_its_ids(name: str) -> None:
    tokenizer, rng = kind(name), np.random.default_rng(7)
    cuts, tried = tokenizer.control_tokens, 0
    for text in texts_of(name, rng, 12):
        ids = tokenizer.encode(text)
        assert not tokenizer.has_too_many_bytes(ids, text), "a text is not encoded as more bytes than it has"
        for size in rng.integers(0, len(ids) + 1, 8).tolist():
            begin, first = cuts.find_last_before(text, ids, size)
            before = cuts.positions(ids[:size])
            assert first == (int(before[-1]) + 1 if len(before) else 0)
            assert tokenizer.encode(text[begin:]).tolist() == ids[first:].tolist()
            tried += first > 0
        assert cuts.find_last_before("no such token", ids, len(ids)) == (0, 0)
    assert tried > 10
    if tokenizer.normal_form is not None:
        assert tokenizer.has_too_many_bytes(ids, "e")
        assert not tokenizer.has_too_many_bytes(ids[:0], "")


class Everywhere:
    """Cuts between any two characters."""

    def find(self, text: str) -> Ids:
        return np.arange(1, max(len(text), 1))


def placed(tokenizer: Tokenizer, ids: Ids) -> list[tuple[int, int, int]]:
    """Every token with the bytes between which it stands."""
    ends = np.cumsum(tokenizer.vocabulary.byte_lengths(ids)).tolist()
    return list(zip([0, *ends], ends, ids.tolist(), strict=False))


def test_with_cuts_everywhere_the_pieces_are_the_tokens_that_have_not_their_place_in_the_log() -> None:
    tokenizer, rng = kind("toy_bpe"), np.random.default_rng(5)
    for text in [CHAT.encode("ascii", "ignore").decode(), *("Skinny dogs" * n + " S" for n in range(1, 30))]:
        right = tokenizer.encode(text)
        for share in (0.02, 0.2, 0.7):
            fast, recorded = respelled("toy_bpe", right, rng, share), respelled("toy_bpe", right, rng, share)
            there = set(placed(tokenizer, recorded))
            wanted = [token for token in placed(tokenizer, fast) if token not in there]
            pieces = find_unproven_pieces(
                text,
                fast,
                recorded,
                tokenizer.vocabulary,
                tokenizer.control_tokens,
                Everywhere(),  # type: ignore[arg-type]
            )
            assert pieces is not None
            assert [(piece, ids.tolist()) for piece, ids in pieces] == [
                (text[start:end], [token]) for start, end, token in wanted
            ]


def test_a_token_that_crosses_what_the_log_has_is_asked_about_though_the_log_ends_with_it() -> None:
    tokenizer = kind("toy_bpe")
    right = tokenizer.encode(" Skinny S")
    fast = np.concatenate((right[-1:], tokenizer.encode("kinny"), right[-1:]))
    pieces = find_unproven_pieces(
        " Skinny S",
        fast,
        right,
        tokenizer.vocabulary,
        tokenizer.control_tokens,
        Everywhere(),  # type: ignore[arg-type]
    )
    assert pieces is not None
    assert "".join(text for text, _ in pieces) == " Skinny"


def test_of_a_text_with_one_difference_one_word_is_asked_about() -> None:
    tokenizer = kind("toy_bpe")
    right = tokenizer.encode(CHAT)
    pieces = tokenizer.vocabulary
    at = next(i for i, token in enumerate(right.tolist()) if pieces.piece(token) == " Skinny")
    spelled = np.array(spellings("toy_bpe", b" Skinny")[0], np.int32)
    recorded = np.concatenate((right[:at], spelled, right[at + 1 :]))
    unproven = whole_pieces(CHAT, right, recorded, tokenizer)
    assert unproven is not None
    assert [(text, ids.tolist()) for text, ids in unproven] == [(" Skinny", [int(right[at])])]


def test_what_the_log_does_not_reach_is_asked_about_to_the_end() -> None:
    tokenizer = kind("toy_bpe")
    right = tokenizer.encode(CHAT)
    pieces = whole_pieces(CHAT, right, right[:-9], tokenizer)
    assert pieces is not None
    assert sum(len(ids) for _, ids in pieces) >= 9
    assert CHAT.endswith("".join(text for text, _ in pieces))


def test_there_are_no_pieces_where_it_is_not_plain_what_differs() -> None:
    tokenizer = kind("toy_bpe")
    right = tokenizer.encode(CHAT)
    unknown = np.array([2**31 - 1], np.int32)
    longer, nothing = np.concatenate((right, right[-1:])), right[:0]
    other = right.copy()
    other[3] = right[4]
    odd = np.concatenate((right[:5], unknown, right[5:]))  # tokens of no bytes; `other` is of other bytes
    pairs = [(right, odd), (right, longer), (right, nothing), (right, other)]
    for fast, recorded in (*pairs, *(pair[::-1] for pair in pairs), (other, longer), (right[:-1], right[:4])):
        assert whole_pieces(CHAT, fast, recorded, tokenizer) is None
    assert whole_pieces(CHAT + "\ud83d", right, right[:4], tokenizer) is None
    assert whole_pieces(CHAT, right, right, tokenizer) == []


def test_a_sample_holds_the_same_segments_whatever_stands_around_them() -> None:
    rng = np.random.default_rng(4)
    controls = ControlTokens({"<a>": 0, "<b>": 1})
    segments = [rng.integers(2, 50, int(n)).astype(np.int32) for n in rng.integers(0, 12, 4000)]
    alone = [len(sample_segments(segment, controls, 16)) for segment in segments]
    assert set(alone) == {0, 1}
    assert 4000 / 16 / 2 < sum(alone) < 4000 / 16 * 2
    between = [np.array([i % 2], np.int32) for i in range(len(segments))]
    whole = np.concatenate([part for pair in zip(segments, between, strict=True) for part in pair])
    assert sample_segments(whole, controls, 16) == np.flatnonzero(alone).tolist()
    filled = np.flatnonzero([len(segment) for segment in segments]).tolist()
    assert sample_segments(whole, controls, 1) == filled
    assert sample_segments(whole[:0], controls, 1) == []


def test_a_segment_that_lost_all_its_tokens_is_in_the_sample_of_its_text() -> None:
    tokenizer = believed(kind("toy_bpe"))
    right = tokenizer.encode(CHAT)
    at = np.flatnonzero(tokenizer.vocabulary.control(right))
    lost = np.concatenate((right[: at[0] + 1], right[at[1] :]))
    assert not tokenizer.check_sample([CHAT], [lost], one_in=1)


def changed_start(text: str) -> str:
    """A chat whose answer has, in place of its start, this text."""
    answer = " ".join(f"word {number} of it;" for number in range(200))
    return f"<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n{text}{answer}<|im_end|>\n"


def test_of_a_long_answer_whose_start_changed_the_reference_encodes_the_start() -> None:
    tokenizer = believed(kind("toy_bpe"))
    encoded: list[str] = []
    encode = tokenizer._reference.encode_batch
    tokenizer._reference.encode_batch = lambda texts: (encoded.extend(texts), encode(texts))[1]  # type: ignore[method-assign]
    recorded = encode([changed_start("Thoughts first. ")])[0]
    for start in ("", "Other thoughts before it. "):
        text = changed_start(start)
        right = encode([text])[0]
        assert tokenizer.prove(text, right, recorded).tolist() == right.tolist()
        assert 0 < sum(map(len, encoded)) < len(text) / 10
        encoded.clear()
        tokenizer.prove(text, right, recorded)  # as a later prompt holds both
        assert sum(map(len, encoded)) <= len("\n")


def test_what_was_accepted_beside_one_record_is_not_beside_another() -> None:
    tokenizer, rng = believed(kind("toy_bpe")), np.random.default_rng(6)
    encoder, text = tokenizer._fast, changed_start("")
    right = kind("toy_bpe").encode(text)
    lie = respelled("toy_bpe", right, rng, 1.0, np.arange(len(right) - 40, len(right)))
    longer = kind("toy_bpe").encode(changed_start("Thoughts first. "))
    recorded = np.concatenate((longer[: len(longer) - 40], lie[len(right) - 40 :]))
    assert lie.tolist() != right.tolist()
    assert tokenizer.prove(text, lie, recorded) is lie, "the log says the same at these places"
    assert tokenizer.prove(text, lie, longer).tolist() == right.tolist()
    assert tokenizer._fast is None
    tokenizer._fast = encoder
    head = respelled("toy_bpe", right, rng, 1.0, np.arange(8, 16))
    assert tokenizer.prove(text, head, longer).tolist() == right.tolist()
