"""Why a prompt does not start with what was sampled: where the texts differ, and what the template did there."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tito_audit.errors import RenderError
from tito_audit.render.renderer import Renderer
from tito_audit.render.spans import common_start
from tito_audit.templates.appends import AppendOnly, Fate, Step, append_only, turn_ends
from tito_audit.templates.probes import Probe

if TYPE_CHECKING:
    from tito_audit.render.traced import Decision, Tag, TemplateTracer, TextPiece

_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>")
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_OF_ROLE = re.compile(r"""(?<![\w\].])\w+(?:\.role|\[['"]role['"]\])\s*==""")
_SHOWN = 1_000
_MOST_TRIED, _MOST_TOGETHER = 24, 3
"""How many sets of decisions are tried the other way, and how many decisions together."""


class Altered(StrEnum):
    """What a template does to what was sampled."""

    REASONING = "drops earlier reasoning"
    EMPTY_REASONING = "writes an empty reasoning block only into some answers"
    MOVED = "moves a later system message to the front"
    TOOLS = "moves the list of tools"
    TURN_END = "ends an earlier turn with another token"
    NO_TURN_END = "writes no known end token after an earlier turn"
    SPACE = "changes white space"
    CALLS = "rewrites tool calls"
    GENERATION_PROMPT = "changes the generation prompt once the answer is there"
    OTHER = "rewrites earlier messages"
    HIDDEN = "does not show what was sampled"


@dataclass(frozen=True, slots=True)
class BreakSide:
    """One of two texts where they differ."""

    before: str
    """The common text before it."""
    text: str
    """The text from there on."""
    tag: Tag | None
    """The template's tag that wrote it; None if unknown, or if the text ends there."""


@dataclass(frozen=True, slots=True)
class Break:
    """One place where a prompt does not continue what was sampled."""

    step: Step
    change: Altered
    sampled: BreakSide
    """The previous prompt and what was sampled."""
    rendered: BreakSide
    """The next prompt."""
    conditions: tuple[Decision, ...] = ()
    """The conditions that decide it, with their values for what was sampled: with these values the next prompt
    would hold the sampled text here. () if none were found.
    """


@dataclass(frozen=True, slots=True)
class _Traced:
    """A rendering with the tags that wrote it."""

    tracer: TemplateTracer
    variables: Mapping[str, Any]
    pieces: tuple[TextPiece, ...]

    def piece_at(self, at: int) -> TextPiece | None:
        """The piece with the character at a place; None if there is none."""
        return next((piece for piece in self.pieces if piece.start <= at < piece.start + len(piece.text)), None)


class Breaks:
    """Explains the broken steps of a template."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._tracers: dict[bool, TemplateTracer] = {}
        self._ends = turn_ends(renderer)

    def explain(self, step: Step) -> Break:
        """Where and why a broken step breaks."""
        assert step.at is not None
        at, seen = step.at, step.seen
        in_prompt = at < len(step.prompt) or not step.sampled
        ours = self._traced(step.probe, step.answer + (not in_prompt), in_prompt)
        theirs = self._traced(step.probe, step.until, True)
        piece, other = ours.piece_at(at), theirs.piece_at(at)
        begins = _before_token(seen, at)
        return Break(
            step,
            self._change(step),
            BreakSide(seen[:begins], seen[begins:], piece.tag if piece else None),
            BreakSide(step.after[:begins], step.after[begins:], other.tag if other else None),
            _decisive(ours, theirs, seen, at),
        )

    def _traced(self, probe: Probe, count: int, opens: bool) -> _Traced:
        """A rendering with its pieces; without them if they cannot be found."""
        renderer, with_tools = self._renderer, bool(probe.tools)
        messages, args = probe.messages[:count], probe.template_args
        if with_tools not in self._tracers:
            self._tracers[with_tools] = renderer.template(with_tools).tracer()
        tracer = self._tracers[with_tools]
        try:
            chat, text = renderer.accepted(
                messages, probe.tools, add_generation_prompt=opens, template_kwargs=args
            )
        except RenderError:
            return _Traced(tracer, {}, ())
        variables = renderer.variables(probe.tools, args)
        wanted = {**variables, "messages": chat, "add_generation_prompt": opens}
        return _Traced(tracer, wanted, tracer.trace(wanted, text) or ())

    def _change(self, step: Step) -> Altered:
        """What a template did, judged by the texts alone."""
        assert step.at is not None
        if step.outcome is Fate.UNKNOWN:
            return Altered.HIDDEN
        seen, after, at = step.seen, step.after, step.at
        history, following = (
            step.probe.messages[: step.answer + 1],
            step.probe.messages[step.answer + 1 : step.until],
        )
        thoughts = [
            text.strip()
            for message in history
            if message.sampled
            for text in (message.reasoning or "", *_THOUGHT.findall(message.text))
        ]
        if any(after.count(text) < seen.count(text) for text in thoughts if text):
            return Altered.REASONING
        if len(_EMPTY_THOUGHT.findall(seen)) > len(_EMPTY_THOUGHT.findall(after[: len(seen)])):
            return Altered.EMPTY_REASONING
        later = [message.text.strip() for message in following if message.speaker == "system"]
        if any(text and text in after[: len(step.prompt)] for text in later):
            return Altered.MOVED
        functions = [tool.get("function", tool) for tool in step.probe.tools]
        described = [function.get("description") for function in functions if isinstance(function, Mapping)]
        listed = [text for text in described if isinstance(text, str) and text and text in step.prompt]
        if any(step.prompt.find(text) != after.find(text) for text in listed):
            return Altered.TOOLS
        if at < len(step.prompt):
            closed = step.probe.text(self._renderer, step.answer, opens=False)
            if closed is not None and at >= common_start(closed, step.prompt):
                return Altered.GENERATION_PROMPT
        if _plain(after).startswith(_plain(seen)) or seen[at : at + 1].isspace():
            return Altered.SPACE
        begins = _before_token(seen, at)
        ours, theirs = seen[begins:], after[begins:].lstrip()
        if any(end and ours.startswith(end) for end in self._ends) or ends_something(ours):
            ends = ends_something(theirs) or theirs.startswith(self._ends)
            return Altered.TURN_END if ends else Altered.NO_TURN_END
        return Altered.CALLS if any(message.tool_calls for message in history) else Altered.OTHER


def _before_token(text: str, at: int) -> int:
    """The place itself, or the beginning of a token around it, such as `<think>`."""
    start = text.rfind("<", max(at - 40, 0), at)
    return at if start < 0 or any(char in ">\n" for char in text[start:at]) else start


def _decisive(ours: _Traced, theirs: _Traced, seen: str, at: int) -> tuple[Decision, ...]:
    """The fewest decisions that, with the values of `ours`, make `theirs` write the same."""
    piece_here = ours.piece_at(at)
    if piece_here is None:
        return ()
    wanted = seen[: piece_here.start + len(piece_here.text)]
    tried = 0
    waiting: deque[tuple[tuple[Decision, ...], tuple[TextPiece, ...]]] = deque([((), theirs.pieces)])
    while waiting:
        turned, pieces = waiting.popleft()
        for decision in _suspects(ours.pieces, pieces, at):
            tried += 1
            if tried > _MOST_TRIED:
                return ()
            now = (*turned, decision)
            rendered = theirs.tracer.turned(theirs.variables, now)
            if rendered is not None and "".join(piece.text for piece in rendered).startswith(wanted):
                return tuple(replace(changed, outcome=not changed.outcome) for changed in now)
            if rendered is not None and len(now) < _MOST_TOGETHER:
                waiting.append((now, rendered))
    return ()


def _suspects(ours: Iterable[TextPiece], theirs: Iterable[TextPiece], at: int) -> Iterator[Decision]:
    """Decisions near a place with another outcome than where the same text was written before, nearest first.

    The kind of the message does not count: a template decides that before anything else.
    """
    before = {piece.start: piece for piece in ours if piece.start <= at}
    for piece in [piece for piece in theirs if piece.start <= at][-12:][::-1]:
        written_before = before.get(piece.start)
        decided = written_before.decisions if written_before is not None else ()
        came = {(decision.condition, decision.outcome) for decision in decided}
        for decision in piece.decisions:
            if (decision.condition, not decision.outcome) in came and not _OF_ROLE.search(decision.tag.source):
                yield decision


def ends_something(left: str) -> bool:
    """Whether a text begins with a token that ends something."""
    token = re.match(r"\s*[<\[]([^<>\[\]\s]{1,40})[>\]]", left)
    return token is not None and any(word in token[1].lower() for word in ("end", "eo", "/s", "return", "call|"))


def _plain(text: str) -> str:
    return "".join(text.split())


def explained(renderer: Renderer, probes: Iterable[Probe]) -> tuple[AppendOnly, tuple[Break, ...]]:
    """What becomes of each answer, and why it breaks, with shortened texts.

    For conversations of a log, which may be long: only one is held at a time.
    """
    explainer = Breaks(renderer)
    steps: list[Step] = []
    breaks: list[Break] = []
    for probe in probes:
        appends = append_only(renderer, [probe])
        for step in appends.broken:
            whole = explainer.explain(step)
            sampled, rendered = (
                replace(side, before=side.before[-_SHOWN:], text=side.text[:_SHOWN])
                for side in (whole.sampled, whole.rendered)
            )
            breaks.append(replace(whole, step=_without_texts(step), sampled=sampled, rendered=rendered))
        steps += [_without_texts(step) for step in appends.steps]
    return AppendOnly(tuple(steps)), tuple(breaks)


def _without_texts(step: Step) -> Step:
    return replace(step, prompt="", sampled="", after="")


def grouped(breaks: Iterable[Break]) -> Mapping[tuple[str, str, str], list[Break]]:
    """Breaks by what changes, the conditions that decide it, and the tag that wrote the other text."""
    groups: dict[tuple[str, str, str], list[Break]] = {}
    for broken in breaks:
        conditions = " ".join(f"{decision.tag}" for decision in broken.conditions)
        tag = f"{broken.rendered.tag}" if not broken.conditions else ""
        groups.setdefault((broken.change, conditions, tag), []).append(broken)
    return groups
