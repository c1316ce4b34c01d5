"""Whole logs of each format: scanned, repaired, and what the frameworks themselves write and read again."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests import toy
from tests.command import run
from tests.format_cases import fixture_of, fixture_rows, label_of
from tests.forms import PLACE, ids_of_turns, spliced
from tests.frameworks.ask import asked, expected_in, written
from tests.test_formats import fixture_file
from tests.tiers import some
from tests.world import FORMATS, ROOT, TOY, json_lines
from tito_audit import read_rollouts, repair_rollouts, scan_rollouts, write_rollouts
from tito_audit.formats import format_named, pick_format
from tito_audit.record.edits import edits_between
from tito_audit.record.message import as_messages
from tito_audit.record.rollout import Rollout
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage import open_log

FOUND = json.loads((ROOT / "tests" / "data" / "format_scans.json").read_text(encoding="utf-8"))
"""By format and row of its fixture, the codes of its findings; other rows have none."""
SETTINGS = Settings(tokenizer=str(TOY))
SPLICE = RepairSettings(strategies=("splice",), unsafe=True, provenance=False)


def rollouts_of(name: str, row: Mapping[str, Any]) -> list[Rollout]:
    """The rollouts of a row of this format."""
    assert pick_format(row).name == name
    return list(format_named(name).read(row, PLACE))


def only_rollout(name: str, row: Mapping[str, Any]) -> Rollout:
    (rollout,) = rollouts_of(name, row)
    return rollout


def rows_in(log: Path) -> list[dict[str, Any]]:
    return [dict(raw.value or {}) for raw in open_log(log)]


def calls_of(rollout: Rollout) -> list[list[Any]]:
    return [list(call) for call in ids_of_turns(rollout)]


def cured(log: Path, out: Path, how: RepairSettings = SPLICE) -> set[str]:
    """The codes that a repair cured in a log."""
    outcomes = list(repair_rollouts(log, out, SETTINGS, how))
    return {code for outcome in outcomes for codes in outcome.cured.values() for code in codes}


def loud_in(log: Path) -> list[set[str]]:
    """The codes of each rollout that are no notes."""
    results = scan_rollouts(log, SETTINGS)
    return [{finding.code for finding in result.findings if finding.severity > 0} for result in results]


# Steps that hold what they add to the step before


def whole_prompts(steps: list[dict[str, Any]]) -> list[list[int]]:
    """The prompts of a trajectory in the Token DB, as tinker-cookbook's `reconstruct_full_ob` restores them."""
    prompts: list[list[int]] = []
    seen: list[int] = []
    for step in steps:
        prompts.append((seen if step["ob_is_delta"] else []) + step["ob_tokens"])
        seen = prompts[-1] + step["ac_tokens"]
    return prompts


@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "backwards"])
def test_what_a_step_adds_to_the_one_before_is_a_whole_prompt_and_is_written_as_it_was(
    reverse: bool, tmp_path: Path
) -> None:
    table = pq.read_table(fixture_file("tinker_tokendb"))
    if reverse:
        table = table.take(list(reversed(range(table.num_rows))))
    log, out = tmp_path / "segment.parquet", tmp_path / "cured.parquet"
    pq.write_table(table, log)
    old = table.to_pylist()
    for rollout in read_rollouts(log):
        if len(rollout.turns) != 3:
            continue
        steps = [row for row in old if row["group_idx"] == int(str(rollout.stated.group)[-1])]
        steps = sorted((row for row in steps if row["source"] == "rollout"), key=lambda row: row["step_idx"])
        assert sorted(call[0] for call in calls_of(rollout)) == sorted(whole_prompts(steps))
    assert cured(log, out) == {"SEQ301", "TOK101"}
    new = pq.read_table(out).to_pylist()
    changed = [number for number, row in enumerate(new) if row != old[number]]
    assert [(new[at]["group_idx"], new[at]["step_idx"]) for at in changed] == [(1, 1)], "only the departure"
    steps = sorted((row for row in new if row["group_idx"] == 1), key=lambda row: row["step_idx"])
    prompts = whole_prompts(steps)
    for step, prompt, later in zip(steps, prompts, prompts[1:], strict=False):
        assert later[: len(prompt) + len(step["ac_tokens"])] == prompt + step["ac_tokens"]
    assert {code for result in scan_rollouts(out, SETTINGS) for code in (f.code for f in result.findings)} <= {
        "TOK101"
    }


