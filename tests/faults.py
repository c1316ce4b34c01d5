"""Clean rollouts of the toy tokenizer, and places in them where a fault can be put.

A Log is written as the sampler sees it: `gaps[k]` is the template's text in front of turn k's answer, and
every prompt is what was seen before and the next gap. A later prompt holds `heard[k]` where turn k's answer
was, which is the answer itself in a clean log.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests import toy
from tito_audit.evidence.gather import gather
from tito_audit.record.build import build_call_columns, build_training_row
from tito_audit.record.finding import Result
from tito_audit.record.message import as_messages, as_tools
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn
from tito_audit.rules import all_rules
from tito_audit.run.check import check

__all__ = ["END", "Found", "Log", "audit", "clean_logs", "encode", "found_in", "literal", "spelling", "text_of"]

Found = tuple[str, str, str, int | None, int, int]
"""Code, severity, sequence, turn, start, end of one finding."""

END = "<|im_end|>"
OPENINGS = ("The", "Skinny", "It", "We", "Grüße", "Sun")
WORDS = (
    *(" skinny", " dog", " Skin", " told", " café", " Füße", " 42", " is", "\n", "\n\n", ",", " 你好", " 🙂"),
    *(" search(items)", " overraschte", " bakery", " naïve", " (_weather", " '", " Whenever", " rewritten"),
)
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


@dataclass(repr=False)
class Log:
    """One rollout as its pieces, each of which a fault may change before `rollout` is asked for."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    indices: list[int | None]
    """The message of each turn."""
    gaps: list[list[int]]
    completions: list[list[int]]
    seed: int
    heard: list[list[int]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    texts: list[str | None] = field(default_factory=list)
    logprobs: list[list[float | None] | None] = field(default_factory=list)
    row_ids: list[int] = field(default_factory=list)
    row_mask: list[int] = field(default_factory=list)
    row_logprobs: list[float | None] = field(default_factory=list)
    regions: list[tuple[int, int]] = field(default_factory=list)
    """Where each turn stands in the row."""
    has_row: bool = True
    sent: list[list[dict[str, Any]]] | None = None
    """What each call was sent, where the log says it."""

    def __len__(self) -> int:
        return len(self.gaps)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis shows a log: template text and answer of each turn."""
        pairs = zip(self.gaps, self.completions, strict=True)
        printer.text("\n".join(repr(f"{text_of(gap)}|{text_of(completion)}") for gap, completion in pairs))

    def copy(self) -> Log:
        """Another log, to be changed."""
        return copy.deepcopy(self)

    def lay(self) -> Log:
        """The log itself, with prompts, texts, logprobs and row made anew from gaps and completions."""
        dice = random.Random(self.seed)
        self.heard = self.heard or [list(ids) for ids in self.completions]
        self.prompts, self.texts, self.logprobs, self.regions = [], [], [], []
        ids: list[int] = []
        mask: list[int] = []
        values: list[float | None] = []
        for k, gap in enumerate(self.gaps):
            ids, mask, values = ids + gap, mask + [0] * len(gap), values + [0.0] * len(gap)
            self.prompts.append(list(ids))
            completion, heard = self.completions[k], self.heard[k]
            self.texts.append(text_of(completion).removesuffix(END))
            own = [-dice.uniform(0.01, 3) for _ in completion]
            self.logprobs.append(list(own))
            self.regions.append((len(ids), len(ids) + len(heard)))
            ids, mask = ids + heard, mask + [1] * len(heard)
            values = values + carried(completion, heard, own)
        self.row_ids, self.row_mask, self.row_logprobs = ids, mask, values
        return self

    def turn(self, k: int) -> Turn:
        """One call as the formats would read it."""
        ids = np.array(self.completions[k], np.int32)
        values = self.logprobs[k]
        logprobs, columns = build_call_columns(ids, logprobs=None if values is None else ("logprobs", values))
        return Turn(
            np.array(self.prompts[k], np.int32),
            ids,
            logprobs,
            message_index=self.indices[k],
            prompt_messages=as_messages(self.sent[k], "messages") if self.sent else None,
            completion_text=self.texts[k],
            finish_reason="stop",
            columns=columns,
        )

    def row(self) -> TrainingRow | None:
        """The training row as the formats would read it."""
        if not self.has_row:
            return None
        return build_training_row(
            np.array(self.row_ids, np.int32),
            mask=("loss_mask", self.row_mask),
            logprobs=("logprobs", self.row_logprobs),
            sentinel=0.0,
        )

    def rollout(self) -> Rollout:
        """The rollout that the log holds."""
        return Rollout(
            Place("toy", 0),
            "toy",
            as_messages(self.messages, "messages"),
            as_tools(self.tools, "tools"),
            turns=tuple(self.turn(k) for k in range(len(self))),
            training_row=self.row(),
        )

    def replaced(self, turn: int, start: int, end: int, new: Sequence[int]) -> Log:
        """A log in which the sampler said other tokens at `start:end`, and everything later kept them."""
        out = self.copy()
        out.completions[turn][start:end] = new
        out.heard = []
        return out.lay()

    def forgotten(self, turn: int, heard: Sequence[int]) -> Log:
        """The log in which later prompts and the row hold other tokens for a turn's answer."""
        out = self.copy()
        out.heard = [list(ids) for ids in out.completions]
        out.heard[turn] = list(heard)
        return out.lay()


def carried(completion: list[int], heard: list[int], own: list[float]) -> list[float | None]:
    """The logprobs of the tokens that stayed, and made-up ones for the others."""
    values: list[float | None] = [-3.25 - i / 512 for i in range(len(heard))]
    shorter = min(len(completion), len(heard))
    head = next((i for i, (a, b) in enumerate(zip(completion, heard, strict=False)) if a != b), shorter)
    room = shorter - head
    pairs = zip(completion[::-1], heard[::-1], strict=False)
    tail = min(next((i for i, (a, b) in enumerate(pairs) if a != b), room), room)
    inner = completion[head : len(completion) - tail], heard[head : len(heard) - tail]
    for a, b, size in SequenceMatcher(None, *inner, autojunk=False).get_matching_blocks():
        values[head + b : head + b + size] = own[head + a : head + a + size]
    values[:head] = own[:head]
    values[len(heard) - tail :] = own[len(own) - tail :]
    return values


def encode(text: str) -> list[int]:
    """Ids of a text."""
    return [int(i) for i in toy.toy_tokenizer().encode(text)]


def text_of(ids: Sequence[int]) -> str:
    """The text of ids."""
    return toy.toy_tokenizer().vocabulary.text(np.array(ids, np.int32))


def literal(text: str) -> int:
    """The one token that reads so."""
    (token_id,) = toy.toy_tokenizer().vocabulary.ids_of_bytes(text.encode())
    return token_id


def spelling(token: int) -> bytes:
    """The bytes of a token."""
    return toy.toy_tokenizer().vocabulary.token_bytes(token)


def audit(rollout: Rollout, *, template: bool = True) -> Result:
    """All findings of a rollout."""
    evidence = gather(rollout, toy.toy_tokenizer(), toy.toy_renderer() if template else None)
    rules = all_rules()
    findings, skips = check(evidence, rules, frozenset(rule.code for rule in rules))
    return Result(rollout.place, evidence.rollout, findings, skips)


def found_in(rollout: Rollout, *, template: bool = True) -> list[Found]:
    """Every finding as one line, sorted."""
    return sorted(
        (f.code, f.severity.word, str(f.hit.where), f.hit.turn, f.hit.start, f.hit.end)
        for f in audit(rollout, template=template).findings
    )


def render(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], *, opens: bool) -> str:
    """What the template writes."""
    return toy.toy_renderer().render(
        as_messages(messages, "messages"),
        as_tools(tools, "tools"),
        add_generation_prompt=opens,
        template_kwargs={},
    )


