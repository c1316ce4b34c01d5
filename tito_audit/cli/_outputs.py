"""Where a run writes: stdout, a whole file, a pipe or a device; never a file that it reads."""

from __future__ import annotations

import io
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

from tito_audit.cli._exit import Stream, discard_stdout, is_stdout_closed, print_message
from tito_audit.cli._options import Options
from tito_audit.errors import SetupError, StorageError
from tito_audit.record.finding import Result
from tito_audit.report import Report, ReportOptions
from tito_audit.report_objects import as_json
from tito_audit.run.guard import guard_plugin
from tito_audit.storage import find_logs, output_path, path_identity
from tito_audit.storage.atomic import new_file, refuse_target
from tito_audit.storage.journal import SUFFIX
from tito_audit.storage.remote import is_url
from tito_audit.summary import Summary
from tito_audit.terminal.encoding import prepare_stdout, print_json
from tito_audit.terminal.escape import inert
from tito_audit.terminal.verdict import verdict_line
from tito_audit.unknown import unknown_name

if TYPE_CHECKING:
    from rich.console import RenderableType

_STDOUT_NAMES = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
_STDERR = "/dev/stderr"
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d{1,9})")


@contextmanager
def open_report(path: Path | None, report: str = "text") -> Iterator[TextIO]:
    """Stdout for None; else a file that appears, or is uploaded, once the block is complete. Links are followed.

    Anything but a regular file (a pipe, `>(jq .)`, `/dev/null`) is written to directly and never replaced.
    """
    if path is None:
        prepare_stdout(report)
        yield sys.stdout
        return
    fd = None
    own = _DESCRIPTOR.fullmatch(str(path))
    try:
        if own is not None or str(path) == _STDERR:
            fd = os.dup(int(own[1]) if own is not None else 2)
        elif not is_url(str(path)) and path.exists() and not stat.S_ISREG(path.stat().st_mode):
            fd = os.open(path, os.O_WRONLY)
    except OSError as error:
        raise _write_error(path, error) from error
    if fd is not None:
        with io.TextIOWrapper(
            io.BufferedWriter(Stream(fd, partial(_write_error, path))),
            encoding="utf-8",
            errors="backslashreplace",
            newline="\n",
        ) as out:
            yield out
        return
    try:
        with new_file(path, overwrite=True) as raw:
            text = io.TextIOWrapper(
                cast(io.BufferedWriter, raw), encoding="utf-8", errors="backslashreplace", newline="\n"
            )
            yield text
            text.detach()
    except StorageError as error:
        if not str(error).startswith(f"{path}: "):
            raise  # it is about a log that the report is made of
        raise SetupError(f"--report: {error}") from error


def _write_error(path: Path, error: OSError) -> SetupError:
    return SetupError(f"--report: {path} cannot be written: {error.strerror or error}.")


def log_keys(logs: Sequence[str]) -> frozenset[str]:
    """The place keys of the names as given, and of all logs that they stand for."""
    return frozenset({*map(path_identity, logs), *map(path_identity, find_logs(logs))})


def input_keys(name: str) -> frozenset[str]:
    """The place keys of an input; none if it is missing, which its reader will report."""
    with suppress(StorageError, OSError):
        return log_keys([name])
    return frozenset()


def refuse_overwriting(outputs: Mapping[str, str | None], logs: Sequence[str], inputs: Sequence[str] = ()) -> None:
    """Raise SetupError if an output is one of the logs or `inputs`, under any name. `outputs` are paths by flag.

    Stdout is checked too if it is a file that holds something, as after `>>`. Remote files are not checked.
    """
    keys = {flag: path_identity(path) for flag, path in outputs.items() if path is not None and _is_file(path)}
    if _is_file("/dev/fd/1", least=1):
        keys["stdout"] = path_identity("/dev/fd/1")
    if not keys:
        return
    read = [log for log in logs if not is_url(log)]
    for names, what in ((read, "one of the logs, and a log is never overwritten"), (inputs, "read by this run")):
        sources: frozenset[str] = frozenset().union(*map(input_keys, names))
        for flag, key in keys.items():
            if key in sources:
                raise SetupError(f"{flag}: {outputs.get(flag) or 'it'} is {what}; name another file.")


