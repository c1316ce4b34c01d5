"""What a chat template does with a conversation: what it keeps, rewrites, adds and refuses."""

from __future__ import annotations

from tito_audit.templates.appends import AppendOnly, Outcome, Step, append_only
from tito_audit.templates.breaks import Break, Breaks, Change, Side, grouped
from tito_audit.templates.probes import CORE, PROBES, Probe, answer_kind

__all__ = [
    "CORE",
    "PROBES",
    "AppendOnly",
    "Break",
    "Breaks",
    "Change",
    "Outcome",
    "Probe",
    "Side",
    "Step",
    "answer_kind",
    "append_only",
    "grouped",
]
