"""`convert`: the same tokens, masks and logprobs in another form, and every word on what could not come along.

What a converted log has to hold is worked out here from the plain JSON or from the rollouts of the old log, one
token after the other; nothing of the conversion is used for it.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.command import run, written
from tests.forms import LOGS
from tests.tables import stored, table
from tests.tiers import DEEP, examples, some
from tests.world import ROOT, lines_of
from tito_audit import RecordError, Rollout, SetupError, StorageError, TrainingRow, convert_rollouts, read_rollouts
from tito_audit.convert.makers import Holds, all_makers
from tito_audit.convert.run import GROUPS, Conversion, digest_of
from tito_audit.convert.unread import row_facts
from tito_audit.formats import format_named, pick_format
from tito_audit.record.rollout import Place
from tito_audit.settings.model import Settings
from tito_audit.storage import new_log, open_log

SHARED = ROOT.parent / "shared"
FORMS = tuple(name for name, (_, maker) in all_makers().items() if not maker.tokens_only)
OF_ROWS = tuple(name for name in FORMS if all_makers()[name][1].holds is Holds.ROWS)
INTO = [
    (log, form)
    for at, log in enumerate(LOGS)
    for form in FORMS
    if DEEP or form in ("rows", FORMS[at % len(FORMS)])
]
"""Every log in every form; in `make test` as rows and in one more, so that each form is made of several logs."""
ALONE = Settings(join=False)
"""Each row is a rollout of its own; test_convert_calls.py has the calls that are joined."""
few = settings(max_examples=examples(10, 40), deadline=None)
Json = dict[str, Any]
Said = tuple[tuple[int, ...], tuple[float, ...] | None, tuple[float | None, ...]]
"""Token ids, loss weights and the logprobs of trained tokens, None at all others."""


def number_or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def weights_of(row: TrainingRow) -> tuple[float, ...] | None:
    """What each token weighs: the mask column where it holds weights over all tokens, else the mask."""
    if row.loss_mask is None:
        return None
    for column in row.columns:
        if column.role == "loss_mask" and column.encoding == "float" and len(column.values) == len(row.token_ids):
            return tuple(map(float, column.values))
    return tuple(map(float, row.loss_mask))


def said_by_row(row: TrainingRow) -> Said:
    weights = weights_of(row)
    logprobs = [None] * len(row.token_ids) if row.logprobs is None else list(map(number_or_none, row.logprobs))
    trained = [not weights or weight > 0 for weight in weights or [1.0] * len(logprobs)]
    trained_logprobs = tuple(value if keep else None for value, keep in zip(logprobs, trained, strict=True))
    return tuple(map(int, row.token_ids)), weights, trained_logprobs


def said_by_calls(rollout: Rollout) -> list[Said]:
    """The chains of calls, by walking back from each call that no other continues."""
    calls = []
    for turn in rollout.turns:
        logprobs = turn.completion_logprobs
        scores = [None] * len(turn.completion_ids) if logprobs is None else list(map(number_or_none, logprobs))
        calls.append((turn.prompt_ids.tolist(), turn.completion_ids.tolist(), scores))
    parents: list[int | None] = []
    for k, (prompt, _, _) in enumerate(calls):
        fits = [j for j in range(k) if calls[j][0] + calls[j][1] == prompt[: len(calls[j][0]) + len(calls[j][1])]]
        fits = [j for j in fits if calls[j][0] + calls[j][1]]
        parents.append(max(fits, key=lambda j: (len(calls[j][0]) + len(calls[j][1]), j), default=None))
    sampled = [k for k in range(len(calls)) if calls[k][1]]
    ancestors: set[int | None] = set()
    for k in sampled:
        at = parents[k]
        while at is not None:
            ancestors.add(at)
            at = parents[at]
    leaves = [k for k in sampled if k not in ancestors]
    done: set[int] = set()
    rows = []
    for leaf in leaves:
        ids = calls[leaf][0] + calls[leaf][1]
        weights, logprobs = [0.0] * len(ids), [None] * len(ids)
        at = leaf
        chain = []
        while at is not None:
            chain.append(at)
            at = parents[at]
        for k in chain:
            if k in done:
                continue
            start = len(calls[k][0])
            for offset, score in enumerate(calls[k][2]):
                weights[start + offset] = 1.0
                logprobs[start + offset] = score
        done.update(chain)
        rows.append((tuple(ids), tuple(weights), tuple(logprobs)))
    return rows


def said_as_rows(rollouts: Sequence[Rollout]) -> Counter[Said]:
    """Everything that a log says, as training rows, in any order."""
    counts: Counter[Said] = Counter()
    for rollout in rollouts:
        if rollout.training_row is not None:
            counts[said_by_row(rollout.training_row)] += 1
        else:
            counts.update(said_by_calls(rollout))
    return counts


def read_all(log: Path) -> list[Rollout]:
    """The rollouts of a log's readable rows."""
    rollouts: list[Rollout] = []
    for raw in open_log(log):
        with suppress(RecordError):
            rollouts += pick_format(raw.value or {}).read(raw.value or {}, Place(str(log), raw.index))
    return rollouts