def _is_file(path: str, *, least: int = 0) -> bool:
    """Whether there is a regular file of at least so many bytes."""
    try:
        status = os.stat(path)  # noqa: PTH116 - Path() refuses some strings that os.stat merely does not find
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size >= least


def journal_path(options: Options, beside: str | None, way: str) -> Path | None:
    """The journal of a run: the named one or, with --resume, one next to the output `beside`; None for no journal.

    SetupError if there is no output on disk to put it next to (`way` says how to name one), or if the journal
    exists and --resume was not passed.
    """
    journal, resume = options.journal, options.resume
    if journal is None and not resume:
        return None
    if is_url(journal or ""):
        raise SetupError(f"--journal {journal}: a journal is kept on disk.\nName a file on disk.")
    if journal is None and beside is not None and is_url(beside):
        raise SetupError(
            f"--resume: a journal is kept on disk, not beside {beside}.\nName it with --journal FILE."
        )
    if journal is None and beside is None:
        raise SetupError(f"--resume: no journal is named.\nName it with --journal FILE, or {way}.")
    place = Path(journal if journal is not None else f"{beside}{SUFFIX}")
    if not resume and place.exists():
        raise SetupError(
            f"{place}: this holds what an earlier run finished.\nPass --resume to continue it, or delete the file."
        )
    return place


def print_object(value: Any) -> None:
    """Print one JSON object to stdout."""
    print_json(as_json(value))


def print_result(
    shape: str,
    value: Callable[[], Any],
    wrapped: Iterable[RenderableType] = (),
    whole: Iterable[RenderableType] = (),
    notice: str | None = None,
) -> None:
    """Print what a command found: `value()` as JSON if `shape` is `json`, else a page (see `print_page`)."""
    if shape == "json":
        print_object(value())
        return
    from tito_audit.terminal.page import print_page  # imports rich

    print_page(wrapped, whole, notice)


def print_resumed(resumed: int, of: int, place: Path | None, *, silent: bool) -> None:
    """Print to stderr how many logs an earlier run had finished."""
    if resumed and not silent:
        sys.stderr.write(f"{resumed:,} of {of:,} logs were finished before: {place}\n")


_Run = TypeVar("_Run")


@dataclass(frozen=True, slots=True)
class ReportTarget:
    """A report and the file it goes to."""

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
    """The reports of `--report` and `--output-format`, each with its path; None is stdout.

    Stdout gets `text` if nothing else goes there, unless --quiet. For stdout, a flag overrides the configuration
    file. SetupError if two reports have the same place, if one would replace a file that the run reads or writes,
    or if one is not in `names`.
    """
    named = parse_reports(options.report, logs, written, inputs)
    output_format = options.values.get("output_format")
    if output_format is not None and "=" in output_format:
        raise SetupError(
            f"--output-format {output_format}: this flag is for stdout.\nFor a file, pass --report NAME=FILE"
        )
    printed = next((name for name, path in named if path is None), None)
    if output_format is not None and printed is not None:
        by_flag = options.is_flagged("report")
        if by_flag == options.is_flagged("output_format"):
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
            raise unknown_name("report", name, names, flag="--report")
    return wanted


