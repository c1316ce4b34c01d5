"""Answers of inference servers as callers log them, with or without their requests.

One reader for three formats: answers of vLLM, SGLang and OpenAI have the same shape and differ in where they
put token ids. A row is an answer, an answer and its request under two keys, or both merged into one object.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._responses_items import is_response_object
from tito_audit.formats._sources import object_at
from tito_audit.formats._values import as_whole
from tito_audit.record.arrays import Ids, as_ids
from tito_audit.record.edits import Path
from tito_audit.record.rollout import TokenText

FLOOR = -9999.0
"""What OpenAI-style servers write for an unavailable logprob."""

_REQUEST_KEYS = ("request", "input")
_RESPONSE_KEYS = ("response", "output")
_CHOICE_KEYS = ("message", "delta", "token_ids", "logprobs", "finish_reason", "meta_info")
_TOKEN_ID = re.compile(r"token_id:(\d+)")
_TOKEN_ID_START = "token_id:"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One answer (or a list of them) and what is known of its request."""

    request: Mapping[str, Any]
    """Empty if the log holds only answers."""
    responses: tuple[Mapping[str, Any], ...]
    request_paths: tuple[Path, ...] = ()
    """The objects of the row that hold the request's fields, the one that takes precedence first."""
    response_paths: tuple[Path, ...] = ()
    """Where in the row each answer is."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The tokens of a choice."""

    ids: Ids | None
    logprobs: tuple[str, Sequence[Any]] | None
    """The name of their column, and the values."""
    from_meta_info: bool
    """The logprobs are SGLang's, which has no floor."""
    texts: tuple[TokenText, ...] | None
    """Tokens as text if there are no ids."""
    disagreement: str | None
    """How two copies of the ids differ; None if they agree or there is only one."""


def exchange(row: Row) -> Exchange | None:
    """The answer and the request of a row; None if the row has none of the known shapes."""
    if _is_response(row):
        asked = next((key for key in _REQUEST_KEYS if isinstance(row.get(key), Mapping)), None)
        return _exchange(row, asked, {(): row})
    for key in _RESPONSE_KEYS:
        found = _responses(row.get(key), key)
        if found:
            asked = next((k for k in (*_REQUEST_KEYS, "body") if isinstance(row.get(k), Mapping)), None)
            return _exchange(row, asked, found)
    found = _responses(row.get("body"), "body")
    return _exchange(row, None, found) if found else None


def _exchange(row: Row, asked: str | None, found: Mapping[Path, Mapping[str, Any]]) -> Exchange:
    """The answers with the request under the key `asked`; if that is None, the row itself is the request."""
    request, paths = _request(row if asked is None else row[asked], () if asked is None else (asked,))
    return Exchange(request, tuple(found.values()), paths, tuple(found))


def all_choices(found: Exchange) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], int, Path]]:
    """Every choice of every answer: the answer, the choice, its number, and its path in the row."""
    for response, path in zip(found.responses, found.response_paths, strict=True):
        for number, choice in enumerate(choices(response)):
            yield response, choice, number, path if choice is response else (*path, "choices", number)


