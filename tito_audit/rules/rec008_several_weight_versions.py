"""REC008: a rollout sampled with several weight versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Mask
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.policy_columns import WEIGHTS, expand_to_row, version_column, versions_to_spans
from tito_audit.record.rollout import Rollout, TrainingRow
from tito_audit.record.runs import trained_runs
from tito_audit.rule import rule
from tito_audit.rules._words import counted
from tito_audit.terminal.words import listed

_NAMED = 4
"""How many versions a message names."""
_LONGEST = 24
"""How many characters of a version a message shows."""


@dataclass(slots=True)
class _VersionCounts:
    """How many tokens each version sampled, and where the version first changes."""

    tokens: dict[str, int] = field(default_factory=dict)
    unattributed: int = 0
    """Tokens of calls that name several versions and do not say which token is of which."""
    change: tuple[Where, int | None, int, int] | None = None
    """Sequence, turn, start and end of the first tokens that a second version sampled."""
    changes_in_call: list[str] = field(default_factory=list)
    """The versions of the first call in which they change, each with its tokens if the log says which."""
    calls: bool = False
    """Whether the tokens are those of calls, not of a row."""

    def add(self, versions: Sequence[str], size: int, place: tuple[Where, int | None, int, int]) -> None:
        """Count tokens that these versions sampled."""
        several = len(set(versions)) > 1
        if self.change is None and (several or (self.tokens and versions[0] not in self.tokens)):
            self.change = place
        for version in versions:
            self.tokens.setdefault(version, 0)
        if several:
            self.unattributed += size
        else:
            self.tokens[versions[0]] += size

    def add_spans(self, spans: Sequence[tuple[str, int, int]], where: Where, turn: int | None) -> None:
        """Count what each version sampled of a call or a row; adjoining spans are of one call."""
        calls: list[list[tuple[str, int, int]]] = []
        for version, start, end in spans:
            self.add([version], end - start, (where, turn, start, end))
            if not calls or calls[-1][-1][2] != start:
                calls.append([])
            calls[-1].append((version, start, end))
        changing = next((call for call in calls if len({version for version, _, _ in call}) > 1), [])
        if not self.changes_in_call:
            self.changes_in_call = [f"{_shorten(version)} in {start}:{end}" for version, start, end in changing]


@rule("REC008", Severity.NOTE, headline="{n} sampled with several weight versions", needs=(Needs.WEIGHT_VERSIONS,))
def several_weight_versions(evidence: Evidence) -> Iterator[Hit]:
    """Sampled with several weight versions.

    ## What it finds
    Versions that differ between the calls of a rollout, or within one call, as asynchronous training and in-flight
    updates produce them: `weight_version` of calls, `versions` of tokens (AReaL), spans of tokens
    (`weight_versions` of SGLang and miles), the versions of a row's calls (slime), the first and the last policy
    (ART, verifiers). A note says which versions sampled how many tokens, where a second one begins, and which
    tokens of a call are of which if they change within it. It is a warning where one call has several versions and
    the log does not say which token belongs to which.

    ## Why it matters
    Each version is another policy. The sampler's logprobs stay right, but how stale a token is can only be
    corrected, or masked, if its version is known; a limit on staleness for the whole rollout drops too much or too
    little.

    ## Example
    The second call was sampled with newer weights:

    ```text
    note REC008 turn 1 completion 0:3
      sampled with 2 weight versions: 3 (3 tokens) and 4 (3 tokens), one in each call; each version
      is a policy of its own
           0 │5 │!│<|im_end|>│
          id  20 0 2002
    ```

    ## Repair
    None is needed: nothing is wrong with the row. Log the version of each token where calls outlive an update.
    """
    versions = _count_versions(evidence.rollout)
    if len(versions.tokens) < 2:
        return
    where, turn, start, end = versions.change or (Where.ROW, None, 0, 0)
    names = [
        _shorten(version) + (f" ({counted(count, 'token')})" if count else "")
        for version, count in versions.tokens.items()
    ]
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    message = f"sampled with {len(names)} weight versions: {listed([*names[:_NAMED], *more])}"
    if versions.unattributed:
        message += f"; the log does not say which of them sampled {counted(versions.unattributed, 'token')}"
        yield Hit(where, start, end, message, turn, "version of tokens unknown", Severity.WARNING)
        return
    if versions.changes_in_call:
        message += f", which change within a call: {listed(versions.changes_in_call[:_NAMED])}"
    elif versions.calls:
        message += ", one in each call"
    message += "; each version is a policy of its own"
    yield Hit(where, start, end, message, turn, "within a call" if versions.changes_in_call else "between calls")


def _shorten(version: str) -> str:
    return version if len(version) <= _LONGEST else version[: _LONGEST - 1] + "…"


def _count_versions(rollout: Rollout) -> _VersionCounts:
    """The versions that sampled the row's tokens, else the calls, else the whole rollout; none if unknown."""
    row, stated, versions = rollout.training_row, rollout.stated, _VersionCounts()
    column = None if row is None else version_column(row.columns)
    named, spans = stated.facts.get("weight_versions"), stated.facts.get("weight_spans")
    if row is not None and column is not None:
        if column.name == WEIGHTS and column.values.dtype.kind == "O":
            sampled = column.values.copy()
            sampled[~_sampled(row)] = None
            versions.add_spans(versions_to_spans(sampled), Where.ROW, None)
        else:
            _add_tokens(versions, expand_to_row(column, row), Where.ROW, None, _sampled(row))
    elif any(turn.weight_versions or version_column(turn.columns) is not None for turn in rollout.turns):
        versions.calls = True
        for number, turn in enumerate(rollout.turns):
            size = 0 if turn.completion_ids is None else len(turn.completion_ids)
            column = version_column(turn.columns)
            if column is not None:
                values = column.values.astype(np.float64)
                _add_tokens(versions, values, Where.COMPLETION, number, np.ones(size, np.bool_))
            elif turn.weight_spans and size:
                cut = [
                    (version, start, min(end, size)) for version, start, end in turn.weight_spans if start < size
                ]
                versions.add_spans(cut, Where.COMPLETION, number)
            elif turn.weight_versions and (size or turn.completion_ids is None):
                versions.add(turn.weight_versions, size, (Where.COMPLETION, number, 0, size))
    elif row is not None and isinstance(spans, list | tuple) and spans:
        # Spans count from the start of the row or of its response: take what covers more trained tokens.
        trained = _sampled(row)
        start = row.prompt_length if row.prompt_length is not None else int(trained.argmax())
        covered = [sum(int(trained[a + by : b + by].sum()) for _, a, b in spans) for by in (0, start)]
        by = start if covered[1] > covered[0] else 0
        size = len(trained)
        cut = [(version, a + by, min(b + by, size)) for version, a, b in spans if a + by < size]
        versions.add_spans(cut, Where.ROW, None)
    elif row is not None and isinstance(named, list | tuple) and named:
        runs = [] if row.loss_mask is None else trained_runs(row.loss_mask)
        if len(runs) == len(named):  # each call names one
            for (start, end), version in zip(runs, named, strict=True):
                versions.add([version], end - start, (Where.ROW, None, start, end))
        else:
            versions.add(named, int(_sampled(row).sum()), (Where.ROW, None, 0, len(row.token_ids)))
    elif len(set(stated.policy_versions)) > 1 and (rollout.turns or row is not None):
        completions = [turn.completion_ids for turn in rollout.turns]
        size = sum(len(ids) for ids in completions if ids is not None)
        place: tuple[Where, int | None, int, int]
        if row is not None:
            size, place = size or int(_sampled(row).sum()), (Where.ROW, None, 0, len(row.token_ids))
        else:
            first = completions[0]
            place = Where.COMPLETION, 0, 0, 0 if first is None else len(first)
        versions.add([str(version) for version in stated.policy_versions], size, place)
    return versions


def _sampled(row: TrainingRow) -> Mask:
    return np.ones(len(row.token_ids), np.bool_) if row.loss_mask is None else row.loss_mask


def _add_tokens(
    versions: _VersionCounts, values: NDArray[np.float64], where: Where, turn: int | None, sampled: Mask
) -> None:
    """Count the runs of sampled tokens with one version; -1, NaN and infinity are no version."""
    at = (sampled & (values >= 0) & np.isfinite(values)).nonzero()[0]
    if not len(at):
        return
    cuts = ((np.diff(values[at]) != 0) | (np.diff(at) > 1)).nonzero()[0] + 1
    spans = [(f"{values[part[0]]:.0f}", int(part[0]), int(part[-1]) + 1) for part in np.split(at, cuts)]
    versions.add_spans(spans, where, turn)