def parse_reports(
    reports: Sequence[str], logs: Sequence[str], written: Sequence[str] = (), inputs: Sequence[str] = ()
) -> list[tuple[str, Path | None]]:
    """`NAME` and `NAME=FILE` as names and paths, None for stdout; SetupError for a path that cannot be written.

    A report may replace neither a log nor what the run writes (`written`) or reads besides (`inputs`).
    """
    named: list[tuple[str, Path | None]] = []
    for text in reports:
        name, _, file = text.partition("=")
        named.append((name.strip(), output_path(file) if file and file not in _STDOUT_NAMES else None))
    keys = [None if path is None else path_identity(path) for _, path in named]
    sources = log_keys(logs) if any(keys) else frozenset()
    for (_, path), key in zip(named, keys, strict=True):
        if path is None or key is None:
            if keys.count(None) > 1:
                raise _same_place_error("stdout")
            continue
        # Links resolved as far as they exist; a URL in its normal form.
        place = key if is_url(str(path)) else os.path.realpath(path)
        if keys.count(key) > 1:
            raise _same_place_error(f"the file {path if is_url(place) else place}")
        if key in sources:
            raise SetupError(f"--report: {place} is one of the logs, which are never overwritten.")
        if any(key == path_identity(other) for other in written):
            raise SetupError(f"--report: {place} is written by this run or is its baseline; name another file.")
        if any(key in input_keys(other) for other in inputs):
            raise SetupError(f"--report: {place} is read by this run; name another file.")
        # Whether it can be written is found out before anything is scanned.
        if is_url(place):
            try:
                refuse_target(path, overwrite=True)
            except StorageError as error:
                raise SetupError(f"--report: {error}") from error
            continue
        # os.path is False for a name that is too long, where Path raises; opening the file says what is wrong.
        folder, name = os.path.split(place)
        if not os.path.isdir(folder):  # noqa: PTH112
            raise SetupError(f"--report: there is no folder {folder} to write {name} to.")
        if os.path.isdir(place):  # noqa: PTH112
            raise SetupError(f"--report: {place} is a folder, not a file.")
    return named


def _same_place_error(where: str) -> SetupError:
    return SetupError(
        f"--report: two reports would be written to {where}.\nName a file for one of them: --report json=FILE"
    )


def write_reports(
    results: Iterable[Result], summary: Summary, wanted: Sequence[ReportTarget], options: ReportOptions
) -> None:
    """Write every report in one pass over the results, which are never collected in a list.

    If the reader of stdout leaves after the last result, the verdict goes to stderr and the run goes on.
    """
    complete = False
    with ExitStack() as files:
        outs = [files.enter_context(open_report(target.path, target.report.name)) for target in wanted]
        writers = []
        try:
            for target, out in zip(wanted, outs, strict=True):
                look = options if target.path is None else replace(options, color=False)
                with _guard_report(target):
                    writers.append(files.enter_context(closing(target.report.write(summary, out, look))))
                    next(writers[-1])
            pairs = list(zip(wanted, writers, strict=True))
            for result in results:
                for target, writer in pairs:
                    with _guard_report(target):
                        writer.send(result)
            complete = True
            errors: list[Exception] = []
            for target, writer in pairs:
                try:
                    with suppress(StopIteration), _guard_report(target):
                        writer.send(None)
                except Exception as error:
                    errors.append(error)
            # Any other error comes before that of a closed stdout, which is no failure of the run.
            for failure in sorted(errors, key=lambda error: isinstance(error, BrokenPipeError)):
                raise failure
            sys.stdout.flush()
        except BrokenPipeError:
            if not complete or not is_stdout_closed():
                raise
            discard_stdout()
            print_message(inert(f"stdout was closed before all was printed; {verdict_line(summary)}"))
        # Flush all files before the first one appears: if one cannot be written, none does.
        for out in outs:
            out.flush()


def _guard_report(target: ReportTarget) -> AbstractContextManager[None]:
    """A block in which a report runs; PluginError if it fails."""
    return guard_plugin(
        f"report `{target.report.name}`", None, "choose another report: `-f NAME` or `--report NAME=FILE`"
    )


def json_writer(as_object: Callable[[_Run], Any]) -> Callable[[_Run, TextIO, ReportOptions], None]:
    """A writer of one JSON object, made of a function that gives the object of a finished run."""

    def write(run: _Run, out: TextIO, options: ReportOptions) -> None:
        out.write(as_json(as_object(run)) + "\n")

    return write


def write_finished_reports(
    run: _Run,
    reports: Mapping[str, Callable[[_Run, TextIO, ReportOptions], None]],
    wanted: Sequence[tuple[str, Path | None]],
    options: ReportOptions,
) -> None:
    """Write the reports of a finished run of a command that has its own `reports`."""
    for name, path in wanted:
        with open_report(path, name) as file:
            reports[name](run, file, options if path is None else replace(options, color=False))
    sys.stdout.flush()
