"""Rollouts that a page shows token by token, each packed separately and unpacked when opened."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, TextIO

from tito_audit.evidence.model import Against
from tito_audit.record.finding import RE_ENCODED, SAMPLED, Result, Severity
from tito_audit.report_objects import fields
from tito_audit.reports._html.page import SitePage, block
from tito_audit.reports._html.page_findings import BOUND, finding_rows, linked, tables
from tito_audit.terminal.escape import visible
from tito_audit.viewer.model import ShownStretch, Swap, View, ViewSequence, observed_of
from tito_audit.viewer.replacements import SAMPLED as REPLACED_SAMPLED
from tito_audit.viewer.replacements import SEEN

ROOM = 12_000_000
"""Maximum characters that all rollouts together take in the page."""
_FINDINGS = 500
"""Maximum findings listed for one rollout."""
_PIECE = 200
"""Maximum characters shown of one token."""

_LABELS = {SEEN: "previous call", REPLACED_SAMPLED: SAMPLED, str(Against.REENCODED): RE_ENCODED}
"""Other sides of sequences, as people read them."""


class ViewBlocks:
    """The rollouts that have a view, as data blocks, on disk until the page is written; `close` it then."""

    findings = BOUND
    """Maximum findings in the page."""
    site: SitePage | None = None
    """The place of the page in a site; None: it stands alone, with its data inside."""

    def __init__(self) -> None:
        self._room = ROOM
        self._waiting = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self.index: list[list[Any]] = []
        """For each rollout in the page: file, row, item, number of errors, warnings and notes, codes."""

    def close(self) -> None:
        """Remove what is on disk."""
        self._waiting.close()

    def add(self, result: Result) -> None:
        """Add a rollout if it has a view and there is room."""
        observed = observed_of(result)
        view = observed.view if observed is not None else None
        if view is None:
            return
        text = block("view", view_object(view, result))
        if len(text) > self._room:
            return
        self._room -= len(text)
        self._waiting.write(text)
        self.index.append(index_entry(result))

    def write(self, findings: Iterable[dict[str, Any]], out: TextIO) -> None:
        """Write the data of the page: its findings, and the blocks in the order of the rollouts."""
        for chunk in findings:
            out.write(block("findings", chunk))
        out.write(block("views", self.index))
        self._waiting.seek(0)
        while part := self._waiting.read(1 << 20):
            out.write(part)


def index_entry(result: Result) -> list[Any]:
    """File, row, item, number of errors, warnings and notes, and codes of a rollout."""
    place, severities = result.place, [finding.severity for finding in result.findings]
    counts = [severities.count(severity) for severity in sorted(Severity, reverse=True)]
    codes = sorted({visible(finding.code) for finding in result.findings})
    return [visible(place.file), place.row, place.item, *counts, codes]


def view_object(view: View, result: Result, *, columns: bool = False) -> dict[str, Any]:
    """One rollout for the viewer: its sequences and findings; with `columns` all that was recorded by token."""
    return {
        "messages": [visible(role) for role in view.messages],
        "sequences": [_sequence(sequence, columns=columns) for sequence in view.sequences],
        "left_out": view.left_out,
        "findings": tables(list(linked(finding_rows(result.findings[:_FINDINGS])))),
        "more_findings": max(len(result.findings) - _FINDINGS, 0),
    }


def _sequence(sequence: ViewSequence, *, columns: bool) -> dict[str, Any]:
    """One sequence; tokens are indices into a table of `[id, piece, bytes]`."""
    table: dict[tuple[Any, ...], int] = {}
    stretches = [_stretch(stretch, table, columns=columns) for stretch in sequence.stretches]
    swaps = [
        {
            **fields(swap, "start end"),
            "tokens": _tokens(swap, table),
            "total": max(swap.total, len(swap.ids)),
            "code": visible(swap.code),
            "against": visible(_LABELS.get(swap.against, swap.against)),
            **fields(swap, "before after"),
        }
        for swap in sequence.swaps
    ]
    return {
        "where": str(sequence.where),
        **fields(sequence, "turn length"),
        "note": visible(sequence.note),
        "same_as": visible(_LABELS.get(sequence.same_as, sequence.same_as)),
        "stretches": stretches,
        "swaps": swaps,
        "tokens": [_shown(*token) for token in table],
    }


@lru_cache(1 << 16)
def _shown(number: int, piece: str | None, raw: str | None) -> list[Any]:
    return [
        number,
        None if piece is None else visible(piece[: _PIECE + 1], edges=True),
        None if raw is None else visible(raw),
    ]


def _stretch(stretch: ShownStretch, table: dict[tuple[Any, ...], int], *, columns: bool) -> dict[str, Any]:
    out: dict[str, Any] = {"start": stretch.start, "tokens": _tokens(stretch, table)}
    if stretch.logprobs is not None:
        out["logprobs"] = [None if value is None else round(value, 5) for value in stretch.logprobs]
    if columns and stretch.columns:
        out["columns"] = {
            visible(name): [None if value is None else round(value, 5) for value in values]
            for name, values in stretch.columns.items()
        }
    if stretch.trained is not None:
        out["trained"] = _runs([bool(flag) for flag in stretch.trained])
    if stretch.roles is not None:
        out["roles"] = _runs([visible(role) for role in stretch.roles])
    return out


def _tokens(of: ShownStretch | Swap, table: dict[tuple[Any, ...], int]) -> list[int]:
    """The index of each token in the table; new tokens are added to it."""
    pieces: Sequence[str | None] = of.pieces or [None] * len(of.ids)
    data: Sequence[str | None] = of.data or [None] * len(of.ids)
    return [table.setdefault(token, len(table)) for token in zip(of.ids, pieces, data, strict=True)]


def _runs(values: Sequence[Any]) -> list[list[Any]]:
    """Run-length encoding: `[value, count]` for each run of equal values."""
    return [[value, len(list(run))] for value, run in groupby(values)]
