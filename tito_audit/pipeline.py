"""Read, gather, check: the flow from logs to results, and the only module that knows every room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tito_audit.config import Settings
from tito_audit.record.finding import Result
from tito_audit.summary import Summary

__all__ = ["Scan", "scan_rollouts"]


class Scan:
    """Results of logs, one rollout after the other; `summary` is complete once they are used up."""

    def __init__(self, logs: Sequence[str], settings: Settings) -> None:
        self.logs = logs
        self.settings = settings
        self.summary = Summary()

    def __iter__(self) -> Iterator[Result]:
        raise NotImplementedError


def scan_rollouts(logs: Sequence[str], settings: Settings | None = None) -> Scan:
    """The audit of logs (files, folders, globs), as results that are computed while they are read."""
    return Scan(logs, settings or Settings())
