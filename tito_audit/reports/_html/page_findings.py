"""The findings in a page: all if they are few enough, else the worst, evenly over the codes."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import Any

import orjson

from tito_audit.record.finding import Finding, Severity
from tito_audit.report_objects import as_json
from tito_audit.terminal.escape import visible

BOUND = 100_000
"""Maximum findings in one page; searching more at every keystroke would be too slow in a browser."""
_CHUNK = 2_000
"""Findings that share one data block and its string tables."""
_TEXT = 2_000
"""Maximum characters shown of a message or a cause."""
_TOKENS = 64
"""Maximum tokens shown of one side."""

Row = list[Any]
_COLUMNS: tuple[str, ...] = ("severity", "code", "file", "row", "item", "turn", "where", "start", "end", "cause")
_COLUMNS += ("message", "repair", "known", "headline", "because", "first_label", "other_label")
_SIDES = ("first", "other", "before", "after")
_COLUMNS += _SIDES
_TEXTS = frozenset(
    {"code", "file", "where", "cause", "message", "repair", "headline", "first_label", "other_label"}
)
_BECAUSE = _COLUMNS.index("because")


def finding_rows(findings: Sequence[Finding]) -> Iterator[Row]:
    """The findings of one result as rows of `_COLUMNS`; texts are cut but not yet escaped.

    `because` is a fingerprint until `linked`, which needs the finding's own, the last value after the columns.
    """
    follow = any(finding.because_of is not None for finding in findings)
    prints = [finding.fingerprint if follow and finding.because_of is None else "" for finding in findings]
    roots = {own: finding for own, finding in zip(prints, findings, strict=True) if finding.because_of is None}
    for own, finding in zip(prints, findings, strict=True):
        root = finding if finding.because_of is None else roots.get(finding.because_of, finding)
        headline = headline_name(root.headline, root.unit)
        hit, place = finding.hit, finding.place
        first, other = hit.sampled_first
        # `[id, piece]` of each token; either is None if unknown.
        sides = [
            [
                [number, None if piece is None else piece[:200]]
                for number, piece in zip_longest(side.ids[:_TOKENS], side.pieces[:_TOKENS])
            ]
            for side in (first, other, hit.before, hit.after)
        ]
        yield [
            int(finding.severity),
            finding.code,
            place.file,
            place.row,
            place.item,
            hit.turn,
            str(hit.where),
            hit.start,
            hit.end,
            _cut(hit.cause),
            _cut(hit.message),
            finding.repair or "",
            int(finding.known),
            _cut(headline),
            finding.because_of,
            first.label,
            other.label,
            *sides,
            own,
        ]


def headline_name(text: str, unit: str) -> str:
    """A headline without its count, as people choose it: `prompts re-tokenized`."""
    return text.replace("{n}", f"{unit}s")


def linked(rows: Iterable[Row], start: int = 0) -> Iterator[Row]:
    """Rows of one result, the first of which is number `start` of its page, each with the number of its root.

    -1 for a root that is not among them.
    """
    rows = list(rows)
    at = {row[-1]: number for number, row in enumerate(rows, start) if row[_BECAUSE] is None and row[-1]}
    for row in rows:
        if row[_BECAUSE] is not None:
            row[_BECAUSE] = at.get(row[_BECAUSE], -1)
        yield row


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT else text[:_TEXT] + "…"


def tables(rows: list[Row]) -> dict[str, Any]:
    """Rows as columns: texts as indices into a table of strings, tokens as indices into a table of tokens.

    Both tables are escaped: every character is visible and none takes effect.
    """
    strings: dict[str, int] = {}
    tokens: dict[tuple[Any, ...], int] = {}
    out: dict[str, Any] = {}
    for at, name in enumerate(_COLUMNS):
        column = [row[at] for row in rows]
        if name in _TEXTS:
            column = [strings.setdefault(text, len(strings)) for text in column]
        elif name in _SIDES:
            column = [[tokens.setdefault(tuple(token), len(tokens)) for token in side] for side in column]
        out[name] = column
    shown = [[number, None if piece is None else visible(piece, edges=True)] for number, piece in tokens]
    return {"strings": [visible(text) for text in strings], "tokens": shown, **out}


class PageFindings:
    """A bounded selection of findings, on disk until the page is written; `close` it then.

    Findings are grouped by severity and code. All groups of the worst severity are chosen, then of the next, while
    there is room; at the end every code gets the same number, the first ones found. A group's cap only shrinks as
    more findings come, so a finding beyond it is dropped at once and the file stays bounded.
    """

    def __init__(self, bound: int = BOUND) -> None:
        self.bound = bound
        self._waiting = tempfile.TemporaryFile("w+b")  # noqa: SIM115
        self._groups: dict[tuple[int, str], int] = {}
        """Index of each group, in order of appearance."""
        self._seen: list[int] = []
        """By group: findings so far."""
        self._caps: list[int] = []
        """By group: an upper bound on how many will be chosen."""
        self._group_of = array("I")
        """By line on disk: its group."""
        self._results = 0
        self._since = 0
        self.look_every = 1_024
        """Number of findings after which the caps are computed again."""

    def close(self) -> None:
        """Remove what is on disk."""
        self._waiting.close()

    def add(self, findings: Sequence[Finding]) -> None:
        """Keep the findings of one result, except those that cannot be chosen any more."""
        self._results += 1
        for finding, row in zip(findings, finding_rows(findings), strict=True):
            key = (int(finding.severity), finding.code)
            group = self._groups.setdefault(key, len(self._groups))
            if group == len(self._seen):
                self._seen.append(0)
                self._caps.append(self.bound)
            self._seen[group] += 1
            self._since += 1
            if self._since >= self.look_every and sum(self._seen) > self.bound:
                self._caps, self._since = self.caps(), 0
            if self._seen[group] <= self._caps[group]:
                self._waiting.write(as_json([self._results, row]).encode("utf-8") + b"\n")
                self._group_of.append(group)

    def caps(self) -> list[int]:
        """By group: how many of its findings may be chosen; these numbers never grow."""
        caps, room = [0] * len(self._seen), self.bound
        for severity in sorted(Severity, reverse=True):
            groups = [number for (worst, _), number in self._groups.items() if worst == severity]
            level = _level([self._seen[number] for number in groups], room)
            for number in groups:
                caps[number] = level
            room = max(room - sum(self._seen[number] for number in groups), 0)
        return caps

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The chosen findings in the order of the log, as tables of `_CHUNK` findings."""
        rows: list[Row] = []
        number = 0
        for _, several in groupby(self._chosen(), key=itemgetter(0)):
            of_result = [row for _, row in several]
            # Each with the number of its root in the page.
            for row in linked(of_result, number):
                rows.append(row)
                if len(rows) == _CHUNK:
                    yield tables(rows)
                    rows = []
            number += len(of_result)
        if rows:
            yield tables(rows)

    def _chosen(self) -> Iterator[tuple[int, Row]]:
        left = self.caps()
        self._waiting.seek(0)
        for group, line in zip(self._group_of, self._waiting, strict=True):
            if left[group]:
                left[group] -= 1
                yield orjson.loads(line)

    @property
    def number(self) -> int:
        """Findings that were chosen."""
        return sum(min(pair) for pair in zip(self._seen, self.caps(), strict=True))


def _level(counts: list[int], room: int) -> int:
    """The largest cap on each count with which they fit the room together; the room itself if all fit uncut."""
    left, free = sorted(counts), room
    while left:
        level = free // len(left)
        if left[0] > level:
            return level
        free -= left.pop(0)
    return room
