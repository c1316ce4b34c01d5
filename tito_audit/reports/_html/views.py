"""The rollouts that a page shows token by token, as data that is unpacked when opened; and sites of many pages.

A site has a page for each log, an index and a search in front of them, and rows in files of their own.

    index.html, compare.html    the logs, the search; two logs side by side
    logs/NAME.html              the page of one log, as the `html` report writes it
    data/BUILD/                 what these pages load: style, script, rows, findings, the index of the search
    tito-audit-site             marks the folder as a site, and says what it was made of

Browsers let a page from disk load scripts and no other files, so data files are scripts that pass a value.
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
from tito_audit.report import ReportOptions, feed_results
from tito_audit.report_objects import as_json, pick
from tito_audit.reports._html.page import (
    SITE_SCRIPTS,
    SitePage,
    data_block,
    escape_for_script,
    page_script,
    page_style,
    render_page,
)
from tito_audit.reports._html.page_findings import MAX_FINDINGS, as_columns, finding_rows, link_roots
from tito_audit.summary import Summary
from tito_audit.terminal.escape import visible
from tito_audit.version import VERSION
from tito_audit.viewer.grams import GramIndex
from tito_audit.viewer.model import ShownStretch, Swap, View
from tito_audit.viewer.replacements import WAS_SAMPLED as REPLACED_SAMPLED
from tito_audit.viewer.replacements import WAS_SEEN

MAX_VIEW_CHARACTERS = 12_000_000
"""Maximum characters of all rollouts in one page."""
_MAX_FINDINGS = 500
"""Maximum findings listed for one rollout."""

_LABELS = {WAS_SEEN: "previous call", REPLACED_SAMPLED: SAMPLED, str(Against.REENCODED): RE_ENCODED}
"""Other sides of sequences, as people read them: the words of findings."""


class ViewBlocks:
    """Collects the rollouts with a view as data blocks on disk; it has to be closed."""

    max_findings = MAX_FINDINGS
    """Maximum findings in the page."""
    site: SitePage | None = None
    """The place of the page in a site; None: a single page with its data inside."""

    def __init__(self) -> None:
        self._room = MAX_VIEW_CHARACTERS
        self._waiting = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self.index: list[list[Any]] = []
        """The `index_entry` of each rollout in the page."""

    def close(self) -> None:
        """Delete the blocks on disk."""
        self._waiting.close()

    def add(self, view: View, result: Result) -> None:
        """Add the view of a rollout if there is room."""
        text = data_block("view", view_object(view, result))
        if len(text) > self._room:
            return
        self._room -= len(text)
        self._waiting.write(text)
        self.index.append(index_entry(result))

    def write(self, findings: Iterable[dict[str, Any]], out: TextIO) -> None:
        """Write the data of the page: the findings, the index of rollouts, the rollouts."""
        for chunk in findings:
            out.write(data_block("findings", chunk))
        out.write(data_block("views", self.index))
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
    """One rollout for the viewer, its sequences and findings; `columns` adds other numbers recorded by token."""
    sequences = []
    for sequence in view.sequences:
        table: dict[tuple[Any, ...], int] = {}  # by `(id, piece, bytes)`: the index that stands for a token
        stretches = []
        for stretch in sequence.stretches:
            entry: dict[str, Any] = {"start": stretch.start, "tokens": _token_indices(stretch, table)}
            if stretch.logprobs is not None:
                entry["logprobs"] = _round_values(stretch.logprobs)
            if columns and stretch.columns:
                entry["columns"] = {
                    visible(name): _round_values(values) for name, values in stretch.columns.items()
                }
            if stretch.trained is not None:
                entry["trained"] = _run_lengths([bool(flag) for flag in stretch.trained])
            if stretch.roles is not None:
                entry["roles"] = _run_lengths([visible(role) for role in stretch.roles])
            stretches.append(entry)
        swaps = [
            {
                **pick(swap, "start end"),
                "tokens": _token_indices(swap, table),
                "total": max(swap.total, len(swap.ids)),
                "code": visible(swap.code),
                "against": visible(_LABELS.get(swap.against, swap.against)),
                **pick(swap, "before after"),
            }
            for swap in sequence.swaps
        ]
        sequences.append(
            {
                "where": str(sequence.where),
                **pick(sequence, "turn length"),
                "note": visible(sequence.note),
                "same_as": visible(_LABELS.get(sequence.same_as, sequence.same_as)),
                "stretches": stretches,
                "swaps": swaps,
                "tokens": [_token_entry(*token) for token in table],
            }
        )
    return {
        "messages": [visible(role) for role in view.messages],
        "sequences": sequences,
        "left_out": view.left_out,
        "findings": as_columns(list(link_roots(finding_rows(result.findings[:_MAX_FINDINGS])))),
        "more_findings": max(len(result.findings) - _MAX_FINDINGS, 0),
    }


@lru_cache(1 << 16)
def _token_entry(number: int, piece: str | None, raw: str | None) -> list[Any]:
    return [
        number,
        None if piece is None else visible(piece[:201], edges=True),
        None if raw is None else visible(raw),
    ]


def _round_values(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 5) for value in values]


def _token_indices(tokens: ShownStretch | Swap, table: dict[tuple[Any, ...], int]) -> list[int]:
    """The index of each token in the table; new tokens are added to it."""
    pieces: Sequence[str | None] = tokens.pieces or [None] * len(tokens.ids)
    data: Sequence[str | None] = tokens.data or [None] * len(tokens.ids)
    return [table.setdefault(token, len(table)) for token in zip(tokens.ids, pieces, data, strict=True)]


def _run_lengths(values: Sequence[Any]) -> list[list[Any]]:
    """Run-length encoding: `[value, count]` for each run of equal values."""
    return [[value, len(list(run))] for value, run in groupby(values)]


SITE_MARK = "tito-audit-site"
_SHARD_CHARACTERS = 1 << 19
"""Characters of JSON after which a file of rows is closed."""
_MAX_CODES = 40
"""Maximum codes that the index names for one log."""


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
    """Writes a site log by log into a draft beside its folder; `finish` moves it there, `close` deletes a draft.

    SetupError if the folder holds anything but a site.
    """

    def __init__(self, folder: Path, write_page: Callable[..., Any]) -> None:
        """`write_page` is the function of `reports.html`; importing it here would be a circle."""
        self._write_page = write_page
        self.folder = Path(os.path.realpath(folder))
        check_site_folder(folder)
        self._draft = self.folder.with_name(f".{self.folder.name[:40]}.{secrets.token_hex(4)}.part")
        self._build = secrets.token_hex(16)  # stands for the name of the data folder, a digest of its content
        self._digest = hashlib.sha256()
        self._logs: list[dict[str, Any]] = []
        self._pages = ["page.css", "page.js"]
        self._grams = GramIndex()
        self._blocks: list[list[int]] = []
        """By block of the search: number of a log, number of one of its files of rows, and so on in pairs."""
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
        """Delete the draft, if the site is not complete."""
        self._grams.close()
        shutil.rmtree(self._draft, ignore_errors=True)

    def add(self, results: Iterable[Result], summary: Summary, name: str, options: ReportOptions) -> None:
        """Write the page of one log, and add it to the index."""
        # A name for the files of this log that no other log has, even if the file system ignores case.
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
            judged = feed_results(results, self._write_page(summary, out, options, rows, name))
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
                "codes": {visible(code): summary.findings[code].new.total() for code in codes[:_MAX_CODES]},
                "more_codes": max(len(codes) - _MAX_CODES, 0),
                "shown": len(rows.index),
                "listed": rows.listed,
            }
        )

    def finish(self) -> SiteCounts:
        """Write the index and the search, and put the site in its place."""
        self._close_block()
        width = self._grams.width
        for number, bucket in enumerate(self._grams.buckets()):
            self.write_data(f"search/{number}", bucket)
        self._write_file("page.css", page_style())
        self._write_file("page.js", page_script(SITE_SCRIPTS))
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
            before, after = render_page(f"{name}.html", at, counts=counts, version=VERSION)
            text = before + data_block("site", data) + after
            (self._draft / f"{name}.html").write_text(text, "utf-8", "backslashreplace", "\n")
        build = self._digest.hexdigest()[:12]
        for path in (*(self._draft / "logs").iterdir(), *self._draft.glob("*.html")):
            path.write_bytes(path.read_bytes().replace(self._build.encode(), build.encode()))
        (self._draft / "data" / self._build).rename(self._draft / "data" / build)
        made_of = {"tito_audit": VERSION, "build": build, "logs": [log["name"] for log in self._logs]}
        (self._draft / SITE_MARK).write_text(json.dumps(made_of, indent=1, ensure_ascii=True) + "\n", "utf-8")
        try:
            _publish(self._draft, self.folder, build)
        except OSError as error:
            raise StorageError(
                f"{self.folder}: the site cannot be put there ({error.strerror or error}).\n"
                "Its pages are as they were; name a folder in a writable place."
            ) from error
        return counts

    def write_data(self, name: str, value: Any) -> int:
        """Write a value (bytes: as they are) as a script that passes it to the page; returns its size in bytes."""
        raw = value if isinstance(value, bytes) else as_json(value).encode("utf-8")
        data = base64.b64encode(zlib.compress(raw, 6)).decode("ascii")
        return self._write_file(f"{name}.js", f"titoAudit({escape_for_script(as_json(name))}, {as_json(data)});\n")

    def write_rows(self, files: str, number: int, views: Sequence[View], rows: Sequence[str]) -> None:
        """Write a file of rows, and index their tokens for the search."""
        self.write_data(f"{files}/rows-{number}", f"[{','.join(rows)}]".encode())
        for view in views:
            for sequence in view.sequences:
                for stretch in sequence.stretches:
                    self._grams.add(stretch.ids, stretch.data)
        self._open_block += [len(self._logs), number]
        if len(self._open_block) == 16:  # eight files, between which the search does not distinguish
            self._close_block()

    def page_of_log(self, files: str) -> SitePage:
        """The place of a log's page."""
        return SitePage("../", f"data/{self._build}", files)

    def _close_block(self) -> None:
        if self._open_block:
            self._grams.end_block()
            self._blocks.append(self._open_block)
            self._open_block = []

    def _write_file(self, name: str, text: str) -> int:
        """Write a file into the folder of data, add it to its digest, and return its size in bytes."""
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
    """The rollouts of one log with a view, written into files of a site."""

    max_findings = 20_000

    def __init__(self, site: Site, files: str) -> None:
        super().__init__()
        self._site, self._files = site, files
        self.site = site.page_of_log(files)
        self.listed = 0
        """Findings in the page."""
        self._views: list[View] = []
        self._rows: list[str] = []
        self._written = self._characters = 0

    def add(self, view: View, result: Result) -> None:
        row = view_object(view, result, columns=True)
        self.index.append(
            [*index_entry(result), visible(view.row_id), view.digest, self._written, len(self._rows)]
        )
        self._views.append(view)
        self._rows.append(as_json(row))
        self._characters += len(self._rows[-1])
        if self._characters >= _SHARD_CHARACTERS:
            self._close_file()

    def write(self, findings: Iterable[dict[str, Any]], out: TextIO) -> None:
        """Write the findings and the index of rows as files; the page itself gets the number of files."""
        self._close_file()
        number = 0
        for number, chunk in enumerate(findings, 1):
            self._site.write_data(f"{self._files}/findings-{number - 1}", chunk)
            self.listed += len(chunk["severity"])
        self._site.write_data(f"{self._files}/index", self.index)
        out.write(data_block("files", {"findings": number}))

    def _close_file(self) -> None:
        if self._rows:
            self._site.write_rows(self._files, self._written, self._views, self._rows)
            self._views, self._rows, self._characters = [], [], 0
            self._written += 1


