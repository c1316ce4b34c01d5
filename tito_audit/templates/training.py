"""Search for the smallest set of edits that makes a chat template keep history as it was sampled.

A variant is proved by rendering: first prompts are unchanged, and later prompts hold the answers as sampled.
Edits are found with Jinja's lexer, which gives the position of each token: its syntax tree knows only lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from heapq import heappop, heappush
from itertools import combinations, pairwise
from time import thread_time

from tito_audit.errors import SetupError
from tito_audit.render.renderer import Renderer
from tito_audit.render.template import compile_template
from tito_audit.templates.append_only import Step, StepOutcome, check_append_only, missing_parts
from tito_audit.templates.probes import (
    ANSWER,
    CORE,
    PROBES,
    REASONING,
    TOOLS,
    Probe,
    answer_kind,
    assistant,
    make_probe,
)

_OPENS, _CLOSES = "([{", ")]}"
_BOOLEAN = ("and", "or", "not", "if", "else", ",")
_COMPARES = ("==", "!=", "<", ">", "<=", ">=", "in", "is")


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an expression."""

    start: int
    end: int
    kind: str
    """`name`, `operator`, `string`, `integer` or `float`, as Jinja says."""
    text: str


@dataclass(frozen=True, slots=True)
class SourceTag:
    """One `{% … %}` or `{{ … }}`."""

    start: int
    end: int
    """Before the whitespace that a `-%}` strips."""
    line: int
    tokens: tuple[Token, ...]
    is_statement: bool

    @property
    def keyword(self) -> str:
        """The first word of a statement, such as `if`; "" for an expression."""
        return self.tokens[0].text if self.is_statement and self.tokens else ""


def read_tags(source: str) -> tuple[SourceTag, ...]:
    """Every tag of a valid template, in order; see `plain_newlines`."""
    import jinja2

    lexer = jinja2.Environment(keep_trailing_newline=True, extensions=["jinja2.ext.loopcontrols"]).lexer
    tags: list[SourceTag] = []
    inside: list[Token] = []
    begun: tuple[int, int] | None = None
    at = 0
    for line, kind, text in lexer.tokeniter(source, None):
        start = source.index(text, at)  # the lexer omits whitespace that tags strip
        at = start + len(text)
        if kind in ("block_begin", "variable_begin"):
            begun, inside = (start, line), []
        elif kind in ("block_end", "variable_end") and begun is not None:
            begin, first_line = begun
            tags.append(
                SourceTag(begin, start + len(text.rstrip()), first_line, tuple(inside), kind == "block_end")
            )
            begun = None
        elif begun is not None and kind != "whitespace":
            inside.append(Token(start, at, kind, text))
    return tuple(tags)


def bracket_depths(tokens: Sequence[Token]) -> list[int]:
    """How many brackets are open around each token; a bracket itself is outside of its pair."""
    levels, depth = [], 0
    for token in tokens:
        closes = token.kind == "operator" and token.text in _CLOSES
        depth -= closes
        levels.append(depth)
        depth += token.kind == "operator" and token.text in _OPENS
    return levels


def find_conditions(tag: SourceTag) -> list[tuple[Token, ...]]:
    """Every boolean expression in a tag, whole conditions and their parts, the longest first."""
    tokens, runs = tag.tokens, []
    if tag.keyword in ("if", "elif"):
        tokens = tokens[1:]
        runs.append(tokens)
    elif tag.keyword == "set":
        after = next((i for i, token in enumerate(tokens) if token.text == "="), len(tokens))
        tokens = tokens[after + 1 :]
    elif tag.keyword not in ("", "for"):
        return []
    runs += _split_conditions(tokens, truths=tag.keyword in ("if", "elif"))
    unique = {(run[0].start, run[-1].end): run for run in runs if run}
    return sorted(unique.values(), key=lambda run: run[0].start - run[-1].end)


