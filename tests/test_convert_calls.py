"""`convert` of rows that are single calls: joined, each sampled token is trained once in the context that it saw.

What has to come out is worked out from the plain JSON of the calls, token after token.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.command import run, written
from tests.tiers import examples, some
from tito_audit import RecordError, Settings, SetupError, StorageError, convert_rollouts
from tito_audit.convert.run import Conversion
from tito_audit.settings.model import Override

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
LOGS = sorted(
    path for path in (ROOT / "fixtures" / "formats").iterdir() if path.suffix in (".jsonl", ".json", ".parquet")
)
few = settings(max_examples=examples(12, 200), deadline=None)
BY_SESSION = Settings(session="session_id")
Json = dict[str, Any]
Trained = Counter[tuple[tuple[int, ...], int, float | None]]
"""Sampled tokens: what came before, the token, its logprob."""


def rows_of(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def call(session: object, prompt: Sequence[int], completion: Sequence[int], **more: Any) -> Json:
    said = {"prompt_ids": [*prompt], "completion_ids": [*completion], "logprobs": [-0.5 * t for t in completion]}
    return {"session_id": session, **said, **more}


def sampled(calls: Iterable[Json]) -> Trained:
    found: Trained = Counter()
    for one in calls:
        seen = tuple(one["prompt_ids"])
        for token, logprob in zip(one["completion_ids"], one["logprobs"], strict=True):
            found[seen, token, logprob] += 1
            seen += (token,)
    return found


def trained(rows: Iterable[Json]) -> Trained:
    found: Trained = Counter()
    for row in rows:
        ids = tuple(row["token_ids"])
        for at, (token, mask) in enumerate(zip(ids, row["loss_mask"], strict=True)):
            if mask:
                found[ids[:at], token, row["logprobs"][at] if "logprobs" in row else None] += 1
    return found


def converted(
    log: Path | list[Path], to: str = "rows", chosen: Settings = BY_SESSION
) -> tuple[Conversion, list[Json]]:
    first = log if isinstance(log, Path) else log[0]
    out = first.with_name(f"{first.stem}.{to}.jsonl")
    conversion = convert_rollouts(log, to, out, chosen, lossy=True, overwrite=True)
    return conversion, rows_of(out)


ids = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@st.composite
def conversations(draw: st.DrawFn) -> list[list[Json]]:
    """Calls of some conversations, over some files: continued, retried, drifted, of sub-agents, in any order."""
    calls: list[Json] = []
    for session in range(draw(st.integers(1, 3))):
        known: list[Json] = []
        for _ in range(draw(st.integers(1, 6))):
            how = (
                draw(st.sampled_from(["continued", "continued", "retried", "drifted", "agent"]))
                if known
                else "agent"
            )
            one = draw(st.sampled_from(known)) if known else {}
            if how == "agent":
                prompt = [*draw(ids)]
            elif how == "retried":
                prompt = one["prompt_ids"]
            elif how == "continued":
                prompt = [*one["prompt_ids"], *one["completion_ids"], *draw(ids)]
            else:
                prompt = [*one["prompt_ids"], *(9 for _ in one["completion_ids"]), *draw(ids)]
            completion = draw(st.lists(st.integers(1, 4), max_size=3))
            known.append(call(f"s{session}", prompt, completion, number=len(calls)))
            calls.append(known[-1])
    calls += [call(None, draw(ids), draw(ids), number=-1) for _ in range(draw(st.integers(0, 2)))]
    calls = draw(st.permutations(calls))
    cut = draw(st.integers(0, len(calls)))
    return [part for part in (calls[:cut], calls[cut:]) if part]


@few
@given(conversations(), st.sampled_from(["rows", "slime", "tito_sample"]))
def test_every_sampled_token_is_trained_once_in_the_context_that_it_saw(
    parts: list[list[Json]], form: str
) -> None:
    calls = [one for part in parts for one in part]
    with TemporaryDirectory() as folder:
        logs = [written(Path(folder) / f"{at}.jsonl", part) for at, part in enumerate(parts)]
        if not any(one["completion_ids"] for one in calls):
            with pytest.raises(RecordError, match="none of"):
                converted(logs, form)
            return
        conversion, rows = converted(logs, form)
        assert conversion.carried.rows_read == len(calls)
        if form != "rows":
            assert conversion.written is not None
            _, rows = converted(conversion.written, chosen=Settings(join=False))
        assert trained(rows) == sampled(calls)


@few
@given(conversations())
def test_the_calls_of_a_conversation_are_listed_and_become_the_same_rows(parts: list[list[Json]]) -> None:
    calls = [one for part in parts for one in part]
    with TemporaryDirectory() as folder:
        logs = [written(Path(folder) / f"{at}.jsonl", part) for at, part in enumerate(parts)]
        conversion, rows = converted(logs, "calls")
        assert conversion.carried.not_converted == 0
        assert sampled(one for row in rows for one in row["calls"]) == sampled(calls)
        named = [row["session_id"] for row in rows if row.get("session_id") is not None]
        assert sorted(named) == sorted({one["session_id"] for one in calls} - {None})
        if any(one["completion_ids"] for one in calls):
            listed = written(Path(folder) / "listed.jsonl", rows)
            again = converted(listed, chosen=Settings(join=False))[1]
            assert Counter(map(row_key, again)) == Counter(map(row_key, converted(logs)[1]))


def row_key(row: Json) -> str:
    return json.dumps([row["token_ids"], row["loss_mask"], row["logprobs"], row.get("session_id")])


def test_an_unbroken_run_of_calls_is_one_row(tmp_path: Path) -> None:
    calls = [
        call("a", [1, 2], [3], number=0, model="m", reward=None, agent="planner"),
        call("b", [7], [8], number=1, model="m", agent="planner"),
        call("a", [1, 2, 3, 4], [5, 6], number=2, model="m", reward=1.5, agent="planner"),
        call("a", [50], [51], number=3, model="m", agent="worker"),
        call(None, [9], [10], number=4),
    ]
    log = written(tmp_path / "log.jsonl", calls)
    conversion, rows = converted(log)
    assert [row["token_ids"] for row in rows] == [[1, 2, 3, 4, 5, 6], [50, 51], [7, 8], [9, 10]]
    assert [row["loss_mask"] for row in rows] == [[0, 0, 1, 0, 1, 1], [0, 1], [0, 1], [0, 1]]
    facts = [{key: row.get(key) for key in ("session_id", "number", "model", "reward", "agent")} for row in rows]
    assert facts == [
        {"session_id": "a", "number": None, "model": "m", "reward": 1.5, "agent": "planner"},
        {"session_id": "a", "number": 3, "model": "m", "reward": None, "agent": "worker"},
        {"session_id": "b", "number": 1, "model": "m", "reward": None, "agent": "planner"},
        {"session_id": None, "number": 4, "model": None, "reward": None, "agent": None},
    ]
    carried = conversion.carried
    assert carried.lost == {"number": 1}
    assert (carried.rows_read, carried.rollouts, carried.joined, carried.forked) == (5, 3, 1, 1)
    assert "4 rows were read as the calls of 2 conversations, by `session_id`" in conversion.notices[0]


def test_what_all_calls_say_is_kept_and_the_rest_is_named_by_its_path(tmp_path: Path) -> None:
    meta = {"run": {"id": 7, "step": 1}, "host": "x"}
    calls = [
        call("a", [1], [2], metadata=meta, score=1, tags=["x"], user="u"),
        call("a", [1, 2, 3], [4], metadata={**meta, "run": {"id": 7, "step": 2}}, score=1.0, tags=["x"]),
    ]
    conversion, (row,) = converted(written(tmp_path / "log.jsonl", calls))
    assert row["metadata"] == {"run": {"id": 7}, "host": "x"}
    assert row["tags"] == ["x"]
    assert conversion.carried.lost == {"metadata.run.step": 1, "score": 1, "user": 1}
    # Calls have a place for what each of them says, where they are listed.
    conversion, (row,) = converted(written(tmp_path / "log.jsonl", calls), "calls")
    assert conversion.carried.lossless
    assert {key: row[key] for key in row if key != "calls"} == {"session_id": "a", "tags": ["x"]}
    keys = ("metadata", "score", "user")
    said = [{key: one[key] for key in keys if key in one} for one in row["calls"]]
    assert said == [{key: one[key] for key in keys if key in one} for one in calls]
    # What they say is then known to be there, and listed where it has no place.
    conversion, _ = converted(written(tmp_path / "listed.jsonl", [row]))
    assert {"calls[].metadata.run.step", "calls[].score", "calls[].user"} <= conversion.carried.lost.keys()


def test_a_fact_that_calls_would_be_read_by_is_listed(tmp_path: Path) -> None:
    calls = []
    for at, (prompt, completion) in enumerate([([1], [2]), ([1, 2, 3], [4])]):
        choice = {"index": 0, "finish_reason": "stop", "token_ids": completion, "text": None}
        answer = {"object": "text_completion", "prompt_token_ids": prompt, "choices": [choice]}
        calls.append({"session_id": "a", "response": answer, "prompt_text": f"p{at}", "note": at})
    # Read as logprobs of the call, it would be another call.
    calls[1]["generation_log_probs"] = ["x"]
    conversion, (row,) = converted(written(tmp_path / "log.jsonl", calls), "calls")
    assert [one["completion_ids"] for one in row["calls"]] == [[2], [4]]
    assert [one["note"] for one in row["calls"]] == [0, 1]
    assert not any({"prompt_text", "generation_log_probs"} & one.keys() for one in row["calls"])
    assert {"prompt_text", "generation_log_probs"} <= conversion.carried.lost.keys()


def test_each_row_has_the_messages_of_its_last_call(tmp_path: Path) -> None:
    def said(*texts: str) -> list[Json]:
        return [{"role": "assistant" if k % 2 else "user", "content": text} for k, text in enumerate(texts)]

    calls = [
        call("a", [1], [2], messages=said("q", "a")),
        call("a", [1, 2, 3], [4], messages=said("q", "a", "r", "b")),
        call("a", [50], [51], messages=said("other", "agent")),
        call("a", [1], [60], messages=said("q", "lost")),
    ]
    log = written(tmp_path / "log.jsonl", calls)
    conversion, rows = converted(log)
    found = {tuple(row["token_ids"]): [one["content"] for one in row["messages"]] for row in rows}
    assert found == {(1, 2, 3, 4): ["q", "a", "r", "b"], (50, 51): ["other", "agent"], (1, 60): ["q", "lost"]}
    assert conversion.carried.lossless
    # A list of calls has no place for the answers beside the main chain.
    conversion, _ = converted(log, "calls")
    assert "messages of single calls" in conversion.carried.lost


def test_a_history_that_is_told_otherwise_is_listed(tmp_path: Path) -> None:
    first = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "hm"}]
    then = [*first[:1], {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
    answer = {"role": "assistant", "content": "b"}
    calls = [call("a", [1], [2], messages=first), call("a", [1, 2, 3], [4], messages=[*then, answer])]
    conversion, (row,) = converted(written(tmp_path / "log.jsonl", calls))
    assert row["messages"] == [*then, answer]
    assert conversion.carried.lost == {"messages of single calls": 1}


def test_several_logs_become_one_and_each_loss_is_counted_in_each(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    parts = [[call(f"{k}", [1], [2], id="x"), call(f"{k}", [1, 2, 3], [4], id="y")] for k in range(3)]
    for k, part in enumerate(parts):
        written(folder / f"{k}.jsonl", part)
    out = tmp_path / "out.jsonl"
    code, page, err = run("convert", folder, "--to", "rows", "--session", "session_id", "-o", out, "--lossy")
    assert (code, err) == (0, "")
    assert "3 logs as rows" in page
    assert "6 rows, 3 rollouts → 3 rows" in page
    assert "by `session_id`" in page
    assert "Lost, with the number of rows and conversations that have it" in page
    assert [line.split() for line in page.splitlines() if line.startswith("  id")] == [["id", "3"]]
    assert [row["session_id"] for row in rows_of(out)] == ["0", "1", "2"]
    one, two, three = (folder / f"{k}.jsonl" for k in range(3))
    named = tmp_path / "named.jsonl"
    arguments = (
        "convert",
        one,
        two,
        three,
        "--to",
        "rows",
        "--session",
        "session_id",
        "-o",
        named,
        "--lossy",
        "-q",
    )
    assert run(*arguments) == (0, "", "")
    assert named.read_bytes() == out.read_bytes()


def test_groups_of_different_logs_are_not_one(tmp_path: Path) -> None:
    row = {"token_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [None, -0.5], "group_id": 0, "reward": 1.0}
    logs = [written(tmp_path / f"{k}.jsonl", [row, row]) for k in range(2)]
    conversion, rows = converted(logs, "atropos_group", Settings())
    assert [len(one["tokens"]) for one in rows] == [2, 2]
    assert conversion.carried.rollouts == 4


def test_a_call_that_cannot_be_converted_is_named_with_its_row_and_the_others_are(tmp_path: Path) -> None:
    broken = call("a", [1, 2, 3], [])
    del broken["prompt_ids"], broken["logprobs"]
    broken["completion_ids"] = [4]
    calls = [call("b", [1], [2]), call("a", [1], [2]), "no object", broken, call("a", [1, 2, 5], [6])]
    log = written(tmp_path / "log.jsonl", calls)
    for form in ("rows", "calls"):
        conversion, rows = converted(log, form)
        assert [row["session_id"] for row in rows] == ["b", "a"]
        reasons = {place.row: why for place, why in conversion.carried.refused}
        assert conversion.carried.not_converted == 2
        assert reasons[3] == "call 0 has no prompt ids, and none are made up"
        assert "object" in reasons[2]
    assert trained(converted(log)[1]) == sampled([calls[0], calls[1], calls[4]])
    code, page, _ = run("convert", log, "--to", "rows", "--session", "session_id", "--dry-run")
    assert code == 1
    assert f"{log}:3  call 0 has no prompt ids" in page


def test_a_conversation_over_several_files_is_one_and_a_call_is_named_with_its_file(tmp_path: Path) -> None:
    broken = call("a", [1, 2, 3, 4, 5, 6], [7])
    broken["prompt_ids"] = None
    parts = [[call("a", [1, 2, 3, 4], [5])], [call("a", [1], [2]), broken]]
    logs = [written(tmp_path / f"{at}.jsonl", part) for at, part in enumerate(parts)]
    conversion, rows = converted(logs)
    assert [row["token_ids"] for row in rows] == [[1, 2, 3, 4, 5]]
    assert [row["loss_mask"] for row in rows] == [[0, 1, 0, 0, 1]]
    assert [str(place) for place, _ in conversion.carried.refused] == [f"{logs[1]}:1"]
    assert conversion.notices[0].startswith("2 logs: 3 rows were read as the calls of 1 conversation")


@pytest.mark.parametrize("how", ["gz", "parquet"])
def test_every_kind_of_file_gives_the_same_rows(how: str, tmp_path: Path) -> None:
    calls = [call(f"s{at % 3}", range(1, 2 + at), [9 + at], number=at) for at in range(9)]
    _, expected = converted(written(tmp_path / "plain.jsonl", calls))
    log = tmp_path / f"log.jsonl.{how}" if how == "gz" else tmp_path / "log.parquet"
    if how == "gz":
        log.write_bytes(gzip.compress((tmp_path / "plain.jsonl").read_bytes()))
    else:
        pq.write_table(pa.Table.from_pylist(calls), log, row_group_size=4)  # type: ignore[no-untyped-call]
    assert converted(log)[1] == expected


def test_a_log_of_calls_that_grows_while_it_is_converted_gives_no_file(tmp_path: Path) -> None:
    calls = [call("a", [1], [2]), call("a", [1, 2, 3], [4])]
    log, out = written(tmp_path / "log.jsonl", calls), tmp_path / "out.jsonl"
    conversion = Conversion(log, "rows", out, BY_SESSION)
    list(conversion.survey())
    written(log, [*calls, call("a", [1, 2, 3, 4, 5], [6])])
    with pytest.raises(StorageError, match="changed while it was converted"):
        list(conversion.write())
    assert not out.exists()


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)
def test_joined_or_not_the_same_tokens_of_every_example_log_are_trained(log: Path, tmp_path: Path) -> None:
    def rows(settings: Settings) -> list[Json]:
        out = tmp_path / "out.jsonl"
        convert_rollouts(log, "rows", out, settings, lossy=True, overwrite=True)
        return [row for row in rows_of(out) if "loss_mask" in row]

    try:
        alone = rows(Settings(join=False))
    except RecordError:
        pytest.skip("none of its rows can be converted")
    assert trained(rows(Settings())) == trained(alone)


def test_a_key_that_no_row_has_is_refused(tmp_path: Path) -> None:
    calls = [call("a", [1], [2]), call("a", [1, 2, 3], [4])]
    log = written(tmp_path / "log.jsonl", calls)
    with pytest.raises(SetupError, match=r"no row of .* names a conversation"):
        converted(log, chosen=Settings(session="sesion_id"))


@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout")
@pytest.mark.parametrize("mode", ["tito", "retok"])
@pytest.mark.parametrize("model", some(["smollm2", "gemma-3", "qwen2.5-coder"], 1))
def test_calls_of_real_models_become_the_rows_of_their_rollouts(model: str, mode: str, tmp_path: Path) -> None:
    with gzip.open(SHARED / "rollouts" / model / f"{mode}.jsonl.gz", "rt", encoding="utf-8") as lines:
        whole = [json.loads(line) for line in lines][:60]
    calls = []
    for row in whole:
        answers = [k for k, one in enumerate(row["messages"]) if one["role"] == "assistant"]
        for at, one in zip(answers, row["calls"], strict=True):
            sent, answer = row["messages"][:at], row["messages"][at]
            calls.append({"session_id": row["id"], "messages": [*sent, answer], "tools": row["tools"], **one})
    random.Random(0).shuffle(calls)
    conversion, rows = converted(written(tmp_path / "calls.jsonl", calls))
    assert conversion.carried.not_converted == 0
    joined = {
        (row["session_id"], tuple(row["token_ids"]), tuple(row["loss_mask"]), str(row["logprobs"])) for row in rows
    }
    _, made = converted(written(tmp_path / "whole.jsonl", whole), chosen=Settings())
    assert joined == {
        (row["id"], tuple(row["token_ids"]), tuple(row["loss_mask"]), str(row["logprobs"])) for row in made
    }
    assert len(joined) == len(rows) == len(made)
    assert (mode == "retok") == (conversion.carried.forked > 0)
    ends = {row["id"]: row["messages"] for row in whole}
    last = {
        row["session_id"]: row["messages"] for row in rows if len(row["messages"]) == len(ends[row["session_id"]])
    }
    assert last == ends
    # Without a key they are joined by what they saw and said, and the same tokens are trained.
    nameless = [{key: value for key, value in one.items() if key != "session_id"} for one in calls]
    by_history, rows = converted(written(tmp_path / "nameless.jsonl", nameless), chosen=Settings())
    assert by_history.carried.joined > 0
    names = {
        "prompt_ids": "prompt_token_ids",
        "completion_ids": "generation_token_ids",
        "logprobs": "generation_log_probs",
    }
    assert trained(rows) == sampled({ours: one[theirs] for ours, theirs in names.items()} for one in calls)


def test_each_log_is_read_with_its_own_settings(tmp_path: Path) -> None:
    plain = {"token_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [None, -0.5]}
    other = {"ids": [3, 4], "lm": [0, 1], "lp": [None, -0.5]}
    logs = [written(tmp_path / "a.jsonl", [plain]), written(tmp_path / "b.jsonl", [other])]
    columns = {"token_ids": "ids", "loss_mask": "lm", "logprobs": "lp"}
    chosen = Settings(overrides=(Override((str(logs[1]),), {"columns": columns}),))
    _, rows = converted(logs, chosen=chosen)
    assert [row["token_ids"] for row in rows] == [[1, 2], [3, 4]]
