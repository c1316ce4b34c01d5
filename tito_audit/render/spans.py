"""A rendered conversation divided into spans: scaffold, contents, tool calls, turn ends.

Contents are found by marks (`sentinels.py`). An assistant message starts with what the template adds there as a
generation prompt, and ends with the first special token after its contents. If marks change what the template
writes, renderings of the first 1, 2, … messages show where each message begins, provided that each is a prefix of
the whole. If that fails too, spans are UNKNOWN: a span is never wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, NamedTuple, TypeAlias

from tito_audit.errors import RenderError
from tito_audit.record.message import Message, ToolSpec
from tito_audit.render.renderer import Chat, Forms, Renderer
from tito_audit.render.scaffolds import Scaffold, scaffolds_of
from tito_audit.render.sentinels import MarkedText, Marking, SpanKind, has_marks, mark, unmark
from tito_audit.render.template import Template

_Label: TypeAlias = tuple[SpanKind, int | None]


class Span(NamedTuple):
    """A half-open range `[start, end)` of the text, in characters."""

    start: int
    end: int
    kind: SpanKind
    message_index: int | None
    """The message it belongs to; None for scaffold between messages, and where unknown."""


class SpanBuilder:
    """Collects the kind and message of each range of a text; where ranges overlap, the last one wins."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._labelled: list[tuple[int, int, _Label, bool]] = []

    def put(self, start: int, end: int, kind: SpanKind, index: int | None) -> None:
        """Label a range."""
        if start < end:
            self._labelled.append((start, end, (kind, index), False))

    def fill(self, start: int, end: int, kind: SpanKind, index: int | None) -> None:
        """Label the parts of a range that have no label yet."""
        if start < end:
            self._labelled.append((start, end, (kind, index), True))

    def spans(self, unlabelled: SpanKind) -> tuple[Span, ...]:
        """The spans in order, with adjacent ranges of equal label merged; `unlabelled` is the kind of all other
        text."""
        edges = {0, self._size}
        for start, end, _, _ in self._labelled:
            edges.add(start)
            edges.add(end)
        order = sorted(edges)
        numbers = {edge: number for number, edge in enumerate(order)}
        labels: list[_Label | None] = [None] * (len(order) - 1)  # of each range between two edges
        for start, end, label, only_free in self._labelled:
            for number in range(numbers[start], numbers[end]):
                if not only_free or labels[number] is None:
                    labels[number] = label
        out: list[Span] = []
        for (start, end), own in zip(pairwise(order), labels, strict=True):
            label = own or (unlabelled, None)
            if out and out[-1][2:] == label:
                out[-1] = Span(out[-1].start, end, *label)
            else:
                out.append(Span(start, end, *label))
        return tuple(out)


def common_start(text: str, other: str) -> int:
    """How many characters two texts share at the start, found in a few comparisons."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def first_of(tokens: tuple[str, ...], text: str, start: int, stop: int) -> tuple[int, int] | None:
    """Where the first of these tokens is in `text[start:stop]`, as `(start, end)`; None if there is none."""
    match = _pattern(tokens).search(text, start, stop) if tokens else None
    return match.span() if match else None


def last_of(tokens: tuple[str, ...], text: str, start: int, stop: int) -> tuple[int, int] | None:
    """Where the last of these tokens is in `text[start:stop]`, as `(start, end)`; None if there is none."""
    matches = _pattern(tokens).finditer(text, start, stop) if tokens else ()
    return max((match.span() for match in matches), default=None)


@lru_cache(maxsize=16)
def _pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


_ROLE = re.compile(r"assistant|model")
"""Template names for the role that answers."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Messages in the form that the template accepted, what it wrote, and how to render parts of them."""

    renderer: Renderer
    chat: Chat
    text: str
    inputs: Mapping[str, Any]
    run: Callable[[Mapping[str, Any]], str]
    fixed_opener: str | None
    """What a generation prompt adds after any of the messages; None if that may depend on them."""
    answers: frozenset[int]
    """The messages that were sampled."""

    def write(self, chat: Chat, *, opens_answer: bool) -> str:
        """What the template writes for these messages."""
        return self.run({**self.inputs, "messages": chat, "add_generation_prompt": opens_answer})

    def prefix_length(self, count: int, *, opens_answer: bool) -> int | None:
        """The length of the rendering of the first `count` messages; None if it is not a prefix of the text."""
        try:
            text = self.write(self.chat[:count], opens_answer=opens_answer) if count else ""
        except RenderError:
            return None
        return len(text) if self.text.startswith(text) and (count or not opens_answer) else None

    def opener(self, count: int) -> str:
        """What a generation prompt adds after the first `count` messages; "" if nothing or unknown."""
        if not count:
            return ""
        if self.fixed_opener is not None:
            return self.fixed_opener
        try:
            closed = self.write(self.chat[:count], opens_answer=False)
            opened = self.write(self.chat[:count], opens_answer=True)
        except RenderError:
            return ""
        return opened[len(closed) :] if opened.startswith(closed) else ""


