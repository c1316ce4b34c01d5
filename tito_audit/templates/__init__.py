"""What a chat template does with a conversation: what it keeps, rewrites, adds and refuses."""

from __future__ import annotations

from tito_audit.templates.appends import AppendOnly, Outcome, Step, append_only
from tito_audit.templates.breaks import Break, Breaks, Change, Side, explained, grouped
from tito_audit.templates.facts import Bos, Effect, GenerationPrompt, Setting, Stop, TemplateFacts, template_facts
from tito_audit.templates.probes import CORE, PROBES, Probe, answer_kind
from tito_audit.templates.returns import Partial, Return, Returned
from tito_audit.templates.seams import Content, Seam, Writing, contents

__all__ = [
    "CORE",
    "PROBES",
    "AppendOnly",
    "Bos",
    "Break",
    "Breaks",
    "Change",
    "Content",
    "Effect",
    "GenerationPrompt",
    "Outcome",
    "Partial",
    "Probe",
    "Return",
    "Returned",
    "Seam",
    "Setting",
    "Side",
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
