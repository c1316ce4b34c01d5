"""A scripted server that answers in vLLM's form, and says what a test wants it to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from tests import toy
from tests.replay import threaded
from tito_audit.record.message import as_messages


def ids_of(text: str) -> list[int]:
    ids: list[int] = toy.toy_tokenizer().encode(text).tolist()
    return ids


def written(messages: Sequence[Any], **arguments: Any) -> list[int]:
    """The prompt that the template of the toy tokenizer writes."""
    sent = as_messages(messages, "messages")
    return ids_of(toy.toy_renderer().render(sent, add_generation_prompt=True, template_kwargs=arguments))


class Server:
    """What a test wants a server to answer."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[str, Any]] = []
        self.render: Callable[[Any], list[int]] | None = lambda body: written(
            body["messages"], **body.get("chat_template_kwargs", {})
        )
        self.sees: Callable[[list[int]], list[int]] = lambda ids: ids
        self.answer = ids_of("4<|im_end|>")
        self.second: dict[int, float] = {}
        """Logprobs of other tokens than the top choice, whose own is -0.1."""
        self.context = 4096

    def answered(self, path: str, body: Any) -> tuple[int, Any]:
        self.requests.append((path, body))
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "toy", "max_model_len": self.context}]}
        if path == "/v1/chat/completions/render" and self.render is not None:
            return 200, {"request_id": "chatcmpl-1", "token_ids": self.render(body), "model": "toy"}
        if path != "/v1/completions":
            return 404, {"detail": "Not Found"}
        if len(body["prompt"]) > self.context:
            return 400, {"error": {"message": "the prompt is too long", "code": 400}}
        ids = self.answer[: body["max_tokens"]]
        tops = [
            {f"token_id:{token}": -0.1, **{f"token_id:{i}": v for i, v in self.second.items()}} for token in ids
        ]
        choice = {
            "index": 0,
            "text": "",
            "token_ids": ids,
            "prompt_token_ids": self.sees(body["prompt"]),
            "logprobs": {"token_logprobs": [-0.1] * len(ids), "top_logprobs": tops if body["logprobs"] else None},
            "finish_reason": "length",
        }
        return 200, {"object": "text_completion", "model": "toy", "choices": [choice]}


@contextmanager
def running() -> Iterator[Server]:
    """The server, which answers while this is open."""
    script = Server()

    async def answer(request: web.Request) -> web.StreamResponse:
        data = await request.read()
        status, body = script.answered(request.path, json.loads(data) if data else None)
        return web.json_response(body, status=status)

    with threaded(lambda: answer) as script.url:
        yield script
