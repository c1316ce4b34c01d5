"""Rows that are one call each: joined by the key that names their conversation, they say what one log would."""

from __future__ import annotations

import functools
import gzip
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.command import written
from tests.tables import stored as of_table
from tests.tiers import crossed, examples, some
from tests.world import FORMATS
from tito_audit import (
    RepairSettings,
    Settings,
    SetupError,
    convert_rollouts,
    read_rollouts,
    repair_rollouts,
    scan_rollouts,
    write_rollouts,
)
from tito_audit.cli import app

ROOT = Path(__file__).resolve().parents[1]
TOY = str(ROOT / "fixtures" / "tokenizers" / "toy_bpe")
SHARED = ROOT.parent / "shared"
LOGS = some(("generic", "nemo_gym", "miles_session", "verifiers_v1", "harbor", "rllm_episode"), 4)
JUDGED = ("SEQ", "TOK", "TPL")

Wire = dict[str, Any]
Found = dict[Any, list[tuple[object, ...]]]


def scanned(log: Path, **settings: Any) -> tuple[dict[int, list[tuple[object, ...]]], list[str]]:
    """What is found in the rollout at each row, and the notices."""
    chunk, judged = settings.pop("chunk", None), settings.pop("judged", JUDGED)
    scan = scan_rollouts(log, Settings(**{"tokenizer": TOY, **settings}))
    scan.chunk_bytes = chunk
    results: dict[int, list[tuple[object, ...]]] = {}
    for result in scan:
        if result.of_log:
            continue
        assert result.place.item == 0
        results[result.place.row] = sorted(
            (f.code, f.severity, f.hit.cause, f.hit.turn or 0, f.hit.start, f.hit.end, f.hit.message)
            for f in result.findings
            if f.code.startswith(judged)
        )
    return results, scan.summary.notices


def by_session(log: Path, rows: Sequence[Wire], **settings: Any) -> tuple[Found, list[str]]:
    results, notices = scanned(log, **settings)
    findings_of = {rows[row]["session_id"]: findings for row, findings in results.items()}
    assert len(findings_of) == len(results), "each conversation is one rollout"
    return findings_of, notices


# Logs of whole rollouts, and their calls in several forms


@functools.cache
def converted(name: str, folder: Path) -> tuple[Wire, ...]:
    """The rollouts with calls of a fixture, as rows that list their calls."""
    out = folder / f"{name}.calls.jsonl"
    (log,) = FORMATS.glob(f"{name}.json*")
    convert_rollouts(log, "calls", out, lossy=True)
    rows = []
    for number, line in enumerate(out.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        columns = {key: row[key] for key in ("messages", "tools", "calls") if row.get(key)}
        rows.append({"session_id": f"{name}-{number}", **columns})
    return tuple(rows)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Wire]:
    """Rollouts of several fixtures, each call with the message that it wrote if there are messages."""
    folder = tmp_path_factory.mktemp("whole")
    rows = [row for name in LOGS for row in converted(name, folder)]
    return [row for row in rows if is_plain(row)]


def is_plain(row: Wire) -> bool:
    """Whether each call is known by its prompt, and its answer by its place."""
    prompts = {tuple(call.get("prompt_ids") or call.get("prompt_token_ids") or ()) for call in row["calls"]}
    distinct = len(prompts) == len(row["calls"]) and () not in prompts
    return distinct and (not row.get("messages") or len(answers(row)) == len(row["calls"]))


def answers(row: Wire) -> list[int]:
    return [i for i, message in enumerate(row["messages"]) if message["role"] == "assistant"]


def calls_of(row: Wire) -> list[tuple[Wire, list[Wire], Wire | None]]:
    """Each call with what it was sent and what it wrote, () and None without messages."""
    if not row.get("messages"):
        return [(call, [], None) for call in row["calls"]]
    indices = answers(row)
    messages = row["messages"]
    each = zip(row["calls"], indices, strict=True)
    bare = [({key: call[key] for key in call if key != "messages"}, call.get("messages"), i) for call, i in each]
    return [(call, messages[:i] if sent is None else sent, messages[i]) for call, sent, i in bare]


