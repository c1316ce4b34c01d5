"""Token-in-token-out, audited: which rows of a rollout log break it, where, why and how badly.

The names below are the whole public surface. Each is imported when it is first used, so that
`import tito_audit` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tito_audit.config import Settings as Settings
    from tito_audit.errors import RecordError as RecordError
    from tito_audit.errors import RenderError as RenderError
    from tito_audit.errors import SetupError as SetupError
    from tito_audit.errors import StorageError as StorageError
    from tito_audit.errors import TitoAuditError as TitoAuditError
    from tito_audit.errors import TokenizerError as TokenizerError
    from tito_audit.pipeline import Scan as Scan
    from tito_audit.pipeline import load_renderer as load_renderer
    from tito_audit.pipeline import read_rollouts as read_rollouts
    from tito_audit.pipeline import scan_rollouts as scan_rollouts
    from tito_audit.record.finding import Finding as Finding
    from tito_audit.record.finding import Hit as Hit
    from tito_audit.record.finding import Result as Result
    from tito_audit.record.finding import Severity as Severity
    from tito_audit.record.finding import Side as Side
    from tito_audit.record.finding import Skip as Skip
    from tito_audit.record.finding import Where as Where
    from tito_audit.record.message import Message as Message
    from tito_audit.record.message import ToolCall as ToolCall
    from tito_audit.record.rollout import Place as Place
    from tito_audit.record.rollout import Rollout as Rollout
    from tito_audit.record.rollout import TrainingRow as TrainingRow
    from tito_audit.record.rollout import Turn as Turn
    from tito_audit.summary import Summary as Summary

__version__ = "0.1.0"

_HOMES = {
    "config": ("Settings",),
    "errors": (
        "RecordError",
        "RenderError",
        "SetupError",
        "StorageError",
        "TitoAuditError",
        "TokenizerError",
    ),
    "pipeline": ("Scan", "load_renderer", "read_rollouts", "scan_rollouts"),
    "record.finding": ("Finding", "Hit", "Result", "Severity", "Side", "Skip", "Where"),
    "record.message": ("Message", "ToolCall"),
    "record.rollout": ("Place", "Rollout", "TrainingRow", "Turn"),
    "summary": ("Summary",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
