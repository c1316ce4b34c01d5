"""The smallest set of edits that makes a chat template keep history as it was sampled.

The proof for a variant: first prompts are unchanged, and history is as sampled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import combinations, pairwise
from time import thread_time

from tito_audit.errors import SetupError
from tito_audit.render.renderer import Renderer
from tito_audit.render.template import compile_template
from tito_audit.templates.appends import Fate, Step, append_only, unwritten
from tito_audit.templates.edits import EditKind, TemplateEdit, apply_edits, plain_newlines, possible_edits
from tito_audit.templates.probes import (
    ANSWER,
    CORE,
    PROBES,
    REASONING,
    TOOLS,
    Probe,
    answer_kind,
    answering,
    probe,
)

_THOUGHT = re.compile(r"<\|?(?:begin_of_)?(?:think|thought|thinking)\|?>\s*\Z")
_SPACED = " \n What is\tthe weather? \n\n"
_SAID = "It is sunny."
_ASK = {"role": "user", "content": "What is the weather?"}
_FIRST: tuple[Probe, ...] = tuple(
    probe(f"{name}{' with tools' if tools else ''}", wires, tools)
    for tools in ((), TOOLS)
    for name, wires in (
        ("a question", [{"role": "user", "content": "What is the weather?"}]),
        ("a spaced question", [{"role": "user", "content": _SPACED}]),
        ("an empty question", [{"role": "user", "content": ""}]),
        ("a question with tags", [{"role": "user", "content": "Is <think>this</think> a tag?"}]),
        (
            "a system prompt",
            [{"role": "system", "content": "  Be brief.\n"}, {"role": "user", "content": _SPACED}],
        ),
        ("a system prompt alone", [{"role": "system", "content": "Be brief."}]),
        ("two questions", [{"role": "user", "content": "Hello"}, {"role": "user", "content": _SPACED}]),
        ("a developer", [{"role": "developer", "content": " Be brief. "}, {"role": "user", "content": "Hello"}]),
    )
)
"""Prompts of first turns."""
PARSED: tuple[Probe, ...] = tuple(
    probe(f"a parsed answer {number}", [_ASK, answering(content, reasoning), _ASK])
    for number, (content, reasoning) in enumerate(
        (
            (f"\n\n{_SAID}", REASONING),
            (_SAID, f"\n{REASONING}\n"),
            (f"\n{_SAID}", f"{REASONING}\n\n"),
        )
    )
)
"""Answers with the whitespace that parsers leave after reasoning: templates that strip it must still do so."""
_SPACES = ("{} \n", "\n\n{}", " {}\n\n", "{}\t")


@dataclass(frozen=True, slots=True)
class Judged:
    """What a template does with some conversations."""

    answers: frozenset[str]
    """The answers that the next prompt holds as sampled, by name."""
    lost: frozenset[str]
    """Those that it does not hold as sampled."""
    lost_with_tools: frozenset[str]
    """Those of them in conversations with tools."""
    trimmed: frozenset[str]
    """Those that it holds without the whitespace at their ends."""
    unsampled: frozenset[str]
    """Those that no model samples, because they lack the reasoning that the prompt begins; and those before a
    system message, which templates may move.
    """
    steps: tuple[Step, ...] = ()

    @property
    def lost_without_tools(self) -> frozenset[str]:
        """Those that are lost in conversations without tools."""
        return self.lost - self.lost_with_tools

    @property
    def faults(self) -> int:
        """How many answers do not come back as sampled."""
        return len(self.lost) + len(self.trimmed)

    def faulty(self, renderer: Renderer) -> list[tuple[Probe, str | None]]:
        """A conversation for each kind of answer that does not come back, up to the next prompt, with that."""
        steps = {step.kind: step for step in self.steps if _name(step) in self.lost}
        probes = [replace(step.probe, messages=step.probe.messages[: step.until]) for step in steps.values()]
        probes += [_spaced_probe(space) for space in _SPACES[:2] if self.trimmed]
        return [(case, case.text(renderer)) for case in probes]


def alone(renderer: Renderer, source: str, where: str) -> Renderer:
    """A renderer with this template instead of its own; SetupError if it is not a template."""
    return replace(renderer, templates={"default": compile_template(source, where)}, name=None)


def judge(renderer: Renderer, probes: Sequence[Probe], *, spaces: bool = True) -> Judged:
    """What becomes of the answers of some conversations; `spaces`: also of whitespace at their ends."""
    steps = append_only(renderer, probes).steps
    # Whether it writes the field `reasoning_content` of a message
    text = probe("", [_ASK, answering(ANSWER, REASONING)]).text(renderer, opens=False)
    has_field = text is None or REASONING in text
    names: set[str] = set()
    lost: set[str] = set()
    trimmed: set[str] = set()
    unsampled: set[str] = set()
    for step in steps:
        answer = step.message
        if step.outcome is Fate.KEPT:
            names.add(_name(step))
            continue
        # What the template cannot write at all does not count.
        if step.outcome is Fate.REFUSED or (answer.reasoning and not has_field):
            continue
        inline = "<think>" in answer_kind(answer) and not answer.tool_calls
        if step.outcome is Fate.LEFT_OUT and not (inline and "text" in step.left_out):
            continue
        following = step.probe.messages[step.answer : step.until]
        unopened = not step.sampled and _THOUGHT.search(step.prompt) is not None
        unopened = unopened and not (answer.reasoning or "</think>" in answer.text)
        before_system = any(message.speaker == "system" for message in following)
        (unsampled if before_system or unopened else lost).add(_name(step))
    for name, unchanged in _spaced(renderer) if spaces else ():
        (names if unchanged else trimmed).add(name)
    of_tools = {_name(step) for step in steps if step.probe.tools} & lost
    return Judged(
        frozenset(names), frozenset(lost), frozenset(of_tools), frozenset(trimmed), frozenset(unsampled), steps
    )


def _name(step: Step) -> str:
    return f"{step.probe.name}, answer {step.answer}"


def _spaced(renderer: Renderer) -> Iterable[tuple[str, bool]]:
    """Whether whitespace at the ends of a plain answer comes back; only for ends where the answer's text directly
    touches the template's.
    """
    plain = _texts(renderer, probe("", [_ASK, answering(_SAID), _ASK]))
    if plain is None:
        return
    for space in _SPACES:
        content = space.format(_SAID)
        leads, trails = not content.startswith(_SAID), not content.endswith(_SAID)
        prompt, after = plain
        # The template may add text after a generation prompt, such as an empty thought.
        if leads and not after.startswith(prompt + _SAID):
            continue
        sampled = after[: after.index(_SAID, len(prompt))] + content if _SAID in after[len(prompt) :] else None
        texts = _texts(renderer, _spaced_probe(space))
        if sampled is not None and texts is not None and (leads or trails):
            yield f"an answer as {content!r}", texts[1].startswith(sampled)


def _spaced_probe(space: str) -> Probe:
    return probe("", [_ASK, answering(space.format(_SAID)), _ASK])


def _texts(renderer: Renderer, case: Probe) -> tuple[str, str] | None:
    """The prompt of a probe's answer, and the prompt after it; None if the template refuses them."""
    first, second = (case.text(renderer, count) for count in (1, None))
    return None if first is None or second is None else (first, second)


