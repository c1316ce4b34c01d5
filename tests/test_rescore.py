"""rescore: recorded against a model, and the price of drift, held against sums that are made the slow way."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from tests import toy
from tests.mismatch import plant
from tests.rescoring import OPEN, Formula, call, log_of, logprob, logprobs, rescored, token_ids
from tito_audit.cli.rescore import page_parts, summary_object
from tito_audit.errors import PluginError, ProviderError
from tito_audit.provider import ScoredTokens
from tito_audit.report import ReportOptions
from tito_audit.rescore.journal import merge_prefixes
from tito_audit.rescore.model import ScoreQuery, Sums, fit_temperature
from tito_audit.rescore.summary import (
    CausePrice,
    RescoreSummary,
    after_table,
    agreement_table,
    drifted_table,
    mismatch_table,
    page,
)
from tito_audit.terminal.page import render_text

END = "<|im_end|>"
NEXT = ["\n", "<|im_start|>", "us", "er", "\n", "3", END, "\n", "<|im_start|>", "assistant", "\n"]
SAMPLED = ["H", "e", "l", "l", "o", "!", END]
"""What a model spelled letter by letter; the tokenizer has longer tokens for it."""


def canonical(tokens: list[str]) -> list[int]:
    """The ids that encoding the text of tokens gives, with its control tokens."""
    ids = toy.toy_tokenizer().encode("".join(tokens)).tolist()
    assert ids != token_ids(tokens)
    return ids


@pytest.fixture
def prompt() -> list[int]:
    return token_ids(OPEN)


@pytest.fixture
def run_of(tmp_path):
    """The rollouts and the run on a log with these rows."""
    return lambda rows, model=None, **choices: rescored(log_of(tmp_path, rows), model, **choices)


def test_logprobs_of_the_same_model_agree(run_of, prompt):
    (result,), run = run_of([{"calls": [call(prompt, token_ids(["4", "!", END]))]}])
    assert (result.agreement.tokens, result.agreement.size, result.agreement.disagrees) == (3, 0, False)
    assert not run.summary.failed


def test_logprobs_of_another_model_do_not(run_of, prompt):
    ids = token_ids([*SAMPLED[:-1], *SAMPLED])
    values = [value - 0.4 for value in logprobs([*prompt, *ids], len(prompt))]
    (result,), run = run_of([{"calls": [call(prompt, ids, values)]}])
    assert result.agreement.mean == pytest.approx(0.4)
    assert result.agreement.k1 == pytest.approx(-0.4)
    assert result.agreement.k3 == pytest.approx(math.exp(0.4) - 1 - 0.4)
    assert run.summary.failed
    assert [finding.code for finding in result.findings] == ["LPR509"]
    assert "`rescored_logprobs` differs from `completion_logprobs`" in result.findings[0].hit.message


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda values: [values[0], *values[:-1]], "are 1 place behind"),
        (lambda values: [*values[1:], values[-1]], "are 1 place ahead of"),
        (lambda values: [value / math.log(2) for value in values], "base 2"),
        (lambda values: [value / math.log(10) for value in values], "base 10"),
        (lambda values: [value * 1.3 for value in values], ""),
    ],
)
def test_what_explains_a_disagreement_is_said_only_if_it_explains_all(run_of, prompt, changed, words):
    ids = token_ids([*SAMPLED[:-1]] * 3)
    values = changed(logprobs([*prompt, *ids], len(prompt)))
    (result,), _ = run_of([{"calls": [call(prompt, ids, values)]}])
    assert result.agreement.disagrees
    assert words in result.explanation
    assert bool(words) is bool(result.explanation)


def test_a_temperature_is_found_from_the_likeliest_tokens():
    draws = np.random.default_rng(0)
    logits = draws.normal(0, 2, (200, 64))
    sampled = draws.integers(0, 64, 200)

    def at(temperature: float) -> np.ndarray:
        scaled = logits / temperature
        return scaled - np.log(np.exp(scaled).sum(1, keepdims=True))

    rows, model = np.arange(200), at(1.0)
    top = -np.sort(-model, axis=1)
    for temperature in (0.6, 0.8, 1.3):
        recorded = at(temperature)[rows, sampled]
        assert fit_temperature(recorded, model[rows, sampled], top, 0.05) == pytest.approx(temperature)
    noisy = model[rows, sampled] + draws.normal(0, 0.5, 200)
    assert fit_temperature(noisy, model[rows, sampled], top, 0.05) is None
    # Twenty tokens leave the rest of a flat distribution open: a temperature above 1 is not proved.
    hot = at(2.0)[rows, sampled]
    assert fit_temperature(hot, model[rows, sampled], top[:, :20], 0.05) is None


def of_tokens(result):
    """The prices of findings about tokens."""
    return [price for price in result.prices if price.finding.code.startswith("TOK")]


def test_the_price_of_a_re_encoding_is_the_difference_of_both_sides(run_of, prompt):
    ids = token_ids(SAMPLED)
    other = canonical(SAMPLED)
    (result,), _ = run_of([{"calls": [call(prompt, ids)]}])
    start = next(k for k, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b)
    tail = next(k for k in range(1, len(ids)) if ids[-k] != other[-k]) - 1
    sampled, theirs = logprobs([*prompt, *ids], len(prompt)), logprobs([*prompt, *other], len(prompt))
    prices = of_tokens(result)
    assert sum(price.sampled for price in prices) == pytest.approx(sum(sampled[start : len(ids) - tail]))
    assert sum(price.other for price in prices) == pytest.approx(sum(theirs[start : len(other) - tail]))
    behind = [b - a for a, b in zip(sampled[len(ids) - tail :], theirs[len(other) - tail :], strict=True)]
    assert behind
    last = prices[-1].behind
    assert last.total == pytest.approx(sum(behind))
    assert last.size == pytest.approx(sum(map(abs, behind)))
    total = sum(abs(price.difference) for price in prices) + sum(price.behind.size for price in prices)
    share = sum(abs(price.difference) for price in prices) / total
    assert sum(price.share for price in prices) == pytest.approx(share)
    (changed,) = result.changed
    assert changed.other - changed.sampled == pytest.approx(sum(theirs[start:]) - sum(sampled[start:]))


def test_a_training_row_is_priced_in_its_own_context(run_of, prompt):
    """What was sampled is scored in its calls; what is trained in the row, where an earlier turn drifted too."""
    first, second = token_ids(SAMPLED), token_ids(["H", "e", "l", "l", "o", END])
    again = [*prompt, *first, *token_ids(NEXT)]
    row = [*prompt, *canonical(SAMPLED), *token_ids(NEXT), *canonical(["H", "e", "l", "l", "o", END])]
    trained = [*range(len(prompt), len(prompt) + len(canonical(SAMPLED)))]
    behind = len(prompt) + len(canonical(SAMPLED)) + len(NEXT)
    mask = [int(at in trained or at >= behind) for at in range(len(row))]
    calls = [call(prompt, first), call(again, second)]
    (result,), _ = run_of([{"calls": calls, "token_ids": row, "loss_mask": mask}])
    (price,) = [each for each in of_tokens(result) if each.finding.hit.turn == 1]
    (segment,) = price.segments
    size = len(segment.other_ids)
    at = next(k for k in range(behind, len(row)) if tuple(row[k : k + size]) == segment.other_ids)
    total = sum(logprob(row[: k + 1]) for k in range(at, at + size))
    assert price.against == "training row"
    assert price.other == pytest.approx(total)
    assert price.other != pytest.approx(sum(logprobs([*again, *segment.other_ids], len(again))))
    assert price.sampled == pytest.approx(sum(logprobs([*again, *second], len(again))[: len(segment.sampled_ids)]))


def test_a_prompt_that_breaks_its_history_is_priced_against_what_was_seen(run_of, prompt):
    first, second = token_ids(SAMPLED), token_ids(["4", "!", END])
    broken = [*prompt, *canonical(SAMPLED), *token_ids(NEXT)]
    (result,), _ = run_of([{"calls": [call(prompt, first), call(broken, second)]}])
    (price,) = [each for each in result.prices if each.finding.code == "SEQ301"]
    seen = [*prompt, *first, *token_ids(NEXT)]
    sides = [
        sum(logprob([*prompt, *ids][: len(prompt) + k + 1]) for k, _ in enumerate(ids) if k < len(ids) - 2)
        for ids in (first, canonical(SAMPLED))
    ]
    assert price.against == "next prompt"
    assert price.sampled == pytest.approx(sides[0], abs=3)
    changes = np.array(logprobs([*broken, *second], len(broken))) - np.array(logprobs([*seen, *second], len(seen)))
    assert price.behind.tokens >= len(second)
    assert price.behind.total == pytest.approx(float(changes.sum()))


def test_a_row_without_calls_is_priced_against_what_the_template_writes(run_of, prompt):
    row = [*prompt, *token_ids(SAMPLED)]
    other = [*prompt, *canonical(SAMPLED)]
    start = len(prompt)
    messages = [{"role": "user", "content": "2"}, {"role": "assistant", "content": "Hello!"}]
    values = [0.0] * start + logprobs(row, start)
    mask = [0] * start + [1] * 7
    (result,), _ = run_of([{"messages": messages, "token_ids": row, "loss_mask": mask, "logprobs": values}])
    (price,) = of_tokens(result)
    assert price.against == "template"
    assert price.sampled == pytest.approx(sum(logprobs(row, start)[:5]))
    assert price.other == pytest.approx(logprobs(other, start)[0])
    assert price.behind.tokens == 2
    assert (result.agreement.tokens, result.agreement.size) == (7, 0)


def test_calls_that_continue_each_other_are_scored_once(run_of, prompt):
    first = token_ids(["4", "!", END])
    again = [*prompt, *first, *token_ids(NEXT)]
    model = Formula()
    row = {"calls": [call(prompt, first), call(again, token_ids(["9", END]))]}
    results, run = run_of([row] * 3, model, jobs=1)
    assert len(model.asked) == 1
    assert model.asked[0][1] == len(prompt)
    assert all(result.agreement is not None and result.agreement.tokens == 5 for result in results)
    assert run.summary.counts.saved == 5


def test_sequences_that_begin_alike_share_a_holder():
    long, other = np.arange(9, dtype=np.int32), np.array([0, 1, 5], np.int32)
    holders, owners = merge_prefixes(
        [ScoreQuery(long[:4], 2), ScoreQuery(long, 6), ScoreQuery(other, 1), ScoreQuery(long, 8)]
    )
    assert [(want.ids.tolist(), want.start) for want in holders] == [(long.tolist(), 2), (other.tolist(), 1)]
    assert owners == [0, 0, 1, 0]


def test_no_more_requests_run_at_once_than_asked_for(run_of, prompt):
    rows = [{"calls": [call([*prompt, k], token_ids(["4", END]))]} for k in range(20)]
    model = Formula()
    run_of(rows, model, jobs=3)
    assert model.most == 3


def test_what_cannot_be_scored_is_named_and_counted(run_of, prompt):
    good = call(prompt, token_ids(["4", "!", END]))
    rows = [
        {"calls": [good]},
        {"calls": [{"prompt_ids": prompt, "completion_ids": None, "completion_text": "4!"}]},
        {"calls": [call(prompt, [10**6])]},
        {"calls": [call([*prompt * 9], token_ids(["4", END]))]},
        {"calls": "nothing"},
    ]
    results, run = run_of(rows, Formula(context=60))
    reasons = {because: (number, place.row) for because, (number, place) in run.summary.unscored.items()}
    assert len(results) == 5
    assert any("outside the vocabulary" in because for because in reasons)
    assert reasons["92 ids are more than 60"] == (1, 3)
    assert {row for _, row in reasons.values()} == {1, 2, 3, 4}
    assert run.summary.failed
    assert run.summary.scored == 1


def test_a_longer_sequence_beyond_the_context_leaves_the_shorter_ones(run_of, prompt):
    first = token_ids(["4", "!", END])
    again = [*prompt, *first, *token_ids(NEXT)]
    row = {"calls": [call(prompt, first), call(again, token_ids(["9", END]))]}
    (result,), run = run_of([row], Formula(context=len(prompt) + 3))
    assert [missed.turn for missed in result.unscored] == [1]
    assert result.agreement.tokens == 3
    assert run.summary.failed


@pytest.mark.parametrize("step", ["gather", "scorable_parts", "pair_logprobs"])
def test_a_row_on_which_the_comparison_fails_is_named(tmp_path, prompt, monkeypatch, step):
    def fails(*_):
        raise KeyError("ids")

    monkeypatch.setattr(f"tito_audit.rescore.run.{step}", fails)
    log = log_of(tmp_path, [{"calls": [call(prompt, token_ids(["4", "!", END]))]}])
    with pytest.raises(PluginError, match=rf"{log}:0: the (audit|comparison) failed: KeyError 'ids'"):
        rescored(log)


@pytest.mark.parametrize(
    ("model", "words"),
    [({"dies": 4}, "gone"), ({"context": 3}, "Nothing was scored")],
    ids=["gone", "nothing scored"],
)
def test_a_provider_that_is_gone_or_scores_nothing_ends_the_run(run_of, prompt, model, words):
    with pytest.raises(ProviderError, match=words):
        run_of([{"calls": [call([*prompt, k], token_ids(["4", END]))]} for k in range(9)], Formula(**model))


def test_low_values_where_the_row_drifted_are_judged_by_the_model(run_of, prompt):
    """LPR507 on the model's values: the row has no logprobs of its own."""

    class Strict(Formula):
        async def score(self, ids, *, start=0, top=0):
            scores = await super().score(ids, start=start, top=top)
            fixed = tuple(-14.0 if token in drifted else -0.1 for token in ids[scores.start :])
            return type(scores)(scores.ids, scores.start, fixed)

    answer = [*["4", "4", "9", "3", "2", "4", "4", "9"] * 15, *SAMPLED]
    drifted = set(canonical(SAMPLED)) - set(token_ids(answer))
    row = [*prompt, *token_ids(answer[:120]), *canonical(SAMPLED)]
    mask = [int(at >= len(prompt)) for at in range(len(row))]
    logged = {"calls": [call(prompt, token_ids(answer))], "token_ids": row, "loss_mask": mask}
    (result,), _ = run_of([logged], Strict())
    assert "LPR507" in [finding.code for finding in result.findings]
    assert all("`rescored_logprobs`" in finding.hit.message for finding in result.findings)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_number_or_heading_of_the_page_is_cut(width):
    cause = CausePrice("SEQ301", "resplit", 123_456, 234_567, 1_234_567, 2_345_678, -3e6, -9e6, 12_345, -812.5)
    cause.behind = Sums(12_345_678, -1e7, 2e7, 123.4)
    sums = Sums(123_456_789, -1e6, 2e7, 98.7, (54_321, 321), 1e7, 3e6)
    summary = RescoreSummary("vllm=http://127.0.0.1:8000", "m", sums=sums, by_turn={0: sums, 1: sums, 20: sums})
    summary.causes["SEQ301", "resplit"] = cause
    page = render_text(page_parts(summary, 0, str), ReportOptions(width=width))
    tables = agreement_table(summary, 12), drifted_table(summary), after_table(summary)
    rows = [row for table in tables for row in (table.heads, *table.rows)]
    assert [cell for row in rows for cell in row if cell not in page] == []
    assert "…" not in page
    assert max(map(len, page.splitlines()[2:])) <= width


def test_the_run_says_which_share_of_the_difference_has_which_cause(tmp_path):
    planted = plant.log([("temperature=0.7", 2), ("float32", 2)], np.random.default_rng(0))
    model = {tuple(row["token_ids"]): row.pop("old_log_probs") for row in planted.rows}

    class Trained(Formula):
        async def score(self, ids, *, start=0, top=0):
            if top:
                raise ProviderError("no alternatives", status=400)
            return ScoredTokens(tuple(ids), start, tuple(model[tuple(ids)][start:]))

    _, run = rescored(planted.write(tmp_path / "log.jsonl"), Trained())
    (cause, share, tokens, worst), *others = mismatch_table(run.summary).rows
    assert re.fullmatch(r"temperature \(the sampler's is 0\.\d+ \(.*\) times the model's\)", cause)
    assert tokens == "800"
    assert float(share.removeprefix("over ").removesuffix(" %")) > 99
    assert worst.startswith("row ")
    assert not others
    shares = summary_object(run.summary)["mismatch"]["causes"]
    assert shares["temperature"]["share"] > 0.99
    assert "Why they differ" in page(run.summary, "", 0, str)
