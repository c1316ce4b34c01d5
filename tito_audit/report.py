"""A report: results in, text out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO, TypeVar

from tito_audit.record.finding import Finding, Result

if TYPE_CHECKING:
    from tito_audit.summary import Summary


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What a user can choose about a report."""

    color: bool = False
    width: int = 100
    worst: int = 10
    """How many findings the reports for people show in full."""
    notes: bool = False
    """Whether the page for a terminal shows notes; otherwise it counts them."""
    not_checked: bool = False
    """Whether it lists everything that was not checked; otherwise the most common reasons."""
    titles: Mapping[str, str] = field(default_factory=dict)
    """By code: what each rule finds. Reports import no rules."""
    docs: Mapping[str, str] = field(default_factory=dict)
    """By code: the manual of each rule in Markdown."""
    ran: Callable[[str], Collection[str]] | None = None
    """The codes that ran on a file; None: unknown."""
    fails: Callable[[Finding], bool] | None = None
    """Whether a finding outside the baseline fails the gate by itself; None: errors do."""


T = TypeVar("T")
ResultSink = Generator[None, "Result | None", T]
"""A generator that is sent each result, then None; returns what it makes of them."""


def feed_results(results: Iterable[Result], sink: ResultSink[T]) -> T:
    """Send all results to a sink, and return what it returns."""
    try:
        next(sink)
        for result in results:
            sink.send(result)
        sink.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise RuntimeError("a report takes results after the last")


@dataclass(frozen=True, slots=True)
class Report:
    """One report; each file of `reports/` defines one.

    `write` is sent the results one by one, so it need not hold them all; when it is sent None, the summary is
    complete.
    """

    name: str
    title: str
    write: Callable[[Summary, TextIO, ReportOptions], ResultSink[None]]
    observes: bool = False
    """Whether results should come with data for the viewer (`Result.observed`)."""
    suffix: str = "txt"
    """The suffix of its files."""
