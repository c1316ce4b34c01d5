"""TRL rollouts: what a `rollout_func` returns for a batch, parallel lists with one list a completion.

huggingface/trl `trl/trainer/grpo_trainer.py` (handling of `rollout_func`): `prompt_ids`, `completion_ids` and
`logprobs` are required, `env_mask` says which of a completion the model wrote. TRL's own server answers with
the k best logprobs of each token, of which the first is the sampled one's. A `RolloutSample` of the
asynchronous trainer, and one completion a row, are read as `generic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tito_audit.format import Format, Row
from tito_audit.formats._batch_samples import batch_read, batch_update, is_batch, sample_rollout, updated_sample
from tito_audit.formats._calls import is_messages
from tito_audit.record.mended import Mended
from tito_audit.record.rollout import Place, Rollout

__all__ = ["FORMAT"]

_IDS = "completion_ids"


def _matches(row: Row) -> bool:
    return is_batch(row, _IDS) and is_batch(row, "prompt_ids")


def _read(row: Row, place: Place) -> Sequence[Rollout]:
    return batch_read(row, place, _IDS, _sample)


def _update(row: Row, mended: Sequence[Mended]) -> Sequence[Row]:
    return batch_update(row, mended, _IDS, _sample, updated_sample)


def _sample(row: Row, place: Place) -> Rollout:
    prompt: Any = row.get("prompt", row.get("prompts"))
    return sample_rollout(
        row, place, FORMAT.name, (_IDS, "prompt_ids"), prompt=prompt if is_messages(prompt) else None
    )


FORMAT = Format(
    name="trl_rollout",
    title="TRL rollout_func output",
    signature="`prompt_ids` and `completion_ids`, each one list a completion, with `logprobs`",
    precedence=224,
    matches=_matches,
    read=_read,
    update=_update,
    shows="Each completion with its prompt and logprobs, or its training row where an `env_mask` leaves tokens "
    "out; the prompt's messages where they were saved. No model or tools.",
)