def _split_conditions(tokens: Sequence[Token], *, truths: bool) -> Iterator[tuple[Token, ...]]:
    """The parts of an expression that are conditions; `truths`: the whole expression is one too."""
    levels = bracket_depths(tokens)
    cuts: list[int] = []
    for i, token in enumerate(tokens):
        follows = tokens[i + 1].text if i + 1 < len(tokens) else ""
        # The `not` of `is not` and `not in` does not stand between conditions.
        part = token.text == "not" and (follows == "in" or (i > 0 and tokens[i - 1].text == "is"))
        if levels[i] == 0 and token.kind in ("name", "operator") and token.text in _BOOLEAN and not part:
            cuts.append(i)
    for begin, end in zip([-1, *cuts], [*cuts, len(tokens)], strict=True):
        run = tuple(tokens[begin + 1 : end])
        around = {tokens[i].text for i in (begin, end) if 0 <= i < len(tokens)}
        boolean = bool(around & {"and", "or", "not"}) or (begin >= 0 and tokens[begin].text == "if")
        outside = [token for token, level in zip(run, bracket_depths(run), strict=True) if not level]
        compares = any(token.text in _COMPARES for token in outside)
        if run and (compares or boolean or truths):
            yield run
    # The whole condition of each `a if … else b`
    for i, token in enumerate(tokens):
        if token.kind == "name" and token.text == "if" and levels[i] == 0:
            ends = (j for j in range(i + 1, len(tokens)) if levels[j] == 0 and tokens[j].text in ("else", ","))
            yield tuple(tokens[i + 1 : next(ends, len(tokens))])
    # The conditions within brackets
    opened: int | None = None
    for i, token in enumerate(tokens):
        if levels[i]:
            continue
        if token.kind == "operator" and token.text in _CLOSES and opened is not None:
            yield from _split_conditions(tokens[opened + 1 : i], truths=False)
            opened = None
        elif token.kind == "operator" and token.text in _OPENS:
            opened = i


_CUTTING = frozenset(
    ["trim", "strip", "lstrip", "rstrip", "split", "rsplit", "partition", "rpartition", "replace"]
)
_POSITION = re.compile(r"\bloop\.|\blast\w*|_ind?e?x|index|_idx|\bns\d?\.")
_REASONING = re.compile(r"think|reason|thought|channel", re.IGNORECASE)


class EditKind(IntEnum):
    """What an edit does; the kinds most likely to be enough first."""

    DROP_CUT = 0
    """A block that only cuts text is left out."""
    BY_PLACE = 1
    """A condition on a message's position becomes true or false."""
    BY_THOUGHT = 2
    """A condition on reasoning becomes true or false."""
    UNCUT = 3
    """Text is no longer trimmed or split."""
    UNCUT_ANSWERS = 4
    """Text of the model's answers is no longer trimmed or split."""
    ANY = 5
    """Another condition becomes true or false."""


@dataclass(frozen=True, slots=True)
class TemplateEdit:
    """One place in a template, and its replacement."""

    start: int
    end: int
    new: str
    kind: EditKind
    line: int
    was: str
    in_answer: bool = False
    """Whether it is where the template writes answers."""

    @property
    def does(self) -> str:
        """What the edit does, in one line."""
        was = " ".join(self.was.split())
        if self.kind is EditKind.DROP_CUT:
            return f"leaves out {was}"
        if self.kind in (EditKind.UNCUT, EditKind.UNCUT_ANSWERS):
            return f"writes {self.new} in place of {was}"
        return f"takes {was} for {self.new}"

    def overlaps(self, other: TemplateEdit) -> bool:
        """Whether both change the same text."""
        return self.start < other.end and other.start < self.end


def plain_newlines(source: str) -> str:
    """The template with newlines normalized as Jinja does."""
    return source.replace("\r\n", "\n").replace("\r", "\n")


