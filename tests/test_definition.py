"""Definitions in the notation that loads fastest, and excerpts of them: the same tokenizer, stored for one that is
used again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.test_start import REAL, SHARED, TEXTS, TOYS, damage, held
from tests.test_start import folder as folder
from tests.tiers import examples, some
from tests.world import TOY
from tito_audit.errors import TokenizerError
from tito_audit.tokens import load
from tito_audit.tokens.cache import Excerpts, LazyBackend, Tables, compact_definition, compact_json, excerpt_parts
from tito_audit.tokens.encoders import FastEncoder, probe_texts, well_formed
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.vocab import Entries, find_normal_form

LOADS_ANEW = True


def run(tokenizer: Path = TOY, *, fast: bool = False) -> list[list[int]]:
    """The ids of texts in a run of its own, by the fast encoder too."""
    loaded = load_tokenizer(str(tokenizer))
    ids = [ids.tolist() for ids in loaded.encode_batch(TEXTS)]
    if fast:
        assert loaded.use_fast(True)
        assert [ids.tolist() for ids in loaded.encode_fast_batch(TEXTS)] == ids
    loaded.save()
    return ids


def assert_same(backend: Tokenizer, texts: list[str]) -> None:
    """Both libraries load the same tokenizer from the compact definition as from the library's own."""
    own = backend.to_str()
    compact = compact_json(own)
    assert compact is not None
    assert Tokenizer.from_buffer(compact).to_str() == own
    ours, theirs = FastEncoder(backend, compact), FastEncoder(backend)
    for ids, own_ids in zip(ours.encode_batch(texts), theirs.encode_batch(texts), strict=True):
        assert np.array_equal(ids, own_ids)


@pytest.mark.parametrize("name", ["toy_bpe", "toy_metaspace"])
def test_a_compact_definition_is_that_of_the_same_tokenizer(name):
    tokenizer = load_tokenizer(str(TOYS / name))
    assert_same(tokenizer.backend, [*TEXTS, *probe_texts(tokenizer.vocabulary)])


@pytest.mark.shared
@pytest.mark.skipif(not REAL, reason=f"no tokenizer folders at {SHARED}")
@pytest.mark.parametrize("name", some(REAL[::-1], 1))
def test_a_compact_definition_is_that_of_the_same_real_tokenizer(name):
    tokenizer = load_tokenizer(str(SHARED / name))
    assert_same(tokenizer.backend, [*TEXTS, *probe_texts(tokenizer.vocabulary)])


@pytest.mark.parametrize(
    "merges", [[("a", "b c")], [("a b", "c")], [("#version", "b")], [("a", "b"), ("#version", "b")], []]
)
def test_merges_that_one_text_cannot_hold_stay_pairs(merges):
    words = {word for pair in merges for word in (*pair, "".join(pair))} | {"a", "b"}
    vocabulary = {word: number for number, word in enumerate(sorted(words, reverse=True))}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    own = backend.to_str()
    assert orjson.loads(compact_json(own))["model"]["merges"] == [list(pair) for pair in merges]
    assert Tokenizer.from_buffer(compact_json(own)).to_str() == own


def test_a_model_that_is_not_bpe_or_skips_merges_has_no_compact_definition():
    vocabulary = {"a": 0, "b": 1, "ab": 2}
    assert compact_json(Tokenizer(models.BPE(vocabulary, [("a", "b")])).to_str()) is not None
    assert compact_json(Tokenizer(models.BPE(vocabulary, [("a", "b")], dropout=0.1)).to_str()) is None
    assert compact_json(Tokenizer(models.WordLevel(vocabulary, unk_token="a")).to_str()) is None
    assert compact_json(Tokenizer(models.Unigram([("a", -0.1), ("b", -1.0)], 0)).to_str()) is None


