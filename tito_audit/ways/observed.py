"""Observations: messages of a log with the ids they were rendered and encoded to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate, zip_longest

import numpy as np

from tito_audit.record.arrays import Ids
from tito_audit.record.message import Message, ToolSpec
from tito_audit.record.rollout import Place, Rollout, TrainingRow, visible_part
from tito_audit.record.runs import trained_runs

_LONGEST, _ALL = 32_768, 65_536
"""The most ids of one observation in a search if there are shorter ones, and of all together."""


class Part(IntEnum):
    """What the ids of an observation are."""

    FIRST = 0
    """A prompt without sampled answers: it shows the template alone."""
    START = 1
    """A whole training row of such a prompt and its answer, without the boundary between them."""
    LATER = 2
    """A prompt with answers in it, which may have drifted."""
    WHOLE = 3
    """A whole training row without prompt boundaries."""


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """Messages with the ids they were rendered and encoded to."""

    place: Place
    turn: int | None
    messages: Sequence[Message]
    tools: tuple[ToolSpec, ...]
    stated: Mapping[str, object]
    """The template arguments that the log states."""
    ids: Ids
    part: Part
    begun: int = 0
    """How many leading ids are an earlier prompt with its answer as sampled."""
    answer: str = ""
    """The text after the prompt, if the ids continue."""

    @property
    def first(self) -> bool:
        """Whether it shows a prompt before which nothing was sampled."""
        return self.part in (Part.FIRST, Part.START)

    @property
    def opens(self) -> bool:
        """Whether an answer follows the ids."""
        return self.part is not Part.WHOLE

    @property
    def shape(self) -> tuple[object, ...]:
        """What a template may treat differently: roles, tools, tool calls, reasoning."""
        roles = tuple(dict.fromkeys(message.role for message in self.messages))
        first = self.messages[0].role
        calls = any(message.tool_calls for message in self.messages)
        thinks = any(message.reasoning for message in self.messages)
        return self.part, first, roles, bool(self.tools), calls, thinks, tuple(sorted(self.stated))

    @property
    def opening(self) -> str:
        """What the opening depends on, in words: a system message, tools."""
        first = "with" if self.messages and self.messages[0].role in ("system", "developer") else "without"
        return f"{first} a system message, {'with' if self.tools else 'without'} tools"

    @property
    def kind(self) -> str:
        """What it holds that templates treat differently, in words."""
        sampled = sum(message.sampled for message in self.messages)
        words = ["answers" if sampled > 1 or self.part is not Part.WHOLE else "one answer"]
        if any(message.role == "tool" or message.tool_calls for message in self.messages):
            words.append("tool calls")
        if any(message.reasoning for message in self.messages):
            words.append("reasoning")
        return " and ".join(words)


def prompt_messages(rollout: Rollout, turn: int) -> tuple[Message, ...] | None:
    """The messages that a call was sent; None when the log does not say."""
    call = rollout.turns[turn]
    if call.prompt_messages is not None:
        return call.prompt_messages
    return None if call.message_index is None else rollout.messages[: call.message_index]


def first_prompt(rollout: Rollout) -> Observation | None:
    """What a template wrote before anything was sampled: the first call's prompt, else the whole training row.

    None where the log has neither.
    """
    if rollout.turns:
        ids, sent = rollout.turns[0].prompt_ids, prompt_messages(rollout, 0)
        return None if ids is None or not len(ids) or not sent else observed(rollout, 0, sent, ids, Part.FIRST)
    row = rollout.training_row
    answer = next((place for place, message in enumerate(rollout.messages) if message.sampled), 0)
    if row is None or not answer:
        return None
    start, end = visible_part(row)
    return observed(rollout, 0, rollout.messages[:answer], row.token_ids[start:end], Part.START)


def observations(rollouts: Iterable[Rollout]) -> list[Observation]:
    """The prompts of rollouts, else the starts of their training rows; none without messages or real ids."""
    seen: list[Observation] = []
    for rollout in rollouts:
        if rollout.stated.dummy_tokens:
            continue
        prompts = [(k, ids) for k, turn in enumerate(rollout.turns) if (ids := turn.prompt_ids) is not None]
        for k, ids in prompts:
            sent = prompt_messages(rollout, k)
            if sent and len(ids):
                # The latest earlier prompt with its answer that this one begins with
                before = (turn.seen_ids for turn in reversed(rollout.turns[:k]))
                lengths = (
                    len(start)
                    for start in before
                    if start is not None and len(start) < len(ids) and np.array_equal(ids[: len(start)], start)
                )
                seen.append(observed(rollout, k, sent, ids, begun=next(lengths, 0)))
        if not prompts and rollout.training_row is not None and rollout.messages:
            seen += _of_row(rollout, rollout.training_row)
    return seen


def _of_row(rollout: Rollout, row: TrainingRow) -> Iterator[Observation]:
    """The start of a row up to each of its answers; the whole row if their places are unknown."""
    answers = [index for index, message in enumerate(rollout.messages) if message.sampled]
    starts: list[int] = []
    ends: list[int] = []
    if row.loss_mask is not None:
        runs = trained_runs(row.loss_mask)
        starts, ends = [start for start, _ in runs], [end for _, end in runs]
    if row.prompt_length and (not starts or len(starts) != len(answers)):
        starts = [row.prompt_length]
        answers = answers[:1]
    elif len(starts) == 1:
        answers = answers[-1:]
    pairs = list(zip(answers, starts, strict=True)) if len(starts) == len(answers) else []
    for k, (index, start) in enumerate(pairs):
        if index and start:
            begun = ends[k - 1] if k and len(ends) == len(pairs) else 0
            yield observed(rollout, k, rollout.messages[:index], row.token_ids[:start], begun=begun)
    if not pairs and row.loss_mask is None and len(row.token_ids):
        whole = observed(rollout, None, rollout.messages, row.token_ids, Part.WHOLE)
        if answers and answers[0]:
            answer = rollout.messages[answers[0]]
            text = answer.text
            # The answer's ids begin with its text, unless that depends on the template.
            if text and text == text.strip() and not answer.reasoning and "</think>" not in text:
                before = rollout.messages[: answers[0]]
                yield replace(whole, turn=0, messages=before, part=Part.START, answer=text)
        yield whole


def observed(
    rollout: Rollout,
    turn: int | None,
    messages: Sequence[Message],
    ids: Ids,
    part: Part | None = None,
    *,
    begun: int = 0,
) -> Observation:
    """An observation of a rollout; without `part`, of a prompt."""
    if part is None:
        part = Part.LATER if any(message.sampled for message in messages) else Part.FIRST
    return Observation(rollout.place, turn, messages, rollout.tools, rollout.template_kwargs, ids, part, begun)


def for_search(seen: Sequence[Observation], most: int) -> list[Observation]:
    """A few observations that differ as much as possible, first prompts first and short ones first."""
    ordered = sorted(
        seen, key=lambda observation: (len(observation.ids) > _LONGEST, observation.part, len(observation.ids))
    )
    by_shape: dict[tuple[object, ...], list[Observation]] = {}
    ids_picked: set[bytes] = set()
    for observation in ordered:
        key = observation.ids.tobytes()
        if key not in ids_picked:
            ids_picked.add(key)
            by_shape.setdefault(observation.shape, []).append(observation)
    layers = zip_longest(*by_shape.values())
    picked = [observation for layer in layers for observation in layer if observation is not None]
    sizes = accumulate(len(observation.ids) for observation in picked)
    return [
        observation
        for at, (observation, size) in enumerate(zip(picked, sizes, strict=True))
        if at < 2 or size <= _ALL
    ][:most]
