"""An answer of a server written again: every copy that it holds of a call's prompt and of its logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._responses_log import Exchange, answers, exchange, is_numbers, logged_tokens, scores_of
from tito_audit.formats._turn_change import (
    Change,
    Read,
    changes_of,
    recounted,
    rollouts_before,
    same_floats,
    same_ids,
    says_this,
)
from tito_audit.formats._update import as_logged, at_most_one_each
from tito_audit.record.arrays import Ids, Logprobs, as_floats, as_ids
from tito_audit.record.edits import Edit, Path, with_edits
from tito_audit.record.repaired import RepairedRollout

__all__ = ["choice_edits", "entry_edits", "updated_choices", "updated_with"]

Edits = Callable[[int, Mapping[int, Change]], Iterator[Edit]]

_PROMPT_KEYS = ("prompt_token_ids", "input_ids", "token_ids", "prompt")
_SCORES = "output_token_logprobs"


def updated_choices(row: Row, mended: Sequence[RepairedRollout], read: Read) -> Row:
    """The row with what the rollouts say, one for each choice; itself when they say nothing new."""
    found = exchange(row)
    listed = list(answers(found)) if found is not None else []

    def edits(item: int, changes: Mapping[int, Change]) -> Iterator[Edit]:
        response, choice, _, path = listed[item]
        for change in changes.values():
            assert found is not None
            yield from choice_edits(row, found, path if choice is response else path[:-2], path, change)

    return updated_with(row, mended, read, edits)


def choice_edits(row: Row, found: Exchange, above: Path, path: Path, change: Change) -> Iterator[Edit]:
    """The edits for one choice at `path` of the answer at `above`, in every copy that the row holds."""
    choice = _at(row, path)
    if change.prompt_ids is not None:
        yield from _prompt_edits(row, found, above, path, change, change.prompt_ids)
    if change.logprobs is not None:
        yield from _logprob_edits(choice, path, change, change.logprobs)
    yield from _column_edits(choice, path, change)


def updated_with(row: Row, mended: Sequence[RepairedRollout], read: Read, edits: Edits) -> Row:
    """The row with the edits that each changed rollout asks for; RecordError when it then reads otherwise."""
    before = rollouts_before(row, mended, read)
    chosen = at_most_one_each(before, mended)
    made: dict[Path, Any] = {}
    for item, (rollout, one) in enumerate(zip(before, chosen, strict=True)):
        if len(one.turns_from) != len(rollout.turns):
            raise RecordError("an answer holds one call; leaving it out would leave nothing")
        changes = changes_of(rollout, one)
        for edit in edits(item, changes) if changes else ():
            if edit.path in made and not _same_value(made[edit.path], edit.value):
                raise RecordError(
                    f"{_words(edit.path)} belongs to several choices, which should have different ones from now on"
                )
            made[edit.path] = edit.value
    if not made:
        return row
    new: Row = with_edits(row, [Edit(path, value) for path, value in made.items()])
    for rollout, one, was in zip(read(new, before[0].place), chosen, before, strict=True):
        says_this(rollout, one, was)
    return new


def entry_edits(entries: Sequence[Any], path: Path, old: Logprobs, new: Logprobs) -> Iterator[Edit]:
    """The entries of a chat answer (objects with a `logprob`) with other logprobs."""
    if len(new) != len(old):
        start = _kept_from(old, new, [])
        yield Edit(path, list(entries[start : start + len(new)]))
        return
    was = [entry.get("logprob") for entry in entries]
    values = as_logged(new, was)
    if values is not was:
        yield Edit(
            path,
            [
                entry if value is before or _both_unknown(value, before) else {**entry, "logprob": value}
                for entry, value, before in zip(entries, _kept_objects(values, was), was, strict=True)
            ],
        )


def _prompt_edits(
    row: Row, found: Exchange, above: Path, path: Path, change: Change, prompt: Ids
) -> Iterator[Edit]:
    """Every copy of the prompt; what a server computed from the old one cannot stay."""
    old = change.before.prompt_ids
    assert old is not None
    for holder_path in dict.fromkeys((above, path)):
        holder = _at(row, holder_path)
        meta = holder.get("meta_info")
        scored = meta.get("input_token_logprobs") if isinstance(meta, Mapping) else None
        if scored is not None or holder.get("prompt_logprobs") is not None:
            raise RecordError("the server scored the prompt as it was, and nobody scored the one it should be")
        for part in ("", "meta_info", "usage"):
            inner_path = (*holder_path, part) if part else holder_path
            inner = holder.get(part) if part else holder
            if isinstance(inner, Mapping):
                if inner.get("routed_experts") is not None:
                    yield Edit((*inner_path, "routed_experts"), None)
                yield from _count_edits(inner, inner_path, change)
    for holder_path in dict.fromkeys((above, path, *found.request_paths)):
        names = _PROMPT_KEYS if holder_path in found.request_paths else _PROMPT_KEYS[:1]
        for name in names:
            yield from _copies(_at(row, holder_path).get(name), (*holder_path, name), old, prompt)


def _copies(value: Any, path: Path, old: Ids, new: Ids) -> Iterator[Edit]:
    """The value if it is the old prompt, or those entries of a batch that are."""
    if is_numbers(value):
        if same_ids(as_ids(value, str(path[-1])), old):
            yield Edit(path, as_logged(new, value))
    elif isinstance(value, list) and path[-1] == "prompt":
        for number, entry in enumerate(value):
            if is_numbers(entry) and same_ids(as_ids(entry, "prompt"), old):
                yield Edit((*path, number), as_logged(new, entry))


def _count_edits(holder: Mapping[str, Any], path: Path, change: Change) -> Iterator[Edit]:
    old, new = change.before.prompt_ids, change.after.prompt_ids
    sampled = change.before.completion_ids
    completion = 0 if sampled is None else len(sampled)
    assert old is not None
    assert new is not None
    for name, value in recounted(holder, [(len(old), completion)], [(len(new), completion)]).items():
        yield Edit((*path, name), value)


def _logprob_edits(choice: Mapping[str, Any], path: Path, change: Change, new: Logprobs) -> Iterator[Edit]:
    """Every copy of the logprobs: OpenAI's entries, its parallel lists, SGLang's triples."""
    old = change.recorded_logprobs
    assert old is not None
    edits: list[Edit] = []
    scores = scores_of(choice, _SCORES)
    if scores is not None and same_floats(_floats([value for value, _ in scores]), old):
        at = (*path, "meta_info", _SCORES)
        edits += _triple_edits(choice["meta_info"][_SCORES], at, old, new, change.before.completion_ids)
    name, _, values = logged_tokens(choice)
    if values is not None and same_floats(_floats(values), old):
        logged = choice["logprobs"]
        if name == "logprobs.content":
            edits += entry_edits(logged["content"], (*path, "logprobs", "content"), old, new)
        else:
            edits += _parallel_edits(logged, (*path, "logprobs"), old, new)
    if not edits:
        raise RecordError("the log has these logprobs in no form that can be written")
    yield from edits


def _triple_edits(
    entries: Sequence[Any], path: Path, old: Logprobs, new: Logprobs, completion: Ids | None
) -> Iterator[Edit]:
    """`[logprob, id, text]` entries with other logprobs; each keeps its id and its text."""
    if len(new) != len(old):
        ids = [int(entry[1]) for entry in entries]
        start = _kept_from(old, new, [] if completion is None else [(ids, completion.tolist())])
        yield Edit(path, list(entries[start : start + len(new)]))
        return
    was = [entry[0] for entry in entries]
    values = _kept_objects(as_logged(new, was), was)
    yield Edit(path, [_scored(entry, value) for entry, value in zip(entries, values, strict=True)])


def _scored(entry: Any, value: Any) -> Any:
    """One triple with another logprob, as the kind of list it is."""
    if value is entry[0] or _both_unknown(value, entry[0]):
        return entry
    if isinstance(entry, np.ndarray) and entry.dtype.kind == "f":
        return np.array([np.nan if value is None else value, *entry[1:].tolist()], entry.dtype)
    rest = entry[1:].tolist() if isinstance(entry, np.ndarray) else entry[1:]
    return [value, *rest]


def _parallel_edits(logged: Mapping[str, Any], path: Path, old: Logprobs, new: Logprobs) -> Iterator[Edit]:
    """The lists of a completion's logprobs: an entry that goes takes those beside it along."""
    if len(new) == len(old):
        yield Edit((*path, "token_logprobs"), as_logged(new, logged["token_logprobs"]))
        return
    start = _kept_from(old, new, [])
    for name, values in logged.items():
        if isinstance(values, list | tuple | np.ndarray) and len(values) == len(old):
            yield Edit((*path, name), values[start : start + len(new)])


