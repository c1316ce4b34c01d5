"""Logs with faults at random places come out of a repair as the calls have them, and otherwise as they were.

What a repaired log has to hold is worked out here from the log that the faults were put into, and from the
text of the file; nothing of the repairs is used for it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests import toy
from tests.faults import Log, clean_logs, encode, literal, places, spelling, text_of
from tito_audit import scan_rollouts
from tito_audit.config import RepairSettings, Settings
from tito_audit.record.finding import Result, Severity
from tito_audit.record.outcome import Outcome
from tito_audit.rewrite import repair_rollouts

few = settings(max_examples=12, deadline=None, derandomize=True)
Row = dict[str, Any]
Truth = tuple[list[int], list[int], list[float | None]]
TOY = str(toy.TOKENIZERS / "toy_bpe")
DECLARED = {"MSK402", "MSK403", "MSK404"}
"""What repairs say that they may bring about: tokens out of the loss."""
PER_TOKEN = ("token_ids", "loss_mask", "logprobs", "advantages", "ref_logprobs", "position_ids")
ODD = st.sampled_from(
    [
        *(
            "1.50",
            "1E5",
            "-0.0",
            "2e-07",
            "10000000000000000000001",
            "[]",
            "{}",
            "null",
            "true",
            '"\\u00e9\\/\\n"',
        ),
        *('{"a" :  [1.0, {"b": "\\ud83d\\ude42"}]}', '{"token_ids": [1, 2]}', "[[1.10, 2],[3]]", '"<|im_end|>"'),
    ]
)


@dataclass
class Sample:
    """A log with faults, and what its row would hold without them."""

    log: Log
    truth: Truth
    extra: dict[str, str]
    """Further keys, each with its value as JSON text."""


def truth_of(log: Log) -> Truth:
    return list(log.row_ids), list(log.row_mask), list(log.row_logprobs)


def pairs_at(log: Log) -> list[tuple[int, int, list[int]]]:
    """Every token of an answer that two tokens spell as well: turn, place, the two."""
    known = toy.toy_tokenizer().vocabulary.ids_of_bytes
    out = []
    for turn, at, (token,) in places(log, 1):
        data = spelling(token)
        for cut in range(1, len(data)):
            first, second = known(data[:cut]), known(data[cut:])
            if first and second:
                out.append((turn, at, [first[0], second[0]]))
    return out


def row_holds(log: Log, turn: int, start: int, end: int, ids: Sequence[int]) -> None:
    """Put tokens that were not sampled into the row where an answer stands, trained, with made-up logprobs."""
    first = log.regions[turn][0] + start
    last = first + end - start
    log.row_ids[first:last] = ids
    log.row_mask[first:last] = [1] * len(ids)
    log.row_logprobs[first:last] = [-7.0 - n / 8 for n in range(len(ids))]
    more = len(ids) - (end - start)
    log.regions = [(a + more * (k > turn), b + more * (k >= turn)) for k, (a, b) in enumerate(log.regions)]


def drifted(draw: st.DrawFn, log: Log) -> tuple[Log, Truth]:
    """The log with an answer that only the row holds in other tokens."""
    kind = draw(st.sampled_from(["merge", "split", "space", "none"]))
    options = pairs_at(log)
    assume(options)
    turn, at, pair = options[draw(st.integers(0, 10**6)) % len(options)]
    whole = log.completions[turn][at]
    if kind == "merge":
        log = log.replaced(turn, at, at + 1, pair)
    truth = truth_of(log)
    if kind == "merge":
        row_holds(log, turn, at, at + 2, [whole])
    elif kind == "split":
        row_holds(log, turn, at, at + 1, pair)
    elif kind == "space":
        row_holds(log, turn, at + 1, at + 1, [literal(draw(st.sampled_from([" ", "\n"])))])
    return log, truth


def slide(values: list[Any], by: int, filler: Any) -> list[Any]:
    return [filler] * by + values[:-by] if by > 0 else values[-by:] + [filler] * -by


def mistrained(draw: st.DrawFn, log: Log) -> None:
    """Spoil the mask; every turn keeps a trained token unless all of the mask is wrong."""
    kind = draw(st.sampled_from(["slid", "inverted", "partly", "none", "none"]))
    if kind == "slid":
        log.row_mask = slide(log.row_mask, draw(st.sampled_from([-2, -1, 1, 2])), 0)
    elif kind == "inverted":
        log.row_mask = [1 - entry for entry in log.row_mask]
    elif kind == "partly":
        kept = {a for a, _ in log.regions}
        for at in draw(st.sets(st.integers(0, len(log.row_mask) - 1), min_size=1, max_size=4)) - kept:
            log.row_mask[at] = 1 - log.row_mask[at]


def misjudged(draw: st.DrawFn, log: Log) -> None:
    """Spoil the logprobs of the row."""
    kind = draw(st.sampled_from(["shifted", "too many", "sentinel", "none", "none"]))
    if kind == "shifted":
        log.row_logprobs = slide(log.row_logprobs, draw(st.sampled_from([-2, -1, 1, 2])), 0.0)
    elif kind == "too many":
        log.row_logprobs.insert(draw(st.integers(0, len(log.row_logprobs))), draw(st.sampled_from([0.0, -4.5])))
    elif kind == "sentinel":
        for start, end in log.regions[: draw(st.integers(1, 2))]:
            at = draw(st.integers(start, end - 1))
            log.row_logprobs[at] = draw(st.sampled_from([None, 0.0, 1.0, -9999.0]))


@st.composite
def extras(draw: st.DrawFn) -> dict[str, str]:
    """Keys that no format knows, each with its value as JSON text."""
    words = draw(st.lists(st.text(max_size=6), max_size=2, unique=True))
    texts = {f"x {word}": json.dumps(word * 2, ensure_ascii=draw(st.booleans())) for word in words}
    return texts | {f"odd {n}": raw for n, raw in enumerate(draw(st.lists(ODD, max_size=3)))}


@st.composite
def spoilt_rows(draw: st.DrawFn) -> Sample:
    """A log whose calls are clean and whose row has one fault or several, or none."""
    log, truth = drifted(draw, draw(clean_logs()))
    mistrained(draw, log)
    misjudged(draw, log)
    return Sample(log, truth, draw(extras()))


@st.composite
def forgotten_logs(draw: st.DrawFn) -> Sample:
    """A log in which a later prompt, and the row with it, holds an answer in other tokens than were sampled."""
    log = draw(clean_logs())
    options = [one for one in pairs_at(log) if one[0] < len(log) - 1]
    assume(options)
    turn, at, pair = options[draw(st.integers(0, 10**6)) % len(options)]
    heard = list(log.completions[turn])
    if draw(st.booleans()):
        log = log.replaced(turn, at, at + 1, pair)
        assume(encode(text_of(log.completions[turn])) == heard)
    else:
        heard[at : at + 1] = pair
    log = log.forgotten(turn, heard)
    return Sample(log, truth_of(log), draw(extras()))


def line_of(sample: Sample, number: int, *, with_row: bool = True) -> str:
    """The sample as one line of JSON. Each token's advantage tells its place, in a spelling of its own."""
    log = sample.log
    calls = [
        {"prompt_token_ids": prompt, "generation_token_ids": said, "generation_log_probs": values}
        for prompt, said, values in zip(log.prompts, log.completions, log.logprobs, strict=True)
    ]
    whole = {"id": f"r{number}", "messages": log.messages, "tools": log.tools, "calls": calls}
    raw = {name: json.dumps(value, ensure_ascii=False) for name, value in whole.items()}
    if with_row:
        size = len(log.row_ids)
        raw |= {
            "token_ids": json.dumps(log.row_ids, separators=(",", ":")),
            "loss_mask": json.dumps(log.row_mask),
            "logprobs": json.dumps(log.row_logprobs),
            "advantages": f"[{', '.join(f'{n}.50' for n in range(size))}]",
            "ref_logprobs": f"[{','.join(f'-{n}.250e0' for n in range(size))}]",
            "routed_experts": json.dumps([[n % 8, n % 3] for n in range(size)]),
            "position_ids": json.dumps(list(range(size))),
        }
    raw |= sample.extra
    return "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in raw.items()) + "}"


