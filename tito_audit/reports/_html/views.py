"""Rollouts that a page shows token by token, each packed separately and unpacked when opened; and a site of pages.

A site of many logs: a page for each, in front of them an index and a search, and rows in files of their own.

    index.html, compare.html    the logs, the search; two logs side by side
    logs/NAME.html              the page of one log, as the `html` report writes it
    data/BUILD/                 what these pages load: style, script, rows, findings, the index of the search
    tito-audit-site             which says that the folder is a site, and what it was made of

A browser lets a page from disk read no file but scripts, so each file of data is one that hands over its value.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

from tito_audit.errors import SetupError, StorageError
from tito_audit.evidence.model import Against
from tito_audit.record.finding import RE_ENCODED, SAMPLED, Result, Severity
from tito_audit.report import ReportOptions, send_all
from tito_audit.report_objects import as_json, fields
from tito_audit.reports._html.page import (
    SITE_SCRIPTS,
    SitePage,
    block,
    escaped,
    page,
    script_of_pages,
    style_of_pages,
)
from tito_audit.reports._html.page_findings import BOUND, finding_rows, linked, tables
from tito_audit.summary import Summary
from tito_audit.terminal.escape import visible
from tito_audit.version import VERSION
from tito_audit.viewer.grams import Grams
from tito_audit.viewer.model import ShownStretch, Swap, View, ViewSequence, observed_of
from tito_audit.viewer.replacements import SAMPLED as REPLACED_SAMPLED
from tito_audit.viewer.replacements import SEEN

ROOM = 12_000_000
"""Maximum characters that all rollouts together take in the page."""
_FINDINGS = 500
"""Maximum findings listed for one rollout."""

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
        None if piece is None else visible(piece[:201], edges=True),
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


MARK = "tito-audit-site"
_SHARD = 1 << 19
"""Characters of JSON from which the rows of a file are enough."""
_CODES = 40
"""Maximum codes that the index names of one log."""


@dataclass(frozen=True, slots=True)
class SiteCounts:
    """What a site shows of its logs, and what it leaves out."""

    logs: int
    rollouts: int
    shown: int
    """Rollouts with their tokens."""
    findings: int
    listed: int
    """Findings in the tables of their logs."""
    size: int
    """Bytes of all files."""


class Site:
    """A site that is written log by log beside its folder, and takes its place when it is complete.

    `close` it in the end: what is not complete is removed. SetupError if the folder holds anything else.
    """

    def __init__(self, folder: Path, write_page: Callable[..., Any]) -> None:
        """`write_page` is that of `reports.html`, which imports this module."""
        self._write_page = write_page
        self.folder = Path(os.path.realpath(folder))
        refuse_folder(folder)
        self._draft = self.folder.with_name(f".{self.folder.name[:40]}.{secrets.token_hex(4)}.part")
        self._build = secrets.token_hex(16)  # stands for the folder of data until its content names it
        self._digest = hashlib.sha256()
        self._logs: list[dict[str, Any]] = []
        self._pages = ["page.css", "page.js"]
        self._grams = Grams()
        self._blocks: list[list[int]] = []
        """By block of the search: the number of a log, of a file of its rows, and so on."""
        self._open_block: list[int] = []
        self._size = 0
        try:
            (self._draft / "logs").mkdir(parents=True)
            (self._draft / "data" / self._build).mkdir(parents=True)
        except OSError as error:
            raise StorageError(
                f"{folder}: the folder cannot be created ({error.strerror or error}), so nothing was written; "
                "name one in a writable place."
            ) from error

    def close(self) -> None:
        """Remove what is not complete."""
        self._grams.close()
        shutil.rmtree(self._draft, ignore_errors=True)

    def add(self, results: Iterable[Result], summary: Summary, name: str, options: ReportOptions) -> None:
        # A name for the files of a log that no other has, on systems that do not tell cases apart either.
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[-80:] or "log"
        files, number = plain, 2
        while files.lower() in self._pages:
            files, number = f"{plain}-{number}", number + 1
        self._pages.append(files.lower())
        path = self._draft / "logs" / f"{files}.html"
        with (
            closing(SiteRows(self, files)) as rows,
            path.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as out,
        ):
            judged = send_all(results, self._write_page(summary, out, options, rows, name))
        codes = sorted(summary.findings, key=lambda code: -summary.findings[code].new.total())
        new = summary.new
        self._logs.append(
            {
                "page": f"logs/{files}.html",
                "files": files,
                "name": visible(name),
                "state": judged.state,
                "word": judged.word,
                "line": visible(judged.line),
                "rollouts": summary.rollouts,
                "unreadable": summary.rows_unreadable,
                "tokens": summary.tokens,
                "counts": [
                    new[severity].findings if severity in new else 0 for severity in sorted(Severity, reverse=True)
                ],
                "codes": {visible(code): summary.findings[code].new.total() for code in codes[:_CODES]},
                "more_codes": max(len(codes) - _CODES, 0),
                "shown": len(rows.index),
                "listed": rows.listed,
            }
        )

    def finish(self) -> SiteCounts:
        """Write the pages in front of the logs, and put the site in its place."""
        self._end_block()
        width = self._grams.width
        for number, bucket in enumerate(self._grams.buckets()):
            self.put(f"search/{number}", bucket)
        self._file("page.css", style_of_pages())
        self._file("page.js", script_of_pages(SITE_SCRIPTS))
        data = {"logs": self._logs, "search": {"blocks": self._blocks, "width": width}}
        counts = SiteCounts(
            len(self._logs),
            sum(log["rollouts"] for log in self._logs),
            sum(log["shown"] for log in self._logs),
            sum(sum(log["counts"]) for log in self._logs),
            sum(log["listed"] for log in self._logs),
            self._size,
        )
        at = SitePage("", f"data/{self._build}")
        for name in ("index", "compare"):
            before, after = page(f"{name}.html", at, counts=counts, version=VERSION)
            text = before + block("site", data) + after
            (self._draft / f"{name}.html").write_text(text, "utf-8", "backslashreplace", "\n")
        build = self._digest.hexdigest()[:12]
        for path in (*(self._draft / "logs").iterdir(), *self._draft.glob("*.html")):
            path.write_bytes(path.read_bytes().replace(self._build.encode(), build.encode()))
        (self._draft / "data" / self._build).rename(self._draft / "data" / build)
        made_of = {"tito_audit": VERSION, "build": build, "logs": [log["name"] for log in self._logs]}
        (self._draft / MARK).write_text(json.dumps(made_of, indent=1, ensure_ascii=True) + "\n", "utf-8")
        try:
            _put_in_place(self._draft, self.folder, build)
        except OSError as error:
            raise StorageError(
                f"{self.folder}: the site cannot be put there ({error.strerror or error}).\n"
                "Its pages are as they were; name a folder in a writable place."
            ) from error
        return counts

    def put(self, name: str, value: Any) -> int:
        """Write a value as a script that hands it over; returns how many bytes it takes."""
        raw = value if isinstance(value, bytes) else as_json(value).encode("utf-8")
        data = base64.b64encode(zlib.compress(raw, 6)).decode("ascii")
        return self._file(f"{name}.js", f"titoAudit({escaped(as_json(name))}, {as_json(data)});\n")

    def rows_of(self, files: str, number: int, views: Sequence[View], rows: Sequence[str]) -> None:
        """Write a file of rows, and what the search knows of it."""
        self.put(f"{files}/rows-{number}", f"[{','.join(rows)}]".encode())
        for view in views:
            for sequence in view.sequences:
                for stretch in sequence.stretches:
                    self._grams.add(stretch.ids, stretch.data)
        self._open_block += [len(self._logs), number]
        if len(self._open_block) == 16:  # eight files, which the search tells apart only together
            self._end_block()

    def at(self, files: str) -> SitePage:
        """The place of a log's page."""
        return SitePage("../", f"data/{self._build}", files)

    def _end_block(self) -> None:
        if self._open_block:
            self._grams.end_block()
            self._blocks.append(self._open_block)
            self._open_block = []

    def _file(self, name: str, text: str) -> int:
        path, raw = self._draft / "data" / self._build / name, text.encode("utf-8")
        path.parent.mkdir(exist_ok=True)
        try:
            path.write_bytes(raw)
        except OSError as error:
            raise StorageError(
                f"{self.folder}: the site cannot be written ({error.strerror or error}), so nothing was written; "
                "free some space or name a folder on another disk."
            ) from error
        self._digest.update(name.encode() + b"\0" + raw)
        self._size += len(raw)
        return len(raw)


