"""The fast encoder and the cutting of texts, both against `tokenizers` on whole texts."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from tests.fuzz_encoders import Drawn
from tests.tables import table
from tests.test_start import SHARED, TOYS
from tests.tiers import examples, some
from tests.world import ROOT
from tito_audit.errors import TokenizerError
from tito_audit.record.arrays import Ids
from tito_audit.tokens.encoders import Encoder, FastEncoder, ReferenceEncoder, find_disagreement, probe_texts
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.segments import ControlTokens, SegmentEncoder, any_of, find_control_tokens
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Vocabulary

LOADS_ANEW = True

STRINGS = int(os.environ.get("TITO_AUDIT_FUZZ") or examples(100, 2000))
"""How many random texts each vocabulary is tried on; TITO_AUDIT_FUZZ=20000 for a thorough run."""
WANTED = ("qwen3", "llama-3.1", "gpt-oss", "deepseek-v3", "gemma-3", "smollm2")
NAMES = ["toy_bpe", "toy_metaspace", *(pytest.param(name, marks=pytest.mark.shared) for name in some(WANTED, 1))]


@functools.cache
def loaded(name: str) -> Tokenizer:
    """A tokenizer, loaded once for its encoder and its tests."""
    folder = TOYS / name if (TOYS / name).is_dir() else SHARED / name
    if not folder.is_dir():
        pytest.skip(f"no {name} tokenizer at {SHARED}")
    return load_tokenizer(str(folder))


@functools.cache
def fast(name: str) -> FastEncoder:
    """The fast encoder of a tokenizer, which asks it for whole texts."""
    return FastEncoder(loaded(name).backend)


@functools.cache
def real(name: str) -> Tokenizer:
    """A tokenizer with its fast encoder at work."""
    tokenizer = loaded(name)
    assert tokenizer.adopt_fast(fast(name))
    assert tokenizer.encoder_name == "fastokens, proved by tokenizers"
    return tokenizer


def toy(name: str = "toy_bpe") -> Tokenizer:
    """A tokenizer of one test's own."""
    return load_tokenizer(str(TOYS / name))


@functools.cache
def drawn(name: str) -> Drawn:
    return Drawn(real(name), seed=len(name))


def assert_same(tokenizer: Tokenizer, texts: Sequence[str], ids_of_texts: Sequence[Ids]) -> None:
    """What `tokenizers` says of each whole text, one batch at a time."""
    reference = ReferenceEncoder(tokenizer.backend)
    for start in range(0, len(texts), 500):
        batch = texts[start : start + 500]
        for text, ids, own in zip(
            batch, reference.encode_batch(batch), ids_of_texts[start : start + 500], strict=True
        ):
            assert own.dtype == np.int32
            assert not own.flags.writeable
            assert own.tolist() == ids.tolist(), ascii(text)


def batches(encode: Encoder | SegmentEncoder, texts: Sequence[str], size: int = 200) -> list[Ids]:
    return [ids for i in range(0, len(texts), size) for ids in encode.encode_batch(texts[i : i + size])]


