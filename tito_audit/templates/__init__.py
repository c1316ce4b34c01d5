"""What a chat template does with a conversation: what it keeps, rewrites, adds and refuses."""

from __future__ import annotations

from tito_audit.templates.appends import AppendOnly, Fate, Step, append_only
from tito_audit.templates.breaks import Altered, Break, Breaks, BreakSide, explained, grouped
from tito_audit.templates.facts import Bos, Effect, GenerationPrompt, Setting, Stop, TemplateFacts, template_facts
from tito_audit.templates.probes import CORE, PROBES, Probe, answer_kind
from tito_audit.templates.returns import CutAnswer, Return, Returned
from tito_audit.templates.seams import Content, Seam, Writing, contents

__all__ = [
    "CORE",
    "PROBES",
    "Altered",
    "AppendOnly",
    "Bos",
    "Break",
    "BreakSide",
    "Breaks",
    "Content",
    "CutAnswer",
    "Effect",
    "Fate",
    "GenerationPrompt",
    "Probe",
    "Return",
    "Returned",
    "Seam",
    "Setting",
    "Step",
    "Stop",
    "TemplateFacts",
    "Writing",
    "answer_kind",
    "append_only",
    "contents",
    "explained",
    "grouped",
    "template_facts",
]
