"""What a rule may need of a rollout, and the words for what is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, Flag, auto
from typing import Final

from tito_audit.record.stated import NotRead, Unread


class Needs(Flag):
    """What a rule needs; members joined by | are alternatives."""

    NOTHING = 0
    MESSAGES = auto()
    PROMPTS = auto()
    COMPLETIONS = auto()
    COMPLETION_LOGPROBS = auto()
    SEVERAL_CALLS = auto()
    ROW = auto()
    MASK = auto()
    ROW_LOGPROBS = auto()
    TOKENIZER = auto()
    RENDERING = auto()
    SAMPLED = auto()
    WEIGHT_VERSIONS = auto()
    HIDDEN = auto()
    TRAINER_LOGPROBS = auto()
    IMAGES = auto()
    IMAGE_TOKENS = auto()
    """Image tokens that are known, or messages without images."""
    HISTORY = auto()
    """Several calls, or a rendered prompt: something to compare the history of a call with."""
    TEMPLATE = auto()
    EXPERTS = auto()
    EXPERTS_READ = auto()
    """Routed experts in a known form."""
    KEPT_SETS = auto()
    KEPT_SETS_READ = auto()
    CREDIT = auto()
    """Advantages, rewards, or the length of the response."""


class Absent(Enum):
    """What it means for a rule if a rollout lacks what the rule needs."""

    MISSING = auto()
    """The rule could not look: ids, logprobs, a loss mask, messages, the tokenizer or its template is missing."""
    ELSEWHERE = auto()
    """There is nothing to check if the rollout holds the same in its other form: calls, or a training row."""
    NOTHING = auto()
    """There is nothing to check: a single call has no link to another."""


_LACKED: Final[Mapping[Needs, tuple[Absent, str]]] = {
    Needs.MESSAGES: (Absent.MISSING, "no messages"),
    Needs.PROMPTS: (Absent.ELSEWHERE, "no prompt ids"),
    Needs.COMPLETIONS: (Absent.ELSEWHERE, "no completion ids"),
    Needs.COMPLETION_LOGPROBS: (Absent.ELSEWHERE, "no logprobs"),
    Needs.SEVERAL_CALLS: (Absent.NOTHING, "only one call"),
    Needs.ROW: (Absent.ELSEWHERE, "no training row"),
    Needs.MASK: (Absent.MISSING, "no loss mask"),
    Needs.ROW_LOGPROBS: (Absent.ELSEWHERE, "no logprobs in a training row"),
    Needs.TOKENIZER: (Absent.MISSING, "no tokenizer"),
    Needs.RENDERING: (Absent.MISSING, "no rendered prompt (messages, template or ids missing)"),
    Needs.SAMPLED: (Absent.MISSING, "nothing says which tokens were sampled (calls or messages missing)"),
    Needs.WEIGHT_VERSIONS: (Absent.NOTHING, "no weight versions"),
    Needs.HIDDEN: (Absent.NOTHING, ""),
    Needs.TRAINER_LOGPROBS: (Absent.NOTHING, "no logprobs of the trainer next to the sampler's"),
    Needs.IMAGES: (Absent.NOTHING, ""),
    Needs.IMAGE_TOKENS: (Absent.MISSING, "the tokenizer's image tokens are unknown"),
    Needs.HISTORY: (Absent.NOTHING, "only one call and no rendered prompt (messages, template or ids missing)"),
    Needs.TEMPLATE: (Absent.MISSING, "no chat template"),
    Needs.EXPERTS: (Absent.NOTHING, "no routed experts"),
    Needs.EXPERTS_READ: (Absent.MISSING, "the form of the routed experts is not known"),
    Needs.KEPT_SETS: (Absent.NOTHING, "no kept-token sets"),
    Needs.KEPT_SETS_READ: (Absent.MISSING, "the form of the kept-token sets is not known"),
    Needs.CREDIT: (Absent.NOTHING, "no advantages or rewards"),
}
"""For each need, what it means if a rollout lacks it, and how to say so."""
_CALLS = Needs.PROMPTS | Needs.COMPLETIONS
_IDS = _CALLS | Needs.ROW


RARE = frozenset(
    _LACKED[need][1]
    for need in (Needs.WEIGHT_VERSIONS, Needs.TRAINER_LOGPROBS, Needs.EXPERTS, Needs.KEPT_SETS, Needs.CREDIT)
)
"""The words for what most logs do not have and need not have."""
_DEPENDS_ON = {
    Needs.IMAGE_TOKENS: Needs.IMAGES,
    Needs.EXPERTS_READ: Needs.EXPERTS,
    Needs.KEPT_SETS_READ: Needs.KEPT_SETS,
}
"""A need that matters only if another one is met: image tokens, only if there are images."""


_MISSING = re.compile(r" \([^()]* missing\)")
"""The part of a message that says what is missing."""
_UNREAD = {
    Unread.MESSAGES: (Needs.MESSAGES, Needs.MESSAGES | Needs.RENDERING | Needs.SAMPLED | Needs.HISTORY),
    Unread.PROMPTS: (Needs.PROMPTS, Needs.PROMPTS | Needs.RENDERING | Needs.HISTORY),
    Unread.IDS: (Needs.COMPLETIONS | Needs.ROW, Needs.PROMPTS | Needs.COMPLETIONS | Needs.ROW),
    Unread.CALLS: (Needs.SAMPLED, Needs.SAMPLED),
}
"""For each thing a format did not read: what the rollout then lacks, and the needs that this leaves unmet."""


def describe_missing(need: Needs, present: Needs = Needs.NOTHING, reasons: tuple[NotRead, ...] = ()) -> str:
    """Why a rule that needs one of these could not run, in words for the summary, with the format's reasons."""
    named = need & ~Needs.ROW_LOGPROBS if Needs.COMPLETION_LOGPROBS in need else need  # "no logprobs" says both
    if need in _DEPENDS_ON and not present & _DEPENDS_ON[need] and _LACKED[_DEPENDS_ON[need]][1]:
        named = _DEPENDS_ON[need]
    words = " and ".join(dict.fromkeys(words for name in named if (words := _LACKED[name][1])))
    explains = []
    for reason in reasons:
        lacked, unmet = _UNREAD[reason.what]
        if need & unmet and not lacked & present:
            explains.append(reason)
    if not all(reason.used for reason in explains):
        words = _MISSING.sub("", words)  # the log has it
    return "; ".join((words, *map(str, explains)))


