"""Random agents: what clients do with a gateway, through the clients of OpenAI and Anthropic, and what they were
answered.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import anthropic
import openai
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.gateway.clients import Message, add_delta, blocks_of, from_blocks, from_items, items_of
from tests.gateway.script import CITIES, WORDS


def tool(name: str, about: str) -> dict[str, Any]:
    properties = {"city": {"type": "string"}, "days": {"type": "number"}}
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


TOOLS = [tool("weather", "The weather now."), tool("forecast", "The weather of the next days.")]


@dataclass
class Habits:
    """How often an agent does what; weights of what it does next, then probabilities."""

    appends: float = 12
    retries: float = 1
    edits: float = 1
    edits_answer: float = 0.5
    shortens: float = 0.7
    compacts: float = 0.5
    branches: float = 1
    changes_tools: float = 0.3
    changes_kwargs: float = 0.3
    completes: float = 0.7
    """Asks for a completion of a text."""
    leaves: float = 0.4
    """Goes away amid a stream."""

    system: float = 0.6
    tools: float = 0.7
    streams: float = 0.5
    messages: float = 0.3
    """Asks by the Messages API, where the request can be written so."""
    responses: float = 0.3
    """Asks by the Responses API, else."""
    several: float = 0.25
    """Asks for two or three answers."""
    short: float = 0.15
    """Allows few tokens, so that answers are cut."""
    drops_reasoning: float = 0.3
    respells_arguments: float = 0.3
    kwargs: tuple[dict[str, Any], ...] = ({}, {}, {}, {}, {}, {}, {}, {"enable_thinking": False})
    """Template arguments, of which one is chosen."""
    roles: bool = True
    """False: user and assistant take turns, and nothing else."""
    user_only: bool = False
    """Never answers with tool results."""
    stops: tuple[str, ...] = ()

    ACTIONS = (
        *("appends", "retries", "edits", "edits_answer", "shortens", "compacts", "branches"),
        *("changes_tools", "changes_kwargs", "completes", "leaves"),
    )


@dataclass
class Call:
    """A request that an agent made, and what came of it."""

    session: str | None
    """The id that was named; None: the gateway finds the session by history."""
    endpoint: str
    body: dict[str, Any]
    began: float
    ended: float = 0.0
    answers: list[Message] = field(default_factory=list)
    """Of a chat: each choice's message as it was got, whole; of a completion: `text`."""
    finish: list[str | None] = field(default_factory=list)
    id: str | None = None
    done: bool = False
    """Whether the answer came to its end."""
    refused: int | None = None
    """The HTTP status, where it is no answer."""
    error: str = ""