def test_a_step_whose_changed_prompt_no_longer_continues_the_one_before_is_written_whole(tmp_path: Path) -> None:
    log, out = fixture_file("tinker_tokendb"), tmp_path / "again.parquet"

    def touched(rollout: Rollout) -> Rollout:
        if len(rollout.turns) < 3:
            return rollout
        first, second, third = rollout.turns
        return replace(rollout, turns=(first, replace(second, prompt_ids=second.prompt_ids[1:]), third))

    write_rollouts(log, map(touched, read_rollouts(log)), out)
    old, new = (pq.read_table(path).to_pylist() for path in (log, out))
    assert [row["ob_is_delta"] for row in new[:3]] == [False, False, False]
    assert whole_prompts(new[:3]) == [prompt[n == 1 :] for n, prompt in enumerate(whole_prompts(old[:3]))]
    assert new[6:] == old[6:]


# Scans


@pytest.mark.parametrize("name", FOUND)
def test_a_scan_finds_what_is_wrong_in_a_fixture_and_nothing_else(name: str) -> None:
    codes_of_rows: dict[str, set[str]] = {}
    for result in scan_rollouts(fixture_file(name), SETTINGS):
        label = str(label_of(name, result.place.row))
        codes_of_rows.setdefault(label, set()).update(finding.code for finding in result.findings)
    assert {label: sorted(codes) for label, codes in codes_of_rows.items() if codes} == FOUND[name]


@pytest.mark.parametrize(("name", "code"), [("logprobs", "LPR501"), ("mask", "REC002")])
def test_a_shifted_column_is_counted_against_the_tokens_that_it_describes(
    name: str, code: str, tmp_path: Path
) -> None:
    inputs = {"target_tokens": [20, 30, 2], "mask": [0.0, 1.0, 1.0], "logprobs": [0.0, -0.2, -0.5]}
    row = {"model_input": {"chunks": [{"tokens": [1, 20, 30]}]}, "loss_fn_inputs": inputs}
    inputs[name] = [*inputs[name], 0.0]
    (tmp_path / "log.jsonl").write_text(json.dumps(row))
    (result,) = scan_rollouts(tmp_path / "log.jsonl")
    (finding,) = [finding for finding in result.findings if finding.code == code]
    assert f"`{name}` has 4 entries for 3 target tokens" in finding.hit.message


@pytest.mark.parametrize("sent", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["responses", "chat"])
@pytest.mark.parametrize("strict", [False, True, None])
def test_a_prompt_holds_the_tools_with_their_strict_or_without(
    strict: bool | None, wrapped: bool, sent: bool, tmp_path: Path
) -> None:
    """The converter of Responses tools has kept `strict` inside `function`, and dropped it."""
    function = {"name": "weather", "description": "Look it up", "parameters": {"type": "object"}}
    tool = {"type": "function", "function": {**function, "strict": strict}}
    logged = tool if wrapped else {"type": "function", **function, "strict": strict}
    messages = as_messages([{"role": "user", "content": "Go"}], "messages")
    tools = [tool if sent else {"type": "function", "function": function}]
    text = toy.toy_renderer().render(messages, tools, add_generation_prompt=True)
    encode = toy.toy_tokenizer().encode
    answer = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Done", "annotations": []}],
        "prompt_token_ids": encode(text).tolist(),
        "generation_token_ids": encode("Done<|im_end|>").tolist(),
    }
    answer["generation_log_probs"] = [-0.5] * len(answer["generation_token_ids"])
    row = {
        "responses_create_params": {"input": [{"role": "user", "content": "Go"}], "tools": [logged]},
        "response": {"output": [answer]},
        "reward": 1.0,
    }
    log = tmp_path / "log.jsonl"
    log.write_bytes(json_lines([row]))
    code, out, _ = run("scan", log, "-t", toy.TOKENIZERS / "toy_bpe", "--no-config", "--report", "jsonl")
    findings = [line for line in map(json.loads, out.splitlines()) if "severity" in line]
    assert code == 0
    assert [finding["message"] for finding in findings if finding["code"].startswith("TPL")] == []


