"""Findings as tables, and runs as notebooks display them."""

from __future__ import annotations

from tito_audit.tables.display import DisplayableRepairs, DisplayableResults
from tito_audit.tables.findings import FindingsBuilder, findings_schema, findings_table

__all__ = ["DisplayableRepairs", "DisplayableResults", "FindingsBuilder", "findings_schema", "findings_table"]
