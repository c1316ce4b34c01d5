"""The prover says of ids what encoding their text says, by `tokenizers` on whole texts."""

from __future__ import annotations

import functools
import gzip
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken

from tests.fuzz_encoders import Drawn
from tests.test_safe_cuts import NAMES, SHARED, STRINGS, TOYS, hard_texts, loaded
from tests.tiers import some
from tito_audit.record.arrays import Ids
from tito_audit.tokens import prover as prover_module
from tito_audit.tokens._segment_table import KeySet, pack
from tito_audit.tokens._token_edges import _outer_characters
from tito_audit.tokens.encoders import ReferenceEncoder
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.prover import Prover, find_prover
from tito_audit.tokens.vocab import Vocabulary

ROOT = Path(__file__).resolve().parents[1]
LOGS = SHARED.parent


def made(backend: tokenizers.Tokenizer) -> Prover | None:
    return find_prover(backend, Vocabulary(backend), ReferenceEncoder(backend).encode_batch)


@functools.cache
def prover_of(name: str) -> Prover:
    found = made(loaded(name).backend)
    assert found is not None
    return found


def ids_of(values: Sequence[int]) -> Ids:
    return np.array(values, np.int32)


def assert_right(prover: Prover, sequences: Sequence[Ids]) -> tuple[int, int, int]:
    """How many are canonical, how many not, and of how many only an encoding could tell."""
    whole = prover.encode([prover.vocabulary.text(ids) for ids in sequences])
    good = bad = encoded = 0
    for ids, expected in zip(sequences, whole, strict=True):
        same = np.array_equal(ids, expected)
        told = prover.refuted(ids)
        encoded += told is None
        good += same
        bad += not same
        if told is not None:
            assert same == (told == []), (ids.tolist(), prover.vocabulary.data(ids))
        found = prover.encoded(ids)
        assert found.tolist() == expected.tolist(), (ids.tolist(), prover.vocabulary.data(ids))
        assert (found is ids) == same == prover.canonical(ids)
    return good, bad, encoded


class Sequences:
    """Random ids: of any kind, around hard characters, control tokens in pieces, and canonical ones spoiled."""

    def __init__(self, name: str, seed: int) -> None:
        self.draw = random.Random(seed)
        self.tokenizer = loaded(name)
        self.vocabulary = vocabulary = self.tokenizer.vocabulary
        self.spelled = {vocabulary.token_bytes(i): i for i in range(vocabulary.size) if vocabulary.token_bytes(i)}
        self.added = sorted(vocabulary.added_ids)
        self.kinds: dict[str, list[int]] = {}
        for data, token_id in self.spelled.items():
            if token_id not in vocabulary.added_ids and len(data) <= 6:
                self.kinds.setdefault(kind_of(data), []).append(token_id)
        self.texts = hard_texts(name, 400) + Drawn(self.tokenizer, seed).texts(400)

    def drawn(self, count: int) -> Iterator[Ids]:
        for _ in range(count):
            ids = self.draw.choice((self.any, self.of_kinds, self.spelled_out, self.spoiled, self.of_text))()
            yield ids_of(ids)

    def any(self) -> list[int]:
        return [self.draw.randrange(self.vocabulary.size + 2) for _ in range(self.draw.randint(0, 6))]

    def of_kinds(self) -> list[int]:
        names = self.draw.sample(sorted(self.kinds), min(3, len(self.kinds)))
        ids = [self.draw.choice(self.kinds[self.draw.choice(names)]) for _ in range(self.draw.randint(1, 9))]
        if self.draw.random() < 0.3:
            ids.insert(self.draw.randint(0, len(ids)), self.draw.choice(self.added))
        return ids if self.draw.random() < 0.5 else self.canonical(self.vocabulary.text(ids_of(ids)))

    def spelled_out(self) -> list[int]:
        """A control token in pieces, whole or almost, between words."""
        content = self.vocabulary.token_bytes(self.draw.choice(self.added))
        if self.draw.random() < 0.4:
            content = content[self.draw.randint(0, 1) : len(content) - self.draw.randint(0, 1)]
        return [*self.of_kinds(), *self.pieces(content), *self.of_kinds()]

    def pieces(self, data: bytes) -> list[int]:
        """Bytes as ordinary tokens, cut at random."""
        out, at = [], 0
        while at < len(data):
            ends = [end for end in range(at + 1, min(len(data), at + 12) + 1) if data[at:end] in self.spelled]
            ends = [end for end in ends if self.spelled[data[at:end]] not in self.vocabulary.added_ids]
            if not ends:
                return out
            end = self.draw.choice(ends)
            out.append(self.spelled[data[at:end]])
            at = end
        return out

    def spoiled(self) -> list[int]:
        """Canonical ids of which one to four are written otherwise."""
        ids = self.of_text()
        if not ids:
            return ids
        start = self.draw.randrange(len(ids))
        end = min(len(ids), start + self.draw.randint(1, 4))
        return ids[:start] + self.pieces(self.vocabulary.data(ids_of(ids[start:end]))) + ids[end:]

    def of_text(self) -> list[int]:
        return self.canonical("".join(self.draw.choices(self.texts, k=self.draw.randint(1, 2))))

    def canonical(self, text: str) -> list[int]:
        return ReferenceEncoder(self.tokenizer.backend).encode_alone([text])[0].tolist()