class SiteRows(ViewBlocks):
    """The rollouts of one log that have a view, in files of a site."""

    findings = 20_000

    def __init__(self, site: Site, files: str) -> None:
        super().__init__()
        self._site, self._files = site, files
        self.site = site.at(files)
        self.listed = 0
        """Findings in the page."""
        self._views: list[View] = []
        self._rows: list[str] = []
        self._written = self._long = 0

    def add(self, result: Result) -> None:
        observed = observed_of(result)
        if observed is None or observed.view is None:
            return
        view = observed.view
        row = view_object(view, result, columns=True)
        self.index.append(
            [*index_entry(result), visible(view.row_id), view.digest, self._written, len(self._rows)]
        )
        self._views.append(view)
        self._rows.append(as_json(row))
        self._long += len(self._rows[-1])
        if self._long >= _SHARD:
            self._end_file()

    def write(self, findings: Iterable[dict[str, Any]], out: TextIO) -> None:
        """Write the findings and the index of the rows as files; the page gets their number."""
        self._end_file()
        number = 0
        for number, chunk in enumerate(findings, 1):
            self._site.put(f"{self._files}/findings-{number - 1}", chunk)
            self.listed += len(chunk["severity"])
        self._site.put(f"{self._files}/index", self.index)
        out.write(block("files", {"findings": number}))

    def _end_file(self) -> None:
        if self._rows:
            self._site.rows_of(self._files, self._written, self._views, self._rows)
            self._views, self._rows, self._long = [], [], 0
            self._written += 1


def refuse_folder(folder: Path) -> None:
    """SetupError if there is something at this place that is no site."""
    place = Path(os.path.realpath(folder))
    if not os.path.lexists(place):
        return
    if not place.is_dir():
        raise SetupError(f"-o {folder}: this is a file.\nName a folder for the site, new or not.")
    if any(place.iterdir()) and not (place / MARK).is_file():
        raise SetupError(
            f"-o {folder}: this folder holds files of something else, and only a site is written over.\n"
            "Name a new folder, or one that this command wrote."
        )


def _put_in_place(draft: Path, folder: Path, build: str) -> None:
    """Rename a complete draft to its folder. In a site that exists, pages change once their data is there.

    Files that are not of the site stay.
    """
    if not folder.exists():
        draft.rename(folder)
        return
    for name in ("data", "logs"):
        (folder / name).mkdir(exist_ok=True)
    if not (folder / "data" / build).exists():
        (draft / "data" / build).rename(folder / "data" / build)
    pages = {path.name for path in (draft / "logs").iterdir()}
    for name in (*(f"logs/{each}" for each in sorted(pages)), "compare.html", "index.html", MARK):
        (draft / name).replace(folder / name)
    for path in (folder / "data").iterdir():
        if path.name != build:
            shutil.rmtree(path, ignore_errors=True)
    for path in (folder / "logs").iterdir():
        if path.name not in pages:
            path.unlink(missing_ok=True)
