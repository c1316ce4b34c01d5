"""Logs with faults at random places come out of a repair as the calls have them, and otherwise as they were.

What a repaired log has to hold is worked out here from the log that the faults were put into, and from the
text of the file; nothing of the repairs is used for it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from tests import toy
from tests.faults import Log, clean_logs, encode, literal, places, spelling, text_of
from tests.tiers import examples
from tito_audit import scan_rollouts
from tito_audit.record.finding import Result, Severity
from tito_audit.record.outcome import Outcome
from tito_audit.run.repair import repair_rollouts
from tito_audit.settings.model import RepairChoices, RepairSettings, Settings

few = settings(
    max_examples=examples(6, 12), deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate)
)
Row = dict[str, Any]
Truth = tuple[list[int], list[int], list[float | None]]
TOY = str(toy.TOKENIZERS / "toy_bpe")
DECLARED = {"MSK402", "MSK403", "MSK404"}
"""What repairs say that they may bring about: tokens out of the loss."""
PER_TOKEN = ("token_ids", "loss_mask", "logprobs", "advantages", "ref_logprobs", "position_ids")
ODD = st.sampled_from(
    [
        *("1.50", "1E5", "-0.0", "2e-07", "10000000000000000000001", "[]", "{}", "null", "true"),
        '"\\u00e9\\/\\n"',
        *('{"a" :  [1.0, {"b": "\\ud83d\\ude42"}]}', '{"token_ids": [1, 2]}', "[[1.10, 2],[3]]", '"<|im_end|>"'),
    ]
)


@dataclass(repr=False)
class Sample:
    """A log with faults, and what its row would hold without them."""

    log: Log
    truth: Truth
    extra: dict[str, str]
    """Further keys, each with its value as JSON text."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis shows it."""
        printer.pretty(self.log)
        printer.text(f"\n{self.extra}")


def truth_of(log: Log) -> Truth:
    return list(log.row_ids), list(log.row_mask), list(log.row_logprobs)


def pairs_at(log: Log) -> list[tuple[int, int, list[int]]]:
    """Every token of an answer that two tokens spell as well: turn, place, the two."""
    ids_of = toy.toy_tokenizer().vocabulary.ids_of_bytes
    out = []
    for turn, at, (token,) in places(log, 1):
        data = spelling(token)
        for cut in range(1, len(data)):
            first, second = ids_of(data[:cut]), ids_of(data[cut:])
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
        starts = {a for a, _ in log.regions}
        for at in draw(st.sets(st.integers(0, len(log.row_mask) - 1), min_size=1, max_size=4)) - starts:
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
    options = [option for option in pairs_at(log) if option[0] < len(log) - 1]
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
        {"prompt_token_ids": prompt, "generation_token_ids": completion, "generation_log_probs": values}
        for prompt, completion, values in zip(log.prompts, log.completions, log.logprobs, strict=True)
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


def assert_columns(old: Row, new: Row, *, part: bool = False) -> None:
    """Every column has an entry a token, and each entry is its token's own; a part may hold less than before."""
    ids, before = list(new["token_ids"]), list(old["token_ids"])
    for name in (name for name in PER_TOKEN if name in old):
        if name != "logprobs" or new[name] != old[name]:
            assert len(new[name]) == len(ids), name
    if ids == before:
        assert all(new[name] == old[name] for name in (*PER_TOKEN[3:], "routed_experts") if name in old)
        return
    same = agreed(ids, before)
    behind = min(agreed(ids[::-1], before[::-1]), len(ids) - same, len(before) - same)
    if "position_ids" in old:
        assert new["routed_experts"] is None
        assert list(new["position_ids"]) == list(range(len(ids)))
    assert list(new["ref_logprobs"]) == [*old["ref_logprobs"][:same], *[None] * (len(ids) - same)]
    came = [None if value is None else int(value - 0.5) for value in new["advantages"]]
    positions = [at for at in came if at is not None]
    assert positions == sorted(set(positions)), "an advantage was moved past another, or doubled"
    assert all(before[at] == token for at, token in zip(came, ids, strict=True) if at is not None)
    assert all(at == n for n, at in enumerate(came[:same]) if at is not None)
    assert part or came[len(ids) - behind :] == list(range(len(before) - behind, len(before)))
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
    prompt, completion = list(call["prompt_token_ids"]), list(call["generation_token_ids"])
    return prompt + completion, len(prompt), list(call["generation_log_probs"])


