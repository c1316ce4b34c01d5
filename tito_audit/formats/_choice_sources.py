"""Where a server's answer holds a call: every copy of its prompt and of its logprobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tito_audit.format import Row
from tito_audit.formats._responses_log import Exchange, all_choices, exchange, is_numbers, logged_tokens, scores_of
from tito_audit.formats._sources import at, object_at, of_calls, plain_sources, same_as
from tito_audit.formats._turn_change import logged_logprobs
from tito_audit.record.arrays import Ids, Logprobs
from tito_audit.record.edits import Path
from tito_audit.record.rollout import Rollout, Turn
from tito_audit.record.sources import CallSource, Counter, Layout, Source, Sources

ONE_CALL = "an answer holds a single call, which cannot be left out"
_PROMPT_KEYS = ("prompt_token_ids", "input_ids", "token_ids", "prompt")
_SCORES = "output_token_logprobs"
_PARTS = ("", "meta_info", "usage")
"""Where prompt data may be: the answer or choice itself, and the objects in it."""


def choice_sources(row: Row, rollouts: Sequence[Rollout], within: Path = ()) -> Sequence[Sources]:
    """The source of each choice of the answers in the row, or in the object at `within`."""
    found = exchange(at(row, within))
    if found is not None and within:
        asked, answered = (
            tuple((*within, *path) for path in paths) for paths in (found.request_paths, found.response_paths)
        )
        found = replace(found, request_paths=asked, response_paths=answered)
    listed = list(all_choices(found)) if found is not None else []
    return of_calls(
        [
            choice_source(row, found, path if choice is response else path[:-2], path, turn)
            for turn in rollout.turns
            if found is not None
        ]
        for (response, choice, _, path), rollout in zip(listed, rollouts, strict=True)
    )


def choice_source(row: Row, found: Exchange, above: Path, path: Path, turn: Turn) -> CallSource:
    """The source of the choice at `path`, in the answer at `above`, with every copy that the row holds."""
    holders = list(dict.fromkeys((above, path)))
    inner = [(*holder, part) if part else holder for holder in holders for part in _PARTS]
    inner = [one for one in inner if object_at(row, *one)]
    return CallSource(
        prompts=plain_sources(_prompts(row, found, holders, turn.prompt_ids)),
        logprobs=tuple(_logprobs(at(row, path), path, logged_logprobs(turn))),
        columns={name: (Source((*path, name)),) for name in at(row, path)},
        routing=tuple((*one, "routed_experts") for one in inner if "routed_experts" in at(row, one)),
        counters=tuple(map(Counter, inner)),
        scored=any(_is_scored(at(row, holder)) for holder in holders),
    )


def _prompts(row: Row, found: Exchange, holders: Sequence[Path], prompt: Ids | None) -> Iterator[Path]:
    """Every copy of the prompt: in the answer, the choice and the request, also if that has a batch of prompts."""
    for holder in dict.fromkeys((*holders, *found.request_paths)):
        for name in _PROMPT_KEYS if holder in found.request_paths else _PROMPT_KEYS[:1]:
            value = at(row, holder).get(name)
            if is_numbers(value):
                if same_as(value, prompt):
                    yield (*holder, name)
            elif isinstance(value, list) and name == "prompt":
                for number, entry in enumerate(value):
                    if is_numbers(entry) and same_as(entry, prompt):
                        yield (*holder, name, number)


def _logprobs(choice: Mapping[str, Any], path: Path, logged: Logprobs | None) -> Iterator[Source]:
    """Every copy of the logprobs: OpenAI's entries, its parallel lists, SGLang's triples."""
    scores = scores_of(choice, _SCORES)
    if scores is not None and same_as([value for value, _ in scores], logged):
        yield Source((*path, "meta_info", _SCORES), Layout.TRIPLES)
    name, _, values = logged_tokens(choice)
    if same_as(values, logged):
        if name == "logprobs.content":
            yield Source((*path, "logprobs", "content"), Layout.ENTRIES)
        else:
            yield Source((*path, "logprobs"), Layout.PARALLEL)


def _is_scored(holder: Mapping[str, Any]) -> bool:
    """Whether the server scored the prompt."""
    scores = object_at(holder, "meta_info").get("input_token_logprobs")
    return scores is not None or holder.get("prompt_logprobs") is not None
