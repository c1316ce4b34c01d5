"""Ids looked up from token strings and bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from tito_audit.evidence.recover import recover_ids
from tito_audit.record.rollout import TokenText
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Vocabulary

TOY = Path(__file__).resolve().parent.parent / "fixtures" / "tokenizers" / "toy_bpe"
QWEN = Path(__file__).resolve().parents[2] / "shared" / "tokenizers" / "qwen3"
END = "<|im_end|>"
NAN = float("nan")


@pytest.fixture(scope="module")
def toy() -> Tokenizer:
    return load_tokenizer(str(TOY))


def written(tokenizer: Tokenizer, ids: list[int]) -> list[TokenText]:
    """Tokens as OpenAI logs them: what is no text alone has only its bytes, a special token has none."""
    vocabulary = tokenizer.vocabulary
    return [
        TokenText(vocabulary.piece(i), b"" if i in vocabulary.special_ids else vocabulary.token_bytes(i), NAN)
        for i in ids
    ]


def id_of(tokenizer: Tokenizer, text: str) -> int:
    (token_id,) = tokenizer.encode(text).tolist()
    assert isinstance(token_id, int)
    return token_id


@pytest.mark.parametrize("text", ["The answer is 4.", "two\nlines\n\n", "", "naïve ☃ 🙂", '{"city": "Oslo"}'])
def test_every_token_is_found_from_its_bytes(toy: Tokenizer, text: str) -> None:
    ids = toy.encode(text + END).tolist()
    recovered = recover_ids(written(toy, ids), toy.vocabulary, ())
    assert recovered.problem is None
    assert recovered.ids is not None
    assert recovered.ids.tolist() == ids


def test_a_string_is_enough_where_the_log_has_no_bytes(toy: Tokenizer) -> None:
    ids = toy.encode("The answer is 4." + END).tolist()
    texts = [TokenText(toy.vocabulary.piece(i), None, NAN) for i in ids]
    recovered = recover_ids(texts, toy.vocabulary, ())
    assert recovered.ids is not None
    assert recovered.ids.tolist() == ids


def test_a_special_token_is_found_with_its_literal_as_bytes_too(toy: Tokenizer) -> None:
    recovered = recover_ids([TokenText(END, END.encode(), NAN)], toy.vocabulary, ())
    assert recovered.ids is not None
    assert recovered.ids.tolist() == [id_of(toy, END)]


def test_a_byte_spelled_in_the_string_is_read(toy: Tokenizer) -> None:
    whole = toy.vocabulary.ids_of_bytes(b"\xe2")
    recovered = recover_ids([TokenText("bytes:\\xe2", None, NAN)], toy.vocabulary, ())
    assert recovered.ids is not None
    assert recovered.ids.tolist() == [whole[0]]


def test_a_silent_last_token_is_the_end_token(toy: Tokenizer) -> None:
    four, end = id_of(toy, "4"), id_of(toy, END)
    texts = [*written(toy, [four]), TokenText("", b"", NAN)]
    recovered = recover_ids(texts, toy.vocabulary, {end})
    assert recovered.ids is not None
    assert recovered.ids.tolist() == [four, end]
    assert recover_ids(texts, toy.vocabulary, {end, end + 1}).ambiguous == 1
    assert recover_ids(texts, toy.vocabulary, ()).ids is None
    assert recover_ids(texts[::-1], toy.vocabulary, {end}).ids is None


def test_a_token_of_no_id_is_named(toy: Tokenizer) -> None:
    texts = [*written(toy, [id_of(toy, "4")]), TokenText("☃☃", "☃☃".encode(), NAN)]
    recovered = recover_ids(texts, toy.vocabulary, ())
    assert recovered.ids is None
    assert recovered.problem is not None
    assert recovered.problem.startswith("token 1 ('☃☃') is not a token of this vocabulary")


@pytest.mark.parametrize("data", [None, "\ufffd".encode()])
def test_a_replacement_character_is_never_taken_for_a_token(toy: Tokenizer, data: bytes | None) -> None:
    recovered = recover_ids([TokenText("\ufffd", data, NAN)], toy.vocabulary, ())
    assert recovered.ids is None
    assert recovered.problem is not None
    assert "lost its bytes" in recovered.problem


def test_bytes_win_over_a_string_that_could_not_show_them(toy: Tokenizer) -> None:
    recovered = recover_ids([TokenText("\ufffd", b"\xe2", NAN)], toy.vocabulary, ())
    assert recovered.ids is not None
    assert recovered.ids.tolist() == [toy.vocabulary.ids_of_bytes(b"\xe2")[0]]


def test_no_tokens_give_no_ids_and_no_problem(toy: Tokenizer) -> None:
    recovered = recover_ids([], toy.vocabulary, ())
    assert recovered.ids is not None
    assert (recovered.ids.tolist(), recovered.problem, recovered.ambiguous) == ([], None, 0)


def test_of_several_ids_the_lowest_that_is_not_added_is_taken_and_counted() -> None:
    # "▁a" and the added " a" are two ways of writing the same bytes; the added one has the lower id.
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 5, "x": 7}, unk_token="x"))
    backend.add_tokens([tokenizers.AddedToken(" a", normalized=False)])
    vocabulary = Vocabulary(backend)
    assert vocabulary.ids_of_bytes(b" a") == (2, 5)
    recovered = recover_ids([TokenText(" a", b" a", NAN)], vocabulary, ())
    assert recovered.ids is not None
    assert (recovered.ids.tolist(), recovered.ambiguous) == ([5], 1)


@pytest.mark.shared
def test_a_real_vocabulary_gives_back_what_it_encoded() -> None:
    if not QWEN.exists():
        pytest.skip("the real tokenizers are not beside the checkout")
    tokenizer = load_tokenizer(str(QWEN))
    ids = tokenizer.encode(f"Skinny 🙂 日本語\n\n<think>\n</think>\n{END}").tolist()
    recovered = recover_ids(written(tokenizer, ids), tokenizer.vocabulary, ())
    assert recovered.ids is not None
    assert recovered.ids.tolist() == ids
