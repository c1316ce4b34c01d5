"""Divides a rendered conversation into spans: scaffold, contents, tool calls, turn ends.

Contents are found by marks (`marks.py`). An assistant message starts with its generation prompt and ends with the
first special token after its contents. If marks change what the template writes, messages are found by rendering
the first 1, 2, … messages, as long as each rendering is a prefix of the whole. If that fails too, spans are
UNKNOWN: a span is never wrong.
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
from tito_audit.render.marks import MarkedText, Marking, SpanKind, has_marks, mark, unmark
from tito_audit.render.renderer import Chat, ChatForms, Renderer
from tito_audit.render.scaffolds import Scaffold, find_scaffolds
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
    """Labels ranges of a text with kind and message; where ranges overlap, the last one wins."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._labelled: list[tuple[int, int, _Label, bool]] = []

    def label(self, start: int, end: int, kind: SpanKind, index: int | None) -> None:
        """Label a range."""
        if start < end:
            self._labelled.append((start, end, (kind, index), False))

    def label_gaps(self, start: int, end: int, kind: SpanKind, index: int | None) -> None:
        """Label those parts of a range that have no label yet."""
        if start < end:
            self._labelled.append((start, end, (kind, index), True))

    def build(self, unlabelled: SpanKind) -> tuple[Span, ...]:
        """The spans in order, adjacent ones of equal label merged; `unlabelled` is the kind of all other text."""
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
    """How many characters two texts start with in common, by bisection."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def find_first_token(tokens: tuple[str, ...], text: str, start: int, stop: int) -> tuple[int, int] | None:
    """The `(start, end)` of the first of these tokens in `text[start:stop]`; None if there is none."""
    match = _any_of(tokens).search(text, start, stop) if tokens else None
    return match.span() if match else None


def find_last_token(tokens: tuple[str, ...], text: str, start: int, stop: int) -> tuple[int, int] | None:
    """The `(start, end)` of the last of these tokens in `text[start:stop]`; None if there is none."""
    matches = _any_of(tokens).finditer(text, start, stop) if tokens else ()
    return max((match.span() for match in matches), default=None)


@lru_cache(maxsize=16)
def _any_of(tokens: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


_ROLE = re.compile(r"assistant|model")
"""What templates call the role of the model."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Messages in the form that the template accepted, their text, and a way to render parts of them."""

    renderer: Renderer
    chat: Chat
    text: str
    inputs: Mapping[str, Any]
    run: Callable[[Mapping[str, Any]], str]
    fixed_generation_prompt: str | None
    """What a generation prompt adds after any of the messages; None if that may depend on them."""
    answers: frozenset[int]
    """The messages that were sampled."""

    def render(self, chat: Chat, *, opens_answer: bool) -> str:
        """The text of these messages."""
        return self.run({**self.inputs, "messages": chat, "add_generation_prompt": opens_answer})

    def prefix_length(self, count: int, *, opens_answer: bool) -> int | None:
        """The length of the rendering of the first `count` messages; None if it is not a prefix of the text."""
        try:
            text = self.render(self.chat[:count], opens_answer=opens_answer) if count else ""
        except RenderError:
            return None
        return len(text) if self.text.startswith(text) and (count or not opens_answer) else None

    def generation_prompt_after(self, count: int) -> str:
        """The generation prompt after the first `count` messages; "" if there is none or it is unknown."""
        if not count:
            return ""
        if self.fixed_generation_prompt is not None:
            return self.fixed_generation_prompt
        try:
            closed = self.render(self.chat[:count], opens_answer=False)
            opened = self.render(self.chat[:count], opens_answer=True)
        except RenderError:
            return ""
        return opened[len(closed) :] if opened.startswith(closed) else ""