def holds_all_ids(rollout: Rollout) -> bool:
    return all(turn.prompt_ids is not None and turn.completion_ids is not None for turn in rollout.turns)


@pytest.mark.parametrize(("log", "form"), some(INTO, 12), ids=lambda value: getattr(value, "stem", value))
def test_a_converted_log_says_what_was_read_and_the_rest_is_listed(log: Path, form: str, tmp_path: Path) -> None:
    before = log.read_bytes()
    out = tmp_path / "out.jsonl"
    survey = convert_rollouts(log, form, settings=ALONE).carried
    if not survey.rows_made:
        with pytest.raises(RecordError, match="none of its rows can be converted"):
            convert_rollouts(log, form, out, ALONE, lossy=True)
        assert not out.exists()
        return
    carried = convert_rollouts(log, form, out, ALONE, lossy=True).carried
    assert carried == survey
    assert len(carried.refused) == carried.not_converted
    assert all(reason for _, reason in carried.refused)
    again = list(read_rollouts(out))
    assert {rollout.format for rollout in again} == {all_makers()[form][0].name}
    rollouts = read_all(log)
    refused = {(place.row, place.item) for place, _ in carried.refused}
    if all_makers()[form][1].holds is Holds.CALLS:
        rollouts = [replace(rollout, training_row=None) if rollout.turns else rollout for rollout in rollouts]
    whole = said_as_rows([row for row in rollouts if (row.place.row, row.place.item) not in refused])
    parts = said_as_rows([row for row in rollouts if holds_all_ids(row)])
    # Of a rollout of several chains one may be left out and the others not.
    assert not whole - said_as_rows(again)
    assert not said_as_rows(again) - parts
    assert log.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl"]


# Random rollouts

ids = st.lists(st.integers(3, 40), min_size=1, max_size=5)
scores = st.one_of(st.none(), st.floats(-20, 0, allow_nan=False).map(lambda value: value or -0.5))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(-2, 2), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)
facts = st.dictionaries(
    st.one_of(st.sampled_from(stored(__file__, "AWKWARD")), st.text(max_size=6)), VALUES, max_size=5
)


@st.composite
def logs_of_calls(draw: st.DrawFn, *, broken: bool) -> list[Json]:
    """Rows of calls; with `broken`, some prompts do not continue what was said before."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        seen: list[int] = [1, 2]
        calls = []
        scored = draw(st.booleans())
        reasons = draw(st.booleans())
        for _ in range(draw(st.integers(1, 4))):
            prompt = [*seen, *draw(ids)]
            if broken and calls and draw(st.booleans()):
                prompt = draw(st.sampled_from([calls[-1]["prompt_ids"], [*prompt[:-2], 99, *draw(ids)], [1, 98]]))
            completion = draw(ids)
            call: Json = {"prompt_ids": prompt, "completion_ids": completion}
            if scored:
                call["logprobs"] = [draw(scores) for _ in completion]
                call["logprobs"][0] = -0.25
            if reasons:
                call["finish_reason"] = draw(st.sampled_from(["stop", "length"]))
            calls.append(call)
            seen = [*prompt, *completion]
        rows.append({"reward": 0.5, "task": "sums", "calls": calls})
    return rows


@st.composite
def training_rows(draw: st.DrawFn) -> list[Json]:
    """Rows with ids, a mask, maybe logprobs and one more column."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        tokens = [draw(st.integers(3, 40)) for _ in range(draw(st.integers(3, 12)))]
        mask = [0, *(draw(st.integers(0, 1)) for _ in tokens[1:])]
        mask[-1] = 1
        row: Json = {"token_ids": tokens, "loss_mask": mask, "reward": draw(st.floats(-1, 1))}
        if draw(st.booleans()):
            row["logprobs"] = [-0.5 - n / 8 if trained else None for n, trained in enumerate(mask)]
        if draw(st.booleans()):
            row["advantages"] = [n / 4 for n, _ in enumerate(tokens)]
        rows.append(row)
    return rows


