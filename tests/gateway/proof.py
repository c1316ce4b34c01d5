"""What a gateway promises, proved from three sides: its log, what the upstream was asked, what clients got."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.gateway.agents import Call
from tests.gateway.reference import Reference, Refused

Line = dict[str, Any]
Message = dict[str, Any]
_HISTORY = {"edited", "shortened", "new_conversation"}


@dataclass
class Proof:
    """All that there is to prove about a run."""

    reference: Reference
    log: Sequence[Line]
    upstream: Sequence[dict[str, Any]]
    """The requests of the stub, with its answers."""
    calls: Sequence[Call]

    @cached_property
    def lines(self) -> list[Line]:
        return [line for line in self.log if "closed" not in line]

    @cached_property
    def by_key(self) -> dict[tuple[str, int], Line]:
        lines = {(line["call_id"], line["choice"]): line for line in self.lines}
        assert len(lines) == len(self.lines), "two lines of the same call and choice"
        return lines

    @cached_property
    def sent(self) -> dict[str, Call]:
        """The clients' calls by the id of the answer."""
        return {call.id: call for call in self.calls if call.id}

    def all(self) -> Iterator[str]:
        """Every broken promise, in words."""
        yield from self.upstream_said_it()
        yield from self.clients_got_it()
        yield from self.refused()
        for number, line in enumerate(self.lines):
            for problem in self.line(number, line):
                yield f"line {number} ({line['call_id']}/{line['choice']}, {line['branch']}): {problem}"

    # The log against the upstream.

    def upstream_said_it(self) -> Iterator[str]:
        """Each line's prompt was sent as it is logged, and its completion is what came back, to the last id."""
        sampled = Counter(
            _sampled(request["body"]["prompt"], answer["ids"], answer["logprobs"])
            for request in self.upstream
            for answer in request["answers"]
        )
        for line in self.lines:
            if line["status"] != "answered":
                continue
            key = _sampled(line["prompt_token_ids"], line["completion_token_ids"], line["logprobs"])
            if not sampled[key]:
                yield f"{line['call_id']}/{line['choice']}: the upstream never said this"
            sampled[key] -= 1

    # The log against the clients.

    def clients_got_it(self) -> Iterator[str]:
        """Each answer that a client got is in the log, word for word, with what the client had sent."""
        for call in self.calls:
            if not call.done:
                continue
            for choice, answer in enumerate(call.answers):
                line = self.by_key.get((call.id or "", choice))
                if line is None:
                    yield f"an answer that a client got is not in the log: {call.id}/{choice}"
                else:
                    yield from (
                        f"{call.id}/{choice}: {problem}" for problem in self.one_answer(call, answer, choice, line)
                    )

    def refused(self) -> Iterator[str]:
        """A call is refused only where the template refuses its messages."""
        for call in self.calls:
            if call.refused is None:
                continue
            try:
                self.reference.render(call.body, call.body["messages"], generation=True)
            except Refused:
                if call.refused == 400:
                    continue
            except KeyError:
                pass
            yield f"{call.endpoint} refused with {call.refused}: {call.error}"

    def one_answer(self, call: Call, answer: Message, choice: int, line: Line) -> Iterator[str]:
        """How a logged answer differs from what its client sent and got."""
        if call.session is not None and line["session_id"] != call.session:
            yield f"logged in session {line['session_id']}, asked in {call.session}"
        if line["status"] != "answered" or line["finish_reason"] != call.finish[choice]:
            yield f"{line['status']} {line['finish_reason']}, but the client was told {call.finish[choice]}"
        if call.endpoint == "completions":
            if line.get("prompt") != call.body["prompt"]:
                yield "another prompt is logged than was sent"
            if line["text"] != answer["text"]:
                yield f"the client got {answer['text']!r}, logged is {line['text']!r}"
            return
        names: list[tuple[str, Any]] = [("messages", []), ("tools", []), ("chat_template_kwargs", {})]
        if call.endpoint in ("messages", "responses"):
            yield from self.one_message(call, answer, line)
            del names[0]
        for name, empty in names:
            if (line.get(name) or empty) != (call.body.get(name) or empty):
                yield f"other {name} are logged than were sent"
        if call.endpoint == "chat" and as_said(answer) != as_said(line["response_message"]):
            yield f"the client got {as_said(answer)}, logged is {as_said(line['response_message'])}"

    def one_message(self, call: Call, answer: Message, line: Line) -> Iterator[str]:
        """The same for a call by another API, whose JSON objects may be spelled anew."""
        if line["endpoint"] != call.endpoint:
            yield f"logged as {line['endpoint']}"
        sent = call.body["messages"]
        if len(sent) != len(line["messages"]) or not same_history(line["messages"], sent):
            yield "other messages are logged than were sent"
        if not same_message(line["response_message"], answer):
            yield f"the client got {answer}, logged is {line['response_message']}"

    # The log by itself.

    def line(self, number: int, line: Line) -> Iterator[str]:
        """What is wrong with one line."""
        if len(line["completion_token_ids"]) != len(line["logprobs"]):
            yield "a logprob for each token there is not"
        if line["parent"] is not None:
            yield from self.continues(number, line)
        else:
            if line["branch"] == "continues" or line["kept"] or line["proof"] is not None:
                yield f"{line['branch']} with {line['kept']} ids and proof {line['proof']} of no parent"
            yield from self.rendered(line)
        if (line["branch"] == "fork") != (line["fork"] is not None):
            yield f"branch {line['branch']}, fork {line['fork']}"
        if line["fork"] is not None:
            yield from self.forked(number, line)
        yield from self.started(number, line)
        if line["endpoint"] != "completions" and (better := self.could_continue(number, line)) is not None:
            yield f"{line['branch']} {line['fork']} of {line['parent']}, although it could continue {better}"

    def started(self, number: int, line: Line) -> Iterator[str]:
        """A start is the first call of a session, or a retry of one."""
        call = self.sent.get(line["call_id"])
        if line["branch"] == "start" and call is not None and call.session is not None:
            answers = self.had_before(number, call)
            if answers and not any(_again(before, line) for before in answers):
                yield f"a start, although the session had {answers[0]['call_id']}"

    def continues(self, number: int, line: Line) -> Iterator[str]:
        """A continuation holds its parent's ids untouched, and new text behind them as the template writes it."""
        key = line["parent"] and (line["parent"]["call_id"], line["parent"]["choice"])
        parent = self.by_key.get(key)
        if parent is None or self.lines.index(parent) >= number:
            yield f"its parent {key} is not before it"
            return
        stored = parent["prompt_token_ids"] + parent["completion_token_ids"]
        left_out, stored = stored[line["kept"] :], stored[: line["kept"]]
        if left_out and (_reason(line) != "stop_left_out" or not all(map(self.reference.is_control, left_out))):
            yield "more is left out than a stop token"
        if line["prompt_token_ids"][: line["kept"]] != stored:
            yield "it does not begin with what its parent saw and said"
            return
        if parent["session_id"] != line["session_id"] or line["proof"] is None:
            yield f"parent of another session, or no proof: {line['proof']} {line['fork']}"
        tail = line["prompt_token_ids"][len(stored) :]
        if line["endpoint"] == "completions":
            yield from self.text_tail(line, stored, tail)
            return
        text = self.added(line, parent)
        if text is None:
            yield "it continues, although the template writes history otherwise now"
        elif tail != self.reference.encode(text):
            yield f"new ids spell {self.reference.decode(tail)!r}, the template writes {text!r}"

    def text_tail(self, line: Line, stored: list[int], tail: list[int]) -> Iterator[str]:
        """A text prompt continues the decoded parent."""
        if isinstance(line.get("prompt"), str):
            for skip in (True, False):
                before = self.reference.tokenizer.decode(stored, skip_special_tokens=skip)
                if line["prompt"].startswith(before) and tail == self.reference.encode(
                    line["prompt"][len(before) :]
                ):
                    return
            yield "the new ids are not those of what the prompt adds to its parent"

    def added(self, line: Line, parent: Line) -> str | None:
        """The text that the template writes behind the parent's answer, by `jinja2` alone."""
        return self.reference.added(line, self.as_held(line, parent), parent, parent["completion_token_ids"])

    def as_held(self, line: Line, parent: Line | None) -> list[Message]:
        """A call's messages, each answer of the session as the template was given it before, or its client."""
        messages = list(line["messages"])
        while parent is not None:
            messages[len(parent["messages"])] = parent["response_message"]
            if written := parent.get("template_messages"):
                messages[: len(written)] = written
            before = parent["parent"]
            parent = self.by_key[before["call_id"], before["choice"]] if before else None
        return messages

    def rendered(self, line: Line) -> Iterator[str]:
        """A start or a fork is what the template writes of the client's messages."""
        if line["endpoint"] == "completions":
            wanted = (
                line["prompt"] if isinstance(line.get("prompt"), list) else self.reference.encode(line["prompt"])
            )
        else:
            # Where the session knows an answer better than its client sent it, the log says what was written.
            written = line.get("template_messages") or line["messages"]
            if not same_history(written, line["messages"]) or len(written) != len(line["messages"]):
                yield "the template was given other messages than the client sent"
            wanted = self.reference.encode(self.reference.render(line, written, generation=True))
        if line["prompt_token_ids"] != wanted:
            sent, other = map(self.reference.decode, (line["prompt_token_ids"], wanted))
            yield f"the prompt is {sent!r}, the template writes {other!r}"

    # Forks and their reasons.

    def had_before(self, number: int, call: Call) -> list[Line]:
        """The answers of a session that a client had before it made a call."""
        return [
            line
            for line in self.lines[:number]
            if line["session_id"] == call.session
            and line["status"] == "answered"
            and (before := self.sent.get(line["call_id"])) is not None
            and before.ended
            and before.ended < call.began
        ]

    def answered(self, number: int, line: Line) -> list[Line]:
        """Lines of the session whose messages and answer are in the history that was sent, the longest last."""
        candidates = [
            before
            for before in self.lines[:number]
            if (before["session_id"] == line["session_id"] or (self.unnamed(before) and self.unnamed(line)))
            and "completions" not in (before["endpoint"], line["endpoint"])
            and before["status"] == "answered"
            and len(before["messages"]) < len(line["messages"])
            and same_history([*before["messages"], before["response_message"]], line["messages"])
        ]
        return sorted(candidates, key=lambda before: len(before["messages"]))

    def unnamed(self, line: Line) -> bool:
        """Whether its client left it to the gateway to find the session."""
        call = self.sent.get(line["call_id"])
        return call is not None and call.session is None

    def could_continue(self, number: int, line: Line) -> str | None:
        """An answer that the client had, and that the template lets this call continue."""
        call = self.sent.get(line["call_id"])
        if call is None:
            return None
        answered = self.answered(number, line)
        earlier = [before for before in answered if _before(self.sent.get(before["call_id"]), call)]
        if not earlier:
            return None
        last = earlier[-1]
        same = all(
            (last.get(name) or None) == (line.get(name) or None) for name in ("tools", "chat_template_kwargs")
        )
        rivals = [rival for rival in earlier if len(rival["messages"]) == len(last["messages"])]
        if not same or any(self.added(line, rival) is None for rival in rivals):
            return None
        parent = line["parent"] and self.by_key.get((line["parent"]["call_id"], line["parent"]["choice"]))
        if parent and len(parent["messages"]) >= len(last["messages"]):
            return None
        return f"{last['call_id']}/{last['choice']}"

    def forked(self, number: int, line: Line) -> Iterator[str]:
        """A fork has a reason, and the reason is true."""
        fork = line["fork"]
        if not fork or not fork.get("detail"):
            yield "a fork without a reason"
            return
        if line["endpoint"] != "chat.completions":
            return
        reason, matched = fork["reason"], self.answered(number, line)
        if reason in _HISTORY and line["parent"] is None and self.whole_history(matched, line):
            yield f"{fork}, but each answer of its history is one that the session gave"
        if reason in ("edited", "shortened") and not self.departs(number, line, fork["message"]):
            yield f"{fork}, but no earlier call had another message there"
        if reason == "template_rewrites" and not any(self.rewritten(line, earlier) for earlier in matched):
            yield f"{fork}, but the template writes history as before"
        if reason == "tools_changed" and all(earlier.get("tools") == line.get("tools") for earlier in matched):
            yield f"{fork}, but the tools are the same"
        name = "chat_template_kwargs"
        if reason == "arguments_changed" and all(
            (earlier.get(name) or {}) == (line.get(name) or {}) for earlier in matched
        ):
            yield f"{fork}, but the template arguments are the same"

    def departs(self, number: int, line: Line, at: int) -> bool:
        """Whether an earlier call of the session had the same messages up to one, and another there."""
        for before in self.lines[:number]:
            if before["endpoint"] == "completions" or before["session_id"] != line["session_id"]:
                continue
            history = [*before["messages"], before["response_message"]]
            if at < len(history) and same_history(history[:at], line["messages"]):
                message = line["messages"][at]
                if not same_message(history[at], message) or as_said(history[at])[1] != as_said(message)[1]:
                    return True
        return False

    def rewritten(self, line: Line, parent: Line) -> bool:
        """Whether history is written otherwise now, or would be under the parent's tools and arguments."""
        before = {name: parent.get(name) for name in ("tools", "chat_template_kwargs")}
        return self.added(line, parent) is None or self.added({**line, **before}, parent) is None

    def whole_history(self, matched: list[Line], line: Line) -> bool:
        """Whether the last answer of a history is one of the session, behind these very messages."""
        answers = [number for number, message in enumerate(line["messages"]) if message["role"] == "assistant"]
        return bool(answers) and any(len(earlier["messages"]) == answers[-1] for earlier in matched)


