"""What `identify` found as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tito_audit.cli._identified import Outcome, command
from tito_audit.identify import Explanation, Found, Left
from tito_audit.identify.ids_alone import IdsAlone

_SCHEMA_VERSION = 1


def as_object(outcome: Outcome) -> dict[str, Any]:
    """Everything as one object; its keys are described in docs/identify.md."""
    found = outcome.found
    best = found.best
    fits = {one.tokenizer: one for one in found.tokenizers}
    return {
        "schema_version": _SCHEMA_VERSION,
        "sure": found.sure,
        "because": found.lack.value if found.lack is not None else found.unsure_because,
        "explanations": [_found(one) for one in found.found],
        "command": command(outcome, best.explanation) if best is not None else None,
        "left": [_left(one) for one in found.left],
        "endings": [asdict(one) for one in found.endings],
        "tokenizers": [
            {
                "name": candidate.tokenizer.name,
                "from": because,
                "templates": [template.label for template in candidate.templates],
                "fits": fits[name].fits if (name := candidate.tokenizer.name) in fits else None,
                "because": fits[name].because if name in fits else "",
            }
            for candidate, because in zip(outcome.candidates.tried, outcome.candidates.because, strict=True)
        ],
        "passed_over": [asdict(one) for one in outcome.candidates.passed_over],
        "rows": {
            "read": outcome.first.rows,
            "unreadable": len(outcome.first.unreadable),
            "all": not outcome.first.stopped,
        },
        "prompts": {"searched": found.rows_searched, "compared": found.rows_confirmed},
        "ids": _alone(outcome.alone),
    }


def _found(found: Found) -> dict[str, Any]:
    return {
        **_explanation(found.explanation),
        "share": asdict(found.share),
        "equal": [_explanation(one) for one in found.equal],
        "undetermined": list(found.undetermined),
    }


def _explanation(one: Explanation) -> dict[str, Any]:
    return {
        "tokenizer": one.tokenizer,
        "template": {
            "label": one.template.label,
            "chat_template": one.template.chat_template,
            "template_name": one.template.template_name,
        },
        "template_args": dict(one.template_args),
        "tool_arguments": one.tool_arguments,
        "clock": one.clock.isoformat() if one.clock is not None else None,
        "without_tools": one.without_tools,
        "departures": [
            {"kind": each.kind.value, "text": each.text, "values": list(each.values)} for each in one.departures
        ],
        "flags": list(one.flags()),
        "config": dict(one.config()),
    }


def _left(one: Left) -> dict[str, Any]:
    place = {"file": one.place.file, "row": one.place.row, "item": one.place.item}
    return {"cause": one.cause, "number": one.number, **place, "turn": one.turn}


def _alone(alone: IdsAlone | None) -> Mapping[str, Any] | None:
    if alone is None:
        return None
    families = [
        {
            "name": seen.family.name,
            "size": seen.family.size,
            "sequences": seen.sequences,
            "marks": {str(one): text for one, text in seen.family.marks.items()},
        }
        for seen in alone.families
    ]
    ends = [{"id": one, "turns": number} for one, number in alone.ends]
    counted = {
        name: getattr(alone, name) for name in ("sequences", "ids", "distinct", "smallest", "largest", "turns")
    }
    return {**counted, "opening": list(alone.opening), "ends": ends, "families": families}
