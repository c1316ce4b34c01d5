"""What a chat template does with a conversation: what it keeps, rewrites, adds and refuses."""

from __future__ import annotations

from tito_audit.templates.appends import AppendOnly, Fate, Step, append_only
from tito_audit.templates.breaks import Altered, Break, Breaks, BreakSide, explained, grouped
from tito_audit.templates.facts import TemplateFacts, template_facts
from tito_audit.templates.probes import CORE, PROBES, Probe, answer_kind
from tito_audit.templates.returns import CutAnswer, Return, Returned
from tito_audit.templates.seams import Seam

__all__ = [
    "CORE",
    "PROBES",
    "Altered",
    "AppendOnly",
    "Break",
    "BreakSide",
    "Breaks",
    "CutAnswer",
    "Fate",
    "Probe",
    "Return",
    "Returned",
    "Seam",
    "Step",
    "TemplateFacts",
    "answer_kind",
    "append_only",
    "explained",
    "grouped",
    "template_facts",
]
