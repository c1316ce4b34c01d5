"""Answers logged by the OpenAI client: `python openai_writer.py FOLDER`, by a Python that has it (openai 3.54.0).

Not a test: tests run it with another Python and read what it wrote. Each line is a request beside the client's
object for its answer, by `model_dump_json`; the answers come from a transport in memory. Into FOLDER it puts

    chat.jsonl       chat completions of a service that tells no ids, only token strings
    responses.jsonl  objects of the Responses API with the same
    vllm.jsonl       chat completions of a vLLM server, whose ids are fields that the client does not know
    streamed.jsonl   the first of them as the client joins it out of a stream
    expected.json    prompt, completion and logprobs of each call

`python openai_writer.py --read FILE` prints prompt, completion and logprobs of each line of `vllm.jsonl` as the
client's models read them. The conversations are those of `fixtures/formats/make_nemo.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "formats"))

import httpx2
import openai
from make_nemo import CONVERSATION, SUM, WEATHER, Call, Toy, Wire, calls_of, chat_tools
from make_responses import MODEL, entries
from openai.types.chat import ChatCompletion

TOOLS = chat_tools([WEATHER])
Asked = tuple[tuple[Wire, ...], list[Wire], Call]


def client(body: Wire | str) -> openai.OpenAI:
    """A client whose every request is answered so: an object, or the text of a stream."""
    kind = "text/event-stream" if isinstance(body, str) else "application/json"
    text = body if isinstance(body, str) else json.dumps(body)
    transport = httpx2.MockTransport(
        lambda request: httpx2.Response(200, headers={"content-type": kind}, text=text)
    )
    return openai.OpenAI(
        api_key="none", base_url="http://model.invalid/v1", http_client=httpx2.Client(transport=transport)
    )


def asked_calls(toy: Toy) -> list[Asked]:
    """Messages, tools and tokens of each call: the sum, clean and sampled in other tokens, then a tool call."""
    (clean,), (split,) = calls_of(toy, SUM, []), calls_of(toy, SUM, [], resplit=0)
    call, *_ = calls_of(toy, CONVERSATION, TOOLS)
    return [(SUM, [], clean), (SUM, [], split), (CONVERSATION, TOOLS, call)]


def request(chat: Asked) -> Wire:
    """What the client is given for a chat."""
    messages, tools, call = chat
    about: Wire = {"model": MODEL, "messages": [dict(message) for message in messages[: call.index]]}
    return {**about, "logprobs": True, **({"tools": tools} if tools else {})}


def answer(toy: Toy, chat: Asked, with_ids: bool) -> Wire:
    """The body of a chat answer."""
    messages, _, call = chat
    message = messages[call.index]
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "finish_reason": reason, "message": message, "logprobs": entries(toy, call)}
    body: Wire = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": MODEL}
    if not with_ids:
        return {**body, "choices": [choice]}
    return {**body, "choices": [{**choice, "token_ids": call.completion}], "prompt_token_ids": call.prompt}


def stream(toy: Toy, chat: Asked) -> str:
    """The same as a vLLM server streams it: each token's id in its chunk, those of the prompt in the first."""
    *_, call = chat
    tokens = entries(toy, call)["content"]
    lines = []
    for number, entry in enumerate(tokens):
        last = number == len(tokens) - 1
        choice = {
            "index": 0,
            "delta": {"content": "" if last else entry["token"], **({} if number else {"role": "assistant"})},
            "logprobs": {"content": [entry]},
            "finish_reason": "stop" if last else None,
            "token_ids": [call.completion[number]],
        }
        chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
        first = {"prompt_token_ids": call.prompt} if number == 0 else {}
        lines.append(f"data: {json.dumps({**chunk, **first, 'choices': [choice]})}\n\n")
    return "".join(lines) + "data: [DONE]\n\n"


def responded(toy: Toy, chat: Asked) -> Wire:
    """The body of the same answer by the Responses API."""
    messages, _, call = chat
    content = entries(toy, call)["content"]
    part = {"type": "output_text", "text": messages[call.index]["content"], "annotations": [], "logprobs": content}
    item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 0,
        "model": MODEL,
        "output": [item],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "status": "completed",
    }


def joined(toy: Toy, chat: Asked) -> Any:
    """The answer that the client makes of a stream."""
    with client(stream(toy, chat)).chat.completions.stream(**request(chat)) as events:
        events.until_done()
        return events.get_final_completion()


def line(sent: Wire, reply: Any) -> str:
    """Request and answer as a line."""
    return f'{{"request": {json.dumps(sent)}, "response": {reply.model_dump_json()}}}\n'


def write(folder: Path) -> None:
    """Every file."""
    folder.mkdir(parents=True, exist_ok=True)
    toy = Toy()
    calls = asked_calls(toy)
    files: dict[str, list[str]] = {"chat": [], "responses": [], "vllm": [], "streamed": []}
    for chat in calls:
        for name, with_ids in (("chat", False), ("vllm", True)):
            reply = client(answer(toy, chat, with_ids)).chat.completions.create(**request(chat))
            files[name].append(line(request(chat), reply))
    for chat in calls[:2]:
        sent = {"model": MODEL, "input": chat[0][0]["content"]}
        files["responses"].append(line(sent, client(responded(toy, chat)).responses.create(**sent)))
    files["streamed"].append(line(request(calls[0]), joined(toy, calls[0])))
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    expected = [[call.prompt, call.completion, call.logprobs] for *_, call in calls]
    (folder / "expected.json").write_text(json.dumps(expected), encoding="utf-8")


def facts(text: str) -> list[Any]:
    """Prompt, completion and logprobs of a line."""
    completion: Any = ChatCompletion.model_validate(json.loads(text)["response"])
    (choice,) = completion.choices
    return [completion.prompt_token_ids, choice.token_ids, [entry.logprob for entry in choice.logprobs.content]]


if __name__ == "__main__":
    if sys.argv[1] == "--read":
        print(json.dumps([facts(text) for text in Path(sys.argv[2]).read_text(encoding="utf-8").splitlines()]))
    else:
        write(Path(sys.argv[1]))
