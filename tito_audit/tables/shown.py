"""What every run of results offers besides iterating: findings as a table, numbers, a notebook's display."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

from tito_audit.errors import SetupError, TitoAuditError
from tito_audit.record.finding import Result
from tito_audit.summary import Summary
from tito_audit.tables.findings import FindingsBuilder
from tito_audit.tables.notebook import NotebookPage, comparison_html, error_html
from tito_audit.terminal.verdict import verdict_line, verdict_lines, verdict_word

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow


class ShownRepairs:
    """A repair that can be displayed. Displaying never runs it, since that may write files."""

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
        return comparison_html(self.before, self.after)


_NOT_KEPT = "The findings were not kept: findings_table() reads the log again."


class Shown:
    """Results that can be displayed, tabled and counted, before, after or without being iterated.

    Iterating keeps nothing, so memory does not grow with the log. The first call that needs the findings runs the
    audit, from the start if it was iterated before, and keeps them as Arrow columns: later calls cost nothing.
    """

    _kept: tuple[FindingsBuilder, NotebookPage, Summary] | None = None

    @abstractmethod
    def __iter__(self) -> Iterator[Result]:
        """Run, and yield each result."""

    @abstractmethod
    def _counted(self) -> Summary | None:
        """The counts of a run that came to its end; None if there was none."""

    def run(self) -> Self:
        """Run it, keep its findings, and return it; once they are kept, only return it."""
        self._run()
        return self

    @property
    def verdict(self) -> str:
        """`passed`, `failed`, `nothing audited` or `nothing compared`; of a batch also `findings` or `clean`.

        Runs the audit unless it was iterated.
        """
        return verdict_word(self._counted() or self._run()[2])

    def _refusal(self) -> str:
        """Why displaying may not start a run: what the run would write; empty if it writes nothing."""
        return ""

    def findings_table(self) -> pyarrow.Table:
        """All findings as an Arrow table, one row each; the columns are those of `findings_schema`.

        Runs the audit unless its findings are kept already. Raises what iterating raises.
        """
        return self._run()[0].table()

    def to_pandas(self) -> pandas.DataFrame:
        """The findings table as a pandas frame; SetupError without pandas."""
        table = self.findings_table()
        pandas = _package("pandas")
        import pyarrow

        # A turn may be null: else pandas would make floats of them.
        return table.to_pandas(types_mapper={pyarrow.int32(): pandas.Int32Dtype()}.get)

    def to_polars(self) -> polars.DataFrame:
        """The findings table as a polars frame; SetupError without polars."""
        table = self.findings_table()
        frame: polars.DataFrame = _package("polars").from_arrow(table)
        return frame

    def metrics(self) -> dict[str, float]:
        """The counts by name, all floats, as trackers log them; runs the audit unless it was iterated."""
        return (self._counted() or self._run()[2]).metrics()

    def __repr__(self) -> str:
        summary = self._counted() or (None if self._kept is None else self._kept[2])
        words = "not run yet; print it or call run()" if summary is None else verdict_line(summary)
        return f"<{type(self).__name__}: {words}>"

    def __str__(self) -> str:
        """The verdict with its causes, the worst findings and the notices. Runs the audit if needed."""
        summary = self._counted()
        if self._kept is not None:
            _, page, kept_summary = self._kept
            return "\n".join([*verdict_lines(kept_summary), *page.lines(kept_summary)])
        if summary is not None:
            return "\n".join([*verdict_lines(summary), *NotebookPage().lines(summary), "", _NOT_KEPT])
        return repr(self) if self._refusal() else str(self.run())

    def _repr_html_(self) -> str:
        """What a notebook displays: verdict, causes, rules, the worst findings. Runs the audit if needed."""
        summary = self._counted()
        if self._kept is None and summary is None and (refusal := self._refusal()):
            return error_html(f"{type(self).__name__}: not run yet", refusal)
        if self._kept is None and summary is not None:
            return NotebookPage().html(summary, _NOT_KEPT)
        try:
            _, page, summary = self._run()
        except TitoAuditError as error:
            return error_html(f"{type(self).__name__}: not run", str(error))
        return page.html(summary)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """The same with the line of `repr`, which notebooks would ask for before it ran."""
        html = self._repr_html_()
        return {"text/html": html, "text/plain": repr(self)}

    def _run(self) -> tuple[FindingsBuilder, NotebookPage, Summary]:
        """All that one run found; run now if nothing is kept."""
        if self._kept is None:
            findings, page = FindingsBuilder(), NotebookPage()
            for result in self:
                findings.add(result.findings)
                page.add(result.findings)
            summary = self._counted()
            assert summary is not None, "the run came to its end"
            self._kept = findings, page, summary
        return self._kept


def _package(name: str) -> Any:
    """An optional package; SetupError that says how to get it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise SetupError(
            f"to_{name}() needs {name}, which is not installed.\n"
            f"Run `pip install {name}`, or use findings_table(), which needs nothing else."
        ) from None
