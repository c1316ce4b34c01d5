"""One rollout as an object for scripts: its sequences token by token, and its findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tito_audit.cli._shown import Part, asked_call, wanted_parts
from tito_audit.record.finding import Result
from tito_audit.report_objects import finding_object
from tito_audit.terminal.sequence import Tokens


def rollout_object(
    result: Result, piece: Callable[[int], str] | None, turn: int | None = None, *, row: int | None = None
) -> dict[str, Any]:
    """`{"file", "row", "item", "format", "sequences", "findings", "skipped"}`, for one turn only if it is given.

    A sequence is `{"where", "turn", "ids", "pieces", "trained", "logprobs"}` with one entry per token in each
    column; null for a column that the log lacks, and for the pieces without a tokenizer. A logprob that was not
    recorded, or that JSON cannot hold, is null. Calls that were joined add `"calls"`, the file and row of each
    turn, and `"asked_turn"`, which of them `row` is.
    """
    rollout = result.rollout
    calls = rollout.stated.calls_at if rollout is not None else ()
    joined: dict[str, Any] = {}
    if calls:
        joined["calls"] = [{"file": file, "row": at} for file, at in calls]
        joined["asked_turn"] = asked_call(result, result.place.file, row)
    return {
        "file": result.place.file,
        "row": result.place.row,
        "item": result.place.item,
        "format": rollout.format if rollout is not None else None,
        **joined,
        "sequences": [_sequence(part, piece) for part in wanted_parts(result, turn)],
        "findings": [finding_object(one) for one in result.findings if turn is None or one.hit.turn == turn],
        "skipped": [{"code": skip.code, "because": skip.because} for skip in result.skips],
    }


def _sequence(part: Part, piece: Callable[[int], str] | None) -> dict[str, Any]:
    tokens: Tokens = part.tokens
    ids = tokens.ids.tolist()
    return {
        "where": str(part.where),
        "turn": part.turn,
        "ids": ids,
        "pieces": [piece(one) for one in ids] if piece is not None else None,
        "trained": tokens.trained.tolist() if tokens.trained is not None else None,
        "logprobs": tokens.logprobs.tolist() if tokens.logprobs is not None else None,
    }
