"""Whether a scan passes: known findings (baseline), rates and required coverage."""

from __future__ import annotations

from tito_audit.gate.scan import GatedScan, gate_rollouts

__all__ = ["GatedScan", "gate_rollouts"]
