"""`inspect`: what it says of every format's example log, of logs of nobody's format, and of hostile ones."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.command import run, written
from tests.forms import LOGS
from tests.tables import stored, table
from tests.tiers import examples
from tests.world import FORMATS, TOY
from tito_audit.format import Signature
from tito_audit.formats import all_formats, format_named, matched_keys, near_formats, pick_format
from tito_audit.inspect import Inspection, RelationKind, Role, as_flags, as_toml, inspect_log
from tito_audit.run.scan import scan_rollouts
from tito_audit.settings.model import Settings
from tito_audit.storage import open_log

OWN = stored(__file__, "OWN")


def own_rows(count: int = 12) -> list[dict[str, Any]]:
    """Rows of nobody's format: sequence, parts, mask, logprobs and a value a token, under names of their own."""
    chance = random.Random(1)
    rows = []
    for number in range(count):
        question = [chance.randrange(5, 900) for _ in range(chance.randrange(5, 20))]
        answer = [chance.randrange(5, 900) for _ in range(chance.randrange(4, 12))]
        length = len(question) + len(answer)
        rows.append(
            {
                "uid": number,
                "extra": {"question": question, "answer": answer, "everything": question + answer},
                "trained": [place >= len(question) for place in range(length)],
                "behaviour": [0.0] * len(question) + [-chance.random() for _ in answer],
                "critic": [chance.gauss(0, 1) for _ in range(length)],
                "shifted": [chance.gauss(0, 1) for _ in range(length - 1)],
                "compact": [-chance.random() for _ in answer],
                "n_tokens": length,
                "chat": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
            }
        )
    return rows


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return written(tmp_path / "own.jsonl", own_rows())


def relations(inspection: Inspection, scope: str = "") -> set[tuple[str, tuple[str, ...]]]:
    return {(str(relation.kind), relation.paths) for relation in inspection.relations.get(scope, ())}


def roles(inspection: Inspection) -> Mapping[str, tuple[str, str]]:
    return {path: (str(guess.role), guess.alignment) for path, guess in inspection.roles.items()}


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)
def test_every_example_log_is_told_explained_and_written_as_one_object(log: Path) -> None:
    code, out, err = run("inspect", log, "-f", "json", "-t", TOY)
    assert (code, err) == (0, "")
    page = json.loads(out)
    assert [entry["format"] for entry in page["taken_for"]] == [log.stem]
    assert page["rows"] == sum(entry["rows"] for entry in page["taken_for"])
    assert page["taken_for"][0]["told_by"]
    paths = [column["path"] for column in page["columns"]]
    assert len(paths) == len(set(paths)) > 0
    assert all(path in paths for relation in page["relations"] for path in relation["paths"])


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)
def test_the_page_of_every_example_log_fits_and_names_its_format_and_what_to_paste(log: Path) -> None:
    code, out, err = run("inspect", log, "--tokenizer", TOY)
    assert (code, err) == (0, "")
    assert f"\nRead as\n  {log.stem} (all " in out
    assert f"--format {log.stem}" in out or log.stem == "generic"
    assert out.splitlines()[-1].startswith(f"  tito-audit scan {log}")
    assert all(line.isprintable() and line == line.rstrip() for line in out.splitlines())


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)
def test_the_keys_that_a_signature_names_are_in_the_example_log(log: Path) -> None:
    (form,) = (known_form for known_form in all_formats() if known_form.name == log.stem)
    rows = [raw.value for raw in open_log(log) if raw.value is not None]
    assert form.signature.key_patterns, "a signature names keys"
    keys = {matched_keys(form, row) for row in rows}
    if form.name == "generic":
        assert all(keys)
        return
    lacking = [near_formats(row, (form,), None) for row in rows]
    assert any(near and near[0].fits and not near[0].lacks for near in lacking), form.signature