def scanned(log: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The report of a scan of these rows as an object."""
    log.write_bytes(json_lines(rows))
    report: dict[str, Any] = json.loads(run("scan", log, "-t", TOY, "--report", "json")[1])
    return report


def test_calls_of_a_thread_are_one_rollout_and_every_other_answer_its_own(tmp_path: Path) -> None:
    rows = [row for row in fixture_rows("gateway") if row["status"] != "dummy"]
    end = {"tito_audit_gateway": 1, "session_id": "s1", "closed": 1795317999.0, "reward": 1.0}
    report = scanned(tmp_path / "log.jsonl", [*rows, end])
    assert report["summary"]["rollouts"] == len({row["thread_id"] for row in rows})
    assert report["summary"]["turns"] == len(rows)
    assert not [finding for finding in report["findings"] if finding["severity"] == "error"]


def test_without_its_thread_a_fork_would_be_a_prefix_break(tmp_path: Path) -> None:
    pair = [fixture_of("gateway", label) for label in ("reasoning", "reasoning-stripped")]
    apart = scanned(tmp_path / "log.jsonl", pair)["findings"]
    assert not {finding["code"] for finding in apart} & {"SEQ301"}
    joined = scanned(tmp_path / "joined.jsonl", [{**row, "thread_id": "one"} for row in pair])["findings"]
    assert any(finding["code"].startswith("SEQ") for finding in joined)


@pytest.mark.shared
def test_the_recorded_round_trip_says_the_same_in_both_forms() -> None:
    file = ROOT.parent / "shared" / "recorded" / "nemo-gym-round-trip.json"
    if not file.exists():
        pytest.skip("the recorded data are not beside the checkout")
    recorded = json.loads(file.read_text())
    chat = recorded["expected_output_return_token_id_information"]
    items = only_rollout(
        "nemo_gym",
        {"responses_create_params": {"input": chat["messages"][:2]}, "response": recorded["input"]},
    )
    spoken = only_rollout("nemo_gym", chat)
    assert not format_named("nemo_gym").matches(recorded["expected_output"])
    assert [m.role for m in items.messages] == [m.role for m in spoken.messages]
    assert [m.tool_calls for m in items.messages] == [m.tool_calls for m in spoken.messages]
    for left, right in zip(items.turns, spoken.turns, strict=True):
        assert left.message_index == right.message_index
        np.testing.assert_array_equal(left.seen_ids, right.seen_ids)
        np.testing.assert_array_equal(left.completion_logprobs, right.completion_logprobs)
    assert [len(turn.completion_ids) for turn in spoken.turns if turn.completion_ids is not None] == [
        495,
        207,
    ]


# Repairs


@pytest.mark.parametrize("name", ["atif", "harbor", "rllm_episode"])
def test_a_document_in_which_nothing_changed_has_the_same_bytes(name: str, tmp_path: Path) -> None:
    log, out = fixture_file(name), tmp_path / "out.json"
    assert write_rollouts(log, read_rollouts(log), out) == 0
    assert out.read_bytes() == log.read_bytes()


@pytest.mark.parametrize("name", ["atif", "harbor", "rllm_episode"])
def test_a_repaired_prompt_changes_its_own_lines_only(name: str, tmp_path: Path) -> None:
    log, out = fixture_file(name), tmp_path / "out.json"
    assert cured(log, out) == {"SEQ301", "TOK101"}
    before, after = log.read_text().splitlines(), out.read_text().splitlines()
    # rLLM writes each number on a line of its own, and one token became two.
    assert len(after) == len(before) + (name == "rllm_episode")
    gone = [line for line in difflib.unified_diff(before, after, n=0) if line.startswith("-")]
    # The header, the ids, and the counts of a call and of all calls.
    assert len(gone) == 1 + {"atif": 3, "harbor": 2, "rllm_episode": 1}[name]
    rows = rows_in(out)
    edits = [list(edits_between(a, b)) for a, b in zip(fixture_rows(name), rows, strict=True)]
    assert sum(map(bool, edits)) == 1


def test_what_a_repair_says_of_itself_is_where_the_models_of_atif_allow_it(tmp_path: Path) -> None:
    log, out = tmp_path / "log.json", tmp_path / "out.json"
    row = fixture_of("atif", "prefix-broken-by-retokenization")
    log.write_text(json.dumps({**row, "extra": {"mine": 1}}, indent=2))
    assert cured(log, out, replace(SPLICE, provenance=True))
    (raw,) = open_log(out)
    assert list(raw.value) == [*row, "extra"]
    assert raw.value["extra"]["mine"] == 1
    assert raw.value["extra"]["tito_audit"]["cured"] == {"splice": ["SEQ301", "TOK101"]}


def test_a_table_of_version_2_is_written_again_with_its_schema_and_its_other_columns(tmp_path: Path) -> None:
    source, out = fixture_file("art_parquet"), tmp_path / "out.parquet"
    assert cured(source, out) == {"SEQ301", "TOK101"}
    old, new = pq.read_table(source), pq.read_table(out)
    assert new.schema.metadata == old.schema.metadata == {b"art.trajectory_parquet.version": b"2"}
    assert [new.schema.field(name) for name in old.column_names] == list(old.schema)
    others = [name for name in old.column_names if name != "trajectory_json"]
    assert new.select(others).equals(old.select(others))
    columns = (table["trajectory_json"].to_pylist() for table in (old, new))
    ((was, now),) = [pair for pair in zip(*columns, strict=True) if len(set(pair)) == 2]
    assert json.dumps(json.loads(now), ensure_ascii=False, separators=(",", ":")) == now
    assert len(now) > len(was)


def test_a_repair_keeps_the_types_and_row_groups_of_the_columns(tmp_path: Path):
    source, out = FORMATS / "miles_columns.parquet", tmp_path / "new.parquet"
    terms = RepairSettings(strategies=("realign",), provenance=False)
    outcomes = list(repair_rollouts(source, out, SETTINGS, terms))
    assert [outcome.place.row for outcome in outcomes if outcome.cured] == [3]
    before, after = pq.read_table(source), pq.read_table(out)
    assert after.schema.equals(before.schema)
    assert pq.ParquetFile(out).num_row_groups == pq.ParquetFile(source).num_row_groups
    masks = after["loss_mask"].to_pylist()
    assert masks[3] == masks[0]
    assert [row for row in range(5) if not after.slice(row, 1).equals(before.slice(row, 1))] == [3]


def test_columns_are_written_in_their_types_with_a_mask_in_the_place_of_null(tmp_path: Path):
    source, out = FORMATS / "miles_columns.parquet", tmp_path / "new.parquet"
    rollouts = list(read_rollouts(source))
    changed = []
    for rollout in rollouts[:3]:
        row = rollout.training_row
        end = len(row.token_ids)
        changed.append(replace(rollout, training_row=spliced(row, end - 1, end, [7, 8])))
    assert write_rollouts(source, [*changed, *rollouts[3:]], out) == 3
    before, after = pq.read_table(source), pq.read_table(out)
    assert after.schema.equals(before.schema)
    assert after.slice(3).equals(before.slice(3))
    assert pq.ParquetFile(out).num_row_groups == pq.ParquetFile(source).num_row_groups
    for old, new in zip(before.to_pylist()[:3], after.to_pylist()[:3], strict=True):
        assert new["total_length"] == old["total_length"] + 1 == len(new["tokens"])
        assert new["response_length"] == old["response_length"] + 1 == len(new["loss_mask"])
        assert new["loss_mask"][-2:] == [0, 0]
        assert new["rollout_log_probs"][-2:] == [0.0, 0.0]


def test_a_repair_of_sessions_leaves_fewer_findings_and_no_new_ones(tmp_path: Path):
    out = tmp_path / "new.jsonl"
    outcomes = list(repair_rollouts(FORMATS / "miles_session.jsonl", out, SETTINGS, RepairSettings()))
    assert any("SEQ301" in codes for outcome in outcomes for codes in outcome.cured.values())
    codes = {finding.code for result in scan_rollouts(out, SETTINGS) for finding in result.findings}
    assert codes <= {"TOK101", "REC006", "REC008"}


# What the frameworks write and read


def test_what_the_models_of_atif_write_is_read(tmp_path: Path) -> None:
    folder = written("atif", tmp_path)
    for name, of in expected_in(folder).items():
        (row,) = rows_in(folder / f"{name}.json")
        rollouts = rollouts_of("atif", row)
        assert [calls_of(rollout) for rollout in rollouts] == of
        assert all(rollout.messages and rollout.stated.model == "org/toy" for rollout in rollouts)


def test_the_models_of_atif_read_what_was_repaired(tmp_path: Path) -> None:
    written("atif", tmp_path)
    assert cured(tmp_path / "broken.json", tmp_path / "again.json") == {"SEQ301", "TOK101"}
    expected = expected_in(tmp_path)["broken"][0]
    (again,) = json.loads(asked("atif", "--read", tmp_path / "again.json"))
    assert [completion for _, completion in again] == [completion for _, completion in expected]
    assert again[2][0][: len(again[1][0]) + len(again[1][1])] == again[1][0] + again[1][1]


def test_what_tinker_cookbook_makes_is_read(tmp_path: Path) -> None:
    folder = written("tinker", tmp_path)
    expected = expected_in(folder)
    # The broken conversation is several datums.
    assert len(expected) == 3
    for datum, facts in zip(rows_in(folder / "datums.jsonl"), expected, strict=True):
        row = only_rollout("tinker", datum).training_row
        assert row.token_ids.tolist() == facts["ids"]
        assert row.loss_mask[1:].tolist() == [value == 1.0 for value in facts["mask"]]
        assert row.logprobs[1:].tolist() == facts["logprobs"]


def test_the_sdk_of_tinker_reads_what_was_written_again(tmp_path: Path) -> None:
    written("tinker", tmp_path)
    log, out = tmp_path / "datums.jsonl", tmp_path / "again.jsonl"

    def touched(rollout: Rollout) -> Rollout:
        assert rollout.training_row is not None
        return replace(rollout, training_row=spliced(rollout.training_row, 40, 41, [7001, 7001]))

    assert write_rollouts(log, map(touched, read_rollouts(log)), out) == 3
    before = expected_in(tmp_path)
    for old, new in zip(before, json.loads(asked("tinker", "--read", out)), strict=True):
        assert new["ids"] == [*old["ids"][:40], 7001, 7001, *old["ids"][41:]]
        assert new["mask"][40:] == [0.0, *old["mask"][40:]]


def test_what_art_writes_is_read_and_what_is_written_again_art_reads(tmp_path: Path) -> None:
    folder = written("art", tmp_path / "art")
    log = folder / "group.jsonl"
    expected = expected_in(folder)
    for row, histories in zip(rows_in(log), expected, strict=True):
        assert [calls_of(rollout) for rollout in rollouts_of("art_group", row)] == [
            [] if calls[0][0] is None else calls for calls in histories
        ]
    assert cured(log, tmp_path / "again.jsonl") == {"SEQ301", "TOK101"}
    again = json.loads(asked("art", "--read", tmp_path / "again.jsonl"))
    # ART reads no further histories back; the broken one is the last of its group.
    assert again[1][0] == expected[1][0]
    calls = again[1][-1]
    assert calls[2][0][: len(calls[1][0]) + len(calls[1][1])] == calls[1][0] + calls[1][1]
    assert [completion for _, completion in calls] == [completion for _, completion in expected[1][-1]]
    for row in rows_in(folder / "v1.parquet"):
        rollout = only_rollout("art_parquet", row)
        assert (rollout.turns, rollout.stated.ids_wanted) == ((), False)


def test_what_agent_lightning_writes_is_read_and_its_spans_stay_spans(tmp_path: Path) -> None:
    folder = written("agent_lightning", tmp_path / "spans")
    expected = expected_in(folder)
    for name, scored in (("spans", True), ("proxy", False), ("triplets", True), ("proxied", False)):
        for row, (prompt, completion, logprobs) in zip(rows_in(folder / f"{name}.jsonl"), expected, strict=True):
            rollout = only_rollout("agent_lightning_span", row)
            assert ids_of_turns(rollout) == [(prompt, completion)]
            values = rollout.turns[0].completion_logprobs
            assert (None if values is None else values.tolist()) == (logprobs if scored else None)
    rollout = only_rollout("agent_lightning_span", rows_in(folder / "spans.jsonl")[-1])
    assert [message.role for message in rollout.messages] == [
        *("system", "user", "assistant", "tool", "assistant", "user", "assistant")
    ]
    again = tmp_path / "again.jsonl"
    again.write_bytes(json_lines(rows_in(folder / "spans.jsonl")))
    assert json.loads(asked("agent_lightning", "--triplets", again)) == [call[:2] for call in expected]


def assert_as_trained(rollout: Rollout, branches: list[dict[str, Any]]) -> None:
    """The turns of a rollout are the sampled stretches of the framework's own training samples."""
    stretches = set()
    for branch in branches:
        ids, mask = branch["token_ids"], np.array([False, *branch["mask"], False])
        starts, ends = np.flatnonzero(mask[1:] > mask[:-1]), np.flatnonzero(mask[1:] < mask[:-1])
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            logprobs = [round(value, 4) for value in branch["logprobs"][start:end]]
            stretches.add((tuple(ids[:start]), tuple(ids[start:end]), tuple(logprobs)))
    turns = set()
    for turn in rollout.turns:
        assert turn.completion_logprobs is not None
        logprobs = np.round(turn.completion_logprobs, 4).tolist()
        turns.add((tuple(turn.prompt_ids.tolist()), tuple(turn.completion_ids.tolist()), tuple(logprobs)))
    assert turns == stretches
    assert len(turns) == len(rollout.turns)


@pytest.mark.parametrize("python", some(["verifiers", "verifiers_0_3"], 1))
def test_what_verifiers_writes_is_read_as_it_trains_it(python: str, tmp_path: Path) -> None:
    folder = written(python, tmp_path / "logs")
    expected = expected_in(folder / "v1")
    names = [
        name for name in ("traces.jsonl", "trace.jsonl", "uploaded.parquet") if (folder / "v1" / name).exists()
    ]
    assert names[:2] == ["traces.jsonl", "trace.jsonl"]
    for name in names:
        rows = rows_in(folder / "v1" / name)
        for row, (identifier, branches) in zip(rows, expected.items(), strict=True):
            rollout = only_rollout("verifiers_v1", copy.deepcopy(row))
            assert rollout.stated.facts["id"] == identifier
            assert rollout.stated.model == "org/model"
            if identifier == "text-only":
                assert rollout.stated.ids_wanted is False
                assert [message.role for message in rollout.messages] == branches[0]["roles"]
                continue
            assert_as_trained(rollout, branches)
            assert all(turn.finish_reason in ("stop", "tool_calls") for turn in rollout.turns)
            if name != "trace.jsonl":
                assert {turn.weight_versions for turn in rollout.turns} == {("3",)}
    assert loud_in(folder / "v1" / "traces.jsonl") == [set()] * 3 + [{"SEQ301", "TOK101"}] + [set()] * 2


def test_what_is_written_again_verifiers_reads(tmp_path: Path) -> None:
    folder = written("verifiers", tmp_path / "logs")
    log, out = folder / "v1" / "traces.jsonl", tmp_path / "again.jsonl"
    cured(log, out)
    before, after = map(json.loads, asked("verifiers", "--branches", log, out).splitlines())
    broken = "prefix-broken-by-retokenization"
    assert {name: branches for name, branches in after.items() if name != broken} == {
        name: branches for name, branches in before.items() if name != broken
    }
    first, spliced = after[broken]
    assert first == before[broken][0]
    assert spliced["token_ids"][: len(first["token_ids"])] == first["token_ids"]
    assert len(spliced["mask"]) == len(spliced["token_ids"])
    sampled = [token for token, own in zip(spliced["token_ids"], spliced["mask"], strict=True) if own]
    old = before[broken][1]
    assert sampled == [token for token, own in zip(old["token_ids"], old["mask"], strict=True) if own]
    ((was, now),) = [(a, b) for a, b in zip(rows_in(log), rows_in(out), strict=True) if a != b]
    assert now["num_input_tokens"] == was["num_input_tokens"] + 1
    assert now["num_output_tokens"] == was["num_output_tokens"]


def test_results_that_verifiers_saved_are_read(tmp_path: Path) -> None:
    folder = written("verifiers_0_3", tmp_path / "logs")
    expected = expected_in(folder / "v1")
    rows = rows_in(folder / "old" / "results.jsonl")
    for row, branches in zip(rows, list(expected.values())[:5], strict=True):
        rollout = only_rollout("verifiers_results", row)
        wanted = {tuple(branch["token_ids"]) for branch in branches}
        assert wanted <= {tuple(turn.seen_ids.tolist()) for turn in rollout.turns if turn.seen_ids is not None}
        assert len(rollout.turns) == len(row["trajectory"])
    assert loud_in(folder / "old" / "results.jsonl") == [set()] * 3 + [{"SEQ301", "TOK101"}] + [set()]