@dataclass
class Thread:
    """One conversation of an agent."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    kwargs: dict[str, Any]


@dataclass
class Agent:
    """One agent: a session, several conversations in it, dice."""

    address: str
    model: str
    dice: random.Random
    session: str | None
    by_path: bool = False
    habits: Habits = field(default_factory=Habits)
    calls: list[Call] = field(default_factory=list)
    threads: list[Thread] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    key: str = "none"

    async def run(self, steps: int) -> None:
        """So many steps, one or two calls each."""
        where = f"{self.address}/s/{self.session}/v1" if self.by_path else f"{self.address}/v1"
        headers = {"X-Session-ID": self.session} if self.session and not self.by_path else {}
        async with AsyncOpenAI(
            base_url=where, api_key=self.key, max_retries=0, timeout=120, default_headers=headers
        ) as client:
            self.threads.append(self._opened())
            for _ in range(steps):
                weights = [getattr(self.habits, name) for name in Habits.ACTIONS]
                action = self.dice.choices(Habits.ACTIONS, weights)[0]
                await getattr(self, f"_{action}")(client)

    # What an agent does.

    async def _appends(self, client: AsyncOpenAI) -> None:
        await self._ask(client, self.dice.choice(self.threads[-2:]))

    async def _retries(self, client: AsyncOpenAI) -> None:
        chats = [call for call in self.calls if call.endpoint == "chat"]
        if chats:
            body = copy.deepcopy(self.dice.choice(chats).body)
            await self._chat(client, {**body, "seed": self.dice.randrange(1 << 30)})

    async def _edits(self, client: AsyncOpenAI) -> None:
        thread = self._copied()
        candidates = [message for message in thread.messages if message["role"] in ("user", "system", "tool")]
        message = self.dice.choice(candidates)
        message["content"] = self._words() + " (edited)"
        await self._ask(client, thread, self.dice.random() < 0.7)

    async def _edits_answer(self, client: AsyncOpenAI) -> None:
        thread = self._copied()
        answers = [message for message in thread.messages if message["role"] == "assistant"]
        if not answers:
            return
        answer = self.dice.choice(answers)
        if answer.get("tool_calls") and self.dice.random() < 0.5:
            answer["tool_calls"][0]["function"]["arguments"] = '{"city": "Rome"}'
        else:
            answer["content"] = (answer.get("content") or "") + " indeed"
        await self._ask(client, thread)

    async def _shortens(self, client: AsyncOpenAI) -> None:
        thread = self._copied()
        users = [number for number, message in enumerate(thread.messages) if message["role"] == "user"]
        if len(users) > 1:
            start = self.dice.randrange(len(users) - 1)
            del thread.messages[users[start] : users[start + 1]]
            await self._ask(client, thread)

    async def _compacts(self, client: AsyncOpenAI) -> None:
        thread = self._copied()
        system = [message for message in thread.messages[:1] if message["role"] == "system"]
        thread.messages = [*system, {"role": "user", "content": "So far: " + self._words()}]
        await self._ask(client, thread, False)

    async def _branches(self, client: AsyncOpenAI) -> None:
        first, second = self._copied(), self._copied()
        await asyncio.gather(self._ask(client, first), self._ask(client, second))

    async def _changes_tools(self, client: AsyncOpenAI) -> None:
        if self.habits.tools:
            thread = self._copied()
            thread.tools = [] if thread.tools else TOOLS[:1]
            await self._ask(client, thread)

    async def _changes_kwargs(self, client: AsyncOpenAI) -> None:
        thread = self._copied()
        thread.kwargs = dict(self.dice.choice(self.habits.kwargs))
        await self._ask(client, thread)

    async def _completes(self, client: AsyncOpenAI) -> None:
        prompt = self.dice.choice(self.texts) if self.texts and self.dice.random() < 0.7 else ""
        prompt += f"\n{self._words()} "
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 64, "seed": self.dice.randrange(1 << 30)}
        if self.dice.random() < self.habits.several:
            body["n"] = 2
        call = Call(self.session, "completions", body, time.time())
        self.calls.append(call)
        with _Refusals(call):
            answer = await client.completions.create(model=self.model, **body)
            call.answers = [{"text": choice.text} for choice in answer.choices]
            call.finish = [choice.finish_reason for choice in answer.choices]
            call.id, call.done, call.ended = answer.id, True, time.time()
            self.texts.extend(prompt + choice.text for choice in answer.choices)

    async def _leaves(self, client: AsyncOpenAI) -> None:
        thread = self._copied()
        thread.messages.append({"role": "user", "content": self._words() + " (left)"})
        body = self._body(thread)
        call = Call(self.session, "chat", body, time.time())
        self.calls.append(call)
        with _Refusals(call):
            stream = await client.chat.completions.create(model=self.model, stream=True, **_wire(body))
            async for _chunk in stream:
                break
            await stream.close()

    # How it asks.

    def _opened(self) -> Thread:
        first = [{"role": "user", "content": self._words()}]
        if self.dice.random() < self.habits.system:
            first.insert(0, {"role": "system", "content": "Be brief. " + self._words()})
        tools = list(TOOLS) if self.dice.random() < self.habits.tools else []
        return Thread(first, tools, dict(self.dice.choice(self.habits.kwargs)))

    def _copied(self) -> Thread:
        thread = copy.deepcopy(self.dice.choice(self.threads))
        self.threads.append(thread)
        return thread

    async def _ask(self, client: AsyncOpenAI, thread: Thread, extend: bool = True) -> None:
        """One call of a conversation, which then has one of its answers."""
        if extend and thread.messages[-1]["role"] == "assistant":
            thread.messages.extend(self._reply(thread.messages[-1]))
        while thread.messages and thread.messages[-1]["role"] == "assistant":
            thread.messages.pop()
        call = await self._chat(client, self._body(thread))
        if call.done:
            thread.messages.append(self._sent_back(self.dice.choice(call.answers)))

    def _reply(self, answer: Message) -> list[Message]:
        calls = answer.get("tool_calls") or []
        if calls and not self.habits.user_only and self.dice.random() < 0.85:
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": self._words() or "7 degrees"}
                for call in calls
            ]
            if self.dice.random() < 0.15:
                results.append({"role": "user", "content": self._words()})
            return results
        return [{"role": "user", "content": self._words()}]

    def _sent_back(self, answer: Message) -> Message:
        """The answer as this client keeps it: the same answer, perhaps without reasoning, its JSON respelled."""
        sent = copy.deepcopy(answer)
        if self.dice.random() < self.habits.drops_reasoning:
            sent.pop("reasoning_content", None)
            sent.pop("reasoning", None)
        if self.dice.random() < self.habits.respells_arguments:
            for call in sent.get("tool_calls") or []:
                call["function"]["arguments"] = _respelled(call["function"]["arguments"], self.dice)
        if not sent.get("content") and self.dice.random() < 0.5:
            sent["content"] = self.dice.choice([None, ""]) if sent.get("tool_calls") else ""
        return sent

    def _body(self, thread: Thread) -> dict[str, Any]:
        body: dict[str, Any] = {
            "messages": copy.deepcopy(thread.messages),
            "max_tokens": self.dice.randint(1, 12) if self.dice.random() < self.habits.short else 4096,
            "seed": self.dice.randrange(1 << 30),
            "temperature": self.dice.choice([1.0, 0.7]),
        }
        if thread.tools:
            body["tools"] = thread.tools
        if thread.kwargs:
            body["chat_template_kwargs"] = thread.kwargs
        if self.dice.random() < self.habits.several:
            body["n"] = self.dice.choice([2, 3])
        if self.habits.stops and self.dice.random() < 0.3:
            body["stop"] = list(self.habits.stops)
        return body

    async def _chat(self, client: AsyncOpenAI, body: dict[str, Any]) -> Call:
        call = Call(self.session, "chat", body, time.time())
        self.calls.append(call)
        by_messages = self.habits.messages and self.dice.random() < self.habits.messages
        asking = _as_messages(body) if by_messages else None
        by_responses = asking is None and self.habits.responses and self.dice.random() < self.habits.responses
        items = _as_items(body) if by_responses else None
        with _Refusals(call):
            if asking is not None:
                await self._by_messages(client, call, asking)
            elif items is not None:
                await self._by_responses(client, call, items)
            elif self.dice.random() < self.habits.streams:
                await self._streamed(client, call)
            else:
                answer = await client.chat.completions.create(model=self.model, **_wire(body))
                call.answers = [choice.message.model_dump(exclude_unset=True) for choice in answer.choices]
                call.finish = [choice.finish_reason for choice in answer.choices]
                call.id, call.done = answer.id, True
            call.ended = time.time()
        return call

    async def _by_messages(self, client: AsyncOpenAI, call: Call, asking: dict[str, Any]) -> None:
        call.endpoint = "messages"
        if self.dice.random() < 0.5:
            asking["thinking"] = {"type": "adaptive"}
            kwargs = call.body.get("chat_template_kwargs") or {}
            call.body = {
                **call.body,
                "chat_template_kwargs": {"enable_thinking": True, "thinking": True, **kwargs},
            }
        async with AsyncAnthropic(
            base_url=str(client.base_url).removesuffix("/v1/"),
            api_key=self.key,
            max_retries=0,
            timeout=120,
            default_headers=dict(client._custom_headers),  # type: ignore[arg-type]
        ) as other:
            if self.dice.random() < 0.3:
                names = {"messages", "system", "tools", "thinking"}
                counting = {name: value for name, value in asking.items() if name in names}
                await other.messages.count_tokens(model=self.model, **counting)
            if self.dice.random() < self.habits.streams:
                async with other.messages.stream(model=self.model, **asking) as stream:
                    message: Any = await stream.get_final_message()
            else:
                message = await other.messages.create(model=self.model, **asking)
        call.answers, call.finish = (
            [from_blocks([block.to_dict() for block in message.content])],
            [_FINISH[message.stop_reason]],
        )
        call.id, call.done = message.id, True

    async def _by_responses(self, client: AsyncOpenAI, call: Call, items: list[dict[str, Any]]) -> None:
        call.endpoint, body = "responses", call.body
        asking: dict[str, Any] = {"input": items, "max_output_tokens": body["max_tokens"]}
        if items and items[0].get("role") == "system":
            asking |= {"instructions": items[0]["content"], "input": items[1:]}
        asking["store"] = self.dice.random() < 0.5
        asking["extra_body"] = {
            name: body[name] for name in ("seed", "chat_template_kwargs", "stop") if name in body
        }
        asking["temperature"] = body["temperature"]
        if "tools" in body:
            asking["tools"] = [{"type": "function", **entry["function"]} for entry in body["tools"]]
        response: Any = None
        if self.dice.random() < self.habits.streams:
            async for event in await client.responses.create(model=self.model, stream=True, **asking):
                response = getattr(event, "response", response)
            assert response.status != "failed", response.error
        else:
            response = await client.responses.create(model=self.model, **asking)
        answer = from_items([item.to_dict() for item in response.output])
        stopped = "tool_calls" if answer.get("tool_calls") else "stop"
        call.answers = [answer]
        call.finish = [stopped if response.status == "completed" else "length"]
        call.id, call.done = response.id, True

    async def _streamed(self, client: AsyncOpenAI, call: Call) -> None:
        parts: dict[int, Message] = {}
        finish: dict[int, str | None] = {}
        stream = await client.chat.completions.create(model=self.model, stream=True, **_wire(call.body))
        async for chunk in stream:
            call.id = chunk.id
            for choice in chunk.choices:
                added = choice.delta.model_dump(exclude_unset=True)
                add_delta(parts.setdefault(choice.index, {"role": "assistant"}), added)
                finish[choice.index] = choice.finish_reason or finish.get(choice.index)
        call.answers = [parts[number] for number in sorted(parts)]
        call.finish = [finish[number] for number in sorted(parts)]
        call.done = len(parts) == call.body.get("n", 1) and None not in call.finish

    def _words(self) -> str:
        return " ".join(self.dice.choices([*WORDS, *CITIES], k=self.dice.randint(1, 8)))


class _Refusals:
    """Keeps the status that a call was refused with."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        if isinstance(error, openai.APIStatusError | anthropic.APIStatusError):
            self.call.refused, self.call.error = error.status_code, error.message
            return True
        # A stream that breaks off is an error of the HTTP client, whichever one the SDK has.
        broken = "TransportError" in {kind.__name__ for kind in type(error).__mro__}
        if broken or isinstance(error, openai.APIError | anthropic.APIError):
            self.call.refused, self.call.error = 0, str(error)
            return True
        return False


