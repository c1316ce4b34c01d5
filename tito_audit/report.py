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
    """What each rule finds, by code; reports do not know the rules."""
    docs: Mapping[str, str] = field(default_factory=dict)
    """The manual of each rule in Markdown, by code."""
    ran: Callable[[str], Collection[str]] | None = None
    """The codes that ran on a file; None where that is not known."""
    fails: Callable[[Finding], bool] | None = None
    """Whether a finding that is not in the baseline fails by itself; None: errors do."""


T = TypeVar("T")
Takes = Generator[None, "Result | None", T]
"""What takes results: a generator that is sent each, then None."""


def send_all(results: Iterable[Result], takes: Takes[T]) -> T:
    """Send all results, and return what is made of them."""
    try:
        next(takes)
        for result in results:
            takes.send(result)
        takes.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise RuntimeError("a report takes results after the last")


@dataclass(frozen=True, slots=True)
class Report:
    """One report; each file of `reports/` defines one.

    `write` is sent the results one by one, so a report of a large log never holds them all, then None: the summary
    is complete by then.
    """

    name: str
    title: str
    write: Callable[[Summary, TextIO, ReportOptions], Takes[None]]
    observes: bool = False
    """Whether results should come with data for the viewer (`Result.observed`)."""
    suffix: str = "txt"
    """The suffix of its files."""
