"""Why a prompt does not start with what was sampled: where the texts differ, and what the template did there."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tito_audit.errors import RenderError
from tito_audit.render.renderer import Renderer
from tito_audit.render.spans import common_start
from tito_audit.templates.append_only import AppendCheck, Step, StepOutcome, check_append_only, turn_ends
from tito_audit.templates.probes import Probe

if TYPE_CHECKING:
    from tito_audit.render.tracer import Decision, Tag, TemplateTracer, TextPiece

_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>")
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_OF_ROLE = re.compile(r"""(?<![\w\].])\w+(?:\.role|\[['"]role['"]\])\s*==""")
_MAX_SHOWN = 1_000
_MAX_TRIES, _MAX_FLIPPED = 24, 3
"""How many sets of decisions are flipped at most, and how many decisions in one set."""


class HistoryChange(StrEnum):
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
    """One of two texts, split where they differ."""

    before: str
    """The common text before it."""
    text: str
    """The text from there on."""
    tag: Tag | None
    """The template tag that wrote it; None if unknown, or if the text ends there."""


@dataclass(frozen=True, slots=True)
class Break:
    """One place where a prompt does not continue what was sampled."""

    step: Step
    change: HistoryChange
    sampled: BreakSide
    """The previous prompt and what was sampled."""
    rendered: BreakSide
    """The next prompt."""
    conditions: tuple[Decision, ...] = ()
    """The conditions that decide it, with their outcomes when the answer was sampled: with these outcomes the next
    prompt would hold the sampled text here. () if none were found.
    """


@dataclass(frozen=True, slots=True)
class _TracedRendering:
    """A rendering with the tags that wrote it."""

    tracer: TemplateTracer
    variables: Mapping[str, Any]
    pieces: tuple[TextPiece, ...]

    def piece_at(self, at: int) -> TextPiece | None:
        """The piece that holds this character; None if no piece does."""
        return next((piece for piece in self.pieces if piece.start <= at < piece.start + len(piece.text)), None)


class BreakExplainer:
    """Explains the broken steps of a template."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._tracers: dict[bool, TemplateTracer] = {}
        self._ends = turn_ends(renderer)

    def explain(self, step: Step) -> Break:
        """Where and why a broken step breaks."""
        assert step.at is not None
        at, seen = step.at, step.prompt_and_sampled
        in_prompt = at < len(step.prompt) or not step.sampled
        ours = self._trace(step.probe, step.answer + (not in_prompt), in_prompt)
        theirs = self._trace(step.probe, step.until, True)
        piece, other = ours.piece_at(at), theirs.piece_at(at)
        begins = _token_start(seen, at)
        return Break(
            step,
            self._classify(step),
            BreakSide(seen[:begins], seen[begins:], piece.tag if piece else None),
            BreakSide(step.after[:begins], step.after[begins:], other.tag if other else None),
            _find_decisive(ours, theirs, seen, at),
        )

    def _trace(self, probe: Probe, count: int, opens: bool) -> _TracedRendering:
        """Render the first `count` messages with their pieces; none if they cannot be traced."""
        renderer, with_tools = self._renderer, bool(probe.tools)
        messages, args = probe.messages[:count], probe.template_args
        if with_tools not in self._tracers:
            self._tracers[with_tools] = renderer.template(with_tools).tracer()
        tracer = self._tracers[with_tools]
        try:
            chat, text = renderer.render_chat(
                messages, probe.tools, add_generation_prompt=opens, template_kwargs=args
            )
        except RenderError:
            return _TracedRendering(tracer, {}, ())
        variables = renderer.variables(probe.tools, args)
        wanted = {**variables, "messages": chat, "add_generation_prompt": opens}
        return _TracedRendering(tracer, wanted, tracer.trace(wanted, text) or ())

    def _classify(self, step: Step) -> HistoryChange:
        """What the template did, judged by the texts alone."""
        assert step.at is not None
        if step.outcome is StepOutcome.UNKNOWN:
            return HistoryChange.HIDDEN
        seen, after, at = step.prompt_and_sampled, step.after, step.at
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
            return HistoryChange.REASONING
        if len(_EMPTY_THOUGHT.findall(seen)) > len(_EMPTY_THOUGHT.findall(after[: len(seen)])):
            return HistoryChange.EMPTY_REASONING
        later = [message.text.strip() for message in following if message.speaker == "system"]
        if any(text and text in after[: len(step.prompt)] for text in later):
            return HistoryChange.MOVED
        functions = [tool.get("function", tool) for tool in step.probe.tools]
        described = [function.get("description") for function in functions if isinstance(function, Mapping)]
        listed = [text for text in described if isinstance(text, str) and text and text in step.prompt]
        if any(step.prompt.find(text) != after.find(text) for text in listed):
            return HistoryChange.TOOLS
        if at < len(step.prompt):
            closed = step.probe.try_render(self._renderer, step.answer, opens=False)
            if closed is not None and at >= common_start(closed, step.prompt):
                return HistoryChange.GENERATION_PROMPT
        if _without_space(after).startswith(_without_space(seen)) or seen[at : at + 1].isspace():
            return HistoryChange.SPACE
        begins = _token_start(seen, at)
        ours, theirs = seen[begins:], after[begins:].lstrip()
        if any(end and ours.startswith(end) for end in self._ends) or starts_with_end(ours):
            ends = starts_with_end(theirs) or theirs.startswith(self._ends)
            return HistoryChange.TURN_END if ends else HistoryChange.NO_TURN_END
        return HistoryChange.CALLS if any(message.tool_calls for message in history) else HistoryChange.OTHER


def _token_start(text: str, at: int) -> int:
    """Where the tag around this position starts, such as `<think>`; the position itself outside tags."""
    start = text.rfind("<", max(at - 40, 0), at)
    return at if start < 0 or any(char in ">\n" for char in text[start:at]) else start


def _find_decisive(ours: _TracedRendering, theirs: _TracedRendering, seen: str, at: int) -> tuple[Decision, ...]:
    """The fewest decisions that, with their outcome in `ours`, make `theirs` write the same; () if unknown."""
    piece_here = ours.piece_at(at)
    if piece_here is None:
        return ()
    wanted = seen[: piece_here.start + len(piece_here.text)]
    outcomes = {
        piece.start: {(decision.condition, decision.outcome) for decision in piece.decisions}
        for piece in ours.pieces
        if piece.start <= at
    }
    tried = 0
    waiting: deque[tuple[tuple[Decision, ...], tuple[TextPiece, ...]]] = deque([((), theirs.pieces)])
    while waiting:
        flipped, pieces = waiting.popleft()
        nearest_first = [piece for piece in pieces if piece.start <= at][-12:][::-1]
        # A template decides by the role of a message before anything else, so those decisions are left out.
        differing = [
            decision
            for piece in nearest_first
            for decision in piece.decisions
            if (decision.condition, not decision.outcome) in outcomes.get(piece.start, ())
            and not _OF_ROLE.search(decision.tag.source)
        ]
        for decision in differing:
            tried += 1
            if tried > _MAX_TRIES:
                return ()
            now = (*flipped, decision)
            rendered = theirs.tracer.trace_flipped(theirs.variables, now)
            if rendered is not None and "".join(piece.text for piece in rendered).startswith(wanted):
                return tuple(replace(changed, outcome=not changed.outcome) for changed in now)
            if rendered is not None and len(now) < _MAX_FLIPPED:
                waiting.append((now, rendered))
    return ()


def starts_with_end(left: str) -> bool:
    """Whether a text begins with a tag that looks like an end token: `<|im_end|>`, `</s>`, `<eos>`."""
    token = re.match(r"\s*[<\[]([^<>\[\]\s]{1,40})[>\]]", left)
    return token is not None and any(word in token[1].lower() for word in ("end", "eo", "/s", "return", "call|"))


def _without_space(text: str) -> str:
    return "".join(text.split())


def explain_breaks(renderer: Renderer, probes: Iterable[Probe]) -> tuple[AppendCheck, tuple[Break, ...]]:
    """Check each conversation of a log, and explain the broken steps; texts are shortened.

    Logged conversations may be long, so the texts of only one are in memory at a time.
    """
    explainer = BreakExplainer(renderer)
    steps: list[Step] = []
    breaks: list[Break] = []
    for probe in probes:
        appends = check_append_only(renderer, [probe])
        for step in appends.broken:
            whole = explainer.explain(step)
            sampled, rendered = (
                replace(side, before=side.before[-_MAX_SHOWN:], text=side.text[:_MAX_SHOWN])
                for side in (whole.sampled, whole.rendered)
            )
            breaks.append(replace(whole, step=_drop_texts(step), sampled=sampled, rendered=rendered))
        steps += [_drop_texts(step) for step in appends.steps]
    return AppendCheck(tuple(steps)), tuple(breaks)


def _drop_texts(step: Step) -> Step:
    return replace(step, prompt="", sampled="", after="")


def group_breaks(breaks: Iterable[Break]) -> Mapping[tuple[str, str, str], list[Break]]:
    """Group breaks by what changes, the conditions that decide it, and the tag that wrote the other text."""
    groups: dict[tuple[str, str, str], list[Break]] = {}
    for broken in breaks:
        conditions = " ".join(f"{decision.tag}" for decision in broken.conditions)
        tag = f"{broken.rendered.tag}" if not broken.conditions else ""
        groups.setdefault((broken.change, conditions, tag), []).append(broken)
    return groups