@few
@given(logs_of_calls(broken=False))
def test_calls_that_continue_one_another_come_back_from_training_rows_as_they_were(rows: list[Json]) -> None:
    with TemporaryDirectory() as folder:
        log = written(Path(folder) / "calls.jsonl", rows)
        convert_rollouts(log, "rows", Path(folder) / "rows.jsonl")
        convert_rollouts(Path(folder) / "rows.jsonl", "calls", Path(folder) / "again.jsonl")
        assert lines_of(Path(folder) / "again.jsonl") == rows


@few
@given(logs_of_calls(broken=True), st.sampled_from(OF_ROWS))
def test_every_call_is_trained_once_in_the_context_that_it_saw(rows: list[Json], form: str) -> None:
    with TemporaryDirectory() as folder:
        log = written(Path(folder) / "calls.jsonl", rows)
        out = Path(folder) / "rows.jsonl"
        conversion = convert_rollouts(log, form, out, lossy=True)
        assert conversion.carried.not_converted == 0
        expected = said_as_rows(list(read_rollouts(log)))
        assert said_as_rows(list(read_rollouts(out))) == expected
        forked = [row for row in read_rollouts(log) if len(said_by_calls(row)) > 1]
        assert conversion.carried.forked == len(forked)
        assert conversion.carried.repeated.get("reward", 0) == len(forked)


@few
@given(training_rows(), st.sampled_from(OF_ROWS))
def test_training_rows_come_back_from_every_form_of_training_rows(rows: list[Json], form: str) -> None:
    with TemporaryDirectory() as folder:
        log = written(Path(folder) / "rows.jsonl", rows)
        there, back = Path(folder) / "there.jsonl", Path(folder) / "back.jsonl"
        convert_rollouts(log, form, there)
        convert_rollouts(there, "rows", back, lossy=True)
        assert said_as_rows(list(read_rollouts(back))) == said_as_rows(list(read_rollouts(log)))
        again = lines_of(back)
        assert [row.get("advantages") for row in again] == [row.get("advantages") for row in rows]
        rewards = [next(row[name] for name in ("reward", "rewards", "scores") if name in row) for row in again]
        assert rewards == [row["reward"] for row in rows]


@few
@given(training_rows(), facts, st.sampled_from(FORMS))
def test_whatever_else_a_row_says_is_carried_or_listed_by_name(rows: list[Json], extra: Json, form: str) -> None:
    row = {**extra, **rows[0]}
    with TemporaryDirectory() as folder:
        log, out = written(Path(folder) / "rows.jsonl", [row]), Path(folder) / "out.jsonl"
        try:
            read = list(read_rollouts(log))
            conversion = convert_rollouts(log, form, out, lossy=True)
        except RecordError:
            return
        lost = conversion.carried.lost
        (out_row,) = lines_of(out)
        columns = {column.name for column in read[0].training_row.columns} if read[0].training_row else set()
        for name, value in extra.items():
            if value in (None, [], {}) or name in columns or name in rows[0]:
                continue
            if form == "atropos_group" and name in GROUPS:
                continue  # what stands in one row is one group, whatever it was called
            partly = any(path.startswith((f"{name}.", f"{name}[")) for path in lost)
            assert name in lost or partly or holds(out_row, name, value) or is_read(row, read, name), name
        assert said_as_rows(list(read_rollouts(out))) == said_as_rows(read)


def holds(out_row: Json, name: str, value: object) -> bool:
    """Whether a value stands in a made row, under its name or another that the form has for it, wrapped or not."""
    candidates = [out_row, *(inner for inner in out_row.values() if isinstance(inner, dict))]
    return any(
        entry == value or entry == [value] or (name == "finish_reason" and "calls" in out_row)
        for candidate in candidates
        for entry in candidate.values()
    )


def is_read(row: Json, rollouts: Sequence[Rollout], name: str) -> bool:
    """Whether the value is nothing but what the rollout holds (messages, tools, a length)."""
    account = row_facts(row, rollouts, format_named(rollouts[0].format).sources(row, rollouts))
    return all(name not in fact for fact in account.facts)


# What is lost, by name

