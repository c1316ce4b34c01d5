"""What a row holds beyond its rollouts: values that were not read at all (facts), and parts of others.

A value counts as read if a rollout holds it: ids as ids, per-token columns at the place where they were read, text
and numbers of messages and tools under the same kind of key. Everything else is named, so nothing is lost
silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tito_audit.record.arrays import Ids
from tito_audit.record.edits import Path
from tito_audit.record.nesting import load_json
from tito_audit.record.rollout import Rollout
from tito_audit.record.sources import Sources, paths_read

_ID_KEYS = {
    *("completion_ids", "completion_token_ids", "completion_tokens", "generated_ids", "generation_token_ids"),
    *("input_ids", "input_tokens", "output_ids", "output_token_ids", "output_tokens", "prompt_ids"),
    *("prompt_token_ids", "prompt_tokens", "prompts", "response_ids", "response_token_ids", "response_tokens"),
    *("responses", "token_ids", "tokens"),
}
_KIND_OF_KEY = {
    **dict.fromkeys(
        (
            *("content", "input", "instructions", "message", "output", "output_text", "reasoning"),
            *("reasoning_content", "summary", "text", "thinking"),
        ),
        "text",
    ),
    **dict.fromkeys(("id", "call_id", "tool_call_id", "source_call_id"), "call"),
    **dict.fromkeys(("name", "function_name", "tool_name"), "name"),
    **dict.fromkeys(("finish_reason", "stop_reason"), "finish"),
    **dict.fromkeys(("weight_version", "weight_versions", "model_version", "weight_step"), "weights"),
}
"""Keys that mean the same in different formats."""
_LONGEST_KEY = 40
_KEYWORD_KEYS = {"type", "object"}
"""Keys whose values are the format's keywords."""
_BOUND_KEYS = {"cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seqlens_k"}
"""Keys of token counts up to the end of each sample."""
_COUNT_KEYS = {
    *("completion_length", "completion_tokens", "cum_len", "doc_lengths", "doc_lens", "document_lengths"),
    *("input_length", "input_lengths", "input_tokens", "length", "n_input_tokens", "n_output_tokens"),
    *("num_calls", "num_input_tokens", "num_output_tokens", "num_tokens", "num_total_tokens", "num_turns"),
    *("output_tokens", "packed_lengths", "prompt_len", "prompt_length", "prompt_tokens", "response_length"),
    *("sample_lengths", "sample_lens", "seq_lengths", "seq_lens", "seqlens", "sequence_lengths"),
    *("sequence_lens", "total_length", "total_tokens"),
}
"""Keys of counts that follow from the tokens and calls themselves."""
_SPAN_KEYS = {"version", "start", "end"}
"""The keys of a span of tokens that one version of the weights sampled."""
_SCORE_KEYS = {"logprob", "token_id"}
_TEXTS_OF_CALLS = ("completion_text", "text", "response_text", "output_text", "prompt_text")


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What a row holds besides what was read."""

    facts: tuple[Mapping[str, Any], ...]
    """For each rollout, the values of the row that were not read at all, by key."""
    shared: tuple[str, ...]
    """Keys with one value for all rollouts."""
    unread: tuple[str, ...]
    """Paths of values that were read only in part: `response.choices[].index`."""


def row_facts(row: Mapping[str, Any], rollouts: Sequence[Rollout], sources: Sequence[Sources]) -> RowFacts:
    """The facts of a row and its unread parts; null and empty values are ignored.

    `sources` says where the columns of the rollouts were read.
    """
    values = _ValuesRead(rollouts, set(paths_read(sources, rollouts)))
    facts: list[dict[str, Any]] = [{} for _ in rollouts]
    unread: dict[str, None] = {}
    shared: list[str] = []
    # Lists have an entry for each rollout if that is how its ids are listed, or ids of all are in one list.
    lists = [value for value in row.values() if _is_list(value)]
    of_each = (value for value in lists if len(value) == len(rollouts))
    are_of_each = any(all(_is_list(own) and _is_ids(own) for own in value) for value in of_each)
    if not are_of_each and len(rollouts) > 1 and all(each.training_row is not None for each in rollouts):
        total = _row_tokens(rollouts)
        are_of_each = any(len(value) >= total and _is_ids(value) for value in lists)
    for key, value in row.items():
        if value is None or (isinstance(value, list | tuple | dict | np.ndarray) and not len(value)):
            continue
        name = str(key)
        values.reset()
        values.compare(value, name, (_short_key(name),), (key,))
        if values.hits:
            unread |= dict.fromkeys(values.misses)
        elif values.misses:
            own_each = are_of_each and _is_list(value) and len(value) == len(rollouts)
            if not own_each:
                shared.append(name)
            for number, own in enumerate(facts):
                part = value[number] if own_each else value
                if part is not None:
                    own[name] = part
    return RowFacts(tuple(facts), tuple(shared), tuple(unread))


class _ValuesRead:
    """The values that rollouts hold, with which the parts of a row are compared."""

    def __init__(self, rollouts: Sequence[Rollout], places: set[Path]) -> None:
        self.hits = 0
        self.misses: list[str] = []
        self._sequences: list[Ids] = []
        """Every sequence of ids."""
        self._places = places
        """The paths from which columns were read."""
        self._scalars: set[tuple[str, object]] = set()
        self._spans = {span for rollout in rollouts for turn in rollout.turns for span in turn.weight_spans}
        self._counts: set[int] = {len(rollouts)}
        self._scores: set[float] | None = None
        self._rollouts = rollouts
        for rollout in rollouts:
            row = rollout.training_row
            if row is not None:
                self._sequences.append(row.token_ids)
                self._add_lengths(row.token_ids, row.token_ids[row.prompt_length or 0 :])
                if row.prompt_length is not None:
                    self._counts.add(row.prompt_length)
                    self._sequences += [row.token_ids[: row.prompt_length], row.token_ids[row.prompt_length :]]
            self._counts |= {len(rollout.turns), len(rollout.messages)}
            for turn in rollout.turns:
                sequences = [
                    ids for ids in (turn.prompt_ids, turn.completion_ids, turn.seen_ids) if ids is not None
                ]
                self._sequences += sequences
                self._add_lengths(*sequences)
                for name in ("finish_reason", "completion_text", "prompt_text"):
                    self._add_scalars(getattr(turn, name), name)
                self._scalars.update(("text", text) for text in (turn.completion_text,) if text is not None)
                for version in turn.weight_versions:
                    self._scalars.add(("weights", version))
                self._add_scalars([message.wire for message in turn.prompt_messages or ()], "messages")
            self._add_scalars([message.wire for message in rollout.messages], "messages")
            self._add_scalars(rollout.tools, "tools")
            self._add_scalars(rollout.template_kwargs, "template_kwargs")
            self._add_scalars(rollout.stated.model, "model")
        self._counts.add(_row_tokens(rollouts))

    def reset(self) -> None:
        self.hits, self.misses = 0, []

    def compare(self, value: Any, key: str, path: tuple[str, ...], place: Path) -> None:
        """Count the parts of a value that rollouts hold in `hits`, and add the paths of the rest to `misses`."""
        if isinstance(value, Mapping):
            if (
                value.keys() == _SPAN_KEYS
                and tuple(map(value.__getitem__, ("version", "start", "end"))) in self._spans
            ):
                self.hits += 1
                return
            for inner, entry in value.items():
                name = str(inner)
                self.compare(entry, name, (*path, "." + _short_key(name)), (*place, inner))
        elif _is_list(value):
            if not len(value):
                return
            read = any(place[:steps] in self._places for steps in range(1, len(place) + 1))
            # Whether it holds lists or objects is judged by its first and last entries.
            nested = any(isinstance(value[at], Mapping) or _is_list(value[at]) for at in (0, -1))
            if read and not isinstance(value[0], Mapping):
                self.hits += 1
            elif not nested and not isinstance(value[0], str):
                self._record(self._holds_numbers(value, key), path)
            else:
                inside = path if path[-1] == "[]" else (*path, "[]")
                for number, entry in enumerate(value):
                    self.compare(entry, key, inside, (*place, number))
        elif isinstance(value, str) and key in _KEYWORD_KEYS and len(path) > 1:
            return  # a keyword of the format
        elif value is None or (key in _COUNT_KEYS and type(value) is int and value in self._counts):
            return  # nothing, or a count of what the rollouts hold
        else:
            parsed = None
            if (
                isinstance(value, str)
                and value[:1] in ("{", "[")
                and (_kind_of_key(key), value) not in self._scalars
            ):
                with suppress(ValueError):  # JSON in a string, as tables hold nested values
                    parsed = load_json(value)
            if isinstance(parsed, dict | list):
                self.compare(parsed, key, path, place)
            elif key in _SCORE_KEYS and isinstance(value, int | float):
                self._record(float(value) in self._token_numbers(), path)
            else:
                name = key.rsplit(".", 1)[-1]
                if name.isdigit() and "." in key:
                    name = key.split(".")[-2]
                pair = _kind_of_key(name), _hashable(value)
                # Text at the top of a row is a fact, unless a call is known to have written it.
                counts = len(path) > 1 or pair[0] in ("finish", "weights") or key in _TEXTS_OF_CALLS
                self._record(counts and pair in self._scalars, path)

    def _record(self, is_held: bool, path: tuple[str, ...]) -> None:
        if is_held:
            self.hits += 1
        else:
            self.misses.append("".join(path))

    def _holds_numbers(self, value: Any, key: str) -> bool:
        entries = value.tolist() if isinstance(value, np.ndarray) else list(value)
        if key in _COUNT_KEYS and all(type(entry) is int and entry in self._counts for entry in entries):
            return True
        if key in _BOUND_KEYS and all(type(entry) is int for entry in entries):
            return all(after - before in (0, *self._counts) for before, after in pairwise(entries))
        if key != "bytes" and set(map(type, entries)) <= {int}:
            if key == "attention_mask":
                return sum(entry > 0 for entry in entries) in self._counts
            if key == "position_ids":
                return all(after - before in (0, 1) for before, after in pairwise(entries))
            if max(entries) > np.iinfo(np.int32).max or min(entries) < 0:
                return False
            ids = np.array(entries, np.int32)
            named = key.rsplit(".", 1)[-1] in _ID_KEYS
            for whole in self._sequences:
                if np.array_equal(whole, ids) and (named or len(ids) > 2):
                    return True
                if named and (_is_slice_of(ids, whole) or _is_slice_of(whole, ids)):
                    return True
            return False
        if len(entries) == 3 and isinstance(entries[0], float):  # SGLang's [logprob, id, text]
            return entries[0] in self._token_numbers() and entries[2] is None
        return False

    def _token_numbers(self) -> set[float]:
        """Every logprob and id, for logs that hold an object per token."""
        if self._scores is None:
            numbers: set[float] = set()
            for rollout in self._rollouts:
                row = rollout.training_row
                if row is not None:
                    numbers.update(row.token_ids.tolist(), [] if row.logprobs is None else row.logprobs.tolist())
                for turn in rollout.turns:
                    for values in (turn.completion_ids, turn.completion_logprobs):
                        numbers.update([] if values is None else values.tolist())
            self._scores = numbers
        return self._scores

    def _add_lengths(self, *sequences: Ids) -> None:
        self._counts.update(len(ids) for ids in sequences)

    def _add_scalars(self, value: Any, key: str) -> None:
        """Add every scalar inside a value, under the kind of its key."""
        if isinstance(value, Mapping):
            for name, entry in value.items():
                self._add_scalars(entry, str(name))
        elif _is_list(value):
            for entry in value:
                self._add_scalars(entry, key)
        elif value is not None:
            self._scalars.add((_kind_of_key(key), _hashable(value)))


def _short_key(key: str) -> str:
    """A key, cut for a path: some logs use whole texts as keys."""
    return key if len(key) <= _LONGEST_KEY else f"{key[: _LONGEST_KEY - 1]}…"


def _kind_of_key(key: str) -> str:
    """What a key means, the same word for keys that mean the same in different formats."""
    return _KIND_OF_KEY.get(key, key)


def _hashable(value: Any) -> object:
    """A scalar to look up; numbers as text, as some logs write them."""
    return value if isinstance(value, str | bool) else str(value)


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple | np.ndarray)


def _row_tokens(rollouts: Sequence[Rollout]) -> int:
    return sum(len(rollout.training_row.token_ids) for rollout in rollouts if rollout.training_row is not None)


def _is_ids(value: Iterable[Any]) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu"
    entries = list(value)
    return bool(entries) and all(type(entry) is int for entry in entries[:4])


def _is_slice_of(part: Ids, whole: Ids) -> bool:
    if not 0 < len(part) <= len(whole):
        return False
    data, wanted = whole.tobytes(), part.tobytes()
    at = data.find(wanted)
    while at >= 0 and at % 4:
        at = data.find(wanted, at + 1)
    return at >= 0
