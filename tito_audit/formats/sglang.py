"""SGLang answers as a caller logs them: `/generate` and the chat endpoint with `return_meta_info`.

The ids are there twice, as `output_ids` and inside the `[logprob, id, text]` triples of `meta_info`; if the two
differ, `output_ids` is read and the difference reported. sgl-project/sglang.
"""

from __future__ import annotations

from collections.abc import Mapping

from tito_audit.format import Signature
from tito_audit.formats._answers import response_format
from tito_audit.formats._responses import first_choices

FORMAT = response_format(
    "sglang",
    lambda logged: any(isinstance(choice.get("meta_info"), Mapping) for choice in first_choices(logged)),
    title="SGLang responses",
    signature=Signature("{meta_info} with {output_token_logprobs}, at the top or on `choices[]`"),
    precedence=230,
    shows="The call's completion, logprobs and weight version; its prompt only when the request's "
    "`input_ids` or the prompt's scores were logged. Rows of one conversation are read together.",
)
