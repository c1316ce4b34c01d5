"""Observations: messages of a log with the ids they were rendered and encoded to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate

import numpy as np

from tito_audit.evidence.prompts import prompt_messages
from tito_audit.evidence.reference import Reference
from tito_audit.identify.model import Ending
from tito_audit.record.arrays import Ids
from tito_audit.record.message import Message, ToolSpec
from tito_audit.record.rollout import Place, Rollout, TrainingRow
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


def observations(rollouts: Iterable[Rollout]) -> list[Observation]:
    """The observations of rollouts: their prompts, else the starts of their training rows."""
    return [observation for rollout in rollouts for observation in observations_of(rollout)]


def observations_of(rollout: Rollout) -> Iterator[Observation]:
    """The observations of one rollout; none without messages or real ids."""
    if rollout.stated.dummy_tokens:
        return
    prompts = [(k, ids) for k, turn in enumerate(rollout.turns) if (ids := turn.prompt_ids) is not None]
    for k, ids in prompts:
        sent = prompt_messages(rollout, k)
        if sent and len(ids):
            yield _made(rollout, k, sent, ids, _kept(rollout, k, ids))
    if not prompts and rollout.training_row is not None and rollout.messages:
        yield from _of_row(rollout, rollout.training_row)


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
            yield _made(rollout, k, rollout.messages[:index], row.token_ids[:start], begun)
    if not pairs and row.loss_mask is None and len(row.token_ids):
        whole = Observation(
            rollout.place,
            None,
            rollout.messages,
            rollout.tools,
            rollout.template_kwargs,
            row.token_ids,
            Part.WHOLE,
        )
        if answers and answers[0] and (text := _first_text(rollout.messages[answers[0]])):
            before = rollout.messages[: answers[0]]
            yield replace(whole, turn=0, messages=before, part=Part.START, answer=text)
        yield whole


def _first_text(answer: Message) -> str:
    """The text at the start of an answer's ids with any template; "" if it depends on the template."""
    text = answer.text
    return text if text == text.strip() and not answer.reasoning and "</think>" not in text else ""


def _kept(rollout: Rollout, turn: int, ids: Ids) -> int:
    """The length of the latest earlier prompt with its answer that a prompt begins with; 0 without one."""
    for earlier in reversed(rollout.turns[:turn]):
        seen = earlier.seen_ids
        if seen is not None and len(seen) < len(ids) and np.array_equal(ids[: len(seen)], seen):
            return len(seen)
    return 0


def _made(rollout: Rollout, turn: int, messages: Sequence[Message], ids: Ids, begun: int = 0) -> Observation:
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
    picked: list[Observation] = []
    depth = 0
    while len(picked) < most and any(depth < len(group) for group in by_shape.values()):
        picked += [group[depth] for group in by_shape.values() if depth < len(group)]
        depth += 1
    sizes = accumulate(len(observation.ids) for observation in picked)
    return [
        observation
        for at, (observation, size) in enumerate(zip(picked, sizes, strict=True))
        if at < 2 or size <= _ALL
    ][:most]


# Which tokens end sampled turns, and what follows them in later prompts


_CUT_OFF = frozenset(("length", "max_tokens", "abort", "error"))
_MOST = 6
_FOLLOWING = 32
"""Most tokens between an answer and the next message."""


def endings(rollouts: Iterable[Rollout], reference: Reference) -> tuple[Ending, ...]:
    """The control tokens that end sampled turns, the most frequent first."""
    ends = reference.end_ids()
    turns: Counter[int] = Counter()
    after: dict[int, Counter[str]] = {}
    for rollout in rollouts:
        for answer, rest in _answers(rollout):
            last = int(answer[-1])
            if last in ends:
                turns[last] += 1
                if rest is not None:
                    after.setdefault(last, Counter())[_gap(rest, reference)] += 1
    vocabulary = reference.vocabulary
    return tuple(
        Ending(
            token, vocabulary.piece(token), number, after[token].most_common(1)[0][0] if token in after else None
        )
        for token, number in turns.most_common(_MOST)
    )


def _answers(rollout: Rollout) -> Iterator[tuple[Ids, Ids | None]]:
    """Every sampled turn that was not cut off, with the ids that follow it in the next prompt or the row."""
    for turn, later in zip(rollout.turns, (*rollout.turns[1:], None), strict=False):
        ids = turn.completion_ids
        if ids is None or not len(ids) or turn.finish_reason in _CUT_OFF:
            continue
        seen, prompt = turn.seen_ids, later.prompt_ids if later is not None else None
        goes_on = seen is not None and prompt is not None and len(prompt) > len(seen)
        same = goes_on and seen is not None and prompt is not None and np.array_equal(prompt[: len(seen)], seen)
        yield ids, prompt[len(seen) :] if same and prompt is not None and seen is not None else None
    row = rollout.training_row
    if not rollout.turns and row is not None and row.loss_mask is not None:
        for start, end in trained_runs(row.loss_mask):
            rest = row.token_ids[end:]
            yield row.token_ids[start:end], rest if len(rest) else None


def _gap(rest: Ids, reference: Reference) -> str:
    """The text of these ids before the next control token."""
    first = rest[:_FOLLOWING]
    control = np.flatnonzero(reference.vocabulary.control(first))
    return reference.text(first[: int(control[0])] if len(control) else first)
