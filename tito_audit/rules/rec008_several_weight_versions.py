"""REC008: a rollout sampled with several weight versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.by_name import over_row, version_column
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.rollout import Rollout, TrainingRow
from tito_audit.record.runs import trained_runs
from tito_audit.rule import rule
from tito_audit.rules._words import counted, listed

_NAMED = 4
"""Versions that a message names."""
_LONGEST = 24
"""Characters of a version that a message shows."""


@dataclass(slots=True)
class _Versions:
    """Which versions sampled how many tokens, and where the first token of a second one is."""

    tokens: dict[str, int] = field(default_factory=dict)
    untold: int = 0
    """Tokens of calls that name several versions and do not say which token is of which."""
    change: tuple[Where, int | None, int, int] | None = None
    """Sequence, turn, start and end of what another version than the first sampled."""
    inside: bool = False
    """Whether a version changes within a call."""

    def add(self, versions: Sequence[str], size: int, place: tuple[Where, int | None, int, int]) -> None:
        """Counts tokens that these versions sampled."""
        several = len(set(versions)) > 1
        if self.change is None and (several or (self.tokens and versions[0] not in self.tokens)):
            self.change = place
        for version in versions:
            self.tokens.setdefault(version, 0)
        if several:
            self.untold += size
            self.inside = True
        else:
            self.tokens[versions[0]] += size


@rule("REC008", Severity.NOTE, headline="{n} sampled with several weight versions", needs=(Needs.WEIGHT_VERSIONS,))
def several_weight_versions(evidence: Evidence) -> Iterator[Hit]:
    """Sampled with several weight versions.

    ## What it finds
    Versions that differ between the calls of a rollout, or within one call, as asynchronous training and in-flight
    updates produce them: `weight_version` of calls, `versions` of tokens (AReaL), the versions of a row's calls
    (slime, miles), the first and the last policy (ART, verifiers). A note says which versions sampled how many
    tokens, and where a second one begins. It is a warning where one call has several versions and the log does not
    say which token belongs to which.

    ## Why it matters
    Each version is another policy. The sampler's logprobs stay right, but how stale a token is can only be
    corrected, or masked, if its version is known; a limit on staleness for the whole rollout drops too much or too
    little.

    ## Example
    The second call was sampled with newer weights:

    ```text
    note REC008 turn 1 completion 0:3
      sampled with 2 weight versions: 3 (3 tokens) and 4 (3 tokens); each version is a policy of its
      own
           0 │5 │!│<|im_end|>│
          id  20 0 2002
    ```

    ## Repair
    None is needed: nothing is wrong with the row. Log the version of each token where calls outlive an update.
    """
    found = _versions(evidence.rollout)
    if found is None or len(found.tokens) < 2:
        return
    where, turn, start, end = found.change or (Where.ROW, None, 0, 0)
    names = [_named(version, count, found.untold) for version, count in found.tokens.items()]
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    message = f"sampled with {len(names)} weight versions: {listed([*names[:_NAMED], *more])}"
    if found.untold:
        message += f"; the log does not say which of them sampled {counted(found.untold, 'token')}"
        yield Hit(where, start, end, message, turn, "version of tokens unknown", Severity.WARNING)
        return
    message += "; each version is a policy of its own"
    yield Hit(where, start, end, message, turn, "within a call" if found.inside else "between calls")


def _named(version: str, tokens: int, untold: int) -> str:
    short = version if len(version) <= _LONGEST else version[: _LONGEST - 1] + "…"
    return short if not tokens else f"{short} ({counted(tokens, 'token')})"


def _versions(rollout: Rollout) -> _Versions | None:
    """The versions of the row's tokens, else of the calls, else of the rollout as a whole; None if unknown."""
    row, stated = rollout.training_row, rollout.stated
    column = None if row is None else version_column(row.columns)
    if row is not None and column is not None:
        found = _Versions()
        _add_tokens(found, over_row(column, row), Where.ROW, None, _sampled(row))
        return found
    if any(turn.weight_versions or version_column(turn.columns) is not None for turn in rollout.turns):
        return _of_calls(rollout)
    named = stated.facts.get("weight_versions")
    if row is not None and isinstance(named, list | tuple) and named:
        return _of_row(row, named)
    if len(set(stated.policy_versions)) < 2:
        return None
    size = sum(len(turn.completion_ids) for turn in rollout.turns if turn.completion_ids is not None)
    size = int(_sampled(row).sum()) if row is not None and not size else size
    found = _Versions()
    first = rollout.turns[0].completion_ids if rollout.turns else None
    whole: tuple[Where, int | None, int, int] = (Where.ROW, None, 0, 0 if row is None else len(row.token_ids))
    place = whole if row is not None else (Where.COMPLETION, 0, 0, 0 if first is None else len(first))
    found.add([str(version) for version in stated.policy_versions], size, place)
    return found if rollout.turns or row is not None else None


def _of_calls(rollout: Rollout) -> _Versions:
    found = _Versions()
    for number, turn in enumerate(rollout.turns):
        size = 0 if turn.completion_ids is None else len(turn.completion_ids)
        column = version_column(turn.columns)
        if column is not None:
            values = column.values.astype(np.float64)
            _add_tokens(found, values, Where.COMPLETION, number, np.ones(size, np.bool_))
        elif turn.weight_versions and (size or turn.completion_ids is None):
            found.add(turn.weight_versions, size, (Where.COMPLETION, number, 0, size))
    return found


def _of_row(row: TrainingRow, named: Sequence[str]) -> _Versions:
    """The versions of a row whose calls each name one, where its trained runs are as many as the calls."""
    found = _Versions()
    runs = [] if row.loss_mask is None else trained_runs(row.loss_mask)
    if len(runs) == len(named):
        for (start, end), version in zip(runs, named, strict=True):
            found.add([version], end - start, (Where.ROW, None, start, end))
    else:
        found.add(named, int(_sampled(row).sum()), (Where.ROW, None, 0, len(row.token_ids)))
    return found


def _sampled(row: TrainingRow) -> NDArray[np.bool_]:
    return np.ones(len(row.token_ids), np.bool_) if row.loss_mask is None else row.loss_mask


def _add_tokens(
    found: _Versions, values: NDArray[np.float64], where: Where, turn: int | None, inside: NDArray[np.bool_]
) -> None:
    """Adds runs of tokens with one version; -1, NaN and infinity are no version."""
    at = np.flatnonzero(inside & (values >= 0) & np.isfinite(values))
    if not len(at):
        return
    cuts = np.flatnonzero(np.diff(values[at])) + 1
    found.inside |= bool((at[cuts] == at[cuts - 1] + 1).any())
    for part in np.split(at, cuts):
        place = (where, turn, int(part[0]), int(part[-1]) + 1)
        found.add([f"{values[part[0]]:.0f}"], len(part), place)