def assert_text(old: str, new: str) -> None:
    """Keys in their order, with the text that they had wherever they say the same."""
    before, after = texts_of(old), texts_of(new)
    assert list(after) == [*before, *(["tito_audit"] if "tito_audit" in after else [])]
    for name, text in before.items():
        if json.dumps(json.loads(after[name])) == json.dumps(json.loads(text)):
            assert after[name] == text, name
    if after.get("calls") != before.get("calls"):
        unsplit = {json.dumps(json.loads(text)): text for text in entries_of(before["calls"])}
        assert all(unsplit.get(json.dumps(json.loads(t)), t) == t for t in entries_of(after["calls"]))
    if before.get("advantages", "").startswith("[0.50"):
        assert all(text == "null" or text.endswith(".50") for text in entries_of(after["advantages"]))


def worst_of(results: Sequence[Result]) -> dict[tuple[str, str], Severity]:
    worst: dict[tuple[str, str], Severity] = {}
    for finding in (finding for result in results for finding in result.findings):
        kind = (finding.code, finding.hit.cause)
        worst[kind] = max(worst.get(kind, Severity.NOTE), finding.severity)
    return worst


def count_of(results: Sequence[Result], code: str) -> int:
    """How often a code was found, notes left out."""
    every = (finding for result in results for finding in result.findings)
    return sum(finding.code == code and finding.severity >= Severity.WARNING for finding in every)


def assert_better(outcome: Outcome, now: Sequence[Result]) -> None:
    """What a scan of the written rows finds: less of what was cured, and nothing else that is new."""
    before = worst_of(outcome.before)
    for kind, severity in worst_of(now).items():
        if severity >= Severity.WARNING and kind[0] not in DECLARED:
            assert severity <= before.get(kind, Severity.NOTE), kind
    for code in {code for codes in outcome.cured.values() for code in codes}:
        assert count_of(now, code) < count_of(outcome.before, code) or code in DECLARED, code


def repaired(path: Path, **choices: Any) -> tuple[list[Outcome], Path]:
    """The outcomes of a repair, and the file that it wrote, which a second repair does not change."""
    out, again = path.with_name(f"out{path.suffix}"), path.with_name(f"again{path.suffix}")
    how = Settings(tokenizer=TOY)
    outcomes = list(repair_rollouts(path, out, how, RepairSettings(force=True, **choices)))
    list(repair_rollouts(out, again, how, RepairSettings(force=True, **choices)))
    assert out.read_bytes() == again.read_bytes()
    results = (result for result in scan_rollouts(out, how) if not result.of_log)
    for outcome in outcomes:
        items = len(outcome.before) if outcome.rows == 1 else outcome.rows
        assert_better(outcome, [next(results) for _ in range(items)])
    assert next(results, None) is None
    return outcomes, out


def runs(lines: Sequence[str], **choices: Any) -> list[tuple[Outcome, str, list[str]]]:
    """Outcome, line, and lines written in its place, of a repair of these lines."""
    repairs = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        outcomes, out = repaired(path, **choices)
        written = iter(out.read_text(encoding="utf-8").split("\n")[:-1])
        for outcome, line in zip(outcomes, lines, strict=True):
            new = [next(written) for _ in range(outcome.rows)]
            if not outcome.repaired:
                assert new == [line]
            for row in new:
                assert_text(line, row)
            repairs.append((outcome, line, new))
        assert next(written, None) is None
    return repairs


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
            finding.severity is Severity.ERROR for result in outcome.before for finding in result.findings
        ), outcome.declined
        if outcome.repaired:
            assert_as_sampled(after, sample.truth)
            assert_columns(json.loads(line), after)
            assert_trained(after)


def assert_forked(old: Row, parts: Sequence[Row]) -> None:
    """Every call is in one part, and every token that a call said is trained in one part, where it was said."""
    calls = [json.dumps(call) for part in parts for call in part["calls"]]
    assert Counter(calls) == Counter(json.dumps(call) for call in old["calls"])
    assert all(part["messages"] == old["messages"][: len(part["messages"])] for part in parts)
    if "token_ids" not in old:
        return
    trained: Counter[tuple[tuple[int, ...], float]] = Counter()
    for part in parts:
        assert_trained(part)
        assert_columns(old, part, part=True)
        for n, entry in enumerate(part["loss_mask"]):
            if entry:
                trained[tuple(part["token_ids"][: n + 1]), part["logprobs"][n]] += 1
    sampled = Counter(
        (tuple(seen[: n + 1]), values[n - start])
        for seen, start, values in map(call_of, old["calls"])
        for n in range(start, len(seen))
    )
    assert trained == sampled