class TurnFinder:
    """Finds what a model would have sampled, between the marked texts."""

    def __init__(self, job: RenderedChat, pieces: list[MarkedText], marking: Marking) -> None:
        self._job = job
        self._text = job.text
        self._marking = marking
        self._openers: dict[object, str] = {}
        self._found: list[list[MarkedText]] = [[] for _ in job.chat]
        for piece in pieces:
            self._found[piece.message_index].append(piece)
        # Where the first marked text of any later message begins.
        self._next: list[int] = [len(job.text)] * (len(job.chat) + 1)
        for index in range(len(job.chat) - 1, -1, -1):
            # Marked texts are in text order.
            own = self._found[index]
            self._next[index] = min(self._next[index + 1], own[0].start) if own else self._next[index + 1]

    def of(self, index: int) -> list[MarkedText]:
        """The marked texts of one message."""
        return self._found[index]

    def turn(self, index: int, earliest: int) -> tuple[int, int, int, int] | None:
        """Where an assistant message opens, where the model's part starts, where its end token is, and where that
        ends, from `earliest` on; None if it is not found."""
        own = self.of(index)
        calls = bool(self._job.chat[index].get("tool_calls"))
        if calls and not self._marking.tool_calls:
            return None
        opening = self._opening(index, earliest, own[0].start if own else None)
        later = self._next[index + 1]
        if opening is None or opening[1] > later or any(piece.start < opening[1] for piece in own):
            return None
        # The first special token in `[start, stop)`; after tool calls the first end token, if there is one.
        start = max([opening[1], *(piece.end for piece in own)])
        renderer = self._job.renderer
        ends = first_of(renderer.end_texts, self._text, start, later) if calls else None
        closer = ends or first_of(renderer.control_texts, self._text, start, later)
        return (*opening, *closer) if closer is not None else None

    def _opening(self, index: int, earliest: int, first: int | None) -> tuple[int, int] | None:
        """Where the generation prompt of a message begins and ends; None if unknown."""
        # A generation prompt depends on the role of the message before it.
        before = self._job.chat[index - 1].get("role") if index else None
        if before not in self._openers:
            self._openers[before] = self._job.opener(index)
        role = str(self._job.chat[index].get("role"))
        opener = (
            self._openers[before] if role == "assistant" else _ROLE.sub(lambda _: role, self._openers[before], 1)
        )
        # If an earlier message without marks holds it, finding it proves nothing.
        unmarked = [] if not self._marking.assistant_only else self._job.chat[:index]
        head = opener.strip().split("\n")[0]
        is_spelled = any(
            head in str(list(message.values()))
            for at, message in enumerate(unmarked)
            if at not in self._job.answers
        )
        if opener and not is_spelled:
            at = self._text.find(opener, earliest, first)
            if at >= 0:
                return at, at + len(opener)
            # A past turn may have a shorter opener than a new one, for example no empty <think> block.
            head = opener[: opener.find("\n") + 1]
            at = self._text.find(head, earliest, first) if head and first is not None else -1
            if at >= 0:
                return at, at + common_start(self._text[at:first], opener)
            # Or none of the <think> that a new one opens.
            bare = opener.partition("<think>")[0]
            at = self._text.rfind(bare, earliest, first) if bare and first is not None else -1
            if at >= 0 and not self._text[at + len(bare) : first].strip():
                return at, at + len(bare)
        start = self._job.prefix_length(index, opens_answer=True)
        if start is None or start < earliest:
            return None
        return (start - len(opener) if self._text.endswith(opener, earliest, start) else start), start