def apply_edits(source: str, edits: Sequence[TemplateEdit]) -> str:
    """The template with these edits, none of which overlap."""
    for edit in sorted(edits, key=lambda each: each.start, reverse=True):
        source = source[: edit.start] + edit.new + source[edit.end :]
    return source


def find_edits(source: str) -> list[TemplateEdit]:
    """Every edit worth trying, the most promising first."""
    tags = read_tags(source)
    edits: list[TemplateEdit] = []
    # Leave out a block `{% if … %}{% set … %}{% endif %}` which only cuts text
    ifs: list[int] = []
    for i, tag in enumerate(tags):
        if tag.keyword == "if":
            ifs.append(i)
        elif tag.keyword == "endif" and ifs:
            block = tags[ifs.pop() : i + 1]
            start, body = block[0].start, block[1:-1]
            only_sets = all(inner.keyword in ("set", "if", "else", "elif", "endif") for inner in body)
            only_tags = all(not source[a.end : b.start].strip() for a, b in pairwise(block))
            cuts = any(token.text in _CUTTING for inner in body for token in inner.tokens)
            if only_sets and only_tags and cuts:
                text = source[start : tag.end]
                edits.append(TemplateEdit(start, tag.end, "", EditKind.DROP_CUT, block[0].line, text))
    # Make a condition true or false
    for run in [run for tag in tags for run in find_conditions(tag)]:
        start, end = run[0].start, run[-1].end
        was, line = source[start:end], source.count("\n", 0, start) + 1
        kind = EditKind.ANY
        if _POSITION.search(was):
            kind = EditKind.BY_PLACE
        elif _REASONING.search(was):
            kind = EditKind.BY_THOUGHT
        if was not in ("true", "false"):
            edits += [TemplateEdit(start, end, new, kind, line, was) for new in ("true", "false")]
    edits += _uncut_edits(source, tags)
    unique: dict[tuple[int, int, str], TemplateEdit] = {}
    for edit in edits:
        unique.setdefault((edit.start, edit.end, edit.new), edit)
    # Where the branches for assistant messages begin and end
    answers: list[tuple[int, int]] = []
    opened: list[int | None] = []
    for tag in tags:
        if tag.keyword in ("elif", "else", "endif") and opened:
            begin = opened.pop()
            if begin is not None:
                answers.append((begin, tag.start))
        if tag.keyword in ("if", "elif", "else"):
            names_it = any(token.kind == "string" and token.text[1:-1] == "assistant" for token in tag.tokens)
            opened.append(tag.end if names_it else None)
    placed = (
        replace(edit, in_answer=any(start <= edit.start < end for start, end in answers))
        for edit in unique.values()
    )
    return sorted(placed, key=lambda edit: (not edit.in_answer, edit.kind, edit.start, -edit.end))


def _uncut_edits(source: str, tags: Sequence[SourceTag]) -> Iterator[TemplateEdit]:
    """Edits that no longer trim or split a text, in all messages or only in answers."""
    loops: list[str] = []
    for tag in tags:
        if tag.keyword == "for" and len(tag.tokens) > 1:
            loops.append(tag.tokens[1].text)
        elif tag.keyword == "endfor" and loops:
            loops.pop()
        if tag.keyword not in ("", "if", "elif", "set", "for"):
            continue
        for begin, cut, end in _find_cut_chains(tag.tokens):
            base, whole = source[begin:cut].rstrip(), source[begin:end]
            line = source.count("\n", 0, begin) + 1
            texts = [base]  # stripped on the left only, if it was stripped at both ends
            if re.fullmatch(r"\.strip\(.*\)", source[cut:end]):
                texts.insert(0, base + source[cut:end].replace(".strip(", ".lstrip(", 1))
            elif re.fullmatch(r"\s*\|\s*trim", source[cut:end]):
                texts.insert(0, f"{base}.lstrip()")
            for new in texts:
                yield TemplateEdit(begin, end, new, EditKind.UNCUT, line, whole)
                if loops:
                    of_answers = f"({new} if {loops[0]}['role'] == 'assistant' else {whole})"
                    yield TemplateEdit(begin, end, of_answers, EditKind.UNCUT_ANSWERS, line, whole)


