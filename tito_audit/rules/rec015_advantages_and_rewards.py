"""REC015: advantages and rewards that do not fit the tokens they stand beside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.runs import trained_runs
from tito_audit.rule import rule
from tito_audit.rules._beside import TokenSequence, token_sequences
from tito_audit.rules._words import counted

_PER_TOKEN = ("advantages", "token_advantages", "token_rewards", "token_level_rewards", "token_level_scores")
_LENGTH = "response_length"


@rule("REC015", Severity.ERROR, headline="{n} beside advantages or rewards that do not fit", needs=(Needs.CREDIT,))
def advantages_and_rewards(evidence: Evidence) -> Iterator[Hit]:
    """Advantages or rewards do not fit the tokens beside them.

    ## What it finds
    A list of advantages or of rewards by token (`advantages`, `token_rewards`, `token_level_rewards`) with
    another number of entries than any way to write it has: one for each token or each but the first, of the row,
    of the response, or of what is trained, one for each turn, or one for all. NaN or infinity at a trained
    token, or as a reward; null says that a value is not known and is not judged. A `response_length` that ends
    inside what a mask over the whole row trains. A note says that the advantages of all trained tokens are zero,
    as those of a group with equal rewards are: the row teaches nothing.

    ## Why it matters
    The advantage is the factor of each token's gradient. One place off, the reward for an answer goes to the
    tokens beside it; one NaN makes the loss of the whole batch NaN, and with it every weight.

    ## Example
    Two advantages are missing:

    ```text
    error REC015 row 0:7
      `advantages` has 2 entries for 7 tokens (4 after the prompt); nothing says which token each
      entry belongs to
    ```

    ## Repair
    None: what a token is worth is for the environment and the algorithm to say. Compute the column again for
    these tokens.
    """
    for sequence in token_sequences(evidence):
        for name, value in sequence.beside.credit.items():
            if name != _LENGTH:
                if isinstance(value, list | tuple | np.ndarray):
                    yield from _check_list(evidence, sequence, name, value)
                elif isinstance(value, float) and not np.isfinite(value):
                    yield sequence.hit(f"`{name}` is {_worst(np.array([value]))}", "not a finite number")
                continue
            trained = sequence.sampled.nonzero()[0]
            if sequence.where is not Where.ROW or type(value) is not int or not len(trained):
                continue
            # The length of an answer or of what is trained, else one that reaches back to the first trained token.
            lengths = {end - start for start, end in trained_runs(sequence.sampled)}
            early = trained[trained < len(sequence.ids) - value]
            if len(early) and value not in {*lengths, len(trained), int(trained[-1]) + 1 - int(trained[0])}:
                message = (
                    f"`{_LENGTH}` is {value:,}, and {counted(len(early), 'trained token')} of {len(trained):,} "
                    f"stand{'s' if len(early) == 1 else ''} before the last {counted(value, 'token')}"
                )
                yield sequence.hit(message, "response length", early)


def _check_list(evidence: Evidence, sequence: TokenSequence, name: str, value: Any) -> Iterator[Hit]:
    entries = value.tolist() if isinstance(value, np.ndarray) else list(value)
    if not entries or not all(entry is None or isinstance(entry, int | float) for entry in entries):
        return
    numbers = np.array([np.nan if entry is None else float(entry) for entry in entries])
    if name not in _PER_TOKEN:
        # Rewards by turn, by component, by function: only their values say something.
        if np.isinf(numbers).any() or _holds_nan(value):
            yield sequence.hit(f"`{name}` holds {_worst(numbers)}", "not a finite number")
        return
    # One for each token, each turn, or all; or padded with zeros at the end.
    count, size, sampled = len(numbers), len(sequence.ids), sequence.sampled.nonzero()[0]
    places = sampled if count == len(sampled) else None
    if any(size - start - count in (0, 1) for start in (0, sequence.response or 0, *sampled[:1].tolist())):
        places = np.arange(size - count, size)
    answers = sum(message.sampled for message in evidence.rollout.messages)
    runs = len(trained_runs(sequence.sampled))
    padded = count > size and not np.nan_to_num(numbers[size:], nan=0.0).any()
    if places is None and not padded and count not in (1, runs, answers, len(evidence.rollout.turns)):
        message = f"`{name}` has {counted(count, 'entry', 'entries')} for {counted(size, 'token')}"
        if sequence.response:
            message += f" ({size - sequence.response:,} after the prompt)"
        yield sequence.hit(f"{message}; nothing says which token each entry belongs to", "length")
        return
    at = places[sequence.sampled[places] & (places >= 0)] if places is not None else None
    if places is None or at is None or not len(at):
        if np.isinf(numbers).any() or _holds_nan(value):
            yield sequence.hit(f"`{name}` holds {_worst(numbers)}", "not a finite number")
        return
    own = numbers[sequence.sampled[places]]
    # A table's NaN may be its null, and null says that the value is not known, as a repair writes it.
    broken = np.isinf(own) | (np.isnan(own) if _holds_nan(value) else np.zeros(len(own), np.bool_))
    if broken.any():
        message = f"`{name}` is {_worst(own)} at {counted(int(broken.sum()), 'trained token')} of {len(own):,}"
        yield sequence.hit(message, "not a finite number", at[broken])
    elif name == "advantages" and len(own) > 1 and not own.any():
        message = f"the advantages of all {len(own):,} trained tokens are zero, so nothing is learned from them"
        yield sequence.hit(message, "no advantage", at, Severity.NOTE)


def _holds_nan(value: Any) -> bool:
    """Whether a list holds NaN. In an array NaN may be a table's null, which shows nothing."""
    return not isinstance(value, np.ndarray) and any(
        isinstance(entry, float) and entry != entry for entry in value
    )


def _worst(numbers: NDArray[np.float64]) -> str:
    return "infinite" if np.isinf(numbers).any() else "NaN"