@few
@given(forgotten_logs(), st.booleans(), st.data())
def test_a_history_that_was_given_in_other_tokens_is_forked_into_what_was_seen_and_said(
    sample: Sample, with_row: bool, data: st.DataObject
) -> None:
    if with_row:
        misjudged(cast(st.DrawFn, data.draw), sample.log)
    ((outcome, line, new),) = runs([line_of(sample, 0, with_row=with_row)])
    assert outcome.cured.keys() == {"fork"}
    assert outcome.rows == len(new) > 1
    assert_forked(json.loads(line), [json.loads(text) for text in new])


@few
@given(forgotten_logs(), st.booleans())
def test_an_unsafe_splice_joins_the_calls_and_keeps_what_they_said(sample: Sample, with_row: bool) -> None:
    line = line_of(sample, 0, with_row=with_row)
    ((outcome, _, new),) = runs([line], strategies=("splice",), unsafe=True)
    old, (after,) = json.loads(line), map(json.loads, new)
    assert outcome.cured.keys() == {"splice"}, outcome.declined
    assert any("scored in another context" in note for note in outcome.notes)
    calls = [call_of(call) for call in after["calls"]]
    for (seen, _, _), (later, start, _) in pairwise(calls):
        assert later[: len(seen)] == seen
        assert start >= len(seen)
    answers = [(call["generation_token_ids"], call["generation_log_probs"]) for call in old["calls"]]
    assert answers == [(call["generation_token_ids"], call["generation_log_probs"]) for call in after["calls"]]
    assert old["calls"][0] == after["calls"][0]
    if with_row:
        assert after["token_ids"] == calls[-1][0]
        assert sum(after["loss_mask"]) == sum(len(ids) for ids, _ in answers)
        assert_trained(after)
        assert_columns(old, after)
    ((refused, _, same),) = runs([line], strategies=("splice",))
    assert same == [line]
    assert "--unsafe" in refused.declined["splice"]


def table_of(rows: Sequence[Row]) -> pa.Table:
    """Rows as a trainer saves them: narrow types, conversations as JSON."""
    call = {"prompt_token_ids": pa.list_(pa.int32()), "generation_token_ids": pa.list_(pa.int32())}
    types = {
        "id": pa.string(),
        "messages": pa.string(),
        "tools": pa.string(),
        "calls": pa.list_(pa.struct([*call.items(), ("generation_log_probs", pa.list_(pa.float64()))])),
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.int8()),
        "logprobs": pa.list_(pa.float64()),
        "advantages": pa.list_(pa.float32()),
        "ref_logprobs": pa.large_list(pa.float32()),
        "routed_experts": pa.list_(pa.list_(pa.uint8())),
        "position_ids": pa.list_(pa.int32()),
        "note": pa.binary(),
    }
    schema = pa.schema(types, metadata={"made by": "a trainer"})
    as_text = [{**row, **{name: json.dumps(row[name]) for name in ("messages", "tools")}} for row in rows]
    return pa.Table.from_pylist([{**row, "note": b"\x00\xff"} for row in as_text], schema)


@few
@given(st.lists(spoilt_rows(), min_size=1, max_size=3))
def test_a_table_comes_back_as_it_was_sampled_with_its_types(samples: list[Sample]) -> None:
    rows = [json.loads(line_of(Sample(spoilt.log, spoilt.truth, {}), n)) for n, spoilt in enumerate(samples)]
    table = table_of(rows)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "log.parquet"
        pq.write_table(table, path, row_group_size=2, compression="zstd")
        outcomes, out = repaired(path)
        written = pq.read_table(out)
    assert [field for field in written.schema if field.name != "tito_audit"] == list(table.schema)
    assert written.schema.metadata == table.schema.metadata
    before, after = table.to_pylist(), written.to_pylist()
    for sample, outcome, old, new in zip(samples, outcomes, before, after, strict=True):
        new.pop("tito_audit", None)
        if not outcome.repaired:
            assert new == old
            continue
        assert_as_sampled(new, sample.truth)
        assert_columns(old, new)
        assert_trained(new)
        assert all(new[name] == old[name] for name in ("id", "messages", "tools", "calls", "note"))