def generic(row: Wire, call: Wire, sent: list[Wire], answer: Wire | None) -> Wire:
    text = {"messages": [*sent, answer], "tools": row.get("tools")} if answer is not None else {}
    return {**text, **call}


def chat(row: Wire, call: Wire, sent: list[Wire], answer: Wire | None) -> Wire:
    request = {"messages": sent, **({"tools": row["tools"]} if row.get("tools") else {})}
    choice = {"index": 0, "finish_reason": call.get("finish_reason"), "token_ids": call["completion_ids"]}
    entries = [{"token": "", "logprob": value, "bytes": []} for value in call.get("logprobs") or ()]
    if len(entries) == len(call["completion_ids"]):
        choice["logprobs"] = {"content": entries}
    if answer is None:
        response: Wire = {"object": "text_completion", "choices": [{**choice, "text": None}]}
        request = {}
    else:
        response = {"object": "chat.completion", "choices": [{**choice, "message": answer}]}
    response |= {"id": "chatcmpl", "prompt_token_ids": call["prompt_ids"]}
    return {"request": request, "response": response}


def gateway(row: Wire, call: Wire, sent: list[Wire], answer: Wire | None) -> Wire:
    return {
        "trace_id": "t",
        "messages": sent,
        "raw_request": {"tools": row.get("tools")},
        "response_message": answer,
        "prompt_token_ids": call["prompt_ids"],
        "completion_token_ids": call["completion_ids"],
        "logprobs": call.get("logprobs"),
        "finish_reason": call.get("finish_reason"),
    }


def capture(row: Wire, call: Wire, sent: list[Wire], answer: Wire | None) -> Wire:
    return {
        "model_call_id": "c",
        "schema_version": 1,
        "output_items": [],
        "model": "",
        "prompt_token_ids": call["prompt_ids"],
        "generation_token_ids": call["completion_ids"],
        "generation_log_probs": call.get("logprobs"),
    }


Form = Callable[[Wire, Wire, list[Wire], Wire | None], Wire]
FORMS: tuple[Form, ...] = (generic, chat, gateway, capture)
HOWS = ("plain", "gz", "parquet")


def named(value: Any) -> str:
    """What a case is called."""
    return getattr(value, "__name__", str(value))


def apart(whole: Sequence[Wire], form: Form, seed: int = 0) -> list[Wire]:
    """The calls of all rollouts, each a row, in any order."""
    rows = [{"session_id": row["session_id"], **form(row, *call)} for row in whole for call in calls_of(row)]
    random.Random(seed).shuffle(rows)
    return rows


def stored(rows: Sequence[Wire], path: Path, how: str) -> Path:
    if how == "parquet":
        names = dict.fromkeys(key for row in rows for key in row)
        # Plain columns of messages and tools may also be JSON.
        texts = {"messages", "tools"} if "prompt_ids" in rows[0] else set()
        columns = {
            name: [json.dumps(row[name]) if row.get(name) and name in texts else row.get(name) for row in rows]
            for name in names
        }
        pq.write_table(pa.table(columns), path.with_suffix(".parquet"), row_group_size=7)
        return path.with_suffix(".parquet")
    log = written(path, rows)
    if how == "gz":
        packed = path.with_name(f"{path.name}.gz")
        packed.write_bytes(gzip.compress(log.read_bytes()))
        return packed
    return log


@pytest.mark.parametrize(("form", "how"), crossed(FORMS, HOWS), ids=named)
def test_calls_joined_by_their_session_say_what_whole_rollouts_say(
    form: Form, how: str, whole: list[Wire], tmp_path: Path
) -> None:
    rows, judged = whole, JUDGED
    if form is capture:  # It holds neither messages nor tools.
        rows, judged = [{"session_id": row["session_id"], "calls": row["calls"]} for row in whole], ("SEQ", "TOK")
    expected, _ = by_session(written(tmp_path / "whole.jsonl", rows), rows, judged=judged)
    codes = {finding[0] for findings in expected.values() for finding in findings}
    assert {"SEQ301", "TOK101"} <= codes
    assert form is capture or "TPL203" in codes
    for seed in range(examples(1, 3)):
        lines = apart(rows, form, seed)
        log = stored(lines, tmp_path / f"{seed}.jsonl", how)
        joined, notices = by_session(log, lines, session="session_id", judged=judged)
        assert joined == expected
        words = f"{log}: {len(lines)} rows were read as the calls of {len(rows)} conversations, by `session_id`."
        assert words in notices
    alone, _ = scanned(log, join=False)
    assert len(alone) == len(lines)
    assert "SEQ301" not in {finding[0] for findings in alone.values() for finding in findings}