def test_the_two_formats_of_one_shape_name_each_other_with_the_key_that_is_missing() -> None:
    row = next(raw.value for raw in open_log(FORMATS / "tito_sample.jsonl") if raw.value)
    assert pick_format(row).name == "tito_sample"
    near = {near_format.format: near_format for near_format in near_formats(row, all_formats(), "tito_sample")}
    assert near["slime"].lacks == ("response_length",)
    assert near["slime"].has == ("tokens", "loss_mask")
    assert not near["slime"].fits
    row = {**row, "response_length": 7, "loss_mask": [1] * 7, "rollout_log_probs": [-0.5] * 7}
    assert pick_format(row).name == "slime"
    near = {near_format.format: near_format for near_format in near_formats(row, all_formats(), "slime")}
    assert near["tito_sample"].excess == ("response_length",)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("{a|b|c}; or {d} with {e.f}", "`a`, `b` or `c`; or `d` with `e.f`"),
        ("{a} of {b}, or {b}, {c}", "`a` of `b`, or `b`, `c`"),
        ("{a}, {b}, no {c}", "`a`, `b`, no `c`"),
        ("{a}; ids in {b[].c?}", "`a`; ids in `b[].c`"),
        ("{a} (a list), {b}; or words only", "`a` (a list), `b`; or words only"),
        ("{a|object: response}, without ids", "`a` or `object: response`, without ids"),
    ],
)
def test_a_signature_is_text_for_people(written: str, text: str) -> None:
    assert Signature(written).text == text


@pytest.mark.parametrize(*table(__file__, "a_row_is_told_by_the_first_way_whose_required_keys_it_has"))
def test_a_row_is_told_by_the_first_way_whose_required_keys_it_has(
    row: dict[str, Any],
    told: tuple[str, ...],
    has: tuple[str, ...],
    lacks: tuple[str, ...],
    excess: tuple[str, ...],
) -> None:
    written = "{a|b}, {c}; {x.m?}NO; or in words; or {e[].f}"
    form, closed = (
        replace(format_named("slime"), signature=Signature(written.replace("NO", no)), matches=lambda _: True)
        for no in ("", ", no {no}")
    )
    assert matched_keys(form, row) == tuple(told)
    (near,) = near_formats(row, (closed,), None)
    assert [near.has, near.lacks, near.excess] == [tuple(has), tuple(lacks), tuple(excess)]


def test_roles_and_relations_of_own_columns_come_from_values_and_lengths(own: Path) -> None:
    inspection = inspect_log(own)
    assert [shape.format for shape in inspection.formats] == [None]
    assert roles(inspection) == {path: tuple(said) for path, said in stored(__file__, "ROLES").items()}
    assert relations(inspection) == {
        (kind, tuple(paths)) for kind, listed in stored(__file__, "RELATIONS").items() for paths in listed
    }
    (mask,) = inspection.masks
    (sentinel,) = (column for column in inspection.sentinels if column.path == "behaviour")
    assert mask.encodings == {"bool": 12}
    assert (sentinel.mask, sentinel.value, sentinel.share, sentinel.inside) == ("trained", 0.0, 1.0, 0)


def test_what_is_pasted_reads_the_log_as_it_was_shown(own: Path, tmp_path: Path) -> None:
    code, out, _ = run("inspect", own)
    assert code == 0
    words = out.splitlines()[-1].split()
    assert words[:3] == ["tito-audit", "scan", str(own)]
    flags = words[3:]
    assert flags == " ".join(as_flags(OWN)).split()
    assert "Reads all 12 rows: 12 training rows, 12 calls and messages in 12." in out
    assert "A scan of these rows finds no errors" in out
    pasted = run("scan", own, *flags, "--report", "json", "--fail-on", "never")[1]
    start = out.index("[tool.tito-audit.map]")
    toml = "\n".join(line for line in out[start:].splitlines() if " = " in line or "[" in line)
    (tmp_path / "pyproject.toml").write_text(toml, encoding="utf-8")
    stored = run("scan", own, "--config", tmp_path / "pyproject.toml", "--report", "json", "--fail-on", "never")[1]
    for text in (pasted, stored):
        summary = json.loads(text)["summary"]
        assert summary["rows_unreadable"] == 0
        assert summary["formats"] == {"generic": 12}
        assert "LPR501" not in summary["findings"]


