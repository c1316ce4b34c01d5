"""Faults in masks, logprobs and whole rows."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np

from benchmarks.faults.draft import Draft, fault


@fault("MSK401", "MSK402", calls=False)
def mask_slid(draft: Draft) -> bool:
    """The mask shifted by a few tokens."""
    draft.mask = np.roll(draft.mask, draft.pick((-3, -2, -1, 1, 2, 3)))
    return True


@fault("MSK401", calls=False)
def template_trained(draft: Draft) -> bool:
    """Tokens of the prompt in the loss."""
    start = draft.runs()[0][0]
    draft.mask[max(0, start - 12) : max(1, start - 4)] = 1
    return True


@fault("MSK402", calls=False)
def answer_not_trained(draft: Draft) -> bool:
    """Half of a long answer out of the loss."""
    start, stop = max(draft.runs(), key=lambda run: run[1] - run[0])
    draft.mask[start + (stop - start) // 2 : stop - 1] = 0
    return stop - start > 8


@fault("MSK403", calls=False)
def mask_inverted(draft: Draft) -> bool:
    """An inverted mask: it trains what was not sampled."""
    draft.mask = 1 - draft.mask
    return True


@fault("MSK404", calls=False)
def ends_not_trained(draft: Draft) -> bool:
    """The end token of one answer out of the loss, those of others in it."""
    runs = draft.runs()
    if len(runs) < 2:
        return False
    draft.mask[runs[0][1] - 1] = 0
    return True


@fault("LPR501", calls=False)
def a_logprob_too_few(draft: Draft) -> bool:
    """One logprob fewer than tokens."""
    draft.logprobs = draft.logprobs[:-1]
    return True


@fault("LPR502", calls=False)
def logprobs_slid(draft: Draft) -> bool:
    """The logprobs shifted by one token."""
    draft.logprobs = np.roll(draft.logprobs, draft.pick((-1, 1)))
    return True


@fault("LPR503", calls=False)
def logprob_missing(draft: Draft) -> bool:
    """A sampled token without a logprob."""
    values: list[Any] = draft.logprobs.tolist()
    values[draft.pick(np.flatnonzero(draft.mask))] = None
    draft.logprobs = values
    return True


@fault("LPR504", calls=False)
def logprob_above_zero(draft: Draft) -> bool:
    """A logprob above zero."""
    draft.logprobs[draft.pick(np.flatnonzero(draft.mask))] = 0.75
    return True


@fault("LPR505", "LPR506", calls=False)
def answer_filled_with_zeros(draft: Draft) -> bool:
    """Placeholders instead of logprobs in an answer."""
    start, stop = max(draft.runs(), key=lambda run: run[1] - run[0])
    draft.logprobs[start + 1 : stop - 1] = 0.0
    return stop - start > 14


@fault("LPR506", calls=False)
def logprobs_all_alike(draft: Draft) -> bool:
    """The same logprob for every sampled token."""
    draft.logprobs = np.where(draft.mask == 1, -0.5, 0.0)
    return True


@fault("REC001")
def messages_cut_off(draft: Draft) -> bool:
    """A row that cannot be read."""
    draft.broken = True
    return True


@fault("REC002", calls=False)
def mask_too_short(draft: Draft) -> bool:
    """A mask with fewer entries than tokens."""
    draft.mask = draft.mask[:-9]
    return True


@fault("REC003")
def id_outside_the_vocabulary(draft: Draft) -> bool:
    """An id that no token has."""
    draft.ids[draft.pick(np.flatnonzero(draft.mask))] = draft.kit.vocabulary.size + 100_000
    return True


@fault("REC004", calls=False)
def ids_that_count_up(draft: Draft) -> bool:
    """Ids that count up, as a dummy server returns them."""
    draft.ids = np.arange(1, len(draft.ids) + 1, dtype=np.int32)
    return len(draft.ids) < draft.kit.vocabulary.size


@fault("LPR508", calls=False)
def logprobs_summed(draft: Draft) -> bool:
    """Logprobs as running sums within their answer."""
    for start, stop in draft.runs():
        draft.logprobs[start:stop] = np.cumsum(draft.logprobs[start:stop])
    return max(stop - start for start, stop in draft.runs()) > 16


@fault("LPR509", calls=False)
def a_trainer_of_other_weights(draft: Draft) -> bool:
    """A trainer's logprobs that differ from the sampler's."""
    apart = np.round(draft.draw.normal(0, 0.5, len(draft.ids)), 4)
    draft.more["trainer_logprobs"] = np.where(draft.mask == 1, np.minimum(draft.logprobs + apart, -1e-4), 0.0)
    return int(draft.mask.sum()) > 32


@fault("REC008", calls=False)
def weights_updated_in_flight(draft: Draft) -> bool:
    """A new weight version from the middle of the sampled tokens on."""
    sampled = np.flatnonzero(draft.mask)
    versions = np.where(draft.mask == 1, 3, -1).astype(np.int32)
    versions[sampled[len(sampled) // 2 :]] = 4
    draft.more["token_versions"] = versions
    return len(sampled) > 1


@fault("REC010", calls=False)
def an_image_opened_twice(draft: Draft) -> bool:
    """The tokens around an image, written twice: by the template and by the processor."""
    known = {draft.kit.vocabulary.token_bytes(one): one for one in draft.kit.vocabulary.added_ids}
    marks = [known.get(name) for name in (b"<|vision_start|>", b"<|image_pad|>", b"<|vision_end|>")]
    opens, pad, closes = marks
    if opens is None or pad is None or closes is None:
        return False
    at = draft.runs()[0][0] - 5
    draft.replace(at, at, [opens, opens, *[pad] * 16, closes, closes], sampled=False)
    return True


@fault("REC013", calls=False)
def experts_seven_rows_short(draft: Draft) -> bool:
    """Routed experts without the rows of the last seven tokens, as base64 of int32 with 7 numbers a row."""
    rows = len(draft.ids) - 8
    if not all(rows * 7 % count for count in _possible(draft)):
        return False
    draft.more["routed_experts"] = b64encode(draft.draw.integers(0, 64, rows * 7, np.int32).tobytes()).decode()
    return True


def _possible(draft: Draft) -> set[int]:
    """How many rows of experts may stand beside the draft's tokens."""
    size, start = len(draft.ids), draft.runs()[0][0]
    return {size, size - 1, size - start, size - start - 1}


@fault("REC014", calls=False)
def a_sampled_token_that_was_not_kept(draft: Draft) -> bool:
    """Kept-token sets of two ids each, one of which lacks what was sampled."""
    kept = np.stack([draft.ids, draft.ids ^ 1], axis=1).reshape(-1)
    at = draft.pick(np.flatnonzero(draft.mask))
    kept[2 * at] = kept[2 * at + 1]
    draft.more["top_p_token_ids"], draft.more["top_p_token_offsets"] = kept, np.arange(0, len(kept) + 1, 2)
    return True


@fault("REC015", calls=False)
def advantages_of_other_tokens(draft: Draft) -> bool:
    """Advantages for five tokens more than there are."""
    draft.more["advantages"] = np.full(len(draft.ids) + 5, 0.5)
    return True