def test_a_capture_joined_by_its_key_says_what_its_default_join_says(tmp_path: Path) -> None:
    lines, conversations = [], []
    for row in converted("nemo_gym", tmp_path):
        name = row["session_id"]
        conversations.append({"rollout_id": name, "messages": row["messages"], "tools": row["tools"]})
        lines += [{**capture(row, *call), "rollout_id": name} for call in calls_of(row)]
    random.Random(2).shuffle(lines)
    log = written(tmp_path / "a.tokens.jsonl", lines)
    messages = str(written(tmp_path / "said.jsonl", conversations))
    default, _ = scanned(log, messages=messages)
    stated, notices = scanned(log, messages=messages, session="rollout_id")
    assert stated == default
    assert any(stated.values())
    assert any("joined on rollout_id" in notice for notice in notices)


# Without the option, and any number of processes


def test_where_nothing_is_joined_each_row_is_a_rollout(whole: list[Wire], tmp_path: Path) -> None:
    lines = apart(whole, generic)
    log = written(tmp_path / "log.jsonl", lines)
    assert [len(rollout.turns) for rollout in read_rollouts(log, Settings(join=False))] == [1] * len(lines)


@pytest.mark.parametrize("how", some(HOWS[::-1], 1))
def test_a_sample_and_a_limit_are_of_conversations_in_any_number_of_processes(
    how: str, whole: list[Wire], tmp_path: Path
) -> None:
    log = stored(apart(whole, generic), tmp_path / "log.jsonl", how)
    alone = scanned(log, session="session_id")
    sampled = scanned(log, session="session_id", sample=0.4)
    assert scanned(log, session="session_id", sample=0.4, jobs=2, chunk=2_000) == sampled
    assert 0 < len(sampled[0]) < len(alone[0])
    assert sampled[0].items() <= alone[0].items()
    few = scanned(log, session="session_id", limit=3)
    assert list(few[0]) == list(alone[0])[:3]
    assert scanned(log, session="session_id", limit=3, jobs=2, chunk=1) == few


def test_any_row_of_a_conversation_shows_all_of_it_with_the_row_of_each_call(
    whole: list[Wire], tmp_path: Path
) -> None:
    row = next(row for row in whole if len(row["calls"]) == 3 and row.get("messages"))
    lines = [{"session_id": "s", **generic(row, *call)} for call in calls_of(row)]
    lines = [lines[2], {"session_id": None, **generic(row, *calls_of(row)[0])}, lines[0], lines[1]]
    log = written(tmp_path / "log.jsonl", lines)
    for number in (0, 2, 3):
        command = ["show", str(log), "--row", str(number), "-t", TOY, "--session", "session_id"]
        shown = CliRunner().invoke(app, command)
        assert shown.exit_code == 0, shown.output
        for turn, at in enumerate((2, 3, 0)):
            assert f"turn {turn} completion · row {at} ·" in shown.output


# What is joined, and in which order


def call(session: object, prompt: list[int], completion: list[int], **more: Any) -> Wire:
    return {"session_id": session, "prompt_ids": prompt, "completion_ids": completion, **more}


def turns(log: Path, **settings: Any) -> list[tuple[int, list[int]]]:
    """Each rollout by its row, with the first id of each completion."""
    settings = {"session": "session_id", **settings}
    return [
        (
            rollout.place.row,
            [int(turn.completion_ids[0]) for turn in rollout.turns if turn.completion_ids is not None],
        )
        for rollout in read_rollouts(log, Settings(**settings))
    ]