def _reason(line: Line) -> str | None:
    return line["fork"] and str(line["fork"]["reason"])


def _before(first: Call | None, second: Call) -> bool:
    return first is not None and bool(first.ended) and first.ended < second.began


def _again(before: Line, line: Line) -> bool:
    """Whether a call asks what an earlier one asked, or by other arguments that write the same prompt: a retry."""
    if before["prompt_token_ids"] == line["prompt_token_ids"]:
        return True
    names = ("messages", "tools", "chat_template_kwargs", "prompt")
    return all((before.get(name) or None) == (line.get(name) or None) for name in names)


def _sampled(prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float]) -> tuple[object, ...]:
    return tuple(prompt), tuple(ids), tuple(round(value, 5) for value in logprobs)


def as_said(message: Message) -> tuple[object, ...]:
    """A message as far as a client sees it: content, reasoning and calls, to the character."""
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    calls = [
        (call.get("id"), call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or []
    ]
    return message.get("content") or "", reasoning, calls


def same_history(logged: Sequence[Message], sent: Sequence[Message]) -> bool:
    """Whether a history begins with these messages, answers as a client may send them back."""
    return all(same_message(ours, theirs) for ours, theirs in zip(logged, sent, strict=False))


def same_message(logged: Message, sent: Message) -> bool:
    """Whether it is the same message: JSON may be spelled otherwise, reasoning may be left out."""
    if logged["role"] != sent["role"] or (logged.get("content") or "") != (sent.get("content") or ""):
        return False
    if logged["role"] == "tool" and logged.get("tool_call_id") != sent.get("tool_call_id"):
        return False
    if len(logged.get("tool_calls") or []) != len(sent.get("tool_calls") or []):
        return False
    for logged_call, sent_call in zip(logged.get("tool_calls") or [], sent.get("tool_calls") or [], strict=True):
        if logged_call["function"]["name"] != sent_call["function"]["name"]:
            return False
        if _value(logged_call["function"]["arguments"]) != _value(sent_call["function"]["arguments"]):
            return False
    ours, theirs = (as_said(message)[1] for message in (logged, sent))
    return not theirs or ours == theirs


def _value(arguments: str) -> object:
    try:
        return json.dumps(json.loads(arguments, parse_float=str, parse_int=str), sort_keys=True)
    except ValueError:
        return arguments


def read_log(path: Path) -> list[Line]:
    """The lines of a log; the last may be torn."""
    lines = path.read_text(encoding="utf-8").split("\n")
    assert not lines[-1], f"a torn last line: {lines[-1][:80]}"
    return [json.loads(line) for line in lines[:-1]]
