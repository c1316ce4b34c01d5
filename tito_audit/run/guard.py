"""The guard around rules, repairs and reports: one that fails ends the run, which names it and the row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tito_audit.errors import ODD_VALUES, PluginError, TitoAuditError, describe_error
from tito_audit.record.rollout import Place

LEAVE_OUT = "leave the row out of the log"
"""How to go on without what cannot be turned off."""


@contextmanager
def guarded(what: str, place: Place | None, go_on: str) -> Iterator[None]:
    """A block in which a plugin runs: PluginError for anything that it raises by mistake.

    `what` names the plugin, `place` is the rollout that it ran on, and `go_on` says how to go on without it.
    """
    try:
        yield
    except TitoAuditError:
        raise
    except ODD_VALUES as error:
        raise failed(what, place, go_on, error) from error


def failed(what: str, place: Place | None, go_on: str, error: Exception) -> PluginError:
    """The error for a plugin that raised one by mistake; for loops in which a block for each costs too much."""
    where = "" if place is None else f"{place}: "
    return PluginError(
        f"{where}{what} failed: {describe_error(error)}.\n"
        f"This is a bug in tito-audit, not a fault of the log. To go on, {go_on}."
    )
