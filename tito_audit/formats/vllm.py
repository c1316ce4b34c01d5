"""vLLM answers as a caller logs them: chat, completions and `/inference/v1/generate`.

The ids are there if the request set `return_token_ids`, or are strings `token_id:N` if it asked for
`return_tokens_as_token_ids` and logprobs. vllm-project/vllm `vllm/entrypoints/openai/`.
"""

from __future__ import annotations

from tito_audit.formats._answers import format_of_answers
from tito_audit.formats._responses import has_server_ids
from tito_audit.signature import Signature

FORMAT = format_of_answers(
    "vllm",
    has_server_ids,
    title="vLLM responses",
    signature=Signature(
        "{choices[].token_ids}; or {prompt_token_ids} beside {choices}; or token strings `token_id:N`"
    ),
    precedence=240,
    shows="The call's completion and logprobs, its prompt if the answer or the request holds it; messages "
    "and tools only when the request was logged too. One rollout per choice; rows of one conversation are "
    "read together.",
)
