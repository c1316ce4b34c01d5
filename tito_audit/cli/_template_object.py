"""What `template` found as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tito_audit.cli._template_page import Looked, OfLog
from tito_audit.templates import AppendOnly, Break, Returned, Seam, Side, Step, TemplateFacts
from tito_audit.templates.verdict import claims, flags_of, line_of, title, verdict

if TYPE_CHECKING:
    from tito_audit.render.traced import Tag

SCHEMA_VERSION = 1
_NEAR = 200
"""How many characters are shown before and after a difference."""


def as_object(looked: Looked) -> dict[str, Any]:
    """All facts as one object, with the keys described in the docs."""
    facts = looked.facts
    return {
        "schema_version": SCHEMA_VERSION,
        "template": looked.name,
        "append_only": facts.append.holds,
        "title": title(facts.append),
        "verdict": verdict(facts),
        "answers": _answers(facts.append),
        "breaks": _breaks(facts.breaks),
        "log": _of_log(looked.log) if looked.log is not None else None,
        "sampled": [_returned(one) for one in facts.returned],
        "cut": [{"case": one.case, "outcome": one.outcome, "added": one.added} for one in facts.partial],
        "between": [_seam(one) for one in facts.seams],
        "delimiters": _delimiters(looked),
        "contents": [{"role": one.role, "writing": one.writing, "unlike": one.unlike} for one in facts.contents],
        **_facts(facts),
        "rely_on": [{"what": one.what, "holds": one.holds, "because": one.because} for one in claims(facts)],
        "refusals": [_step(one) | {"reason": one.refusal} for one in facts.append.refused],
    }


def _delimiters(looked: Looked) -> list[dict[str, Any]] | None:
    if looked.delimiters is None:
        return None
    names = ("left", "right", "text", "ids", "seen", "reason")
    return [{name: getattr(one, name) for name in names} for one in looked.delimiters.pairs.values()]


def _facts(facts: TemplateFacts) -> dict[str, Any]:
    opener = facts.generation_prompt
    return {
        "generation_prompt": {"texts": list(opener.texts), "continued": opener.continued},
        "end_tokens": [
            {"text": one.text, "id": one.id, "of_tokenizer": one.of_tokenizer, "written": one.written}
            for one in facts.stops
        ],
        "beginning_token": {
            "text": facts.bos.text,
            "written": facts.bos.written,
            "added": facts.bos.added,
            "doubled": facts.bos.doubled,
        },
        "clock": None if facts.clock_formats is None else list(facts.clock_formats),
        "arguments": [
            {"name": one.name, "value": one.value, "changes": list(one.changes)} for one in facts.effects
        ],
        "settings": [
            {
                "arguments": dict(one.arguments),
                "flags": flags_of(one.arguments),
                "append_only": one.append.holds,
                "broken": len(one.append.broken),
            }
            for one in facts.settings
        ],
    }


def _answers(append: AppendOnly) -> list[dict[str, Any]]:
    """One entry for each kind of answer and each kind of message after it."""
    return [{"answer": kind, "next": after, **_counts(one)} for (kind, after), one in append.by_kind().items()]


def _counts(append: AppendOnly) -> dict[str, int]:
    counts = {"tried": len(append.steps)}
    for step in append.steps:
        counts[step.outcome] = counts.get(step.outcome, 0) + 1
    return counts


def _of_log(log: OfLog) -> dict[str, Any]:
    names = dict.fromkeys(step.probe.name for step in log.append.steps)
    broken = dict.fromkeys(step.probe.name for step in log.append.broken)
    return {
        "rollouts": len(names),
        "broken_rollouts": list(broken),
        "answers": _answers(log.append),
        "breaks": _breaks(log.breaks),
    }


def _breaks(breaks: Sequence[Break]) -> list[dict[str, Any]]:
    return [
        _step(one.step)
        | {
            "change": one.change,
            "line": line_of(one),
            "conditions": [_tag(each.tag) | {"held_when_sampled": each.held} for each in one.conditions],
            "sampled": _side(one.sampled),
            "rendered": _side(one.rendered),
        }
        for one in breaks
    ]


def _step(step: Step) -> dict[str, Any]:
    return {"conversation": step.probe.name, "message": step.answer, "answer": step.kind, "next": step.next}


def _side(side: Side) -> dict[str, Any]:
    tag = _tag(side.tag) if side.tag is not None else None
    return {"before": side.before[-_NEAR:], "text": side.text[:_NEAR], "tag": tag}


def _tag(tag: Tag) -> dict[str, Any]:
    return {"line": tag.line, "column": tag.column, "source": tag.source}


def _returned(one: Returned) -> dict[str, Any]:
    return {
        "part": one.part,
        "case": one.case,
        "form": one.form,
        "outcome": one.outcome,
        "sampled": one.sampled,
        "rendered": one.rendered,
    }


def _seam(seam: Seam) -> dict[str, Any]:
    return {
        "left": seam.left,
        "right": seam.right,
        "texts": list(seam.texts),
        "seen": seam.seen,
        "ids": None if seam.ids is None else list(seam.ids),
        "merges_before": list(seam.merges_before),
        "merges_after": list(seam.merges_after),
    }
