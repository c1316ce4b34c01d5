"""Traces which tag of a chat template wrote each piece of a text, and what the template decided before it.

The template is compiled a second time, with outputs and conditions wrapped in calls that record them. If that
changes what it writes, nothing is known. This module imports jinja2, so it is imported late.
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

from tito_audit.render.limits import Budget, TimeUp, alarm, count_waste, free_frames, is_too_slow, mark_too_slow
from tito_audit.render.sandbox import ChatEnvironment

_TAG_BEGINNINGS = ("block_begin", "variable_begin")
_RECORD_OUTPUT, _RECORD_DECISION = "_tito_wrote", "_tito_chose"
_LINES = re.compile(r"\r\n|\r|\n")
_MAX_TAG_LENGTH = 400


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag of a template, together with the text after it."""

    line: int
    """Its line, counted from 1."""
    column: int
    """Its column, counted from 1."""
    source: str
    """The text of the tag, shortened if it is long."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A condition in a template, and its outcome."""

    tag: Tag
    condition: int
    """The index of the condition in the template."""
    occurrence: int
    """How often it was decided before in the same rendering."""
    outcome: bool


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of a rendered text."""

    start: int
    text: str
    tag: Tag | None
    """The tag that wrote it; None if unknown."""
    decisions: tuple[Decision, ...]
    """What the template decided between the piece before and this one, in order."""


_RawDecision = tuple[int, int, bool]
"""Condition, occurrence, outcome; see `Decision`."""


@dataclass(frozen=True, slots=True)
class _Output:
    """What one output of the template wrote."""

    line: int
    text: str
    decisions: tuple[_RawDecision, ...]
    """What was decided since the output before."""


class TemplateTracer:
    """A template that records what it writes and decides."""

    def __init__(self, source: str, time_limit: float, size_limit: int) -> None:
        self._limits = time_limit, size_limit
        self._environment = ChatEnvironment(Budget(size_limit, time_limit))
        self._outputs: list[_Output] = []
        self._decisions: list[_RawDecision] = []
        """Both since the last piece."""
        self._counts: Counter[int] = Counter()
        self._flipped: frozenset[tuple[int, int]] = frozenset()
        self._environment.globals[_RECORD_OUTPUT] = self._record_output
        self._environment.globals[_RECORD_DECISION] = self._record_decision
        self._compiled: jinja2.Template | None = None
        self._tags, self._tag_lines = [Tag(1, 1, "")], [0]
        """The tags, and the line in the parsed source where each begins."""
        self._conditions: list[Tag] = []
        """The tag of each condition."""
        self._source = source
        try:
            with alarm(time_limit):
                # Parse the source with the inside of each tag on lines of its own
                source = "\n".join(_LINES.split(source))
                lines: list[str] = []
                at = copied = 0
                for _, kind, piece in self._environment.lex(source):
                    begin = source.index(piece, at)
                    at = begin + len(piece)
                    if kind in _TAG_BEGINNINGS:
                        lines.append(source[copied:at])
                        copied = at
                        line = source.count("\n", 0, begin) + 1
                        column = begin - source.rfind("\n", 0, begin)
                        end = source.find("}}" if source.startswith("{{", begin) else "%}", begin)
                        text = source[begin : end + 2] if end >= 0 else source[begin:]
                        shown = text if len(text) <= _MAX_TAG_LENGTH else text[: _MAX_TAG_LENGTH - 1] + "…"
                        self._tags.append(Tag(line, column, shown))
                        self._tag_lines.append(source.count("\n", 0, at) + 1 + len(lines))
                tree = self._environment.parse("\n".join([*lines, source[copied:]]))
                conditions: list[nodes.If | nodes.CondExpr] = list(tree.find_all((nodes.If, nodes.CondExpr)))
                for number, node in enumerate(conditions):
                    self._conditions.append(self._tag(node.lineno))
                    node.test = _make_call(_RECORD_DECISION, number, node.test)
                for output in list(tree.find_all(nodes.Output)):
                    for at, part in enumerate(output.nodes):
                        value = part
                        if isinstance(part, nodes.TemplateData):
                            value = nodes.Const(part.data, lineno=part.lineno)
                        output.nodes[at] = _make_call(_RECORD_OUTPUT, part.lineno, value)
                tree.set_environment(self._environment)
                self._compiled = self._environment.from_string(tree)
        except (Exception, TimeUp):  # the added calls may nest too deep
            return

    def trace(self, variables: Mapping[str, Any], wanted: str) -> tuple[TextPiece, ...] | None:
        """The pieces of what the template writes; None if that is not the `wanted` text."""
        pieces = self._run(variables)
        return pieces if pieces is not None and join_pieces(pieces) == wanted else None

    def trace_flipped(
        self, variables: Mapping[str, Any], flips: Iterable[Decision]
    ) -> tuple[TextPiece, ...] | None:
        """What the template writes if these decisions go the other way; None if it fails."""
        return self._run(variables, frozenset((flip.condition, flip.occurrence) for flip in flips))

    def _run(
        self, variables: Mapping[str, Any], flipped: frozenset[tuple[int, int]] = frozenset()
    ) -> tuple[TextPiece, ...] | None:
        if self._compiled is None or is_too_slow(self._source, self._limits[0]):
            return None
        seconds, size = self._limits
        self._environment.budget = Budget(size, seconds, variables)
        self._outputs, self._decisions, self._counts, self._flipped = [], [], Counter(), flipped
        try:
            with count_waste(self._source, seconds, variables), alarm(seconds, variables):
                at, pieces = 0, list[TextPiece]()
                for text in self._compiled.generate(variables):
                    if not text:
                        continue
                    for line, part, decided in _divide_piece(text, self._outputs, self._decisions):
                        tag = self._tag(line) if line is not None else None
                        decisions = tuple([Decision(self._conditions[raw[0]], *raw) for raw in decided])
                        pieces.append(TextPiece(at, part, tag, decisions))
                        at += len(part)
                    self._outputs, self._decisions = [], []
                    self._environment.budget.check_output(at)
                return tuple(pieces)
        except (Exception, TimeUp) as error:
            if isinstance(error, TimeUp):
                mark_too_slow(self._source, seconds)
            free_frames(error)
            return None
        finally:
            self._environment.budget.close()

    def _tag(self, line: int) -> Tag:
        return self._tags[max(bisect_right(self._tag_lines, line) - 1, 0)]

    # Called by the template

    def _record_output(self, line: int, value: Any) -> Any:
        text = str(value)
        self._outputs.append(_Output(line, text, tuple(self._decisions)))
        self._decisions = []
        return value

    def _record_decision(self, number: int, value: Any) -> Any:
        occurrence = self._counts[number]
        self._counts[number] += 1
        if (number, occurrence) in self._flipped:
            value = not value
        self._decisions.append((number, occurrence, bool(value)))
        return value


def join_pieces(pieces: Iterable[TextPiece]) -> str:
    """The text of these pieces."""
    return "".join(piece.text for piece in pieces)


def _divide_piece(
    text: str, outputs: Sequence[_Output], last: Sequence[_RawDecision]
) -> list[tuple[int | None, str, list[_RawDecision]]]:
    """The line, text and decisions of each output that a piece is made of; no line if it is unknown.

    Outputs inside a macro or block take its place if they make up all of it. `last` was decided after them all.
    """
    writing = [output for output in outputs if output.text]
    whole = writing[-1] if writing and writing[-1].text == text else None
    for parts in (writing[:-1] if whole is not None else [], writing):
        if parts and "".join(output.text for output in parts) == text:
            break
    else:  # a filter or call changed the outputs, so none of them wrote this text
        decided = [decision for output in outputs for decision in output.decisions]
        return [(None if whole is None else whole.line, text, [*decided, *last])]
    ids = {id(part) for part in parts}
    divided: list[tuple[int | None, str, list[_RawDecision]]] = []
    decided = []
    for output in outputs:
        decided += output.decisions
        if id(output) in ids:
            divided.append((output.line, output.text, decided))
            decided = []
    divided[-1][2].extend([*decided, *last])
    return divided


def _make_call(name: str, number: int, value: Any) -> nodes.Call:
    line = value.lineno
    function = nodes.Name(name, "load", lineno=line)
    return nodes.Call(function, [nodes.Const(number, lineno=line), value], [], None, None, lineno=line)