def test_a_tokenizer_that_encodes_fast_again_is_loaded_from_its_definition(folder, monkeypatch):
    ids = run(fast=True)
    assert ".definition" not in held(folder)  # used once
    assert run() == ids
    assert ".definition" not in held(folder)  # a small log
    assert run(fast=True) == ids
    assert ".definition" in held(folder)
    before = held(folder)
    real = load.read_file

    def read(file, limit):
        assert file.name != "tokenizer.json", "the file was read"
        return real(file, limit)

    monkeypatch.setattr(load, "read_file", read)
    assert run() == ids == run(fast=True)
    assert held(folder) | {".notes": b""} == before | {".notes": b""}


def test_a_tokenizer_that_was_not_used_gets_no_definition(folder):
    run()
    load_tokenizer(str(TOY)).save()
    assert ".definition" not in held(folder)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("kind", "fast"), [("tables", False), ("definition", True), ("merges", False)])
def test_a_file_of_which_a_byte_is_another_is_made_again(kind, fast, share, folder):
    ids = run()
    run(fast=fast)
    before = held(folder)
    (file,) = folder.glob(f"*.{kind}")
    damage(file, int(share * (file.stat().st_size - 1)))
    assert run(fast=fast) == ids
    assert held(folder) == before


def test_a_definition_that_the_library_would_write_otherwise_is_not_stored(folder, monkeypatch):
    ids = run()

    def wrong(definition: str) -> bytes:
        whole = orjson.loads(definition)
        whole["model"]["merges"] = whole["model"]["merges"][::-1]
        return orjson.dumps(whole)

    monkeypatch.setattr("tito_audit.tokens.cache.compact_json", wrong)
    assert run(fast=True) == ids
    (file,) = folder.glob("*.definition")
    assert b'"parts":{"json":0}' in file.read_bytes()  # not tried again
    monkeypatch.undo()
    monkeypatch.setenv("TITO_AUDIT_CACHE", str(folder))
    assert run(fast=True) == ids
    assert b'"parts":{"json":0}' in file.read_bytes()


def test_tokens_added_after_loading_are_known_to_the_fast_encoder_and_not_stored(folder):
    for fast in (False, True, True):
        run(fast=fast)
    before = held(folder)
    for _ in range(2):
        tokenizer = load_tokenizer(str(TOY))
        tokenizer.backend.add_tokens([tokenizers.AddedToken("<|mine|>", normalized=False)])
        assert tokenizer.use_fast(True)
        (ids,) = tokenizer.encode_fast_batch(["a<|mine|>b"])
        assert ids.tolist() == tokenizer.backend.encode("a<|mine|>b").ids
        assert tokenizer.backend.token_to_id("<|mine|>") in ids
        tokenizer.save()
        assert held(folder) == before


def test_of_a_backend_that_may_have_changed_the_definition_is_unknown():
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    lazy = LazyBackend(lambda: backend)
    assert compact_definition(backend) is None
    assert compact_definition(lazy) is None  # not loaded yet
    assert lazy.get_vocab_size() == 3
    assert compact_definition(lazy) == {"json": compact_json(backend.to_str())}
    for change in ("add_tokens", "add_special_tokens", "enable_truncation", "enable_padding", "train"):
        lazy = LazyBackend(lambda: backend)
        assert getattr(lazy, change) is not None
        assert compact_definition(lazy) is None


# Excerpts


def excerpts_of(backend: Tokenizer) -> Excerpts | None:
    """The excerpts of a tokenizer, without the limit on how much they encode."""
    lazy = LazyBackend(lambda: backend)
    assert lazy.get_vocab_size()
    entries, form = Entries.read(backend), find_normal_form(backend)
    parts = excerpt_parts(lazy, entries, form)
    if not parts:
        return None
    excerpts = Excerpts(Tables(entries, {}, form, (), None), parts)
    excerpts._left = 1 << 60
    return excerpts


