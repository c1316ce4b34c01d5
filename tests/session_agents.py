"""Random agents that talk to a session over random chat templates, and what their prompts have to be.

What a prompt has to be is worked out apart from the engine: the template is run by plain jinja2, its text encoded
by the `tokenizers` library, and what was sampled is remembered here.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import pytest
import tokenizers

from tests.gateway.reference import compiled
from tests.tables import stored
from tests.world import ROOT
from tito_audit.errors import RenderError
from tito_audit.provider import GenerationResult
from tito_audit.record.message import as_messages, as_tools
from tito_audit.serve.gateway import Threads
from tito_audit.sessions.engine import Session
from tito_audit.sessions.model import Branch, ChatCall, ForkReason, Node, Prompt, Proof

Wire = dict[str, Any]
_LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": _LOOK}]
WORDS = ["tokens", " drift", "  two", "\n\n", "{}", '"quoted"', " naïve", " 東京", " 🎉", "<b>", " a\tb"]
WORDS += ["'s", " 12345", "."]
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
INTENDED = {ForkReason.EDITED, ForkReason.SHORTENED, ForkReason.NEW_CONVERSATION, ForkReason.TEMPLATE_REWRITES}
INTENDED |= {ForkReason.NO_PLACE}
TEMPLATE = (ROOT / "tests" / "data" / "session.jinja").read_text(encoding="utf-8")


def quoted(text: str) -> str:
    """A text as Jinja writes it."""
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True)
class Style:
    """What a random template does."""

    opener: str = "<|im_start|>{role}\n"
    end: str = "<|im_end|>\n"
    last_end: str | None = None
    """The end of the last message of a conversation that is closed, where it is another."""
    user_end: str | None = None
    strips: bool = False
    """Whether it takes reasoning out before the last question."""
    never: bool = False
    """Whether it never writes reasoning."""
    moves: bool = False
    """Whether it writes the system prompt in the last question."""
    trims: bool = False
    opens_thought: bool = False
    bos: str = ""

    @property
    def source(self) -> str:
        """The template."""
        shown = "false" if self.never else "(r and loop.index0 > ns.last)" if self.strips else "r"
        parts = {
            "BOS": quoted(self.bos),
            "OPENER": "(" + quoted(self.opener).replace("{role}", '" + m.role + "') + ")",
            "ANSWERS": quoted(self.opener.replace("{role}", "assistant")),
            "SHOWN": "true" if self.opens_thought else shown,
            "CONTENT": "((m.content or '') | trim)" if self.trims else "(m.content or '')",
            "LAST_END": quoted(self.end if self.last_end is None else self.last_end),
            "USER_END": quoted(self.end if self.user_end is None else self.user_end),
            "END": quoted(self.end),
            "MOVES": str(self.moves).lower(),
            "THOUGHT": quoted("<think>\n" if self.opens_thought else ""),
        }
        return re.sub(r"@(\w+)@", lambda name: parts[name[1]], TEMPLATE)

    def appends(self, history: Sequence[Wire]) -> bool:
        """Whether it has to write this history the same whatever follows."""
        reasoned = any(message.get("reasoning_content") for message in history if message["role"] == "assistant")
        system = bool(history) and history[0]["role"] == "system"
        return not (reasoned and (self.strips or self.never)) and not (self.moves and system)


STYLES: Mapping[str, Style] = {name: Style(**does) for name, does in stored(__file__, "styles").items()}


def write(source: str, messages: Sequence[Wire], tools: Sequence[Any], *, opens: bool, **variables: Any) -> str:
    """What plain jinja2 writes."""
    wires = [_parsed({key: value for key, value in message.items() if value is not None}) for message in messages]
    return compiled(source).render(
        messages=wires, tools=list(tools) or None, documents=None, add_generation_prompt=opens, **variables
    )


def _parsed(wire: Wire) -> Wire:
    if not wire.get("tool_calls"):
        return wire
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in wire["tool_calls"]
    ]
    return {**wire, "tool_calls": calls}


@dataclass
class Reply:
    """An answer as the agent knows it."""

    node: Node
    prompt: list[int]
    output: list[int]
    history: list[Wire]
    """In full, the answer last."""
    text: str
    """The prompt, as the template wrote it."""
    closed: str
    """The history, as the template wrote it for its own call."""
    answer_text: str
    stopped: bool


@dataclass
class Agent:
    """A client that makes calls, samples their answers, and checks their prompts."""

    rng: random.Random
    session: Session
    source: str
    style: Style | None
    encoder: tokenizers.Tokenizer
    stop: int
    variables: Mapping[str, Any] = field(default_factory=dict)
    with_tools: bool = True
    systems: bool = True
    reasons: bool = True
    prefix: str = "agent"
    replies: list[Reply] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    threads: Threads = field(default_factory=Threads)

    @property
    def end(self) -> str:
        """The text of the stop token."""
        return str(self.encoder.id_to_token(self.stop))

    def talk(self, calls: int) -> None:
        """Make so many calls."""
        for _ in range(calls):
            self._step()

    def _step(self) -> None:
        rng = self.rng
        if not self.replies:
            return self._ask(self._opening(), None, whole=True)
        base = self.replies[-1] if rng.random() < 0.7 else rng.choice(self.replies)
        op = rng.choices(["append", "retry", "edit", "shorten", "compact", "two"], [10, 1, 2, 1, 1, 1])[0]
        if op == "append":
            return self._ask([*base.history, *self._more(base)], base)
        if op == "retry":
            return self._ask(base.history[:-1], None, changed=True)
        if op == "two":  # under way at once
            first, second = ([*base.history, *self._more(base)] for _ in range(2))
            calls = [self._call(first), self._call(second)]
            prompts = [self.session.prompt(call) for call in calls]
            for call, prompt, history in zip(calls[::-1], prompts[::-1], (second, first), strict=True):
                self._check(prompt, history, base, call)
                self._commit(prompt, history, call)
            return None
        history = [dict(message) for message in base.history] + self._more(base)
        if op == "compact":
            return self._ask(self._opening(), None, whole=True)
        at = rng.randrange(len(base.history))
        if op == "edit":
            history[at]["content"] = (history[at].get("content") or "") + " edited"
        else:
            del history[at : at + rng.choice([1, 2])]
        if not history or (history[-1]["role"] == "assistant"):
            history.append({"role": "user", "content": "go on"})
        return self._ask(history, None, changed=True)

    def _ask(self, history: list[Wire], base: Reply | None, *, whole: bool = False, changed: bool = False) -> None:
        call = self._call(history, as_is=changed)
        try:
            prompt = self.session.prompt(call)
        except RenderError:
            with pytest.raises(jinja2.TemplateError):
                write(self.source, history, TOOLS if call.tools else (), opens=True, **self.variables)
            return
        self._check(prompt, history, base, call, changed=changed)
        if whole:
            assert prompt.kept == 0
        self._commit(prompt, history, call)

    def _check(
        self, prompt: Prompt, history: list[Wire], base: Reply | None, call: ChatCall, *, changed: bool = False
    ) -> None:
        """Whether a prompt is the ids that were sampled and the template's text for the rest."""
        ids = prompt.ids.tolist()
        assert prompt.length == len(ids)
        text = write(self.source, history, TOOLS if call.tools else (), opens=True, **self.variables)
        self.counts[prompt.branch] = self.counts.get(prompt.branch, 0) + 1
        if prompt.proof is not None:
            self.counts[prompt.proof] = self.counts.get(prompt.proof, 0) + 1
        assert (prompt.fork is not None) == (prompt.branch is Branch.FORK)
        spaced = self.encoder.encode("a").tokens[0].startswith("▁")  # it begins a text with a space
        inside = spaced and prompt.kept and ids[prompt.kept - 1] not in self._controls
        before = "\n" if inside else ""
        expected = self._encoded(before + prompt.added)[len(self._encoded(before)) :]
        assert ids[prompt.kept :] == expected, "what is new is encoded as the library does, within a text"
        if prompt.parent is None:
            assert prompt.kept == 0
            assert prompt.added == text, "the client's view, as the template writes it"
            if prompt.fork is not None:
                assert prompt.fork.reason in INTENDED, prompt.fork
                self.counts[prompt.fork.reason] = self.counts.get(prompt.fork.reason, 0) + 1
        else:
            self._check_kept(prompt, ids, text)
        if base is not None and not changed:
            appends = self.style is None or self.style.appends(base.history)
            if self.style is not None and appends:
                assert prompt.branch is Branch.CONTINUES, prompt.fork
            if prompt.branch is Branch.CONTINUES:
                same = prompt.parent.seen_ids.tolist() == base.prompt + base.output
                assert same or prompt.alike, "the client cannot tell the two apart"
            else:
                self._check_rewritten(prompt, base, text)

    def _check_kept(self, prompt: Prompt, ids: list[int], text: str) -> None:
        assert prompt.parent is not None
        parent = next(answer for answer in self.replies if answer.node is prompt.parent)
        seen = parent.prompt + parent.output
        assert prompt.kept == len(seen)
        assert ids[: prompt.kept] == seen, "what was sampled stays as it was sampled"
        assert text.endswith(prompt.added)
        before = text[: len(text) - len(prompt.added)]
        assert before.startswith(parent.text), "the prompt that the answer was sampled for"
        if prompt.proof is Proof.SAME_TEXT:
            assert before == parent.text + parent.answer_text
        else:
            ends = (self.end, "<|im_end|>", "<|endoftext|>", "")
            stems = [
                before.removesuffix(end) for end in ends if before.endswith(end) and (parent.stopped or not end)
            ]
            assert any(parent.closed.startswith(stem) and len(stem) >= len(parent.text) for stem in stems), (
                "the template's text up to the end of the answer, then at most another end"
            )

    def _check_rewritten(self, prompt: Prompt, base: Reply, text: str) -> None:
        """Whether a fork of an unchanged history is the template's doing."""
        assert prompt.fork.reason in (ForkReason.TEMPLATE_REWRITES, ForkReason.NO_PLACE), prompt.fork
        reasoning = base.history[-1].get("reasoning_content") or ""
        keeps_thought = reasoning.strip() in base.closed[len(base.text) :]
        stem = base.closed.rstrip().removesuffix(self.end).rstrip()
        sampled_text = (base.text + base.answer_text).removesuffix(self.end)
        assert not base.closed.startswith(base.text) or not keeps_thought or not text.startswith(stem), prompt.fork
        assert not text.startswith(sampled_text) or not base.stopped, prompt.fork

    def _commit(self, prompt: Prompt, history: list[Wire], call: ChatCall) -> None:
        call_id = f"{self.prefix}-{len(self.rows)}"
        samples = [self._sample(history, call) for _ in range(self.rng.choice([1, 1, 1, 2]))]
        asked = tuple(prompt.ids.tolist())
        results = [
            GenerationResult(asked, tuple(ids), (-0.5,) * len(ids), finish_reason="stop" if stopped else "length")
            for ids, stopped, _, _ in samples
        ]
        answers = [answer for _, _, answer, _ in samples]
        nodes = self.session.commit(call_id, prompt, call, results, answers)
        text = write(self.source, history, TOOLS if call.tools else (), opens=True, **self.variables)
        names = self.threads.assign(call_id, prompt, len(nodes))
        for node, name, (ids, stopped, answer, answer_text) in zip(nodes, names, samples, strict=True):
            full = [*history, answer]
            closed = write(self.source, full, TOOLS if call.tools else (), opens=False, **self.variables)
            self.replies.append(Reply(node, prompt.ids.tolist(), ids, full, text, closed, answer_text, stopped))
            self.rows.append(self._row(node, prompt, history, answer, name, call))

    def _row(
        self, node: Node, prompt: Prompt, history: Sequence[Wire], answer: Wire, thread: str, call: ChatCall
    ) -> dict[str, Any]:
        parent, fork = prompt.parent, prompt.fork
        return {
            "tito_audit_gateway": 1,
            "session_id": self.prefix,
            "call_id": node.call_id,
            "thread_id": thread,
            "choice": node.choice,
            "n": 1,
            "parent": None if parent is None else {"call_id": parent.call_id, "choice": parent.choice},
            "branch": prompt.branch,
            "fork": None
            if fork is None
            else {"reason": fork.reason, "detail": fork.detail, "message": fork.message},
            "kept": prompt.kept,
            "proof": prompt.proof,
            "endpoint": "chat.completions",
            "model": "toy",
            "created": 1.0 + len(self.rows),
            "weight_version": None,
            "sampling": {"temperature": 1.0},
            "chat_template_kwargs": {},
            "tools": list(call.tools),
            "messages": list(history),
            "response_message": answer,
            "prompt_token_ids": prompt.ids.tolist(),
            "completion_token_ids": node.output_ids.tolist(),
            "logprobs": node.logprobs.tolist(),
            "finish_reason": node.finish_reason,
            "stop_reason": None,
            "status": "answered",
        }

    @property
    def _controls(self) -> set[int]:
        return set(self.encoder.get_added_tokens_decoder())

    def _encoded(self, text: str) -> list[int]:
        return list(self.encoder.encode(text, add_special_tokens=False).ids)

    # what the client sends

    def _opening(self) -> list[Wire]:
        question: list[Wire] = [{"role": "user", "content": f"question {self.rng.random()} {self._words()}"}]
        return (
            [{"role": "system", "content": "be brief"}, *question]
            if self.systems and self.rng.random() < 0.5
            else question
        )

    def _more(self, base: Reply) -> list[Wire]:
        rng, last = self.rng, base.history[-1]
        if last.get("tool_calls"):
            return [
                {"role": "tool", "tool_call_id": call["id"], "content": self._words()}
                for call in last["tool_calls"]
            ]
        more: list[Wire] = [{"role": "user", "content": f"{rng.random()} {self._words()}"}]
        if self.systems and self.style is not None and rng.random() < 0.1:
            more.insert(0, {"role": "system", "content": "now be long"})
        return more

    def _call(self, history: Sequence[Wire], *, as_is: bool = False) -> ChatCall:
        sent = [self._as_sent(wire) if wire["role"] == "assistant" and not as_is else wire for wire in history]
        tools = as_tools(TOOLS, "tools") if self.with_tools else ()
        return ChatCall(as_messages(sent, "messages"), tools)

    def _as_sent(self, answer: Wire) -> Wire:
        """An answer in one of the ways in which clients send it back."""
        rng, sent = self.rng, dict(answer)
        if rng.random() < 0.5:
            sent.pop("reasoning_content", None)
        if not sent.get("content"):
            sent["content"] = rng.choice([None, ""])
        elif rng.random() < 0.3:
            sent["content"] = [{"type": "text", "text": sent["content"]}]
        if rng.random() < 0.3:
            sent |= {"refusal": None, "annotations": None, "function_call": None}
        if sent.get("tool_calls") and rng.random() < 0.5:
            sent["tool_calls"] = [self._respaced(call) for call in sent["tool_calls"]]
        return sent

    def _respaced(self, call: Wire) -> Wire:
        arguments = json.loads(call["function"]["arguments"])
        text = json.dumps(arguments, indent=self.rng.choice([None, 2]), ensure_ascii=self.rng.random() < 0.5)
        return {**call, "function": {**call["function"], "arguments": text}}

    # what the model samples

    def _words(self) -> str:
        return "".join(self.rng.choice(WORDS) for _ in range(self.rng.randrange(1, 8)))

    def _sample(self, history: Sequence[Wire], call: ChatCall) -> tuple[list[int], bool, Wire, str]:
        """The ids of an answer, whether it ended, its message, and its text."""
        rng = self.rng
        opened = self.style is not None and self.style.opens_thought
        thought = (
            f"hm {self._words()}".strip() if opened or (self.style is not None and rng.random() < 0.4) else ""
        )
        text = ("" if opened else "<think>\n") + f"{thought}\n</think>\n\n" if thought else ""
        calls = self.with_tools and rng.random() < 0.4
        text += self._words() if not calls or rng.random() < 0.5 else ""
        if calls:
            for _ in range(rng.choice([1, 1, 2])):
                arguments = {"at": self._words(), "n": rng.choice([1, 1.0, 2.50, None, True])}
                spaced = rng.choice([(", ", ": "), (",", ":"), (" , ", " : ")])
                written = json.dumps(arguments, separators=spaced, ensure_ascii=rng.random() < 0.5)
                text += f'<tool_call>\n{{"name": "look", "arguments": {written}}}\n</tool_call>'
        ids = self._split(text)
        stopped = rng.random() < 0.85
        if not stopped:
            ids = ids[: rng.randrange(len(ids) + 1)]
        answer_text = self.session._writer.text(_ids(ids))
        answer = _message(answer_text, opened, f"{self.prefix}{len(self.rows)}")
        return [*ids, self.stop] if stopped else ids, stopped, answer, answer_text + (self.end if stopped else "")

    def _split(self, text: str) -> list[int]:
        """The ids of a text as a model may sample them: cut anywhere, not where the tokenizer would."""
        ids: list[int] = []
        at = 0
        while at < len(text):
            end = at + self.rng.choice([3, 9, 40, 200])
            for token in re.findall(r"</?(?:think|tool_call)>", text):  # the control tokens stay whole
                place = text.find(token, at)
                if at <= place < end:
                    end = place + len(token) if place == at else place
            ids += self._encoded(text[at:end])
            at = end
        return ids


def _ids(ids: Sequence[int]) -> Any:
    from tito_audit.record.arrays import as_ids

    return as_ids(list(ids), "ids")


def _message(text: str, opened: bool, name: str) -> Wire:
    """An answer as a server parses it: nothing that does not parse leaves the content."""
    reasoning: str | None = None
    if opened or text.startswith("<think>\n"):
        thought, closed, rest = text.removeprefix("" if opened else "<think>\n").partition("\n</think>\n\n")
        reasoning, text = thought, rest if closed else ""
    calls = []
    bodies = CALL.findall(text)
    if bodies and text.endswith("</tool_call>"):
        text = text.partition("<tool_call>")[0]
        for number, body in enumerate(bodies):
            arguments = body.partition('"arguments": ')[2][:-1]
            called = {"name": "look", "arguments": arguments}
            calls.append({"id": f"{name}-{number}", "type": "function", "function": called})
    wire: Wire = {"role": "assistant", "content": text}
    if reasoning:
        wire["reasoning_content"] = reasoning
    return {**wire, "tool_calls": calls} if calls else wire