@dataclass(frozen=True, slots=True)
class Rendering:
    """A rendered conversation and its spans."""

    text: str
    spans: tuple[Span, ...]
    """In order and adjacent, covering the text; none is empty."""
    sampled: Mapping[int, tuple[int, int] | None]
    """For each sampled message, the range `[start, end)` that a model would have sampled: from after the
    generation prompt through the turn end. None where unknown."""
    chat: Chat = field(default_factory=list, compare=False, repr=False)
    """The messages in the form that the template accepted."""

    def __post_init__(self) -> None:
        at = 0
        for span in self.spans:
            if span.start != at or span.end <= at:
                raise AssertionError(f"spans do not touch at character {at}")
            at = span.end
        if at != len(self.text):
            raise AssertionError(f"spans end at character {at} of {len(self.text)}")


def spans(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    template_kwargs: Mapping[str, object] | None = None,
) -> Rendering:
    """The text of these messages with its spans; RenderError when the template cannot render them."""
    chat, text = renderer.accepted(messages, tools, add_generation_prompt=False, template_kwargs=template_kwargs)
    variables = renderer.variables(tools, template_kwargs)
    template = renderer.template(bool(tools))
    opener = template.opener(variables)
    answers = _answers(messages)
    job = RenderedChat(renderer, chat, text, variables, template.run, opener, answers)
    return (None if has_marks(text) else _by_marks(job)) or _by_prefixes(job)


@dataclass(frozen=True, slots=True)
class WrittenFast:
    """A conversation as the fast engine writes it: a guess until something else confirms its text."""

    renderer: Renderer
    messages: Sequence[Message]
    accepted: Chat | None
    """The messages in the form that the template accepted; None for the usual one."""
    inputs: Mapping[str, Any]
    text: str
    scaffold: Scaffold | None = None
    """What stands around the words of the messages, if that was known without rendering them."""

    @property
    def chat(self) -> Chat:
        """The messages in the form that the template accepted."""
        if self.accepted is not None:
            return self.accepted
        return Forms().chat(self.messages, parsed=True, no_content="absent")

    @property
    def generation_prompt(self) -> str | None:
        """What a generation prompt adds after any message; None if this may depend on the messages."""
        return self._template.opener(self.inputs) if self.scaffold is None else self.scaffold.opener

    def spans(self) -> Rendering | None:
        """The text with its spans, as `spans` returns them if the text is right; None if marks change it."""
        from tito_audit.render.fast.render import GivenUp

        fast = self._template.fast
        assert fast is not None

        def run(variables: Mapping[str, Any]) -> str:
            try:
                return fast.run(variables)
            except RenderError as error:  # the reference environment may not raise here
                raise GivenUp from error

        job = RenderedChat(
            self.renderer,
            self.chat,
            self.text,
            self.inputs,
            run,
            self.generation_prompt,
            _answers(self.messages),
        )
        try:
            return _by_marks(job)
        except GivenUp:
            return None

    @property
    def _template(self) -> Template:
        return self.renderer.template(bool(self.inputs["tools"]))


def written_fast(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    template_kwargs: Mapping[str, object] | None = None,
) -> WrittenFast | None:
    """What the fast engine writes for these messages; None if it does not know, or if the text holds marks."""
    variables = renderer.variables(tools, template_kwargs)
    scaffolds, chat, forms = scaffolds_of(renderer, bool(tools)), None, Forms()
    inputs = scaffolds.inputs(variables) if scaffolds is not None else None
    text, scaffold = None, None
    if scaffolds is not None and inputs is not None:
        text, scaffold = scaffolds.written(messages, inputs, False, forms) or (None, None)
    if text is None:
        chat, text = renderer.accepted_fast(messages, variables, add_generation_prompt=False, forms=forms)
    if text is None or has_marks(text):
        return None
    return WrittenFast(renderer, messages, chat, variables, text, scaffold)


def _answers(messages: Sequence[Message]) -> frozenset[int]:
    return frozenset(index for index, message in enumerate(messages) if message.sampled)


