"""Stage 1: files <-> rows."""

from __future__ import annotations

from tito_audit.storage.find import LOG_SUFFIXES, find_logs
from tito_audit.storage.log import MAX_ROW_BYTES, Log, open_log
from tito_audit.storage.row import RawRow

__all__ = ["LOG_SUFFIXES", "MAX_ROW_BYTES", "Log", "RawRow", "find_logs", "open_log"]
