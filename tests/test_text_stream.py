"""Ids to text piece by piece: together the pieces are the whole text, for every tokenizer and every cut."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tests.tiers import examples, some
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.text_stream import TextStream, decode
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Prefix, Vocabulary

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("TITO_AUDIT_TOKENIZERS") or ROOT.parent / "shared" / "tokenizers")
TOYS = sorted((ROOT / "fixtures" / "tokenizers").glob("toy_*"))
REAL = sorted(path.parent for path in SHARED.glob("*/tokenizer.json"))
TEXTS = (
    "Hello, world.\n\n  def f(x):\n\treturn x\n",
    "emoji 😀🦜🐙, 👩‍👩‍👧 flags 🇫🇷; combining é ñ; 中文字 العربية",
    '<tool_call>\n{"name": "f", "arguments": {"city": "Zürich"}}\n</tool_call>',
    "  two spaces first, and last  ",
    "�� already broken �",
)


@cache
def loaded_from(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder))


@cache
def prepending(prefix: Prefix) -> Vocabulary:
    """A small vocabulary with byte fallback of a tokenizer that prepends spaces in one of the ways there are."""
    words = ["<s>", "▁", "▁▁", "▁a", "a", "b", "▁b", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    if prefix is Prefix.ALWAYS:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        scheme = {Prefix.ALWAYS_UNLESS_SPACE: "always", Prefix.FIRST_UNLESS_SPACE: "first"}.get(prefix, "never")
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    vocabulary = Vocabulary(backend)
    assert vocabulary.prefix is prefix
    return vocabulary


def in_pieces(vocabulary: Vocabulary, ids: list[int], cuts: list[int], **choices) -> list[str]:
    """The text of ids that are fed in parts of these sizes, then one by one."""
    stream, pieces, at = TextStream(vocabulary, **choices), [], 0
    for size in [*cuts, *[1] * len(ids)]:
        pieces.append(stream.feed(ids[at : at + size]))
        at += size
    return [*pieces, stream.close()]


@pytest.mark.parametrize("folder", [*TOYS, *some(REAL, 2)], ids=lambda folder: folder.name)
@pytest.mark.parametrize("special", [True, False])
def test_pieces_add_up_to_the_whole_text(folder: Path, special: bool) -> None:
    loaded = loaded_from(folder)
    texts = (*TEXTS, *loaded.special_tokens.values(), "".join([*TEXTS, *loaded.special_tokens.values()]))
    for text in texts:
        ids = loaded.encode(text)
        pieces = in_pieces(loaded.vocabulary, ids.tolist(), [], special=special)
        whole = decode(loaded.vocabulary, ids, special=special)
        assert "".join(pieces) == whole
        if special:
            assert whole == loaded.vocabulary.text(ids)


@pytest.mark.parametrize("folder", [*TOYS, *some(REAL, 2)], ids=lambda folder: folder.name)
def test_random_ids_in_random_pieces_add_up_to_the_whole_text(folder: Path) -> None:
    vocabulary = loaded_from(folder).vocabulary
    dice = np.random.default_rng(7)
    special = np.array(sorted(vocabulary.special_ids))
    for _ in range(examples(4, 100)):
        ids = dice.integers(-1, vocabulary.size + 1, size=int(dice.integers(0, 200)), dtype=np.int32)
        if len(special):
            where = dice.random(len(ids)) < 0.1
            ids[where] = dice.choice(special, int(where.sum()))
        cuts = dice.integers(0, 5, size=50).tolist()
        for shown in (True, False):
            pieces = in_pieces(vocabulary, ids.tolist(), cuts, special=shown)
            assert "".join(pieces) == decode(vocabulary, ids, special=shown)


@pytest.mark.parametrize("prefix", list(Prefix))
@given(ids=st.lists(st.one_of(st.integers(0, 8), st.integers(0, 263)), max_size=12), special=st.booleans())
def test_spaces_that_a_tokenizer_prepends_are_left_out_of_the_pieces(prefix, ids, special) -> None:
    vocabulary = prepending(prefix)
    whole = decode(vocabulary, ids, special=special)
    assert "".join(in_pieces(vocabulary, ids, [], special=special)) == whole
    if special:
        assert whole == vocabulary.text(np.array(ids, np.int32))


@pytest.mark.parametrize("folder", some(REAL, 2), ids=lambda folder: folder.name)
def test_the_whole_text_is_what_the_library_decodes(folder: Path) -> None:
    loaded = loaded_from(folder)
    for text in TEXTS:
        ids = loaded.encode(text).tolist()
        for special in (True, False):
            assert decode(loaded.vocabulary, ids, special=special) == loaded.backend.decode(
                ids, skip_special_tokens=not special
            )


@pytest.mark.parametrize("folder", [*TOYS, *some(REAL, 2)], ids=lambda folder: folder.name)
def test_a_piece_never_ends_within_a_character_and_holds_back_nothing_else(folder: Path) -> None:
    loaded = loaded_from(folder)
    ids = loaded.encode("a😀b 中c").tolist()
    stream, given_ids, shown = TextStream(loaded.vocabulary), [], ""
    for token_id in ids:
        given_ids.append(token_id)
        shown += stream.feed([token_id])
        so_far = loaded.vocabulary.text(np.array(given_ids, np.int32))
        assert shown == so_far.rstrip("�"), "an incomplete character is all that is held back"


def test_an_end_token_that_comes_last_is_left_out_and_one_within_is_not() -> None:
    loaded = load_toy()
    end = loaded.eos_ids[0]
    mark = loaded.vocabulary.piece(end)
    word = loaded.encode("hello").tolist()
    for ids, text in (
        ([*word, end], "hello"),
        ([*word, end, *word], f"hello{mark}hello"),
        ([*word, end, end], f"hello{mark}"),
        ([end], ""),
    ):
        assert "".join(in_pieces(loaded.vocabulary, ids, [], end_ids={end})) == text
        assert decode(loaded.vocabulary, ids, end_ids={end}) == text
    stream = TextStream(loaded.vocabulary, end_ids={end})
    assert stream.feed(word) == "hello"
    assert stream.feed([end]) == ""
    assert stream.close() == ""


@given(text=st.text("abST ", max_size=30), stop=st.lists(st.text("abST ", max_size=4), max_size=3), data=st.data())
def test_a_text_ends_at_the_first_stop_text_however_it_is_cut(text, stop, data) -> None:
    loaded = load_toy()
    ids = loaded.encode(text).tolist()
    whole = decode(loaded.vocabulary, ids, stop=stop)
    cuts = data.draw(st.lists(st.integers(0, 4), max_size=8))
    assert "".join(in_pieces(loaded.vocabulary, ids, cuts, stop=stop)) == whole
    cut = decode(loaded.vocabulary, ids, stop=stop, keep_stop=True)
    assert "".join(in_pieces(loaded.vocabulary, ids, cuts, stop=stop, keep_stop=True)) == cut
    assert cut == text or any(cut == whole + stop_text for stop_text in stop if stop_text)
    assert all(stop_text not in whole for stop_text in stop if stop_text)
    assert text.startswith(whole)
    assert (whole == text) == (not any(stop_text in text for stop_text in stop if stop_text))


def load_toy() -> Tokenizer:
    return loaded_from(ROOT / "fixtures" / "tokenizers" / "toy_bpe")


def test_what_may_become_a_stop_text_is_held_back_and_given_once_it_does_not() -> None:
    loaded = load_toy()
    stream = TextStream(loaded.vocabulary, stop=["STOP", "TA"])
    assert decode(loaded.vocabulary, loaded.encode("STAR").tolist(), stop=["STAR", "TA"]) == "S"
    fed = [stream.feed(loaded.encode(piece).tolist()) for piece in ("a S", "T", "O", "X ST", "A b", " more")]
    assert fed == ["a ", "", "", "STOX ", "S", ""]
    assert stream.stopped
    assert stream.close() == ""


def test_the_time_is_linear_in_the_number_of_ids() -> None:
    loaded = load_toy()
    ids = loaded.encode("some words 😀 and more of them ").tolist() * 2000

    def seconds(count: int) -> float:
        stream = TextStream(loaded.vocabulary, stop=["never seen"])
        begun = time.process_time()
        for token_id in ids[:count]:
            stream.feed([token_id])
        return time.process_time() - begun

    # Whatever else the machine does slows one try or another, and never speeds one up.
    tries = ((seconds(20_000), seconds(2000)) for _ in range(10))
    assert any(long < 40 * short for long, short in tries), "ten times the ids take about ten times as long"
