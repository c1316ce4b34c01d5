"""Plans what a trainer would train of a conversation, and finds where a prompt at inference differs from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from tito_audit.errors import RecordError, RenderError
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids, Mask
from tito_audit.record.finding import Severity
from tito_audit.record.rollout import Place, Rollout
from tito_audit.render.renderer import Renderer
from tito_audit.render.spans import common_start
from tito_audit.sft.tokenized import TokenizedChat, tokenize_chat, tokenize_texts

_THINK = "think"
"""Part of the reasoning tags of all published templates that have them."""
_CONTENT_START = 32
"""Characters of a message that are enough to find where its content starts."""


class Problem(StrEnum):
    """What may be wrong with rows of an SFT set, known before a trainer tokenizes it."""

    REFUSED = "cannot be tokenized"
    NOTHING = "nothing would be trained"
    NOT_SHOWN = "the template does not show where answers begin and end"
    MARKED_MORE = "the template's {% generation %} also holds what the assistant did not write"
    MARKED_LESS = "the template's {% generation %} leaves out a part of the answer"
    SPLIT = "prompt and answer share a token when they are encoded together"
    STRIPPED = "the reasoning of an answer is not in the text that is trained"
    INSERTED = "empty reasoning is trained that the messages do not hold"
    OPENED = "the prompt at inference ends otherwise than before the trained answer"
    HISTORY = "the prompt at inference holds other text than before the trained answer"
    CUT_BEFORE = "the maximum length cuts the row before an answer begins"
    CUT = "the maximum length cuts an answer"


SEVERITIES = {Problem.REFUSED: Severity.ERROR, Problem.MARKED_MORE: Severity.ERROR}
"""All others are warnings; `SetPlan.severity` makes errors of some if no row would train anything."""
ADVICE = {
    Problem.REFUSED: "leave these rows out, or fix their messages",
    Problem.NOTHING: "leave these rows out",
    Problem.NOT_SHOWN: "use a template with {% generation %} markers",
    Problem.MARKED_MORE: "move {% generation %} behind the header of the answer",
    Problem.MARKED_LESS: "move {% endgeneration %} behind the turn end, or the model is not taught to stop",
    Problem.SPLIT: "end the prompt with a control token or a line feed, and begin completions without a space",
    Problem.STRIPPED: "split the conversation so that each answer with reasoning is the last, or use a template "
    "that keeps it (tito-audit template … --training OUT)",
    Problem.INSERTED: "if the model is prompted that way, state it (--template-arg enable_thinking=false, "
    "--against); else it learns to begin with empty reasoning",
    Problem.OPENED: "render training and inference with the same template and arguments",
    Problem.HISTORY: "render training and inference with the same template and arguments",
    Problem.CUT_BEFORE: "raise the maximum length, or leave these rows out",
    Problem.CUT: "raise the maximum length: a cut answer is not taught to stop",
}


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A row as a trainer would train it."""

    place: Place
    ids: Ids
    trained: Mask
    """`[N]` True for tokens in the loss."""
    answers: int = 0
    ends: int = 0
    """Answers whose last token is trained."""
    problems: tuple[tuple[Problem, str], ...] = ()
    """Each with its evidence, in words."""
    markers: bool = False
    """Whether the template's own markers say what is trained."""


@dataclass(slots=True)
class ProblemCount:
    """How many rows have a problem, and the first."""

    first: Place
    shown: str
    """Its evidence in the first row."""
    rows: int = 0