class Original:
    """A template as it was, with what it writes for first turns and answers."""

    def __init__(self, renderer: Renderer, log: Sequence[Probe] = ()) -> None:
        self.renderer = renderer
        values = {each.name: each.values for each in renderer.template(False).arguments.arguments}
        stated = renderer.template_args
        self.arguments: tuple[Mapping[str, object], ...] = (
            {},
            *({name: value} for name in values if name not in stated for value in values[name]),
        )
        """Those to prove first prompts with: the given ones, and each value that the template distinguishes."""
        self.firsts = [
            replace(head, template_args=args) for head in (*_FIRST, *_heads(PROBES)) for args in self.arguments
        ]
        self.firsts_of_log = _heads(log)
        """The first prompts that are compared, of the probes and of the log."""
        self._texts: dict[int, str | None] = {}
        self._answers = {id(probe): list(_turns(renderer, probe)) for probe in (*PROBES, *PARSED)}

    def writes_same(self, variant: Renderer, firsts: Iterable[Probe]) -> bool:
        """Whether these first prompts are byte for byte the same."""
        for first in firsts:
            if id(first) not in self._texts:
                self._texts[id(first)] = first.text(self.renderer)
            if first.text(variant) != self._texts[id(first)]:
                return False
        return True

    def agrees(self, variant: Renderer) -> bool:
        """Whether answers and what follows them are unchanged, except for history, in every probe."""
        every = {id(case): case for case in (*CORE, *PARSED, *PROBES)}
        return all(_agree(*pair) for case in every.values() for pair in self._pairs(variant, case))

    def changes_history_alone(self, variant: Renderer) -> bool:
        """Whether a variant changes something of the core probes, but no answer and nothing that follows one."""
        pairs = [pair for case in CORE for pair in self._pairs(variant, case)]
        return all(_agree(*pair) for pair in pairs) and any(before != after for before, after in pairs)

    def _pairs(self, variant: Renderer, case: Probe) -> Iterator[tuple[_Turn, _Turn]]:
        return zip(self._answers[id(case)], _turns(variant, case), strict=True)


def _heads(probes: Iterable[Probe]) -> list[Probe]:
    """The messages before the first answer of each."""
    heads = []
    for case in probes:
        count = next((i for i, message in enumerate(case.messages) if message.sampled), len(case.messages))
        if count:
            heads.append(replace(case, messages=case.messages[:count]))
    return heads