@st.composite
def bare_logs(draw: st.DrawFn) -> Sample:
    """A log of a row alone, with mask and logprobs spoilt or not."""
    log = draw(clean_logs(tools=False))
    truth = truth_of(log)
    mistrained(draw, log)
    misjudged(draw, log)
    return Sample(log, truth, {})


def group_of(samples: Sequence[Sample], number: int) -> Row:
    """Samples as Atropos writes a group: labels as masks, 1.0 where nothing was sampled."""
    row: Row = {"id": f"g{number}", "tokens": [], "masks": [], "scores": [], "inference_logprobs": []}
    row |= {"messages": [], "advantages": [], "ref_logprobs": [], "overrides": None}
    for n, sample in enumerate(samples):
        log = sample.log
        pairs = zip(log.row_ids, log.row_mask, strict=True)
        row["tokens"].append(log.row_ids)
        row["masks"].append([token if trained else -100 for token, trained in pairs])
        row["scores"].append(n / 2)
        row["inference_logprobs"].append([1.0 if value == 0.0 else value for value in log.row_logprobs])
        row["messages"].append(log.messages)
        row["advantages"].append([at + 0.5 for at in range(len(log.row_ids))])
        row["ref_logprobs"].append([-at - 0.25 for at in range(len(log.row_ids))])
    return row


def samples_of(group: Row) -> list[Row]:
    """Each sample of a group under the names of a flat row."""
    columns = (group[name] for name in ("tokens", "masks", "inference_logprobs", "advantages", "ref_logprobs"))
    return [
        {
            "token_ids": ids,
            "loss_mask": [int(entry != -100) for entry in mask],
            "logprobs": [None if value == 1.0 else value for value in values],
            "advantages": moved,
            "ref_logprobs": stale,
        }
        for ids, mask, values, moved, stale in zip(*columns, strict=True)
    ]


def dump_of(sample: Sample, number: int, width: int) -> Row:
    """A sample as NeMo-RL dumps it: padded to the batch's width, each value in a list of one."""
    log = sample.log
    more = width - len(log.row_ids)
    columns = {
        "token_ids": log.row_ids + [2000] * more,
        "token_loss_mask": log.row_mask + [0] * more,
        "generation_logprobs": log.row_logprobs + [0.0] * more,
        "advantages": [*(n + 0.5 for n in range(len(log.row_ids))), *[0.0] * more],
        "prev_logprobs": [*(-n - 0.25 for n in range(len(log.row_ids))), *[0.0] * more],
    }
    facts = {"content": ["a", "b"], "rewards": 1.0, "input_lengths": len(log.row_ids), "sample_loss_mask": 1.0}
    return {name: [value] for name, value in (facts | columns).items()} | {"idx": number}


def sample_of(dump: Row) -> Row:
    """The sample of a dump under the names of a flat row; what pads it has to say nothing."""
    (size,) = dump["input_lengths"]
    names = {"token_ids": "token_ids", "token_loss_mask": "loss_mask", "generation_logprobs": "logprobs"}
    names |= {"advantages": "advantages", "prev_logprobs": "ref_logprobs"}
    assert not any(dump["token_loss_mask"][0][size:])
    row = {ours: dump[theirs][0][:size] for theirs, ours in names.items()}
    padding, logprobs = len(dump["token_ids"][0]) - size, dump["generation_logprobs"][0]
    row["logprobs"] = logprobs[: len(logprobs) - padding]
    return row


def assert_same_tokens(old: Row, new: Row, truth: Truth) -> None:
    """No token changed, and what mask and logprobs say anew is what the clean log says."""
    ids, mask, values = truth
    assert new["token_ids"] == old["token_ids"] == ids
    assert new["advantages"] == old["advantages"]
    assert new["ref_logprobs"] == old["ref_logprobs"]
    assert all(
        wanted or not now or before
        for before, now, wanted in zip(old["loss_mask"], new["loss_mask"], mask, strict=True)
    )
    if new["logprobs"] == old["logprobs"]:
        return
    assert len(new["logprobs"]) == len(ids)
    for n, trained in enumerate(new["loss_mask"]):
        assert not trained or new["logprobs"][n] == values[n], n


