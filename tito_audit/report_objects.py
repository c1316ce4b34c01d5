"""The JSON objects of machine-readable reports, schema version 1.

    finding  {"code", "severity", "file", "row", "item", "turn", "where", "start", "end", "cause", "message",
              "recorded": SIDE, "canonical": SIDE, "context": {"before": {"ids", "pieces"}, "after": …}, "repair",
              "fingerprint", "known", "because_of"}, and "folded": FOLDED if it stands for several
    FOLDED   {"times", "tokens", "places": [[turn, start, end]]}; at most 1,000 places, the first of them its own
    SIDE     {"ids", "pieces", "label"}
    summary  {"schema_version", "rollouts", "turns", "tokens", "generated_tokens", "rows_unreadable",
              "findings": {CODE: {"error", "warning", "note", "rollouts", "tokens", "known"}},
              "skipped": {CODE: {"rollouts", "because"}}, "formats": {NAME: rollouts}, "tokenizer",
              "tokenizer_commits": {NAME: commit}, "seconds", "files", "without_ids", "uncompared",
              "open_rows", "open_beside_faults", "causes": {CODE: {CAUSE: findings}}, "notices", "encoder",
              "taken": {FILE: {FORMAT: {"rows", "first_row", "told_by"}}}, "sampled": {"share", "rows", "of"},
              "gate", "headlines": [HEADLINE], "new": {"error", "warning", "note"}}
    HEADLINE {"text", "times", "unit", "error", "warning", "note", "rollouts", "codes": {CODE: findings}}
    gate     {"failed", "because": [SENTENCE], "fail_on", "failing", "rates": [RATE], "baseline", "known",
              "fixed": [FIXED], "added", "updated", "required": [REQUIRED], "min_audited"}
    RATE     {"limit", "findings", "of", "rate", "failed"}; "rate" is null where there is nothing to divide by
    REQUIRED {"codes", "idle", "share", "covered", "of", "rate", "because", "lacking", "first": PLACE, "failed"};
              "because" and "first" are null where all are covered
    PLACE    {"file", "row", "item"}
    FIXED    {"fingerprint", "code", "file", "row", "message", "times"}

"sampled" is null when every row was audited, "gate" when nothing gated the run, "min_audited" when no share
was asked for, else a REQUIRED without "codes" and "idle".
New keys do not raise the version; changing the meaning of a key or removing it does.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict
from itertools import islice
from typing import Any

import orjson

from tito_audit.record.finding import Finding, Severity, Side
from tito_audit.summary import SCHEMA_VERSION, CoverageCount, Gate, Headline, Skipped, Summary
from tito_audit.terminal.escape import escaped_json

_PLACES = 1_000
"""The most places that the object of a folded finding lists."""


def finding_object(finding: Finding) -> dict[str, Any]:
    """One finding as the schema writes it."""
    hit = finding.hit
    recorded, canonical = hit.labels
    said: dict[str, Any] = {
        "code": finding.code,
        "severity": finding.severity.word,
        "file": finding.place.file,
        "row": finding.place.row,
        "item": finding.place.item,
        "turn": hit.turn,
        "where": str(hit.where),
        "start": hit.start,
        "end": hit.end,
        "cause": hit.cause,
        "message": hit.message,
        "recorded": _side(hit.recorded) | {"label": recorded},
        "canonical": _side(hit.canonical) | {"label": canonical},
        "context": {"before": _side(hit.before), "after": _side(hit.after)},
        "repair": finding.repair,
        "fingerprint": finding.fingerprint,
        "known": finding.known,
        "because_of": finding.because_of,
    }
    if finding.folded is not None:
        places = islice(finding.spans(), _PLACES)
        said["folded"] = {"times": finding.times, "tokens": finding.tokens, "places": list(map(list, places))}
    return said


def summary_object(summary: Summary) -> dict[str, Any]:
    """The counts of a scan as the schema writes them; codes in order."""
    return {
        "schema_version": SCHEMA_VERSION,
        "rollouts": summary.rollouts,
        "turns": summary.turns,
        "tokens": summary.tokens,
        "generated_tokens": summary.generated_tokens,
        "rows_unreadable": summary.rows_unreadable,
        "findings": {
            code: {
                "error": count.error,
                "warning": count.warning,
                "note": count.note,
                "rollouts": count.rollouts,
                "tokens": count.tokens,
                "known": count.known,
            }
            for code, count in sorted(summary.findings.items())
        },
        "skipped": {code: _skipped(skipped) for code, skipped in sorted(summary.skipped.items())},
        "formats": dict(summary.formats.most_common()),
        "tokenizer": summary.tokenizer,
        "tokenizer_commits": dict(summary.tokenizer_commits),
        "seconds": round(summary.seconds, 3),
        "files": summary.files,
        "without_ids": summary.without_ids,
        "uncompared": summary.uncompared,
        "open_rows": summary.open_rows,
        "open_beside_faults": summary.open_beside_faults,
        "causes": {code: _by_count(causes) for code, causes in sorted(summary.causes.items())},
        "notices": summary.notices,
        "encoder": summary.encoder,
        "taken": {
            file: {
                name: {"rows": taken.rows, "first_row": taken.first_row, "told_by": list(taken.told_by)}
                for name, taken in formats.items()
            }
            for file, formats in summary.taken.items()
        },
        "sampled": None if summary.sampled is None else asdict(summary.sampled),
        "gate": None if summary.gate is None else _gate(summary.gate),
        "new": {
            severity.word: sum(one.new[severity] for one in summary.findings.values())
            for severity in sorted(Severity, reverse=True)
        },
        "headlines": [_headline(one) for one in summary.ranked_headlines()],
    }


def as_json(value: Any) -> str:
    """The value as one line of JSON, safe for a terminal.

    Half of a surrogate pair (logs hold it where a character was cut) cannot be written as UTF-8 and becomes its
    escape as text (`\\ud83d`). Whole numbers of more than 64 bits are written in full.
    """
    try:
        data = orjson.dumps(value).decode()
    except TypeError:
        plain = without_surrogates(value)
        try:
            data = orjson.dumps(plain).decode()
        except TypeError:
            data = json.dumps(_without_nan(plain), ensure_ascii=False, separators=(",", ":"))
    return escaped_json(data)


def _gate(gate: Gate) -> dict[str, Any]:
    """The gate as an object; an infinite rate is null, since JSON cannot express it."""
    said = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(gate).items()}
    for rate in said["rates"]:
        rate["rate"] = rate["rate"] if math.isfinite(rate["rate"]) else None
    said["required"] = [_covered(one) for one in gate.required]
    said["min_audited"] = None if gate.min_audited is None else _covered(gate.min_audited)
    return said


def _covered(count: CoverageCount) -> dict[str, Any]:
    """Required coverage as an object."""
    codes = {"codes": count.codes, "idle": count.idle} if count.codes else {}
    return {
        **codes,
        "share": count.share,
        "covered": count.covered,
        "of": count.of,
        "rate": count.rate,
        "because": count.because,
        "lacking": count.lacking,
        "first": None if count.first is None else asdict(count.first),
        "failed": count.failed,
    }


def _side(side: Side) -> dict[str, Any]:
    return {"ids": list(side.ids), "pieces": list(side.pieces)}


def _headline(headline: Headline) -> dict[str, Any]:
    return {
        "text": headline.words,
        "times": headline.times,
        "unit": headline.unit,
        "error": headline.error,
        "warning": headline.warning,
        "note": headline.note,
        "rollouts": headline.rollouts,
        "codes": {code: number for code, number in sorted(headline.codes.items()) if number},
    }


def _skipped(skipped: Skipped) -> dict[str, Any]:
    """A skipped rule with its most common reason."""
    because = min(skipped.because, key=lambda word: (-skipped.because[word], word), default="")
    return {"rollouts": skipped.rollouts, "because": because}


def _by_count(causes: Counter[str]) -> dict[str, int]:
    return dict(sorted(causes.items(), key=lambda item: (-item[1], item[0])))


def _without_nan(value: Any) -> Any:
    """The value with null for every number that JSON cannot express."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value


def without_surrogates(value: Any) -> Any:
    """The value with half of a surrogate pair, anywhere in it, as its escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    return value
