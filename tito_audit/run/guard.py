"""The guard around rules, repairs and reports: the error of a failing plugin names the plugin and the row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tito_audit.errors import ODD_VALUES, PluginError, TitoAuditError, describe_error
from tito_audit.record.rollout import Place

LEAVE_OUT = "leave the row out of the log"
"""The way out where the failing part cannot be turned off."""


@contextmanager
def guard_plugin(what: str, place: Place | None, go_on: str) -> Iterator[None]:
    """A block in which a plugin runs; what it raises by mistake becomes PluginError.

    `what` names the plugin, `place` the rollout that it ran on, `go_on` the way to run without it.
    """
    try:
        yield
    except TitoAuditError:
        raise
    except ODD_VALUES as error:
        raise plugin_error(what, place, go_on, error) from error


def plugin_error(what: str, place: Place | None, go_on: str, error: Exception) -> PluginError:
    """The PluginError of `guard_plugin`, for loops in which a context manager for each plugin costs too much."""
    where = "" if place is None else f"{place}: "
    return PluginError(
        f"{where}{what} failed: {describe_error(error)}.\n"
        f"This is a bug in tito-audit, not a fault of the log. To go on, {go_on}."
    )
