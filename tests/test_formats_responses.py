"""vLLM, SGLang and OpenAI answers as callers log them: where the ids are, and when there are none."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tito_audit.errors import RecordError
from tito_audit.format import Format
from tito_audit.formats import openai_chat, sglang, vllm
from tito_audit.record.rollout import IdsFrom, Place, Rollout
from tito_audit.record.stated import Stated

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "formats"
PLACE = Place("log.jsonl", 0)
ANSWER = {"role": "assistant", "content": "It is 4", "tool_calls": [], "refusal": None}
ASKED = [{"role": "user", "content": "2+2?"}]


def read(form: Format, row: dict[str, Any]) -> tuple[Rollout, ...]:
    first = next(f for f in (sglang.FORMAT, vllm.FORMAT, openai_chat.FORMAT) if f.matches(row))
    assert first is form
    return tuple(form.read(row, PLACE))


def entry(token: str, logprob: float = -0.5, data: list[int] | None = None) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": data, "top_logprobs": []}


def chat(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "org/model",
        "choices": list(choices),
        **more,
    }


def choice(**more: Any) -> dict[str, Any]:
    return {"index": 0, "finish_reason": "stop", "message": ANSWER, **more}


def generate(**more: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "stop", "matched": 2},
        "weight_version": "3",
        "output_token_logprobs": [[-0.2, 30, None], [-0.5, 2, None]],
    }
    return {"text": "4", "output_ids": [30, 2], "meta_info": meta, **more}


def ids_of(rollout: Rollout) -> list[int] | None:
    ids = rollout.turns[0].completion_ids
    return None if ids is None else ids.tolist()


def prompt_of(rollout: Rollout) -> list[int] | None:
    ids = rollout.turns[0].prompt_ids
    return None if ids is None else ids.tolist()


SHAPES = {
    "request and response": lambda q, a: {"request": q, "response": a},
    "input and output": lambda q, a: {"input": q, "output": a},
    "an HTTP wrapper": lambda q, a: {"body": q, "response": {"status_code": 200, "body": a}},
    "spread over one object": lambda q, a: {**q, **a},
    "the request beside the choices": lambda q, a: {"request": q, **a},
    "the answer as a body": lambda q, a: {**q, "body": a},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_chat_answer_follows_the_messages_of_its_request(shape: Any) -> None:
    request = {
        "messages": ASKED,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    answer = chat(choice(token_ids=[30, 31, 2]), prompt_token_ids=[1, 20])
    (rollout,) = read(vllm.FORMAT, shape(request, answer))
    assert [message.role for message in rollout.messages] == ["user", "assistant"]
    assert dict(rollout.messages[1].wire) == {"role": "assistant", "content": "It is 4"}
    assert rollout.turns[0].message_index == 1
    assert rollout.template_kwargs == {"enable_thinking": False}
    assert len(rollout.tools) == 1
    assert (prompt_of(rollout), ids_of(rollout)) == ([1, 20], [30, 31, 2])
    assert rollout.turns[0].finish_reason == "stop"
    assert rollout.stated == Stated(model="org/model")


def test_an_answer_alone_has_no_messages_but_its_text() -> None:
    (rollout,) = read(vllm.FORMAT, chat(choice(token_ids=[30])))
    assert rollout.messages == ()
    assert rollout.turns[0].message_index is None
    assert rollout.turns[0].completion_text == "It is 4"


def test_an_answer_with_reasoning_or_tool_calls_has_no_text_in_one_piece() -> None:
    message = {"role": "assistant", "content": "4", "reasoning": "hm"}
    (rollout,) = read(
        vllm.FORMAT,
        {"request": {"messages": ASKED}, "response": chat(choice(token_ids=[3], message=message))},
    )
    assert rollout.turns[0].completion_text is None
    assert rollout.messages[1].wire["reasoning_content"] == "hm"


def test_several_choices_are_several_rollouts_of_one_group() -> None:
    row = chat(choice(token_ids=[30]), choice(token_ids=[31]), messages=ASKED, prompt_token_ids=[1])
    rollouts = read(vllm.FORMAT, row)
    assert [rollout.place.item for rollout in rollouts] == [0, 1]
    assert [ids_of(rollout) for rollout in rollouts] == [[30], [31]]
    assert {rollout.stated.group for rollout in rollouts} == {"chatcmpl-1"}


def test_logprobs_keep_the_floor_as_a_sentinel() -> None:
    logprobs = {"content": [entry("It"), entry(" 4", -9999.0)]}
    (rollout,) = read(vllm.FORMAT, chat(choice(token_ids=[30, 31], logprobs=logprobs)))
    (turn,) = rollout.turns
    assert turn.completion_logprobs is not None
    assert turn.completion_logprobs.tolist() == [-0.5, -9999.0]
    assert turn.columns[0].sentinel == -9999.0


def test_a_missing_logprob_is_unknown() -> None:
    logprobs = {"content": [{"token": "a"}, entry("b")]}
    (rollout,) = read(vllm.FORMAT, chat(choice(token_ids=[30, 31], logprobs=logprobs)))
    assert rollout.turns[0].completion_logprobs is not None
    assert math.isnan(rollout.turns[0].completion_logprobs[0])


def test_logprobs_of_another_length_stay_as_a_column_that_fits_nowhere() -> None:
    (rollout,) = read(vllm.FORMAT, chat(choice(token_ids=[30, 31], logprobs={"content": [entry("It")]})))
    assert rollout.turns[0].completion_logprobs is None
    assert rollout.turns[0].columns[0].alignment is None


def test_ids_spelled_in_the_token_strings_are_logged_ids() -> None:
    logprobs = {"content": [entry("token_id:30"), entry("token_id:2")]}
    (rollout,) = read(vllm.FORMAT, chat(choice(logprobs=logprobs)))
    assert ids_of(rollout) == [30, 2]
    assert rollout.turns[0].ids_from is IdsFrom.LOGGED
    assert rollout.turns[0].token_texts is None


def test_two_copies_of_the_ids_that_differ_are_stated() -> None:
    logprobs = {"content": [entry("token_id:30"), entry("token_id:9")]}
    (rollout,) = read(vllm.FORMAT, chat(choice(token_ids=[30, 2], logprobs=logprobs)))
    assert ids_of(rollout) == [30, 2]
    assert rollout.stated.copies_disagree == ("token_ids has id 2 at position 1, logprobs.content has 9")


def test_a_completion_has_its_prompt_in_the_choice() -> None:
    logprobs = {"tokens": ["a", "b"], "token_logprobs": [-0.1, None], "top_logprobs": None}
    one = {"index": 0, "text": "ab", "prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": logprobs}
    row = {"prompt": "x", "object": "text_completion", "choices": [{**one, "finish_reason": "length"}]}
    (rollout,) = read(vllm.FORMAT, row)
    (turn,) = rollout.turns
    assert (turn.prompt_text, turn.completion_text, turn.finish_reason) == ("x", "ab", "length")
    assert (prompt_of(rollout), ids_of(rollout)) == ([1, 2], [3, 4])
    assert turn.completion_logprobs is not None
    assert math.isnan(turn.completion_logprobs[1])


def test_a_batch_of_prompts_gives_each_choice_its_own() -> None:
    answers = [{"index": i, "text": "a", "token_ids": [i], "finish_reason": "stop"} for i in range(4)]
    rollouts = read(vllm.FORMAT, {"prompt": [[1, 2], [3, 4]], "choices": answers})
    assert [prompt_of(rollout) for rollout in rollouts] == [[1, 2], [1, 2], [3, 4], [3, 4]]


def test_the_generate_endpoint_has_its_prompt_in_the_request() -> None:
    row = {"request": {"token_ids": [1, 2]}, "response": {"request_id": "g", "choices": [{"token_ids": [3]}]}}
    (rollout,) = read(vllm.FORMAT, row)
    assert (prompt_of(rollout), ids_of(rollout)) == ([1, 2], [3])


def test_token_ids_that_are_null_leave_a_turn_whose_ids_are_missing() -> None:
    (rollout,) = read(vllm.FORMAT, chat(choice(token_ids=None), prompt_token_ids=[1]))
    assert ids_of(rollout) is None
    assert rollout.stated.ids_wanted


def test_sglang_has_the_logprob_first_and_its_finish_reason_in_an_object() -> None:
    (rollout,) = read(sglang.FORMAT, {"input_ids": [1, 20], **generate()})
    (turn,) = rollout.turns
    assert (prompt_of(rollout), ids_of(rollout)) == ([1, 20], [30, 2])
    assert turn.completion_logprobs is not None
    assert turn.completion_logprobs.tolist() == [-0.2, -0.5]
    assert (turn.finish_reason, turn.weight_versions, turn.completion_text) == ("stop", ("3",), "4")
    assert turn.columns[0].sentinel is None


def test_sglang_copies_that_differ_keep_the_output_ids() -> None:
    (rollout,) = read(sglang.FORMAT, generate(output_ids=[30, 9, 2]))
    assert ids_of(rollout) == [30, 9, 2]
    assert rollout.stated.copies_disagree == ("output_ids has 3 ids, meta_info.output_token_logprobs has 2")


def test_sglang_triples_alone_give_the_ids() -> None:
    row = generate()
    del row["output_ids"]
    assert ids_of(read(sglang.FORMAT, row)[0]) == [30, 2]


@pytest.mark.parametrize(("counted", "expected"), [(2, [1, 20]), (5, None)])
def test_a_prompt_comes_from_its_scores_only_when_all_of_it_was_scored(
    counted: int, expected: list[int] | None
) -> None:
    row = generate()
    row["meta_info"] |= {
        "input_token_logprobs": [[None, 1, None], [-1.0, 20, None]],
        "prompt_tokens": counted,
    }
    assert prompt_of(read(sglang.FORMAT, row)[0]) == expected


def test_sglang_chat_answers_have_their_meta_info_on_the_choice() -> None:
    meta = {"output_token_logprobs": [[-0.2, 30, None]], "weight_version": "7"}
    row = {"request": {"messages": ASKED, "input_ids": [1]}, "response": chat(choice(meta_info=meta))}
    (rollout,) = read(sglang.FORMAT, row)
    assert (prompt_of(rollout), ids_of(rollout)) == ([1], [30])
    assert rollout.turns[0].weight_versions == ("7",)
    assert rollout.turns[0].message_index == 1


def test_sglang_answers_in_a_list_are_several_rollouts() -> None:
    rollouts = read(sglang.FORMAT, {"request": {"input_ids": [1]}, "response": [generate(), generate()]})
    assert [rollout.place.item for rollout in rollouts] == [0, 1]


def test_openai_tokens_are_kept_as_text_and_bytes() -> None:
    logprobs = {"content": [entry("4", -0.03, [52]), entry("<|im_end|>", -0.1, []), entry("x")]}
    (rollout,) = read(openai_chat.FORMAT, chat(choice(logprobs=logprobs), messages=ASKED))
    (turn,) = rollout.turns
    assert turn.completion_ids is None
    assert turn.token_texts is not None
    assert [(t.text, t.data, t.logprob) for t in turn.token_texts] == [
        ("4", b"4", -0.03),
        ("<|im_end|>", b"", -0.1),
        ("x", None, -0.5),
    ]
    assert rollout.stated.ids_wanted


def test_an_answer_with_neither_ids_nor_tokens_says_that_it_never_holds_ids() -> None:
    (rollout,) = read(openai_chat.FORMAT, chat(choice(), messages=ASKED))
    assert rollout.turns == ()
    assert rollout.stated.ids_wanted is False
    assert len(rollout.messages) == 2


def respond(*output: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"object": "response", "model": "m", "output": list(output), **more}


def test_a_responses_object_gives_its_tokens_and_its_messages() -> None:
    part = {"type": "output_text", "text": "4", "logprobs": [entry("4", -0.03, [52])]}
    item = {"type": "message", "role": "assistant", "content": [part], "status": "incomplete"}
    (rollout,) = read(openai_chat.FORMAT, {"request": {"input": "2+2?"}, "response": respond(item)})
    assert [(message.role, message.text) for message in rollout.messages] == [
        ("user", "2+2?"),
        ("assistant", "4"),
    ]
    (turn,) = rollout.turns
    assert turn.token_texts is not None
    assert (turn.token_texts[0].data, turn.message_index, turn.finish_reason) == (b"4", 1, "length")


def test_a_responses_object_without_its_request_or_history_has_no_messages() -> None:
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}
    for row in (
        respond(item),
        {"input": {"input": "x", "previous_response_id": "r"}, "output": respond(item)},
    ):
        (rollout,) = read(openai_chat.FORMAT, row)
        assert rollout.messages == ()
        assert rollout.stated.ids_wanted is False


@pytest.mark.parametrize(
    "row",
    [
        {"question": "?", "choices": ["a", "b"]},
        {"question": "?", "choices": [{"label": "A", "text": "a"}]},
        {"input": "text", "output": "text", "score": 1.0},
        {"prompt_ids": [1], "completion_ids": [2]},
        {"response": "text", "tokens": [1]},
        {"choices": []},
    ],
)
def test_other_rows_are_not_answers(row: dict[str, Any]) -> None:
    assert not any(form.matches(row) for form in (sglang.FORMAT, vllm.FORMAT, openai_chat.FORMAT))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (chat(), "nothing to audit"),
        (chat({"index": 0, "delta": {"content": "a"}, "finish_reason": None}), "chunk of a stream"),
        (chat(choice(), "no answer"), "not a list of answers"),
        (chat(choice(logprobs={"content": ["a"]})), "not a token"),
        (chat(choice(logprobs={"content": [entry("a", data=[300])]})), "below 256"),
        (generate(meta_info={"output_token_logprobs": [-0.1, -0.2]}), "logprob, token id, text"),
    ],
)
def test_answers_that_make_no_sense_are_record_errors(row: dict[str, Any], message: str) -> None:
    form = next(f for f in (sglang.FORMAT, vllm.FORMAT, openai_chat.FORMAT) if f.matches(row))
    with pytest.raises(RecordError, match=message):
        form.read(row, PLACE)


@pytest.mark.parametrize("name", ["vllm", "sglang", "openai_chat"])
def test_the_fixtures_are_what_their_script_writes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIXTURES))
    made = importlib.import_module("make_responses").lines()[name]
    assert (FIXTURES / f"{name}.jsonl").read_text() == made


@pytest.mark.parametrize("form", [vllm.FORMAT, sglang.FORMAT, openai_chat.FORMAT])
def test_every_fixture_row_is_read(form: Format) -> None:
    for line in (FIXTURES / f"{form.name}.jsonl").read_text().splitlines():
        assert read(form, json.loads(line))


def test_the_triples_alone_show_an_answer_of_sglang():
    row = generate(input_ids=[1, 20])
    (rollout,) = read(sglang.FORMAT, {key: row[key] for key in ("input_ids", "meta_info")})
    assert ids_of(rollout) == [30, 2]


def test_a_responses_object_with_ids_is_not_read_as_one_that_never_had_any():
    answer = {"type": "message", "role": "assistant", "content": [], "generation_token_ids": [30, 2]}
    row = {"response": {"object": "response", "output": [answer]}}
    assert not openai_chat.FORMAT.matches(row)
    assert openai_chat.FORMAT.matches({"response": {**row["response"], "output": []}})


@pytest.mark.parametrize("role", ["user", "model"])
def test_a_message_of_another_role_is_nobodys_answer(role: str):
    message = {**ANSWER, "role": role}
    row = {"request": {"messages": ASKED}, "response": chat(choice(message=message, token_ids=[30, 2]))}
    (rollout,) = read(vllm.FORMAT, row)
    assert ids_of(rollout) == [30, 2]
    assert (rollout.messages, rollout.turns[0].message_index) == ((), None)


@pytest.mark.parametrize("data", [[float("inf")], [256], ["a"], 7, [[1]]])
def test_bytes_that_are_none_are_refused_in_words(data: Any):
    logprobs = {"content": [{"token": "4", "logprob": -0.5, "bytes": data}]}
    with pytest.raises(RecordError, match="`bytes` that are not numbers below 256"):
        read(openai_chat.FORMAT, chat(choice(logprobs=logprobs)))
