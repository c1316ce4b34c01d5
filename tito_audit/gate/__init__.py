"""The gate: whether the logs of a scan pass, what was known before, and how often is too often."""

from __future__ import annotations

from tito_audit.gate.scan import GatedScan, gate_rollouts

__all__ = ["GatedScan", "gate_rollouts"]