def _by_marks(job: RenderedChat) -> Rendering | None:
    """The spans as marks show them; None if marks change what the template writes. The text itself holds no
    marks."""
    # All texts are marked if the template writes the same then, else only those of the assistant.
    for assistant_only, tool_calls in product((False, True), (True, False)):
        marking = Marking(assistant_only=assistant_only, tool_calls=tool_calls)
        try:
            marked, owners = mark(job.chat, marking, job.answers)
            pieces = unmark(job.write(marked, opens_answer=False), owners, job.text)
        except (RenderError, OverflowError):
            continue
        if pieces is not None:
            return _assemble(job, pieces, marking)
    return None


def _assemble(job: RenderedChat, pieces: list[MarkedText], marking: Marking) -> Rendering:
    """The spans of the marked texts, and of the model's turns around them."""
    builder = SpanBuilder(len(job.text))
    for piece in pieces:
        builder.put(*piece)
    finder = TurnFinder(job, pieces, marking)
    sampled: dict[int, tuple[int, int] | None] = {}
    earliest = 0  # a turn begins after the marked texts and turns of earlier messages
    for index in range(len(job.chat)):
        own = finder.of(index)
        if index in job.answers:
            turn = finder.turn(index, earliest)
            sampled[index] = None
            if turn is not None:
                opened, start, closer, end = turn
                sampled[index] = start, end
                # Label what is inside a turn, its opener and its end.
                builder.put(opened, start, SpanKind.GENERATION_PROMPT, index)
                builder.put(closer, end, SpanKind.TURN_END, index)
                ends = [piece.end for piece in own if piece.kind is not SpanKind.TOOL_CALL]
                calls = [piece.start for piece in own if piece.kind is SpanKind.TOOL_CALL]
                if calls:
                    # The markers around the calls belong to them, not the end of the reasoning before them.
                    begin = max([start, *ends])
                    thought = job.text.rfind("</think>", begin, calls[0])
                    if thought >= 0:
                        begin = thought + len("</think>")
                        begin += len(job.text[begin : calls[0]]) - len(job.text[begin : calls[0]].lstrip())
                    builder.put(begin, closer, SpanKind.TOOL_CALL, index)
                builder.fill(start, closer, SpanKind.SCAFFOLD, index)
                earliest = end
        for piece in own:
            earliest = max(earliest, piece.end)
    unlabelled = SpanKind.UNKNOWN if marking.assistant_only else SpanKind.SCAFFOLD
    return Rendering(job.text, builder.spans(unlabelled), sampled, job.chat)


def _by_prefixes(job: RenderedChat) -> Rendering:
    """The spans, as far as shorter renderings are prefixes of the whole."""
    builder = SpanBuilder(len(job.text))
    count = len(job.chat)
    bounds: list[int | None] = [job.prefix_length(n, opens_answer=False) for n in range(count)]
    bounds.append(len(job.text))
    sampled: dict[int, tuple[int, int] | None] = {}
    for index in range(len(job.chat)):
        begin, stop = bounds[index], bounds[index + 1]
        placed = begin is not None and stop is not None and begin <= stop
        if index in job.answers:
            sampled[index] = None
            if begin is not None and stop is not None and placed:
                # The turn of an assistant message within `[begin, stop)`, which ends with the last special token
                # there; None if unknown.
                start = job.prefix_length(index, opens_answer=True)
                if start is None or not begin <= start <= stop:
                    turn_between = None
                else:
                    closer = last_of(job.renderer.control_texts, job.text, start, stop)
                    # A token with more than white space after it is part of the answer.
                    if closer is None or job.text[closer[1] : stop].strip():
                        turn_between = None
                    else:
                        builder.put(begin, start, SpanKind.GENERATION_PROMPT, index)
                        content = job.chat[index].get("content")
                        exact = isinstance(content, str) and job.text[start : closer[0]].strip() == content.strip()
                        builder.put(start, closer[0], SpanKind.CONTENT if exact else SpanKind.UNKNOWN, index)
                        builder.put(*closer, SpanKind.TURN_END, index)
                        builder.put(closer[1], stop, SpanKind.SCAFFOLD, None)
                        turn_between = (start, closer[1])
                sampled[index] = turn_between
        elif begin is not None and stop is not None and placed:
            builder.put(begin, stop, SpanKind.UNKNOWN, index)
    return Rendering(job.text, builder.spans(SpanKind.UNKNOWN), sampled, job.chat)
