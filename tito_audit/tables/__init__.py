"""Findings as tables, and runs as notebooks display them."""

from __future__ import annotations

from tito_audit.tables.findings import FindingsBuilder, findings_schema, findings_table
from tito_audit.tables.shown import Shown, ShownRepairs

__all__ = ["FindingsBuilder", "Shown", "ShownRepairs", "findings_schema", "findings_table"]
