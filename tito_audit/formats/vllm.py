"""vLLM answers as a caller logs them: chat, completions and `/inference/v1/generate`.

The ids are there if the request set `return_token_ids`, or are strings `token_id:N` if it asked for
`return_tokens_as_token_ids` and logprobs. vllm-project/vllm `vllm/entrypoints/openai/`.
"""

from __future__ import annotations

from functools import partial

from tito_audit.format import Format, Row
from tito_audit.formats._responses_log import exchange, has_server_ids
from tito_audit.formats._responses_read import ONE_CALL, choice_sources, rollouts_of
from tito_audit.formats._writer import calls_written
from tito_audit.signature import Signature, Way, keys, way


def _matches(row: Row) -> bool:
    found = exchange(row)
    return found is not None and has_server_ids(found)


_NAME = "vllm"
_READ = partial(rollouts_of, name=_NAME)
FORMAT = Format(
    name=_NAME,
    title="vLLM responses",
    signature=Signature.of(
        way("choices[].token_ids"),
        way("prompt_token_ids", keys("choices", before=" beside ")),
        Way(words="token strings `token_id:N`"),
    ),
    precedence=240,
    matches=_matches,
    read=_READ,
    sources=choice_sources,
    update=calls_written(_READ, choice_sources, stays=ONE_CALL),
    shows="The call's completion and logprobs, its prompt if the answer or the request holds it; messages "
    "and tools only when the request was logged too. One rollout a choice; calls of one conversation are "
    "not joined.",
)