def _wire(body: dict[str, Any]) -> dict[str, Any]:
    """The body as the client's arguments."""
    arguments = {name: value for name, value in body.items() if name != "chat_template_kwargs"}
    if "chat_template_kwargs" in body:
        arguments["extra_body"] = {"chat_template_kwargs": body["chat_template_kwargs"]}
    return arguments


_FINISH = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


def _as_messages(body: dict[str, Any]) -> dict[str, Any] | None:
    """The body as arguments of the other client; None if its messages cannot be written so."""
    system = [message["content"] for message in body["messages"] if message["role"] == "system"]
    turns: list[dict[str, Any]] = []
    for message in body["messages"][len(system) :]:
        role = "assistant" if message["role"] == "assistant" else "user"
        if turns and turns[-1]["role"] == role and (role == "assistant" or turns[-1]["ended"]):
            return None  # two messages would be one
        if not turns or turns[-1]["role"] != role:
            turns.append({"role": role, "content": [], "ended": False})
        turns[-1]["content"] += blocks_of(message)
        turns[-1]["ended"] = message["role"] == "user"
    if len(system) > 1 or body.get("n", 1) > 1:
        return None
    messages = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    asking = {"messages": messages, "max_tokens": body["max_tokens"]}
    extra = {name: body[name] for name in ("seed", "temperature", "chat_template_kwargs") if name in body}
    if system:
        asking["system"] = system[0]
    if "stop" in body:
        asking["stop_sequences"] = body["stop"]
    if "tools" in body:
        functions = [entry["function"] for entry in body["tools"]]
        names = {"name": "name", "description": "description", "input_schema": "parameters"}
        asking["tools"] = [{name: function[theirs] for name, theirs in names.items()} for function in functions]
    return {**asking, "extra_body": extra}


def _as_items(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The messages as items; None if they cannot be written so."""
    roles = [message["role"] for message in body["messages"]]
    if body.get("n", 1) > 1 or any(pair == ("assistant", "assistant") for pair in pairwise(roles)):
        return None
    return [item for message in body["messages"] for item in items_of(message)]


def _respelled(arguments: str, dice: random.Random) -> str:
    """The same JSON value, written otherwise; what is not exact JSON stays."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    if '"days"' in arguments:
        return arguments  # a number stays as it was written
    return json.dumps(value, separators=dice.choice([(",", ":"), (", ", ": "), None]))
