"""A table of logs that hold only text: the shape of their rows, what writes them, and what to log instead.

A row has a shape if it has all of its keys with these values or kinds of value. A row with lists of ids or
logprobs under a usual name, at any depth, has none. The source of each shape is named above it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tito_audit.format import Row
from tito_audit.formats._calls import CALL_LOGPROBS, COMPLETION_IDS, PROMPT_IDS
from tito_audit.formats._columns import FLAT_IDS, MASKS, ROW_LOGPROBS, is_list, names_in
from tito_audit.record.edits import ABSENT

TOKEN_COLUMNS = frozenset({*FLAT_IDS, *PROMPT_IDS, *COMPLETION_IDS, *MASKS, *ROW_LOGPROBS, *CALL_LOGPROBS})
"""Columns of a log that records, or was meant to record, more than text."""
TEXT, OBJECT, LIST, TRUTH, WORDS = "a text", "an object", "a list", "true or false", "words"
"""Kinds of value; WORDS is a text, a message, a list of messages, or a list of texts."""
_TYPES: Mapping[str, Any] = {TEXT: str, OBJECT: Mapping, LIST: (list, tuple), TRUTH: bool}
_GATEWAY = (
    "put `tito-audit serve` between the agent and the model's server: its log holds the ids and logprobs of each "
    "call"
)
_RUN = f". To audit the run, {_GATEWAY}"
_HOSTED = f"The services behind it return no ids; with a model that you serve yourself, {_GATEWAY}"
_TOKENIZED = (
    "save the data set as the trainer tokenized it, in TRL `trainer.train_dataset.to_json(FILE)`: prompt_ids, "
    "chosen_ids and rejected_ids, or completion_ids and label for KTO"
)


@dataclass(frozen=True, slots=True)
class TextLog:
    """The shape of a row of one log without ids."""

    keys: Mapping[str, str | tuple[str, ...]]
    """The keys that such a row has, as paths (`eval.task`; `results[].id` in the first entry of a list), with the
    kind of value or the values it may have; a value that ends in `*` is the beginning of one; "": any."""
    what: str
    """What it is and what to log instead, after "this is"."""
    any_ids: bool = False
    """Whether a row is of this shape even if it holds lists that may be ids."""


def _with(*keys: str, **values: str | tuple[str, ...]) -> dict[str, str | tuple[str, ...]]:
    """Keys with any value, then keys with a kind of value; `__` in a name stands for the dot of a path."""
    return {**dict.fromkeys(keys, ""), **{name.replace("__", "."): value for name, value in values.items()}}


_CLAUDE = f"a Claude Code transcript. {_HOSTED}"
_PREFERENCE = f"preference data as text. To audit it, {_TOKENIZED}"
_VERL = (
    "a verl rollout log. It holds decoded text, special tokens removed. Save the agent loop's output "
    "instead: prompt_ids, response_ids, response_mask and response_logprobs, one object per sample; or the "
    "batch: prompts, responses, attention_mask, response_mask and rollout_log_probs as lists"
)
_TRL = (
    "a TRL completions log. It holds decoded text, special tokens removed. Save what the rollout "
    "function returns instead: prompt_ids, completion_ids, logprobs and env_mask, one object per sample or "
    "batch"
)
_SKYRL = (
    "a SkyRL evaluation log. It holds decoded text. Save the generator's output instead: "
    "prompt_token_ids, response_ids, loss_masks and rollout_logprobs, one object per batch"
)
_AREAL = (
    "an AReaL rollout dump. It holds decoded text. Save the model response of each call instead: "
    "input_tokens, output_tokens, output_logprobs and output_versions; or the tensors of a trajectory as "
    "lists: input_ids, loss_mask, logprobs, versions and attention_mask"
)
_TINKER = (
    "a tinker-cookbook rollout summary. It holds lengths and rewards. Save the datums used for training "
    "instead, one object each: model_input and loss_fn_inputs"
)
_SWIFT = (
    "an ms-swift completions log. It holds decoded text. Save the response of each rollout output "
    "instead, one object per call: prompt_token_ids, and token_ids and logprobs of its choice"
)
_ANNOTATIONS = (
    " of prime-rl, beside its traces. Ids and the sampler's logprobs are in the episodes: scan traces/stream, "
    "with sealed chunks (.jsonl.zst) or without, and the annotations beside it are joined"
)
_SPAN = f"an OpenTelemetry span. To audit the model call, {_GATEWAY}"
_SPAN_KINDS = names_in("GENERATION SPAN EVENT AGENT TOOL CHAIN RETRIEVER EVALUATOR EMBEDDING GUARDRAIL")
_OPENHANDS = ("MessageEvent", "ActionEvent", "ObservationEvent", "SystemPromptEvent", "AgentErrorEvent")

TEXT_LOGS: Sequence[TextLog] = (
    # verl `trainer/ppo/ray_trainer.py`, TRL `trainer/grpo_trainer.py`, SkyRL, AReaL, tinker-cookbook
    TextLog(_with("gts", "output"), _VERL, any_ids=True),
    TextLog(_with("step", "completion", "advantage"), _TRL, any_ids=True),
    TextLog(_with("input_prompt", "output_response"), _SKYRL, any_ids=True),
    TextLog(_with("head_version", "completion"), _AREAL, any_ids=True),
    TextLog(_with("schema_version", "traj_idx"), _TINKER, any_ids=True),
    # ms-swift 4.6 `swift/rlhf_trainers/grpo_trainer.py` (`log`), `swift/ray/megatron/base_trainer.py`
    TextLog(_with("step", "completion", "advantages"), _SWIFT, any_ids=True),
    TextLog(_with("gen_step", "prompt", "completion"), _SWIFT, any_ids=True),
    # prime-rl `src/prime_rl/monitors/file/traces/update.py` (`make_update`)
    TextLog(_with("trace_id", "branches"), f"a stream of annotations{_ANNOTATIONS}", any_ids=True),
    TextLog(_with("trace_id", "chunk"), f"an index of annotations{_ANNOTATIONS}", any_ids=True),
    # SWE-agent `sweagent/agent/agents.py` (`get_trajectory_data`)
    TextLog(_with("environment", trajectory=LIST, history=LIST, info=OBJECT), f"a SWE-agent trajectory{_RUN}"),
    # mini-swe-agent 2.4 `agents/default.py` (`serialize`)
    TextLog(_with(messages=LIST, trajectory_format=("mini-swe-agent*",)), f"a mini-SWE-agent trajectory{_RUN}"),
    # OpenHands `evaluation/utils/shared.py` (`EvalOutput`); events of the SDK
    TextLog(
        _with("instance_id", "instruction", history=LIST, test_result=OBJECT),
        f"an OpenHands evaluation{_RUN}",
    ),
    TextLog(
        _with("id", "timestamp", kind=_OPENHANDS, source=("agent", "user", "environment")),
        f"an OpenHands event{_RUN}",
    ),
    # inspect_ai 0.3 `log/_log.py` (`EvalLog`, `EvalSample`)
    TextLog(
        _with("plan", status=("started", "success", "cancelled", "error"), eval__task=TEXT, eval__run_id=TEXT),
        f"an inspect_ai evaluation log{_RUN}",
    ),
    TextLog(
        _with("id", "epoch", "input", "target", messages=LIST, output=OBJECT, scores=OBJECT),
        f"a sample of an inspect_ai evaluation log{_RUN}",
    ),
    # terminal-bench 0.2 `harness/models.py` (`TrialResults`)
    TextLog(
        _with("is_resolved", "failure_mode", trial_name=TEXT, task_id=TEXT, instruction=TEXT),
        f"a result of terminal-bench{_RUN}",
    ),
    TextLog(
        {"results[].is_resolved": "", "results[].trial_name": TEXT}, f"a results file of terminal-bench{_RUN}"
    ),
    # LiteLLM `types/utils.py` (`StandardLoggingPayload`)
    TextLog(
        _with(
            "call_type",
            "response_cost",
            model_map_information=OBJECT,
            model_parameters=OBJECT,
            hidden_params=OBJECT,
        ),
        f"a LiteLLM log. To audit the calls, {_GATEWAY}",
    ),
    # Langfuse 5 `api/commons/types/observation_v2.py`
    TextLog(
        _with("id", "parentObservationId", traceId=TEXT, startTime=TEXT, type=_SPAN_KINDS),
        f"a Langfuse observation. To audit the calls, {_GATEWAY}",
    ),
    # OpenTelemetry: OTLP as JSON, and spans with the attributes of the GenAI conventions
    TextLog(_with(resourceSpans=LIST), f"an OpenTelemetry trace. To audit its model calls, {_GATEWAY}"),
    TextLog({"attributes.gen_ai.operation.name": TEXT}, _SPAN),
    TextLog({"attributes.gen_ai.request.model": TEXT}, _SPAN),
    # Transcripts of Claude Code 2 (`~/.claude/projects/*/*.jsonl`), by the type of their lines
    TextLog(_with("parentUuid", "uuid", "isSidechain", sessionId=TEXT), _CLAUDE),
    TextLog(_with("leafUuid", summary=TEXT, type=("summary",)), _CLAUDE),
    TextLog(_with("snapshot", messageId=TEXT, type=("file-history-snapshot",)), _CLAUDE),
    TextLog(
        _with(
            sessionId=TEXT,
            type=("queue-operation", "mode", "permission-mode", "ai-title", "custom-title", "last-prompt"),
        ),
        _CLAUDE,
    ),
    # Codex (`~/.codex/sessions/**/rollout-*.jsonl`)
    TextLog(
        _with(
            payload=OBJECT,
            timestamp=TEXT,
            type=("session_meta", "turn_context", "response_item", "event_msg", "compacted"),
        ),
        f"a Codex transcript. {_HOSTED}",
    ),
    # OpenAI, the files of fine-tuning by preference
    TextLog(
        _with(input__messages=LIST, preferred_output=LIST, non_preferred_output=LIST),
        "an OpenAI fine-tuning file. The service returns no ids; to train a model of your own on it, write "
        f"prompt, chosen and rejected for your trainer, and {_TOKENIZED}",
    ),
    TextLog(
        _with(messages=LIST, parallel_tool_calls=TRUTH),
        "an OpenAI fine-tuning file. The service returns no ids; to audit it for a model of your own, tokenize it "
        "with the trainer and save input_ids and labels",
    ),
    # TRL `docs/source/dataset_formats.md`, axolotl, LLaMA-Factory `data/README.md`
    TextLog(_with(chosen=WORDS, rejected=WORDS), _PREFERENCE),
    TextLog(_with(kto_tag=TRUTH), _PREFERENCE),
)
"""Every shape; the first that a row has counts."""
_EXAMINED = 8
_TOKEN_COLUMN_NAME = re.compile(
    r"token_ids|logprobs|log_probs|(?:^|[._])(?:input|prompt|completion|response|output|chosen|rejected)_ids$"
)


_SHAPES_DESPITE_IDS, _SHAPES_WITHOUT_IDS = (
    [
        (shape, frozenset(path for path in shape.keys if "." not in path and "[" not in path))
        for shape in TEXT_LOGS
        if shape.any_ids is whatever
    ]
    for whatever in (True, False)
)
"""Each shape with its top-level keys, which are looked up before its paths are followed."""


def text_log(row: Row) -> TextLog | None:
    """The shape of a row without ids; None if it has none, or holds ids."""
    for shape, plain_keys in _SHAPES_WITHOUT_IDS:
        if plain_keys <= row.keys() and _has_shape(row, shape):
            return None if _holds_tokens(row) else shape
    return None


def text_log_despite_ids(row: Row) -> TextLog | None:
    """The shape of a row, first among those that a row has even if it holds lists of ids."""
    for shape, plain_keys in _SHAPES_DESPITE_IDS:
        if plain_keys <= row.keys() and _has_shape(row, shape):
            return shape
    return text_log(row)


def text_log_notice(row: Row, read_as: str) -> str:
    """What reports say of a row without ids, read as the format `read_as`: what it is and what to log instead.

    "" if it is no known log of text.
    """
    read = {"text_only": text_log_despite_ids, "openai_chat": text_log}.get(read_as)
    shape = read(row) if read is not None else None
    return "" if shape is None else f"No token ids: this is {shape.what}."


def _has_shape(row: Row, shape: TextLog) -> bool:
    if not all(path in row or path.partition(".")[0].removesuffix("[]") in row for path in shape.keys):
        return False
    for path, wanted in shape.keys.items():
        if not wanted and path in row:
            continue
        value: Any = row
        while path and isinstance(value, Mapping):
            # A key may contain dots, as attributes of spans do.
            key, _, path = (path, "", "") if path in value else path.partition(".")
            value = value.get(key.removesuffix("[]"), ABSENT)
            if key.endswith("[]"):
                value = value[0] if isinstance(value, list | tuple) and value else ABSENT
        if path or value is ABSENT:
            return False
        if isinstance(wanted, tuple):
            fits = isinstance(value, str) and any(value == w or w == f"{value[: len(w) - 1]}*" for w in wanted)
        elif wanted == WORDS:
            # A message of OpenAI's form has a content, one of ShareGPT's a value.
            parts = value if isinstance(value, list | tuple) and value else (value,)
            fits = all(
                isinstance(part, str) or (isinstance(part, Mapping) and ("content" in part or "value" in part))
                for part in parts[:_EXAMINED]
            )
        else:
            fits = not wanted or isinstance(value, _TYPES[wanted])
        if not fits:
            return False
    return True


def _holds_tokens(value: Any, depth: int = 12) -> bool:
    """Whether a row holds ids or logprobs, at any depth, by the names of its keys."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(inner, Mapping | list | tuple | np.ndarray) and len(inner):
                if name in TOKEN_COLUMNS or _TOKEN_COLUMN_NAME.search(str(name)):
                    return True
                if depth and _holds_tokens(inner, depth - 1):
                    return True
            elif name == "key" and isinstance(inner, str) and _TOKEN_COLUMN_NAME.search(inner):
                return True  # an attribute of OTLP: {"key": …, "value": …}
        return False
    return is_list(value) and depth > 0 and any(_holds_tokens(inner, depth - 1) for inner in value[:_EXAMINED])
