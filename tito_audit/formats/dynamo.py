"""Answers of an NVIDIA Dynamo frontend as a caller logs them: chat and completions.

The ids of the only choice are beside it, in `nvext`, if the request asked for them
(`nvext.extra_fields: ["completion_token_ids"]`); a vLLM worker may add `engine_data` with the prompt's ids and
logprobs. ai-dynamo/dynamo `lib/llm/src/protocols/openai/nvext.rs` (`NvExtResponse`); ai-dynamo 1.6.1,
`dynamo/vllm/handlers.py` (`_accumulate_engine_data`).
"""

from __future__ import annotations

from tito_audit.format import Signature
from tito_audit.formats._answers import response_format
from tito_audit.formats._responses import nvext_parts

FORMAT = response_format(
    "dynamo",
    lambda logged: any(
        part.get("completion_token_ids") is not None
        for response in logged.responses
        for _, part in nvext_parts(response)
    ),
    title="Dynamo responses",
    signature=Signature(
        "{nvext.completion_token_ids}, {choices}; or {engine_data.completion_token_ids}, {choices}"
    ),
    precedence=235,
    shows="The call's completion and logprobs; its prompt where the worker adds `engine_data` or the request was "
    "logged with ids; messages and tools only when the request was logged too. Rows of one conversation are read "
    "together.",
)