@pytest.mark.parametrize("name", NAMES)
def test_the_fast_encoder_gives_every_text_the_ids_of_the_reference(name):
    tokenizer = real(name)
    texts = drawn(name).texts(STRINGS)
    assert_same(tokenizer, texts, batches(fast(name), texts))


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_text_encodes_as_the_whole_one(name):
    tokenizer = real(name)
    assert tokenizer.control_tokens.tokens, "nothing would be tried"
    texts = drawn(name).chats(STRINGS // 2) + drawn(name).texts(STRINGS // 10)
    assert_same(tokenizer, texts, tokenizer.encode_batch(texts))
    assert_same(tokenizer, texts, tokenizer.encode_fast_batch(texts))
    assert tokenizer.check_fast(texts[:200])


@pytest.mark.parametrize("name", NAMES)
def test_it_makes_no_difference_what_was_encoded_before(name):
    tokenizer = real(name)
    histories = [drawn(name).history() for _ in range(STRINGS // 20)]
    one_by_one = [text for history in histories for text in history]
    assert_same(tokenizer, one_by_one, batches(fast(name), one_by_one, 1))
    mixed = sorted(one_by_one, key=lambda text: (len(text) % 7, text))
    assert_same(tokenizer, mixed, batches(fast(name), mixed, 32))
    assert_same(tokenizer, mixed, tokenizer.encode_fast_batch(mixed))


@pytest.mark.parametrize("name", NAMES)
def test_the_probes_say_the_same_of_two_that_are_the_same(name):
    tokenizer = real(name)
    texts = probe_texts(tokenizer.vocabulary)
    reference = ReferenceEncoder(tokenizer.backend)
    assert find_disagreement(reference, reference, texts) is None
    assert sum(map(len, texts)) < 40_000, "the self-check should take less than 100 ms"
    batch = reference.encode_batch(texts)
    assert [ids.tolist() for ids in reference.encode_single_threaded(texts)] == [ids.tolist() for ids in batch]


# ---------------------------------------------------------------- an encoder that is wrong


class Wrong:
    """An encoder that passes the self-check and is wrong about texts with some word in them."""

    name = "wrong"

    def __init__(self, tokenizer: Tokenizer, word: str) -> None:
        self.reference = ReferenceEncoder(tokenizer.backend)
        self.word = word

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return self.reference.encode_batch([text.replace(self.word, self.word * 2) for text in texts])


CHAT = "<|im_start|>user\nI like Skinny jeans<|im_end|>\n<|im_start|>assistant\nMe too<|im_end|>\n"
OTHER = CHAT.replace("jeans", "ties")


def with_wrong(word: str) -> tuple[Tokenizer, Ids]:
    """A tokenizer with that encoder, and the right ids of CHAT."""
    tokenizer = toy()
    assert tokenizer.adopt_fast(Wrong(tokenizer, word))
    assert tokenizer.encoder_name == "wrong, proved by tokenizers"
    return tokenizer, tokenizer.encode(CHAT)


def test_a_wrong_encoder_is_found_where_its_ids_are_not_the_recorded_ones():
    tokenizer, right = with_wrong("like Skinny")
    (fast,) = tokenizer.encode_fast_batch([CHAT])
    assert fast.tolist() != right.tolist()
    assert tokenizer.prove(CHAT, fast, right).tolist() == right.tolist()
    assert tokenizer.encoder_name == "tokenizers"
    assert tokenizer.disagreements == 1
    assert tokenizer.encoder_notice == (
        "wrong disagreed with tokenizers at 'user\\nI like Skinny jeans'; the run went on with tokenizers."
    )
    assert tokenizer.encode_fast_batch([CHAT])[0].tolist() == right.tolist()
    assert not tokenizer.use_fast(), "not a second time"
    assert "disagreed" in str(tokenizer.encoder_notice)


def test_a_wrong_encoder_that_loses_a_control_token_is_found_too():
    tokenizer, right = with_wrong("like Skinny")
    fast = right[right != tokenizer.backend.token_to_id("<|im_end|>")]
    assert tokenizer.prove(CHAT, fast, fast).tolist() == right.tolist()
    assert (tokenizer.encoder_name, tokenizer.disagreements) == ("tokenizers", 1)
    tokenizer, _ = with_wrong("like Skinny")
    assert not tokenizer.check_sample([CHAT], [fast], one_in=1)


def test_an_encoder_is_not_given_up_where_it_is_right_and_the_log_is_not():
    tokenizer, right = with_wrong("no such word")
    (fast,) = tokenizer.encode_fast_batch([CHAT])
    for recorded in (tokenizer.encode(OTHER), right[:5], right[:0], np.array([-1, 2**31 - 1], np.int32)):
        assert tokenizer.prove(CHAT, fast, recorded).tolist() == right.tolist()
    assert tokenizer.encoder_notice is None


def test_the_reference_is_asked_only_for_the_words_that_were_not_recorded():
    tokenizer, _ = with_wrong("no such word")
    right = tokenizer.encode(OTHER)
    tokenizer._reference.cache.clear()
    (fast,) = tokenizer.encode_fast_batch([CHAT])
    tokenizer.prove(CHAT, fast, right)
    assert list(tokenizer._reference.cache) == [" jeans"]


def test_what_an_encoder_and_the_log_have_alike_is_found_wrong_by_the_sample():
    tokenizer, right = with_wrong("like Skinny")
    (fast,) = tokenizer.encode_fast_batch([CHAT])
    assert tokenizer.prove(CHAT, fast, fast).tolist() == fast.tolist()
    texts = [OTHER.replace("like", "wear"), CHAT]
    ids = tokenizer.encode_fast_batch(texts)
    assert not tokenizer.check_sample(texts, ids, one_in=1)
    assert (tokenizer.encoder_name, tokenizer.disagreements) == ("tokenizers", 1)
    assert tokenizer.check_sample([CHAT], [right], one_in=1), "nothing is left to be checked"


def test_some_segments_of_a_text_are_those_among_all_of_them():
    tokenizer, right = with_wrong("no such word")
    text = CHAT + "<|im_start|><|im_end|>" + OTHER + CHAT
    ids = tokenizer.encode(text)
    every = tokenizer.control_tokens.pair_segments(text, ids)
    assert every is not None
    for number in range(len(every)):
        wanted = np.arange(number, len(every), 2)
        some = tokenizer.control_tokens.pick_segments(text, ids, wanted)
        assert some == [(segment, data) for segment, (_, _, data) in (every[at] for at in wanted)]
    at = tokenizer.control_tokens.positions(right)
    lost = np.delete(right, np.arange(at[0] + 1, at[1]))
    assert tokenizer.control_tokens.pick_segments(CHAT, lost, at[:0]) == [("user\nI like Skinny jeans", b"")], (
        "its ids are lost"
    )
    assert tokenizer.control_tokens.pick_segments(CHAT, np.delete(right, at[1]), np.array([1])) is None, (
        "an end is lost"
    )


def test_the_sample_is_the_same_in_every_order_and_of_the_size_that_is_said():
    texts = [f"{CHAT}{i}<|im_end|>" for i in range(3000)]
    samples = []
    for order in (texts, texts[::-1]):
        tokenizer, _ = with_wrong("no such word")
        tokenizer._reference.cache.clear()
        assert tokenizer.check_sample(order, tokenizer.encode_fast_batch(order))
        samples.append(set(tokenizer._reference.cache))
    assert samples[0] == samples[1]
    assert 3000 / 64 / 2 < len(samples[0]) < 3000 / 64 * 2


def test_a_sample_of_the_log_finds_a_wrong_encoder_before_the_run():
    tokenizer, _ = with_wrong("like Skinny")
    assert not tokenizer.check_fast(["fine", CHAT])
    assert tokenizer.encoder_name == "tokenizers"
    assert "wrong disagreed with tokenizers at '<|im_start|>user" in str(tokenizer.encoder_notice)
    assert tokenizer.check_fast([CHAT])


@pytest.mark.parametrize("word", ["'", "\u0301", "👩", "1234", "  ", "<|im_end|>", "中", "٣", "\ufffd", "aaaa"])
def test_the_self_check_refuses_an_encoder_that_is_wrong_about(word):
    tokenizer = toy()
    assert not tokenizer.adopt_fast(Wrong(tokenizer, word))
    assert tokenizer.encoder_name == "tokenizers"
    assert "slower: wrong disagreed with tokenizers at" in str(tokenizer.encoder_notice)
    assert tokenizer.encode_fast_batch([CHAT])[0].tolist() == tokenizer.encode(CHAT).tolist()


class Broken:
    """An encoder that raises."""

    name = "broken"

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        raise RuntimeError("no such thing")


def test_an_encoder_that_raises_is_refused():
    tokenizer = toy()
    assert not tokenizer.adopt_fast(Broken())
    assert "could not encode the texts of the self-check (RuntimeError: no such thing)" in str(
        tokenizer.encoder_notice
    )


# ---------------------------------------------------------------- tokenizers that go without


def of_backend(backend: tokenizers.Tokenizer, name: str = "small") -> Tokenizer:
    return Tokenizer(name, backend, Vocabulary(backend))


def changed(name: str = "toy_bpe", **model: object) -> tokenizers.Tokenizer:
    """A toy with other settings of its model."""
    state = json.loads((TOYS / name / "tokenizer.json").read_text(encoding="utf-8"))
    state["model"].update(model)
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def of_words() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


@pytest.mark.parametrize(
    ("backend", "because"),
    [(changed(dropout=0.1), "it skips merges at random (dropout 0.1"), (of_words(), "fastokens rejects it (")],
)
def test_a_tokenizer_that_the_fast_encoder_cannot_have_goes_without(backend, because):
    tokenizer = of_backend(backend)
    assert not tokenizer.use_fast()
    assert tokenizer.encoder_name == "tokenizers"
    assert str(tokenizer.encoder_notice).startswith("small is encoded by tokenizers, which is slower: ")
    assert because in str(tokenizer.encoder_notice)
    with pytest.raises(TokenizerError, match=re.escape(because)):
        tokenizer.use_fast(True)
    assert not tokenizer.use_fast(False)
    assert tokenizer.encoder_notice is None


def test_without_fastokens_the_reference_works_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastokens", None)
    tokenizer = toy()
    assert not tokenizer.use_fast()
    assert "fastokens is not installed" in str(tokenizer.encoder_notice)
    assert tokenizer.encode_fast_batch([CHAT])[0].tolist() == tokenizer.encode(CHAT).tolist()


def test_the_fast_encoder_knows_tokens_that_the_settings_added(tmp_path):
    for file in (TOYS / "toy_bpe").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["additional_special_tokens"] = ["<|brand_new|>"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.use_fast(True)
    text = "a <|brand_new|> b"
    assert "<|brand_new|>" in tokenizer.control_tokens.tokens
    for ids in (*tokenizer.encode_fast_batch([text]), *FastEncoder(tokenizer.backend).encode_batch([text])):
        assert ids.tolist() == tokenizer.backend.encode(text).ids


def test_a_fast_encoder_that_a_thread_builds_meanwhile_gives_the_same_ids():
    tokenizer = toy()
    threads = set(threading.enumerate())
    tokenizer.start_building_fast()
    tokenizer.start_building_fast()  # it is begun once
    texts = [CHAT, "", "fine", "a\ud83db"]
    truth = tokenizer.encode_single_threaded(texts)  # the reference is loaded and asked meanwhile
    assert tokenizer.use_fast(True)
    assert set(threading.enumerate()) <= threads, "its thread has ended"
    assert tokenizer.check_fast(texts, truth)
    for fast_ids, ids in zip(tokenizer.encode_fast_batch(texts), truth, strict=True):
        assert fast_ids.tolist() == ids.tolist()
    assert not tokenizer.check_fast(texts, truth[::-1]), "it is held against the ids that were given"
    assert tokenizer.encoder_name == "tokenizers"


@pytest.mark.parametrize(
    ("fails", "raised"), [(TokenizerError("it is Tuesday"), None), (MemoryError("none left"), MemoryError)]
)
def test_what_fails_in_the_thread_is_said_where_the_encoder_is_asked_for(fails, raised, monkeypatch):
    def failing(self: FastEncoder, *_: object) -> None:
        raise fails

    monkeypatch.setattr(FastEncoder, "__init__", failing)
    tokenizer = toy()
    tokenizer.start_building_fast()
    if raised is not None:
        with pytest.raises(raised, match="none left"):
            tokenizer.use_fast()
        return
    assert not tokenizer.use_fast()
    assert str(tokenizer.encoder_notice).endswith("which is slower: it is Tuesday.")


# ---------------------------------------------------------------- where texts are cut

WORDS = st.text("ab<|", min_size=1, max_size=5)


@given(words=st.lists(WORDS, min_size=1, max_size=8, unique=True), text=st.text("ab<|", max_size=30))
@settings(max_examples=examples(50, 300), deadline=None)
def test_the_pattern_takes_the_first_and_there_the_longest(words, text):
    matches, at = [], 0
    while at < len(text):
        here = max((word for word in words if text.startswith(word, at)), key=len, default="")
        matches += [here] if here else []
        at += len(here) or 1
    assert re.findall(any_of(sorted(words)), text) == matches


def with_tokens(tokens: Sequence[str | AddedToken], **parts: object) -> tokenizers.Tokenizer:
    """A vocabulary of characters with these added tokens and parts."""
    characters = ["<unk>", "▁", *"abcdeé<|>[]xyz\n"]
    model = models.BPE({c: i for i, c in enumerate(characters)}, [], unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.add_tokens([AddedToken(t, normalized=False) if isinstance(t, str) else t for t in tokens])
    return backend


def cut_at(backend: tokenizers.Tokenizer) -> list[str]:
    return sorted(find_control_tokens(backend, Vocabulary(backend)).tokens)


@pytest.mark.parametrize(*table(__file__, "texts_are_cut_only_at_tokens_that_nothing_beside_them_can_hide"))
def test_texts_are_cut_only_at_tokens_that_nothing_beside_them_can_hide(tokens, cuts):
    assert cut_at(with_tokens([AddedToken(**t) if isinstance(t, dict) else t for t in tokens])) == cuts


def test_a_token_that_is_looked_for_in_normalised_text_is_no_cut():
    tokens = [AddedToken("<a>", normalized=True), "<b>"]
    assert cut_at(with_tokens(tokens, normalizer=normalizers.Lowercase())) == ["<b>"]
    assert cut_at(with_tokens(tokens, normalizer=normalizers.Sequence([]))) == ["<a>", "<b>"]


FIRST = pre_tokenizers.Metaspace(prepend_scheme="first")


@pytest.mark.parametrize(
    ("parts", "cuts"),
    [
        ({"pre_tokenizer": FIRST}, []),
        ({"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always")}, ["<b>"]),
        ({"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="never")}, ["<b>"]),
        ({"normalizer": normalizers.Prepend("▁")}, ["<b>"]),
        ({"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)}, ["<b>"]),
        ({"normalizer": normalizers.Prepend("▁"), "pre_tokenizer": FIRST}, None),
    ],
)
@given(parts_of_text=st.lists(st.sampled_from(["a", "b", " ", "é", "<b>", "<", "b>", "\n", "<b"]), max_size=8))
@settings(max_examples=examples(25, 60), deadline=None)
def test_what_is_prepended_is_prepended_to_the_same_segments(parts, cuts, parts_of_text):
    backend = with_tokens(["<b>"], decoder=decoders.Replace("▁", " "), **parts)
    if cuts is not None:
        assert cut_at(backend) == cuts
    text = "".join(parts_of_text)
    assert of_backend(backend).encode(text).tolist() == backend.encode(text).ids


class Reversed:
    """A normalizer written in Python."""

    def normalize(self, normalized: tokenizers.NormalizedString) -> None:
        normalized.map(lambda char: "x")


def test_a_tokenizer_with_a_part_in_python_is_not_cut_and_has_no_fast_encoder():
    backend = with_tokens(["<b>"])
    backend.normalizer = normalizers.Normalizer.custom(Reversed())
    assert cut_at(backend) == []
    assert not of_backend(backend).use_fast()


def test_cuts_give_back_the_text_and_say_which_ids_belong_to_which_segment():
    cuts = ControlTokens({"<s>": 7, "</s>": 9})
    text = "<s>ab<s></s>c"
    assert cuts.split(text) == ["", "<s>", "ab", "<s>", "", "</s>", "c"]
    ids = np.array([7, 1, 2, 7, 9, 3], np.int32)
    parts = cuts.pair_segments(text, ids)
    assert parts is not None
    assert [(segment, *stretch[:2], len(stretch[2]) // 4) for segment, stretch in parts] == [
        ("", -1, 7, 0),
        ("ab", 7, 7, 2),
        ("", 7, 9, 0),
        ("c", 9, -1, 1),
    ]
    assert cuts.pair_segments(text, ids[1:]) is None
    assert ControlTokens({}).pair_segments("", ids[:0]) == [("", (-1, -1, b""))]


# ---------------------------------------------------------------- processes and imports

FORKS = """
import os, sys, signal
from tito_audit.tokens.load import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
before = len(os.listdir("/proc/self/task"))
assert tokenizer.use_fast(True)
texts = [f"Hello {i} world\\n" * 300 + "<|im_end|>" for i in range(60)]
assert tokenizer.check_fast(texts[:8])
assert len(os.listdir("/proc/self/task")) == before, "a thread was started"
children = []
for _ in range(2):
    child = os.fork()
    if not child:
        signal.alarm(60)
        fast = tokenizer.encode_fast_batch(texts)
        same = all(a.tolist() == b.tolist() for a, b in zip(fast, tokenizer.encode_batch(texts)))
        os._exit(0 if same and tokenizer.check_sample(texts, fast) else 1)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted where /proc lists them")
def test_a_process_that_checked_the_fast_encoder_can_fork():
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(TOYS / "toy_bpe")], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.stdout.strip(), done.stderr) == ("[0, 0]", "")


def test_fastokens_is_imported_when_it_is_asked_for():
    code = (
        "import sys; from tito_audit.tokens.load import load_tokenizer; t = load_tokenizer(sys.argv[1]); "
        "t.encode('a<|im_end|>'); early = 'fastokens' in sys.modules; t.use_fast(); "
        "print(early, 'fastokens' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(TOYS / "toy_bpe")], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "False True"
