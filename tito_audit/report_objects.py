"""The JSON objects of machine-readable reports, schema version 1: `schemas/report.schema.json` describes them.

orjson writes them, with dataclasses as they are. msgspec was tried: it writes what orjson cannot (whole numbers of
more than 64 bits), but `1e16` for `1e+16`, which would change the bytes of reports.

New keys do not raise the version; changing the meaning of a key or removing it does.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import orjson

from tito_audit.record.finding import Finding, Severity, Side
from tito_audit.record.mismatch import EDGES, LogMismatch
from tito_audit.summary import SCHEMA_VERSION, CoverageCount, Summary
from tito_audit.terminal.escape import escaped_json

_PLACES = 1_000
"""The most places that the object of a folded finding lists."""


def finding_object(finding: Finding) -> dict[str, Any]:
    """One finding as the schema writes it."""
    hit = finding.hit
    recorded, canonical = hit.labels
    value: dict[str, Any] = {
        "code": finding.code,
        "severity": finding.severity.word,
        **fields(finding.place, "file row item"),
        **fields(hit, "turn where start end cause message"),
        "recorded": {**_side(hit.recorded), "label": recorded},
        "canonical": {**_side(hit.canonical), "label": canonical},
        "context": {"before": _side(hit.before), "after": _side(hit.after)},
        **fields(finding, "repair fingerprint known because_of"),
    }
    if finding.folded is not None:
        folded = fields(finding, "times tokens")
        value["folded"] = {**folded, "places": list(map(list, islice(finding.spans(), _PLACES)))}
    return value


def _side(side: Side) -> dict[str, Any]:
    return {"ids": list(side.ids), "pieces": list(side.pieces)}


def summary_object(summary: Summary) -> dict[str, Any]:
    """The counts of a scan as the schema writes them; codes in order."""
    gate: dict[str, Any] | None = None
    if summary.gate is not None:
        least = summary.gate.min_audited
        gate = fields(summary.gate, " ".join(summary.gate.__slots__))
        gate["required"] = [_covered(count) for count in summary.gate.required]
        gate["min_audited"] = None if least is None else _covered(least)
    compared = {column: mismatch_object(mismatch) for column, mismatch in summary.mismatches.items()}
    return {
        "schema_version": SCHEMA_VERSION,
        **fields(summary, "rollouts turns tokens generated_tokens rows_unreadable"),
        "findings": {
            code: fields(count, "error warning note rollouts tokens known")
            for code, count in sorted(summary.findings.items())
        },
        "skipped": {
            code: {
                "rollouts": skipped.rollouts,
                "because": min(skipped.because, key=lambda word: (-skipped.because[word], word), default=""),
            }
            for code, skipped in sorted(summary.skipped.items())
        },
        "formats": dict(summary.formats.most_common()),
        **fields(summary, "tokenizer tokenizer_commits"),
        "seconds": round(summary.seconds, 3),
        **fields(summary, "files without_ids uncompared open_rows open_beside_faults"),
        "causes": {
            code: dict(sorted(causes.items(), key=lambda cause: (-cause[1], cause[0])))
            for code, causes in sorted(summary.causes.items())
        },
        **fields(summary, "notices encoder"),
        "taken": {
            file: {name: fields(taken, "rows first_row told_by") for name, taken in formats.items()}
            for file, formats in summary.taken.items()
        },
        "sampled": summary.sampled,
        "sft": dict(summary.sft) or None,
        "gate": gate,
        "new": {
            severity.word: sum(count.new[severity] for count in summary.findings.values())
            for severity in sorted(Severity, reverse=True)
        },
        "headlines": [
            {
                "text": headline.words,
                **fields(headline, "times unit error warning note rollouts"),
                "codes": {code: number for code, number in sorted(headline.codes.items()) if number},
            }
            for headline in summary.ranked_headlines()
        ],
        **({"mismatches": compared} if compared else {}),
    }


def mismatch_object(mismatch: LogMismatch) -> dict[str, Any]:
    """Why a trainer's column differs from the sampler's."""
    shares = mismatch.shares
    size = sum(share.size for share in shares.values())
    causes: dict[str, Any] = {}
    for cause, share in shares.items():
        worst = None
        if cause in mismatch.worst:
            place, token = mismatch.worst[cause]
            worst = {**fields(place, "file row item"), **fields(token, "turn at token_id sampler trainer")}
        part = share.size / size if size else 0.0
        causes[cause] = {**fields(share, "tokens size"), "share": part, "worst": worst}
        causes[cause]["notes"] = dict(mismatch.notes.get(cause, ()))
    return {
        **fields(mismatch, "sampler rollouts tokens"),
        "size": size,
        "confident": mismatch.confident,
        "causes": causes,
        **fields(mismatch, "temperature mass truncations"),
        "histogram": {"edges": EDGES, "tokens": mismatch.histogram},
    }


def as_json(value: Any) -> str:
    """The value as one line of JSON, safe for a terminal.

    Dataclasses are objects with the names of their fields. Half of a surrogate pair (logs hold it where a
    character was cut) cannot be written as UTF-8 and becomes its escape as text (`\\ud83d`). Whole numbers of more
    than 64 bits are written in full.
    """
    try:
        data = orjson.dumps(value)
    except TypeError:
        import msgspec

        plain = without_surrogates(msgspec.to_builtins(value))
        try:
            data = orjson.dumps(plain)
        except TypeError:
            data = msgspec.json.encode(plain)
    return escaped_json(data.decode())


def fields(value: object, names: str) -> dict[str, Any]:
    """Some fields or properties of a value by name: `fields(place, "file row item")`."""
    return {name: getattr(value, name) for name in names.split()}


def _covered(count: CoverageCount) -> dict[str, Any]:
    of_rules = "codes idle " if count.codes else ""
    return fields(count, f"{of_rules}share covered of rate because lacking first failed")


def without_surrogates(value: Any) -> Any:
    """The value with half of a surrogate pair, anywhere in it, as its escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_surrogates(item) for item in value]
    return value
