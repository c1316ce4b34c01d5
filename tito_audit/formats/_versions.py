"""Versions of the weights as logs write them: a name, names, spans of tokens, or a version for each token.

SGLang writes objects of `version`, `start` and `end` in `meta_info`, and its chat endpoints in `metadata`
(sgl-project/sglang `srt/utils/weight_versions.py`); vLLM writes the same on a choice. miles writes a list of
objects for each call, with `abs_start` and `abs_end` that count from the first token of the sample (radixark/miles
`miles/utils/types.py`, `WeightVersionsPerCall`). slime names one version for each call (THUDM/slime
`slime/utils/types.py`), AReaL one for each token, in `versions` or `output_versions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from tito_audit.formats._columns import is_list, plain
from tito_audit.record.arrays import Ids
from tito_audit.record.by_name import WEIGHTS, WeightSpans, spans_of_versions, version_of_tokens
from tito_audit.record.rollout import Padding, TrainingRow


def weight_versions(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """The weight versions that a call names; () if it names none."""
    value = entry.get(WEIGHTS, entry.get("weight_version"))
    if value is None:
        return ()
    spans = version_spans(value)
    if spans:
        return tuple(dict.fromkeys(version for version, _, _ in spans))
    return tuple(str(version) for version in value) if is_list(value) else (str(value),)


def spans_of(entry: Mapping[str, Any], completion_ids: Ids | None) -> WeightSpans:
    """The spans of a call that names some; () if it names none."""
    if WEIGHTS not in entry:
        return ()
    return version_spans(entry[WEIGHTS], 0 if completion_ids is None else len(completion_ids))


def version_spans(value: object, tokens: int = 0) -> WeightSpans:
    """Versions with their tokens `[start, end)`; () if none are named.

    They are objects or triples, in one list or in a list for each call. A list of as many versions as `tokens`
    that repeats some of them has one for each token.
    """
    if not is_list(value):
        return ()
    entries = plain(value)
    if len(entries) == tokens > len(set(map(str, entries))) and all(isinstance(v, str | int) for v in entries):
        cuts = [0, *(at for at in range(1, tokens) if entries[at] != entries[at - 1]), tokens]
        return tuple((str(entries[a]), a, b) for a, b in pairwise(cuts) if str(entries[a]) != "-1")
    spans = tuple(_spans(entries))
    return () if None in spans else tuple(span for span in spans if span is not None)


def _spans(entries: list[Any]) -> Iterator[tuple[str, int, int] | None]:
    """The spans in a list, None for what is none; a call may have no spans."""
    for entry in entries:
        span, inner = _span(entry), entry.get("spans") if isinstance(entry, dict | Mapping) else entry
        if span is not None or not is_list(inner):
            yield span
        else:
            yield from _spans(plain(inner))


def _span(entry: object) -> tuple[str, int, int] | None:
    if isinstance(entry, dict | Mapping):
        if "version" not in entry:
            return _span(entry.get("spans"))
        entry = [entry["version"], *(entry.get(name, entry.get(f"abs_{name}")) for name in ("start", "end"))]
    if not isinstance(entry, list) or len(entry) != 3 or any(type(at) is not int for at in entry[1:]):
        return None
    version, start, end = entry
    return (str(version), start, end) if 0 <= start <= end else None


def version_of_row(row: Mapping[str, Any], trained: TrainingRow | None) -> TrainingRow | None:
    """The training row with the version of each token, if `weight_versions` are spans of its tokens."""
    spans = version_spans(row.get(WEIGHTS)) if WEIGHTS in row and trained is not None else ()
    if trained is None or not spans or trained.padding != Padding():
        return trained
    size, by = len(trained.token_ids), _offset(spans, trained)
    inside = ((version, start + by, min(end + by, size)) for version, start, end in spans if start + by < size)
    return replace(trained, columns=(*trained.columns, version_of_tokens(inside, size)))


def spans_as_logged(original: Any, before: TrainingRow, after: TrainingRow) -> Any:
    """The spans of a row at their new tokens, in the log's form; null if no version is known any more.

    With a list for each call, spans side by side are of one call.
    """
    column = next(column for column in after.columns if column.name == WEIGHTS)
    relative = _offset(version_spans(original), before) > 0
    by = _start(after) if relative else 0
    first = leaf = plain(original)[0]
    while not isinstance(leaf, dict | Mapping) or "version" not in leaf:
        inner = leaf.get("spans") if isinstance(leaf, dict | Mapping) else leaf
        if _span(inner) is not None or not is_list(inner) or not len(inner):
            break
        leaf = plain(inner)[0]
    objects = isinstance(leaf, dict | Mapping) and "version" in leaf
    ends = ("start", "end") if "start" in leaf else ("abs_start", "abs_end")
    calls: list[list[Any]] = []
    last = -1
    for version, start, end in spans_of_versions(column.values):
        if start != last:
            calls.append([])
        last = end
        span = [version, start - by, end - by]
        calls[-1].append(dict(zip(("version", *ends), span, strict=True)) if objects else span)
    if not calls:
        return None
    if isinstance(first, dict | Mapping) and "version" not in first:
        return [{"spans": call} for call in calls]
    return [span for call in calls for span in call] if _span(first) is not None else calls


def _offset(spans: WeightSpans, row: TrainingRow) -> int:
    """The token from which spans count: the first of the row, or that of its response, whichever puts more of them
    on trained tokens."""
    trained = np.ones(len(row.token_ids), np.bool_) if row.loss_mask is None else row.loss_mask
    start = _start(row)
    covered = [sum(int(trained[a + by : b + by].sum()) for _, a, b in spans) for by in (0, start)]
    return start if covered[1] > covered[0] else 0


def _start(row: TrainingRow) -> int:
    """Where the response of a row begins."""
    if row.prompt_length is not None:
        return row.prompt_length
    return 0 if row.loss_mask is None else int(row.loss_mask.argmax())
