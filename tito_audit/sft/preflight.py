"""Tokenizes chats for SFT, plans what a trainer would train of them, and finds where prompts at inference differ.

Chat templates for training mark with `{% generation %}` what an assistant writes (`return_assistant_tokens_mask`
of huggingface/transformers `tokenization_utils_base.py`, which TRL's `assistant_only_loss` passes). Most templates
lack the markers. Then marks in the messages, which the template passes on (`render/marks.py`), show each
answer: from after the generation prompt through the turn end.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from tito_audit.errors import RecordError, RenderError
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids, Mask
from tito_audit.record.finding import Severity
from tito_audit.record.prefix import common_prefix
from tito_audit.record.rollout import Place, Rollout, TrainingRow
from tito_audit.render.marks import SpanKind
from tito_audit.render.renderer import Renderer
from tito_audit.render.spans import Rendering, common_start, render_spans


@dataclass(frozen=True, slots=True)
class TokenizedChat:
    """A conversation tokenized for a trainer."""

    rendering: Rendering
    ids: Ids
    """`[N]` int32"""
    answers: tuple[tuple[int, int] | None, ...]
    """The token range `[start, end)` of each answer, its turn end included; None where nothing shows it."""
    headers: tuple[int, ...]
    """The first token of each answer's header, its generation prompt; of the answer itself if it has none."""
    written: Mask
    """`[N]` True for tokens of answers to be trained, as far as the rendering shows them."""
    marked: Mask | None
    """`[N]` True for what the template marks with `{% generation %}`; None if it has no markers."""
    split: tuple[int, ...]
    """Answers whose first token also holds the end of the prompt."""

    def mask(self) -> Mask:
        """`[N]` True for tokens to train; RecordError if nothing shows where an answer begins and ends."""
        if self.marked is not None:
            return self.marked
        if None in self.answers:
            raise RecordError(
                f"the chat template does not show where answer {self.answers.index(None)} begins and ends"
            )
        return self.written


def trained_messages(rollout: Rollout) -> list[bool]:
    """For each answer whether it is to be trained.

    It is not where `weight` (OpenAI's fine-tuning files) or `train` (axolotl's `message_field_training`) says no,
    or where it belongs to the `prompt` beside a `completion` (TRL).
    """
    first = rollout.stated.facts.get("prompt_messages", 0)
    return [
        isinstance(first, int)
        and index >= first
        and message.wire.get("weight") not in (0, False)
        and message.wire.get("train") is not False
        for index, message in enumerate(rollout.messages)
        if message.sampled
    ]


def tokenize_chat(rollout: Rollout, reference: Reference) -> TokenizedChat:
    """Render and tokenize the messages of a rollout; RecordError if that is not possible."""
    assert reference.renderer is not None
    try:
        rendering = render_spans(reference.renderer, rollout.messages, rollout.tools, rollout.template_kwargs)
    except RenderError as error:
        raise RecordError(str(error)) from None
    text = rendering.text
    ids = reference.encode(text)
    offsets = _ByteOffsets(text, None if reference.has_bytes_of(ids, text) else "NFC")
    if offsets.form is not None and offsets.data != reference.vocabulary.bytes_of(ids):
        raise RecordError("the tokenizer changes the text that it encodes, so where its answers begin is unknown")
    lengths = reference.vocabulary.byte_lengths(ids)
    ends = lengths.cumsum()
    starts = ends - lengths
    trained = trained_messages(rollout)
    answers: list[tuple[int, int] | None] = []
    written, split, headers = np.zeros(len(ids), np.bool_), list[int](), list[int]()
    for index in [index for index, message in enumerate(rollout.messages) if message.sampled]:
        span = rendering.sampled.get(index)
        if span is None:
            answers.append(None)
            headers.append(0)
            continue
        # The tokens that lie in the answer as a whole.
        begins = offsets.byte(span[0])
        start, end = int(starts.searchsorted(begins)), int(ends.searchsorted(offsets.byte(span[1]), "right"))
        if start < len(ids) and starts[start] > begins:
            split.append(len(answers))
        answers.append((start, max(start, end)))
        prompts = (part for part in rendering.spans if part.kind is SpanKind.GENERATION_PROMPT)
        header = next((prompt.start for prompt in prompts if prompt.end == span[0]), None)
        headers.append(start if header is None else int(starts.searchsorted(offsets.byte(header))))
        written[start:end] = trained[len(answers) - 1]
    template = reference.renderer.template(bool(rollout.tools))
    variables = reference.renderer.variables(rollout.tools, rollout.template_kwargs)
    variables = {**variables, "messages": rendering.chat, "add_generation_prompt": False}
    try:  # the ranges of the text that the template marks, None if it has no markers
        marked = template.generation_ranges(variables, text)
    except RenderError:
        marked = None
    mask = None
    if marked is not None:
        mask = np.zeros(len(ids), np.bool_)
        alike = len(marked) == len(answers)
        for number, (start, end) in enumerate(marked):
            if start < end and (not alike or trained[number]):
                # The tokens that hold any of it, as transformers marks them.
                first = int(starts.searchsorted(offsets.byte(start), "right")) - 1
                mask[max(first, 0) : int(starts.searchsorted(offsets.byte(end)))] = True
    return TokenizedChat(rendering, ids, tuple(answers), tuple(headers), written, mask, tuple(split))


