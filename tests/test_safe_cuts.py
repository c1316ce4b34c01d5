"""Safe cuts: the parts of a text encode as the whole does, by `tokenizers` itself."""

from __future__ import annotations

import functools
import itertools
import os
import random
from itertools import chain
from pathlib import Path

import numpy as np
import orjson
import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from tests import command
from tests.fuzz_encoders import FRAGMENTS, Drawn
from tests.tiers import examples, some
from tito_audit.errors import TokenizerError
from tito_audit.tokens import segments, split_points
from tito_audit.tokens.encoders import ReferenceEncoder
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.split_points import (
    TABLES,
    SafeCuts,
    find_safe_cuts,
    match_characters,
    parse_splitting_steps,
)
from tito_audit.tokens.tokenizer import Tokenizer
from tools import split_points as derivation

LOADS_ANEW = True

ROOT = Path(__file__).resolve().parents[1]
TOYS = ROOT / "fixtures" / "tokenizers"
SHARED = Path(os.environ.get("TITO_AUDIT_TOKENIZERS") or ROOT.parent / "shared" / "tokenizers")
STRINGS = int(os.environ.get("TITO_AUDIT_FUZZ", examples(250, 2000)))
WANTED = ("qwen3", "qwen2.5-coder", "llama-3.1", "gpt-oss", "deepseek-v3", "smollm2")
NAMES = ["toy_bpe", *(pytest.param(name, marks=pytest.mark.shared) for name in some(WANTED, 1))]
HARD = (
    *(
        "'",
        "'s",
        "'S",
        "'ſ",
        "'l",
        "'ll",
        "'LL",
        "'re",
        "'R",
        "’s",
        "'st",
        "a",
        "A",
        "é",
        "ǅ",
        "ʼ",
        "ª",
        "中",
        "あ",
    ),
    *("1", "12", "1234", "٣", "½", "Ⅳ", "²", " ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u0085"),
    *("\u2028", "\x1c", "/", "//", ".", "...", "!", "_", "$", "€", "<", "=", "≠", "\u0338", "\u0301", "e\u0301"),
    *("\u0958", "\u093c", "\u1100", "\u1161", "\u11a8", "가", "\u0344", "\u212b", "\u0378", "\ue000", "\ufeff"),
    *("\u200d", "👍🏽", "\ud83d", "\ude00", "\ufffd", "\x00", "ﬆ", "ß", "İ", "\u0e33", "ก", "्", "\U0001e94b"),
)


@functools.cache
def loaded(name: str) -> Tokenizer:
    folder = TOYS / name if (TOYS / name).is_dir() else SHARED / name
    if not folder.is_dir():
        pytest.skip(f"no {name} tokenizer at {SHARED}")
    return command.loaded(folder)


@functools.cache
def cuts_of(name: str) -> SafeCuts:
    cuts = find_safe_cuts(loaded(name).backend)
    assert cuts is not None, f"{name} has lost its table"
    return cuts


def hard_texts(name: str, count: int) -> list[str]:
    """What regexes and normalizers trip over, in any order, with control tokens whole and in pieces."""
    draw = random.Random(name)
    vocabulary = loaded(name).vocabulary
    control = [vocabulary.piece(i) for i in sorted(vocabulary.added_ids)]
    texts = []
    for _ in range(count):
        some = draw.sample(HARD, draw.randint(1, 6)) + draw.choices(FRAGMENTS, k=2)
        parts = [draw.choice(some) * draw.choice((1, 1, 1, 2, 3, 7)) for _ in range(draw.randint(1, 9))]
        for _ in range(draw.choice((0, 0, 1, 2))):
            content = draw.choice(control)
            part = draw.choice((content, content, content[:-1], content[1:], content * 2))
            parts.insert(draw.randint(0, len(parts)), part)
        texts.append("".join(parts))
    return texts


