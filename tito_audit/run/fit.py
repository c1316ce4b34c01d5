"""Fit: whether the first rows of a log were written with a tokenizer and chat template.

The tests are coarse, so that a fault in a row is not mistaken for a misfit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tito_audit.errors import EncodeError
from tito_audit.evidence.reference import Reference
from tito_audit.identify.engine import TestableRows, select_testable, tokenizer_misfit
from tito_audit.record.finding import Finding, Hit, Severity, Where
from tito_audit.record.rollout import Rollout
from tito_audit.render.renderer import Renderer
from tito_audit.run.headlines import with_headline
from tito_audit.terminal.escape import shell_word
from tito_audit.terminal.words import listed
from tito_audit.tokens.hub import cached_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

MISFIT_CODE = "REC007"
ANOTHER_TOKENIZER, ANOTHER_TEMPLATE = "another tokenizer", "another chat template"
"""The causes of the finding."""
TESTED_ROLLOUTS = 16
"""How many rollouts with ids are tested."""


def find_misfit(rollouts: Sequence[Rollout], tokenizer: Tokenizer, renderer: Renderer | None) -> Finding | None:
    """The finding that a log, by its first rollouts, was written with another tokenizer or template; else None.

    Also None if the tokenizer cannot encode them, which the audit of each row reports.
    """
    rows = select_testable(rollouts)
    if not rows:
        return None
    reference = Reference(tokenizer, renderer)
    cause = ANOTHER_TOKENIZER
    try:
        why = tokenizer_misfit(rows, reference)
        if why is None and renderer is not None:
            why, cause = _not_the_template(rows, reference), ANOTHER_TEMPLATE
    except EncodeError:
        return None
    if why is None:
        return None
    named = stated_names(rollouts)
    names = listed([f"its {key} '{name}'" for key, name in named.items()])
    advice = f"the log names {names}; " if names else ""
    cached = next(filter(None, (cached_tokenizer(name) for name in named.values() if "/" in name)), None)
    if cached is not None:
        advice += f"pass -t {shell_word(cached.name)}, which is on this machine, or else "
    if cause == ANOTHER_TOKENIZER:
        what = f"tokenizer {tokenizer.name}"
        advice += "pass the tokenizer of the model that sampled it (-t NAME)"
    else:
        what = f"chat template of {tokenizer.name}, or the one that was given"
        advice += "pass the template that the sampler used (--chat-template FILE), or that tokenizer (-t NAME)"
    identify = f"`tito-audit identify {shell_word(rollouts[0].place.file)}` tries those on this machine"
    message = f"{why}: this log was not written with the {what}; {advice}; {identify}"
    hit = Hit(Where.LOG, 0, 0, message, cause=cause, severity=Severity.ERROR)
    return with_headline(Finding(MISFIT_CODE, Severity.ERROR, rows[0][0].place, hit))


def stated_names(rollouts: Iterable[Rollout]) -> dict[str, str]:
    """The names that a log states for its `tokenizer` and its `model`, the first of each."""
    named: dict[str, str] = {}
    for rollout in rollouts:
        for key, value in (("tokenizer", rollout.stated.tokenizer), ("model", rollout.stated.model)):
            if value is not None and value.strip():
                named.setdefault(key, value.strip()[:100])
    return named


def _not_the_template(rows_tested: TestableRows, reference: Reference) -> str | None:
    """Why the template cannot have written these rows; None if it can have, or if that is unclear."""
    recorded: Counter[str] = Counter()
    rendered: Counter[str] = Counter()
    # Control tokens, without BOS and end tokens.
    vocabulary, ends = reference.vocabulary, reference.end_ids() | {reference.tokenizer.bos_id}
    pieces = [vocabulary.piece(token) for token in vocabulary.special_ids - ends]
    rows = 0
    for rollout, all_ids in rows_tested:
        if rows == 6:  # as many rendered rows suffice
            break
        text = None
        if rollout.messages and reference.renderer is not None:
            text = reference.renderer.try_render(
                rollout.messages,
                rollout.tools,
                add_generation_prompt=False,
                template_kwargs=rollout.template_kwargs,
            )
        if text is not None:
            rows += 1
            control = (token for ids in all_ids for token in ids[vocabulary.control(ids)].tolist())
            recorded.update(vocabulary.piece(token) for token in control if token not in ends)
            rendered.update({piece: text.count(piece) for piece in pieces if piece in text})
    if recorded.total() < 2 * rows or not rows:
        return None
    # How often a token occurs proves nothing: rows may hold parts of conversations, and templates skip roles.
    if recorded.keys() & rendered.keys():
        return None
    writes = listed([f"'{piece}'" for piece, _ in rendered.most_common(3)]) or "no control tokens"
    holds = listed([f"'{piece}'" for piece, _ in recorded.most_common(3)])
    return f"the rows hold {holds} where the template writes {writes}"
