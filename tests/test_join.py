"""Joins: what a log and the file of its messages say together is what one log would say."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.command import run, written
from tests.world import FORMATS, ROOT
from tito_audit import (
    RepairSettings,
    Settings,
    SetupError,
    StorageError,
    read_rollouts,
    repair_rollouts,
    scan_rollouts,
    write_rollouts,
)
from tito_audit.formats import chat_tools
from tito_audit.join._calls import order_calls
from tito_audit.record.rollout import Turn

TOY = str(ROOT / "fixtures" / "tokenizers" / "toy_bpe")
TEXT = ("messages", "tools", "chat_template_kwargs")
TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")

Wire = dict[str, Any]
Found = dict[Any, list[tuple[object, ...]]]


def rows_of(name: str) -> list[Wire]:
    return [json.loads(line) for line in (FORMATS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def findings_of(log: Path, *, chunk: int | None = None, **settings: Any) -> tuple[Found, list[str]]:
    """What is found in each row, and the notices."""
    scan = scan_rollouts(log, Settings(tokenizer=TOY, **settings))
    scan.chunk_bytes = chunk
    results: Found = {}
    for result in scan:
        results[result.place.row, result.place.item] = sorted(
            (f.code, f.severity, f.hit.cause, f.hit.turn or 0, f.hit.start, f.hit.end, f.hit.message)
            for f in result.findings
        )
    return results, scan.summary.notices


def split(name: str) -> tuple[list[Wire], list[Wire], list[Wire]]:
    """Rows of a fixture with an id; the same without their messages; and the messages."""
    whole, log, messages = [], [], []
    for number, row in enumerate(rows_of(name)):
        row = {"uid": number, **{key: value for key, value in row.items() if key != "id"}}
        bare, text = dict(row), {"uid": number}
        for inside in ("", "metadata", "request"):
            holder = row if not inside else row.get(inside)
            if isinstance(holder, dict):
                text |= {key: holder[key] for key in TEXT if key in holder}
                rest = {key: value for key, value in holder.items() if key not in TEXT}
                bare = rest if not inside else {**bare, inside: rest}
        if row.get("messages") is None or bare.keys() - {"uid"}:
            whole.append(row)
            log.append(bare)
            messages.append(text)
    return whole, log, messages


# A log and its messages


@pytest.mark.parametrize("name", ["generic", "slime", "atropos_item", "atropos_group", "vllm"])
def test_a_log_joined_with_its_messages_says_what_the_whole_log_says(name: str, tmp_path: Path) -> None:
    whole, log, messages = split(name)
    random.Random(1).shuffle(messages)
    expected, _ = findings_of(written(tmp_path / "whole.jsonl", whole))
    path = written(tmp_path / "said.jsonl", messages)
    without, _ = findings_of(written(tmp_path / "log.jsonl", log))
    joined, notices = findings_of(tmp_path / "log.jsonl", messages=str(path))
    text_only = [
        key for key, findings in without.items() if any(finding[2] == "row cannot be read" for finding in findings)
    ]
    for key in text_only:
        del expected[key], joined[key]
    assert joined == expected
    assert any(expected.values())
    assert any("joined on uid" in notice for notice in notices)
    if name in ("generic", "atropos_group"):
        assert without != {**without, **expected}, "without the messages less is found"


def miles(tmp_path: Path) -> tuple[Path, Path, Path]:
    """The Parquet and the messages that miles writes, and the tools they were sampled with."""
    tools = rows_of("nemo_gym")[0]["responses_create_params"]["tools"]
    (tmp_path / "tools.json").write_text(json.dumps(tools), encoding="utf-8")
    return FORMATS / "miles_columns.parquet", FORMATS / "miles_trajectory.jsonl", tmp_path / "tools.json"


def test_columns_of_miles_are_audited_with_the_messages_beside_them(tmp_path: Path) -> None:
    log, path, tools = miles(tmp_path)
    rollouts = list(read_rollouts(log, Settings(messages=str(path), tools=str(tools))))
    assert [len(rollout.messages) for rollout in rollouts] == [7, 7, 2, 7, 7]
    assert all(rollout.tools and rollout.tools[0]["function"]["name"] == "weather" for rollout in rollouts)
    table = pq.read_table(log).to_pylist()
    messages = {row["sample_index"]: row["messages"] for row in rows_of("miles_trajectory")}
    by_id = {row["sample_index"]: row for row in table}
    chat = list(chat_tools(json.loads(tools.read_text()), "tools"))
    whole = [{**by_id[i], "uid": i, "messages": messages[i], "tools": chat} for i in by_id]
    for row in whole:
        row["loss_mask"] = row["loss_mask"] if row["loss_mask"] is not None else [1] * row["response_length"]
    expected, _ = findings_of(written(tmp_path / "whole.jsonl", whole), format="generic")
    joined, notices = findings_of(log, messages=str(path), tools=str(tools))
    assert joined == expected
    assert any("joined on sample_index: 5 of 5 rollouts" in notice for notice in notices)


def test_messages_that_call_tools_nobody_lists_are_not_given_to_a_template(tmp_path: Path) -> None:
    log, messages, _ = miles(tmp_path)
    joined, notices = findings_of(log, messages=str(messages))
    alone, _ = findings_of(log)
    assert joined == alone
    assert any("1 of 5 rollouts" in notice and "--tools FILE" in notice for notice in notices)


def test_samples_of_miles_are_told_apart_by_rollout_and_by_occurrence(tmp_path: Path) -> None:
    columns, messages = tmp_path / "dashboard_columns", tmp_path / "trajectory"
    columns.mkdir()
    messages.mkdir()
    table = pq.read_table(FORMATS / "miles_columns.parquet")
    lines = rows_of("miles_trajectory")
    index = pa.array([0, 0, 1, 2, 3], pa.int32())
    pq.write_table(table.set_column(0, "sample_index", index), columns / "rollout_7.parquet")
    occurrences = [0, 1, 0, 0, 0]
    numbered = [
        {**line, "sample_index": i, "sample_occurrence": n, "prompt": "7"}
        for line, i, n in zip(lines, index.to_pylist(), occurrences, strict=True)
    ]
    written(messages / "7.jsonl", numbered)
    pq.write_table(table, columns / "rollout_eval_7.parquet")
    other = [{"role": "user", "content": "another rollout"}, {"role": "assistant", "content": "yes"}]
    written(messages / "eval_7.jsonl", [{**line, "messages": other} for line in lines])
    tools = str(miles(tmp_path)[2])
    rollouts = list(read_rollouts(columns, Settings(messages=str(messages), tools=tools)))
    lengths = {(Path(rollout.place.file).name, rollout.place.row): len(rollout.messages) for rollout in rollouts}
    assert [lengths["rollout_7.parquet", row] for row in range(5)] == [7, 7, 2, 7, 7]
    assert [lengths["rollout_eval_7.parquet", row] for row in range(5)] == [2] * 5
    one_sided = tmp_path / "trajectory" / "7.jsonl"
    _, notices = findings_of(columns / "rollout_eval_7.parquet", messages=str(one_sided), tools=tools)
    assert any("0 of 5 rollouts" in notice and "5 found no row with their id" in notice for notice in notices)


# A token capture and its rollout rows


def captured(seed: int = 0) -> tuple[list[Wire], list[Wire], list[Wire]]:
    """Rollout rows of NeMo-Gym with ids; their calls as lines of a capture, mixed; and the rows without ids."""
    whole, lines, rollouts = [], [], []
    chance = random.Random(seed)
    for number, row in enumerate(rows_of("nemo_gym")):
        if "response" not in row or isinstance(row["response"]["output"][0], list):
            continue
        if row["id"] in ("placeholder-ids", "text-only"):
            continue
        row["_ng_rollout_id"] = name = f"r-{number}"
        run: list[Wire] = []
        calls: list[Wire] = []
        for item in row["response"]["output"]:
            if item.get("type") not in ("reasoning", "function_call") and item.get("role") != "assistant":
                run = []
                continue
            run.append({key: value for key, value in item.items() if key not in TOKENS})
            if "generation_token_ids" in item:
                about = {"model_call_id": f"c{len(calls)}", "rollout_id": name, "created_at": float(len(calls))}
                tokens = {key: item[key] for key in TOKENS}
                calls.append({**tokens, **about, "schema_version": 1, "output_items": run, "model": ""})
                run = []
        bare = json.loads(json.dumps(row))
        for item in bare["response"]["output"]:
            for key in TOKENS:
                item.pop(key, None)
        whole.append(row)
        lines += calls
        rollouts.append(bare)
    chance.shuffle(lines)
    chance.shuffle(rollouts)
    return whole, lines, rollouts


def logged(folder: Path, seed: int = 0) -> tuple[list[Wire], list[Wire], Path, Path, Settings]:
    """Rollouts with ids, the lines of their capture, its log, where to write it, and settings that join them."""
    whole, lines, rollouts = captured(seed)
    messages = str(written(folder / "rollouts.jsonl", rollouts))
    log = written(folder / "a.tokens.jsonl", lines)
    return whole, lines, log, folder / "out.jsonl", Settings(tokenizer=TOY, messages=messages)


def by_rollout(results: Found, rows: Sequence[Wire], key: str) -> Found:
    return {rows[row][key]: findings for (row, _), findings in results.items()}


@pytest.mark.parametrize("seed", range(4))
def test_a_capture_joined_with_its_rollouts_says_what_rollouts_with_ids_say(seed: int, tmp_path: Path) -> None:
    whole, lines, rollouts = captured(seed)
    expected, _ = findings_of(written(tmp_path / "whole.jsonl", whole))
    path = written(tmp_path / "rollouts.jsonl", rollouts)
    joined, notices = findings_of(written(tmp_path / "mixed.tokens.jsonl", lines), messages=str(path))
    assert by_rollout(joined, lines, "rollout_id") == by_rollout(expected, whole, "_ng_rollout_id")
    assert {"SEQ301", "SEQ302", "TPL204"} <= {finding[0] for findings in joined.values() for finding in findings}
    words = f"{len(lines)} lines were read as the calls of {len(whole)} rollouts"
    assert any(words in notice for notice in notices)


def test_a_rollout_row_without_an_id_is_known_by_task_rollout_and_attempt(tmp_path: Path) -> None:
    _, lines, rollouts = captured()
    row = next(candidate for candidate in rollouts if candidate["id"] == "clean")
    name = row.pop("_ng_rollout_id")
    calls = [{**line, "rollout_id": "4-2-a1"} for line in lines if line["rollout_id"] == name]
    row |= {"_ng_task_index": 4, "_ng_rollout_index": 2, "_ng_attempt_index": 1}
    path = written(tmp_path / "rollouts.jsonl", [row])
    (rollout,) = read_rollouts(written(tmp_path / "a.tokens.jsonl", calls), Settings(messages=str(path)))
    assert len(rollout.turns) == 3
    assert [turn.message_index for turn in rollout.turns] == [2, 4, 6]
    assert rollout.messages[2].tool_calls


def test_without_a_join_each_line_of_a_capture_is_a_rollout(tmp_path: Path) -> None:
    _, lines, _ = captured()
    log = written(tmp_path / "a.tokens.jsonl", lines)
    assert len(list(read_rollouts(log, Settings(join=False)))) == len(lines)


def call(prompt: list[int], completion: list[int]) -> Turn:
    return Turn(np.array(prompt, np.int32), np.array(completion, np.int32))


SEEN, LATER, OTHER = [1, 2, 3], [1, 2, 3, 4, 5, 6], [50, 51, 52, 53]
MERGED = ([1, 2, 3, 45, 6, 7, 8], [9])
"""4 5 came back as 45."""


@pytest.mark.parametrize(
    ("calls", "times", "order", "main"),
    [
        # The last, another agent's, the first, a retry that nobody went on with, the second, that agent's second.
        (
            [
                ([*LATER, 7, 8], [9]),
                (OTHER, [54]),
                (SEEN, [4, 5]),
                (SEEN, [40]),
                (LATER, [7]),
                ([*OTHER, 54, 55], [56]),
            ],
            [5.0, 1.5, 1.0, 0.5, 3.0, 4.0],
            (3, 2, 4, 0, 1, 5),
            (1, 2, 3),
        ),
        ([MERGED, (LATER, [7]), (SEEN, [4, 5])], [3.0, 2.0, 1.0], (2, 1, 0), (0, 1, 2)),
        ([], [], (), ()),
    ],
    ids=["by the longest beginning", "a history in other tokens", "none"],
)
def test_calls_are_chained_by_what_they_go_on_from(calls: Any, times: Any, order: Any, main: Any) -> None:
    assert order_calls([call(*each) for each in calls], times) == (order, main)


def test_many_calls_are_chained_without_recursion() -> None:
    calls = [call(list(range(2 * k + 1)), [2 * k + 1]) for k in range(2_000)]
    order, main = order_calls(calls[::-1], [0.0] * 2_000)
    assert order == tuple(range(1_999, -1, -1))
    assert main == tuple(range(2_000))


def test_a_retry_knows_what_it_was_sent(tmp_path: Path) -> None:
    _, lines, rollouts = captured()
    row = next(candidate for candidate in rollouts if candidate["id"] == "clean")
    calls = [line for line in lines if line["rollout_id"] == row["_ng_rollout_id"]]
    second = next(line for line in calls if line["model_call_id"] == "c1")
    lost = {**second, "model_call_id": "c1-lost", "created_at": 0.5, "output_items": []}
    lost |= {"generation_token_ids": [40, 83], "generation_log_probs": [-0.1, -0.2]}
    path = written(tmp_path / "rollouts.jsonl", [row])
    log = written(tmp_path / "a.tokens.jsonl", [*calls, lost])
    (rollout,) = read_rollouts(log, Settings(messages=str(path)))
    assert [turn.message_index for turn in rollout.turns] == [2, None, 4, 6]
    retry = rollout.turns[1]
    assert retry.prompt_messages == rollout.messages[:4]
    joined, _ = findings_of(log, messages=str(path))
    assert {finding[0] for finding in joined[0, 0]} == {"SEQ304"}


# Ids


def one_call(number: object, text: str = "It is 4.") -> tuple[Wire, Wire]:
    row = next(row for row in rows_of("generic") if row.get("calls") and row.get("messages"))
    return {"uid": number, "calls": row["calls"]}, {
        "uid": number,
        "messages": row["messages"],
        "tools": row.get("tools"),
    }


def test_columns_that_are_not_there_are_named_as_python_names_them(tmp_path: Path) -> None:
    log, chat = one_call("x")
    del chat["uid"]
    path, messages = written(tmp_path / "log.jsonl", [log]), str(written(tmp_path / "said.jsonl", [chat]))
    with pytest.raises(SetupError, match=r"Settings\(on=\{\"uid\": …\}\): .*said\.jsonl has no such column"):
        findings_of(path, messages=messages, on={"uid": "uid"})


@pytest.mark.parametrize("form", ["jsonl.gz", "parquet", "json"])
def test_messages_may_be_in_a_file_of_any_kind(form: str, tmp_path: Path) -> None:
    logs, chats = zip(*(one_call(number) for number in range(5)), strict=True)
    chats = chats[::-1]
    path = tmp_path / f"said.{form}"
    if form == "parquet":
        pq.write_table(
            pa.Table.from_pylist([{**row, "messages": json.dumps(row["messages"])} for row in chats]), path
        )
    elif form == "json":
        path.write_text(json.dumps(chats), encoding="utf-8")
    else:
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in chats).encode()))
    expected, _ = findings_of(
        written(tmp_path / "log.jsonl", logs), messages=str(written(tmp_path / "plain.jsonl", chats))
    )
    joined, notices = findings_of(tmp_path / "log.jsonl", messages=str(path))
    assert joined == expected
    assert any("5 of 5 rollouts found their messages" in notice for notice in notices)


def test_rows_that_cannot_be_kept_for_a_second_reading_are_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, chat = one_call(1)
    path = tmp_path / "said.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(chat) + "\n").encode()))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(StorageError, match="name another folder with TMPDIR"):
        findings_of(written(tmp_path / "log.jsonl", [log]), messages=str(path))


# Tools


def test_tools_are_one_list_for_all_or_rows_with_an_id(tmp_path: Path) -> None:
    flat = rows_of("nemo_gym")[0]["responses_create_params"]["tools"]
    log = [
        {"uid": 1, "token_ids": [1, 2]},
        {"uid": 2, "token_ids": [1, 2], "tools": [{"type": "function", "function": {"name": "own"}}]},
    ]
    path = written(tmp_path / "log.jsonl", log)

    def names(tools: Path) -> list[list[str]]:
        rollouts = read_rollouts(path, Settings(tools=str(tools)))
        return [[tool["function"]["name"] for tool in rollout.tools] for rollout in rollouts]

    (tmp_path / "list.json").write_text(json.dumps(flat))
    (tmp_path / "object.json").write_text(json.dumps({"tools": flat}, indent=1))
    assert names(tmp_path / "list.json") == names(tmp_path / "object.json") == [["weather"], ["own"]]
    assert names(written(tmp_path / "lines.jsonl", flat)) == [["weather"], ["own"]]
    for uids, first in ((("1", 2), ["weather"]), ((2, 3), [])):
        rows = written(tmp_path / "rows.jsonl", [{"uid": uid, "tools": flat} for uid in uids])
        assert names(rows) == [first, ["own"]]
    _, notices = findings_of(path, tools=str(tmp_path / "rows.jsonl"))
    words = ("0 of 2 rollouts found their tools", "1 with tools of their own")
    assert any(all(word in notice for word in words) for notice in notices)
    for bad in ("[]", '{"rows": 1}', "[1]"):
        (tmp_path / "bad.json").write_text(bad)
        with pytest.raises(SetupError, match=r"Settings\(tools=.*bad\.json"):
            names(tmp_path / "bad.json")


# Repair and the command line


def test_a_repair_is_helped_by_messages_and_writes_only_the_log_s_own_columns(tmp_path: Path) -> None:
    log, messages, tools = miles(tmp_path)
    settings = Settings(tokenizer=TOY, messages=str(messages), tools=str(tools))
    out = tmp_path / "out.parquet"
    repair = repair_rollouts(log, out, settings, RepairSettings(provenance=False))
    assert [dict(outcome.cured) for outcome in repair if outcome.repaired] == [{"realign": ("MSK401", "MSK402")}]
    assert pq.read_schema(out) == pq.read_schema(log)
    before, after = pq.read_table(log).to_pylist(), pq.read_table(out).to_pylist()
    assert after[3]["loss_mask"] == before[0]["loss_mask"]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, True, False, True]


@pytest.mark.parametrize("packed", [False, True])
def test_a_capture_is_written_line_by_line_where_lines_were(packed: bool, tmp_path: Path) -> None:
    whole, lines, log, out, settings = logged(tmp_path, 2)
    name = next(row["_ng_rollout_id"] for row in whole if row["id"] == "prefix-broken-by-stripped-reasoning")
    if packed:
        (tmp_path / "a.tokens.jsonl.gz").write_bytes(gzip.compress(log.read_bytes()))
        log, out = tmp_path / "a.tokens.jsonl.gz", tmp_path / "out.jsonl.gz"
    repair = repair_rollouts(log, out, settings, RepairSettings(strategies=("splice",), unsafe=True))
    assert len(list(repair)) == len(whole)
    text = gzip.decompress(out.read_bytes()) if packed else out.read_bytes()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["model_call_id"] for row in rows] == [line["model_call_id"] for line in lines]
    changed = [row for row, line in zip(rows, lines, strict=True) if row != line]
    assert changed
    assert name in {row["rollout_id"] for row in changed}
    for row in changed:
        assert row.keys() == {*lines[0].keys(), "tito_audit"}
        assert row["tito_audit"]["cured"].keys() == {"splice"}
    assert repair.after.findings.keys() < repair.before.findings.keys()
    assert {"SEQ302"} <= repair.before.findings.keys() - repair.after.findings.keys()


def test_a_capture_that_no_repair_changes_is_the_same_file(tmp_path: Path) -> None:
    _, _, log, out, settings = logged(tmp_path, 3)
    for outcome in repair_rollouts(log, out, settings):
        assert outcome.rows == 1, "a fork has no place in a capture"
    assert out.read_bytes() == log.read_bytes()
    copy = tmp_path / "copy.jsonl"
    assert write_rollouts(log, list(read_rollouts(log, settings)), copy, settings) == 0
    assert copy.read_bytes() == log.read_bytes()


def test_rollouts_that_are_left_out_of_a_capture_go_to_the_quarantine_line_by_line(tmp_path: Path) -> None:
    whole, lines, log, out, settings = logged(tmp_path, 1)
    bad = tmp_path / "bad.jsonl"
    gone = [o for o in repair_rollouts(log, out, settings, RepairSettings(quarantine=str(bad))) if o.quarantined]
    assert gone
    saved, quarantined = ([json.loads(line) for line in path.read_text().splitlines()] for path in (out, bad))
    assert sorted(row["model_call_id"] + row["rollout_id"] for row in [*saved, *quarantined]) == sorted(
        line["model_call_id"] + line["rollout_id"] for line in lines
    )
    assert {row["rollout_id"] for row in saved}.isdisjoint({row["rollout_id"] for row in quarantined})
    assert len({row["rollout_id"] for row in quarantined}) == len(gone) < len(whole)


def test_a_line_of_a_capture_that_cannot_be_read_is_a_finding_and_stays(tmp_path: Path) -> None:
    _, _, log, out, settings = logged(tmp_path)
    first, _, rest = log.read_text(encoding="utf-8").partition("\n")
    broken = f'{first}\n\n{{"rollout_id": \n{rest}'
    log.write_text(broken, encoding="utf-8")
    results = list(scan_rollouts(log, settings))
    assert [result.place.row for result in results if result.rollout is None and not result.of_log] == [2]
    list(repair_rollouts(log, out, settings))
    assert out.read_text(encoding="utf-8") == broken


def test_one_line_of_a_capture_shows_its_whole_rollout(tmp_path: Path) -> None:
    whole, lines, log, _, settings = logged(tmp_path)
    name = next(row["_ng_rollout_id"] for row in whole if row["id"] == "clean")
    rows = [number for number, line in enumerate(lines) if line["rollout_id"] == name]
    for row in rows:
        code, page, _ = run("show", log, "--row", row, "-t", TOY, "--messages", settings.messages)
        assert code == 0
        assert f"a.tokens.jsonl:{rows[0]}" in page.replace("\n", "")
        assert "turn 2 completion" in page
        assert "joined on rollout_id = _ng_rollout_id: 1 of 1" in page
