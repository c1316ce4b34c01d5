"""Where reports go: stdout or files, several at once out of one pass over the results."""

from __future__ import annotations

import os
import queue
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tito_audit.errors import SetupError

if TYPE_CHECKING:
    from tito_audit.record.finding import Result
    from tito_audit.report import Report, ReportOptions
    from tito_audit.summary import Summary

__all__ = ["Wanted", "deliver", "named_places", "opened", "wanted_reports"]

_WAITING = 32
"""Results that a slow report may lag behind."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One report and where it goes."""

    report: Report
    path: Path | None
    """None: stdout."""


def wanted_reports(given: Sequence[str], logs: Sequence[str]) -> list[Wanted]:
    """`NAME` and `NAME=FILE` as reports; SetupError when two would write to one place or onto a log."""
    from tito_audit.reports import report_named

    return [Wanted(report_named(name), path) for name, path in named_places(given, logs)]


def named_places(
    given: Sequence[str], logs: Sequence[str], written: Sequence[str] = ()
) -> list[tuple[str, Path | None]]:
    """`NAME` and `NAME=FILE` as names and places, None for stdout; SetupError for a place that cannot be."""
    named: list[tuple[str, Path | None]] = []
    for text in given:
        name, _, file = text.partition("=")
        named.append((name.strip(), Path(file) if file and file != "-" else None))
    places = [path and path.resolve() for _, path in named]
    for place in places:
        if places.count(place) > 1:
            where = f"the file {place}" if place else "stdout"
            raise SetupError(
                f"--report: two reports would be written to {where}.\nName a file for one: --report json=FILE"
            )
        if place and any(Path(log).exists() and place == Path(log).resolve() for log in logs):
            raise SetupError(f"--report: {place} is one of the logs, and a log is never written.")
        if place and any(place == Path(other).resolve() for other in written):
            raise SetupError(f"--report: {place} is written by this run already; name another file.")
        if place and not place.parent.is_dir():
            raise SetupError(f"--report: there is no folder {place.parent} to write {place.name} to.")
        if place and place.is_dir():
            raise SetupError(f"--report: {place} is a folder, not a file.")
    return named


def deliver(results: Iterable[Result], summary: Summary, wanted: Sequence[Wanted], options: ReportOptions) -> None:
    """Write every report out of one pass; no list of results is ever held."""
    with ExitStack() as files:
        outs = [files.enter_context(opened(one.path)) for one in wanted]
        choices = [options if one.path is None else replace(options, color=False) for one in wanted]
        if not wanted:
            for _ in results:
                pass
        elif len(wanted) == 1:
            wanted[0].report.write(results, summary, outs[0], choices[0])
        else:
            _tee(results, summary, list(zip(wanted, outs, choices, strict=True)))
        sys.stdout.flush()


@contextmanager
def opened(path: Path | None) -> Iterator[TextIO]:
    """Stdout, or a new file beside `path` that takes its name once the report is whole."""
    if path is None:
        yield sys.stdout
        return
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise SetupError(f"--report: {path} cannot be written: {error.strerror}.") from error
    part = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as out:
            yield out
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o666 & ~umask)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


class _Stopped(Exception):
    """Ends the reports that still wait for results of a run that failed."""


class _Branch:
    """One report in a thread of its own, pulling from a short queue."""

    def __init__(self, summary: Summary, wanted: Wanted, out: TextIO, options: ReportOptions) -> None:
        self.error: BaseException | None = None
        self._queue: queue.Queue[Result | type[_Stopped] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._run, args=(summary, wanted, out, options), daemon=True)
        self._thread.start()

    def put(self, result: Result | type[_Stopped] | None) -> None:
        """Hand one result over, waiting while the report lags; its own failure is raised here."""
        while self.error is None:
            try:
                return self._queue.put(result, timeout=0.1)
            except queue.Full:
                continue
        raise self.error

    def close(self, *, failed: bool) -> None:
        """Tell the report that no more comes and wait for it."""
        if self.error is None:
            self.put(_Stopped if failed else None)
        self._thread.join()

    def _run(self, summary: Summary, wanted: Wanted, out: TextIO, options: ReportOptions) -> None:
        try:
            wanted.report.write(self._pulled(), summary, out, options)
        except BaseException as error:
            self.error = error

    def _pulled(self) -> Iterator[Result]:
        while (result := self._queue.get()) is not None:
            if isinstance(result, type):
                raise _Stopped
            yield result


def _tee(results: Iterable[Result], summary: Summary, wanted: list[tuple[Wanted, TextIO, ReportOptions]]) -> None:
    branches = [_Branch(summary, *one) for one in wanted]
    failed = True
    try:
        for result in results:
            for branch in branches:
                branch.put(result)
        failed = False
    finally:
        for branch in branches:
            branch.close(failed=failed)
    for branch in branches:
        if branch.error is not None:
            raise branch.error