def notice(log: Path, **settings: Any) -> str:
    _, notices = scanned(log, **{"session": "session_id", **settings})
    return next(line for line in notices if "by `" in line)


@pytest.mark.parametrize("case", of_table(__file__, "joins"), ids=lambda case: case["name"])
def test_rows_are_joined_by_the_name_that_they_have_in_common(case: dict[str, Any], tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", map(json.loads, case["rows"]))
    session = case.get("session", "session_id")
    assert [[row, ids] for row, ids in turns(log, session=session)] == case["turns"]
    line = notice(log, session=session)
    for words in case["notice"]:
        assert words in line


def test_rows_that_are_not_one_call_stay_as_they_are(tmp_path: Path) -> None:
    two = {"session_id": "a", "calls": [{"prompt_ids": [1], "completion_ids": [7]}] * 2}
    trained = {"session_id": "a", "token_ids": [1, 2], "loss_mask": [0, 1]}
    broken = {"session_id": "a", "prompt_ids": "x", "completion_ids": [["y"]]}
    choice = {"finish_reason": "stop", "token_ids": [8], "text": "x"}
    choices = {"session_id": "a", "response": {"prompt_token_ids": [1], "choices": [choice, choice]}}
    rows = [two, call("a", [1], [2]), trained, broken, choices, call("a", [1, 2], [3])]
    log = written(tmp_path / "log.jsonl", rows)
    scan = scan_rollouts(log, Settings(session="session_id"))
    places = Counter(result.place.row for result in scan)
    assert places == {0: 1, 1: 1, 2: 1, 3: 1, 4: 2}
    assert any(
        line == f"{log}: 2 rows were read as the calls of 1 conversation, by `session_id`; "
        "4 rows with it are not a single call and stay as they are."
        for line in scan.summary.notices
    )


def test_another_agent_and_a_retry_keep_what_they_were_sent(tmp_path: Path) -> None:
    def texts_as_messages(*texts: str) -> list[Wire]:
        return [{"role": "assistant" if k % 2 else "user", "content": text} for k, text in enumerate(texts)]

    rows = [
        call("a", [1, 2, 3, 4, 5, 6, 7, 8], [9], messages=texts_as_messages("q", "a", "r", "b"), timestamp=4),
        call("a", [50, 51, 52], [53], messages=texts_as_messages("other", "agent"), timestamp=2),
        call("a", [1, 2, 3, 4], [40], messages=texts_as_messages("q", "lost"), timestamp=1),
        call("a", [1, 2, 3, 4], [5, 6], messages=texts_as_messages("q", "a"), timestamp=3),
    ]
    log = written(tmp_path / "log.jsonl", rows)
    (rollout,) = read_rollouts(log, Settings(session="session_id"))
    assert rollout.stated.calls_at == tuple((str(log), row) for row in (2, 3, 0, 1))
    assert [message.text for message in rollout.messages] == ["q", "a", "r", "b"]
    assert [turn.message_index for turn in rollout.turns] == [None, 1, 3, None]
    sent = [[message.text for message in turn.prompt_messages or ()] for turn in rollout.turns]
    assert sent == [["q"], [], [], ["other"]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"session": "uuid"}, r'Settings\(session="uuid"\): no row of .* names a conversation there'),
        ({"rows_at": "data"}, r"cannot be combined with Settings\(rows_at="),
        ({"columns": {"prompt_ids": "p"}}, r"cannot be combined with Settings\(map="),
    ],
)
def test_what_cannot_be_joined_is_named_as_python_names_it(wrong: Any, message: str, tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", [call("a", [1], [2])])
    with pytest.raises(SetupError, match=message):
        list(scan_rollouts(log, Settings(**{"session": "session_id", **wrong})))


# Repairs


@pytest.mark.parametrize(("jobs", "form", "how"), crossed((2, None), FORMS[:3], HOWS[::-1]), ids=named)
def test_a_repair_writes_each_call_back_to_its_row(
    jobs: int | None, form: Form, how: str, whole: list[Wire], tmp_path: Path
) -> None:
    lines = apart(whole, form, 5)
    lines = [{"number": number, **line} for number, line in enumerate(lines)]
    log = stored(lines, tmp_path / "log.jsonl", how)
    out = tmp_path / f"out{''.join(log.suffixes)}"
    settings = Settings(tokenizer=TOY, session="session_id", jobs=jobs)
    run = repair_rollouts(log, out, settings, RepairSettings(strategies=("splice",), unsafe=True))
    run.batch_bytes = 4_000 if jobs else None
    outcomes = list(run)
    assert len(outcomes) == len({line["session_id"] for line in lines})
    before, after = contents(log), contents(out)
    assert [row["number"] for row in after] == list(range(len(lines)))
    changed = [
        (old, new)
        for old, new in zip(before, after, strict=True)
        if {key: value for key, value in new.items() if key != "tito_audit"} != old
    ]
    cured = {lines[outcome.place.row]["session_id"] for outcome in outcomes if outcome.repaired}
    assert {old["session_id"] for old, _ in changed} == cured != set()
    assert all(new["tito_audit"] is not None for _, new in changed)
    assert "SEQ301" in run.before.findings.keys() - run.after.findings.keys()
    # A second scan of the written rows proves it.
    now, _ = by_session(out, lines, session="session_id")
    assert not {"SEQ301"} & {finding[0] for name in cured for finding in now[name]}


def contents(log: Path) -> list[Wire]:
    if log.suffix == ".parquet":
        return pq.read_table(log).to_pylist()
    data = log.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(data) if log.suffix == ".gz" else data).splitlines()]