def _find_cut_chains(tokens: Sequence[Token]) -> Iterator[tuple[int, int, int]]:
    """For each chain of cutting filters or methods: start of the text, start of the chain, end; longest first."""
    levels = bracket_depths(tokens)
    for i, token in enumerate(tokens):
        if token.text not in _CUTTING or not i or tokens[i - 1].text not in (".", "|"):
            continue
        # The first token of the expression that is cut
        begin = i - 2
        while begin >= 0:
            text, previous = tokens[begin].text, tokens[begin - 1] if begin else None
            if levels[begin] > levels[i - 1] or text in ("]", ")"):
                begin -= 1
            elif previous is not None and levels[begin] == levels[i - 1] and previous.text in (".", "|"):
                begin -= 2
            elif (
                previous is not None
                and text in ("[", "(")
                and (previous.kind == "name" or previous.text in ("]", ")"))
            ):
                begin -= 1
            else:
                break
        if begin < 0:
            continue
        # The last token of the cut, and of each cut that follows it at once
        ends: list[int] = []
        end, following = i, "."
        while following in (".", "|") and tokens[end].text in _CUTTING:
            if end + 1 < len(tokens) and tokens[end + 1].text == "(":
                end = _find_closing_bracket(levels, end + 1)
            while end + 1 < len(tokens) and tokens[end + 1].text == "[":
                end = _find_closing_bracket(levels, end + 1)
            ends.append(end)
            following = tokens[end + 1].text if end + 2 < len(tokens) else ""
            end += 2
        for end in reversed(ends):
            yield tokens[begin].start, tokens[i - 1].start, tokens[end].end


def _find_closing_bracket(levels: Sequence[int], opening: int) -> int:
    return next(i for i in range(opening + 1, len(levels)) if levels[i] == levels[opening])


