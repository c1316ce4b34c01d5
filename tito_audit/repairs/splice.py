"""splice: puts sampled ids back where the row or a prompt holds others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tito_audit.chains.links import LinkKind, chain_to, last_calls, parents_of
from tito_audit.chains.splice import splice_prefix
from tito_audit.errors import RecordError, SpliceError
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Finding
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import TrainingRow, Turn
from tito_audit.repair import Proposal, Safety, repair
from tito_audit.repairs._carry import chain_tokens, may_be_intended, rebuild_row, turn_end_ids, untrained_turns
from tito_audit.settings.model import RepairChoices

_REASON = (
    "the sampler itself was given the re-tokenized history at {}, so what it sampled there was scored in another "
    "context; `fork` keeps every logprob valid"
)


@repair(
    "splice",
    cures=("TOK", "TPL", "SEQ301", "SEQ302", "MSK", "LPR"),
    safety=Safety.DEPENDS,
    precedence=10,
    # Where it is safe: the calls say what the row should hold, and none of them was given other tokens.
    fits=lambda evidence, finding: (
        not may_be_intended(finding)
        and evidence.row is not None
        and evidence.row.proven
        and not _prompts_broken(evidence)
    ),
)
def splice(evidence: Evidence, findings: tuple[Finding, ...], choices: RepairChoices) -> Proposal | None:
    """Puts the sampled ids back where the row or a prompt holds others.

    ## What it does
    The training row becomes what the calls saw and sampled, token for token, followed by what the row holds after
    the last answer. Mask and logprobs are rebuilt from the calls; a turn that the row does not train stays so.
    Where a later prompt holds the history in other tokens, its history is replaced too. The place is found by
    aligning what was seen with what the template wrote, not by counting end tokens, so it copes with several stop
    ids, turns cut by length, stripped reasoning and dropped turns.

    ## When it is safe
    If the calls show that the sampler itself saw the sampled ids, and only the row was re-tokenized. If a call was
    given the re-tokenized history, every logprob after it was scored in another context: then the repair needs
    `--unsafe` and says which turns those are; `fork` is the safe way.

    ## What it costs
    Nothing where it is safe. Values that a trainer computed from the old row (reference logprobs, value estimates)
    are stale from the first changed token on and become null.

    ## Example
    ```text
    sampled   ▁Skin ny ▁cat <|im_end|>
    row       ▁Skinny  ▁cat <|im_end|>      before
    row       ▁Skin ny ▁cat <|im_end|>      after, with the logprob of each sampled token
    ```
    """
    rollout, row, view = evidence.rollout, evidence.rollout.training_row, evidence.row
    if not rollout.turns:
        return None
    if findings and all(map(may_be_intended, findings)):
        raise RecordError("what the mask leaves out of the loss may be meant, and the calls cannot tell")
    broken = _prompts_broken(evidence)
    turns, changed = _spliced_prompts(evidence) if broken else (rollout.turns, [])
    moved = None
    if row is not None:
        if view is None or not view.proven:
            return None
        # The chains of which the row holds tokens that no earlier chain has, fullest first.
        sizes = {int(k): int(count) for k, count in zip(*np.unique(view.turn, return_counts=True), strict=True)}
        parents = parents_of(evidence.links)
        logged = enumerate(rollout.turns)
        calls = [k for k, turn in logged if turn.prompt_ids is not None and turn.completion_ids is not None]
        every = [chain_to(last, parents) for last in last_calls(calls, parents)]
        every.sort(key=lambda calls_of_chain: -sum(sizes.get(turn, 0) for turn in calls_of_chain))
        chains = [chain for chain in every if sum([sizes.pop(turn, 0) for turn in chain])]
        if not chains:
            return None
        if len(chains) > 1 and not broken:
            raise RecordError("the row holds answers of several branches, which no single context holds")
        chain = sorted({turn for chain in chains for turn in chain})
        # A row is not extended by calls after its end.
        last = max(k for k, turn in enumerate(chain) if (view.turn == turn).any())
        end = _end_of_answer_in_row(evidence, chain[last])
        if end is not None and not view.drifted[end:].any():
            chain = chain[: last + 1]
        tail, cut = _tail_of_row(evidence, turns, chain, row)
        target = chain_tokens(turns, chain, tail)
        if cut is not None:
            target = replace(target, ids=target.ids[:cut], turn=target.turn[:cut], offset=target.offset[:cut])
        left_out = untrained_turns(evidence, chain, findings)
        moved = rebuild_row(row, view, target, turns, set(chain) - left_out)
    if not changed and (moved is None or _rows_look_alike(moved.row, row)):
        return None
    mended = replace(rollout, turns=turns, training_row=moved.row if moved else None)
    answers = {turn: ids for turn in changed if (ids := turns[turn].completion_ids) is not None}
    tokens = sum(map(len, answers.values()))
    note = f"the logprobs of {_turns_in_words([*answers])} ({tokens} tokens) were scored in another context"
    return Proposal(
        (RepairedRollout(mended, tuple(range(len(turns)))),),
        safety=Safety.UNSAFE if changed else Safety.SAFE,
        reason=_REASON.format(_turns_in_words(changed)) if changed else "",
        notes=(note,) if answers else (),
        stale=moved.stale if moved else (),
        dropped=moved.dropped if moved else (),
        unknown=moved.unknown if moved else {},
    )


def _prompts_broken(evidence: Evidence) -> bool:
    """Whether a prompt holds the history in other tokens than those seen."""
    return any(link.kind.only_tokens_differ for link in evidence.links)


def _tail_of_row(
    evidence: Evidence, turns: Sequence[Turn], chain: list[int], row: TrainingRow
) -> tuple[Ids, int | None]:
    """What the row holds after the last answer, and None; or no tokens, and where to cut inside the answer."""
    seen = turns[chain[-1]].seen_ids
    original = evidence.rollout.turns[chain[-1]].seen_ids
    assert seen is not None
    assert original is not None
    view, stops = evidence.row, sorted(turn_end_ids(evidence))
    assert view is not None
    positions = np.flatnonzero(view.turn >= 0)
    if len(positions) and view.turn[positions[-1]] == chain[-1]:
        after = slice(int(positions[-1]) + 1, len(row.token_ids))
        if view.drifted[after].all() and not np.isin(row.token_ids[after], stops).any():
            # The row ends inside the answer, without a turn end; drifted tokens there hold the rest of it.
            prompt = turns[chain[-1]].prompt_ids
            assert prompt is not None
            size = len(prompt) + int(view.turn_offset[positions[-1]]) + 1
            return seen[:0], size if after.start == after.stop else len(seen)
    start = _end_of_answer_in_row(evidence, chain[-1])
    if start is None:
        try:
            whole = splice_prefix(seen, original, row.token_ids, stops)
        except SpliceError as error:
            raise RecordError(f"the row has no place for what turn {chain[-1]} saw and sampled: {error}") from None
        start = len(row.token_ids) - (len(whole) - len(seen))
    if (view.turn[start:] >= 0).any():
        raise RecordError(f"the row goes on with sampled tokens after the end of turn {chain[-1]}")
    return np.asarray(row.token_ids[start:], np.int32), None


def _end_of_answer_in_row(evidence: Evidence, last: int) -> int | None:
    """Where the answer of turn `last` ends in the row, with the drifted tokens that follow if it is not complete.

    None if the row holds no token of it.
    """
    view, completion = evidence.row, evidence.rollout.turns[last].completion_ids
    if view is None or completion is None or not (positions := np.flatnonzero(view.turn == last)).size:
        return None
    end = int(positions[-1]) + 1
    if int(view.turn_offset[end - 1]) < len(completion) - 1:
        undrifted = np.flatnonzero(~view.drifted[end:])
        end += int(undrifted[0]) if len(undrifted) else len(view.drifted) - end
    return end


def _spliced_prompts(evidence: Evidence) -> tuple[tuple[Turn, ...], list[int]]:
    """The turns with the sampled history in every prompt that continues it, and the turns that changed."""
    old = evidence.rollout.turns
    stops = sorted(turn_end_ids(evidence))
    links = {link.turn: link for link in evidence.links}
    turns: list[Turn] = []
    changed: list[int] = []
    for k, turn in enumerate(old):
        link = links.get(k)
        prompt = turn.prompt_ids
        if link is not None and link.parent is not None and prompt is not None:
            before, now = old[link.parent].seen_ids, turns[link.parent].seen_ids
            if before is None or now is None:
                pass
            elif link.kind.only_tokens_differ:
                try:
                    prompt = np.asarray(splice_prefix(now, before, prompt, stops), np.int32)
                except SpliceError as error:
                    message = (
                        f"turn {k}'s prompt has no place for what turn {link.parent} saw and sampled: {error}"
                    )
                    raise RecordError(message) from None
            elif link.kind is LinkKind.CONTINUES and link.parent in changed:
                prompt = np.concatenate([now, prompt[len(before) :]])
        if prompt is not None and turn.prompt_ids is not None and not np.array_equal(prompt, turn.prompt_ids):
            changed.append(k)
            turn = replace(turn, prompt_ids=prompt)
        turns.append(turn)
    return tuple(turns), changed


def _rows_look_alike(new: TrainingRow, old: TrainingRow | None) -> bool:
    """Whether two rows would be written alike in a log."""
    if old is None or not np.array_equal(new.token_ids, old.token_ids):
        return False
    for a, b in ((new.loss_mask, old.loss_mask), (new.logprobs, old.logprobs)):
        if (a is None) is not (b is None):
            return False
        if a is not None and b is not None:
            values, other = (np.asarray(column, np.float64) for column in (a, b))
            if old.sentinel is not None:
                values, other = (np.where(np.isnan(column), old.sentinel, column) for column in (values, other))
            if not np.array_equal(values, other, equal_nan=True):
                return False
    return all(a.alignment == b.alignment for a, b in zip(new.columns, old.columns, strict=False))


def _turns_in_words(numbers: Sequence[int]) -> str:
    return f"turn{'s' * (len(numbers) > 1)} {', '.join(str(number) for number in numbers)}"