def assert_excerpts_encode_the_same(excerpts: Excerpts, backend: Tokenizer, texts: list[str]) -> None:
    """Each text alone and all together; with control tokens around them, where the tokenizer puts some."""
    for some_texts in (*([text] for text in texts), texts):
        excerpt = excerpts.find(some_texts)
        if excerpt is None:  # NFC would change a text
            assert backend.normalizer.normalize_str("\0".join(some_texts)) != "\0".join(some_texts)
            continue
        for text in some_texts:
            for special in (False, True):
                ids = backend.encode(text, add_special_tokens=special).ids
                assert excerpt.encode(text, add_special_tokens=special).ids == ids
        batch = excerpt.encode_batch_fast(some_texts, add_special_tokens=False)
        assert [each.ids for each in batch] == [
            each.ids for each in backend.encode_batch_fast(some_texts, add_special_tokens=False)
        ]


ALPHABETS = ["ab", "aab \n", "<|im_start>", "Skinny here", "0189 .", "éüß中文🎉e\u0301\u0338>"]


def written_by(alphabet: str) -> st.SearchStrategy[str]:
    pieces = [*alphabet, "<|im_start|>", "<|im_end|>", "  ", "the ", "ing"]
    return st.lists(st.sampled_from(pieces), max_size=40).map("".join)


@settings(max_examples=examples(30, 600))
@given(texts=st.lists(st.one_of(st.text(max_size=30), *map(written_by, ALPHABETS)), min_size=1, max_size=4))
def test_an_excerpt_encodes_the_texts_that_it_is_for_as_the_whole_does(texts):
    backend = Tokenizer.from_file(str(TOY / "tokenizer.json"))
    excerpts = excerpts_of(backend)
    assert excerpts is not None
    assert_excerpts_encode_the_same(excerpts, backend, list(map(well_formed, texts)))


@pytest.mark.shared
@pytest.mark.skipif(not REAL, reason=f"no tokenizer folders at {SHARED}")
@pytest.mark.parametrize("name", some(REAL[::-1], 1))
def test_an_excerpt_of_a_real_tokenizer_encodes_as_the_whole_does(name):
    tokenizer = load_tokenizer(str(SHARED / name))
    excerpts = excerpts_of(tokenizer.backend)
    assert (excerpts is not None) == (tokenizer.normal_form is not None)
    if excerpts is not None:
        texts = list(map(well_formed, [*TEXTS, *probe_texts(tokenizer.vocabulary)]))
        assert_excerpts_encode_the_same(excerpts, tokenizer.backend, texts[:: examples(5, 1)])


