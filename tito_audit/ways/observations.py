"""Observations: the messages of a log with the token ids they were rendered and encoded to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate, zip_longest

from tito_audit.record.arrays import Ids
from tito_audit.record.message import Message, ToolSpec
from tito_audit.record.prefix import starts_with
from tito_audit.record.rollout import Place, Rollout, visible_range
from tito_audit.record.runs import trained_runs

_LONGEST, _ALL = 32_768, 65_536
"""Ids of one observation in a search, if there are shorter ones, and of all together, at the most."""


class Part(IntEnum):
    """What the ids of an observation are."""

    FIRST = 0
    """A prompt without answers: all its tokens are the template's."""
    START = 1
    """A training row that starts with such a prompt and goes on, with no boundary recorded."""
    LATER = 2
    """A prompt with answers in it, which may have drifted."""
    WHOLE = 3
    """A whole conversation as a training row, with no boundaries recorded."""


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """Messages, and the ids they were rendered and encoded to."""

    place: Place
    turn: int | None
    messages: Sequence[Message]
    tools: tuple[ToolSpec, ...]
    stated: Mapping[str, object]
    """The template arguments that the log states."""
    ids: Ids
    part: Part
    sampled_prefix: int = 0
    """Leading ids that are an earlier prompt with its answer as sampled."""
    answer: str = ""
    """START: the text that follows the prompt in the ids."""

    @property
    def is_first(self) -> bool:
        """Whether its prompt has no answers in it."""
        return self.part in (Part.FIRST, Part.START)

    @property
    def is_answered(self) -> bool:
        """Whether an answer follows the prompt, so that the template opens one."""
        return self.part is not Part.WHOLE

    @property
    def shape(self) -> tuple[object, ...]:
        """What templates treat differently: roles, tools, tool calls, reasoning, arguments."""
        roles = tuple(dict.fromkeys(message.role for message in self.messages))
        first = self.messages[0].role
        calls = any(message.tool_calls for message in self.messages)
        thinks = any(message.reasoning for message in self.messages)
        return self.part, first, roles, bool(self.tools), calls, thinks, tuple(sorted(self.stated))

    @property
    def opening_in_words(self) -> str:
        """`with a system message, without tools`: what the opening of a prompt depends on."""
        first = "with" if self.messages and self.messages[0].role in ("system", "developer") else "without"
        return f"{first} a system message, {'with' if self.tools else 'without'} tools"

    @property
    def kind_in_words(self) -> str:
        """`answers and tool calls and reasoning`: what templates treat differently."""
        sampled = sum(message.sampled for message in self.messages)
        words = ["answers" if sampled > 1 or self.part is not Part.WHOLE else "one answer"]
        if any(message.role == "tool" or message.tool_calls for message in self.messages):
            words.append("tool calls")
        if any(message.reasoning for message in self.messages):
            words.append("reasoning")
        return " and ".join(words)


def prompt_messages(rollout: Rollout, turn: int) -> tuple[Message, ...] | None:
    """The messages that a call was sent; None if the log does not say."""
    call = rollout.turns[turn]
    if call.prompt_messages is not None:
        return call.prompt_messages
    return None if call.message_index is None else rollout.messages[: call.message_index]


def observe_first_prompt(rollout: Rollout) -> Observation | None:
    """The first call's prompt (FIRST), else the training row (START); None if the log has neither."""
    if rollout.turns:
        ids, sent = rollout.turns[0].prompt_ids, prompt_messages(rollout, 0)
        if ids is None or not len(ids) or not sent:
            return None
        return observe_prompt(rollout, 0, sent, ids, Part.FIRST)
    row = rollout.training_row
    answer = next((place for place, message in enumerate(rollout.messages) if message.sampled), 0)
    if row is None or not answer:
        return None
    start, end = visible_range(row)
    return observe_prompt(rollout, 0, rollout.messages[:answer], row.token_ids[start:end], Part.START)


def observe_rollouts(rollouts: Iterable[Rollout]) -> list[Observation]:
    """All prompts of rollouts, else what training rows show; none without messages or with placeholder ids."""
    seen: list[Observation] = []
    for rollout in rollouts:
        if rollout.stated.dummy_tokens:
            continue
        prompts = [(k, ids) for k, turn in enumerate(rollout.turns) if (ids := turn.prompt_ids) is not None]
        for k, ids in prompts:
            sent = prompt_messages(rollout, k)
            if sent and len(ids):
                earlier = (turn.seen_ids for turn in reversed(rollout.turns[:k]))
                lengths = (
                    len(prefix)
                    for prefix in earlier
                    if prefix is not None and len(prefix) < len(ids) and starts_with(ids, prefix)
                )
                seen.append(observe_prompt(rollout, k, sent, ids, sampled_prefix=next(lengths, 0)))
        row, messages = rollout.training_row, rollout.messages
        if prompts or row is None or not messages:
            continue
        # The start of the row up to each of its answers; the whole row if their places are unknown
        answers = [index for index, message in enumerate(messages) if message.sampled]
        runs = trained_runs(row.loss_mask) if row.loss_mask is not None else []
        starts, ends = [start for start, _ in runs], [end for _, end in runs]
        if row.prompt_length and (not starts or len(starts) != len(answers)):
            starts = [row.prompt_length]
            answers = answers[:1]
        elif len(starts) == 1:
            answers = answers[-1:]
        pairs = list(zip(answers, starts, strict=True)) if len(starts) == len(answers) else []
        for k, (index, start) in enumerate(pairs):
            if index and start:
                prefix = ends[k - 1] if k and len(ends) == len(pairs) else 0
                ids = row.token_ids[:start]
                seen.append(observe_prompt(rollout, k, messages[:index], ids, sampled_prefix=prefix))
        if not pairs and row.loss_mask is None and len(row.token_ids):
            whole = observe_prompt(rollout, None, messages, row.token_ids, Part.WHOLE)
            answer = messages[answers[0]] if answers and answers[0] else None
            text = answer.text if answer is not None else ""
            # The answer's ids begin with its text, unless that depends on the template.
            as_written = text and text == text.strip() and "</think>" not in text
            if answer is not None and as_written and not answer.reasoning:
                before = messages[: answers[0]]
                seen.append(replace(whole, turn=0, messages=before, part=Part.START, answer=text))
            seen.append(whole)
    return seen


def observe_prompt(
    rollout: Rollout,
    turn: int | None,
    messages: Sequence[Message],
    ids: Ids,
    part: Part | None = None,
    *,
    sampled_prefix: int = 0,
) -> Observation:
    """An observation of a rollout; without `part`, FIRST or LATER by its messages."""
    if part is None:
        part = Part.LATER if any(message.sampled for message in messages) else Part.FIRST
    return Observation(
        rollout.place, turn, messages, rollout.tools, rollout.template_kwargs, ids, part, sampled_prefix
    )


def pick_for_search(seen: Sequence[Observation], most: int) -> list[Observation]:
    """Up to `most` observations of different shapes, first prompts before others, short ones before long ones."""
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
