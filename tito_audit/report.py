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
    """What each rule finds, by code; reports do not know the rules."""
    docs: Mapping[str, str] = field(default_factory=dict)
    """The manual of each rule in Markdown, by code."""
    ran: Callable[[str], Collection[str]] | None = None
    """The codes that ran on a file; None where that is not known."""
    fails: Callable[[Finding], bool] | None = None
    """Whether a finding that is not in the baseline fails by itself; None: errors do."""


@dataclass(frozen=True, slots=True)
class Report:
    """One report; each file of `reports/` defines one.

    `write` pulls the results, so a report of a large log never holds them all. The summary is complete once all
    results are used up.
    """

    name: str
    title: str
    write: Callable[[Iterable[Result], Summary, TextIO, ReportOptions], None]
    observes: bool = False
    """Whether results should come with data for the viewer (`Result.observed`)."""
    suffix: str = "txt"
    """The suffix of its files."""
