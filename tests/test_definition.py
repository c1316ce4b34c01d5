"""Definitions in the notation that loads fastest: the same tokenizer, stored for one that is used again."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import orjson
import pytest
import tokenizers
from tokenizers import Tokenizer, models

from tests.test_start import damage, held
from tests.test_start import folder as folder
from tests.tiers import some
from tito_audit.errors import TokenizerError
from tito_audit.tokens import load
from tito_audit.tokens.cache import LazyBackend, compact, definition_of
from tito_audit.tokens.encoders import FastEncoder, probes
from tito_audit.tokens.load import load_tokenizer

LOADS_ANEW = True

ROOT = Path(__file__).resolve().parents[1]
TOYS = ROOT / "fixtures" / "tokenizers"
TOY = TOYS / "toy_bpe"
SHARED = Path(
    os.environ.get("TITO_AUDIT_TOKENIZERS") or Path(__file__).resolve().parents[2] / "shared" / "tokenizers"
)
REAL = sorted(path.parent.name for path in SHARED.glob("*/tokenizer.json"))
TEXTS = ["Skinny <|im_start|>user\nHello there<|im_end|>\n", "über 中文 🎉\n\n", "", "a\ud83db", "x" * 300]


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
    found = compact(own)
    assert found is not None
    assert Tokenizer.from_buffer(found).to_str() == own
    mine, theirs = FastEncoder(backend, found), FastEncoder(backend)
    for one, other in zip(mine.encode_batch(texts), theirs.encode_batch(texts), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("name", ["toy_bpe", "toy_metaspace"])
def test_a_compact_definition_is_that_of_the_same_tokenizer(name):
    tokenizer = load_tokenizer(str(TOYS / name))
    assert_same(tokenizer.backend, [*TEXTS, *probes(tokenizer.vocabulary)])


@pytest.mark.shared
@pytest.mark.skipif(not REAL, reason=f"no tokenizer folders at {SHARED}")
@pytest.mark.parametrize("name", some(REAL[::-1], 1))
def test_a_compact_definition_is_that_of_the_same_real_tokenizer(name):
    tokenizer = load_tokenizer(str(SHARED / name))
    assert_same(tokenizer.backend, [*TEXTS, *probes(tokenizer.vocabulary)])


@pytest.mark.parametrize(
    "merges", [[("a", "b c")], [("a b", "c")], [("#version", "b")], [("a", "b"), ("#version", "b")], []]
)
def test_merges_that_one_text_cannot_hold_stay_pairs(merges):
    words = {word for pair in merges for word in (*pair, "".join(pair))} | {"a", "b"}
    vocabulary = {word: number for number, word in enumerate(sorted(words, reverse=True))}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    own = backend.to_str()
    assert orjson.loads(compact(own))["model"]["merges"] == [list(pair) for pair in merges]
    assert Tokenizer.from_buffer(compact(own)).to_str() == own


def test_a_model_that_is_not_bpe_or_skips_merges_has_no_compact_definition():
    vocabulary = {"a": 0, "b": 1, "ab": 2}
    assert compact(Tokenizer(models.BPE(vocabulary, [("a", "b")])).to_str()) is not None
    assert compact(Tokenizer(models.BPE(vocabulary, [("a", "b")], dropout=0.1)).to_str()) is None
    assert compact(Tokenizer(models.WordLevel(vocabulary, unk_token="a")).to_str()) is None
    assert compact(Tokenizer(models.Unigram([("a", -0.1), ("b", -1.0)], 0)).to_str()) is None


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


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.5, 1.0])
def test_a_damaged_definition_is_made_again(share, folder):
    ids = run()
    run(fast=True)
    before = held(folder)
    (file,) = folder.glob("*.definition")
    damage(file, int(share * (file.stat().st_size - 1)))
    assert run(fast=True) == ids
    assert held(folder) == before


def test_a_definition_that_the_library_would_write_otherwise_is_not_stored(folder, monkeypatch):
    ids = run()

    def wrong(definition: str) -> bytes:
        whole = orjson.loads(definition)
        whole["model"]["merges"] = whole["model"]["merges"][::-1]
        return orjson.dumps(whole)

    monkeypatch.setattr("tito_audit.tokens.cache.compact", wrong)
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
    assert definition_of(backend) is None
    assert definition_of(lazy) is None  # not loaded yet
    assert lazy.get_vocab_size() == 3
    assert definition_of(lazy) == compact(backend.to_str())
    for change in ("add_tokens", "add_special_tokens", "enable_truncation", "enable_padding", "train"):
        lazy = LazyBackend(lambda: backend)
        assert getattr(lazy, change) is not None
        assert definition_of(lazy) is None


# The self-check


def checks(monkeypatch) -> list[str]:
    """The encoders that were checked from now on."""
    seen: list[str] = []

    def watched(reference, fast, texts):
        seen.append(fast.name)

    monkeypatch.setattr("tito_audit.tokens.tokenizer.disagreement", watched)
    return seen


def test_a_build_of_the_fast_encoder_is_checked_once_for_a_tokenizer(folder, monkeypatch):
    checked = checks(monkeypatch)
    run(fast=True)
    assert checked == ["fastokens"]
    run(fast=True)
    assert checked == ["fastokens"]
    monkeypatch.setattr("tito_audit.tokens.encoders._build", lambda folder: "another")
    run(fast=True)
    assert checked == ["fastokens"] * 2
    run(TOYS / "toy_metaspace", fast=True)
    assert checked == ["fastokens"] * 3


def test_a_fast_encoder_that_failed_the_check_is_checked_again(folder, monkeypatch):
    monkeypatch.setattr("tito_audit.tokens.tokenizer.disagreement", lambda *_: "it disagreed")
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
