"""MSK401: tokens in the loss that no model call sampled."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator

from tito_audit.evidence.model import Evidence, Verified
from tito_audit.evidence.needs import Needs
from tito_audit.evidence.roles import GENERATION_PROMPT, TEMPLATE, TURN_END, UNKNOWN, unclear_roles
from tito_audit.evidence.sft import is_sft
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.rollout import hidden_and_trained
from tito_audit.record.runs import trained_runs
from tito_audit.record.speakers import ASSISTANT
from tito_audit.rule import rule
from tito_audit.rules._masks import judged_mask
from tito_audit.rules._words import counted, head
from tito_audit.terminal.words import listed

_MOST = 3


def unknown_role(evidence: Evidence) -> Iterator[Hit]:
    """One hit for a row in which an unknown role leaves open what was sampled."""
    unclear, row = unclear_roles(evidence), evidence.rollout.training_row
    if unclear is None or row is None:
        return
    start, end = next(iter(trained_runs(unclear.tokens)), (0, 0))
    names = [repr(name) for name in unclear.names[:_MOST]]
    if len(unclear.names) > _MOST:
        names.append(f"{len(unclear.names) - _MOST:,} more")
    several = len(unclear.names) > 1
    wrote = "them" if several else "it"
    # The options name the role as sampled, and with it the roles that already count as sampled.
    sampled_roles = [message.role for message in evidence.rollout.messages if message.sampled]
    spoken = [ASSISTANT] if evidence.row is not None and evidence.row.sampled.any() else []
    roles = dict.fromkeys((*(evidence.speakers.stated or sampled_roles or spoken), unclear.names[0]))
    options = " ".join(f"--sampled-role {shlex.quote(role)}" for role in roles)
    which = "the assistant wrote" if is_sft(evidence.rollout) else "were sampled"
    message = (
        f"cannot tell which tokens {which}: {'roles' if several else 'role'} {listed(names)} "
        f"{'are' if several else 'is'} not known to be sampled or given; pass {options} "
        f"if the model wrote {wrote}"
    )
    side = head(evidence, row.token_ids[start:end])
    yield Hit(Where.ROW, start, end, message, None, "unknown role", Severity.WARNING, side)


_PHRASES = {
    TEMPLATE: "template",
    GENERATION_PROMPT: "generation prompt",
    TURN_END: "turn end",
    "prefill": "prefilled answer",
    ASSISTANT: "answer that no call sampled",
    UNKNOWN: "unknown origin",
}
_SCAFFOLD = (TEMPLATE, GENERATION_PROMPT, TURN_END)


@rule(
    "MSK401",
    Severity.ERROR,
    headline="{n} with trained tokens that were never sampled",
    needs=(Needs.MASK, Needs.SAMPLED | Needs.HIDDEN),
    silent=Verified.MASK,
)
def trained_but_not_sampled(evidence: Evidence) -> Iterator[Hit]:
    """Trained tokens that were never sampled.

    ## What it finds
    Tokens under the loss mask that belong to the template, to a system, user or tool message, to the generation
    prompt or to a prefill. If trained runs lie some places before or after the sampled ones, and nothing else
    explains the row, the finding says how far the mask slid. Also trained tokens that the row's attention mask
    hides: padding in the loss, or tokens that nothing attends to.

    In a set for SFT, trained tokens that the assistant did not write. White space after a turn end and the header
    of an answer, which some trainers add to the loss, count as written by the assistant.

    A mask that is wrong as a whole belongs to MSK403, an appended turn end to MSK404, and re-tokenized answers to
    the TOK and TPL rules. A role that is neither known nor named with `--sampled-role` is reported once per row,
    as a warning: nothing shows whether its tokens were sampled, so they are not judged.

    ## Why it matters
    The policy gradient assumes that each trained token was drawn from the policy. Tokens that were given teach the
    model to write user messages, tool results and role markers; and since their logprobs are placeholders, their
    importance ratios mean nothing.

    ## Example
    The user's message is trained:

    ```text
    error MSK401 row 4:5
      1 trained token was never sampled (user message); the loss teaches the model to write what it
      was given
           0 │<|im_start|>│us │er │⏎  │2 │<|im_end|>│⏎  │<|im_start|>│assistant│⏎  │4 │!│<|im_end|>│
                                       #                                            =  = ==========
          id  2001         314 257 198 17 2002       198 2001         1620      198 19 0 2002
    ```

    ## Repair
    `splice` rebuilds the mask from the calls; `mask` takes the tokens out of the loss.
    """
    yield from unknown_role(evidence)
    row = evidence.rollout.training_row
    hidden = hidden_and_trained(row)
    if row is not None and hidden is not None:
        for start, end in trained_runs(hidden):
            message = (
                f"{counted(end - start, 'trained token')} {'is' if end - start == 1 else 'are'} hidden by "
                "`attention_mask`; the loss trains what the model treats as padding"
            )
            recorded = head(evidence, row.token_ids[start:end])
            yield Hit(Where.ROW, start, end, message, cause="hidden by the attention mask", recorded=recorded)
    mask = judged_mask(evidence)
    if mask is None:
        return
    origin, sampled, after = mask.view.roles, mask.view.sampled, 0
    for start, end in trained_runs(mask.not_sampled if hidden is None else mask.not_sampled & ~hidden):
        roles: Counter[str] = Counter()
        for position in range(start, end):
            role = origin[position]
            if role == ASSISTANT:  # a prefill, if a sampled token follows in the same answer
                after = max(after, position)
                while after < len(origin) and origin[after] == ASSISTANT and not sampled[after]:
                    after += 1
                role = "prefill" if after < len(origin) and sampled[after] else ASSISTANT
            roles[role] += 1
        # The most common role of the run, but the text of a message before the scaffold around it.
        leading, *others = (role for role, _ in roles.most_common())
        leading = next((role for role in (leading, *others) if role not in _SCAFFOLD), leading)
        off = bool(mask.in_slide[start:end].all())
        cause = {UNKNOWN: "not sampled", ASSISTANT: "answer of no call"}.get(leading, leading)
        cause = f"slid by {mask.slide:+d}" if off else "undecided" if mask.readings else cause
        alone = len(roles) == 1
        origins = listed([_phrase(role) if alone else f"{n} {_phrase(role)}" for role, n in roles.most_common()])
        slid = f"; undecided: {listed(mask.readings, 'or')}" if mask.readings else ""
        slid = f"; {mask.slide_words}" if off else slid
        verb = "was" if end - start == 1 else "were"
        never = "not written by the assistant" if is_sft(evidence.rollout) else "never sampled"
        message = (
            f"{counted(end - start, 'trained token')} {verb} {never} ({origins}){slid}; "
            "the loss teaches the model to write what it was given"
        )
        headline = "{n} with trained tokens that the assistant did not write" if is_sft(evidence.rollout) else ""
        yield mask.hit(evidence, start, end, message, cause, headline=headline)


def _phrase(role: str) -> str:
    return _PHRASES.get(role, f"{role} message")
