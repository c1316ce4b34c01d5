"""Writes reports to stdout or files, several in one pass over the results."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

from tito_audit.cli._ends import complain, give_up_stdout, reader_gone
from tito_audit.cli._outs import files_of, is_stdout, is_url, key_of, opened, read_as
from tito_audit.errors import SetupError, StorageError
from tito_audit.unknown import unknown

if TYPE_CHECKING:
    from tito_audit.cli._options import Options
    from tito_audit.record.finding import Result
    from tito_audit.report import Report, ReportOptions
    from tito_audit.summary import Summary

_Run = TypeVar("_Run")


@dataclass(frozen=True, slots=True)
class Target:
    """One report and where it goes."""

    report: Report
    path: Path | None
    """None: stdout."""


def wanted_reports(
    options: Options,
    logs: Sequence[str],
    written: Sequence[str] = (),
    inputs: Sequence[str] = (),
    names: Iterable[str] | None = None,
) -> list[tuple[str, Path | None]]:
    """The reports `NAME` and `NAME=FILE` with their places; to stdout (None) the one that `--output-format` names,
    `text` if nothing goes there and not `--quiet`.

    SetupError when two would be written to the same place, one over a log or a file that the run writes or reads,
    or one is not in `names`. For stdout, a flag overrides the configuration file.
    """
    named, output_format = named_places(options.report, logs, written, inputs), options.values.get("output_format")
    if output_format is not None and "=" in output_format:
        raise SetupError(
            f"--output-format {output_format}: this flag is for stdout.\nFor a file, pass --report NAME=FILE"
        )
    printed = next((name for name, path in named if path is None), None)
    if output_format is not None and printed is not None:
        by_flag = options.flagged("report")
        if by_flag == options.flagged("output_format"):
            raise SetupError(
                f"--output-format {output_format}: --report {printed} goes to stdout too, and the two would mix.\n"
                f"Name a file for one of them: --report {printed}=FILE"
            )
        if by_flag:
            output_format = None
        else:
            named = [(name, path) for name, path in named if path is not None]
    first = output_format or (None if options.quiet or printed is not None else "text")
    wanted = named if first is None else [(first, None), *named]
    for name, _ in wanted:
        if names is not None and name not in names:
            raise unknown("report", name, names, flag="--report")
    return wanted


def named_places(
    reports: Sequence[str], logs: Sequence[str], written: Sequence[str] = (), inputs: Sequence[str] = ()
) -> list[tuple[str, Path | None]]:
    """`NAME` and `NAME=FILE` as names and paths, None for stdout; SetupError for a path that cannot be written.

    The files in `written`, and those that the run reads besides the logs (`inputs`), must not be overwritten.
    """
    named: list[tuple[str, Path | None]] = []
    for text in reports:
        name, _, file = text.partition("=")
        path: Path | None = None
        if file and not is_stdout(file):
            from tito_audit.storage import output_path

            path = output_path(file)
        named.append((name.strip(), path))
    keys = [None if path is None else key_of(path) for _, path in named]
    sources = files_of(logs) if any(keys) else frozenset()
    for (_, path), key in zip(named, keys, strict=True):
        if path is None or key is None:
            if keys.count(None) > 1:
                raise _two("stdout")
            continue
        # With all links resolved, as far as it exists; of a URL, its one spelling.
        place = key if is_url(str(path)) else os.path.realpath(path)
        if keys.count(key) > 1:
            raise _two(f"the file {path if is_url(place) else place}")
        if key in sources:
            raise SetupError(f"--report: {place} is one of the logs, which are never overwritten.")
        if any(key == key_of(other) for other in written):
            raise SetupError(f"--report: {place} is written by this run or is its baseline; name another file.")
        if any(key in read_as(other) for other in inputs):
            raise SetupError(f"--report: {place} is read by this run; name another file.")
        _refuse_place(path, place)
    return named


def _two(where: str) -> SetupError:
    return SetupError(
        f"--report: two reports would be written to {where}.\nName a file for one of them: --report json=FILE"
    )


def _refuse_place(path: Path, place: str) -> None:
    """SetupError for a report that cannot be written to its place, before anything is scanned."""
    if is_url(place):
        from tito_audit.storage.atomic import refuse_target

        try:
            refuse_target(path, overwrite=True)
        except StorageError as error:
            raise SetupError(f"--report: {error}") from error
        return
    # os.path returns False for a name that is too long; opening the file then says what is wrong.
    folder, name = os.path.split(place)
    if not os.path.isdir(folder):  # noqa: PTH112
        raise SetupError(f"--report: there is no folder {folder} to write {name} to.")
    if os.path.isdir(place):  # noqa: PTH112
        raise SetupError(f"--report: {place} is a folder, not a file.")


def deliver(results: Iterable[Result], summary: Summary, wanted: Sequence[Target], options: ReportOptions) -> None:
    """Write every report in one pass over the results, which are never held in a list.

    If the reader of stdout goes away once all results are known, the verdict goes to stderr, and the run goes on.
    """
    complete = False
    with ExitStack() as files:
        outs = [files.enter_context(opened(target.path, target.report.name)) for target in wanted]
        writers = []
        try:
            for target, out in zip(wanted, outs, strict=True):
                look = options if target.path is None else replace(options, color=False)
                with _guarded(target):
                    writers.append(files.enter_context(closing(target.report.write(summary, out, look))))
                    next(writers[-1])
            pairs = list(zip(wanted, writers, strict=True))
            for result in results:
                for target, writer in pairs:
                    with _guarded(target):
                        writer.send(result)
            complete = True
            errors: list[Exception] = []
            for target, writer in pairs:
                try:
                    with suppress(StopIteration), _guarded(target):
                        writer.send(None)
                except Exception as error:
                    errors.append(error)
            # A reader of stdout that went away is of no matter to the other reports.
            for refused in sorted(errors, key=lambda error: isinstance(error, BrokenPipeError)):
                raise refused
            sys.stdout.flush()
        except BrokenPipeError:
            if not complete or not reader_gone():
                raise
            from tito_audit.terminal.escape import inert
            from tito_audit.terminal.verdict import verdict_line

            give_up_stdout()
            complain(inert(f"stdout was closed before all was printed; {verdict_line(summary)}"))
        # Flush all before any file gets its name: if one cannot be written, none appears.
        for out in outs:
            out.flush()


def _guarded(target: Target) -> AbstractContextManager[None]:
    """A block in which a report runs: PluginError if it fails."""
    from tito_audit.run.guard import guarded

    return guarded(
        f"report `{target.report.name}`", None, "choose another report: `-f NAME` or `--report NAME=FILE`"
    )


def deliver_finished(
    run: _Run,
    reports: Mapping[str, Callable[[_Run, TextIO, ReportOptions], None]],
    wanted: Sequence[tuple[str, Path | None]],
    options: ReportOptions,
) -> None:
    """Write every report of a finished run, of a command that has its own reports."""
    for name, path in wanted:
        with opened(path, name) as file:
            reports[name](run, file, options if path is None else replace(options, color=False))
    sys.stdout.flush()