def log_of(messages: list[dict[str, Any]], tools: list[dict[str, Any]], seed: int) -> Log:
    """The clean log of a conversation: every answer sampled in the tokens that encoding it gives."""
    indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    gaps, completions, before = [], [], ""
    for index in indices:
        prompt = render(messages[:index], tools, opens=True)
        whole = render(messages[: index + 1], tools, opens=False)
        assert prompt.startswith(before), "the template is not append-only for these messages"
        assert whole.startswith(prompt)
        gaps.append(encode(prompt[len(before) :]))
        before = whole[: whole.rindex(END) + len(END)]
        completions.append(encode(before[len(prompt) :]))
    return Log(messages, tools, indices, gaps, completions, seed).lay()


@cache
def sentences(least: int = 2) -> st.SearchStrategy[str]:
    """Some words of the toy texts; no white space at either end."""
    words = st.lists(st.sampled_from(WORDS), min_size=least, max_size=8)
    parts = st.tuples(words, st.sampled_from(OPENINGS))
    return parts.map(lambda part: f"{(part[1] + ''.join(part[0])).rstrip()} end")


@st.composite
def clean_logs(draw: st.DrawFn, *, turns: int = 2, system: bool | None = None, tools: bool | None = None) -> Log:
    """A conversation of `turns` to 5 calls, with tools and reasoning or without."""
    count = draw(st.integers(turns, 5))
    system = draw(st.booleans()) if system is None else system
    called = draw(st.booleans()) if tools is None else tools
    messages = [{"role": "system", "content": draw(sentences())}] if system else []
    # The template drops reasoning before the last user message, so only one user may speak where there is any.
    thinks = called and draw(st.booleans())
    for k in range(count):
        through_tool = called and k and (thinks or draw(st.booleans()))
        # Every text says its number: of two equal answers nothing tells which one a later prompt dropped.
        messages.append({"role": "tool" if through_tool else "user", "content": f"{draw(sentences())} {2 * k}"})
        answer: dict[str, Any] = {"role": "assistant", "content": f"{draw(sentences())} {2 * k + 1}"}
        if thinks and draw(st.booleans()):
            answer["reasoning_content"] = draw(sentences())
        if called and (k < count - 1):
            arguments = {"q": draw(sentences()), "n": draw(st.integers(0, 99))}
            answer["tool_calls"] = [{"type": "function", "function": {"name": "search", "arguments": arguments}}]
        messages.append(answer)
    return log_of(messages, [TOOL] if called else [], draw(st.integers(0, 10**6)))


def places(log: Log, size: int, turns: Sequence[int] | None = None) -> Iterator[tuple[int, int, list[int]]]:
    """(turn, start, tokens) of every run of `size` ordinary tokens in the answers."""
    added = toy.toy_tokenizer().vocabulary.added_ids
    for turn in range(len(log)) if turns is None else turns:
        ids = log.completions[turn]
        for start in range(len(ids) - size + 1):
            run = ids[start : start + size]
            if not added.intersection(run):
                yield turn, start, run
