"""Levels of records: what each fixture holds, what each format can hold, and what a mutant lacks."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.command import run, written
from tests.format_cases import fixture_of, fixture_rows, label_of
from tests.tables import table
from tests.world import FORMATS, ROOT
from tito_audit import CallRecord, RolloutRecord, Settings, record_digest, scan_rollouts, validate_rollouts
from tito_audit.errors import RecordError, SetupError
from tito_audit.formats import all_formats, format_named, pick_format
from tito_audit.levels.facts import (
    RecordLevel,
    all_facts,
    is_mixture_of_experts,
    level_of_format,
    level_of_mask,
    record_mask,
)
from tito_audit.levels.tally import LogRecord
from tito_audit.record.rollout import Place
from tito_audit.summary import RecordCounts, count_record

Json = dict[str, Any]

NAMES = sorted(form.name for form in all_formats())
TABLE = ROOT / "tests" / "data" / "levels.json"
LIFTS: Json = tomllib.loads((ROOT / "tests" / "data" / "levels.toml").read_text(encoding="utf-8"))
DIGEST = "0" * 64
SCHEMAS = ROOT / "tito_audit" / "schemas"


def lacking(row: Json, name: str = "") -> list[int]:
    """The mask of each rollout of a row."""
    form = pick_format(row)
    assert form.name == name or not name, f"read as {form.name}"
    records = [record_mask(rollout, [row]) for rollout in form.read(row, Place("log.jsonl", 0))]
    return [record for record in records if record is not None]


def names_of(record: int) -> list[str]:
    return [name for name, fact in all_facts().items() if fact.bit & record]


def sentences(row: Json) -> list[str]:
    """`L2 weights sampling` of each rollout of a row: its level, and what lacks for the next."""
    try:
        records = lacking(row)
    except RecordError:
        return ["unreadable"]
    words = []
    for record in records:
        level = level_of_mask(record)
        names = [name for name in names_of(record) if all_facts()[name].level == level + 1]
        words.append(" ".join([level.name, *names]))
    return words


def log_of(*rows: Json, name: str = "log.jsonl") -> LogRecord:
    counts: RecordCounts = {}
    for number, row in enumerate(rows):
        for record in lacking(row):
            count_record(counts, Place(name, number), pick_format(row).name, record)
    return LogRecord.of(name, counts)


def test_each_row_of_each_fixture_has_its_level() -> None:
    levels = {
        name: {
            str(label_of(name, number)): " | ".join(sentences(row))
            for number, row in enumerate(fixture_rows(name))
        }
        for name in NAMES
    }
    text = json.dumps(levels, indent=1, ensure_ascii=False) + "\n"
    if os.environ.get("UPDATE_GOLDENS"):
        TABLE.write_text(text, encoding="utf-8")
    assert json.loads(TABLE.read_text(encoding="utf-8")) == levels, "UPDATE_GOLDENS=1 pytest tests/test_levels.py"


@pytest.mark.parametrize("name", NAMES)
def test_the_level_of_a_fixture_is_that_which_all_its_rows_have(name: str) -> None:
    (file,) = (path for path in FORMATS.glob(f"{name}.*") if path.suffix != ".py")
    rows = json.loads(TABLE.read_text(encoding="utf-8"))[name].values()
    levels = [word.split(" ")[0] for words in rows if words for word in words.split(" | ")]
    code, out, _ = run("validate", file, "--no-join", "-f", "json")
    (log,) = json.loads(out)["logs"]
    lowest = min(("NONE" if level == "unreadable" else level) for level in levels)
    lowest = "NONE" if "NONE" in levels or "unreadable" in levels else lowest
    assert (code, log["level"] or "NONE") == (0, lowest)
    assert log["rollouts"] == len(levels)
    assert log["levels"] == {
        level.lower() if level == "NONE" else level: number
        for level in ("NONE", "L0", "L1", "L2", "L3", "L4")
        if (number := sum(each == level or (each == "unreadable" and level == "NONE") for each in levels))
    }


# What a format can hold


def with_value(holder: Any, path: str, value: Any) -> Any:
    """A row with a value at a path; `calls[]` is each entry of a list, `steps[metrics]` each that has the key."""
    if not path:
        return value
    if isinstance(holder, str):  # an object that a table holds as text
        return json.dumps(with_value(json.loads(holder), path, value))
    key, _, rest = ("", "", "") if path in (holder or {}) else path.partition(".")
    if path.startswith("gen_ai.") or not key:
        return {**holder, path: value}
    if "[" in key:
        key, _, wanted = key.rstrip("]").partition("[")
        entries = [with_value(each, rest, value) if not wanted or wanted in each else each for each in holder[key]]
        return {**holder, key: entries}
    inner = (holder or {}).get(key)
    if rest:
        return {**holder, key: with_value({} if inner is None else inner, rest, value)}
    return {**holder, key: with_merged(inner, value)}


def with_merged(inner: Any, value: Any) -> Any:
    """A value in place of another; keys of an object are added to it."""
    if not isinstance(value, dict):
        return value
    if isinstance(inner, str):
        return json.dumps({**json.loads(inner), **value})
    return {**(inner or {}), **value}


def lifted(name: str) -> Json:
    """A row of a format with all that it has a place for."""
    lift = LIFTS.get(name)
    if lift is None:
        rows = [row for row in fixture_rows(name) if (sentences(row) or ["unreadable"])[0] != "unreadable"]
        return max(rows, key=lambda row: min(map(level_of_mask, lacking(row))))
    text = json.dumps(fixture_of(name, lift["row"]), default=lambda value: np.asarray(value).tolist())
    row = json.loads(text)
    for path, value in lift["add"].items():
        row = with_value(row, path, json.loads(json.dumps(value).replace('"D"', f'"{DIGEST}"')))
    return dict(row)


@pytest.mark.parametrize("name", NAMES)
def test_a_format_can_hold_the_level_that_it_is_listed_with(name: str) -> None:
    holds = level_of_format(name).holds
    levels = {level_of_mask(record) for record in lacking(lifted(name), name)}
    assert levels == {holds}, names_of(lacking(lifted(name))[0])
    for row in fixture_rows(name):
        for words in sentences(row):
            assert words == "unreadable" or RecordLevel[words.split(" ")[0]] <= holds


def test_every_format_is_listed_with_a_level_and_lines_for_facts_that_exist() -> None:
    data = tomllib.loads((ROOT / "tito_audit" / "levels" / "levels.toml").read_text(encoding="utf-8"))
    assert sorted(data["formats"]) == NAMES
    for name, entry in data["formats"].items():
        assert entry.get("lines", {}).keys() <= data["facts"].keys(), name
        for line in entry.get("lines", {}).values():
            assert line[0].islower(), "an imperative that goes on a sentence"
            assert not line.endswith("."), "an imperative that goes on a sentence"
            assert line.count("`") % 2 == 0


# Mutants: without one key, a record drops to the right level


def keys_of(value: Any) -> Iterator[str]:
    """Every key of a row and of the objects in it."""
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys_of(inner)


def without(value: Any, key: str, *, null: bool = False) -> Any:
    """A row without a key, wherever it stands; or with null there."""
    if isinstance(value, dict):
        rest = {name: without(inner, key, null=null) for name, inner in value.items() if name != key}
        return {name: rest.get(name) for name in value} if null else rest
    if isinstance(value, str) and value.startswith("{") and f'"{key}"' in value:
        return json.dumps(without(json.loads(value), key, null=null))
    return [without(inner, key, null=null) for inner in value] if isinstance(value, list) else value


def mutants(name: str) -> Iterator[tuple[str, Json, int]]:
    """Rows without one key that are still read as their format, and their masks."""
    row = lifted(name)
    inside = [json.loads(value) for value in row.values() if isinstance(value, str) and value.startswith("{")]
    for key, null in product(dict.fromkeys(keys_of([row, *inside])), (False, True)):
        mutant = without(row, key, null=null)
        try:
            if pick_format(mutant).name != name:
                continue
            for record in lacking(mutant)[:1]:
                yield key, mutant, record
        except RecordError:
            continue


@pytest.mark.parametrize("name", NAMES)
def test_a_record_without_one_field_drops_to_the_right_level_with_the_right_sentence(name: str) -> None:
    whole = lacking(lifted(name))[0]
    holds, dropped = level_of_mask(whole), set[str]()
    for key, mutant, record in mutants(name):
        gone = [all_facts()[fact] for fact in names_of(record & ~whole)]
        level = level_of_mask(record)
        assert level == min([holds, *(RecordLevel(fact.level - 1) for fact in gone)]), key
        dropped.update(fact.name for fact in gone)
        log = log_of(mutant)
        for fact in gone:
            if fact.level == level + 1:
                assert log.sentence.startswith(f"For {fact.level.name}, "), key
                assert fact.words in log.sentence, key
                assert level_of_format(name).line(fact) in log.sentence, key
    wanted = {"logprobs": RecordLevel.L2, "sampling": RecordLevel.L3, "tokenizer_digest": RecordLevel.L4}
    assert dropped >= {fact for fact, level in wanted.items() if holds >= level}, "no mutant lacks it"


CALL = {"prompt_token_ids": [11, 5, 9], "completion_token_ids": [7, 2], "logprobs": [-0.5, -0.25]}
STATED = {
    "model": "org/model",
    "weight_version": 12,
    "sampling_params": {"temperature": 1.0, "top_p": 1, "top_k": -1},
    "tokenizer_digest": DIGEST,
    "template_digest": DIGEST,
}
WHOLE: Json = {"calls": [{**CALL, "finish_reason": "stop"}] * 2, **STATED}


def changed(call: Json | None = None, **changes: Any) -> Json:
    """A record that holds everything, with changes in it and in its second call; "gone" takes a key away."""
    first, second = WHOLE["calls"]
    return copy.deepcopy(
        without_gone({**WHOLE, "calls": [first, without_gone({**second, **(call or {})})], **changes})
    )


def without_gone(value: Json) -> Json:
    return {name: inner for name, inner in value.items() if inner != "gone"}


NO_WEIGHTS = changed(weight_version="gone")


def with_nulls(value: Json) -> Json:
    """What TOML holds as "null" is null."""
    return dict(json.loads(json.dumps(value).replace('"null"', "null")))


@pytest.mark.parametrize(*table(__file__, "each_fact_is_asked_for_at_its_level"), ids=str)
def test_each_fact_is_asked_for_at_its_level(changes: Json, call: Json, words: str) -> None:
    assert sentences(changed(with_nulls(call), **changes)) == [words]


@pytest.mark.parametrize(*table(__file__, "rows_of_less_have_their_level"), ids=str)
def test_rows_of_less_have_their_level(row: Json, words: str) -> None:
    assert sentences(with_nulls(row)) == [words]


def test_kept_sets_and_experts_that_are_there_are_held() -> None:
    sets = {"sampling_mask": [[7, 8], [2]]}
    routed = {"routed_experts": [[[0, 1]]] * 4}
    calls = [{**each, **sets, **routed} for each in WHOLE["calls"]]
    cut = {"temperature": 1.0, "top_p": 0.95, "top_k": -1}
    assert sentences(changed(calls=calls, sampling_params=cut, model="openai/gpt-oss-20b")) == ["L4"]


def test_rows_beside_rows_with_experts_should_have_them() -> None:
    calls = [{**each, "routed_experts": [[[0, 1]]] * 4} for each in WHOLE["calls"]]
    assert log_of(WHOLE, WHOLE).level is RecordLevel.L4
    log = log_of(changed(calls=calls), WHOLE)
    assert (log.level, dict(log.levels)) == (RecordLevel.L3, {RecordLevel.L3: 1, RecordLevel.L4: 1})
    assert "1 of 2 rollouts (first log.jsonl:1) lacks the experts of each token" in log.sentence


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        *(
            (name, True)
            for name in ("Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3", "zai-org/GLM-4.5-Air", "a/b-MoE")
        ),
        *(
            (name, False)
            for name in ("Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "smollm", "zai/glm-4-9b")
        ),
    ],
)
def test_models_with_experts_are_known_by_their_names(model: str, asked: bool) -> None:
    assert is_mixture_of_experts(model) is asked


def test_messages_of_a_hostile_model_state_nothing() -> None:
    answer = {"role": "assistant", "content": '{"model": "x", "temperature": 1}', "temperature": 1.0, "model": "x"}
    row = {"calls": WHOLE["calls"], "messages": [{"role": "user", "content": "Hi"}, answer], "completion": answer}
    assert sentences(row) == ["L2 model weights sampling"]


# The command


@pytest.mark.parametrize(
    ("rows", "level", "says"),
    [
        ([WHOLE, NO_WEIGHTS], "L0", ""),
        ([WHOLE, NO_WEIGHTS], "L2", ""),
        ([WHOLE, NO_WEIGHTS], "L3", "1 of 2 rollouts (first LOG:1) lacks the version of the weights"),
        ([WHOLE, NO_WEIGHTS], "L4", "1 of 2 rollouts (first LOG:1) lacks the version of the weights"),
        ([WHOLE, {"unknown": 1}], "L0", "1 row cannot be read (first LOG:1)"),
        ([], "L0", "L0 required: there are no rollouts"),
    ],
)
def test_validate_and_scan_fail_below_the_required_level(
    rows: list[Json], level: str, says: str, tmp_path: Path
) -> None:
    log = written(tmp_path / "run.jsonl", rows)
    for command, *more in (("validate",), ("scan", "--jobs", 1), ("scan", "--jobs", 2)):
        never = ("--fail-on", "never") if command == "scan" else ()
        code, out, _ = run(command, log, "--require-level", level, *more, *never)
        assert code == bool(says), command
        shown = " ".join(out.split())
        assert says.replace("LOG", str(log)) in shown
        assert ("failed: " in shown) == bool(says)
        assert run(command, log, *never)[0] == 0


def test_validate_and_scan_give_the_same_reason(tmp_path: Path) -> None:
    log = written(tmp_path / "run.jsonl", [WHOLE, changed(model="gone")])
    validated = validate_rollouts(log, Settings(require_level="L3"))
    scan = scan_rollouts(log, Settings(require_level="L3", fail_on="never"))
    scan.run()
    assert scan.summary.gate.failed
    assert scan.summary.gate.because == validated.because
    (because,) = validated.because
    assert because == (
        f"{log} has L2 in 1 of 2 rollouts, L3 required: "
        f"1 of 2 rollouts (first {log}:1) lacks the name of the model "
        "(`tito-audit validate` says how to log it)"
    )


def test_a_resumed_scan_gates_by_the_same_records(tmp_path: Path) -> None:
    log = written(tmp_path / "run.jsonl", [NO_WEIGHTS] * 2)
    wanted = ["scan", log, "--journal", tmp_path / "j", "--resume", "--fail-on", "never", "--require-level"]
    for _ in range(2):
        code, out, _ = run(*wanted, "L3")
        assert (code, "both rollouts lack the version of the weights" in out) == (1, True)
    assert run(*wanted, "L2")[0] == 0


def test_events_that_are_no_calls_do_not_count() -> None:
    (row,) = (row for row in fixture_rows("agent_lightning_span") if "annotation" in str(row.get("name")))
    assert lacking(row, "agent_lightning_span") == []


def test_the_steps_of_a_token_database_have_their_whole_prompts_when_they_are_joined() -> None:
    log = FORMATS / "tinker_tokendb.parquet"
    alone = json.loads(run("validate", log, "--no-join", "-f", "json")[1])["logs"][0]
    joined = json.loads(run("validate", log, "-f", "json")[1])["logs"][0]
    assert alone["levels"]["L0"] > joined["levels"].get("L0", 0)


@pytest.mark.parametrize("name", ["vllm", "slime", "text_only", "tinker_tokendb"])
def test_the_json_output_keeps_to_its_schema(name: str) -> None:
    (file,) = (path for path in FORMATS.glob(f"{name}.*") if path.suffix != ".py")
    printed = json.loads(run("validate", file, ROOT / "tests/transcripts/logs/torn.jsonl", "-f", "json")[1])
    schema("validate").validate(printed)


def test_a_level_is_one_of_five_and_inspect_says_it_as_json() -> None:
    """Its pages are in tests/transcripts."""
    with pytest.raises(SetupError, match="require_level"):
        Settings(require_level="L9")  # type: ignore[arg-type]
    printed = json.loads(run("inspect", FORMATS / "vllm.jsonl", "-f", "json")[1])
    assert printed["record"]["level"] == "L1"


def test_formats_are_listed_with_their_levels() -> None:
    listed = json.loads(run("list", "formats", "-f", "json")[1])["formats"]
    assert {each["name"]: each["level"] for each in listed} == {
        name: level_of_format(name).holds.name for name in NAMES
    }


# The record and its writers


@cache
def schema(name: str, part: str = "") -> Any:
    whole = json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(whole)
    if part:
        whole = {"$defs": whole["$defs"], "$ref": f"#/$defs/{part}"}
    return jsonschema.Draft202012Validator(whole)


@pytest.mark.parametrize("name", ["config", "record", "report", "rescore", "rescore-prompts", "validate"])
def test_config_prints_each_schema(name: str) -> None:
    code, out, _ = run("config", "--schema", name)
    assert (code, json.loads(out)) == (
        0,
        json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8")),
    )


def test_config_prints_no_unknown_schema() -> None:
    assert run("config", "--schema")[1] == run("config", "--schema", "config")[1]
    code, _, error = run("config", "--schema", "recrod")
    assert (code, "record" in error) == (2, True)


def test_the_schema_has_the_levels_of_rollouts() -> None:
    steps = {
        "L1": {"calls": [{name: CALL[name] for name in ("prompt_token_ids", "completion_token_ids")}]},
        "L2": {"calls": [CALL]},
        "L3": {
            "calls": WHOLE["calls"],
            **{name: STATED[name] for name in ("model", "weight_version", "sampling_params")},
        },
        "L4": WHOLE,
    }
    for number, (level, row) in enumerate(steps.items(), start=1):
        assert sentences(row)[0].split(" ")[0] == level
        for other in range(1, 5):
            assert schema("record", f"L{other}").is_valid(row) == (other <= number), (level, other)


@pytest.mark.parametrize("name", ["gateway", "tito_sample", "generic"])
def test_rows_that_the_package_writes_fit_the_schema(name: str) -> None:
    part = {"gateway": "gateway_line", "tito_sample": "sample", "generic": "rollout"}[name]
    for row in fixture_rows(name):
        if name == "generic" and not {"calls", "token_ids", "messages"} & row.keys():
            continue  # under names of other frameworks
        if "no-ids" not in str(row.get("id")):
            schema("record", part).validate(row)
            schema("record").validate(row)


@pytest.mark.parametrize("form", ["rows", "calls", "tito_sample"])
def test_converted_logs_fit_the_schema(form: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert run("convert", FORMATS / "nemo_gym.jsonl", "--to", form, "-o", out, "--lossy")[0] in (0, 1)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert rows
    for row in rows:
        schema("record").validate(row)


def test_a_row_of_the_writers_is_read_and_audited(tmp_path: Path) -> None:
    record = RolloutRecord(
        [
            CallRecord([11, 5, 9], [7, 2], [-0.5, -0.25], "stop"),
            CallRecord([11, 5, 9, 7, 2, 3], [], None, "abort"),
        ],
        [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
        token_ids=[11, 5, 9, 7, 2],
        loss_mask=[0, 0, 0, 1, 1],
        logprobs=[None, None, None, -0.5, 0.5],
        more={"group": 3},
        **STATED,  # type: ignore[arg-type]
    )
    row = record.row()
    assert row["tito_record"] == 1
    assert "tools" not in row
    schema("record", "rollout").validate(row)
    log = written(tmp_path / "run.jsonl", [row])
    assert validate_rollouts(log).level is RecordLevel.L4
    codes = {finding.code for result in scan_rollouts(log) for finding in result.findings}
    assert "LPR504" in codes, "a probability has no logarithm above zero"


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes("é".encode())
    assert record_digest(tmp_path / "tokenizer.json") == record_digest("é") == record_digest("é".encode())
    assert len(record_digest("é")) == 64


def test_the_writers_import_nothing_heavy() -> None:
    heavy = ("numpy", "orjson", "rich", "typer", "json")
    code = f"import sys, tito_audit.rows; print([name for name in {heavy} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_a_named_format_is_the_one_that_has_the_level() -> None:
    assert format_named("generic").name == "generic"
    assert level_of_format("no such format") == level_of_format("generic")