SAFE: list[Row] = [{}, {"strategies": ("realign", "mask")}, {"strategies": ("mask",)}]


@few
@given(st.lists(bare_logs(), min_size=1, max_size=3), st.sampled_from(SAFE))
def test_a_group_without_calls_loses_what_is_wrong_and_gains_nothing(samples: list[Sample], how: Row) -> None:
    group = group_of(samples, 0)
    ((_, _, new),) = runs([json.dumps(group)], **how)
    (after,) = map(json.loads, new)
    for sample, old, now in zip(samples, samples_of(group), samples_of(after), strict=True):
        assert_same_tokens(old, now, sample.truth)
    assert all(
        a in (b, -100)
        for x, y in zip(after["masks"], after["tokens"], strict=True)
        for a, b in zip(x, y, strict=True)
    )


@few
@given(st.lists(bare_logs(), min_size=1, max_size=3), st.sampled_from(SAFE))
def test_a_padded_dump_without_calls_loses_what_is_wrong_and_gains_nothing(
    samples: list[Sample], how: Row
) -> None:
    width = max(len(sample.log.row_ids) for sample in samples) + 2
    rows = [dump_of(sample, n, width) for n, sample in enumerate(samples)]
    for sample, old, (_, _, new) in zip(
        samples, rows, runs([json.dumps(row) for row in rows], **how), strict=True
    ):
        (after,) = map(json.loads, new)
        assert_same_tokens(sample_of(old), sample_of(after), sample.truth)
        assert all(len(after[name][0]) == width for name in ("token_ids", "token_loss_mask", "advantages"))


@few
@given(clean_logs(tools=False), st.data())
def test_todays_tokens_train_only_what_stands_in_an_unchanged_context(log: Log, data: st.DataObject) -> None:
    log, truth = drifted(cast(st.DrawFn, data.draw), log)
    group = group_of([Sample(log, truth, {})], 0)
    ((outcome, _, new),) = runs([json.dumps(group)], strategies=("canonical",), unsafe=True)
    (old,), (now,) = samples_of(group), samples_of(json.loads(new[0]))
    if not outcome.repaired:
        assert json.loads(new[0]) == group
        return
    assert_columns(old, now)
    for n, trained in enumerate(now["loss_mask"]):
        if trained or (now["logprobs"][n] is not None and n < len(old["logprobs"])):
            assert now["token_ids"][: n + 1] == old["token_ids"][: n + 1]
            assert now["logprobs"][n] == old["logprobs"][n]
            assert old["loss_mask"][n] or not trained


@few
@given(st.lists(bare_logs(), min_size=1, max_size=2), st.sampled_from(["labels", "binary", "float", "bool"]))
def test_a_chosen_style_says_the_same_of_the_same_tokens(samples: list[Sample], style: Any) -> None:
    width = max(len(sample.log.row_ids) for sample in samples) + 1
    rows = [dump_of(sample, n, width) for n, sample in enumerate(samples)]
    choices = RepairChoices(mask_style=style, sentinel=-1000.0)
    how: Row = {"strategies": ("normalize",), "choices": choices}
    repairs = runs([json.dumps(row) for row in rows], **how)
    for sample, old, (outcome, _, new) in zip(samples, rows, repairs, strict=True):
        (after,) = map(json.loads, new)
        if not outcome.repaired:
            assert after == old
            continue
        mask, recorded = after["token_loss_mask"][0], old["token_loss_mask"][0]
        trained = [int(entry not in (-100, 0, False)) for entry in mask]
        # A mask that was inverted is turned round; a token without a logprob does not enter it.
        whole = sample.truth[1] + [0] * (width - len(sample.truth[1]))
        assert trained == recorded or all(wanted or not now for now, wanted in zip(trained, whole, strict=True))
        assert after["token_ids"] == old["token_ids"]
        for n, value in enumerate(after["generation_logprobs"][0][: old["input_lengths"][0]]):
            assert value in (old["generation_logprobs"][0][n], -1000.0)
            assert value != -1000.0 or not trained[n] or old["generation_logprobs"][0][n] in (None, 0.0)