@dataclass(slots=True)
class SetPlan:
    """What a trainer would train of a set, counted row by row."""

    rows: int = 0
    tokens: int = 0
    trained: int = 0
    answers: int = 0
    ends: int = 0
    longest: int = 0
    nothing: int = 0
    """Rows in which nothing would be trained."""
    problems: dict[Problem, ProblemCount] = field(default_factory=dict)

    def add(self, row: PlannedRow) -> None:
        """Count a row."""
        count = int(np.count_nonzero(row.trained))
        self.rows += 1
        self.tokens += len(row.ids)
        self.trained += count
        self.answers += row.answers
        self.ends += row.ends
        self.longest = max(self.longest, len(row.ids))
        self.nothing += not count
        for problem, shown in dict(reversed(row.problems)).items():
            counted = self.problems.setdefault(problem, ProblemCount(row.place, shown))
            counted.rows += 1

    def severity(self, problem: Problem) -> Severity:
        """The severity of a problem in this set."""
        if problem in (Problem.NOTHING, Problem.CUT_BEFORE) and self.nothing == self.rows:
            return Severity.ERROR
        return SEVERITIES.get(problem, Severity.WARNING)

    @property
    def failed(self) -> bool:
        """Whether any problem is an error."""
        return any(self.severity(problem) is Severity.ERROR for problem in self.problems)


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans the rows of a set."""

    reference: Reference
    inference: Renderer | None
    """What writes prompts at inference; None: no template is needed, or there is none."""
    max_length: int | None = None

    def plan_messages(self, rollout: Rollout) -> PlannedRow:
        """A conversation as it would be trained."""
        if self.reference.renderer is None:
            return self.refuse(rollout.place, "the tokenizer has no chat template; pass --chat-template FILE")
        if not any(message.sampled for message in rollout.messages):
            return self.refuse(rollout.place, "no message is an answer")
        try:
            chat = tokenize_chat(rollout, self.reference)
        except RecordError as error:
            return self.refuse(rollout.place, str(error))
        problems: list[tuple[Problem, str]] = []
        if chat.marked is not None and None not in chat.answers:
            # Where `{% generation %}` marks other tokens than the assistant wrote, header and white space aside.
            more = chat.marked & ~chat.written
            for tokens, header in zip(chat.answers, chat.headers, strict=True):
                assert tokens is not None
                start, end = tokens
                # Many trainers train these on purpose.
                more[header:start] = False
                while end < len(more) and more[end] and not self.reference.decode(chat.ids[end : end + 1]).strip():
                    more[end] = False
                    end += 1
            less = chat.written & ~chat.marked
            for problem, differing in ((Problem.MARKED_MORE, more), (Problem.MARKED_LESS, less)):
                if differing.any():
                    at = int(differing.argmax())
                    problems.append((problem, f"token {at}, {self.reference.decode(chat.ids[at : at + 1])!r}"))
        for tokens in map(chat.answers.__getitem__, chat.split):
            assert tokens is not None
            problems.append((Problem.SPLIT, f"{self.reference.decode(chat.ids[tokens[0] - 1 : tokens[0]])!r}"))
        problems += self._prompt_problems(rollout, chat)
        mask = chat.written if chat.marked is None else chat.marked
        if chat.marked is None and None in chat.answers:
            problems.append((Problem.NOT_SHOWN, f"answer {chat.answers.index(None)}"))
        answers = [tokens for tokens in chat.answers if tokens is not None and mask[slice(*tokens)].any()]
        problems += self._length_problems(answers)
        ids, mask = chat.ids[: self.max_length], mask[: self.max_length]
        if not mask.any():
            problems.append((Problem.NOTHING, f"{len(ids):,} tokens"))
        ends = sum(end <= len(ids) and bool(mask[end - 1]) for _, end in answers)
        return PlannedRow(rollout.place, ids, mask, len(answers), ends, tuple(problems), chat.marked is not None)

    def plan_texts(self, place: Place, prompt: str, completion: str) -> PlannedRow:
        """The plan of a row that holds a prompt and a completion as text."""
        try:
            ids, alone, start = tokenize_texts(prompt, completion, self.reference)
        except RecordError as error:
            return self.refuse(place, str(error))
        mask = np.arange(len(ids)) >= start
        problems: list[tuple[Problem, str]] = []
        if start < len(alone):
            text = self.reference.decode
            problems.append((Problem.SPLIT, f"{text(alone[start:])!r} becomes {text(ids[start : start + 1])!r}"))
        problems += self._length_problems([(start, len(ids))])
        whole_fits = self.max_length is None or len(ids) <= self.max_length
        ids, mask = ids[: self.max_length], mask[: self.max_length]
        if not mask.any():
            problems.append((Problem.NOTHING, f"{len(ids):,} tokens"))
        return PlannedRow(place, ids, mask, 1, int(whole_fits), tuple(problems))

    def refuse(self, place: Place, reason: str) -> PlannedRow:
        """The plan of a row that cannot be tokenized."""
        return PlannedRow(
            place, np.empty(0, np.int64), np.empty(0, np.bool_), problems=((Problem.REFUSED, reason),)
        )

    def _prompt_problems(self, rollout: Rollout, chat: TokenizedChat) -> Iterator[tuple[Problem, str]]:
        """Where an answer loses reasoning, or its prompt at inference is not the text before it in training."""
        text, renderer = chat.rendering.text, self.inference
        for index, span in chat.rendering.sampled.items():
            if span is None or renderer is None:
                continue
            start, end = span
            message = rollout.messages[index]
            thought = message.reasoning
            if thought is None:
                inline, tag, _ = message.text.partition("</think>")
                thought = inline.split("<think>")[-1] if tag else ""
            if thought.strip():
                if thought.strip() not in text[start:end]:
                    yield Problem.STRIPPED, f"message {index}"
            else:
                content = message.text.strip()[:_CONTENT_START]
                content_at = text.find(content, start, end) if content else -1
                head = text[start : content_at if content_at >= 0 else min(end, start + 2 * _CONTENT_START)]
                if _THINK in head:
                    yield Problem.INSERTED, f"message {index}, {head!r}"
            if not index:
                continue
            try:
                before, kwargs = rollout.messages[:index], rollout.template_kwargs
                prompt = renderer.render(before, rollout.tools, add_generation_prompt=True, template_kwargs=kwargs)
            except RenderError:
                continue
            if prompt == text[:start]:
                continue
            same = common_start(prompt, text)
            last = max(prompt.rfind("\n", 0, len(prompt.rstrip())), 0)
            ours, theirs = text[same : max(start, same)][:40], prompt[same:][:40]
            problem = Problem.OPENED if same >= min(last, start - 1) or not ours else Problem.HISTORY
            yield problem, f"message {index}: trained after {ours!r}, prompted with {theirs!r}"

    def _length_problems(self, answers: list[tuple[int, int]]) -> Iterator[tuple[Problem, str]]:
        """Which answers the maximum length cuts."""
        size = self.max_length
        if size is None:
            return
        for number, (start, end) in enumerate(answers):
            if start >= size:
                yield Problem.CUT_BEFORE, f"answer {number} begins at token {start:,}"
            elif end > size:
                yield Problem.CUT, f"answer {number} has {end - start:,} tokens, {size - start:,} of them fit"