def applies(needs: tuple[Needs, ...], present: Needs) -> bool:
    """Whether a rule with these needs has something to check in a rollout that has what is `present`.

    False if the rollout by its nature holds nothing for the rule, though no ids are missing: a single call has no
    link to check, a log of calls no training row to compare them with.
    """
    if any(need in _IDS and not need & present and not _nothing_to_check(need, present) for need in needs if need):
        return True  # the ids that the rule would check are missing
    return not any(need and _nothing_to_check(need, present) for need in needs)


def _nothing_to_check(need: Needs, present: Needs) -> bool:
    """Whether a rollout meets no alternative of this need, and none of them is missing."""
    need = _DEPENDS_ON.get(need, need)
    if need & present:
        return False
    for part in need:
        absent, _ = _LACKED[part]
        elsewhere = absent is Absent.NOTHING
        if absent is Absent.ELSEWHERE and part in _CALLS:
            elsewhere = Needs.ROW in present and not present & (_CALLS | Needs.SEVERAL_CALLS)
        elif absent is Absent.ELSEWHERE and part is Needs.ROW:
            elsewhere = Needs.COMPLETIONS in present
        elif absent is Absent.ELSEWHERE:
            elsewhere = bool(present & (Needs.COMPLETION_LOGPROBS | Needs.ROW_LOGPROBS))
        if not elsewhere:
            return False
    return True
