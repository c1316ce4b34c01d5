"""The findings in a page: all up to a limit, else the worst, in equal numbers of each code."""

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

MAX_FINDINGS = 100_000
"""Maximum findings in one page; searching more at every keystroke would be too slow in a browser."""
_CHUNK_FINDINGS = 2_000
"""Findings in one data block, which share its tables of strings and tokens."""
_MAX_TEXT = 2_000
"""Maximum characters of a text."""
_MAX_TOKENS = 64
"""Maximum tokens of one side."""

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

    `because` is the root's fingerprint until `link_roots` replaces it; for that, the finding's own ends the row.
    """
    follow = any(finding.because_of is not None for finding in findings)
    prints = [finding.fingerprint if follow and finding.because_of is None else "" for finding in findings]
    roots = {own: finding for own, finding in zip(prints, findings, strict=True) if finding.because_of is None}
    for own, finding in zip(prints, findings, strict=True):
        root = finding if finding.because_of is None else roots.get(finding.because_of, finding)
        headline = headline_label(root.headline, root.unit)
        hit, place = finding.hit, finding.place
        first, other = hit.sampled_first
        # `[id, piece]` of each token; either is None if unknown.
        sides = [
            [
                [number, None if piece is None else piece[:200]]
                for number, piece in zip_longest(side.ids[:_MAX_TOKENS], side.pieces[:_MAX_TOKENS])
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


def headline_label(text: str, unit: str) -> str:
    """A headline without its count, to filter by: `prompts re-tokenized`."""
    return text.replace("{n}", f"{unit}s")


def link_roots(rows: Iterable[Row], start: int = 0) -> Iterator[Row]:
    """The rows of one result, each with its root's number in the page for the fingerprint; -1 if it is missing.

    `start` is the number of the first row.
    """
    rows = list(rows)
    at = {row[-1]: number for number, row in enumerate(rows, start) if row[_BECAUSE] is None and row[-1]}
    for row in rows:
        if row[_BECAUSE] is not None:
            row[_BECAUSE] = at.get(row[_BECAUSE], -1)
        yield row


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"


def as_columns(rows: list[Row]) -> dict[str, Any]:
    """Rows as columns, in which texts and tokens are indices into two tables, `strings` and `tokens`.

    The tables are made visible: no character in them takes effect.
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
    """A bounded selection of findings, kept on disk; it has to be closed.

    Severities get room in order, the worst first. Where the findings of one do not fit, each code gets the same
    number, the first found. This cap of a group (severity and code) only shrinks as more findings come, so
    a finding beyond it can be dropped at once.
    """

    def __init__(self, bound: int = MAX_FINDINGS) -> None:
        self.limit = bound
        self._file = tempfile.TemporaryFile("w+b")  # noqa: SIM115
        self._groups: dict[tuple[int, str], int] = {}
        """By severity and code: index of the group, in order of appearance."""
        self._seen: list[int] = []
        """By group: findings so far."""
        self._caps: list[int] = []
        """By group: how many can still be chosen at most."""
        self._group_of = array("I")
        """By line on disk: its group."""
        self._results = 0
        self._since_recount = 0
        self.recount_every = 1_024
        """Findings after which the caps are computed again."""

    def close(self) -> None:
        """Delete the findings on disk."""
        self._file.close()

    def add(self, findings: Sequence[Finding]) -> None:
        """Keep the findings of one result, except those that cannot be chosen any more."""
        self._results += 1
        for finding, row in zip(findings, finding_rows(findings), strict=True):
            key = (int(finding.severity), finding.code)
            group = self._groups.setdefault(key, len(self._groups))
            if group == len(self._seen):
                self._seen.append(0)
                self._caps.append(self.limit)
            self._seen[group] += 1
            self._since_recount += 1
            if self._since_recount >= self.recount_every and sum(self._seen) > self.limit:
                self._caps, self._since_recount = self.group_caps(), 0
            if self._seen[group] <= self._caps[group]:
                self._file.write(as_json([self._results, row]).encode("utf-8") + b"\n")
                self._group_of.append(group)

    def group_caps(self) -> list[int]:
        """By group: how many of its findings can be chosen of those so far; these numbers never grow."""
        caps, room = [0] * len(self._seen), self.limit
        for severity in sorted(Severity, reverse=True):
            groups = [number for (worst, _), number in self._groups.items() if worst == severity]
            # The largest cap on each count so that they fit the room together; the room itself if all fit.
            counts, left, cap = sorted(self._seen[number] for number in groups), room, room
            for at, count in enumerate(counts):
                equal_share = left // (len(counts) - at)
                if count > equal_share:
                    cap = equal_share
                    break
                left -= count
            for number in groups:
                caps[number] = cap
            room = max(room - sum(counts), 0)
        return caps

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The chosen findings in the order of the log, as columns of `_CHUNK_FINDINGS` each."""
        rows: list[Row] = []
        number = 0
        for _, several in groupby(self._read_chosen(), key=itemgetter(0)):
            of_result = [row for _, row in several]
            for row in link_roots(of_result, number):
                rows.append(row)
                if len(rows) == _CHUNK_FINDINGS:
                    yield as_columns(rows)
                    rows = []
            number += len(of_result)
        if rows:
            yield as_columns(rows)

    def _read_chosen(self) -> Iterator[tuple[int, Row]]:
        left = self.group_caps()
        self._file.seek(0)
        for group, line in zip(self._group_of, self._file, strict=True):
            if left[group]:
                left[group] -= 1
                yield orjson.loads(line)

    @property
    def number(self) -> int:
        """Number of chosen findings."""
        return sum(min(pair) for pair in zip(self._seen, self.group_caps(), strict=True))