def test_a_row_in_which_a_relation_breaks_is_named_and_hides_it_nowhere_else(tmp_path: Path) -> None:
    rows = own_rows()
    rows[7]["behaviour"].pop()
    inspection = inspect_log(written(tmp_path / "broken.jsonl", rows))
    (equal,) = (
        relation
        for relation in inspection.relations[""]
        if relation.kind is RelationKind.EQUAL and "behaviour" in relation.paths
    )
    assert (equal.items, equal.of, equal.except_row) == (11, 12, 7)
    assert inspection.roles["behaviour"].role is Role.LOGPROBS
    assert inspection.trial.misfits == {"logprobs": 1}
    assert "(11 of 12, not in row 7)" in " ".join(run("inspect", tmp_path / "broken.jsonl")[1].split())


def test_columns_inside_calls_and_samples_are_related_call_by_call_and_sample_by_sample(tmp_path: Path) -> None:
    calls = [{"prompt_ids": [9] * n, "out_ids": [7, 8] * n, "lp": [-0.5, -0.25] * n} for n in (3, 4, 5)]
    inspection = inspect_log(written(tmp_path / "calls.jsonl", [{"steps": calls}] * 2))
    assert relations(inspection, "steps[]") == {("equal", ("steps[].out_ids", "steps[].lp"))}
    assert roles(inspection)["steps[].out_ids"] == ("completion ids", "call")
    assert roles(inspection)["steps"] == ("calls", "")
    group = {"seqs": [[5, 6, 7], [5, 6]], "weights": [[0, 1, 1], [0, 1]]}
    inspection = inspect_log(written(tmp_path / "group.jsonl", [group, group]))
    assert relations(inspection, "[*]") == {("equal", ("seqs[]", "weights[]"))}
    assert roles(inspection)["weights[]"] == ("mask", "full")
    assert "one list per sample" in " ".join(run("inspect", tmp_path / "group.jsonl")[1].split())


def test_one_number_a_row_is_a_logprob_by_its_name_only(tmp_path: Path) -> None:
    rows = [{"seq": [5, 6, 7 + n], "lp": [-0.5] * 3, "adv": [-0.1 * n - 0.1] * 3} for n in range(3)]
    inspection = inspect_log(written(tmp_path / "constant.jsonl", rows))
    assert roles(inspection)["lp"] == ("logprobs", "full")
    assert roles(inspection)["adv"] == ("per token", "full")


def test_a_parquet_file_shows_the_types_of_its_schema(tmp_path: Path) -> None:
    table = pa.table(
        {
            "seq": pa.array([[5, 6, 7], [8, 9, 10, 11]], pa.list_(pa.int32())),
            "meta": pa.array([{"lp": [-0.5, -0.25, -0.75]}, None], pa.struct({"lp": pa.list_(pa.float32())})),
            "chat": pa.array(['[{"role": "user", "content": "hi"}]'] * 2),
        }
    )
    parquet.write_table(table, tmp_path / "log.parquet")
    inspection = inspect_log(tmp_path / "log.parquet")
    types = {column.path: column.storage_type for column in inspection.columns}
    assert types == {
        "seq": "list<element: int32>",
        "meta": "struct<lp: list<element: float>>",
        "meta.lp": "list<element: float>",
        "chat": "string",
    }
    assert inspection.roles["chat"].role is Role.MESSAGES
    assert inspection.mapping["token_ids"] == "seq"


def test_only_so_many_rows_are_looked_at_and_the_page_says_so(own: Path) -> None:
    inspection = inspect_log(own, rows=5)
    assert (inspection.rows, inspection.stopped) == (5, True)
    assert "· the first 5 rows" in run("inspect", own, "--rows", "5")[1]
    assert not inspect_log(own, rows=12).stopped


