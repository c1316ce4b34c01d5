"""Findings as tables and counts as numbers, for notebooks, data frames and trackers."""

from __future__ import annotations

from tito_audit.tables.findings import FindingsBuilder, findings_schema, findings_table
from tito_audit.tables.metrics import metrics_of
from tito_audit.tables.shown import Shown

__all__ = ["FindingsBuilder", "Shown", "findings_schema", "findings_table", "metrics_of"]