def bytes_backend(merges: list[tuple[str, str]], **model: object) -> Tokenizer:
    """A byte-level tokenizer with these merges, and an added token."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *dict.fromkeys(left + right for left, right in merges)]
    backend = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, merges, **model))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<x>", normalized=False)])
    return backend


def test_an_excerpt_leaves_out_what_the_texts_do_not_hold():
    backend = bytes_backend([("a", "b"), ("ab", "c"), ("b", "c"), ("c", "d"), ("ab", "ab")])
    excerpts = excerpts_of(backend)
    assert excerpts is not None
    excerpt = excerpts.find(["abab", "<x>bcb"])
    assert excerpt.get_vocab().keys() - backend.get_vocab().keys() == set()
    assert backend.get_vocab().keys() - excerpt.get_vocab().keys() == {"abc", "cd"}
    assert_excerpts_encode_the_same(excerpts, backend, ["abcd", "abab<x>", "bcbcd", "<x>", "", "ab"])


def test_the_first_excerpt_is_made_for_all_expected_texts_and_serves_what_it_holds():
    backend = Tokenizer.from_file(str(TOY / "tokenizer.json"))
    excerpts = excerpts_of(backend)
    texts = ["Hello there", "another text", "e\u0301", "über", "zebra"]
    first = excerpts.find(texts[:1], texts[1:4])
    assert first.get_vocab_size() < backend.get_vocab_size()
    for text in (*texts[:2], texts[3], "there", "", "another"):
        assert excerpts.find([text]) is first
        assert first.encode(text).ids == backend.encode(text).ids
    assert excerpts.find([]) is first
    assert excerpts.find(["zebra"]) is not first
    assert_excerpts_encode_the_same(excerpts, backend, texts)


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_a_word_of_the_vocabulary_that_no_merges_make_is_encoded_as_the_whole_does(ignore_merges):
    backend = bytes_backend([("a", "b"), ("ab", "c"), ("b", "d")], ignore_merges=ignore_merges)
    assert_excerpts_encode_the_same(excerpts_of(backend), backend, ["abd abc abdabc", "abd", "abc"])


def test_where_an_excerpt_could_differ_there_is_none():
    single = bytes_backend([("a", "b")])
    single.add_tokens([AddedToken("ab", single_word=True, normalized=False)])
    assert excerpts_of(single) is None
    added = bytes_backend([("a", "b"), ("ab", "a")])
    added.add_tokens([AddedToken("ab", normalized=False)])
    assert excerpts_of(added) is None
    assert excerpts_of(bytes_backend([("a", "b")], dropout=0.1)) is None
    assert excerpts_of(bytes_backend([("a", "b")], unk_token="a")) is None
    prefixed = bytes_backend([("a", "b")])
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert excerpts_of(prefixed) is None
    assert excerpts_of(Tokenizer.from_file(str(TOYS / "toy_metaspace" / "tokenizer.json"))) is None


def test_the_third_run_on_a_small_log_does_without_the_library_of_a_large_one_loads_it(folder):
    ids = run()
    assert ".merges" not in held(folder)  # used once
    assert run() == ids
    before = held(folder)
    assert ".merges" in before
    tokenizer = load_tokenizer(str(TOY))
    assert [each.tolist() for each in tokenizer.encode_batch(TEXTS)] == ids
    assert not tokenizer.backend.is_loaded
    for number in range(30):
        text = f"{number} Hello there {number}"
        assert tokenizer.encode(text).tolist() == Tokenizer.from_file(str(TOY / "tokenizer.json")).encode(text).ids
    assert tokenizer.backend.is_loaded
    tokenizer.save()
    assert held(folder) == before
    for text, fast in (("word " * 20_000, False), ("word", True)):
        tokenizer = load_tokenizer(str(TOY))
        assert not fast or tokenizer.use_fast(True)
        assert len(tokenizer.encode(text))
        assert tokenizer.backend.is_loaded


# The self-check


def checks(monkeypatch) -> list[str]:
    """The encoders that were checked from now on."""
    seen: list[str] = []

    def watched(reference, fast, texts):
        seen.append(fast.name)

    monkeypatch.setattr("tito_audit.tokens.tokenizer.find_disagreement", watched)
    return seen


def test_a_build_of_the_fast_encoder_is_checked_once_for_a_tokenizer(folder, monkeypatch):
    checked = checks(monkeypatch)
    run(fast=True)
    assert checked == ["fastokens"]
    run(fast=True)
    assert checked == ["fastokens"]
    monkeypatch.setattr("tito_audit.tokens.encoders._hash_files", lambda folder: "another")
    run(fast=True)
    assert checked == ["fastokens"] * 2
    run(TOYS / "toy_metaspace", fast=True)
    assert checked == ["fastokens"] * 3


def test_a_fast_encoder_that_failed_the_check_is_checked_again(folder, monkeypatch):
    monkeypatch.setattr("tito_audit.tokens.tokenizer.find_disagreement", lambda *_: "it disagreed")
    for _ in range(2):
        tokenizer = load_tokenizer(str(TOY))
        with pytest.raises(TokenizerError, match="it disagreed"):
            tokenizer.use_fast(True)
        tokenizer.save()


def test_a_fast_encoder_that_was_wrong_later_is_checked_again(folder, monkeypatch):
    run(fast=True)
    checked = checks(monkeypatch)
    monkeypatch.setattr(FastEncoder, "encode_batch", lambda self, texts: [np.zeros(1, np.int32) for _ in texts])
    tokenizer = load_tokenizer(str(TOY))
    assert tokenizer.use_fast(True)
    assert not checked
    assert not tokenizer.check_fast(["Hello there"])
    tokenizer.save()
    monkeypatch.undo()
    monkeypatch.setenv("TITO_AUDIT_CACHE", str(folder))
    checked = checks(monkeypatch)
    run(fast=True)
    assert checked == ["fastokens"]