CALLS = {
    "id": "a",
    "reward": 1.0,
    "calls": [
        {"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-0.5, -0.25], "finish_reason": "tool_calls"},
        {"prompt_ids": [1, 2, 3, 4, 5], "completion_ids": [6], "logprobs": [-0.125], "finish_reason": "stop"},
    ],
}
ROW = {
    "id": "a",
    "reward": 1.0,
    "token_ids": [1, 2, 3, 4],
    "loss_mask": [0, 0, 1, 1],
    "logprobs": [0.0, 0.0, -0.5, -1.0],
}


def test_a_row_of_a_branch_has_the_messages_of_its_own_branch(tmp_path: Path) -> None:
    episode = json.loads((ROOT / "fixtures/formats/verifiers_v1.jsonl").read_text().splitlines()[2])
    log, out = written(tmp_path / "log.jsonl", [episode]), tmp_path / "out.jsonl"
    code, page, _ = run("convert", log, "-o", out, "--to", "rows", "--lossy")
    assert code == 0
    assert "messages of single calls" not in page
    nodes = episode["traces"][0]["nodes"]
    paths = []
    for leaf in (4, 7):
        path = [leaf]
        while (above := nodes[path[-1]].get("parent")) is not None:
            path.append(above)
        paths.append([nodes[number]["message"].get("content") or "" for number in reversed(path)])
    rows = lines_of(out)
    assert [[message["content"] or "" for message in row["messages"]] for row in rows] == paths


# The file and the command


@pytest.mark.parametrize(
    "name",
    [
        *("out.jsonl", "out.ndjson", "out.json", "out.jsonl.gz", "out.json.zst"),
        *("out.parquet", "out.arrow", "out.feather"),
    ],
)
@pytest.mark.parametrize("form", ["rows", "calls", "tito_sample"])
def test_the_suffix_chooses_the_file_and_all_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: str
) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": "a"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": None}}}]
    rows: list[Json] = [
        {**ROW, "messages": messages, "tools": tools},
        {**ROW, "note": "ä \u2028 \\ud800", "reward": 2},
        {"token_ids": [1, 2], "loss_mask": [0, 1]},
    ]
    monkeypatch.setattr(new_log, "_BATCH_ROWS", 4)
    log = written(tmp_path / "log.jsonl", rows * 3)
    out = tmp_path / name
    code, page, err = run("convert", log, "--to", form, "-o", out)
    assert (code, err) == (0, ""), page
    plain = tmp_path / "plain.jsonl"
    convert_rollouts(log, form, plain)
    ours, theirs = list(read_rollouts(out, ALONE)), list(read_rollouts(plain, ALONE))
    assert said_as_rows(ours) == said_as_rows(theirs)
    assert [rollout.messages for rollout in ours] == [rollout.messages for rollout in theirs]
    assert [rollout.tools for rollout in ours] == [rollout.tools for rollout in theirs]
    if name.endswith(".parquet"):
        assert pq.read_table(out).num_rows == len(ours)  # type: ignore[no-untyped-call]
    if name.endswith(".arrow"):
        with pa.ipc.open_stream(out) as stream:
            assert stream.read_all().num_rows == len(ours)
    if name.endswith(".feather"):
        assert pa.ipc.open_file(out).read_all().num_rows == len(ours)


def test_nothing_is_written_that_loses_something_until_it_is_allowed(tmp_path: Path) -> None:
    log, out = written(tmp_path / "log.jsonl", [CALLS]), tmp_path / "out.jsonl"
    with pytest.raises(RecordError, match="these would be lost, so nothing was written: id"):
        convert_rollouts(log, "atropos_group", out)
    assert not out.exists()


