"""SGLang answers as a caller logs them: `/generate` and the chat endpoint with `return_meta_info`.

The ids are there twice, as `output_ids` and inside the `[logprob, id, text]` triples of `meta_info`; if the two
differ, `output_ids` is read and the difference reported. sgl-project/sglang.
"""

from __future__ import annotations

from functools import partial

from tito_audit.format import Format, Row
from tito_audit.formats._responses_log import exchange, has_meta_info
from tito_audit.formats._responses_read import ONE_CALL, choice_sources, rollouts_of
from tito_audit.formats._writer import calls_written
from tito_audit.signature import keys, one_way


def _matches(row: Row) -> bool:
    found = exchange(row)
    return found is not None and has_meta_info(found)


_NAME = "sglang"
_READ = partial(rollouts_of, name=_NAME)
FORMAT = Format(
    name=_NAME,
    title="SGLang responses",
    signature=one_way(
        "meta_info", keys("output_token_logprobs", before=" with ", after=", at the top or on `choices[]`")
    ),
    precedence=230,
    matches=_matches,
    read=_READ,
    sources=choice_sources,
    update=calls_written(_READ, choice_sources, stays=ONE_CALL),
    shows="The call's completion, logprobs and weight version; its prompt only when the request's "
    "`input_ids` or the prompt's scores were logged. Calls of one conversation are not joined.",
)
