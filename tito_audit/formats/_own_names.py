"""Names of columns that are not tokens in any format: parameters, sizes, counts."""

from __future__ import annotations

import re

PARAMETER = "a parameter by its name"
_PARAMETER = re.compile(
    r"(?:^|_)stop(?:_|$|ping)|bad_?words|(?:^|_)(?:allowed|banned|suppress|forbidden|excluded?|forced|begin)_"
    r"|^(?:eos|bos|pad|unk|sep|cls|mask)(?:_token)?(?:_ids?|s|_tokens?)*$"
    r"|(?:^|_)(?:logit_?bias|vocab|lora|adapter|grid|thw|hw|seeds?|temperatures?)(?:_|$)"
    r"|special_(?:token_)?ids|special_tokens?$|additional_special",
    re.IGNORECASE,
)
_MEASURE = re.compile(
    r"(?:^|_)(?:lens?|lengths?|sizes?|counts?|nums?|n|shapes?|dims?|offsets?|cu_seqlens|seqlens?|indexes|indices"
    r"|index|idxs?|starts?|ends?|spans?|bounds|boundaries|ranks?|versions?|timestamps?|times?|durations?"
    r"|latency|latencies|positions?|pos|bytes|widths?|heights?|epochs?|scores?|rewards?|totals?)(?:_|$)",
    re.IGNORECASE,
)
_NUMBERED = re.compile(
    r"(?:^|_)(?:segments?|samples?|docs?|documents?|turns?|steps?|experts?|workers?|users?|groups?|types?|rows?"
    r"|images?|pages?|sources?|questions?|problems?|tasks?|nodes?|agents?|slots?|blocks?|layers?|roles?|files?"
    r"|retrieved|episodes?|envs?|seqs?|sequences?|batch|requests?|messages?|parents?|speakers?|sentences?|words?"
    r"|tools?|models?|chunks?|evidence|citations?)_ids?$"
    r"|^(?:segments|docs|documents|turns|experts|workers|types|layers|token_types)$",
    re.IGNORECASE,
)
_NO_LOSS = re.compile(
    r"(?:^|_)(?:prompt|user|system|special|valid|visible|image|pad|padding|padded|attention|attn|types?|causal"
    r"|eos|done|dones|terminal|ignored?|frozen|truncated?|segments?)(?:_|$)"
    r"|^is_(?!.*(?:train|loss|assist|action|respon|complet|sampl|generat))",
    re.IGNORECASE,
)


def in_snake_case(name: str) -> str:
    """A column's name in snake case: `stopTokenIds` is `stop_token_ids`."""
    return re.sub(r"[^0-9a-zA-Z]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).strip("_").lower()


def no_tokens_by_name(name: str) -> str:
    """Why a column of integers does not hold tokens, by its name, in a few words; "" if it may."""
    words = in_snake_case(name)
    if _PARAMETER.search(words):
        return PARAMETER
    if _MEASURE.search(words):
        return "sizes or places by its name"
    return "numbers of something else by its name" if _NUMBERED.search(words) else ""


def no_loss_mask_by_name(name: str) -> bool:
    """Whether flags with this name mark something other than trained tokens."""
    return bool(_NO_LOSS.search(in_snake_case(name)))
