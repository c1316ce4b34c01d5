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


def finding_object(finding: Finding) -> dict[str, Any]:
    """A finding, as in the schema."""
    hit = finding.hit
    recorded, canonical = hit.labels
    value: dict[str, Any] = {
        "code": finding.code,
        "severity": finding.severity.word,
        **pick(finding.place, "file row item"),
        **pick(hit, "turn where start end cause message"),
        "recorded": {**_side_object(hit.recorded), "label": recorded},
        "canonical": {**_side_object(hit.canonical), "label": canonical},
        "context": {"before": _side_object(hit.before), "after": _side_object(hit.after)},
        **pick(finding, "repair fingerprint known because_of"),
    }
    if finding.folded is not None:
        places = [list(span) for span in islice(finding.spans(), 1_000)]  # the schema's maximum
        value["folded"] = {**pick(finding, "times tokens"), "places": places}
    return value


def _side_object(side: Side) -> dict[str, Any]:
    return {"ids": list(side.ids), "pieces": list(side.pieces)}


def summary_object(summary: Summary) -> dict[str, Any]:
    """The counts of a scan, as in the schema, with codes in order."""
    gate: dict[str, Any] | None = None
    if summary.gate is not None:
        least = summary.gate.min_audited
        gate = pick(summary.gate, " ".join(summary.gate.__slots__))
        gate["required"] = [_coverage_object(count) for count in summary.gate.required]
        gate["min_audited"] = None if least is None else _coverage_object(least)
    compared = {column: mismatch_object(mismatch) for column, mismatch in summary.mismatches.items()}
    return {
        "schema_version": SCHEMA_VERSION,
        **pick(summary, "rollouts turns tokens generated_tokens rows_unreadable"),
        "findings": {
            code: pick(count, "error warning note rollouts tokens known")
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
        **pick(summary, "tokenizer tokenizer_commits"),
        "seconds": round(summary.seconds, 3),
        **pick(summary, "files without_ids uncompared open_rows open_beside_faults"),
        "causes": {
            code: dict(sorted(causes.items(), key=lambda cause: (-cause[1], cause[0])))
            for code, causes in sorted(summary.causes.items())
        },
        **pick(summary, "notices encoder"),
        "taken": {
            file: {name: pick(count, "rows first_row told_by") for name, count in formats.items()}
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
                **pick(headline, "times unit error warning note rollouts"),
                "codes": {code: number for code, number in sorted(headline.codes.items()) if number},
            }
            for headline in summary.ranked_headlines()
        ],
        **({"mismatches": compared} if compared else {}),
    }


def mismatch_object(mismatch: LogMismatch) -> dict[str, Any]:
    """Why a trainer's column differs from the sampler's, as in the schema."""
    shares = mismatch.shares
    size = sum(share.size for share in shares.values())
    causes: dict[str, Any] = {}
    for cause, share in shares.items():
        worst = None
        if cause in mismatch.worst:
            place, token = mismatch.worst[cause]
            worst = {**pick(place, "file row item"), **pick(token, "turn at token_id sampler trainer")}
        part = share.size / size if size else 0.0
        causes[cause] = {**pick(share, "tokens size"), "share": part, "worst": worst}
        causes[cause]["notes"] = dict(mismatch.notes.get(cause, ()))
    return {
        **pick(mismatch, "sampler rollouts tokens"),
        "size": size,
        "confident": mismatch.confident,
        "causes": causes,
        **pick(mismatch, "temperature mass truncations"),
        "histogram": {"edges": EDGES, "tokens": mismatch.histogram},
    }


def as_json(value: Any) -> str:
    """The value as one line of JSON, safe for a terminal; dataclasses are objects.

    Half a surrogate pair, which logs hold where a character was cut, has no UTF-8 and becomes its escape as text
    (`\\ud83d`). Integers of more than 64 bits are written in full.
    """
    try:
        data = orjson.dumps(value)
    except TypeError:
        import msgspec

        plain = escape_surrogates(msgspec.to_builtins(value))
        try:
            data = orjson.dumps(plain)
        except TypeError:
            data = msgspec.json.encode(plain)
    return escaped_json(data.decode())


def pick(value: object, names: str) -> dict[str, Any]:
    """Some fields or properties of a value by name: `fields(place, "file row item")`."""
    return {name: getattr(value, name) for name in names.split()}


def _coverage_object(count: CoverageCount) -> dict[str, Any]:
    of_rules = "codes idle " if count.codes else ""
    return pick(count, f"{of_rules}share covered of rate because lacking first failed")


def escape_surrogates(value: Any) -> Any:
    """The value with every unpaired surrogate in its texts written as its escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {escape_surrogates(key): escape_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escape_surrogates(item) for item in value]
    return value
