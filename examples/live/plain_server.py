"""An ordinary server: each turn it renders all messages and tokenizes them again.

    python examples/live/plain_server.py MODEL LOG PORT

The log has one conversation per row: the prompt ids of each call, and what was sampled. A rollout worker that
talks to a chat endpoint logs the same.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

from aiohttp import web
from transformers import AutoTokenizer

from tito_audit.provider import SamplingParams
from tito_audit.providers import open_provider

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class PlainServer:
    """A model behind a chat endpoint, and its log."""

    def __init__(self, model: Path, log: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(str(model))
        self.provider = open_provider(f"hf={model}")
        self.log = log
        self.rows: dict[str, dict[str, Any]] = {}

    async def models(self, request: web.Request) -> web.Response:
        """The one model."""
        return web.json_response({"object": "list", "data": [{"id": self.provider.model, "object": "model"}]})

    async def chat(self, request: web.Request) -> web.Response:
        """Answer one request."""
        body = await request.json()
        messages, tools = [as_template_wants(one) for one in body["messages"]], body.get("tools")
        text = self.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
        prompt = self.tokenizer.encode(text, add_special_tokens=False)
        sampling = SamplingParams(temperature=1.0, max_tokens=body.get("max_tokens"), seed=body.get("seed"))
        sampled = await self.provider.generate(prompt, sampling)
        answer = parsed(self.tokenizer.decode(sampled.output_ids, skip_special_tokens=True))
        row = self.rows.setdefault(messages[0]["content"], {"id": f"trip-{len(self.rows)}", "calls": []})
        row["calls"].append(
            {
                "prompt_ids": prompt,
                "completion_ids": sampled.output_ids,
                "logprobs": sampled.logprobs,
                "finish_reason": sampled.finish_reason,
            }
        )
        row |= {"messages": [*body["messages"], answer], "tools": tools}
        self.log.write_text("".join(json.dumps(one) + "\n" for one in self.rows.values()), encoding="utf-8")
        choice = {"index": 0, "message": answer, "finish_reason": sampled.finish_reason}
        return web.json_response(
            {"id": uuid4().hex, "object": "chat.completion", "created": 0, "model": "toy", "choices": [choice]}
        )


def as_template_wants(message: dict[str, Any]) -> dict[str, Any]:
    """A message with tool-call arguments as objects, as chat templates expect them."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls} if calls else message


def parsed(text: str) -> dict[str, Any]:
    """An answer as the client gets it: text, or tool calls."""
    calls = []
    for found in CALL.findall(text):
        try:
            call = json.loads(found)
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        except (ValueError, KeyError, TypeError):
            return {"role": "assistant", "content": text}
        calls.append({"id": f"call_{uuid4().hex[:8]}", "type": "function", "function": function})
    content = CALL.sub("", text).strip() or None
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


async def serve(model: Path, log: Path, port: int) -> None:
    """Serve until the process ends."""
    server = PlainServer(model, log)
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/chat/completions", server.chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(f"serving at http://127.0.0.1:{port}/v1", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