@dataclass(frozen=True, slots=True)
class _Turn:
    """An answer of a probe as a template writes it; None where that cannot be told."""

    last: str | None
    """What the answer is written as while nothing follows."""
    rest: str | None
    """What the next prompt adds to it."""
    after: str | None
    """That prompt."""


def _turns(renderer: Renderer, case: Probe) -> Iterator[_Turn]:
    """The answers of a probe, each with what follows it."""
    answers = [i for i, message in enumerate(case.messages) if message.sampled]
    after = case.text(renderer, answers[0]) if answers else None
    for answer, until in pairwise([*answers, len(case.messages)]):
        prompt, after = after, case.text(renderer, until)
        closed = case.text(renderer, answer + 1, opens=False)
        last = None
        if prompt is not None and closed is not None and closed.startswith(prompt):
            last = closed[len(prompt) :]
        if closed is None or last is None or unwritten(case.messages[answer], last):
            yield _Turn(None, None, after)
        else:
            whole = closed.rstrip()
            rest = after[len(whole) :] if after is not None and after.startswith(whole) else None
            yield _Turn(last, rest, after)


def _agree(before: _Turn, after: _Turn) -> bool:
    """Whether a variant writes an answer as the template did, and after it the same."""
    if before.last is not None and before.last != after.last:
        return False
    if (before.after is None) != (after.after is None):
        return False
    return before.after is None or after.rest is None or before.after.endswith(after.rest)


SECONDS = 45.0
"""How long a search may take, of one processor."""

_Set = tuple[TemplateEdit, ...]


@dataclass(frozen=True, slots=True)
class OfLog:
    """What was proved on the conversations of a log."""

    firsts: int
    """How many first prompts were compared: all of them are byte for byte what they were."""
    before: Judged
    after: Judged


@dataclass(frozen=True, slots=True)
class Variant:
    """A chat template with edits, and what they do for its history."""

    source: str
    """The template as it was, with plain newlines."""
    edits: tuple[TemplateEdit, ...]
    before: Judged
    after: Judged
    firsts: int
    """How many first prompts were compared: all of them are byte for byte what they were."""
    arguments: tuple[str, ...]
    """The arguments that they were compared with, each value that the template tells apart."""
    of_log: OfLog | None = None
    rejected: tuple[tuple[TemplateEdit, str], ...] = ()
    """Edits that keep more of the history, each with the reason against it."""

    @property
    def text(self) -> str:
        """The template with the edits."""
        return apply_edits(self.source, self.edits)

    @property
    def keeps_history(self) -> bool:
        """Whether every answer that a model samples is still there in the next prompt, at least without tools; and
        in the log."""
        of_log = self.of_log is None or not self.of_log.after.lost
        return bool(self.after.answers) and not self.after.lost_without_tools and of_log


def find_variant(renderer: Renderer, log: Sequence[Probe] = ()) -> Variant:
    """The variant of a renderer's template that keeps the most of its history, proved on every probe and on these
    conversations of a log."""
    source = plain_newlines(renderer.template(False).source)
    original = Original(alone(renderer, source, "the template"), log)
    search = _Search(original, source, thread_time() + SECONDS)
    edits = search.run()
    both = [search.renderer(chosen) or original.renderer for chosen in ((), edits)]
    before, after = (judge(chosen, PROBES) for chosen in both)
    of_log = None
    if log:
        of_log = OfLog(len(original.firsts_of_log), *(judge(chosen, log, spaces=False) for chosen in both))
    arguments = tuple(f"{name}={value!r}" for argument in original.arguments for name, value in argument.items())
    return Variant(source, edits, before, after, len(original.firsts), arguments, of_log, search.rejected())