def choices(response: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The choices of an answer; an SGLang answer without `choices` is its own choice."""
    found = response.get("choices")
    if found is None:
        return (response,)
    if not isinstance(found, list | tuple) or not all(isinstance(choice, Mapping) for choice in found):
        raise RecordError("choices is not a list of answers (objects)")
    if not found:
        raise RecordError("choices is empty: the server gave no answer, so there is nothing to audit")
    if any(choice.get("delta") is not None for choice in found):
        raise RecordError(
            "choices holds a chunk of a stream. Ids and logprobs of one answer are spread over several chunks; "
            "log the joined answer"
        )
    return found


def has_meta_info(found: Exchange) -> bool:
    """True if an answer has the `meta_info` of SGLang, at the top or on its first choice."""
    return any(isinstance(choice.get("meta_info"), Mapping) for choice in _first_choices(found))


def has_server_ids(found: Exchange) -> bool:
    """True if an answer has ids where vLLM puts them: in their own list, or as token strings."""
    if any(response.get("prompt_token_ids") is not None for response in found.responses):
        return True
    return any(
        choice.get("token_ids") is not None
        or choice.get("prompt_token_ids") is not None
        or _is_token_id(_first_token(choice))
        for choice in _first_choices(found)
    )


def generated(choice: Mapping[str, Any]) -> Generated:
    """The tokens of a choice: from its ids, else `token_id:N` strings, else SGLang's triples."""
    name, strings, values = logged_tokens(choice)
    scores = scores_of(choice, "output_token_logprobs")
    copies: dict[str, Ids] = {}
    for key in ("token_ids", "output_ids"):
        if choice.get(key) is not None:
            copies[key] = as_ids(choice[key], key)
    if strings and all(_is_token_id(string) for string in strings):
        copies[name] = as_ids([int(string[len(_TOKEN_ID_START) :]) for string in strings], name)
    if scores is not None:
        copies["meta_info.output_token_logprobs"] = as_ids([token for _, token in scores], "token id")
    logprobs: tuple[str, Sequence[Any]] | None = (name, values) if values is not None else None
    if scores is not None:
        logprobs = ("meta_info.output_token_logprobs", [value for value, _ in scores])
    texts = token_texts(choice.get("logprobs")) if not copies else None
    ids = next(iter(copies.values()), None)
    return Generated(ids, logprobs, scores is not None, texts, _disagreement(copies))


def token_texts(logprobs: object) -> tuple[TokenText, ...] | None:
    """Tokens as strings and bytes, from a chat answer's entries or a completion's parallel lists."""
    entries = logprobs.get("content") if isinstance(logprobs, Mapping) else logprobs
    if isinstance(entries, list | tuple) and entries:
        return tuple(_token_text(entry) for entry in entries)
    tokens = _plain(logprobs.get("tokens")) if isinstance(logprobs, Mapping) else None
    if tokens is None or not isinstance(logprobs, Mapping):
        return None
    values = _plain(logprobs.get("token_logprobs"))
    if values is not None and len(values) != len(tokens):
        raise RecordError(
            f"logprobs.tokens has {len(tokens)} entries and token_logprobs {len(values)}; "
            "without ids nothing says which belongs to which"
        )
    pairs = zip(tokens, values or [None] * len(tokens), strict=True)
    return tuple(TokenText(str(token), None, _number(value)) for token, value in pairs) or None


def is_numbers(value: object) -> bool:
    """True for a list that may be token ids."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1
    return isinstance(value, list) and bool(value) and type(value[0]) is int


def logged_tokens(choice: Mapping[str, Any]) -> tuple[str, list[str], list[Any] | None]:
    """The name of the logprobs' column, their token strings, and the values (None if there are none)."""
    logged = choice.get("logprobs")
    if not isinstance(logged, Mapping):
        return "logprobs", [], None
    content = logged.get("content")
    if isinstance(content, list | tuple):
        entries = [entry for entry in content if isinstance(entry, Mapping)]
        strings = [entry["token"] for entry in entries if isinstance(entry.get("token"), str)]
        return "logprobs.content", strings, [entry.get("logprob") for entry in entries]
    values, tokens = _plain(logged.get("token_logprobs")), _plain(logged.get("tokens"))
    strings = [token for token in tokens or () if isinstance(token, str)]
    return "logprobs.token_logprobs", strings, values


def _plain(value: object) -> list[Any] | None:
    """A list or array as a list of plain values; None for anything else."""
    if isinstance(value, np.ndarray):
        return list(value.tolist())
    return list(value) if isinstance(value, list | tuple) else None


def _token_text(entry: object) -> TokenText:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("token"), str):
        raise RecordError("logprobs.content holds an entry that is not a token: an object with `token`")
    data = entry.get("bytes")
    if data is not None:
        try:
            data = bytes(int(value) for value in data)
        except (TypeError, ValueError, OverflowError):
            raise RecordError("logprobs.content holds `bytes` that are not numbers below 256") from None
    return TokenText(entry["token"], data, _number(entry.get("logprob")))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def scores_of(choice: Mapping[str, Any], name: str) -> list[tuple[Any, Any]] | None:
    """The (logprob, id) pairs of SGLang's `[logprob, id, text]` entries; None if there are none.

    Parquet turns such an entry into an array of floats, from which ids are converted back.
    """
    entries = object_at(choice, "meta_info").get(name)
    if not isinstance(entries, list | tuple):
        return None
    plain = [_plain(entry) for entry in entries]
    pairs = [(entry[0], as_whole(entry[1])) for entry in plain if entry is not None and len(entry) >= 2]
    if len(pairs) != len(plain):
        raise RecordError(f"meta_info.{name} is not a list of [logprob, token id, text]")
    return pairs


