"""Vocabularies, encoding and loading."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tests import command
from tests.tables import stored
from tests.test_start import REAL, SHARED, TOYS
from tests.tiers import examples, some
from tests.world import ROOT
from tito_audit.errors import TokenizerError
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Prefix, Vocabulary

LOADS_ANEW = True

TEXTS = stored(__file__, "TEXTS")


@functools.cache
def real(name: str) -> Tokenizer:
    return command.loaded(SHARED / name)


@functools.cache
def toy(name: str = "toy_bpe") -> Tokenizer:
    return load_tokenizer(str(TOYS / name))


def normalized(tokenizer: Tokenizer, text: str) -> str:
    """The text after the tokenizer's Unicode normalisation; U+2581 is left to other tests."""
    return unicodedata.normalize("NFC", text) if "NFC" in repr(tokenizer.backend.normalizer) else text


@pytest.mark.shared
@pytest.mark.skipif(not REAL, reason=f"no tokenizer folders at {SHARED}")
@pytest.mark.parametrize("name", some(REAL[::-1], 1))
def test_the_bytes_of_all_pieces_joined_are_the_text(name):
    tokenizer = real(name)
    vocabulary = tokenizer.vocabulary
    for text in [*TEXTS, "".join(TEXTS)]:
        if name == "gemma-3":
            text = text.replace("▁", "_")  # its own sign for a space
        ids = tokenizer.encode(text)
        expected = normalized(tokenizer, text).encode()
        assert vocabulary.bytes_of(ids) == expected
        assert b"".join(vocabulary.token_bytes(i) for i in ids.tolist()) == expected
        assert int(vocabulary.byte_lengths(ids).sum()) == len(expected)
        assert vocabulary.text(ids) == expected.decode()
        assert vocabulary.known(ids).all()


@pytest.mark.shared
@pytest.mark.skipif(not REAL, reason=f"no tokenizer folders at {SHARED}")
@pytest.mark.parametrize("name", some(REAL[::-1], 1))
def test_every_entry_is_found_again_by_its_bytes(name):
    vocabulary = real(name).vocabulary
    ids = np.arange(vocabulary.size, dtype=np.int32)
    for token_id in ids[vocabulary.known(ids)][::1999].tolist():
        assert token_id in vocabulary.ids_of_bytes(vocabulary.token_bytes(token_id))
    assert vocabulary.ids_of_bytes(b"no token is spelled like this one") == ()


@pytest.mark.shared
@pytest.mark.skipif("gemma-3" not in REAL, reason=f"no gemma-3 tokenizer at {SHARED}")
def test_runs_of_white_space_that_gemma_lists_as_added_are_ordinary():
    tokenizer = real("gemma-3")
    vocabulary = tokenizer.vocabulary
    for text in ("\n", "\n\n", "\n\n\n\n", "\t", "  ", "     "):
        ids = tokenizer.encode(text)
        assert len(ids) == 1
        assert int(ids[0]) not in vocabulary.added_ids
        assert vocabulary.piece(int(ids[0])) == text
    assert tokenizer.encode("<end_of_turn>")[0] in vocabulary.special_ids
    assert tokenizer.encode("<table>")[0] in vocabulary.added_ids - vocabulary.special_ids


@pytest.mark.parametrize("name", ["toy_bpe", "toy_metaspace"])
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40))
@settings(max_examples=examples(60, 200), deadline=None)
def test_text_gives_back_any_text_that_was_encoded(name, text):
    tokenizer = toy(name)
    ids = tokenizer.encode(text)
    assert tokenizer.vocabulary.text(ids) == text
    assert tokenizer.encode(tokenizer.vocabulary.text(ids)).tolist() == ids.tolist()


@given(
    parts=st.lists(st.sampled_from(["<s>", "</s>", " ", "  ", "a", " Skinny", "\n", "é", "[INST] x"]), max_size=8)
)
def test_text_between_control_tokens_loses_exactly_the_spaces_that_were_prepended(parts):
    tokenizer = toy("toy_metaspace")
    text = "".join(parts)
    assert tokenizer.vocabulary.text(tokenizer.encode(text)) == text


def small(pre_tokenizer=None, normalizer=None) -> Tokenizer:
    """A vocabulary of single characters in which ▁ is a space, with one control token."""
    characters = ["<unk>", "▁", *"abc"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[], unk_token="<unk>")
    )
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.Replace("▁", " ")
    backend.add_special_tokens(["<s>"])
    return Tokenizer("small", backend, Vocabulary(backend))


