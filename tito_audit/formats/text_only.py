"""Rows of text without ids: they cannot be audited, and a notice says what to save instead.

verl, TRL, SkyRL, AReaL and tinker-cookbook write such logs themselves; others hold a prompt and a completion.
ms-swift 4.6.0 writes a table per line (`swift/rlhf_trainers/grpo_trainer.py`, `log`), its Megatron trainers too
(`swift/megatron/trainers/rollout_mixin.py`), or a line per completion (`swift/ray/megatron/base_trainer.py`).
prime-rl writes annotations beside its traces (`src/prime_rl/monitors/file/traces/update.py`, `make_update`). Rows
with only `messages` are read as `generic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tito_audit.format import Format, Row
from tito_audit.formats._calls import CALL_LOGPROBS, COMPLETION_IDS, PROMPT_IDS, stated_facts
from tito_audit.formats._columns import FLAT_IDS, MASKS, ROW_LOGPROBS, holds_ids, is_messages, parsed
from tito_audit.formats._kit import SampleRows
from tito_audit.record.message import Message, as_messages
from tito_audit.record.rollout import Place, Rollout
from tito_audit.signature import Signature, keys, way

_KNOWN: tuple[tuple[frozenset[str], str], ...] = (
    (
        frozenset({"gts", "output"}),
        "a verl rollout log. It holds decoded text, special tokens removed. Save the agent loop's output "
        "instead: prompt_ids, response_ids, response_mask and response_logprobs, one object per sample; or the "
        "batch: prompts, responses, attention_mask, response_mask and rollout_log_probs as lists",
    ),
    (
        frozenset({"step", "completion", "advantage"}),
        "a TRL completions log. It holds decoded text, special tokens removed. Save what the rollout "
        "function returns instead: prompt_ids, completion_ids, logprobs and env_mask, one object per sample or "
        "batch",
    ),
    *(
        (
            frozenset(names),
            "an ms-swift completions log. It holds decoded text. Save the response of each rollout output "
            "instead, one object per call: prompt_token_ids, and token_ids and logprobs of its choice",
        )
        for names in (("step", "completion", "advantages"), ("gen_step", "prompt", "completion"))
    ),
    (
        frozenset({"input_prompt", "output_response"}),
        "a SkyRL evaluation log. It holds decoded text. Save the generator's output instead: "
        "prompt_token_ids, response_ids, loss_masks and rollout_logprobs, one object per batch",
    ),
    (
        frozenset({"head_version", "completion"}),
        "an AReaL rollout dump. It holds decoded text. Save the model response of each call instead: "
        "input_tokens, output_tokens, output_logprobs and output_versions; or the tensors of a trajectory as "
        "lists: input_ids, loss_mask, logprobs, versions and attention_mask",
    ),
    (
        frozenset({"schema_version", "traj_idx"}),
        "a tinker-cookbook rollout summary. It holds lengths and rewards. Save the datums used for training "
        "instead, one object each: model_input and loss_fn_inputs",
    ),
    *(
        (
            frozenset({"trace_id", name}),
            f"{what} of prime-rl, beside its traces. Ids and the sampler's logprobs are in the episodes: scan "
            "traces/stream, with sealed chunks (.jsonl.zst) or without",
        )
        for name, what in (("branches", "a stream of annotations"), ("chunk", "an index of annotations"))
    ),
)
"""Keys of logs known to hold no ids, and the notice for each."""
_TOKEN_COLUMNS = {*FLAT_IDS, *PROMPT_IDS, *COMPLETION_IDS, *MASKS, *ROW_LOGPROBS, *CALL_LOGPROBS}
"""Columns that show that more than text was recorded, or was meant to be."""
_ASKED = ("prompt", "prompts", "question", "query", "instruction")
_WROTE = ("completion", "completions", "response", "responses", "answer", "output", "text")


def _matches(row: Row) -> bool:
    if any(keys <= row.keys() for keys, _ in _KNOWN):
        return True
    pair = any(_is_text(row.get(name)) for name in _ASKED) and any(_is_text(row.get(name)) for name in _WROTE)
    return pair and not _TOKEN_COLUMNS & row.keys() and not any(_may_hide_ids(*column) for column in row.items())


def _may_hide_ids(name: str, value: Any) -> bool:
    """Whether a column may hold ids: a list of whole numbers at any depth, or a string of JSON from a table."""
    if isinstance(value, str) and name not in (*_ASKED, *_WROTE):
        return len(value) > 2 and value[0] in "[{"
    return _may_hold_ids(value)


def _read(row: Row, place: Place) -> Rollout:
    stated = stated_facts(row).without_ids()
    kind = next((what for keys, what in _KNOWN if keys <= row.keys()), None)
    if kind is not None:
        stated = replace(stated, notice=f"No token ids: this is {kind}.")
    prompt, wrote = (
        next((value for name in names if is_messages(value := parsed(row, name))), None)
        for names in (_ASKED, _WROTE)
    )
    messages: tuple[Message, ...] = ()
    if prompt is not None and wrote is not None:
        messages = as_messages(prompt, "prompt") + as_messages(wrote, "completion")
    return Rollout(place, FORMAT.name, messages, stated=stated)


def _may_hold_ids(value: Any, depth: int = 6) -> bool:
    """Whether a value may hold a list of ids, at any depth that logs have."""
    if isinstance(value, Mapping):
        return depth > 0 and any(_may_hold_ids(inner, depth - 1) for inner in value.values())
    if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        return depth > 0 and any(_may_hold_ids(inner, depth - 1) for inner in value[:8])
    return holds_ids(value)


def _is_text(value: Any) -> bool:
    """True for a text, messages, or a list of either."""
    if isinstance(value, list | tuple) and value and not isinstance(value[0], Mapping):
        return all(isinstance(part, str) or is_messages(part) for part in value[:4])
    return isinstance(value, str) or is_messages(value)


FORMAT = Format(
    name="text_only",
    title="Text without token ids",
    signature=Signature.of(
        way(
            keys("prompt", "question"),
            keys("completion", "response", before=", and ", after=", as text or messages, without ids"),
        ),
        way("gts", "output"),
        way("step", "completion", "advantages"),
        way("gen_step", "prompt", "completion"),
        way("input_prompt", "output_response"),
        way("head_version", "completion"),
        way("schema_version", "traj_idx"),
        way("trace_id", "branches"),
    ),
    precedence=280,
    matches=_matches,
    **SampleRows(_read, lambda row, before, part: row).functions,
    shows="Nothing: no ids were recorded. For the text logs that verl, TRL, ms-swift, SkyRL, AReaL and "
    "tinker-cookbook write by default, and for prime-rl's annotations, a notice says what to save or scan "
    "instead.",
)