def _disagreement(copies: Mapping[str, Ids]) -> str | None:
    """How two copies of one call's ids differ; None if all agree. The first copy is the one that is read."""
    (kept, ids), *others = copies.items() or [("", np.empty(0))]
    for name, other in others:
        if np.array_equal(ids, other):
            continue
        if len(ids) != len(other):
            return f"{kept} has {len(ids)} ids, {name} has {len(other)}"
        at = int(np.flatnonzero(ids != other)[0])
        return f"{kept} has id {ids[at]} at position {at}, {name} has {other[at]}"
    return None


def _responses(value: object, key: str) -> dict[Path, Mapping[str, Any]]:
    """The answers under a key by their paths: an object, one wrapped with its HTTP status, or a list."""
    if isinstance(value, Mapping):
        if _is_response(value):
            return {(key,): value}
        body = value.get("body")
        return {(key, "body"): body} if isinstance(body, Mapping) and _is_response(body) else {}
    listed = value if isinstance(value, list | tuple) else ()
    if not all(isinstance(entry, Mapping) and _is_response(entry) for entry in listed):
        return {}
    return {(key, number): entry for number, entry in enumerate(listed)}


def _is_response(value: Mapping[str, Any]) -> bool:
    if is_response_object(value):
        return True
    listed = value.get("choices")
    if isinstance(listed, list | tuple):
        return _is_choice(listed[0]) if listed else any(key in value for key in ("model", "usage", "object"))
    meta = value.get("meta_info")
    if not isinstance(meta, Mapping):
        return False
    return "output_token_logprobs" in meta or "output_ids" in value or "text" in value


def _is_choice(value: object) -> bool:
    """True for a choice of a server's answer, as opposed to one of a multiple-choice question."""
    return isinstance(value, Mapping) and any(key in value for key in _CHOICE_KEYS)


def _request(value: Mapping[str, Any], path: Path) -> tuple[Mapping[str, Any], tuple[Path, ...]]:
    """The request's fields, taken out of an HTTP wrapper, with what clients send as `extra_body`."""
    body = value.get("body")
    if isinstance(body, Mapping) and not _is_response(body):
        value, path = body, (*path, "body")
    extra = value.get("extra_body")
    if isinstance(extra, Mapping):
        return {**extra, **value}, (path, (*path, "extra_body"))
    return value, (path,)


def _first_choices(found: Exchange) -> list[Mapping[str, Any]]:
    """The first choice of each answer, which is enough to recognize the server."""
    first = []
    for response in found.responses:
        listed = response.get("choices")
        if listed is None:
            first.append(response)
        elif len(listed) and isinstance(listed[0], Mapping):
            first.append(listed[0])
    return first


def _first_token(choice: Mapping[str, Any]) -> object:
    logged = object_at(choice, "logprobs")
    if first := object_at(logged, "content", 0):
        return first.get("token")
    tokens = logged.get("tokens")
    return tokens[0] if isinstance(tokens, list | tuple) and tokens else None


def _is_token_id(value: object) -> bool:
    return isinstance(value, str) and _TOKEN_ID.fullmatch(value) is not None
