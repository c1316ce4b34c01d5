"""The JSON objects of machine-readable reports, schema version 1.

    finding  {"code", "severity", "file", "row", "item", "turn", "where", "start", "end", "cause", "message",
              "recorded": {"ids", "pieces"}, "canonical": {"ids", "pieces"}, "repair", "fingerprint", "known"}
    summary  {"schema_version", "rollouts", "turns", "tokens", "generated_tokens", "rows_unreadable",
              "findings": {CODE: {"error", "warning", "note", "rollouts", "tokens", "known"}},
              "skipped": {CODE: {"rollouts", "because"}}, "formats": {NAME: rollouts}, "tokenizer", "seconds",
              "files", "without_ids", "uncompared", "causes": {CODE: {CAUSE: findings}}, "notices", "encoder",
              "taken": {FILE: {FORMAT: {"rows", "first_row", "told_by"}}}, "sampled": {"share", "rows", "of"},
              "gate"}
    gate     {"failed", "because": [SENTENCE], "fail_on", "failing", "rates": [RATE], "baseline", "known",
              "fixed": [FIXED], "added", "updated"}
    RATE     {"limit", "findings", "of", "rate", "failed"}; "rate" is null where there is nothing to divide by
    FIXED    {"fingerprint", "code", "file", "row", "message", "times"}

"sampled" is null when every row was audited, "gate" when nothing gated the run.
New keys do not raise the version; changing the meaning of a key or removing it does.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import Any

import orjson

from tito_audit.record.finding import Finding, Side
from tito_audit.summary import SCHEMA_VERSION, Gate, Skipped, Summary
from tito_audit.terminal.escape import escaped_json


def finding_object(finding: Finding) -> dict[str, Any]:
    """One finding as the schema writes it."""
    hit = finding.hit
    return {
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
        "recorded": _side(hit.recorded),
        "canonical": _side(hit.canonical),
        "repair": finding.repair,
        "fingerprint": finding.fingerprint,
        "known": finding.known,
    }


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
        "seconds": round(summary.seconds, 3),
        "files": summary.files,
        "without_ids": summary.without_ids,
        "uncompared": summary.uncompared,
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
    }


def as_json(value: Any) -> str:
    """The value as one line of JSON, safe for a terminal.

    Half of a surrogate pair (logs hold it where a character was cut) cannot be written as UTF-8 and becomes its
    escape as text (`\\ud83d`).
    """
    try:
        data = orjson.dumps(value)
    except TypeError:
        data = orjson.dumps(_without_surrogates(value))
    return escaped_json(data.decode())


def _gate(gate: Gate) -> dict[str, Any]:
    """The gate as an object; an infinite rate is null, since JSON cannot express it."""
    said = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(gate).items()}
    for rate in said["rates"]:
        rate["rate"] = rate["rate"] if math.isfinite(rate["rate"]) else None
    return said


def _side(side: Side) -> dict[str, Any]:
    return {"ids": list(side.ids), "pieces": list(side.pieces)}


def _skipped(skipped: Skipped) -> dict[str, Any]:
    """A skipped rule with its most common reason."""
    because = min(skipped.because, key=lambda word: (-skipped.because[word], word), default="")
    return {"rollouts": skipped.rollouts, "because": because}


def _by_count(causes: Counter[str]) -> dict[str, int]:
    return dict(sorted(causes.items(), key=lambda item: (-item[1], item[0])))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    return value
