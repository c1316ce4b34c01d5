"""What a rule may need, and the words for what is missing."""

from __future__ import annotations

from enum import Flag, auto

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


_WORDS = {
    Needs.MESSAGES: "no messages",
    Needs.PROMPTS: "no prompt ids",
    Needs.COMPLETIONS: "no completion ids",
    Needs.COMPLETION_LOGPROBS: "no logprobs",
    Needs.SEVERAL_CALLS: "only one call",
    Needs.ROW: "no training row",
    Needs.MASK: "no loss mask",
    Needs.ROW_LOGPROBS: "no logprobs in a training row",
    Needs.TOKENIZER: "no tokenizer",
    Needs.RENDERING: "no rendered prompt (messages, template or ids missing)",
    Needs.SAMPLED: "nothing says which tokens were sampled (calls or messages missing)",
    Needs.WEIGHT_VERSIONS: "no weight versions",
    Needs.TRAINER_LOGPROBS: "no logprobs of the trainer next to the sampler's",
    Needs.IMAGE_TOKENS: "how the tokenizer writes images is not known",
}


_UNREAD = {
    Unread.MESSAGES: (Needs.MESSAGES, Needs.MESSAGES | Needs.RENDERING | Needs.SAMPLED),
    Unread.PROMPTS: (Needs.PROMPTS, Needs.PROMPTS | Needs.RENDERING),
    Unread.IDS: (Needs.COMPLETIONS | Needs.ROW, Needs.PROMPTS | Needs.COMPLETIONS | Needs.ROW),
}
"""What was not read: what a rollout then lacks, and which needs it leaves unmet."""


def words_for(need: Needs, present: Needs = Needs.NOTHING, reasons: tuple[NotRead, ...] = ()) -> str:
    """Why a rule that needs one of these could not look, for the summary, with the format's reasons."""
    words = " and ".join(dict.fromkeys(_WORDS[one] for one in need if one in _WORDS))
    return "; ".join((words, *(str(one) for one in reasons if _explains(one, need, present))))


def _explains(reason: NotRead, need: Needs, present: Needs) -> bool:
    """Whether a need is unmet because something was not read."""
    lacked, unmet = _UNREAD[reason.what]
    return bool(need & unmet) and not lacked & present
