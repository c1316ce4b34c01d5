"""A conversation as a sampler would have it: template text and answers in turn, in ids."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass, field
from typing import Any

from tests.causes.families import Family, Messages, Tools
from tests.causes.talks import Talk


class NotAppendOnlyError(Exception):
    """The template takes back what it wrote, so the conversation is no clean one."""


@dataclass
class Recorded:
    """What was recorded, each part of which a fault may change, and what the log says beside it."""

    family: Family
    talk: Talk
    gap_texts: list[str]
    sampled_texts: list[str]
    gaps: list[list[int]]
    """The template's ids in front of each answer."""
    sampled: list[list[int]]
    messages: Messages
    tools: Tools
    heard: dict[int, list[int]] = field(default_factory=dict)
    """What later prompts hold in place of an answer."""
    prompts: dict[int, list[int]] = field(default_factory=dict)
    """Prompts that are none of the parts."""
    cut: set[int] = field(default_factory=set)
    """Answers that ended by length."""
    closes: dict[int, list[int]] = field(default_factory=dict)
    """What the row closes an answer with that had no end."""
    trained: dict[int, list[int]] = field(default_factory=dict)
    """What the row holds in place of an answer."""
    row_prefix: list[int] = field(default_factory=list)
    only: int | None = None
    """The one call that is logged."""

    def __len__(self) -> int:
        return len(self.sampled)

    @property
    def last(self) -> int:
        """The last answer."""
        return len(self.sampled) - 1

    def prompt(self, k: int) -> list[int]:
        """The ids that call k was given."""
        if k in self.prompts:
            return self.prompts[k]
        out: list[int] = []
        for i in range(k):
            out += self.gaps[i] + self.heard.get(i, self.sampled[i])
        return out + self.gaps[k]

    def calls(self, seed: int) -> dict[str, Any]:
        """The log of calls."""
        dice = random.Random(seed)
        calls = []
        for k in range(len(self)) if self.only is None else [self.only]:
            calls.append(
                {
                    "prompt_ids": self.prompt(k),
                    "completion_ids": self.sampled[k],
                    "completion_logprobs": [-round(dice.uniform(0.001, 4), 5) for _ in self.sampled[k]],
                    "finish_reason": "length" if k in self.cut else "stop",
                }
            )
        return {"messages": logged(self.messages), "tools": self.tools or None, "calls": calls}

    def row(self, seed: int) -> dict[str, Any]:
        """The training row."""
        dice = random.Random(seed)
        ids, mask = list(self.row_prefix), [0] * len(self.row_prefix)
        for k in range(len(self)):
            gap, answer, closes = self.gaps[k], self.trained.get(k, self.sampled[k]), self.closes.get(k, [])
            ids += gap + answer + closes
            mask += [0] * len(gap) + [1] * len(answer) + [0] * len(closes)
        values = [-round(dice.uniform(0.001, 4), 5) if trained else 0.0 for trained in mask]
        return {
            "messages": logged(self.messages),
            "tools": self.tools or None,
            "token_ids": ids,
            "loss_mask": mask,
            "logprobs": values,
        }


def record(family: Family, talk: Talk) -> Recorded:
    """The clean record of a conversation; NotAppendOnlyError where there is none."""
    messages, tools, end = talk.messages, talk.tools, family.marks.end
    gaps, sampled, done = [], [], ""
    for k, at in enumerate(talk.answers):
        prompt = family.write(messages[:at], tools, opened=True)
        if not prompt.startswith(done):
            raise NotAppendOnlyError
        gaps.append(prompt[len(done) :])
        after = talk.answers[k + 1] if k + 1 < len(talk.answers) else at + 1
        whole = family.write(messages[:after], tools, opened=after > at + 1)
        if not whole.startswith(prompt):
            raise NotAppendOnlyError
        rest = whole[len(prompt) :]
        sampled.append(rest[: rest.index(end) + len(end)])
        done = prompt + sampled[-1]
    ids = [family.ids(text) for text in gaps], [family.ids(text) for text in sampled]
    joined = [i for gap, answer in zip(*ids, strict=True) for i in gap + answer]
    if joined != family.ids("".join(g + s for g, s in zip(gaps, sampled, strict=True))):
        raise NotAppendOnlyError
    return Recorded(family, talk, gaps, sampled, *ids, copy.deepcopy(messages), copy.deepcopy(tools))


def logged(messages: Messages) -> Messages:
    """Messages as logs hold them: the arguments of calls as the text that was sampled."""
    out = copy.deepcopy(messages)
    for message in out:
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            if isinstance(arguments, dict):
                call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return out