def test_conversations_that_nothing_changes_are_the_same_file(whole: list[Wire], tmp_path: Path) -> None:
    lines = [*apart(whole, chat, 1), {"session_id": None, **generic(whole[0], *calls_of(whole[0])[0])}]
    log, out, copy = written(tmp_path / "log.jsonl", lines), tmp_path / "out.jsonl", tmp_path / "copy.jsonl"
    settings = Settings(tokenizer=TOY, session="session_id", select=("REC001",))
    list(repair_rollouts(log, out, settings))
    assert out.read_bytes() == log.read_bytes()
    assert write_rollouts(log, list(read_rollouts(log, settings)), copy, settings) == 0
    assert copy.read_bytes() == log.read_bytes()


def test_conversations_that_are_left_out_go_to_the_quarantine_row_by_row(
    whole: list[Wire], tmp_path: Path
) -> None:
    lines = [{"number": n, **line} for n, line in enumerate(apart(whole, generic, 4))]
    log, out, bad = written(tmp_path / "log.jsonl", lines), tmp_path / "out.jsonl", tmp_path / "bad.jsonl"
    settings = Settings(tokenizer=TOY, session="session_id")
    run = repair_rollouts(log, out, settings, RepairSettings(quarantine=str(bad)))
    gone = [outcome for outcome in run if outcome.quarantined is not None]
    repaired, quarantined = contents(out), contents(bad)
    assert gone
    assert sorted(row["number"] for row in [*repaired, *quarantined]) == list(range(len(lines)))
    assert {row["session_id"] for row in quarantined}.isdisjoint({row["session_id"] for row in repaired})
    assert len({row["session_id"] for row in quarantined}) == len(gone)


def test_every_conversation_may_go_to_the_quarantine(tmp_path: Path) -> None:
    lines = [call("a", [1], [2]), call("a", [9, 9], [3]), call(None, [1], [4])]
    for line in lines[:2]:
        line["completion_logprobs"] = [-0.5, -0.5]
    log, out, bad = written(tmp_path / "log.jsonl", lines), tmp_path / "out.jsonl", tmp_path / "bad.jsonl"
    settings = Settings(session="session_id")
    run = repair_rollouts(
        log, out, settings, RepairSettings(strategies=("drop",), unsafe=True, quarantine=str(bad))
    )
    assert [outcome.quarantined is not None for outcome in run] == [True, False]
    assert contents(out) == lines[2:]
    assert len(contents(bad)) == 2
    assert not run.failing
