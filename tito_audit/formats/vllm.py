"""vLLM answers as a caller logs them: chat, completions and `/inference/v1/generate`.

The ids are there if the request set `return_token_ids`, or are strings `token_id:N` if it asked for
`return_tokens_as_token_ids` and logprobs. vllm-project/vllm `vllm/entrypoints/openai/`.
"""

from __future__ import annotations

from tito_audit.format import Signature
from tito_audit.formats._answers import response_format
from tito_audit.formats._responses import Exchange, first_choices, is_token_id_string
from tito_audit.formats._update import object_at


def holds_ids(logged: Exchange) -> bool:
    """Whether an answer has ids in their own list, or as token strings."""
    if any(response.get("prompt_token_ids") is not None for response in logged.responses):
        return True
    for choice in first_choices(logged):
        logprobs = object_at(choice, "logprobs")
        first = object_at(logprobs, "content", 0)
        tokens = [first.get("token")] if first else logprobs.get("tokens")
        if choice.get("token_ids") is not None or choice.get("prompt_token_ids") is not None:
            return True
        if isinstance(tokens, list | tuple) and tokens and is_token_id_string(tokens[0]):
            return True
    return False


FORMAT = response_format(
    "vllm",
    holds_ids,
    title="vLLM responses",
    signature=Signature(
        "{choices[].token_ids}; or {prompt_token_ids} beside {choices}; or token strings `token_id:N`"
    ),
    precedence=240,
    shows="The call's completion and logprobs, its prompt if the answer or the request holds it; messages "
    "and tools only when the request was logged too. One rollout per choice; rows of one conversation are "
    "read together.",
)