@pytest.mark.parametrize(*table(__file__, "a_mistake_is_one_message_and_exit_2"))
def test_a_mistake_is_one_message_and_exit_2(
    arguments: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = written(tmp_path / "LOG", [ROW])
    there = written(tmp_path / "THERE.jsonl", [ROW])
    (tmp_path / "LINK").symlink_to(log)
    for name in ("a.jsonl", "b.jsonl"):
        written(tmp_path / "FOLDER" / name, [ROW])
    before = sorted(tmp_path.rglob("*"))
    code, page, err = run("convert", *arguments.split())
    assert (code, page) == (2, "")
    assert says in err
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before
    assert there.read_text() == json.dumps(ROW) + "\n"


def test_a_log_that_changes_while_it_is_converted_gives_no_file(tmp_path: Path) -> None:
    log, out = written(tmp_path / "log.jsonl", [ROW]), tmp_path / "out.jsonl"
    conversion = Conversion(log, "rows", out)
    list(conversion.survey())
    written(log, [ROW, ROW])
    with pytest.raises(StorageError, match="changed while it was converted"):
        list(conversion.write())
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_columns_of_two_types_cannot_be_a_table_and_nothing_is_written(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", [{**ROW, "note": "text"}, {**ROW, "note": 5}])
    with pytest.raises(SetupError, match=r"'note' holds values of several types(.|\n)*\.jsonl"):
        convert_rollouts(log, "rows", tmp_path / "out.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [1, 2, 3, 5]},
        {"loss_mask": [0, 1, 1, 1]},
        {"loss_mask": [0.0, 0.0, 0.5, 1.0]},
        {"logprobs": [0.0, 0.0, -0.5, None]},
        {"logprobs": [0.0, 0.0, -0.5, -1.0000000000000002]},
        {"logprobs": None},
        {"masks": [[1]], "scores": [1.0], "tokens": [[1, 2, 3, 4]]},
    ],
    ids=str,
)
def test_a_file_that_says_anything_else_than_what_was_made_is_noticed(tmp_path: Path, change: Json) -> None:
    (same,) = open_log(written(tmp_path / "same.jsonl", [{**ROW, "reward": 2}]))
    (other,) = open_log(written(tmp_path / "other.jsonl", [{**ROW, **change}]))
    (plain,) = open_log(written(tmp_path / "plain.jsonl", [ROW]))
    form, _ = all_makers()["rows"]
    assert digest_of(same, form) == digest_of(plain, form)
    assert digest_of(other, form) != digest_of(plain, form)


def test_a_log_of_several_batches_keeps_its_order_in_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not DEEP:
        monkeypatch.setattr(new_log, "_BATCH_ROWS", 16)
    rng = random.Random(0)
    rows = [{"index": n, **ROW, "token_ids": [1, 2, rng.randrange(3, 99), n]} for n in range(examples(50, 3000))]
    log, out = written(tmp_path / "log.jsonl", rows), tmp_path / "out.parquet"
    convert_rollouts(log, "rows", out)
    again = [row.training_row.token_ids.tolist() for row in read_rollouts(out) if row.training_row is not None]
    assert again == [row["token_ids"] for row in rows]


def test_every_form_that_the_help_names_can_be_made_and_all_are_named(tmp_path: Path) -> None:
    page = " ".join(run("convert", "--help")[1].split())
    assert all(form in page for form in all_makers())


# Tokens that real models sampled


@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout")
@pytest.mark.parametrize("mode", ["tito", "retok"])
@pytest.mark.parametrize("model", some(["smollm2", "gemma-3", "qwen2.5-coder"], 1))
def test_sampled_calls_of_real_models_go_into_every_form_and_back(model: str, mode: str, tmp_path: Path) -> None:
    source, log = SHARED / "rollouts" / model / f"{mode}.jsonl.gz", tmp_path / "log.jsonl.gz"
    with gzip.open(source) as lines, gzip.open(log, "w") as part:
        part.writelines(some(list(lines), 12))
    expected = said_as_rows(list(read_rollouts(log)))
    for form in ("rows", "nemo_rl", "nemo_rl_message_log", "slime", "tito_sample"):
        out = tmp_path / f"{form}.jsonl.gz"
        conversion = convert_rollouts(log, form, out, lossy=True)
        assert conversion.carried.not_converted == 0
        assert said_as_rows(list(read_rollouts(out))) == expected
    if mode == "tito":
        # What was sampled token in, token out is one chain a conversation, so the calls come back.
        convert_rollouts(tmp_path / "rows.jsonl.gz", "calls", tmp_path / "calls.jsonl.gz")
        old, new = list(read_rollouts(log)), list(read_rollouts(tmp_path / "calls.jsonl.gz"))
        for before, after in zip(old, new, strict=True):
            assert said_by_calls(before) == said_by_calls(after)
            assert [turn.finish_reason for turn in before.turns] == [turn.finish_reason for turn in after.turns]
            assert [len(turn.prompt_ids) for turn in before.turns if turn.prompt_ids is not None] == [
                len(turn.prompt_ids) for turn in after.turns if turn.prompt_ids is not None
            ]
            assert before.messages == after.messages