def kind_of(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "part of a character"
    if text.strip(" ").isdigit():
        return "digits"
    if text.isspace():
        return "blank"
    if "'" in text:
        return "apostrophe"
    if text.isascii():
        return "letters" if text.strip(" ").isalpha() else "signs"
    return "marks" if any("\u0300" <= char < "\u0370" or "\u1100" <= char < "\u1200" for char in text) else "other"


@pytest.mark.parametrize("name", NAMES)
def test_of_random_ids_it_says_what_encoding_says(name):
    sequences = list(Sequences(name, seed=len(name)).drawn(4 * STRINGS))
    good, bad, encoded = assert_right(prover_of(name), sequences)
    assert min(good, bad) > len(sequences) // 10, "one verdict is hardly tried"
    assert encoded < len(sequences) // 2, "hardly anything is proven"


@pytest.mark.parametrize("name", NAMES)
def test_what_it_says_does_not_depend_on_what_it_saw(name, monkeypatch):
    monkeypatch.setattr(prover_module, "_MOST_TOKENS", 300)
    fresh = made(loaded(name).backend)
    assert fresh is not None
    fresh._short.most = 200
    sequences = list(Sequences(name, seed=9).drawn(STRINGS // 4))
    assert_right(fresh, sequences)
    joined = [np.concatenate(sequences[at : at + 8]) for at in range(0, len(sequences), 8)]
    joined = [ids[(ids >= 0) & (ids < fresh.vocabulary.size)] for ids in joined]
    assert_right(fresh, joined)
    assert_right(fresh, sequences[::-1])


def recorded(name: str) -> Iterator[Ids]:
    """The ids of real logs, prompts and completions in one."""
    for mode in ("tito", "retok"):
        log = LOGS / "rollouts" / name / f"{mode}.jsonl.gz"
        if not log.is_file():
            pytest.skip(f"no rollouts of {name} at {LOGS}")
        for line in gzip.decompress(log.read_bytes()).splitlines():
            for call in json.loads(line)["calls"]:
                yield ids_of(call["prompt_token_ids"] + call["generation_token_ids"])


@pytest.mark.shared
@pytest.mark.parametrize("name", some(["smollm2", "qwen2.5-coder"], 1))
def test_of_what_models_sampled_it_says_what_encoding_says(name):
    sequences = list(recorded(name))
    good, bad, encoded = assert_right(prover_of(name), sequences)
    assert good > 0
    assert bad > 0, "a model samples tokens that encoding does not give"
    assert encoded < len(sequences) // 4


@pytest.mark.shared
def test_it_finds_the_tokens_that_a_trainer_merged():
    log = LOGS / "recorded" / "nemo-rl-merged-tokens.json"
    if not log.is_file() or not (SHARED / "qwen3").is_dir():
        pytest.skip(f"no {log.name} at {LOGS}")

    def sequences(value: object) -> Iterator[Ids]:
        if isinstance(value, dict):
            for one in value.values():
                yield from sequences(one)
        elif isinstance(value, list) and len(value) > 8 and all(type(one) is int for one in value):
            yield ids_of(value)
        elif isinstance(value, list):
            for one in value:
                yield from sequences(one)

    found = list(sequences(json.loads(log.read_bytes())))
    assert found
    _, bad, _ = assert_right(prover_of("qwen3"), found)
    assert bad


def test_a_control_token_in_pieces_is_left_to_encoding():
    prover = prover_of("toy_bpe")
    encode = loaded("toy_bpe").encode
    spelled = np.concatenate([encode("a <|im_"), encode("end|> b")])
    assert prover.refuted(spelled) is None
    assert prover.encoded(spelled).tolist() == encode("a <|im_end|> b").tolist()
    many = np.concatenate([encode("</x> <t> "), *[encode("<t </z ")] * 80, spelled])
    assert prover.refuted(many) is None
    assert_right(prover, [many, many[: -len(spelled)]])


def test_an_id_without_bytes_is_left_to_encoding():
    prover = prover_of("toy_bpe")
    for odd in (-1, prover.vocabulary.size, 2**31 - 1):
        ids = ids_of([*loaded("toy_bpe").encode("a b").tolist(), odd])
        assert prover.refuted(ids) is None
        assert not prover.canonical(ids)
    assert prover.refuted(ids_of([])) == []


def test_refuted_segments_are_told_with_what_is_canonical():
    prover, encode = prover_of("toy_bpe"), loaded("toy_bpe").encode
    before, after = encode("the and "), encode(" of the")
    word = prover.vocabulary.token_bytes(int(encode("there")[0]))
    split = np.concatenate([encode(chr(byte)) for byte in word])
    ids = np.concatenate([encode("the and"), encode(" "), split, after])
    told = prover.refuted(ids)
    assert told
    assert len(before)
    rebuilt, at = [], 0
    for start, end, own in told:
        rebuilt += [*ids[at:start].tolist(), *own.tolist()]
        at = end
    assert [*rebuilt, *ids[at:].tolist()] == encode(prover.vocabulary.text(ids)).tolist()


@pytest.mark.parametrize(
    "contents",
    [("<a>", "<a><b>"), ("x",), ("<\ufffd>",)],
    ids=["overlapping", "one byte", "a replacement character"],
)
def test_control_tokens_of_other_kinds_leave_nothing_to_prove_with(contents):
    backend = load_tokenizer(str(TOYS / "toy_bpe")).backend
    backend.add_tokens([AddedToken(content, normalized=False) for content in contents])
    assert made(backend) is None


def test_a_tokenizer_without_safe_cuts_has_no_prover():
    assert made(load_tokenizer(str(TOYS / "toy_metaspace")).backend) is None


@pytest.mark.parametrize("name", NAMES)
def test_the_outer_characters_of_tokens_are_those_that_decoding_shows(name):
    vocabulary = loaded(name).vocabulary
    entries = vocabulary.entries
    found = _outer_characters(np.frombuffer(entries.data, np.uint8), entries.lengths.astype(np.int64))
    for token_id, (first, second, last) in enumerate(zip(*(one.tolist() for one in found), strict=True)):
        data = vocabulary.token_bytes(token_id) if token_id < vocabulary.size else b""
        marked = data.decode("utf-8", "surrogateescape")
        points = [-1 if 0xDC80 <= ord(char) < 0xDD00 else ord(char) for char in marked]
        assert last == (points[-1] if points else -1), data
        assert first == (points[0] if points else -1), data
        assert second == (points[1] if len(points) > 1 and first >= 0 else -1), data


def test_a_set_of_keys_holds_what_was_put_in_and_nothing_else():
    draw = np.random.default_rng(3)
    keys, model = KeySet(), set()
    for size in (1, 5, 900, 20_000, 3, 40_000):
        fresh = np.unique(draw.integers(1, 1 << 17, size).astype(np.uint64))
        fresh = fresh[~keys.holds(fresh)]
        assert not model & set(fresh.tolist())
        keys.add(fresh)
        model |= set(fresh.tolist())
        asked = draw.integers(1, 1 << 17, 5_000).astype(np.uint64)
        assert keys.holds(asked).tolist() == [one in model for one in asked.tolist()]
        assert len(keys) == len(model)


def test_a_full_set_of_keys_begins_anew():
    keys = KeySet(most=10)
    keys.add(np.arange(1, 9, dtype=np.uint64))
    keys.add(np.arange(20, 25, dtype=np.uint64))
    assert keys.holds(np.array([1, 20, 24], np.uint64)).tolist() == [False, True, True]
    keys.add(np.arange(100, 150, dtype=np.uint64))
    assert len(keys) == 10


def test_keys_are_equal_only_for_equal_sequences():
    ids = ids_of([0, 0, 0, 1, 2, 0, (1 << 21) - 2, (1 << 21) - 2, (1 << 21) - 2])
    sequences = [(start, length) for start in range(7) for length in (2, 3) if start + length <= len(ids)]
    starts, lengths = (np.array(one, np.int64) for one in zip(*sequences, strict=True))
    keys = pack(ids, starts, lengths).tolist()
    tuples = [tuple(ids[start : start + length].tolist()) for start, length in sequences]
    assert len(set(keys)) == len(set(tuples))
    assert 0 not in keys


def test_recorded_ids_are_proven_once_enough_were_asked_about_and_no_encoder_is_faster(monkeypatch):
    tokenizer = load_tokenizer(str(TOYS / "toy_bpe"))
    monkeypatch.setattr("tito_audit.tokens.tokenizer._WORTH_PROVING", 100)
    assert tokenizer.prover(60) is None
    assert tokenizer.prover(0) is None
    prover = tokenizer.prover(60)
    assert prover is not None
    assert tokenizer.prover(0) is prover
    assert tokenizer.use_fast(True)
    assert tokenizer.prover(1_000) is None
    ids = tokenizer.encode("the end of it<|im_end|>")
    assert prover.canonical(ids)


def test_a_tokenizer_without_safe_cuts_is_asked_to_encode_as_ever(monkeypatch):
    monkeypatch.setattr("tito_audit.tokens.tokenizer._WORTH_PROVING", -1)
    assert load_tokenizer(str(TOYS / "toy_metaspace")).prover(10) is None
