"""Logs written by Agent Lightning itself: `python agent_lightning_writer.py FOLDER`, by a Python that has it.

Not a test: tests run it with another Python (agentlightning 0.3.0) and read what it wrote. Into FOLDER it puts

    spans.jsonl     spans of chat calls, with what its instrumentation of AgentOps takes from an answer
    proxy.jsonl     spans as its proxy records them, ids as text
    triplets.jsonl  what `TracerTraceToTriplet` makes of the spans
    proxied.jsonl   what `LlmProxyTraceToTriplet` makes of the proxy's
    expected.json   prompt, completion and logprobs of each call

`python agent_lightning_writer.py --triplets FILE` prints the ids that `TracerTraceToTriplet` finds in the spans
of a file. The conversations are those of `fixtures/formats/make_nemo.py`, in tokens of the toy tokenizer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "formats"))
# LiteLLM, which comes with it, else asks the network for prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

from agentlightning.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet
from agentlightning.instrumentation.agentops import instrument_agentops
from agentlightning.types import Span
from make_nemo import CONVERSATION, SUM, WEATHER, Call, Toy, Wire, calls_of, chat_tools
from make_responses import MODEL, entries
from openai.types.chat import ChatCompletion
from opentelemetry.sdk.trace import TracerProvider

TOOLS = chat_tools([WEATHER])


def calls(toy: Toy) -> list[tuple[tuple[Wire, ...], list[Wire], Call]]:
    """Messages, tools and tokens of each call: the sum, clean and merged, then the talk about the weather."""
    (clean,), (merged,) = calls_of(toy, SUM, []), calls_of(toy, SUM, [], resplit=0)
    talk = calls_of(toy, CONVERSATION, TOOLS, resplit=1, reencode=True)
    return [(SUM, [], clean), (SUM, [], merged), *((CONVERSATION, TOOLS, call) for call in talk)]


def response(toy: Toy, number: int, message: Wire, call: Call) -> ChatCompletion:
    """The answer of a vLLM server, as the client library hands it on."""
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "finish_reason": reason, "message": message, "logprobs": entries(toy, call)}
    sizes = len(call.prompt), len(call.completion)
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return ChatCompletion.model_validate(
        {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [choice | {"token_ids": call.completion}],
            "prompt_token_ids": call.prompt,
            "usage": dict(zip(names, (*sizes, sum(sizes)), strict=True)),
        }
    )


def traced(number: int, name: str, attributes: Wire) -> Span:
    """A span that went through OpenTelemetry, which drops what has no value."""
    span = TracerProvider().get_tracer("toy").start_span(name)
    span.set_attributes({key: value for key, value in attributes.items() if value is not None})
    span.end()
    return Span.from_opentelemetry(span, "ro-0", "at-0", number)  # type: ignore[arg-type]


def chat_spans(toy: Toy) -> list[Span]:
    """One span a call, by the instrumentation."""
    instrument_agentops()
    from agentops.instrumentation.providers.openai.wrappers import chat

    spans = []
    for number, (messages, tools, call) in enumerate(calls(toy)):
        request: Wire = {"model": MODEL, "messages": [dict(message) for message in messages[: call.index]]}
        if tools:
            request["tools"] = tools
        answer = response(toy, number, messages[call.index], call)
        attributes = chat.handle_chat_attributes(kwargs=request, return_value=answer)
        spans.append(traced(number, "openai.chat.completion", attributes))
    return spans


def proxy_spans(toy: Toy) -> list[Span]:
    """One span a call with the raw answer's fields as text, as LiteLLM records them."""
    return [
        traced(
            number,
            "raw_gen_ai_request",
            {
                "llm.hosted_vllm.id": f"chatcmpl-{number}",
                "llm.hosted_vllm.prompt_token_ids": str(call.prompt),
                "llm.hosted_vllm.choices": str([{"token_ids": call.completion, "logprobs": None}]),
            },
        )
        for number, (_, _, call) in enumerate(calls(toy))
    ]


def write(path: Path, models: list[Any]) -> None:
    """One model a line."""
    path.write_text("".join(model.model_dump_json() + "\n" for model in models), encoding="utf-8")


def main(arguments: list[str]) -> None:
    """What the command line asks for."""
    if arguments[:1] == ["--triplets"]:
        lines = Path(arguments[1]).read_text(encoding="utf-8").splitlines()
        triplets = TracerTraceToTriplet().adapt([Span.model_validate_json(line) for line in lines])
        print(json.dumps([[triplet.prompt["token_ids"], triplet.response["token_ids"]] for triplet in triplets]))
        return
    folder, toy = Path(arguments[0]), Toy()
    folder.mkdir(parents=True, exist_ok=True)
    spans, proxied = chat_spans(toy), proxy_spans(toy)
    write(folder / "spans.jsonl", spans)
    write(folder / "proxy.jsonl", proxied)
    write(folder / "triplets.jsonl", TracerTraceToTriplet().adapt(spans))
    write(folder / "proxied.jsonl", LlmProxyTraceToTriplet().adapt(proxied))
    expected = [[call.prompt, call.completion, call.logprobs] for _, _, call in calls(toy)]
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main(sys.argv[1:])