WIDE = examples(1_000, 10_000)
HOSTILE: dict[str, str] = {
    "escapes in names": json.dumps({"tok\x1b]0;x\x07\u202e'en\"s\n": [5, 6, 7, 8], "\x1b[31mmask": [0, 0, 1, 1]}),
    "escapes in values": json.dumps({"token_ids": [5, 6, 7], "model": "\x1b[31mred\x07\u202e\n", "m": ["\x1b"]}),
    "no rows": "",
    "blank lines": "\n \n\n",
    "an empty object": "{}",
    "no objects": "[1, 2]\nnull\n3",
    "no JSON": '{bad\n{"a": 1}',
    "every type": "\n".join(
        json.dumps({"tokens": value})
        for value in (
            [1, 2, 3], "abc", {"a": 1}, None, [1, "2", None, [3]], [2**70, 1], [True, 2], [["a"], {"b": 1}], 3.5,
            ["1", "2"], [], [[]], [[], [5, 6, 7]], [None], [None, 1.5], [{"a": [1]}, None], [[1, 2], None, "x"],
            2**80,
        )
    ),
    "numbers that are none": '{"seq": [5, 6, 7], "lp": [NaN, Infinity, -Infinity]}\n{"seq": [1e999, 2], "lp": []}',
    "only NaN": '{"lp": [NaN, NaN]}',
    "deep objects": '{"a":' * 100 + "[5, 6, 7]" + "}" * 100,
    "deep lists": '{"a":' + "[" * 100 + "5" + "]" * 100 + "}",
    "deeper than JSON is read": '{"a":' * 5000 + "1" + "}" * 5000,
    "keys that are paths": json.dumps({"a.b": [5, 6, 7], "a": {"b": [8, 9]}, "": [5, 6], "[]": {"": 1}, "a[]": 1}),
    "an offset beyond everything": '{"seq": [5, 6, 7], "off": [0.0, 1e300], "n_len": 99999999999999999999}',
    "wide": json.dumps({f"column {number}": number for number in range(WIDE)}),
    "wide with lists": json.dumps({f"c{number}": [number + 3, 4, 9] for number in range(WIDE)}),
    "too wide": json.dumps({f"c{number}": number for number in range(3 * WIDE)}),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_log_is_shown_on_printable_lines_and_never_ends_in_a_traceback(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tito_audit.inspect.columns.MOST_COLUMNS", 2 * WIDE)
    log = tmp_path / "log.jsonl"
    log.write_text(HOSTILE[name] + "\n", encoding="utf-8")
    code, out, err = run("inspect", log, "-t", TOY)
    assert (code, err) == (0, "")
    assert all(line.isprintable() for line in out.splitlines())
    assert len(out.splitlines()) < 250
    code, out, err = run("inspect", log, "--output-format", "json")
    assert (code, err) == (0, "")
    assert json.loads(out)["file"] == str(log)
    assert "\x1b" not in out


def test_names_that_act_on_a_terminal_are_quoted_for_the_shell_and_for_toml(tmp_path: Path) -> None:
    name = "tok\x1b]0;x\x07\u202e'en\"s\\ \U0001f600\U000e0001"
    mapping = {"token_ids": name, "loss_mask": "plain"}
    toml = as_toml(mapping, "")
    assert tomllib.loads("\n".join(toml)) == {"map": mapping}
    assert all(line.isprintable() for line in [*toml, *as_flags(mapping)])
    assert as_flags(mapping)[1] == "--map loss_mask=plain"


def test_a_scan_says_what_a_file_was_read_as_and_by_which_keys(own: Path) -> None:
    log = FORMATS / "slime.jsonl"
    out = run("scan", log, "--format", "auto")[1]
    assert "\nread as slime: tokens, response_length, loss_mask (14 rows)\n" in out
    out = run("scan", own, *(part for flag in as_flags(OWN) for part in flag.split()))[1]
    assert "\nread as generic: token_ids, prompt_ids, completion_ids, loss_mask, logprobs, messages (12" in out


def test_a_file_of_several_formats_is_said_as_such(tmp_path: Path) -> None:
    plain = {"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    call = {"input_ids": [5, 6], "output_ids": [7, 8], "logprobs": [-0.5, -0.5], "finish_reason": "stop"}
    mixed = written(tmp_path / "mixed.jsonl", [plain, plain, call, plain])
    summary = json.loads(run("scan", tmp_path, "--report", "json")[1])["summary"]
    assert summary["taken"][str(mixed)]["tito_call"] == {
        "rows": 1,
        "first_row": 2,
        "told_by": ["input_ids", "output_ids", "logprobs", "finish_reason"],
    }


@pytest.mark.parametrize("jobs", [1, 3])
def test_what_files_were_read_as_does_not_depend_on_the_number_of_processes(tmp_path: Path, jobs: int) -> None:
    plain = {"token_ids": list(range(5, 90)), "loss_mask": [1] * 85}
    call = {"input_ids": [5, 6], "output_ids": [7, 8], "logprobs": [-0.5, -0.5], "finish_reason": "stop"}
    rows = [call if number in (30, 31, 77) else plain for number in range(120)]
    scan = scan_rollouts(written(tmp_path / "log.jsonl", rows), Settings(jobs=jobs))
    scan.chunk_bytes = 4_000
    for _ in scan:
        pass
    (formats,) = scan.summary.taken.values()
    assert {name: (reading.rows, reading.first_row) for name, reading in formats.items()} == {
        "generic": (117, 0),
        "tito_call": (3, 30),
    }
    assert formats["tito_call"].told_by == ("input_ids", "output_ids", "logprobs", "finish_reason")


def test_a_log_of_own_columns_goes_from_a_red_scan_over_inspect_to_a_gate(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.parent)
    code, page, _ = run("scan", own.name)
    assert code == 1
    assert f"  tito-audit inspect {own.name}   its columns, and a mapping to paste" in page.splitlines()
    assert "tito-audit show" not in page
    pasted = run("inspect", own.name)[1].partition("[tool.tito-audit.map]")[2]
    table = [line.strip() for line in pasted.splitlines() if " = " in line]
    (own.parent / "tito-audit.toml").write_text("[map]\n" + "\n".join(table))
    page = run("scan", own.name)[1]
    assert "REC001" not in page
    assert "read as generic" in page


def test_columns_that_could_name_a_conversation_are_counted_and_what_joining_gives(own: Path) -> None:
    """As JSON; the pages are in tests/transcripts/inspect.txt."""
    called = (("a", [1, 2], [3], 0), ("b", [7], [8], 0), ("a", [1, 2, 3, 4], [5], 1), (None, [6], [6], None))
    rows: list[dict[str, Any]] = [
        {"session_id": session, "prompt_ids": prompt, "completion_ids": completion, "metadata": {"taskId": task}}
        for session, prompt, completion, task in called
    ]
    log = written(own.with_name("calls.jsonl"), [*rows, {"token_ids": [1, 2], "loss_mask": [0, 1]}])
    seen, alone, whole = (
        json.loads(run("inspect", *words, "-f", "json")[1])["calls"]
        for words in ((log, "--session", "session_id"), (log, "--no-join"), (own,))
    )
    keys = [{"path": path, "rows": 3, "values": 2} for path in ("session_id", "metadata.taskId")]
    assert (seen["rows"], seen["keys"]) == (4, [{**keys[0], "used": True}, {**keys[1], "used": False}])
    joined = seen["joined"]
    assert (joined["rows"], joined["conversations"], joined["alone"]) == (2, 1, 2)
    assert (alone["joined"], alone["keys"]) == (None, [{**key, "used": False} for key in keys])
    assert whole is None, "whole rollouts are no single calls"
