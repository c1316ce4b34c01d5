"""What runs offer besides iterating: the findings as a table, metrics, and the display in a notebook."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tito_audit.errors import SetupError, TitoAuditError
from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.rules import all_rules
from tito_audit.summary import RuleCount, Summary
from tito_audit.tables.findings import FindingsBuilder
from tito_audit.terminal.escape import visible
from tito_audit.terminal.verdict import cause_lines, skip_lines, verdict, verdict_line, verdict_lines, verdict_word
from tito_audit.terminal.words import many
from tito_audit.terminal.worst import WorstFindings, entry_lines, log_codes_first, rule_numbers
from tito_audit.voice import for_reader

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow


class DisplayableRepairs:
    """Base of a repair that displays its verdicts. Displaying never runs it, since that may write files."""

    before: Summary
    after: Summary
    _ended = False

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Run, and yield each outcome."""

    def run(self) -> Self:
        """Run it to its end, writing what it writes, and return it."""
        for _ in self:
            pass
        return self

    def __repr__(self) -> str:
        name = type(self).__name__
        if not self._ended:
            return f"<{name}: not run yet>"
        return f"<{name}: before: {verdict_line(self.before)} | after: {verdict_line(self.after)}>"

    def _repr_html_(self) -> str:
        """What a notebook displays: the verdict before and after, and the findings of each rule."""
        if not self._ended:
            return error_html(f"{type(self).__name__}: not run yet", "Call run(), iterate it, or read `repaired`.")
        parts, rows = [], []
        for when, summary in (("before", self.before), ("after", self.after)):
            judged = verdict(summary)
            parts.append(_verdict_line(f"{when}, {judged.word}", judged.parts, _verdict_colour(summary)))
        for code in log_codes_first(self.before.findings | self.after.findings):
            counts = [side.findings.get(code, RuleCount()).new.total() for side in (self.before, self.after)]
            rows.append([_html(code), *(f"{count:,}" for count in counts)])
        parts += _html_table(("code", "before", "after"), rows, left=1)
        return _box(parts, _verdict_colour(self.after))


_NOT_KEPT = "The findings were not kept: findings_table() reads the log again."


class DisplayableResults:
    """Base of an iterable of results that also gives a table, metrics and a display, before or after iterating.

    Iterating keeps nothing. The first call that needs the findings runs the audit from the start and keeps them.
    """

    _kept: _KeptRun | None = None

    @abstractmethod
    def __iter__(self) -> Iterator[Result]:
        """Run, and yield each result."""

    @abstractmethod
    def _finished_summary(self) -> Summary | None:
        """The counts of a run that came to its end; None if none did."""

    def run(self) -> Self:
        """Run it unless its findings are kept already, keep them, and return it."""
        self._run_once()
        return self

    @property
    def verdict(self) -> str:
        """`passed`, `failed`, `nothing audited` or `nothing compared`; of a batch also `findings` or `clean`.

        Runs the audit unless it was iterated.
        """
        return verdict_word(self._finished_summary() or self._run_once().summary)

    def _why_not_run(self) -> str:
        """Why displaying must not start a run, since it writes something; "" if displaying may."""
        return ""

    def findings_table(self) -> pyarrow.Table:
        """All findings as an Arrow table, one row each; the columns are those of `findings_schema`.

        Runs the audit unless its findings are kept already. Raises what iterating raises.
        """
        return self._run_once().findings.table()

    def to_pandas(self) -> pandas.DataFrame:
        """The findings table as a pandas frame; SetupError without pandas."""
        table = self.findings_table()
        pandas = _import_optional("pandas")
        import pyarrow

        # A turn may be null: else pandas would make floats of them.
        return table.to_pandas(types_mapper={pyarrow.int32(): pandas.Int32Dtype()}.get)

    def to_polars(self) -> polars.DataFrame:
        """The findings table as a polars frame; SetupError without polars."""
        table = self.findings_table()
        frame: polars.DataFrame = _import_optional("polars").from_arrow(table)
        return frame

    def metrics(self) -> dict[str, float]:
        """The counts by name, all floats, as trackers log them; runs the audit unless it was iterated."""
        return (self._finished_summary() or self._run_once().summary).metrics()

    def __repr__(self) -> str:
        summary = self._finished_summary() or (None if self._kept is None else self._kept.summary)
        words = "not run yet; print it or call run()" if summary is None else verdict_line(summary)
        return f"<{type(self).__name__}: {words}>"

    def __str__(self) -> str:
        """The verdict with its causes, the worst findings and the notices. Runs the audit if needed."""
        summary = self._finished_summary()
        if self._kept is not None:
            _, page, counts = self._kept
            return "\n".join([*verdict_lines(counts), *page.lines(counts)])
        if summary is not None:
            return "\n".join([*verdict_lines(summary), *NotebookPage().lines(summary), "", _NOT_KEPT])
        return repr(self) if self._why_not_run() else str(self.run())

    def _repr_html_(self) -> str:
        """What a notebook displays: verdict, causes, rules, the worst findings. Runs the audit if needed."""
        summary = self._finished_summary()
        if self._kept is None and summary is None and (refusal := self._why_not_run()):
            return error_html(f"{type(self).__name__}: not run yet", refusal)
        if self._kept is None and summary is not None:
            return NotebookPage().html(summary, _NOT_KEPT)
        try:
            _, page, summary = self._run_once()
        except TitoAuditError as error:
            return error_html(f"{type(self).__name__}: not run", str(error))
        return page.html(summary)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """HTML, then `repr`: in the other order, which notebooks use, `repr` would come before the run."""
        return {"text/html": self._repr_html_(), "text/plain": repr(self)}

    def _run_once(self) -> _KeptRun:
        """What one run found; runs it unless that is kept already."""
        if self._kept is None:
            findings, page = FindingsBuilder(), NotebookPage()
            for result in self:
                findings.add(result.findings)
                page.add(result.findings)
            summary = self._finished_summary()
            assert summary is not None, "the run came to its end"
            self._kept = _KeptRun(findings, page, summary)
        return self._kept