def cut_up(text: str, places: list[int]) -> list[str]:
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def assert_cuts_hold(tokenizer: Tokenizer, cuts: SafeCuts, texts: list[str], *, one_of: random.Random) -> int:
    """Whole against cut at every safe place, and against cut at one of them; how many there were."""
    encode = ReferenceEncoder(tokenizer.backend).encode_batch
    total = 0
    for start in range(0, len(texts), 250):
        batch = texts[start : start + 250]
        places_of_texts = [cuts.find(text).tolist() for text in batch]
        total += sum(map(len, places_of_texts))
        pieces = [cut_up(text, places) for text, places in zip(batch, places_of_texts, strict=True)]
        halves = [
            cut_up(text, [one_of.choice(places)] if places else [])
            for text, places in zip(batch, places_of_texts, strict=True)
        ]
        distinct = list(dict.fromkeys([*batch, *(piece for cut in pieces + halves for piece in cut)]))
        ids = dict(zip(distinct, (encoded.tolist() for encoded in encode(distinct)), strict=True))
        for text, *cut in zip(batch, pieces, halves, strict=True):
            for parts in cut:
                assert list(chain.from_iterable(ids[part] for part in parts)) == ids[text], (
                    ascii(text),
                    ascii(parts),
                )
    return total


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_a_text_cut_at_its_safe_places_encode_as_the_whole(name):
    tokenizer, cuts = loaded(name), cuts_of(name)
    texts = Drawn(tokenizer, seed=3).texts(STRINGS) + Drawn(tokenizer, seed=4).chats(STRINGS // 2)
    assert assert_cuts_hold(tokenizer, cuts, texts, one_of=random.Random(5)) > STRINGS


@pytest.mark.parametrize("name", NAMES)
def test_they_do_so_for_what_regexes_and_normalizers_trip_over(name):
    tokenizer, cuts = loaded(name), cuts_of(name)
    assert assert_cuts_hold(tokenizer, cuts, hard_texts(name, STRINGS), one_of=random.Random(6)) > STRINGS


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_text_end_at_the_safe_cuts_of_the_whole(name):
    cuts = cuts_of(name)
    texts = Drawn(loaded(name), seed=7).texts(STRINGS // 4) + Drawn(loaded(name), seed=8).chats(STRINGS // 8)
    texts += ["", "a", "a" * 9000, "".join(texts), " the" * 5000]
    for text, size in itertools.product([*texts, *hard_texts(name, STRINGS // 4)], (1, 7, 900)):
        parts = cuts.divide(text, size)
        wanted, begin = [], 0
        for place in cuts.find(text).tolist():
            if place >= begin + size:
                wanted.append(place)
                begin = place
        assert "".join(parts) == text
        assert list(itertools.accumulate(map(len, parts)))[:-1] == wanted, (ascii(text[:200]), size)


@pytest.mark.parametrize("name", NAMES)
def test_a_place_is_a_safe_cut_if_it_is_of_all_cuts(name):
    cuts, tried = cuts_of(name), 0
    for text in hard_texts(name, STRINGS):
        text = text.encode("utf-8", "replace").decode()
        if cuts.spells_token(text):
            continue
        data, places = text.encode(), [0, *itertools.accumulate(len(char.encode()) for char in text)]
        wanted = {places[at] for at in cuts.find(text).tolist()}
        assert {at for at in range(1, len(data) + 1) if cuts.may_cut(data, at)} == wanted, ascii(text)
        tried += len(wanted)
    assert tried > STRINGS


@pytest.mark.parametrize("name", NAMES)
def test_a_long_text_gets_the_same_ids_in_parts(name, monkeypatch):
    monkeypatch.setattr(segments, "MAX_WHOLE", 100)
    monkeypatch.setattr(segments, "PART_SIZE", 40)
    tokenizer = loaded(name)
    parts = []

    def encode(texts):
        parts.extend(texts)
        return whole(texts)

    whole = ReferenceEncoder(tokenizer.backend).encode_batch
    together = "".join(hard_texts(name, 30) + Drawn(tokenizer, seed=9).chats(5))
    texts = [together, "short", "", together[::-1], "\ud83d\ude00 half \ud83d " * 30, "a" * 500]
    in_parts = segments.encode_in_parts(encode, lambda: cuts_of(name))(texts)
    assert [ids.tolist() for ids in in_parts] == [ids.tolist() for ids in whole(texts)]
    assert max(map(len, parts)) == 500, "only the text without cuts is encoded whole"
    assert not any(ids.flags.writeable for ids in in_parts)


@pytest.mark.parametrize("name", NAMES)
def test_prose_is_cut_into_words(name):
    text = "The quick brown fox.\n\nIt isn't <b>here</b>, is it?"
    assert {" quick", " brown", " it"} <= set(cut_up(text, cuts_of(name).find(text).tolist()))


def test_no_cut_is_inside_a_control_token_and_its_ends_are_cuts():
    text = "a<|im_end|>b <think></think>\n<|im_end"
    places = cuts_of("toy_bpe").find(text).tolist()
    assert {"a", "<|im_end|>", "<think>", "</think>"} <= set(cut_up(text, places))
    assert cuts_of("toy_bpe").find("").tolist() == cuts_of("toy_bpe").find("<think>").tolist() == []


def changed(*contents: AddedToken) -> tokenizers.Tokenizer:
    """The toy tokenizer with more added tokens."""
    backend = load_tokenizer(str(TOYS / "toy_bpe")).backend
    backend.add_tokens(list(contents))
    return backend


def test_where_control_tokens_overlap_the_cuts_keep_away_from_them():
    backend = changed(*(AddedToken(text, normalized=False) for text in ("<a>", "<a><b", "b><c>", "> x <", "<a")))
    cuts = find_safe_cuts(backend)
    assert cuts is not None
    assert not cuts.apart
    draw = random.Random(1)
    bits = ("<a>", "<a", "<b", "b>", "<c>", ">", "> x <", " ", "x", "y", "\n", "<|im_end|>", " the", "'s")
    texts = ["".join(draw.choices(bits, k=draw.randint(1, 12))) for _ in range(STRINGS)]
    tokenizer = Tokenizer("changed", backend, loaded("toy_bpe").vocabulary)
    assert assert_cuts_hold(tokenizer, cuts, texts, one_of=draw) > STRINGS // 2


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_a_control_token_that_looks_beside_itself_leaves_no_cut_safe(flag):
    assert find_safe_cuts(changed(AddedToken("<odd>", **{flag: True}))) is None


def test_so_does_one_that_is_looked_for_in_normalised_text():
    backend = changed(AddedToken("<odd>", normalized=True))
    assert find_safe_cuts(backend) is not None, "nothing is normalised"
    backend.normalizer = normalizers.NFC()
    assert find_safe_cuts(backend) is None


def test_merges_left_out_at_random_leave_no_cut_safe():
    backend = changed()
    backend.model.dropout = 0.1
    assert find_safe_cuts(backend) is None


@pytest.mark.parametrize(
    "part",
    [
        pre_tokenizers.Metaspace(),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Digits(True)]),
        pre_tokenizers.Split(tokenizers.Regex(r"\s"), "removed"),
        None,
    ],
    ids=["metaspace", "prefix", "bytes first", "removed", "none"],
)
def test_a_tokenizer_that_splits_otherwise_has_none(part):
    backend = changed()
    if part is None:
        backend = tokenizers.Tokenizer(models.BPE())
    else:
        backend.pre_tokenizer = part
    assert find_safe_cuts(backend) is None


def test_another_normalizer_leaves_none():
    backend = changed()
    backend.normalizer = normalizers.NFKC()
    assert find_safe_cuts(backend) is None


def test_a_part_that_is_code_leaves_none():
    class Own:
        def pre_tokenize(self, pretok):
            pass

    backend = changed()
    backend.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Own())
    assert find_safe_cuts(backend) is None


def test_a_table_that_is_not_true_of_the_library_is_not_used(monkeypatch, tmp_path):
    backend = changed()
    steps = split_points.find_splitting_steps(backend)
    stored = orjson.loads((TABLES / f"{split_points.table_name(*steps)}.json").read_bytes())
    stored["run_lengths"][0] += 1
    stored["run_lengths"][1] -= 1
    (tmp_path / f"{split_points.table_name(*steps)}.json").write_bytes(orjson.dumps(stored))
    monkeypatch.setattr(split_points, "TABLES", tmp_path)
    split_points._load_table.cache_clear()
    try:
        assert find_safe_cuts(backend) is None
    finally:
        split_points._load_table.cache_clear()


def states(name: str) -> tuple[list[str], bool]:
    steps = split_points.find_splitting_steps(loaded(name).backend)
    assert steps is not None
    return steps


@pytest.mark.parametrize("name", some(["toy_bpe", pytest.param("smollm2", marks=pytest.mark.shared)], 1))
def test_the_table_that_is_kept_is_the_one_that_is_derived(name, monkeypatch):
    # The kept ones took strings of one or two characters more and forty times as many random ones, or more.
    monkeypatch.setattr(derivation, "_RANDOM_STRINGS", examples(1_000, 5_000))
    monkeypatch.setattr(derivation, "_SHORTEST", examples(4, 5))
    monkeypatch.setattr(derivation, "CODE_POINTS", examples(0x20000, derivation.CODE_POINTS))
    steps = states(name)
    derived = derivation._stored(derivation.derive(loaded(name).backend, *steps), *steps)
    file = TABLES / f"{split_points.table_name(*steps)}.json"
    stored = orjson.loads(file.read_bytes())
    sizes = {"run_lengths", "run_classes", "settled_at"}  # another Python knows other characters
    assert stored["settled_at"] >= 6
    fresh = orjson.loads(orjson.dumps(derived))
    assert {key: stored[key] for key in stored.keys() - sizes} == {key: fresh[key] for key in fresh.keys() - sizes}
    old, new = (np.repeat(table["run_classes"], table["run_lengths"]) for table in (stored, fresh))
    unknown = len(stored["members"])
    old = old[: len(new)]
    assert np.array_equal(old[(old != unknown) & (new != unknown)], new[(old != unknown) & (new != unknown)])


@pytest.mark.parametrize("name", NAMES)
def test_every_character_is_of_the_class_that_the_library_puts_it_in(name):
    steps = states(name)
    stored = orjson.loads((TABLES / f"{split_points.table_name(*steps)}.json").read_bytes())
    cuts = cuts_of(name)
    points = np.flatnonzero(cuts.classes != cuts.unknown)[:: examples(16, 1)]
    characters = [chr(point) for point in points.tolist()]
    for number, matcher in enumerate(stored["matchers"]):
        marks = np.array([row[number] == "1" for row in stored["members"]])
        assert np.array_equal(match_characters(matcher, characters), marks[cuts.classes[points]]), matcher


def test_every_table_is_named_after_what_it_was_derived_from():
    files = sorted(TABLES.glob("*.json"))
    assert len(files) >= 6
    for file in files:
        stored = orjson.loads(file.read_bytes())
        assert file.stem == split_points.table_name(stored["regexes"], stored["nfc"])


def test_a_regex_that_looks_back_or_refers_back_is_not_taken_on():
    backend = changed()
    for pattern in (r"(?<=a)b", r"(a)\1", r"\bword", r"[[:alpha:]&&[^a]]", r"^a"):
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        steps = split_points.find_splitting_steps(backend)
        assert steps is not None
        with pytest.raises(TokenizerError, match="cannot be understood"):
            derivation.derive(backend, *steps)


def test_a_sequence_without_a_byte_level_end_is_not_understood():
    assert parse_splitting_steps(None, {"type": "Sequence", "pretokenizers": []}) is None
