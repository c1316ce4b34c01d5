"""NeMo-Gym token capture: `ROLLOUT.tokens.jsonl`, one model call per line, in the order they ended.

NVIDIA-NeMo/Gym `nemo_gym/token_id_capture/records.py` (`TokenEntry`). The messages sent with each call are in the
rollout row of the same rollout id; from version 2 on a line has the length and a digest of its tokens.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._beside import read_beside
from tito_audit.formats._calls import build_turn, model_name, only_text
from tito_audit.formats._columns import lists_or_null, other_columns
from tito_audit.formats._kit import single_calls
from tito_audit.formats._responses import TOKEN_KEYS, nonempty_text, parse_items
from tito_audit.formats._update import with_values
from tito_audit.record.arrays import Ids
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.stated import Stated

_VERSION = 3
_ROUTING = "routed_experts"
_PARTS = ("tool_calls", "reasoning_content", "reasoning")
"""What a chat message holds besides its text."""


def read(row: Row, place: Place) -> Rollout:
    version = row.get("schema_version", _VERSION)
    if type(version) is not int or version < 1:
        raise RecordError("schema_version is not a version of a token capture; versions start at 1")
    if version > _VERSION:
        raise RecordError(
            f"schema_version is {version}, but only versions up to {_VERSION} are known: a newer one may use "
            "these columns differently"
        )
    stated = Stated(model=model_name(row.get("model")), group=nonempty_text(row.get("rollout_id")))
    stated = stated.with_facts(id=nonempty_text(row["model_call_id"]))
    prompt, completion = ((name, row.get(name)) for name in TOKEN_KEYS[:2])
    logprobs = row.get("generation_log_probs")
    items = row["output_items"]
    answers = [step for step in parse_items([] if items is None else list(items), "output_items") if step.is_call]
    cut = any(nonempty_text(item.get("status")) == "incomplete" for step in answers for item in step.items)
    plain = len(answers) == 1 and not any(item.get(part) for item in answers[0].items for part in _PARTS)
    turn = build_turn(
        prompt,
        completion,
        lambda: None if logprobs is None else ("generation_log_probs", logprobs),
        other_columns(row, {*TOKEN_KEYS, "output_items"}),
        completion_text=only_text(answers[0].message) if plain else None,
        finish_reason="length" if cut else None,
        extras=read_beside(row),
    )
    return Rollout(place, FORMAT.name, turns=(turn,), stated=stated)


def update_call(row: Row, before: Rollout, after: RepairedRollout) -> Row:
    """The line with its repaired call, and with the facts about its new tokens."""
    line = _CALLS.write_one(row, before, after)
    old, new = before.turns[0].seen_ids, after.rollout.turns[0].seen_ids
    if old is None or new is None or np.array_equal(old, new):
        return line
    facts: dict[str, Any] = {}
    if row.get(_ROUTING) is not None:
        facts[_ROUTING] = None
    if type(row.get("cum_len")) is int and row["cum_len"] == len(old):
        facts["cum_len"] = len(new)
    if row.get("digest") is not None:
        if nonempty_text(row["digest"]) != _digest(old):
            raise RecordError("the digest does not match these tokens, so none can be written for other tokens")
        facts["digest"] = _digest(new)
    return with_values(line, facts)


def _digest(ids: Ids) -> str:
    """SHA-256 of a sequence, as version 1 of the capture's `compute_digest` has it; ids are never negative."""
    header = struct.pack(">BQ", 1, len(ids)) if len(ids) else b""
    return hashlib.sha256(b"nemo-gym-tokens" + header + ids.astype(">u8").tobytes()).hexdigest()


_CALLS = single_calls(read, "output_items")
FORMAT = Format(
    name="nemo_gym_tokens",
    title="NeMo-Gym token capture",
    signature=Signature("{model_call_id}, {generation_token_ids}, {output_items}"),
    precedence=60,
    matches=lambda row: "model_call_id" in row and lists_or_null(row, "generation_token_ids", "output_items"),
    **replace(_CALLS, write_one=update_call).functions,
    row_is_call=True,
    shows="One call per line: its complete prompt, what was sampled, its logprobs and its text. What it was "
    "sent is in the rollout row with the same rollout id. State files next to the log hold its old "
    "content.",
)