def _column_edits(choice: Mapping[str, Any], path: Path, change: Change) -> Iterator[Edit]:
    for name, values in change.columns.items():
        if name not in choice:
            raise RecordError(f"{name} holds the tokens too, so it cannot be left out")
        yield Edit((*path, name), None if values is None else as_logged(values, choice[name]))


def _kept_from(old: Logprobs, new: Logprobs, also: Sequence[tuple[list[int], list[int]]]) -> int:
    """The first of the old entries that are kept, which have to lie together; `also` must agree."""
    size = len(new)
    starts = [
        start
        for start in range(len(old) - size + 1)
        if same_floats(old[start : start + size], new)
        and all(have[start : start + size] == want for have, want in also)
    ]
    if len(starts) != 1:
        raise RecordError(
            f"{len(old)} logprobs should become {size}, and the log does not tell which of its entries go"
        )
    return starts[0]


def _kept_objects(values: Sequence[Any], was: Sequence[Any]) -> list[Any]:
    """The new values, with the old object wherever the value is the same."""
    return [before if value == before else value for value, before in zip(values, was, strict=True)]


def _both_unknown(left: object, right: object) -> bool:
    return all(value is None or (isinstance(value, float) and value != value) for value in (left, right))


def _floats(values: Sequence[Any]) -> Logprobs | None:
    try:
        return as_floats(list(values), "logprobs")
    except RecordError:
        return None


def _at(row: Row, path: Path) -> Any:
    value: Any = row
    for step in path:
        value = value[step]
    return value


def _same_value(left: Any, right: Any) -> bool:
    if isinstance(left, list | np.ndarray) and isinstance(right, list | np.ndarray):
        return len(left) == len(right) and all(a is b or a == b for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and bool(left == right)


def _words(path: Path) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
