"""Texts that tokens are known to spell are spelled by them, byte for byte."""

from __future__ import annotations

import random
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.tables import stored
from tests.test_render_fast import PIECES, RARE
from tests.tiers import examples, some
from tito_audit.record.arrays import Ids
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.vocab import Vocabulary, find_normal_form, is_unchanged_by_nfc, keeps_bytes

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [
    *sorted((ROOT / "fixtures" / "tokenizers").glob("toy_*/")),
    *some(sorted(ROOT.parent.glob("shared/tokenizers/*/")), 2),
]
KNOWN = {"toy_bpe", "deepseek-v3", "gpt-oss", "llama-3.1", "qwen2.5-coder", "qwen3"}
NORMAL = stored(__file__, "NORMAL")


def spells_itself(backend, data: bytes) -> bool:
    """Whether the tokens of a UTF-8 text are known to spell it, provided they have as many bytes."""
    return keeps_bytes(find_normal_form(backend), data)


def ids_of(backend: Tokenizer, text: str) -> Ids:
    return np.array(backend.encode(text, add_special_tokens=False).ids, np.int32)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_text_with_as_many_bytes_as_its_tokens_is_spelled_by_them(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    dice, spelled = random.Random(folder.name), 0
    for _ in range(examples(400, 1500)):
        text = "".join(dice.choices([*PIECES, *RARE[:2], *NORMAL, "word ", "\n\n"], k=dice.randrange(7)))
        data = text.encode()
        ids = ids_of(tokenizer.backend, text)
        if spells_itself(tokenizer.backend, data):
            spelled += 1
            if int(tokenizer.vocabulary.byte_lengths(ids).sum()) == len(data):
                assert tokenizer.vocabulary.bytes_of(ids) == data
    assert (spelled > 100) == (folder.name in KNOWN)


def test_what_counts_as_plain_is_left_alone_by_every_normal_form_and_joined_to_nothing() -> None:
    second = set()
    for point in range(sys.maxunicode + 1):
        parts = unicodedata.decomposition(chr(point)).split()
        if parts and not parts[0].startswith("<") and len(parts) == 2:
            second.add(chr(int(parts[1], 16)))
    second |= {
        chr(point) for point in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))
    }  # parts of Korean syllables
    plain = [
        character
        for character in map(chr, range(sys.maxunicode + 1))
        if not "\ud800" <= character <= "\udfff" and is_unchanged_by_nfc(character.encode())
    ]
    assert len(plain) > 40_000
    for character in plain:
        assert unicodedata.normalize("NFC", character) == character
        assert unicodedata.combining(character) == 0
        assert character not in second
    assert all(map(is_unchanged_by_nfc, (c.encode() for c in "aé„“→✓─世、かが한🙂👩\u200d💻Ж\ufe0f（")))
    assert not any(
        map(is_unchanged_by_nfc, (c.encode() for c in "\u0301\u212b\u2000\u3099\u1161\u0f71\u0340\ufb1d"))
    )
    assert is_unchanged_by_nfc(b"")
    assert not is_unchanged_by_nfc("世".encode() * 20_000)  # so much that comparing is as fast


def small(**changes: object) -> Tokenizer:
    """A tokenizer of bytes, with what is changed of it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    if changes.get("bytes"):
        del vocabulary[alphabet[-1]]
    model = {
        name: changes[name] for name in ("unk_token", "byte_fallback", "end_of_word_suffix") if name in changes
    }
    backend = Tokenizer(models.BPE(vocab={**vocabulary, "<unk>": 300}, merges=[], **model))  # type: ignore[arg-type]
    backend.normalizer = changes.get("normalizer")  # type: ignore[assignment]
    prefixed = bool(changes.get("prefixed"))
    backend.pre_tokenizer = changes.get("cut") or pre_tokenizers.ByteLevel(
        add_prefix_space=prefixed, use_regex=False
    )  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()
    for content in changes.get("added", ()):  # type: ignore[attr-defined]
        backend.add_special_tokens([AddedToken(content, special=True, normalized=bool(changes.get("normalized")))])
    return backend


@pytest.mark.parametrize(
    ("changes", "is_sure"),
    [
        ({}, True),
        ({"normalizer": normalizers.NFC()}, True),
        ({"normalizer": normalizers.Sequence([normalizers.NFC()])}, True),
        ({"added": ["<|end|>", "<｜User｜>"]}, True),
        ({"normalizer": normalizers.NFKC()}, False),
        ({"normalizer": normalizers.Lowercase()}, False),
        ({"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a", "b")])}, False),
        ({"normalizer": normalizers.NFC(), "added": ["<e\u0301>"]}, False),
        ({"prefixed": True}, False),
        ({"unk_token": "<unk>"}, False),
        ({"byte_fallback": True}, False),
        ({"end_of_word_suffix": "</w>"}, False),
        ({"bytes": True}, False),
        ({"added": ["é"]}, False),
        ({"added": ["Ġ"]}, False),
        ({"added": ["a b"]}, False),
        ({"added": ["\u2581"]}, False),
        ({"added": ["\n\n"]}, False),
        ({"cut": pre_tokenizers.Whitespace()}, False),
        (
            {
                "cut": pre_tokenizers.Sequence(
                    [pre_tokenizers.Metaspace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
                )
            },
            False,
        ),
    ],
)
def test_only_tokenizers_whose_parts_are_all_known_spell_a_text_for_sure(
    changes: dict[str, object], is_sure: bool
) -> None:
    backend = small(**changes)
    assert spells_itself(backend, "Plain – text".encode()) == is_sure
    if not is_sure:
        return
    vocabulary = Vocabulary(backend)
    dice = random.Random(str(changes))
    for _ in range(300):
        text = "".join(
            dice.choices(["a", " ", "é", "世", "<|end|>", "<｜User｜>", "\u0301", "\0"], k=dice.randrange(6))
        )
        ids = ids_of(backend, text)
        if spells_itself(backend, text.encode()) and int(vocabulary.byte_lengths(ids).sum()) == len(text.encode()):
            assert vocabulary.bytes_of(ids) == text.encode()


def test_a_text_that_nfc_changes_is_not_known_to_be_spelled() -> None:
    backend = small(normalizer=normalizers.NFC())
    assert not spells_itself(backend, "e\u0301".encode())
    assert spells_itself(small(), "e\u0301".encode())
    turned = "q\u0307\u0323"  # the marks change places, and there are as many bytes as before
    assert unicodedata.normalize("NFC", turned) == "q\u0323\u0307"
    assert not spells_itself(backend, turned.encode())


def test_a_tokenizer_with_a_part_that_is_code_says_nothing_of_itself() -> None:
    class Cut:
        def pre_tokenize(self, text: object) -> None:
            return None

    backend = small(cut=pre_tokenizers.PreTokenizer.custom(Cut()))
    assert not spells_itself(backend, b"x")
