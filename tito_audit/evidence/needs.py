"""What a rule may need, and the words for what is missing."""

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
    """Several calls, or a prompt that was rendered: what the history of a call is compared with."""
    TEMPLATE = auto()
    EXPERTS = auto()
    EXPERTS_READ = auto()
    """Routed experts in a form that is known."""
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
"""What it means if a rollout lacks each of the needs, and how to say so; an alternative means the worst of its
members."""
_CALLS = Needs.PROMPTS | Needs.COMPLETIONS
_IDS = _CALLS | Needs.ROW


RARE = frozenset(
    _LACKED[need][1]
    for need in (Needs.WEIGHT_VERSIONS, Needs.TRAINER_LOGPROBS, Needs.EXPERTS, Needs.KEPT_SETS, Needs.CREDIT)
)
"""What most logs lack by their nature, in words."""
_WITHIN = {
    Needs.IMAGE_TOKENS: Needs.IMAGES,
    Needs.EXPERTS_READ: Needs.EXPERTS,
    Needs.KEPT_SETS_READ: Needs.KEPT_SETS,
}
"""What does not matter without something else: without images, how the tokenizer writes them."""


_MISSING = re.compile(r" \([^()]* missing\)")
"""What is said to be missing."""

_UNREAD = {
    Unread.MESSAGES: (Needs.MESSAGES, Needs.MESSAGES | Needs.RENDERING | Needs.SAMPLED | Needs.HISTORY),
    Unread.PROMPTS: (Needs.PROMPTS, Needs.PROMPTS | Needs.RENDERING | Needs.HISTORY),
    Unread.IDS: (Needs.COMPLETIONS | Needs.ROW, Needs.PROMPTS | Needs.COMPLETIONS | Needs.ROW),
    Unread.CALLS: (Needs.SAMPLED, Needs.SAMPLED),
}
"""What was not read: what a rollout then lacks, and which needs it leaves unmet."""


def words_for(need: Needs, present: Needs = Needs.NOTHING, reasons: tuple[NotRead, ...] = ()) -> str:
    """Why a rule that needs one of these could not look, for the summary, with the format's reasons."""
    named = need & ~Needs.ROW_LOGPROBS if Needs.COMPLETION_LOGPROBS in need else need  # "no logprobs" says both
    if need in _WITHIN and not present & _WITHIN[need] and _LACKED[_WITHIN[need]][1]:
        named = _WITHIN[need]
    words = " and ".join(dict.fromkeys(words for name in named if (words := _LACKED[name][1])))
    explains = []
    for reason in reasons:
        lacked, unmet = _UNREAD[reason.what]
        if need & unmet and not lacked & present:
            explains.append(reason)
    if not all(reason.used for reason in explains):
        words = _MISSING.sub("", words)  # it is there
    return "; ".join((words, *map(str, explains)))


def applies(needs: tuple[Needs, ...], present: Needs) -> bool:
    """Whether a rule with these needs has something to check in a rollout that has what is `present`.

    False only if the rollout holds its ids, and by its nature nothing for the rule: a single call has no link to
    check, a log of calls no training row to compare them with.
    """
    if any(need in _IDS and not need & present and not _nothing(need, present) for need in needs if need):
        return True  # the ids that it would check are missing
    return not any(need and _nothing(need, present) for need in needs)


def _nothing(need: Needs, present: Needs) -> bool:
    """Whether a rollout holds nothing of any alternative, and nothing is missing for that."""
    need = _WITHIN.get(need, need)
    return not need & present and all(
        absent is Absent.NOTHING or (absent is Absent.ELSEWHERE and _elsewhere(part, present))
        for part in need
        for absent, _ in [_LACKED[part]]
    )


def _elsewhere(need: Needs, present: Needs) -> bool:
    """Whether a rollout holds in its other form what it lacks in this one."""
    if need in _CALLS:
        return Needs.ROW in present and not present & (_CALLS | Needs.SEVERAL_CALLS)
    if need is Needs.ROW:
        return Needs.COMPLETIONS in present
    return bool(present & (Needs.COMPLETION_LOGPROBS | Needs.ROW_LOGPROBS))
