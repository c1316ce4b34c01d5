"""Rows of a log for programs that write their own: as dataclasses, and as dicts.

They are read as `generic`, and their JSON schema is `schemas/record.schema.json`. This module imports nothing but
the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict


def record_digest(source: str | bytes | Path) -> str:
    """The SHA-256 of a file, a text or bytes: of tokenizer.json and of the chat template's text."""
    from hashlib import sha256

    data = source.read_bytes() if isinstance(source, Path) else source
    return sha256(data.encode() if isinstance(data, str) else data).hexdigest()


class CallRow(TypedDict, total=False):
    """One call of the model, as a row of a log holds it."""

    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    finish_reason: str
    weight_version: str | int
    sampling_params: Mapping[str, Any]
    routed_experts: Any
    sampling_mask: Sequence[Sequence[int]]


class RolloutRow(TypedDict, total=False):
    """One rollout, as a line of a log holds it."""

    tito_record: int
    """The version of the record, 1; it rises when a key changes its meaning or is removed."""
    id: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    calls: Sequence[CallRow]
    token_ids: Sequence[int]
    loss_mask: Sequence[float]
    logprobs: Sequence[float | None]
    reward: float
    model: str
    weight_version: str | int
    sampling_params: Mapping[str, Any]
    tokenizer_digest: str
    template_digest: str
    chat_template_kwargs: Mapping[str, Any]


@dataclass(slots=True)
class CallRecord:
    """One call of the model: what it was given, and what it sampled."""

    prompt_token_ids: Sequence[int]
    """The ids that the sampler was given, all of them."""
    completion_token_ids: Sequence[int]
    """The ids that it returned, with the token that ended the answer."""
    logprobs: Sequence[float | None] | None = None
    """The sampler's logprob of each of these; None for one that is unknown."""
    finish_reason: str | None = None
    """Why it ended: `stop`, `length`, `tool_calls`."""
    weight_version: str | int | None = None
    """The weights that sampled it."""
    sampling_params: Mapping[str, Any] | None = None
    """`temperature`, `top_p` and `top_k`, if not those of the rollout."""
    routed_experts: Any = None
    """`[tokens, layers, k]` the experts of each token, for a model that has them."""
    sampling_mask: Sequence[Sequence[int]] | None = None
    """For each sampled token, the ids that top-p and top-k kept."""


@dataclass(slots=True)
class RolloutRecord:
    """One rollout: a line of a log is `record.row()` as JSON."""

    calls: Sequence[CallRecord] = ()
    """Each call of the model, in order."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The conversation as the chat template was given it, with the answers."""
    tools: Sequence[Mapping[str, Any]] = ()
    token_ids: Sequence[int] | None = None
    """The training row, if a trainer was given one: every token."""
    loss_mask: Sequence[float] | None = None
    """1 where a token was sampled and is trained, else 0."""
    logprobs: Sequence[float | None] | None = None
    """The sampler's logprobs, None where nothing was sampled."""
    reward: float | None = None
    model: str | None = None
    """The model, with its revision if it has one."""
    weight_version: str | int | None = None
    """The weights that sampled all calls, unless these say it."""
    sampling_params: Mapping[str, Any] | None = None
    """`temperature`, `top_p` and `top_k` of all calls, unless these say it."""
    tokenizer_digest: str | None = None
    """The SHA-256 of tokenizer.json."""
    template_digest: str | None = None
    """The SHA-256 of the chat template's text."""
    id: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of the row."""

    def row(self) -> RolloutRow:
        """The rollout as a row; what is None or empty is left out."""
        values = _without_empty(self)
        calls = {"calls": [_without_empty(call) for call in self.calls]} if self.calls else {}
        row: Any = {"tito_record": 1, **values.pop("more", {}), **values, **calls}
        return row  # type: ignore[no-any-return]


def _without_empty(record: CallRecord | RolloutRecord) -> dict[str, Any]:
    """The fields that are not None or empty; the ids of a call may be empty."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    empty = {name for name, value in values.items() if isinstance(value, tuple | list | dict) and not value}
    empty -= {"prompt_token_ids", "completion_token_ids"}
    return {name: value for name, value in values.items() if value is not None and name not in empty}