@pytest.mark.parametrize(
    ("pre_tokenizer", "normalizer", "prefix"),
    [
        (pre_tokenizers.Metaspace(prepend_scheme="always"), None, Prefix.ALWAYS_UNLESS_SPACE),
        (pre_tokenizers.Metaspace(prepend_scheme="first"), None, Prefix.FIRST_UNLESS_SPACE),
        (pre_tokenizers.Metaspace(prepend_scheme="never"), None, Prefix.NEVER),
        (
            None,
            normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
            Prefix.ALWAYS,
        ),
        (None, normalizers.Replace(" ", "▁"), Prefix.NEVER),
    ],
)
@given(parts=st.lists(st.sampled_from(["a", "b", " ", "<s>"]), max_size=6))
@settings(max_examples=examples(20, 60), deadline=None)
def test_text_encodes_back_however_the_tokenizer_prepends(pre_tokenizer, normalizer, prefix, parts):
    tokenizer = small(pre_tokenizer, normalizer)
    assert tokenizer.vocabulary.prefix is prefix
    ids = tokenizer.encode("".join(parts))
    assert tokenizer.encode(tokenizer.vocabulary.text(ids)).tolist() == ids.tolist()


class OneByOne:
    """A vocabulary asked of the library entry by entry: what the arrays have to agree with."""

    def __init__(self, backend) -> None:
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self.literal = {i: t.content for i, t in added.items() if not t.content.replace("▁", " ").isspace()}
        self.special = {i for i in self.literal if added[i].special}
        steps = repr(backend.pre_tokenizer) + repr(backend.decoder)
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        alphabet = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
        self.alphabet = alphabet if "ByteLevel(" in steps else None

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes of an id; None for one that the vocabulary does not have."""
        token = self.backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None or token_id in self.literal:
            return None if token is None else self.literal[token_id].encode()
        if self.alphabet is not None:
            if set(token) <= self.alphabet.keys():
                return bytes(self.alphabet[character] for character in token)
            return token.encode()
        if decoders.ByteFallback().decode([token]) != token:
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    def agrees(self, vocabulary: Vocabulary, ids: np.ndarray) -> None:
        expected = [self.bytes_of(i) for i in ids.tolist()]
        data = [piece or b"" for piece in expected]
        assert vocabulary.known(ids).tolist() == [piece is not None for piece in expected]
        assert vocabulary.byte_lengths(ids).tolist() == list(map(len, data))
        assert vocabulary.control(ids).tolist() == [i in self.special for i in ids.tolist()]
        assert vocabulary.bytes_of(ids) == b"".join(data)
        assert vocabulary.special_ids == self.special
        assert vocabulary.added_ids == self.literal.keys()
        for start in range(0, len(ids), 997):
            some = ids[start : start + 7]
            assert vocabulary.bytes_of(some) == b"".join(data[start : start + 7])
            assert [vocabulary.token_bytes(i) for i in some.tolist()] == data[start : start + 7]
        for token_id, piece in list(zip(ids.tolist(), expected, strict=True))[::499]:
            assert piece is None or token_id in vocabulary.ids_of_bytes(piece)


BEYOND = [-1, -2, -(2**31), 2**31 - 1, 10**9]


@pytest.mark.shared
@pytest.mark.skipif(not REAL, reason=f"no tokenizer folders at {SHARED}")
@pytest.mark.parametrize("name", some(REAL[::-1], 1))
def test_every_entry_of_a_real_vocabulary_is_what_the_library_says_of_it(name):
    tokenizer = real(name)
    ids = np.array([*range(tokenizer.vocabulary.size + 40), *BEYOND], np.int32)
    OneByOne(tokenizer.backend).agrees(tokenizer.vocabulary, np.random.default_rng(0).permutation(ids))


ODD_ENTRIES = stored(__file__, "ODD_ENTRIES")


@given(
    entries=st.lists(st.sampled_from(ODD_ENTRIES) | st.text(max_size=4), min_size=1, max_size=12, unique=True),
    step=st.integers(1, 9),
    far=st.booleans(),
    added=st.lists(st.sampled_from(["<s>", "▁", "\n\n", "<▁x>", "🎉🎉", "é"]), max_size=3, unique=True),
    byte_level=st.booleans(),
)
@settings(max_examples=examples(60, 150), deadline=None)
def test_every_entry_of_an_odd_vocabulary_is_what_the_library_says_of_it(entries, step, far, added, byte_level):
    vocab = {text: number * step for number, text in enumerate(entries)}
    if far:
        vocab |= {"far away": 1_999_999_999, "out of reach": 2**32 - 1, "off": 900_000}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    if byte_level:
        backend.decoder = decoders.ByteLevel()
    backend.add_tokens(added[:1])
    backend.add_special_tokens(added[1:])
    ids = {i + more for i in vocab.values() for more in (-1, 0, 1)} | {*range(200), *BEYOND}
    ids = np.array(sorted(i for i in ids if -(2**31) <= i < 2**31), np.int32)
    OneByOne(backend).agrees(Vocabulary(backend), ids)


def test_vectorised_access_agrees_with_one_by_one_access():
    vocabulary = Vocabulary(toy().backend)
    ids = np.array([5, 5, -1, 2006, 2007, 10**9, -(2**31), 2**31 - 1, 300], np.int32)
    assert vocabulary.known(ids).tolist() == [True, True, False, True, False, False, False, False, True]
    single = [vocabulary.token_bytes(int(i)) for i in ids]
    assert vocabulary.byte_lengths(ids).tolist() == [len(data) for data in single]
    assert vocabulary.byte_lengths(ids).dtype == np.int64
    assert vocabulary.bytes_of(ids) == b"".join(single)
    empty = np.empty(0, np.int32)
    assert (vocabulary.bytes_of(empty), vocabulary.text(empty), len(vocabulary.known(empty))) == (b"", "", 0)


def test_ids_beyond_the_count_of_a_vocabulary_with_holes_are_known():
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 7}, merges=[]))
    vocabulary = Vocabulary(backend)
    ids = np.array([0, 1, 7, 8, 3], np.int32)
    assert vocabulary.known(ids).tolist() == [True, False, True, False, False]
    assert vocabulary.bytes_of(ids) == b"ab"
    assert vocabulary.ids_of_bytes(b"b") == (7,)


def test_pieces_show_bytes_that_are_no_text_and_ids_that_are_none():
    metaspace, bpe = toy("toy_metaspace").vocabulary, toy().vocabulary
    (byte,) = metaspace.ids_of_bytes(b"\xe4")
    assert metaspace.piece(byte) == "\\xe4"
    assert metaspace.piece(99_999) == "<unknown id 99999>"
    assert bpe.piece(-4) == "<unknown id -4>"
    assert bpe.piece(bpe.ids_of_bytes(b"\n")[0]) == "\n"
    assert [bpe.piece(i) for i in sorted(bpe.special_ids)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def test_several_ids_can_spell_the_same_bytes():
    backend = tokenizers.Tokenizer.from_str(toy("toy_metaspace").backend.to_str())
    vocabulary = Vocabulary(backend)
    assert len(vocabulary.ids_of_bytes(b"a")) == 2  # the letter and the byte


def test_words_have_a_whole_form_and_parts():
    vocabulary = toy().vocabulary
    for piece in (" Skinny", " Skin", "ny", " skinny", " funny", " understanding", " under"):
        assert vocabulary.ids_of_bytes(piece.encode())


def test_equal_texts_are_encoded_once(monkeypatch):
    tokenizer = load_tokenizer(str(TOYS / "toy_bpe"))
    tokenizer.encode_batch(["Hello there", "Hello there", "Skinny"])
    real_backend, tokenizer.backend = tokenizer.backend, None  # an encoding would now fail
    assert [len(ids) for ids in tokenizer.encode_batch(["Skinny", "Hello there", "Skinny"])] == [
        len(real_backend.encode(text, add_special_tokens=False).ids)
        for text in ("Skinny", "Hello there", "Skinny")
    ]


def test_the_cache_lets_the_least_recently_used_text_go():
    tokenizer = load_tokenizer(str(TOYS / "toy_bpe"))
    tokenizer.cached_characters = 40  # read when the first text is encoded
    for text in ("a" * 10, "b" * 10, "c" * 10, "d" * 10, "a" * 10, "e" * 10, "f" * 20):
        assert tokenizer.encode(text).tolist() == tokenizer.backend.encode(text).ids
    assert list(tokenizer._reference.cache) == ["c" * 10, "d" * 10, "a" * 10, "e" * 10]
    assert tokenizer._reference.cached_length == 40


def test_ids_are_int32_and_cannot_be_written_to():
    ids = toy().encode("Hello")
    assert ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1
    assert toy().encode("").dtype == np.int32


def test_lone_surrogates_encode_as_replacement_characters():
    assert toy().encode("a\ud83db").tolist() == toy().encode("a\ufffdb").tolist()
    assert toy().encode("\ud83d\ude00").tolist() == toy().encode("😀").tolist()


def test_nothing_is_truncated_padded_or_added(tmp_path):
    backend = tokenizers.Tokenizer.from_file(str(TOYS / "toy_metaspace" / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    assert (
        loaded.encode("one two three four five six").tolist()
        == toy("toy_metaspace").encode("one two three four five six").tolist()
    )
    assert loaded.chat_templates == {}


def test_end_tokens_come_from_the_settings_and_from_the_generation_settings(tmp_path):
    for file in (TOYS / "toy_bpe").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert load_tokenizer(str(tmp_path)).eos_ids == (2002,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2000, 2002]}')
    assert load_tokenizer(str(tmp_path)).eos_ids == (2002, 2000)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2000}')
    assert load_tokenizer(str(tmp_path)).eos_ids == (2002, 2000)


def test_settings_of_old_that_lie_in_a_file_of_their_own_are_read(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((TOYS / "toy_bpe" / "tokenizer.json").read_bytes())
    special = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "bos_token": "<|im_start|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (2001, (2002,))


def holding(files: dict[str, bytes]) -> Callable[[Path], str]:
    """What makes a folder of the toy tokenizer with these files in it."""

    def fill(folder: Path) -> str:
        (folder / "tokenizer.json").write_bytes((TOYS / "toy_bpe" / "tokenizer.json").read_bytes())
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return str(folder)

    return fill


def a_sentencepiece_file_that_is_none(folder: Path) -> str:
    (folder / "tokenizer.model").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuchTokenizer"}')
    return str(folder)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: str(folder / "nowhere" / "at" / "all"), "no such folder"),
        (lambda folder: str(TOYS / "toy_bpe" / "tokenizer.json"), "this is a file"),
        (str, "no tokenizer.json here"),
        (holding({"tokenizer.json": b'{"version": "1.0", "model"'}), "not a tokenizer"),
        (holding({"tokenizer_config.json": b"{"}), "tokenizer_config.json: cannot be read"),
        (holding({"tokenizer_config.json": b"[]"}), "holds no JSON object"),
        (holding({"tokenizer_config.json": b'{"chat_template": 3}'}), "neither text nor named texts"),
        (
            holding({"tokenizer_config.json": b"{}", "chat_template.jinja": b"\xff\xfe"}),
            "chat template cannot be read",
        ),
        (a_sentencepiece_file_that_is_none, "transformers cannot build one"),
    ],
)
def test_what_is_no_tokenizer_is_refused_with_its_place_and_a_way_out(make, says, tmp_path):
    name = make(tmp_path)
    with pytest.raises(TokenizerError, match=says) as raised:
        load_tokenizer(name)
    assert name.split("/tokenizer")[0] in str(raised.value)
    assert "Traceback" not in str(raised.value)


def test_a_tokenizer_that_transformers_has_to_convert_says_what_to_install_where_it_is_missing(
    monkeypatch, tmp_path
):
    folder = a_sentencepiece_file_that_is_none(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerError, match=r"pip install 'tito-audit\[transformers\]'") as raised:
        load_tokenizer(folder)
    assert str(raised.value).startswith(f"{folder}: no tokenizer.json here")
    assert load_tokenizer(str(TOYS / "toy_bpe")).vocabulary.size


@pytest.fixture
def sentencepiece_folder(tmp_path) -> Path:
    """A tokenizer of Llama's kind as SentencePiece writes it: tokenizer.model, and no tokenizer.json."""
    pytest.importorskip("transformers", reason="transformers is in the extra transformers")
    trainer = pytest.importorskip("sentencepiece", reason="sentencepiece is in the extra transformers")
    pytest.importorskip("google.protobuf", reason="protobuf is in the extra transformers")
    trainer.SentencePieceTrainer.train(
        sentence_iterator=iter((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n")),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_a_sentencepiece_model_without_tokenizer_json_has_the_ids_of_sentencepiece(sentencepiece_folder):
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_folder / "tokenizer.model"))
    tokenizer = load_tokenizer(str(sentencepiece_folder))
    for text in ("Hello there", "two  spaces", "line\n\nline", "über 中文 🎉", "7.5%", ""):
        assert tokenizer.encode(text).tolist() == theirs.encode(text), text
    assert tokenizer.bos_id == theirs.bos_id()


def test_a_hub_name_without_a_network_is_refused_in_plain_words(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(TokenizerError, match="no-such-org/no-such-model: no such folder, and the hub"):
        load_tokenizer("no-such-org/no-such-model")


@pytest.mark.parametrize(
    "module", ["tito_audit.tokens.load", "tito_audit.render.renderer", "tito_audit.render.spans"]
)
def test_importing_a_stage_pulls_no_heavy_library(module):
    heavy = "{'transformers', 'huggingface_hub', 'jinja2', 'tokenizers', 'torch'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_toy_tokenizers_are_what_their_script_writes(tmp_path):
    script = TOYS / "train.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, cwd=ROOT)
    for name in ("toy_bpe", "toy_metaspace"):
        files = sorted(path.name for path in (TOYS / name).iterdir())
        assert files == sorted(path.name for path in (tmp_path / name).iterdir())
        for file in files:
            assert (TOYS / name / file).read_bytes() == (tmp_path / name / file).read_bytes()
        assert sum((TOYS / name / file).stat().st_size for file in files) < 150_000