class _ByteOffsets:
    """Maps characters of a text to bytes of its Unicode normalization `form` (None: of the text itself)."""

    def __init__(self, text: str, form: str | None) -> None:
        self._text = text
        self.form = form
        self.data = self._encoded(text)

    def byte(self, place: int) -> int:
        """The byte at which a character begins; RecordError if it is composed with the one before it."""
        if len(self.data) == len(self._text):
            return place
        before = self._encoded(self._text[:place])
        if len(before) + len(self._encoded(self._text[place:])) != len(self.data):
            raise RecordError("a character of an answer is composed with text before it")
        return len(before)

    def _encoded(self, text: str) -> bytes:
        return (unicodedata.normalize(self.form, text) if self.form else text).encode("utf-8", "surrogatepass")  # type: ignore[arg-type]


def prompt_and_completion(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """The prompt and the completion of a row of texts, None of any other row; a `text` is all completion."""
    prompt, completion = row.get("prompt"), row.get("completion")
    if not isinstance(completion, str):
        prompt, completion = "", row.get("text")
    return (prompt, completion) if isinstance(prompt, str) and isinstance(completion, str) else None


def tokenize_texts(prompt: str, completion: str, reference: Reference) -> tuple[Ids, Ids, int]:
    """The ids of prompt + completion + end-of-sequence token, the ids of the prompt alone, and where they part.

    Training starts where they part, as in huggingface/trl `trl/trainer/sft_trainer.py`.
    """
    eos = reference.tokenizer.special_tokens.get("eos_token", "")
    whole = prompt + completion + ("" if completion.endswith(eos) else eos)
    ids, alone = reference.encode(whole), reference.encode(prompt)
    return ids, alone, common_prefix(alone, ids)


def as_sft_row(rollout: Rollout, reference: Reference | None, texts: tuple[str, str] | None = None) -> TrainingRow:
    """A conversation, or `texts` (prompt, completion), as ids with a mask of what to train; else RecordError."""
    if texts is not None and not rollout.messages and reference is not None:
        ids, _, start = tokenize_texts(*texts, reference)
        return TrainingRow(ids, np.arange(len(ids)) >= start, None)
    if not any(message.sampled for message in rollout.messages):
        raise RecordError("it holds neither token ids nor a conversation with an answer")
    if reference is None or reference.renderer is None:
        raise RecordError("it holds messages only; pass -t with a tokenizer that has a chat template")
    chat = tokenize_chat(rollout, reference)
    mask = chat.mask()
    if not mask.any():
        raise RecordError("nothing of it would be trained")
    return TrainingRow(chat.ids, mask, None)


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
        return PlannedRow(rollout.place, ids, mask, len(answers), ends, tuple(problems))

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
        size = self.max_length
        if size is None:
            return
        for number, (start, end) in enumerate(answers):
            if start >= size:
                yield Problem.CUT_BEFORE, f"answer {number} begins at token {start:,}"
            elif end > size:
                yield Problem.CUT, f"answer {number} has {end - start:,} tokens, {size - start:,} of them fit"