class TurnFinder:
    """Finds what a model would have sampled, given the marked texts."""

    def __init__(self, rendered: RenderedChat, pieces: list[MarkedText], marking: Marking) -> None:
        self._rendered = rendered
        self._text = rendered.text
        self._marking = marking
        self._generation_prompts: dict[object, str] = {}
        self.marked_texts: list[list[MarkedText]] = [[] for _ in rendered.chat]
        """Those of each message, in order of the text."""
        for piece in pieces:
            self.marked_texts[piece.message_index].append(piece)
        # Where the first marked text of this or any later message begins
        self._next_marked: list[int] = [len(rendered.text)] * (len(rendered.chat) + 1)
        for index in range(len(rendered.chat) - 1, -1, -1):
            starts = [piece.start for piece in self.marked_texts[index][:1]]
            self._next_marked[index] = min([self._next_marked[index + 1], *starts])

    def find_turn(self, index: int, earliest: int) -> tuple[int, int, int, int] | None:
        """Where the generation prompt starts and ends, and where the end token does; None if unknown.

        Searched from `earliest` on.
        """
        own = self.marked_texts[index]
        calls = bool(self._rendered.chat[index].get("tool_calls"))
        if calls and not self._marking.tool_calls:
            return None
        opening = self._find_generation_prompt(index, earliest, own[0].start if own else None)
        later = self._next_marked[index + 1]
        if opening is None or opening[1] > later or any(piece.start < opening[1] for piece in own):
            return None
        # After tool calls an end token closes the turn if there is one, else the first special token
        start = max([opening[1], *(piece.end for piece in own)])
        renderer = self._rendered.renderer
        ends = find_first_token(renderer.end_texts, self._text, start, later) if calls else None
        closer = ends or find_first_token(renderer.control_texts, self._text, start, later)
        return (*opening, *closer) if closer is not None else None

    def _find_generation_prompt(self, index: int, earliest: int, first: int | None) -> tuple[int, int] | None:
        """The `(start, end)` of the generation prompt of a message; None if unknown."""
        # It depends on the role of the message before.
        before = self._rendered.chat[index - 1].get("role") if index else None
        if before not in self._generation_prompts:
            self._generation_prompts[before] = self._rendered.generation_prompt_after(index)
        role = str(self._rendered.chat[index].get("role"))
        opener = (
            self._generation_prompts[before]
            if role == "assistant"
            else _ROLE.sub(lambda _: role, self._generation_prompts[before], 1)
        )
        # If an unmarked earlier message spells it, finding it proves nothing.
        unmarked = [] if not self._marking.assistant_only else self._rendered.chat[:index]
        head = opener.strip().split("\n")[0]
        is_spelled = any(
            head in str(list(message.values()))
            for at, message in enumerate(unmarked)
            if at not in self._rendered.answers
        )
        if opener and not is_spelled:
            at = self._text.find(opener, earliest, first)
            if at >= 0:
                return at, at + len(opener)
            # A past turn may have a shorter one than a new turn, for example no empty <think> block.
            head = opener[: opener.find("\n") + 1]
            at = self._text.find(head, earliest, first) if head and first is not None else -1
            if at >= 0:
                return at, at + common_start(self._text[at:first], opener)
            # Or without the <think> that a new turn opens.
            bare = opener.partition("<think>")[0]
            at = self._text.rfind(bare, earliest, first) if bare and first is not None else -1
            if at >= 0 and not self._text[at + len(bare) : first].strip():
                return at, at + len(bare)
        start = self._rendered.prefix_length(index, opens_answer=True)
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


def render_spans(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    template_kwargs: Mapping[str, object] | None = None,
) -> Rendering:
    """The text of these messages with its spans; RenderError when the template cannot render them."""
    how: dict[str, Any] = {"add_generation_prompt": False, "template_kwargs": template_kwargs}
    chat, text = renderer.render_chat(messages, tools, **how)
    variables = renderer.variables(tools, template_kwargs)
    template = renderer.template(bool(tools))
    opener = template.fixed_generation_prompt(variables)
    answers = _sampled_messages(messages)
    rendered = RenderedChat(renderer, chat, text, variables, template.run, opener, answers)
    rendering = None if has_marks(text) else _spans_by_marks(rendered)
    if rendering is not None:
        return rendering
    # By rendering fewer messages, as far as these renderings are prefixes of the whole
    builder = SpanBuilder(len(text))
    bounds = [rendered.prefix_length(count, opens_answer=False) for count in range(len(chat))]
    sampled: dict[int, tuple[int, int] | None] = dict.fromkeys(sorted(answers))
    for index, (begin, stop) in enumerate(pairwise([*bounds, len(text)])):
        if begin is None or stop is None or begin > stop:
            continue
        if index not in answers:
            builder.label(begin, stop, SpanKind.UNKNOWN, index)
            continue
        # The turn lies within `[begin, stop)` and ends with the last special token there.
        start = rendered.prefix_length(index, opens_answer=True)
        if start is None or not begin <= start <= stop:
            continue
        closer = find_last_token(renderer.control_texts, text, start, stop)
        # A token with more than white space after it is part of the answer.
        if closer is None or text[closer[1] : stop].strip():
            continue
        builder.label(begin, start, SpanKind.GENERATION_PROMPT, index)
        content = chat[index].get("content")
        exact = isinstance(content, str) and text[start : closer[0]].strip() == content.strip()
        builder.label(start, closer[0], SpanKind.CONTENT if exact else SpanKind.UNKNOWN, index)
        builder.label(*closer, SpanKind.TURN_END, index)
        builder.label(closer[1], stop, SpanKind.SCAFFOLD, None)
        sampled[index] = start, closer[1]
    return Rendering(text, builder.build(SpanKind.UNKNOWN), sampled, chat)


