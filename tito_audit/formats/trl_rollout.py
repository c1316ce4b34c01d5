"""TRL rollouts: what a `rollout_func` returns for a batch, and the buffers of the trainer.

huggingface/trl `trl/trainer/grpo_trainer.py`. A `rollout_func` must return `prompt_ids`, `completion_ids` and
`logprobs`; `env_mask` says which tokens of a completion the model sampled. TRL's own server returns the top k
logprobs of each token, the sampled one's first. A buffer (`_generate_and_score_completions`) pads
prompts on the left and completions on the right, marks that in `prompt_mask` and `completion_mask`, and holds
the sampler's logprobs in `sampling_per_token_logps`; `tool_mask` is the `env_mask`. A `RolloutSample` of
asynchronous training, and one completion per row without these masks, are read as `generic`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._columns import as_logged, is_list
from tito_audit.formats._flat import restore_padding, strip_padding
from tito_audit.formats._kit import batches, is_batch, read_sample, updated_sample
from tito_audit.formats._update import with_values
from tito_audit.record.arrays import Mask, as_floats
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout

_PROMPT, _IDS = "prompt_ids", "completion_ids"
_MARKERS = ("sampling_per_token_logps", "old_per_token_logps")
_TOOL_MASKS = ("tool_mask", "env_mask")
"""Masks that TRL multiplies with the completion's mask, which is 0 for a completion that is left out."""
_SEEN = {_PROMPT: "prompt_mask", _IDS: "completion_mask"}


def read(row: Row, place: Place) -> Rollout:
    prompt = row.get("prompt", row.get("prompts"))
    return read_sample(_without_padding(row), place, FORMAT.name, (_IDS, _PROMPT), prompt=prompt)


def _without_padding(row: Row) -> Row:
    """A buffer's sample without its padding; any other sample unchanged."""
    if not all(is_list(row.get(name)) for name in (_PROMPT, _IDS, *_SEEN.values())):
        return row
    prompt, completion = _visible_tokens(row)
    left_out = not (as_floats(row[_SEEN[_IDS]], _SEEN[_IDS]) > 0).any()
    plain: dict[str, Any] = {}
    for name, value in row.items():
        if name == _PROMPT:
            plain[name] = strip_padding(value, prompt)
        elif name != _SEEN[_PROMPT] and not (name in _TOOL_MASKS and left_out):
            wide = is_list(value) and len(value) == len(completion)
            plain[name] = strip_padding(value, completion) if wide else value
    return plain


def _visible_tokens(row: Row) -> tuple[Mask, Mask]:
    """Which entries of the prompt and of the completion are tokens.

    `completion_mask` is 0 for padding, and for all of a truncated completion; padding is the same id repeated at
    the end.
    """
    prompt, completion = (as_floats(row[name], name) > 0 for name in _SEEN.values())
    for seen, name in ((prompt, _PROMPT), (completion, _IDS)):
        if len(seen) != len(row[name]):
            raise RecordError(f"{_SEEN[name]} has {len(seen)} entries for {len(row[name])} of {name}")
    prompt = np.maximum.accumulate(prompt) if prompt.any() else prompt
    ids = row[_IDS]
    end = len(ids)
    while end and not completion[end - 1] and ids[end - 1] == ids[-1]:
        end -= 1
    return prompt, np.arange(len(ids)) < end


def update_sample(row: Row, before: Rollout, after: RepairedRollout) -> Row:
    """A sample with its repaired columns, padded to their old widths."""
    plain = _without_padding(row)
    new = updated_sample(plain, before, after)
    changed = {name: value for name, value in new.items() if value is not plain[name]}
    if plain is row or not changed:
        return with_values(row, changed)
    prompt, completion = _visible_tokens(row)
    values = restore_padding(row, changed, (_PROMPT, prompt), completion)
    if is_list(changed.get(_PROMPT)):
        size = len(changed[_PROMPT])
        values[_SEEN[_PROMPT]] = as_logged([0] * (len(prompt) - size) + [1] * size, row[_SEEN[_PROMPT]])
    return with_values(row, values)


FORMAT = Format(
    name="trl_rollout",
    title="TRL rollout_func output and trainer buffers",
    signature=Signature(
        "{prompt_ids} and {completion_ids}, each one list per completion, with {logprobs}; or {prompt_ids}, "
        "{prompt_mask}, {completion_ids}, {completion_mask} and {sampling_per_token_logps|old_per_token_logps}"
    ),
    precedence=224,
    matches=lambda row: (
        is_batch(row, _PROMPT)
        if is_batch(row, _IDS)
        else all(is_list(row.get(name)) for name in (_PROMPT, _IDS, *_SEEN.values()))
        and any(name in row for name in _MARKERS)
    ),
    **batches(read, update_sample, _IDS).functions,
    shows="Each completion with its prompt and logprobs, or its training row where an `env_mask` or `tool_mask` "
    "leaves tokens out; the prompt's messages where they were saved. No model or tools.",
)