def texts_of(line: str) -> dict[str, str]:
    """The text of every value of an object."""
    decoder, at, out = json.JSONDecoder(), 1, {}
    while line[at] not in "}":
        name, at = decoder.raw_decode(line, at + len(line[at:]) - len(line[at:].lstrip(" ,")))
        at += len(line[at:]) - len(line[at:].lstrip(" :"))
        _, end = decoder.raw_decode(line, at)
        out[name], at = line[at:end], end
    return out


def entries_of(text: str) -> list[str]:
    """The text of every entry of a list."""
    decoder, at, out = json.JSONDecoder(), 1, []
    while text[at] != "]":
        at += len(text[at:]) - len(text[at:].lstrip(" ,"))
        _, end = decoder.raw_decode(text, at)
        out.append(text[at:end])
        at = end
    return out


def agreed(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many entries two lists start with in common."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def assert_columns(old: Row, new: Row) -> None:
    """Every column has an entry a token, and each entry is its token's own."""
    ids, before = list(new["token_ids"]), list(old["token_ids"])
    for name in PER_TOKEN:
        if name != "logprobs" or new[name] != old[name]:
            assert len(new[name]) == len(ids), name
    if ids == before:
        assert all(new[name] == old[name] for name in (*PER_TOKEN[3:], "routed_experts"))
        return
    same = agreed(ids, before)
    behind = min(agreed(ids[::-1], before[::-1]), len(ids) - same, len(before) - same)
    assert new["routed_experts"] is None
    assert list(new["position_ids"]) == list(range(len(ids)))
    assert list(new["ref_logprobs"]) == [*old["ref_logprobs"][:same], *[None] * (len(ids) - same)]
    came = [None if value is None else int(value - 0.5) for value in new["advantages"]]
    known = [at for at in came if at is not None]
    assert known == sorted(set(known)), "an advantage was moved past another, or doubled"
    assert all(before[at] == token for at, token in zip(came, ids, strict=True) if at is not None)
    assert all(at == n for n, at in enumerate(came[:same]) if at is not None)
    assert came[len(ids) - behind :] == list(range(len(before) - behind, len(before)))
    assert came[: max(same - 1, 0)] == list(range(max(same - 1, 0)))


def assert_trained(row: Row) -> None:
    """Every trained token was sampled there by a call of the row, with this logprob."""
    ids = list(row["token_ids"])
    for n, trained in enumerate(row["loss_mask"]):
        if trained:
            assert any(
                start <= n < len(seen)
                and seen[: n + 1] == ids[: n + 1]
                and values[n - start] == row["logprobs"][n]
                for seen, start, values in map(call_of, row["calls"])
            ), n


def call_of(call: Row) -> tuple[list[int], int, list[float]]:
    """What a call saw and said, where what it said begins, and its logprobs."""
    prompt, said = list(call["prompt_token_ids"]), list(call["generation_token_ids"])
    return prompt + said, len(prompt), list(call["generation_log_probs"])


def assert_text(old: str, new: str) -> None:
    """Keys in their order, with the text that they had wherever they say the same."""
    before, after = texts_of(old), texts_of(new)
    assert list(after) == [*before, *(["tito_audit"] if "tito_audit" in after else [])]
    for name, text in before.items():
        if json.loads(after[name]) == json.loads(text):
            assert after[name] == text, name
    if after.get("calls") != before.get("calls"):
        unsplit = {json.dumps(json.loads(text)): text for text in entries_of(before["calls"])}
        assert all(unsplit.get(json.dumps(json.loads(t)), t) == t for t in entries_of(after["calls"]))
    if "advantages" in after:
        assert all(text == "null" or text.endswith(".50") for text in entries_of(after["advantages"]))


def worst_of(results: Sequence[Result]) -> dict[tuple[str, str], Severity]:
    worst: dict[tuple[str, str], Severity] = {}
    for one in (finding for result in results for finding in result.findings):
        kind = (one.code, one.hit.cause)
        worst[kind] = max(worst.get(kind, Severity.NOTE), one.severity)
    return worst


def errors_of(results: Sequence[Result], code: str) -> int:
    every = (finding for result in results for finding in result.findings)
    return sum(one.code == code and one.severity is Severity.ERROR for one in every)


def assert_better(outcome: Outcome, now: Sequence[Result]) -> None:
    """What a scan of the written rows finds: less of what was cured, and nothing else that is new."""
    before = worst_of(outcome.before)
    for kind, severity in worst_of(now).items():
        if severity >= Severity.WARNING and kind[0] not in DECLARED:
            assert severity <= before.get(kind, Severity.NOTE), kind
    for code in {code for codes in outcome.cured.values() for code in codes}:
        assert errors_of(now, code) < errors_of(outcome.before, code) or code in DECLARED, code


def repaired(path: Path, **choices: Any) -> tuple[list[Outcome], Path]:
    """The outcomes of a repair, and the file that it wrote, which a second repair does not change."""
    out, again = path.with_name(f"out{path.suffix}"), path.with_name(f"again{path.suffix}")
    how = Settings(tokenizer=TOY)
    outcomes = list(repair_rollouts(path, out, how, RepairSettings(force=True, **choices)))
    list(repair_rollouts(out, again, how, RepairSettings(force=True, **choices)))
    assert out.read_bytes() == again.read_bytes()
    results = iter(scan_rollouts(out, how))
    for outcome in outcomes:
        items = len(outcome.before) if outcome.rows == 1 else outcome.rows
        assert_better(outcome, [next(results) for _ in range(items)])
    assert next(results, None) is None
    return outcomes, out


def runs(lines: Sequence[str], **choices: Any) -> Iterator[tuple[Outcome, str, list[str]]]:
    """Outcome, line, and lines written in its place, of a repair of these lines."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        outcomes, out = repaired(path, **choices)
        written = iter(out.read_text(encoding="utf-8").splitlines(keepends=False))
        for outcome, line in zip(outcomes, lines, strict=True):
            new = [next(written) for _ in range(outcome.rows)]
            if not outcome.repaired:
                assert new == [line]
            for one in new:
                assert_text(line, one)
            yield outcome, line, new
        assert next(written, None) is None


def assert_as_sampled(new: Row, truth: Truth) -> None:
    """The row is the clean one; where nothing was sampled, a logprob may be unknown."""
    ids, mask, values = truth
    assert list(new["token_ids"]) == ids
    assert list(new["loss_mask"]) == mask
    for trained, value, wanted in zip(mask, new["logprobs"], values, strict=True):
        assert value == wanted or (not trained and value is None), (value, wanted)


@few
@given(st.lists(spoilt_rows(), min_size=1, max_size=3))
def test_a_row_that_was_spoilt_by_itself_comes_back_as_it_was_sampled(samples: list[Sample]) -> None:
    lines = [line_of(sample, number) for number, sample in enumerate(samples)]
    for sample, (outcome, line, new) in zip(samples, runs(lines), strict=True):
        (after,) = map(json.loads, new)
        assert outcome.repaired or not any(
            one.severity is Severity.ERROR for result in outcome.before for one in result.findings
        ), outcome.declined
        if outcome.repaired:
            assert_as_sampled(after, sample.truth)
            assert_columns(json.loads(line), after)
            assert_trained(after)