_OPENED_REASONING = re.compile(r"<\|?(?:begin_of_)?(?:think|thought|thinking)\|?>\s*\Z")
_SPACED = " \n What is\tthe weather? \n\n"
_REPLY = "It is sunny."
_QUESTION = {"role": "user", "content": "What is the weather?"}
_FIRST_PROMPTS: tuple[Probe, ...] = tuple(
    make_probe(f"{name}{' with tools' if tools else ''}", wires, tools)
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
PARSED: tuple[Probe, ...] = tuple(
    make_probe(f"a parsed answer {number}", [_QUESTION, assistant(content, reasoning), _QUESTION])
    for number, (content, reasoning) in enumerate(
        ((f"\n\n{_REPLY}", REASONING), (_REPLY, f"\n{REASONING}\n"), (f"\n{_REPLY}", f"{REASONING}\n\n"))
    )
)
"""Answers with the whitespace that parsers leave after reasoning: a template that strips it must still do so."""
_SPACES = ("{} \n", "\n\n{}", " {}\n\n", "{}\t")


@dataclass(frozen=True, slots=True)
class HistoryReport:
    """Which answers of some conversations the next prompt holds as sampled, by name."""

    answers: frozenset[str]
    """Held as sampled."""
    lost: frozenset[str]
    """Not held as sampled."""
    lost_with_tools: frozenset[str]
    """The lost answers of conversations with tools."""
    trimmed: frozenset[str]
    """Held without the whitespace at their ends."""
    unsampled: frozenset[str]
    """Not held, but not counted either: they lack the reasoning that the prompt begins, so no model samples them;
    or a system message follows, which templates may move.
    """
    steps: tuple[Step, ...] = ()

    @property
    def lost_without_tools(self) -> frozenset[str]:
        """The lost answers of conversations without tools."""
        return self.lost - self.lost_with_tools

    @property
    def faults(self) -> int:
        """How many answers do not come back as sampled."""
        return len(self.lost) + len(self.trimmed)

    def faulty(self, renderer: Renderer) -> list[tuple[Probe, str | None]]:
        """For each kind of answer that is lost, a conversation up to the next prompt, and that prompt."""
        steps = {step.answer_kind: step for step in self.steps if _answer_name(step) in self.lost}
        probes = [replace(step.probe, messages=step.probe.messages[: step.until]) for step in steps.values()]
        probes += [_spaced_probe(space) for space in _SPACES[:2] if self.trimmed]
        return [(case, case.try_render(renderer)) for case in probes]


def with_template(renderer: Renderer, source: str, where: str) -> Renderer:
    """A renderer with this template instead of its own; SetupError if it is not a template."""
    return replace(renderer, templates={"default": compile_template(source, where)}, name=None)


def judge_history(renderer: Renderer, probes: Sequence[Probe], *, spaces: bool = True) -> HistoryReport:
    """Which answers of these conversations come back as sampled; `spaces`: also whitespace at their ends."""
    steps = check_append_only(renderer, probes).steps
    # Whether the template writes `reasoning_content`
    text = make_probe("", [_QUESTION, assistant(ANSWER, REASONING)]).try_render(renderer, opens=False)
    has_field = text is None or REASONING in text
    names: set[str] = set()
    lost: set[str] = set()
    trimmed: set[str] = set()
    unsampled: set[str] = set()
    for step in steps:
        answer = step.message
        if step.outcome is StepOutcome.KEPT:
            names.add(_answer_name(step))
            continue
        # Skip what the template cannot write at all
        if step.outcome is StepOutcome.REFUSED or (answer.reasoning and not has_field):
            continue
        inline = "<think>" in answer_kind(answer) and not answer.tool_calls
        if step.outcome is StepOutcome.LEFT_OUT and not (inline and "text" in step.left_out):
            continue
        following = step.probe.messages[step.answer : step.until]
        unopened = not step.sampled and _OPENED_REASONING.search(step.prompt) is not None
        unopened = unopened and not (answer.reasoning or "</think>" in answer.text)
        before_system = any(message.speaker == "system" for message in following)
        (unsampled if before_system or unopened else lost).add(_answer_name(step))
    # Whether whitespace at the ends of a plain answer comes back, for ends that the template's text touches
    plain = _render_first_and_next(renderer, _spaced_probe("{}")) if spaces else None
    if plain is not None:
        prompt, after = plain
        at = after.find(_REPLY, len(prompt))
        for space in _SPACES if at >= 0 else ():
            content = space.format(_REPLY)
            # The template may add text after a generation prompt, such as an empty thought.
            if not content.startswith(_REPLY) and not after.startswith(prompt + _REPLY):
                continue
            texts = _render_first_and_next(renderer, _spaced_probe(space))
            if texts is not None:
                unchanged = texts[1].startswith(after[:at] + content)
                (names if unchanged else trimmed).add(f"an answer as {content!r}")
    of_tools = {_answer_name(step) for step in steps if step.probe.tools} & lost
    return HistoryReport(
        frozenset(names), frozenset(lost), frozenset(of_tools), frozenset(trimmed), frozenset(unsampled), steps
    )


def _answer_name(step: Step) -> str:
    return f"{step.probe.name}, answer {step.answer}"


def _spaced_probe(space: str) -> Probe:
    return make_probe("", [_QUESTION, assistant(space.format(_REPLY)), _QUESTION])


def _render_first_and_next(renderer: Renderer, case: Probe) -> tuple[str, str] | None:
    """The prompt of a probe's first answer, and the next prompt; None if the template refuses either."""
    first, second = (case.try_render(renderer, count) for count in (1, None))
    return None if first is None or second is None else (first, second)


class OriginalTemplate:
    """The template before any edit, with what it writes for first prompts and answers."""

    def __init__(self, renderer: Renderer, log: Sequence[Probe] = ()) -> None:
        self.renderer = renderer
        values = {each.name: each.values for each in renderer.template(False).arguments.arguments}
        stated = renderer.template_args
        self.arguments: tuple[Mapping[str, object], ...] = (
            {},
            *({name: value} for name in values if name not in stated for value in values[name]),
        )
        """What first prompts are compared with: the given arguments, and each value that the template reads."""
        self.firsts = [
            replace(head, template_args=args)
            for head in (*_FIRST_PROMPTS, *_first_prompts(PROBES))
            for args in self.arguments
        ]
        self.firsts_of_log = _first_prompts(log)
        self._texts: dict[int, str | None] = {}
        self._answers = {id(probe): list(_render_each_answer(renderer, probe)) for probe in (*PROBES, *PARSED)}

    def writes_same_prompts(self, variant: Renderer, firsts: Iterable[Probe]) -> bool:
        """Whether a variant writes these first prompts byte for byte the same."""
        for first in firsts:
            if id(first) not in self._texts:
                self._texts[id(first)] = first.try_render(self.renderer)
            if first.try_render(variant) != self._texts[id(first)]:
                return False
        return True

    def writes_same_answers(self, variant: Renderer) -> bool:
        """Whether a variant writes answers, and what follows them, as before; history may differ."""
        every = {id(case): case for case in (*CORE, *PARSED, *PROBES)}
        pairs = (pair for case in every.values() for pair in self._paired_answers(variant, case))
        return all(_is_same_answer(*pair) for pair in pairs)

    def changes_only_history(self, variant: Renderer) -> bool:
        """Whether a variant changes some prompt of the core probes, but no answer and nothing that follows one."""
        pairs = [pair for case in CORE for pair in self._paired_answers(variant, case)]
        return all(_is_same_answer(*pair) for pair in pairs) and any(before != after for before, after in pairs)

    def _paired_answers(self, variant: Renderer, case: Probe) -> Iterator[tuple[_RenderedAnswer, _RenderedAnswer]]:
        return zip(self._answers[id(case)], _render_each_answer(variant, case), strict=True)


def _first_prompts(probes: Iterable[Probe]) -> list[Probe]:
    heads = []
    for case in probes:
        count = next((i for i, message in enumerate(case.messages) if message.sampled), len(case.messages))
        if count:
            heads.append(replace(case, messages=case.messages[:count]))
    return heads


@dataclass(frozen=True, slots=True)
class _RenderedAnswer:
    """An answer of a probe as a template writes it; None where unknown."""

    last: str | None
    """The answer while nothing follows."""
    rest: str | None
    """What the next prompt adds after it."""
    after: str | None
    """The next prompt."""


def _render_each_answer(renderer: Renderer, case: Probe) -> Iterator[_RenderedAnswer]:
    """Render each answer of a probe, alone and in the next prompt."""
    answers = [i for i, message in enumerate(case.messages) if message.sampled]
    after = case.try_render(renderer, answers[0]) if answers else None
    for answer, until in pairwise([*answers, len(case.messages)]):
        prompt, after = after, case.try_render(renderer, until)
        closed = case.try_render(renderer, answer + 1, opens=False)
        last = None
        if prompt is not None and closed is not None and closed.startswith(prompt):
            last = closed[len(prompt) :]
        if closed is None or last is None or missing_parts(case.messages[answer], last):
            yield _RenderedAnswer(None, None, after)
        else:
            whole = closed.rstrip()
            rest = after[len(whole) :] if after is not None and after.startswith(whole) else None
            yield _RenderedAnswer(last, rest, after)


def _is_same_answer(before: _RenderedAnswer, after: _RenderedAnswer) -> bool:
    if before.last is not None and before.last != after.last:
        return False
    if (before.after is None) != (after.after is None):
        return False
    return before.after is None or after.rest is None or before.after.endswith(after.rest)


SEARCH_SECONDS = 45.0
"""CPU seconds that a search may take."""

_EditSet = tuple[TemplateEdit, ...]


@dataclass(frozen=True, slots=True)
class LogProof:
    """What was proved on the conversations of a log."""

    firsts: int
    """How many first prompts were compared; all are unchanged."""
    before: HistoryReport
    after: HistoryReport


@dataclass(frozen=True, slots=True)
class TemplateVariant:
    """A chat template with edits, and what they do to its history."""

    source: str
    """The template as it was, with plain newlines."""
    edits: tuple[TemplateEdit, ...]
    before: HistoryReport
    after: HistoryReport
    firsts: int
    """How many first prompts were compared; all are unchanged."""
    arguments: tuple[str, ...]
    """The arguments with which they were compared, as `name=value`."""
    of_log: LogProof | None = None
    rejected: tuple[tuple[TemplateEdit, str], ...] = ()
    """Edits that keep more of the history, each with the reason why it was not taken."""

    @property
    def text(self) -> str:
        """The edited template."""
        return apply_edits(self.source, self.edits)

    @property
    def keeps_history(self) -> bool:
        """Whether the next prompt holds every sampled answer, of the log and of probes without tools."""
        of_log = self.of_log is None or not self.of_log.after.lost
        return bool(self.after.answers) and not self.after.lost_without_tools and of_log


def find_variant(renderer: Renderer, log: Sequence[Probe] = ()) -> TemplateVariant:
    """The variant of a template that keeps the most history, proved on every probe and on those of a log."""
    source = plain_newlines(renderer.template(False).source)
    original = OriginalTemplate(with_template(renderer, source, "the template"), log)
    search = _Search(original, source, thread_time() + SEARCH_SECONDS)
    edits = search.find_best()
    both = [search.renderer(chosen) or original.renderer for chosen in ((), edits)]
    before, after = (judge_history(chosen, PROBES) for chosen in both)
    of_log = None
    if log:
        of_log = LogProof(len(original.firsts_of_log), *(judge_history(each, log, spaces=False) for each in both))
    arguments = tuple(f"{name}={value!r}" for argument in original.arguments for name, value in argument.items())
    firsts = len(original.firsts)
    return TemplateVariant(source, edits, before, after, firsts, arguments, of_log, search.rejected())


class _Search:
    """Tries the edits of a template one by one, then combines those that help."""

    def __init__(self, original: OriginalTemplate, source: str, deadline: float) -> None:
        self._original = original
        self._source = source
        self._deadline = deadline
        self._now = judge_history(original.renderer, CORE)
        self._best: tuple[_EditSet, HistoryReport] = (), self._now
        self._rejected: dict[TemplateEdit, tuple[int, str]] = {}
        self._renderers: dict[frozenset[TemplateEdit], Renderer | None] = {frozenset(): original.renderer}
        self._proofs: dict[frozenset[TemplateEdit], bool] = {}
        self._judged: dict[frozenset[TemplateEdit], HistoryReport | None] = {}
        self._watched = self._now.faulty(original.renderer)

    def find_best(self) -> _EditSet:
        """The edits that keep the most history."""
        edits = find_edits(self._source) if self._now.faults else []
        # First only edits where the template writes answers: they change nothing else.
        for pool in ([edit for edit in edits if edit.in_answer], edits):
            useful = [(single,) for single in pool if self._is_useful((single,))]
            self._combine(useful)
            if self._best[1].lost_without_tools:
                # Pairs of likely edits, for templates where one alone does harm
                kinds = (EditKind.BY_PLACE, EditKind.DROP_CUT, EditKind.BY_THOUGHT)
                likely = [edit for edit in pool if edit.kind in kinds and self._changes_prompts((edit,))]
                pairs = [pair for pair in combinations(likely[:16], 2) if not pair[0].overlaps(pair[1])]
                self._combine([*useful, *filter(self._is_useful, pairs)])
            now = self._best[1]
            if not now.lost_without_tools and (self._best[0] or not now.faults):
                break
        needed, judged = self._best
        for edit in needed:  # leave out what the others made needless
            fewer = tuple(other for other in needed if other != edit)
            without = self._judge(fewer)
            if without is not None and without.faults <= judged.faults and self._is_proved(fewer, without):
                needed = fewer
        return needed

    def renderer(self, edits: _EditSet) -> Renderer | None:
        """A renderer with these edits; None if the result is not a template."""
        key = frozenset(edits)
        if key not in self._renderers:
            try:
                source = apply_edits(self._source, edits)
                self._renderers[key] = with_template(self._original.renderer, source, "the edited template")
            except SetupError:
                self._renderers[key] = None
        return self._renderers[key]

    def rejected(self) -> tuple[tuple[TemplateEdit, str], ...]:
        """Up to three edits that keep more but change what must stay, each with the reason; the best first."""
        ranked = sorted(self._rejected.items(), key=lambda entry: (-entry[1][0], entry[0].kind))
        return tuple((edit, why) for edit, (_, why) in ranked[:3])

    def _combine(self, useful: Sequence[_EditSet]) -> None:
        """Try unions of useful sets, those with the fewest faults first."""
        tried: set[frozenset[TemplateEdit]] = set()
        ahead: list[tuple[int, int, int, _EditSet]] = [(self._now.faults, 0, 0, ())]
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
                judged = self._judge(more)
                if judged is None or not self._is_proved(more, judged):
                    continue
                outside = sum(not edit.in_answer for edit in more)
                heappush(ahead, (judged.faults, outside, len(tried), more))
                if judged.faults < self._best[1].faults:
                    self._best = more, judged

    def _judge(self, edits: _EditSet) -> HistoryReport | None:
        """The history with these edits; None if the result is not a template, or loses what was kept."""
        key = frozenset(edits)
        if key not in self._judged:
            variant = self.renderer(edits)
            if variant is None or thread_time() > self._deadline:
                return None
            judged = judge_history(variant, CORE)
            spoiled = judged.lost | judged.trimmed | judged.unsampled
            self._judged[key] = judged if self._now.answers.isdisjoint(spoiled) else None
        return self._judged[key]

    def _is_useful(self, edits: _EditSet) -> bool:
        """Whether these edits help history, or change only history."""
        if not self._changes_prompts(edits):
            return False
        judged, variant = self._judge(edits), self.renderer(edits)
        if judged is None or variant is None:
            return False
        if judged.faults >= self._now.faults and not self._original.changes_only_history(variant):
            return False
        return self._is_proved(edits, judged)

    def _changes_prompts(self, edits: _EditSet) -> bool:
        """Whether these edits change any prompt that lost an answer: cheaper to check than whether they help."""
        if thread_time() > self._deadline or (variant := self.renderer(edits)) is None:
            return False
        return any(case.try_render(variant) != text for case, text in self._watched)

    def _is_proved(self, edits: _EditSet, judged: HistoryReport) -> bool:
        """Whether the edits leave everything but history unchanged."""
        key = frozenset(edits)
        if key not in self._proofs:
            variant, why = self.renderer(edits), ""
            if variant is None:
                why = "it is not a template"
            elif not self._original.writes_same_prompts(variant, _FIRST_PROMPTS):
                why = "first prompts change"
            elif not self._original.writes_same_answers(variant):
                why = "an answer, or what follows one, changes"
            elif not self._original.writes_same_prompts(variant, self._original.firsts):
                why = "first prompts with some argument change"
            elif not self._original.writes_same_prompts(variant, self._original.firsts_of_log):
                why = "first prompts of the log change"
            gain = self._now.faults - judged.faults
            if why and gain > 0 and len(edits) == 1:
                self._rejected.setdefault(edits[-1], (gain, why))
            self._proofs[key] = not why
        return self._proofs[key]
