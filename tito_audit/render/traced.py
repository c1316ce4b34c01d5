"""Which tag of a chat template wrote each piece of a text, and what the template decided before it.

The template is compiled a second time, with its outputs and conditions wrapped in calls that record them. If it
then writes anything else than without them, nothing is known. This module imports jinja2 and is itself imported
late.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes

from tito_audit.render.limits import Budget, TimeUp, alarm, charged, give_up, is_given_up, let_go
from tito_audit.render.sandbox import ChatEnvironment

_BEGINS = ("block_begin", "variable_begin")
_WROTE, _CHOSE = "_tito_wrote", "_tito_chose"
_LINES = re.compile(r"\r\n|\r|\n")
_LONGEST = 400
_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Tag:
    """One tag of a template, or the text after one."""

    line: int
    """Its line, counted from 1."""
    column: int
    """Its column, counted from 1."""
    source: str
    """The tag as in the template, shortened if it is long."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A condition in a template, and its outcome."""

    tag: Tag
    condition: int
    """Which condition of the template it is."""
    occurrence: int
    """How often the condition was decided earlier in the same rendering."""
    outcome: bool


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of a rendered text."""

    start: int
    text: str
    tag: Tag | None
    """The tag that wrote it; None if unknown."""
    decisions: tuple[Decision, ...]
    """What the template decided after the piece before it, in order."""


_Noted = tuple[int, int, bool]
"""A condition, how often it was decided before, and its outcome."""


@dataclass(frozen=True, slots=True)
class _Output:
    """What one output of the template wrote."""

    line: int
    text: str
    decisions: tuple[_Noted, ...]
    """What was decided after the output before it."""


class TemplateTracer:
    """A template that records what it does; `trace` returns None where it cannot."""

    def __init__(self, source: str, time_limit: float, size_limit: int) -> None:
        self._limits = time_limit, size_limit
        self._environment = ChatEnvironment(Budget(size_limit, time_limit))
        self._outputs: list[_Output] = []
        self._decisions: list[_Noted] = []
        """What was recorded since the last piece."""
        self._counts: Counter[int] = Counter()
        self._turned: frozenset[tuple[int, int]] = frozenset()
        self._environment.globals[_WROTE] = self._wrote
        self._environment.globals[_CHOSE] = self._chose
        self._compiled: jinja2.Template | None = None
        self._conditions: list[int] = []
        """The line of each condition, in the source with a line for each tag."""
        self._source = source
        try:
            with alarm(time_limit):
                text, self._tags, self._firsts = _a_line_each(self._environment, source)
                tree = self._environment.parse(text)
                conditions: list[nodes.If | nodes.CondExpr] = list(tree.find_all((nodes.If, nodes.CondExpr)))
                for number, node in enumerate(conditions):
                    self._conditions.append(node.lineno)
                    node.test = _called(_CHOSE, number, node.test)
                for output in list(tree.find_all(nodes.Output)):
                    output.nodes = [
                        _called(
                            _WROTE,
                            part.lineno,
                            nodes.Const(part.data, lineno=part.lineno)
                            if isinstance(part, nodes.TemplateData)
                            else part,
                        )
                        for part in output.nodes
                    ]
                tree.set_environment(self._environment)
                self._compiled = self._environment.from_string(tree)
        except (Exception, TimeUp):  # a template that compiles may be too deep with the added calls
            return

    def trace(self, variables: Mapping[str, Any], wanted: str) -> tuple[TextPiece, ...] | None:
        """The pieces of what the template writes for these variables; None if that is not `wanted`."""
        pieces = self._run(variables)
        return pieces if pieces is not None and text_of(pieces) == wanted else None

    def turned(self, variables: Mapping[str, Any], decisions: Iterable[Decision]) -> tuple[TextPiece, ...] | None:
        """What the template writes if these decisions go the other way; None if it fails."""
        return self._run(variables, frozenset((decision.condition, decision.occurrence) for decision in decisions))

    def _run(
        self, variables: Mapping[str, Any], turned: frozenset[tuple[int, int]] = frozenset()
    ) -> tuple[TextPiece, ...] | None:
        if self._compiled is None or is_given_up(self._source, self._limits[0]):
            return None
        seconds, size = self._limits
        self._environment.budget = Budget(size, seconds, variables)
        self._outputs, self._decisions, self._counts, self._turned = [], [], Counter(), turned
        try:
            with charged(self._source, seconds, variables), alarm(seconds, variables):
                at, pieces = 0, list[TextPiece]()
                for text in self._compiled.generate(variables):
                    if not text:
                        continue
                    parts = _parts(text, self._outputs, self._decisions)
                    self._outputs, self._decisions = [], []
                    for part in parts:
                        decisions = tuple(map(self._decision, part.decisions))
                        pieces.append(TextPiece(at, part.text, self._tag(part.line), decisions))
                        at += len(part.text)
                    self._environment.budget.written(at)
                return tuple(pieces)
        except (Exception, TimeUp) as error:
            if isinstance(error, TimeUp):
                give_up(self._source, seconds)
            let_go(error)
            return None
        finally:
            self._environment.budget.close()

    def _decision(self, noted: _Noted) -> Decision:
        number, occurrence, outcome = noted
        tag = self._tag(self._conditions[number])
        assert tag is not None
        return Decision(tag, number, occurrence, outcome)

    def _tag(self, line: int) -> Tag | None:
        return None if line == _UNKNOWN else self._tags[max(bisect_right(self._firsts, line) - 1, 0)]

    # Called by the template

    def _wrote(self, line: int, value: Any) -> Any:
        text = str(value)
        self._outputs.append(_Output(line, text, tuple(self._decisions)))
        self._decisions = []
        return value

    def _chose(self, number: int, value: Any) -> Any:
        occurrence = self._counts[number]
        self._counts[number] += 1
        if (number, occurrence) in self._turned:
            value = not value
        self._decisions.append((number, occurrence, bool(value)))
        return value

    # The template with these calls


def text_of(pieces: Iterable[TextPiece]) -> str:
    """The text that pieces make up."""
    return "".join(piece.text for piece in pieces)


def _parts(text: str, every: Sequence[_Output], last: Sequence[_Noted]) -> list[_Output]:
    """The outputs that a piece is made of: those inside a macro or block, if they make up all of it."""
    outputs = [output for output in every if output.text]
    whole = outputs[-1] if outputs and outputs[-1].text == text else None
    for parts in (outputs[:-1] if whole is not None else [], outputs):
        if parts and "".join(output.text for output in parts) == text:
            return _with_all_decisions(parts, every, last)
    # What a filter or call made of several outputs was not written by any one of them.
    return _with_all_decisions([_Output(_UNKNOWN if whole is None else whole.line, text, ())], every, last)


def _with_all_decisions(
    parts: list[_Output], every: Sequence[_Output], rest_decided: Sequence[_Noted]
) -> list[_Output]:
    """The parts, each with all that was decided before it."""
    rest = {id(part) for part in parts}
    out: list[_Output] = []
    decided: list[_Noted] = []
    for output in every:
        decided += output.decisions
        if id(output) in rest:
            out.append(_Output(output.line, output.text, tuple(decided)))
            decided = []
    if not out:
        out = [_Output(part.line, part.text, tuple(decided)) for part in parts]
        decided = []
    last = out[-1]
    out[-1] = _Output(last.line, last.text, (*last.decisions, *decided, *rest_decided))
    return out


def _called(name: str, number: int, value: Any) -> nodes.Call:
    line = value.lineno
    function = nodes.Name(name, "load", lineno=line)
    return nodes.Call(function, [nodes.Const(number, lineno=line), value], [], None, None, lineno=line)


def _a_line_each(environment: ChatEnvironment, source: str) -> tuple[str, list[Tag], list[int]]:
    """The source with each tag's content on its own line, the tags, and their line numbers."""
    source = "\n".join(_LINES.split(source))
    out: list[str] = []
    tags = [Tag(1, 1, "")]
    firsts = [0]
    at = copied = added = 0
    for _, kind, value in environment.lex(source):
        begin = source.index(value, at)
        at = begin + len(value)
        if kind in _BEGINS:
            out += [source[copied:at], "\n"]
            copied = at
            added += 1
            line = source.count("\n", 0, begin) + 1
            column = begin - (source.rfind("\n", 0, begin) + 1) + 1
            # The tag that begins here.
            closing = "}}" if source.startswith("{{", begin) else "%}"
            end = source.find(closing, begin)
            text = source[begin : end + 2] if end >= 0 else source[begin:]
            tags.append(Tag(line, column, text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"))
            firsts.append(source.count("\n", 0, at) + 1 + added)
    return "".join([*out, source[copied:]]), tags, firsts
