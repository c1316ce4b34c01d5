"""A report: results in, text out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from tito_audit.record.finding import Finding, Result

if TYPE_CHECKING:
    from tito_audit.summary import Summary


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What a person may ask of a report."""

    color: bool = False
    width: int = 100
    worst: int = 10
    """Findings shown in full by the reports for reading."""
    titles: Mapping[str, str] = field(default_factory=dict)
    """What each rule finds, by code; reports do not know the rules."""
    docs: Mapping[str, str] = field(default_factory=dict)
    """The manual of each rule in Markdown, by code."""
    ran: Callable[[str], Collection[str]] | None = None
    """The codes that were asked for of a file; None where that is not known."""
    fails: Callable[[Finding], bool] | None = None
    """Whether a finding that no baseline holds fails by itself; None: an error does."""


@dataclass(frozen=True, slots=True)
class Report:
    """One file of `reports/` defines one of these.

    `write` pulls the results, so a report of a large log needs no list of them; the summary is complete
    once they are used up.
    """

    name: str
    title: str
    write: Callable[[Iterable[Result], Summary, TextIO, ReportOptions], None]
    observes: bool = False
    """Whether results should come with what is observed beside findings (`Result.observed`)."""
    suffix: str = "txt"
    """How files of it are called."""
