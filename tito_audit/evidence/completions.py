"""Each completion compared with its re-encoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tito_audit.chains.links import LinkKind, chain_to, parents_of
from tito_audit.evidence.chains import Chains
from tito_audit.evidence.differences import CompletionSpan, compare_ids, difference
from tito_audit.evidence.model import Against, Difference
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids, empty_ids
from tito_audit.record.finding import Severity
from tito_audit.record.prefix import same_ids, starts_with
from tito_audit.record.rollout import Rollout
from tito_audit.tokens.segments import ControlTokens, KnownText

_HARMLESS = "harmless as logged, but would drift if the text were re-encoded"


@dataclass(frozen=True, slots=True)
class CompletionInContext:
    """A completion with the end of its prompt, from the prompt's last control token on.

    No token spans a control token, so what comes before it cannot affect how the completion is encoded.
    """

    turn: int
    ids: Ids
    """`[N]` the end of the prompt, then the completion."""
    start: int
    """Where the completion starts in `ids`."""
    text: str
    """What `ids` decode to."""

    def written_at(self, prompt: str, conversation: str, reference: Reference) -> int | None:
        """Where a conversation that starts with this prompt writes this text, from its first control token on.

        None if it does not, or if the text may hold other control tokens than `ids`.
        """
        special, first = reference.vocabulary.special_ids, int(self.ids[0])
        if first not in special or int(self.ids[-1]) not in special or not reference.reencodes_exactly:
            return None
        at = prompt.rfind(reference.vocabulary.piece(first))
        if at < 0 or not conversation.startswith(prompt) or not conversation.startswith(self.text, at):
            return None
        controls = reference.tokenizer.control_tokens
        is_exact = "\ufffd" not in self.text and controls.pair_segments(self.text, self.ids) is not None
        return at if is_exact else None


@dataclass(frozen=True, slots=True)
class ConfirmedIds:
    """Recorded ids that equal today's encoding of a rendered text."""

    ids: Ids
    goes_on: bool
    """Whether the text may continue after these ids."""

    def cover(self, seen: Ids, cuts: ControlTokens) -> bool:
        """Whether these ids start with `seen`, a prompt and its completion, and continue with a control token.

        `seen` then needs no check: text between control tokens encodes the same on its own.
        """
        if not starts_with(self.ids, seen):
            return False
        end = len(seen)
        return (end == len(self.ids) and not self.goes_on) or len(cuts.positions(self.ids[end - 1 : end + 1])) > 0


def answers_to_reencode(
    rollout: Rollout, chains: Chains, reference: Reference, confirmed: Sequence[ConfirmedIds]
) -> list[CompletionInContext]:
    """The completions still to be compared with their re-encoding.

    Left out are those already confirmed, and those whose re-encoding is confirmed to be what a later prompt holds:
    that prompt was compared with them.
    """
    answers: list[CompletionInContext] = []
    if not reference.reencodes_exactly:
        confirmed = ()
    if confirmed and len(confirmed[0].ids) < len(confirmed[-1].ids):
        confirmed = confirmed[::-1]  # longest first: it covers most calls
    cuts = reference.tokenizer.control_tokens
    later = {link.parent: link.turn for link in chains.links if link.kind is LinkKind.RETOKENIZED and confirmed}
    parents = parents_of(chains.links) if confirmed else {}
    covered: set[int] = set()
    for number in reversed(range(len(rollout.turns))):
        call = rollout.turns[number]
        if number in covered or call.completion_ids is None or not len(call.completion_ids):
            continue
        seen = chains.seen[number]
        respelled = rollout.turns[later[number]].prompt_ids if number in later else None
        ended = respelled is not None and seen is not None and len(cuts.positions(seen[-1:])) > 0
        for rendered in confirmed:
            if seen is not None and rendered.cover(seen, cuts):
                if number in parents:  # the ids start with what every call saw that it continues
                    control = frozenset(cuts.positions(rendered.ids).tolist())
                    for k in chain_to(parents[number], parents):
                        end = 0 if (ids := chains.seen[k]) is None else len(ids)
                        if end and (end - 1 in control or end in control):
                            covered.add(k)
                break
            if ended and respelled is not None and starts_with(rendered.ids, respelled):
                break
        else:
            prompt = call.prompt_ids if call.prompt_ids is not None else empty_ids()
            tail = prompt[reference.last_control_token(prompt) :]
            ids = np.concatenate([tail, call.completion_ids])
            answers.append(CompletionInContext(number, ids, len(tail), reference.decode(ids)))
    return answers[::-1]


def reencoded_differences(
    rollout: Rollout, answers: Sequence[CompletionInContext], reference: Reference
) -> list[Difference]:
    """Where each completion differs from its re-encoding, as NOTE: the log itself holds the sampled tokens."""
    every: list[Difference] = []
    texts, recorded = [answer.text for answer in answers], [answer.ids for answer in answers]
    for answer, encoded in zip(answers, reference.encode_all_as(texts, recorded), strict=True):
        if not same_ids(encoded, answer.ids):
            index = rollout.turns[answer.turn].message_index
            completion = CompletionSpan(answer.turn, answer.start, len(answer.ids), index)
            whole = KnownText(reference.tokenizer.control_tokens, answer.text, encoded)
            every += [
                difference(stretch, Against.REENCODED, Severity.NOTE, _HARMLESS, answer.turn, (completion,))
                for stretch in compare_ids(whole, answer.ids, reference)[0]
                if stretch.end > answer.start
            ]
    return every