def check_site_folder(folder: Path) -> None:
    """Raise SetupError if something that is no site is in the way."""
    place = Path(os.path.realpath(folder))
    if not os.path.lexists(place):
        return
    if not place.is_dir():
        raise SetupError(f"-o {folder}: this is a file.\nName a folder for the site, new or not.")
    if any(place.iterdir()) and not (place / SITE_MARK).is_file():
        raise SetupError(
            f"-o {folder}: this folder holds files of something else, and only a site is written over.\n"
            "Name a new folder, or one that this command wrote."
        )


def _publish(draft: Path, folder: Path, build: str) -> None:
    """Move a complete draft into its folder. In an existing site, pages are replaced once their data is there.

    Other files of the folder stay.
    """
    if not folder.exists():
        draft.rename(folder)
        return
    for name in ("data", "logs"):
        (folder / name).mkdir(exist_ok=True)
    if not (folder / "data" / build).exists():
        (draft / "data" / build).rename(folder / "data" / build)
    pages = {path.name for path in (draft / "logs").iterdir()}
    for name in (*(f"logs/{page}" for page in sorted(pages)), "compare.html", "index.html", SITE_MARK):
        (draft / name).replace(folder / name)
    for path in (folder / "data").iterdir():
        if path.name != build:
            shutil.rmtree(path, ignore_errors=True)
    for path in (folder / "logs").iterdir():
        if path.name not in pages:
            path.unlink(missing_ok=True)