@dataclass(frozen=True, slots=True)
class FastRendering:
    """A conversation as the fast engine writes it: a guess until something else confirms it."""

    renderer: Renderer
    messages: Sequence[Message]
    accepted_chat: Chat | None
    """The messages in the form that the template accepted; None for the usual one."""
    inputs: Mapping[str, Any]
    text: str
    scaffold: Scaffold | None = None
    """The scaffold that it was filled from; None if the messages were rendered."""

    @property
    def chat(self) -> Chat:
        """The messages in the form that the template accepted."""
        if self.accepted_chat is not None:
            return self.accepted_chat
        return ChatForms().chat(self.messages, parsed=True, no_content="absent")

    @property
    def generation_prompt(self) -> str | None:
        """The generation prompt after any messages; None if it may depend on them."""
        if self.scaffold is not None:
            return self.scaffold.generation_prompt
        return self._template.fixed_generation_prompt(self.inputs)

    def find_spans(self) -> Rendering | None:
        """What `render_spans` returns, if the text is right; None if marks change the text."""
        from tito_audit.render.fast.render import NeedsReference

        fast = self._template.fast
        assert fast is not None

        def run(variables: Mapping[str, Any]) -> str:
            try:
                return fast.run(variables)
            except RenderError as error:  # the reference environment may not raise here
                raise NeedsReference from error

        rendered = RenderedChat(
            self.renderer,
            self.chat,
            self.text,
            self.inputs,
            run,
            self.generation_prompt,
            _sampled_messages(self.messages),
        )
        try:
            return _spans_by_marks(rendered)
        except NeedsReference:
            return None

    @property
    def _template(self) -> Template:
        return self.renderer.template(bool(self.inputs["tools"]))


def render_fast(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    template_kwargs: Mapping[str, object] | None = None,
) -> FastRendering | None:
    """What the fast engine writes for these messages; None if it does not know, or if the text holds marks."""
    variables = renderer.variables(tools, template_kwargs)
    scaffolds, chat, forms = find_scaffolds(renderer, bool(tools)), None, ChatForms()
    inputs = scaffolds.inputs(variables) if scaffolds is not None else None
    text, scaffold = None, None
    if scaffolds is not None and inputs is not None:
        text, scaffold = scaffolds.render(messages, inputs, False, forms) or (None, None)
    if text is None:
        chat, text = renderer.render_chat_fast(messages, variables, add_generation_prompt=False, forms=forms)
    if text is None or has_marks(text):
        return None
    return FastRendering(renderer, messages, chat, variables, text, scaffold)


def _sampled_messages(messages: Sequence[Message]) -> frozenset[int]:
    return frozenset(index for index, message in enumerate(messages) if message.sampled)


def _spans_by_marks(rendered: RenderedChat) -> Rendering | None:
    """The spans found by marks; None if marks change what the template writes. The text must hold none itself."""
    # Mark as much as the template tolerates: all texts, else only those of the assistant.
    for assistant_only, tool_calls in product((False, True), (True, False)):
        marking = Marking(assistant_only=assistant_only, tool_calls=tool_calls)
        try:
            marked, owners = mark(rendered.chat, marking, rendered.answers)
            pieces = unmark(rendered.render(marked, opens_answer=False), owners, rendered.text)
        except (RenderError, OverflowError):
            continue
        if pieces is not None:
            break
    else:
        return None
    builder = SpanBuilder(len(rendered.text))
    for piece in pieces:
        builder.label(*piece)
    finder = TurnFinder(rendered, pieces, marking)
    sampled: dict[int, tuple[int, int] | None] = {}
    earliest = 0  # a turn begins after the marked texts and turns of earlier messages
    for index, own in enumerate(finder.marked_texts):
        turn = None
        if index in rendered.answers:
            turn = finder.find_turn(index, earliest)
            sampled[index] = (turn[1], turn[3]) if turn is not None else None
        if turn is not None:
            opened, start, closer, earliest = turn
            builder.label(opened, start, SpanKind.GENERATION_PROMPT, index)
            builder.label(closer, earliest, SpanKind.TURN_END, index)
            ends = [piece.end for piece in own if piece.kind is not SpanKind.TOOL_CALL]
            calls = [piece.start for piece in own if piece.kind is SpanKind.TOOL_CALL]
            if calls:
                # The wrapping around calls belongs to them, but not the end of the reasoning before.
                begin = max([start, *ends])
                thought = rendered.text.rfind("</think>", begin, calls[0])
                if thought >= 0:
                    begin = thought + len("</think>")
                    begin = calls[0] - len(rendered.text[begin : calls[0]].lstrip())
                builder.label(begin, closer, SpanKind.TOOL_CALL, index)
            builder.label_gaps(start, closer, SpanKind.SCAFFOLD, index)
        earliest = max([earliest, *[piece.end for piece in own]])
    unlabelled = SpanKind.UNKNOWN if marking.assistant_only else SpanKind.SCAFFOLD
    return Rendering(rendered.text, builder.build(unlabelled), sampled, rendered.chat)
