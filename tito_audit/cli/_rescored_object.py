"""What `rescore` found as JSON objects, schema version 1 (`schemas/rescore.schema.json`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tito_audit.record.rollout import Place
from tito_audit.report_objects import finding_object
from tito_audit.rescore.model import EDGES, NEAR, Agreement, Behind, Price, RescoredRollout
from tito_audit.rescore.summary import CausePrice, RescoreSummary
from tito_audit.rescore.write import Written

SCHEMA_VERSION = 1


def summary_object(summary: RescoreSummary) -> dict[str, Any]:
    """Everything about a run except its rollouts."""
    scan, counts, changes = summary.scan, summary.counts, summary.changes
    return {
        "schema_version": SCHEMA_VERSION,
        "provider": summary.provider,
        "model": summary.model,
        "weight_versions": sorted(summary.weight_versions),
        "files": [str(file) for file in scan.files],
        "tokenizer": scan.tokenizer,
        "tokenizer_commits": dict(scan.tokenizer_commits),
        "notices": list(scan.notices),
        "failed": summary.failed,
        "tolerance": summary.tolerance,
        "rollouts": summary.rollouts,
        "scored": summary.scored,
        "rows_unreadable": summary.unreadable,
        "scored_tokens": summary.scored_tokens,
        "missing": summary.missing,
        "disagreeing": summary.disagreeing,
        "agreement": agreement_object(summary.agreement),
        "by_turn": [
            {"turn": None if turn < 0 else turn, **(agreement_object(sums.agreement(summary.tolerance)) or {})}
            for turn, sums in sorted(summary.by_turn.items())
        ],
        "explanations": dict(summary.explanations),
        "causes": [_cause(one) for _, one in sorted(summary.causes.items())],
        "changed": {
            "turns": summary.changed,
            "mean": _number(sum(changes) / len(changes)) if changes else None,
            "lowest": _number(min(changes)) if changes else None,
            "highest": _number(max(changes)) if changes else None,
        },
        "near": [
            {"from": first, **_behind(one)} for first, one in zip(NEAR, summary.near, strict=True) if one.tokens
        ],
        "unpriced": dict(summary.unpriced),
        "unscored": [
            {"because": because, "number": number, **_place(first)}
            for because, (number, first) in summary.unscored.items()
        ],
        "findings": [finding_object(one) for one in summary.findings],
        "requests": {
            "sent": counts.requests,
            "tokens": counts.tokens,
            "spared": counts.saved,
            "refused": counts.failed,
        },
        "seconds": round(summary.seconds, 3),
    }


def rollout_object(result: RescoredRollout) -> dict[str, Any]:
    """One rollout: how its logprobs agree, and the price of each of its drift findings."""
    return {
        **_place(result.place),
        "agreement": agreement_object(result.agreement),
        "explanation": result.explanation or None,
        "scored_tokens": result.scored_tokens,
        "missing": result.missing,
        "weight_versions": list(result.weight_versions),
        "prices": [price_object(one) for one in result.prices],
        "unpriced": dict(result.unpriced),
        "unscored": [
            {"where": str(one.where), "turn": one.turn, "because": one.because} for one in result.unscored
        ],
        "findings": [finding_object(one) for one in result.findings],
        "error": result.error or None,
    }


def written_object(written: Written | None) -> dict[str, Any] | None:
    """What was written; None without -o."""
    if written is None:
        return None
    return {
        "files": [{"log": str(log), "written": str(target)} for log, target in written.files],
        "rows": written.rows,
        "changed": written.changed,
        "refused": dict(written.refused),
    }


def price_object(price: Price) -> dict[str, Any]:
    """A drift finding and what it costs."""
    return {
        "finding": finding_object(price.finding),
        "against": price.against,
        "sampled": _number(price.sampled),
        "other": _number(price.other),
        "difference": _number(price.difference),
        "share": _number(price.share),
        "behind": _behind(price.behind),
        "segments": [
            {
                "sampled_ids": list(one.sampled_ids),
                "other_ids": list(one.other_ids),
                "sampled": _number(one.sampled),
                "other": _number(one.other),
            }
            for one in price.segments
        ],
    }


def agreement_object(found: Agreement | None) -> dict[str, Any] | None:
    """How recorded and model agree; None where nothing could be compared."""
    if found is None:
        return None
    return {
        "tokens": found.tokens,
        "mean": _number(found.mean),
        "size": _number(found.size),
        "largest": _number(found.largest),
        "k1": _number(found.k1),
        "k3": _number(found.k3),
        "above": _by_edge(found.above),
        "disagrees": found.disagrees,
    }


def _cause(one: CausePrice) -> dict[str, Any]:
    return {
        "code": one.code,
        "cause": one.cause,
        "findings": one.findings,
        "segments": one.segments,
        "sampled_tokens": one.sampled_tokens,
        "other_tokens": one.other_tokens,
        "sampled": _number(one.sampled),
        "other": _number(one.other),
        "likelier": one.likelier,
        "lowest": _number(one.lowest),
        "behind": _behind(one.behind),
    }


def _behind(one: Behind) -> dict[str, Any]:
    return {
        "tokens": one.tokens,
        "change": _number(one.total),
        "size": _number(one.size / one.tokens) if one.tokens else None,
        "largest": _number(one.largest),
        "above": _by_edge(one.above),
    }


def _by_edge(values: Sequence[float]) -> dict[str, float]:
    return {f"{edge:g}": value for edge, value in zip(EDGES, values, strict=True)}


def _place(place: Place) -> dict[str, Any]:
    return {"file": place.file, "row": place.row, "item": place.item}


def _number(value: float) -> float | None:
    """The number; None for NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value) else None