class _KeptRun(NamedTuple):
    findings: FindingsBuilder
    page: NotebookPage
    summary: Summary


def _import_optional(name: str) -> Any:
    """Import an optional package; SetupError says how to install it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise SetupError(
            f"to_{name}() needs {name}, which is not installed.\n"
            f"Run `pip install {name}`, or use findings_table(), which needs nothing else."
        ) from None


# Notebooks display a piece of HTML without style sheets or scripts. Some viewers remove styles too, so the tags
# alone must read well. The colours show on white and on black.

_WORST = 6
"""Maximum findings shown in full."""
_LINES = 12
"""Maximum lines of a list."""
_WIDTH = 100
_RED, _AMBER, _BLUE, _GREEN, _GREY = "#d93f48", "#b07a00", "#2f81f7", "#2a9245", "#768390"
_COLOURS = {Severity.ERROR: _RED, Severity.WARNING: _AMBER, Severity.NOTE: _BLUE}
_VERDICTS = {"failed": _RED, "passed": _GREEN, "clean": _GREEN}
_BOX = "border-left: 4px solid {colour}; padding: 2px 0 2px 10px; max-width: 72em"
_TABLE = "color: inherit; font-size: inherit; margin: 4px 0; border-collapse: collapse"
_CELL = "text-align: {align}; padding: 1px 8px"
_PRE = (
    "color: inherit; background: none; margin: 4px 0; padding: 4px 8px; overflow-x: auto; "
    "border: 1px solid rgba(128, 128, 128, 0.3)"
)
_DIM = "opacity: 0.75; font-size: 90%"


class NotebookPage:
    """Collects the worst findings of a run, and writes its display in a notebook."""

    def __init__(self) -> None:
        self._worst = WorstFindings()

    def add(self, findings: Iterable[Finding]) -> None:
        """Offer the findings of one rollout."""
        self._worst.add(finding for finding in findings if not finding.known)

    def lines(self, summary: Summary) -> Iterator[str]:
        """The display as text, without the verdict: the worst findings, then the notices."""
        for entry in self._worst.pick(_WORST):
            yield from ("", *entry_lines(entry, _WIDTH, with_repair=True))
        if summary.notices:
            yield from ("", *(visible(for_reader(notice)) for notice in summary.notices[:_LINES]))

    def html(self, summary: Summary, note: str = "") -> str:
        """The display as HTML; `note` is one more line at the end."""
        judged, colour = verdict(summary), _verdict_colour(summary)
        files = ", ".join(summary.files[:3])
        if len(summary.files) > 3:
            files += f" and {many(len(summary.files) - 3, 'more file')}"
        tokens = f"{many(summary.tokens, 'token')}, {summary.generated_tokens:,} of them generated"
        facts = [files or "no file", many(summary.rollouts, "rollout"), tokens]
        facts += [f"tokenizer {summary.tokenizer or 'none'}", f"{summary.seconds:.1f} s"]
        parts = [_verdict_line(judged.word, judged.parts, colour), _dim_line(" · ".join(facts))]
        causes = []
        for cause in cause_lines(summary):
            word = "" if cause.severity is None else f"{_coloured(cause.severity.word, cause.severity)} "
            codes = f' <span style="{_DIM}">{_html(", ".join(cause.codes))}</span>' if cause.codes else ""
            causes.append(f"<li>{word}{_html(cause.words)}{codes}</li>")
        parts += ["<ul>", *causes, "</ul>"] if causes else []
        if summary.findings:
            titles = {rule.code: rule.title for rule in all_rules()}
            any_known = any(count.known for count in summary.findings.values())
            heads = ["errors", "warnings", "notes", *(["known"] if any_known else []), "rollouts", "tokens"]
            rows = []
            for code, worst_new, numbers in rule_numbers(summary, with_known=any_known):
                rows.append([_coloured(code, worst_new), _html(titles.get(code, "")), *numbers])
            parts += _html_table(("code", "what", *heads), rows, left=2)
        if worst := self._worst.pick(_WORST):
            shown = [escape("\n".join(entry_lines(entry, _WIDTH, with_repair=True))) for entry in worst]
            parts.append("<details open><summary>The worst of each cause</summary>")
            parts += [*(f'<pre style="{_PRE}">{text}</pre>' for text in shown), "</details>"]
        parts += _folded_list("Not checked", skip_lines(summary)) if summary.compared or summary.uncompared else []
        parts += _folded_list("Notices", summary.notices)
        parts += [_dim_line(note)] if note else []
        return _box(parts, colour)


def error_html(title: str, message: str) -> str:
    """The display of a run that did not start or failed: a title and a message."""
    first, _, rest = message.partition("\n")
    return _box([_verdict_line(title, (first,), _RED), *map(_dim_line, rest.splitlines())], _RED)


def _verdict_colour(summary: Summary) -> str:
    return _VERDICTS.get(verdict(summary).word) or _COLOURS.get(summary.worst() or Severity.NOTE, _GREY)


def _box(parts: Iterable[str], colour: str) -> str:
    return f'<div style="{_BOX.format(colour=colour)}">\n' + "\n".join(parts) + "\n</div>"


def _verdict_line(word: str, parts: Iterable[str], colour: str) -> str:
    shown = _html("; ".join(parts))
    return f'<div><b style="color: {colour}">tito-audit: {_html(word)}</b>: {shown}</div>'


def _html_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int) -> Iterator[str]:
    """A table of cells that are HTML already; the first `left` columns align left, the others right."""
    styles = [_CELL.format(align="left" if at < left else "right") for at in range(len(heads))]

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f'<{tag} style="{style}">{cell}</{tag}>' for style, cell in zip(styles, row, strict=True))

    yield f'<table style="{_TABLE}"><thead><tr>{cells("th", heads)}</tr></thead><tbody>'
    yield from (f"<tr>{cells('td', row)}</tr>" for row in rows)
    yield "</tbody></table>"


def _folded_list(title: str, lines: Sequence[str]) -> Iterator[str]:
    if not lines:
        return
    shown = [f"<li>{_html(line)}</li>" for line in lines[:_LINES]]
    if len(lines) > _LINES:
        shown.append(f"<li>and {len(lines) - _LINES:,} more</li>")
    yield f"<details><summary>{title}: {len(lines):,}</summary><ul>{''.join(shown)}</ul></details>"


def _coloured(word: str, severity: Severity) -> str:
    return f'<b style="color: {_COLOURS[severity]}">{_html(word)}</b>'


def _dim_line(line: str) -> str:
    return f'<div style="{_DIM}">{_html(line)}</div>'


def _html(text: str) -> str:
    return escape(visible(for_reader(text)))