class _Search:
    """Tries edits of a template one by one, then combines the useful ones."""

    def __init__(self, original: Original, source: str, deadline: float) -> None:
        self._original = original
        self._source = source
        self._deadline = deadline
        self._now = judge(original.renderer, CORE)
        self._best: tuple[_Set, Judged] = (), self._now
        self._rejected: dict[TemplateEdit, tuple[int, str]] = {}
        self._renderers: dict[frozenset[TemplateEdit], Renderer | None] = {frozenset(): original.renderer}
        self._proofs: dict[frozenset[TemplateEdit], bool] = {}
        self._judged: dict[frozenset[TemplateEdit], Judged | None] = {}
        self._watched = self._now.faulty(original.renderer)

    def run(self) -> _Set:
        """The edits that keep the most of the history."""
        edits = possible_edits(self._source) if self._now.faults else []
        # Where answers are written first: what is found there changes nothing else.
        for pool in ([edit for edit in edits if edit.in_answer], edits):
            useful = [(single,) for single in pool if self._is_useful((single,))]
            self._combine(useful)
            if self._best[1].lost_without_tools:
                self._combine([*useful, *(pair for pair in self._pairs(pool) if self._is_useful(pair))])
            now = self._best[1]
            if not now.lost_without_tools and (self._best[0] or not now.faults):
                break
        needed, judged = self._best
        for edit in needed:  # others may have made it needless
            fewer = tuple(other for other in needed if other != edit)
            without = self._tried(fewer)
            if without is not None and without.faults <= judged.faults and self._is_proved(fewer, without):
                needed = fewer
        return needed

    def renderer(self, edits: _Set) -> Renderer | None:
        """A renderer with these edits; None if the result is not a template."""
        key = frozenset(edits)
        if key not in self._renderers:
            try:
                edited = alone(self._original.renderer, apply_edits(self._source, edits), "the edited template")
                self._renderers[key] = edited
            except SetupError:
                self._renderers[key] = None
        return self._renderers[key]

    def rejected(self) -> tuple[tuple[TemplateEdit, str], ...]:
        """The edits that would have kept more but changed something that must stay; the best first."""
        ranked = sorted(self._rejected.items(), key=lambda entry: (-entry[1][0], entry[0].kind))
        return tuple((edit, why) for edit, (_, why) in ranked[:3])

    def _combine(self, useful: Sequence[_Set]) -> None:
        """Try sets of what is useful, those with the fewest faults first."""
        tried: set[frozenset[TemplateEdit]] = set()
        ahead: list[tuple[int, int, int, _Set]] = [(self._now.faults, 0, 0, ())]
        while ahead and self._best[1].faults:
            if len(tried) >= (80 if self._best[1].lost else 24):  # fewer once only whitespace differs
                break
            *_, edits = heappop(ahead)
            for added in useful:
                more = (*edits, *added)
                if len(more) > 6 or any(a.overlaps(b) for a, b in combinations(more, 2)):
                    continue
                if frozenset(more) in tried or thread_time() > self._deadline:
                    continue
                tried.add(frozenset(more))
                judged = self._tried(more)
                if judged is None or not self._is_proved(more, judged):
                    continue
                outside = sum(not edit.in_answer for edit in more)
                heappush(ahead, (judged.faults, outside, len(tried), more))
                if judged.faults < self._best[1].faults:
                    self._best = more, judged

    def _pairs(self, pool: Iterable[TemplateEdit]) -> Iterator[_Set]:
        """Pairs of conditions, for templates where one alone does harm."""
        kinds = (EditKind.BY_PLACE, EditKind.DROP_CUT, EditKind.BY_THOUGHT)
        likely = [edit for edit in pool if edit.kind in kinds and self._touches((edit,))]
        return (pair for pair in combinations(likely[:16], 2) if not pair[0].overlaps(pair[1]))

    def _tried(self, edits: _Set) -> Judged | None:
        """What becomes of answers with these edits; None if the result is not a template, or loses what was
        kept.
        """
        key = frozenset(edits)
        if key not in self._judged:
            variant = self.renderer(edits)
            if variant is None or thread_time() > self._deadline:
                return None
            judged = judge(variant, CORE)
            spoiled = judged.lost | judged.trimmed | judged.unsampled
            self._judged[key] = judged if self._now.answers.isdisjoint(spoiled) else None
        return self._judged[key]

    def _is_useful(self, edits: _Set) -> bool:
        """Whether these edits do something to history, and to nothing else."""
        if not self._touches(edits):
            return False
        judged, variant = self._tried(edits), self.renderer(edits)
        if judged is None or variant is None:
            return False
        if judged.faults >= self._now.faults and not self._original.changes_history_alone(variant):
            return False
        return self._is_proved(edits, judged)

    def _touches(self, edits: _Set) -> bool:
        """Whether these edits change any prompt that lacks what was sampled: far cheaper than whether they fix
        it.
        """
        if thread_time() > self._deadline or (variant := self.renderer(edits)) is None:
            return False
        return any(case.text(variant) != text for case, text in self._watched)

    def _is_proved(self, edits: _Set, judged: Judged) -> bool:
        """Whether everything but history is unchanged."""
        key = frozenset(edits)
        if key not in self._proofs:
            variant, why = self.renderer(edits), ""
            if variant is None:
                why = "it is not a template"
            elif not self._original.writes_same(variant, _FIRST):
                why = "first prompts change"
            elif not self._original.agrees(variant):
                why = "an answer, or what follows one, changes"
            elif not self._original.writes_same(variant, self._original.firsts):
                why = "first prompts with some argument change"
            elif not self._original.writes_same(variant, self._original.firsts_of_log):
                why = "first prompts of the log change"
            gain = self._now.faults - judged.faults
            if why and gain > 0 and len(edits) == 1:
                self._rejected.setdefault(edits[-1], (gain, why))
            self._proofs[key] = not why
        return self._proofs[key]
